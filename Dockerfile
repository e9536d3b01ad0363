# syntax=docker/dockerfile:1
# One image for server, workers and commands, from requirements.lock. Two targets:
#   docker build --target cpu  --build-arg TORCH_INDEX=<index of CPU builds of torch> -t forecastle:cpu .
#   docker build --target cuda -t forecastle:cuda .      (the package index's own torch: CUDA on Linux x86-64)
# Without TORCH_INDEX both hold the same torch; with it the CPU image is some gigabytes smaller. For an image that is the
# same to the byte of its base, pin PYTHON by digest: --build-arg PYTHON=3.12-slim@sha256:...
ARG PYTHON=3.12-slim

FROM python:${PYTHON} AS lock
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
RUN python -m venv /venv
COPY requirements.lock ./
# What only tests and checks need stays out
RUN grep -vE '^(pytest|ruff|mypy|hypothesis|onnx|hadolint|docker-compose|kubernetes-validate|importlib_resources|selenium|trio|outcome|wsproto|execnet)' requirements.lock \
    > runtime.lock

FROM lock AS build-cuda
RUN /venv/bin/pip install -r runtime.lock
COPY pyproject.toml README.md ./
COPY flows flows
COPY tasks tasks
COPY models models
COPY deployments deployments
RUN /venv/bin/pip install --no-deps --no-build-isolation .

FROM lock AS build-cpu
ARG TORCH_INDEX=
RUN if [ -n "$TORCH_INDEX" ]; then /venv/bin/pip install --no-deps --index-url "$TORCH_INDEX" "$(grep '^torch==' runtime.lock)"; fi \
    && /venv/bin/pip install -r runtime.lock
COPY pyproject.toml README.md ./
COPY flows flows
COPY tasks tasks
COPY models models
COPY deployments deployments
RUN /venv/bin/pip install --no-deps --no-build-isolation .

FROM python:${PYTHON} AS base
RUN useradd --uid 10001 --create-home forecastle && mkdir /data && chown forecastle /data
ENV PATH=/venv/bin:$PATH FORECASTLE_HOME=/data PYTHONUNBUFFERED=1
USER 10001
WORKDIR /data
VOLUME /data
# Server, worker and command alike: the installed project starts. compose.yaml has a closer check for each service.
HEALTHCHECK --interval=60s --timeout=20s CMD ["forecastle", "--help"]
ENTRYPOINT ["forecastle"]
CMD ["--help"]

FROM base AS cpu
COPY --from=build-cpu /venv /venv

FROM base AS cuda
COPY --from=build-cuda /venv /venv
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
