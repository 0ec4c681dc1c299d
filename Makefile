# Everything starts from a fresh clone: each target sets up what it needs. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up

# few threads that sleep when idle: the machine may be small, and busy waiting would slow everything else down
TEST_ENV := OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench sim clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## Build .venv with everything (again only when the dependencies change)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (about a minute with a warm cache)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,trace,dev]'
	@touch $@

demo: setup ## Run the main job: encode in one process, use the rows in another, compare (ARGS=--json)
	@$(TEST_ENV) $(BIN)/tectum demo $(ARGS)

test: setup ## Run the tests (ARGS='-k name')
	@$(TEST_ENV) $(BIN)/python -m pytest $(ARGS)

lint: setup ## Check style, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache | tail -n 4

format: setup ## Format the code
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --fix --quiet .

bench: setup ## Measure the server against its targets (ARGS='--rounds 1 --seconds 2 --null-requests 5000')
	@$(TEST_ENV) $(BIN)/python -m bench $(ARGS)

sim: setup ## Simulate the lifecycle for long (ARGS='--seeds 200000')
	@$(BIN)/python -m tests.sim --seeds 20000 $(ARGS)

clean: ## Remove what the targets made
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
