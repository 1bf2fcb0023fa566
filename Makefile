# Two commands do all the set-up on a fresh machine with Python 3.11+ and make:
#   make demo    make test
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP     = $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-slow check check-oracles check-kernels bench clean

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("mmq needs Python 3.11 or newer, $(PYTHON) is %d.%d: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(PIP) install -q -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.check: $(VENV)/.test
	$(PIP) install -q -c constraints.txt -e '.[check]'
	touch $@

demo: $(VENV)/.runtime
	$(BIN)/mmq demo

test: $(VENV)/.test
	$(BIN)/python -m pytest

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check-oracles: $(VENV)/.test
	$(PYTHON) -m venv $(VENV)-oracles
	$(VENV)-oracles/bin/python -m pip install -q -c constraints.txt -e '.[test,oracles]'
	$(VENV)-oracles/bin/python scripts/check_oracles.py

check-kernels: $(VENV)/.test
	$(BIN)/python -m pytest -m "slow or not slow" tests/kernels/triton tests/verify/kernels

bench: $(VENV)/.test
	$(BIN)/python benchmarks/bench_kernels.py -o docs/performance.md
	$(BIN)/python benchmarks/bench_forward.py -o docs/performance.md
	$(BIN)/python benchmarks/bench_convert.py -o docs/performance.md

clean:
	rm -rf $(VENV) $(VENV)-oracles build *.egg-info
