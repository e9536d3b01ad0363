# syntax=docker/dockerfile:1
# One image for workers and commands. The package index's own torch build (CUDA on Linux x86-64) is the default; for a
# small CPU image name an index of CPU builds: docker build --build-arg TORCH_INDEX=<address> .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app
RUN python -m venv /venv
COPY requirements.lock ./
RUN if [ -n "$TORCH_INDEX" ]; then /venv/bin/pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' requirements.lock)"; fi \
    && grep -vE '^(pytest|pytest-timeout|ruff|mypy|mypy_extensions|hypothesis)==' requirements.lock > runtime.lock \
    && /venv/bin/pip install -r runtime.lock
COPY pyproject.toml README.md ./
COPY flows flows
COPY tasks tasks
COPY models models
COPY deployments deployments
RUN /venv/bin/pip install --no-deps --no-build-isolation .

FROM python:${PYTHON}-slim
RUN useradd --uid 10001 --create-home forecastle && mkdir /data && chown forecastle /data
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH FORECASTLE_HOME=/data PYTHONUNBUFFERED=1
USER forecastle
WORKDIR /data
VOLUME /data
HEALTHCHECK --interval=60s --timeout=20s CMD ["forecastle", "--help"]
ENTRYPOINT ["forecastle"]
CMD ["--help"]
