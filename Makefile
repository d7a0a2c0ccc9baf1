# Every install goes through constraints.txt, and torch first: pip then keeps that build for the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip

.DELETE_ON_ERROR:
.PHONY: demo test check lint types unit dist

demo: $(VENV)/.installed
	$(BIN)/breakgraph demo

test: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory check

check: lint types unit

lint:
	$(BIN)/ruff check .

types:
	$(BIN)/mypy

unit:
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --timeout 600
	@echo "tests/gpu is not part of this run: on a machine with a CUDA device, run '$(BIN)/pytest tests/gpu' too"

dist: $(VENV)/.installed-dev
	$(BIN)/python -m build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "breakgraph needs Python 3.11 or newer, $(PYTHON) is older; run: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed
