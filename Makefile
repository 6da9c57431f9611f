# Two commands do all the set-up and the work: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Compiled once for all the processes that tests start.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test faults check format clean

demo: .venv/installed
	$(BIN)/thinpipe train

# One more than there are cores: tests wait for processes, links and signals now and then.
PROCESSES ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
test: .venv/compiled
	$(BIN)/pytest --numprocesses $(PROCESSES) --dist worksteal -m "not rate"
	$(BIN)/pytest -m rate $$(grep -rl --include '*.py' mark.rate tests) # what must have the machine to itself

# Breaks so many small runs, each in one way that the seed says: docs/faults.md.
N ?= 50
SEED ?= 0
TRANSPORT ?= gloo
faults: .venv/installed
	$(BIN)/python -m tests.faults --count $(N) --seed $(SEED) --transport $(TRANSPORT)

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and alone: its CPU build is found under the constraints, and nothing after it pulls another one.
# Modules are compiled when they are first imported: most of what comes with torch and transformers never is.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	touch $@

# Modules and loops, by one process before several would do the same work at once.
.venv/compiled: .venv/installed
	$(BIN)/python -c "import pytest; from tests.preloaded import import_all; import_all()"
	touch $@

clean:
	rm -rf .venv
