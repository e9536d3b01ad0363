# `make run` and `make test` do all set-up themselves. Python 3.11 to 3.13 and make are all that must be there.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do "$$p" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
# A module stays in one process; the third fills the time in which the served set-up is waited for
IN_PARALLEL := -n 3 --dist loadscope --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help venv run serve test test-full lint bench lock clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

venv: ## .venv from the lock, made again when lock, project file or Python changed
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11, 3.12 or 3.13 is needed; name it with: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	want=$$(cat requirements.lock pyproject.toml | cksum; "$(PYTHON)" -c 'import sys; print(sys.version)')
	if [ "$$(cat .venv/.stamp 2>/dev/null)" = "$$want" ]; then exit 0; fi
	exec 9>.venv.lock; if command -v flock >/dev/null; then flock 9; fi
	if [ "$$(cat .venv/.stamp 2>/dev/null)" = "$$want" ]; then exit 0; fi
	echo "setting up .venv from requirements.lock" >&2
	rm -f .venv/.stamp
	"$(PYTHON)" -m venv --clear .venv
	$(BIN)/python -m pip install -q -r requirements.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	echo "$$want" > .venv/.stamp

run: venv ## the whole job on real data: S3 server, demo features, both models, published and verified
	@$(BIN)/forecastle run

serve: venv ## server, database, S3 and workers on this machine, until Ctrl-C (make serve PORT=4200 GPUS=1)
	@exec $(BIN)/python -m deployments.serve --port $(or $(PORT),4200) --gpus $(or $(GPUS),1)

test: venv ## every promise once
	@$(BIN)/python -m pytest $(IN_PARALLEL) -m 'not slow'

test-full: venv ## the full counts
	@$(BIN)/python -m pytest $(IN_PARALLEL)

lint: venv ## ruff and mypy
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv ## seconds and memory of each stage of the main job
	@$(BIN)/python -m benchmarks.main_job

lock: ## renew requirements.lock from what .venv holds
	@{ sed -n '/^#/p' requirements.lock; $(BIN)/python -m pip freeze --all --exclude-editable | sed 's/+cpu$$//' | grep -viE '^(nvidia|triton|pip==|wheel==)' ; } > .lock.new
	mv .lock.new requirements.lock

clean: ## remove .venv and caches; .forecastle (runs, models, keys) stays
	@rm -rf .venv .venv.lock build ./*.egg-info .pytest_cache .ruff_cache .mypy_cache
