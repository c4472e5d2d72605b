# The README's commands. Each sets up what it needs, from Python 3.11+, make and pip alone.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test lint

train: .venv/installed
	$(BIN)/python train.py

test: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
