# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# An exact release: a range may pull a CUDA build of several GB.
TORCH ?= torch==2.13.0
DEMO ?= examples/tiny-qwen3moe-gptq-sym-g128
BIN = $(VENV)/bin
READY = $(VENV)/ready

.PHONY: help setup demo test env-ipex env-onednn test-ipex test-onednn lint format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(READY) ## make the virtual environment and build the native core

$(READY): pyproject.toml CMakeLists.txt $(shell find csrc -type f)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test,dev,plot,serve]'
	@touch $@

demo: setup ## generate text from the small checkpoint that the repository carries
	$(BIN)/int4moe generate $(DEMO) --prompt "The statement is used to" --max-new-tokens 24

test: setup ## run the test suite
	$(BIN)/python -m pytest -q -n 2 tests

env-ipex: ## make the environment with IPEX 2.8.0 and torch 2.8.0 (about 7 GB, outside the repository; INT4MOE_ENVS)
	@tools/env-ipex.sh

env-onednn: ## make the environment with PyPI's oneDNN (about 3.5 GB, outside the repository; INT4MOE_ENVS)
	@tools/env-onednn.sh

test-ipex: ## run the test suite on torch 2.8.0, with the ipex backend
	@tools/ci-ipex.sh

test-onednn: ## run the tests of the onednn backend on PyPI's oneDNN
	@tools/ci-onednn.sh

test-xeon: setup ## test AVX-512 and AMX on an emulated Xeon (as root, on Debian or Ubuntu; about 10 minutes)
	PYTHON=$(BIN)/python tools/ci-xeon.sh

lint: setup ## check style
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: setup ## put style right
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean: ## remove the environment and build files
	rm -rf $(VENV) build dist *.egg-info
