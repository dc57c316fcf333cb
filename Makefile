# The one way in: make demo, make test, make lint, make gpu-test, make stress, make bench. CI calls the same targets.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# With a GPU the framework brings cuDNN; without one cuDNN alone is enough, in the version of the shipped device file.
EXTRAS := $(if $(GPU),torch,cudnn)
PIP := $(BIN)/pip install --quiet --disable-pip-version-check $(if $(GPU),,--constraint constraints.txt)

.PHONY: demo test lint gpu-test stress bench clean

demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py

test: $(VENV)/.ready-test
	$(BIN)/python -m pytest --ignore tests/gpu

lint: $(VENV)/.ready-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gpu-test: $(VENV)/.ready-test
	$(BIN)/python -m pytest tests/gpu

stress: $(VENV)/.ready-test
	$(BIN)/python -m pytest -m stress --long

bench: $(VENV)/.ready-test
	$(BIN)/python -m benchmarks --json bench.json

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "plancache needs Python 3.11 or newer; run: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[$(EXTRAS)]'
	touch $@

$(VENV)/.ready-test: pyproject.toml constraints.txt | $(VENV)/.ready
	$(PIP) --editable '.[$(EXTRAS),torch,test]' numpy
	touch $@

$(VENV)/.ready-lint: pyproject.toml constraints.txt | $(VENV)/.ready
	$(PIP) --editable '.[$(EXTRAS),lint]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
