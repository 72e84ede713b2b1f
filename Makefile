PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTS ?=
FUZZ ?= 50

.DEFAULT_GOAL := help
.PHONY: help setup demo check test accept bench docs fuzz interop

help: ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## make .venv with the pinned requirements and this package in it

$(STAMP): requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: setup ## consolidate a real ResNet-50, train it beside eager, save and load it
	$(BIN)/python examples/quickstart.py

check: setup ## formatting, lint, types, size and complexity
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/size.py

test: setup ## every test
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(TESTS)

accept: setup ## rewrite the graph snapshots with what the code does now (read the diff)
	EXPECTTEST_ACCEPT=1 $(BIN)/python -m pytest -q tests/rewriting/test_snapshots.py tests/rewriting/test_expect.py $(TESTS)

bench: setup ## measure the claims of the README: a table, and benchmarks/results.json
	$(BIN)/python benchmarks/run.py

docs: setup ## write docs/REFERENCE.md from the code
	$(BIN)/python docs/reference.py

fuzz: setup ## random programs through random passes, FUZZ=50 times as many as the tests take, new ones each time
	FUZZ=$(FUZZ) $(BIN)/python -m pytest -n 2 tests/test_chains.py tests/rewriting/test_properties.py tests/folding/test_fold_properties.py $(TESTS)

interop: ## in an environment of its own, ExecuTorch runs a legalized program
	$(PYTHON) -m venv .venv-interop
	.venv-interop/bin/pip install --quiet --disable-pip-version-check -r requirements-interop.txt
	.venv-interop/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	.venv-interop/bin/python interop/executorch_check.py
