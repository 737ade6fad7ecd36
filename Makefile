# `make` alone explains itself. Everything lives in $(VENV); nothing is installed elsewhere.
#
#   make serve MODEL=openai-community/gpt2 PORT=8080 ARGS="--dtype bfloat16"
#   make serve PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"   # torch without CUDA

PYTHON   ?= python3
PIP_ARGS ?=
VENV     := .venv

# Empty: the server's own default, or its twin in the environment (STEPSCOPE_MODEL, ...).
MODEL    ?=
PORT     ?=
DATA_DIR ?=
ARGS     ?=

PY          := $(VENV)/bin/python
SERVE_FLAGS  = $(if $(MODEL),--model '$(MODEL)') $(if $(PORT),--port '$(PORT)') \
               $(if $(DATA_DIR),--data-dir '$(DATA_DIR)')

# What each stamp installs beside the product itself.
EXTRAS_runtime  :=
EXTRAS_dev      := [dev]
EXTRAS_bench    := [bench]
EXTRAS_llamacpp := [bench,llamacpp]
EXTRAS_lens     := [dev,lens]
EXTRAS_ops      := [ops]

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help serve demo test check format bench llamacpp soak lens-test docker-check docker-test clean

help: ## say what can be made (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  Settings, as in 'make serve PORT=8080':"
	@echo "    MODEL PORT DATA_DIR   of the server; ARGS: more flags of the command that is run"
	@echo "    PYTHON=$(PYTHON) VENV=$(VENV)   PIP_ARGS: more flags of pip, such as another index"

serve: $(VENV)/.runtime ## run the server on 127.0.0.1:8000 until ctrl-c
	exec $(PY) -m server serve $(SERVE_FLAGS) $(ARGS)

demo: $(VENV)/.runtime ## start a server, step a session through it, show what comes, stop it
	$(PY) -m server demo $(if $(MODEL),--model '$(MODEL)') $(ARGS)

test: $(VENV)/.dev ## the tests, with coverage
	$(PY) -m pytest -m 'not slow and not lens' --cov --cov-report=term $(ARGS)

check: $(VENV)/.dev ## style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.dev ## let ruff put the style right
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(VENV)/.bench ## measure against the peers, write bench/RESULTS.md (half an hour)
	$(PY) -m bench $(ARGS)

llamacpp: export CMAKE_ARGS ?= -DGGML_NATIVE=ON
llamacpp: $(VENV)/.llamacpp ## make llama.cpp one more peer of `make bench` (compiles ten minutes)

soak: $(VENV)/.dev ## the slow tests
	$(PY) -m pytest -m slow $(ARGS)

lens-test: $(VENV)/.lens ## the points and patching grids against TransformerLens (a large install)
	$(PY) -m pytest -m lens $(ARGS)

docker-check: $(VENV)/.ops ## style of the image's files; needs no engine
	$(VENV)/bin/hadolint docker/Dockerfile
	$(VENV)/bin/docker-compose -f docker/compose.yaml config --quiet

docker-test: $(VENV)/.dev $(VENV)/.ops ## build the image and run it, on an engine of its own (root, Debian)
	$(PY) -m docker.test $(ARGS)

clean: ## remove the environment and the caches; never DATA_DIR
	rm -rf '$(VENV)' build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment without a working pip was interrupted, moved, or lost its interpreter: begin anew.
$(VENV)/.%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	    "Stepscope needs Python 3.11 or newer, this is " + sys.version.split()[0] \
	    + ". Name another one: make PYTHON=python3.12 ...")'
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear '$(VENV)'
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.$(EXTRAS_$*)'
	@touch $@
