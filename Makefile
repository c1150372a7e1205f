# `make demo ARGS="seed=1"` and `make test ARGS="tests/objectives"` hand words on.
# Everything goes through `make setup`, which does nothing where everything is set up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
# On a terminal pip shows its progress; a log gets one line per phase.
QUIET ?= $(if $(MAKE_TERMOUT),,-qq)

.PHONY: setup demo quick test openenv chaos check site tables notebook format clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else f"dapo-rl needs Python 3.11 to 3.13, and $(PYTHON) is {v.major}.{v.minor}; use make PYTHON=python3.12")'
	@test -x $(BIN)/python || { echo "1/3 creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "2/3 installing $$(grep -c == requirements.lock) packages of requirements.lock: some minutes and GB the first time"
	@$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -r requirements.lock
	@echo "3/3 installing dapo-rl"
	@$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

demo: setup
	$(BIN)/dapo train $(ARGS)

# Compiled once for all processes that tests start, also where Python is told to write no bytecode. For two cores: the
# third process has the tests that mostly wait (tests/longest_first.py).
test: setup
	@$(BIN)/python -m compileall -q src tests
	$(BIN)/python -m pytest -n 3 --dist loadfile $(ARGS)

# OpenEnv's own server in an environment of its own, for the tests of its client; without it, they are skipped.
openenv: build/openenv/.set-up

build/openenv/.set-up: tests/openenv_requirements.txt
	$(PYTHON) -m venv build/openenv
	build/openenv/bin/python -m pip install $(QUIET) --disable-pip-version-check --no-deps -r tests/openenv_requirements.txt
	@touch $@

# What needs no process, browser, Ray, Slurm or training run: for a look before each commit.
quick: check
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow" $(ARGS)

# A run that is killed twenty times ends as the one that was not.
chaos: setup
	$(BIN)/python tests/e2e/chaos.py $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as web pages, in build/site; a broken link is an error. With -q, mkdocs would overlook them.
site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	$(BIN)/python tools/site_check.py build/site

# The tables of docs/losses.md, from the entries of dapo_rl.objectives.
tables: setup
	$(BIN)/python tools/losses_tables.py

# Runs examples/quickstart.ipynb and stores its outputs in it, which are what the site shows.
notebook: setup
	$(BIN)/python tools/run_notebook.py examples/quickstart.ipynb

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
