# Everything a newcomer needs is one of these; each sets up what it needs by itself.  `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
TEST_ARGS ?=
LEAGUE_ARGS ?=
HANGS_ARGS ?=
BENCH_ARGS ?= --sizes 1,deep --steps 400 --repeats 3

TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' requirements/test.txt)
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
RUN_READY := $(VENV)/.run-ready
LINT_READY := $(VENV)/.lint-ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak ray lint format types contracts bench league hangs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(RUN_READY) $(LINT_READY) ## Make the virtual environment with everything in it

demo: $(RUN_READY) ## Train on 4 ranks here, one of them slow, and let Stepscope name it
	$(BIN)/stepscope demo $(DEMO_ARGS)

test: $(RUN_READY) ## Run the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TEST_ARGS)

soak: $(RUN_READY) ## Run the long tests that `make test` leaves out (each has a near relation there)
	$(BIN)/python -m pytest -m soak $(TEST_ARGS)

ray: $(RUN_READY) ## Run the tests of --engine ray on a real Ray of this machine (installs 240 MB)
	$(PIP) -r requirements/ray.txt
	$(BIN)/python -m pytest tests/traces/test_trace_engine.py -k ray -rs

lint: $(LINT_READY) ## Check style and formatting (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(LINT_READY) ## Put the code into its one format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

types: $(LINT_READY) ## Check types (mypy, strict)
	$(BIN)/mypy

contracts: $(LINT_READY) ## Check who imports whom (import-linter)
	@PYTHONPATH=src $(BIN)/lint-imports

bench: $(RUN_READY) ## Measure overhead and throughput here, in short; docs/benchmarks.md has the long ones
	$(BIN)/python bench/overhead.py $(BENCH_ARGS)
	$(BIN)/python bench/throughput.py --seconds 3
	@echo "How these are measured, and the published figures: docs/benchmarks.md"

league: $(RUN_READY) ## Score the verdicts against injected faults (45 minutes; LEAGUE_ARGS="--synthetic 5": one)
	PYTHONPATH=bench $(BIN)/python -m league $(LEAGUE_ARGS)

hangs: $(RUN_READY) ## Stop real jobs in every way and see who is named, and when (30 minutes; HANGS_ARGS="--only skip": one)
	$(BIN)/python bench/hangs.py $(HANGS_ARGS)

clean: ## Remove the virtual environment, caches and build output (never runs/)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone, so that whichever build of it this machine offers is settled before anything else is resolved.
$(RUN_READY): requirements/test.txt pyproject.toml | $(BIN)/python
	@echo "Setting up $(VENV) (once; torch is large) …"
	@$(PIP) $(TORCH)
	@$(PIP) -r requirements/test.txt
	@$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

$(LINT_READY): requirements/lint.txt $(RUN_READY)
	@$(PIP) -r requirements/lint.txt
	@touch $@
