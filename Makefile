# make demo | test | test-unit | lint | docs | chaos | plug-ins | bench | compat | foreign | clean
#
# PYTHON=python3.12   the interpreter that .venv is made with, 3.11 or newer
# TORCH=2.11.0        another torch than the one of constraints.txt
# Both are read when .venv is made; remove .venv to change them.

PYTHON ?= python3
TORCH ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -q -q --disable-pip-version-check -c $(VENV)/constraints.txt -e

# pyright would ask the package index for a newer pyright at each start.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: demo test test-unit lint style types docs chaos plug-ins bench compat foreign clean
.DEFAULT_GOAL := test

demo: $(VENV)/.demo
	$(BIN)/python -m benchmarks.demo --output runs/demo

# Types are checked by `make lint`.
test: style
	$(BIN)/pytest -q -n 2 --dist worksteal --durations=10

# Tests without ranks, kernels or training: what to run while you work.
test-unit: $(VENV)/.installed
	$(BIN)/pytest -q -n 2 --dist worksteal -m unit tests/core tests/cost tests/planner tests/compiler tests/cli

lint: style types
	$(BIN)/pytest -q tests/test_layering.py tests/test_language.py

style: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell

types: $(VENV)/.installed
	$(BIN)/pyright --pythonpath $(BIN)/python

# The documentation site, in build/site. A broken link or a warning is an error.
docs: $(VENV)/.docs
	$(BIN)/python docs/site/build.py

# A training run that is killed, stopped and damaged for two minutes, and must end as if it had not.
chaos: $(VENV)/.installed
	$(BIN)/python -m tests.hostile.chaos --seed 0 --faults 30 --limit-s 120

# The plug-ins with the newest version of each framework that this Python can run, except those of
# `make test`. Installs each framework in a temporary environment.
plug-ins: $(VENV)/.installed
	$(BIN)/python benchmarks/compatibility.py --gate

bench: $(VENV)/.installed
	$(BIN)/halley bench layer

# The plug-ins with versions of their frameworks, each in an environment of its own.
# Needs python3.12 on PATH, and 12 GB in the temporary folder for two environments with torch 2.15.0.
compat: $(VENV)/.installed
	$(BIN)/python benchmarks/compatibility.py

# The model tests of the installed Transformers, with its experts and with Halley's. Fails if a test
# has another outcome with Halley. Packages of other frameworks have no tests of expert parallelism
# that run on CPUs.
foreign: $(VENV)/.installed
	$(BIN)/python benchmarks/transformers_suite.py

clean:
	rm -rf build dist .cache .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# What the demo needs; the tools of developers come with the other targets.
$(VENV)/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo 'error: Halley needs Python 3.11 or newer, and PYTHON=$(PYTHON) is not: make PYTHON=python3.12' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
	$(PIP_INSTALL) '.[plot]'
	touch $@

$(VENV)/.installed: $(VENV)/.demo
	$(PIP_INSTALL) '.[dev,plot]'
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(PIP_INSTALL) '.[docs]'
	touch $@
