# Everything starts from a fresh clone: each target sets up what it needs. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
VLLM := .venv-vllm

# few threads that sleep when idle: the machine may be small, and busy waiting would slow everything else down
TEST_ENV := OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help setup demo test compat-vllm lint format bench sim clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## Build .venv with everything (again only when the dependencies change)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (about a minute with a warm cache)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,dev]'
	@touch $@

demo: setup ## Run the main job: encode in one process, use the rows in another, compare (ARGS=--json)
	@$(TEST_ENV) $(BIN)/tectum demo $(ARGS)

test: setup ## Run the tests (ARGS='-k name')
	@$(TEST_ENV) $(BIN)/python -m pytest $(ARGS)

compat-vllm: setup $(VLLM)/.set-up ## Run the tests with a stock vLLM, in an environment of its own (3.4 GB)
	@$(TEST_ENV) COMPAT_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) $(BIN)/python -m pytest tests/compat_vllm --timeout 900 $(ARGS)

$(VLLM)/.set-up: tests/compat_vllm/make-env tests/compat_vllm/constraints.txt
	@echo "setting up $(VLLM) (about three minutes)"
	@rm -rf $(VLLM) && tests/compat_vllm/make-env $(PYTHON) $(VLLM)
	@touch $@

lint: setup ## Check style, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache | tail -n 4

format: setup ## Format the code
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --fix --quiet .

bench: setup ## Measure the server against the bare loop (ARGS='--rounds 5')
	@$(TEST_ENV) $(BIN)/python -m bench $(ARGS)

sim: setup ## Simulate the lifecycle for long (ARGS='--seeds 200000')
	@$(BIN)/python -m tests.sim --seeds 20000 $(ARGS)

clean: ## Remove what the targets made
	@rm -rf $(VENV) $(VLLM) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
