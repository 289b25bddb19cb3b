# make setup      sets everything up in .venv
# make demo       trains on 4 local replicas with a live view
# make test       runs all tests on all cores
# make test-fast  runs the tests that start no process and no server and train nothing, in a minute or two
# make docs       runs the tests that hold the pages to the code
# make check      checks format, lint and types, then runs all tests
# make bench      measures how long a launch takes
# Each of them works in a fresh clone: it sets up first. ARGS goes to pytest: make test ARGS="-k rounds".
PYTHON ?= python3
# One worker more than cores, because some tests wait.
WORKERS ?= $(shell expr $$(nproc) + 1)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Without compiled files each process that a test starts would compile Atoll anew.
export PYTHONDONTWRITEBYTECODE :=
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test test-fast docs check lint types bench clean setup help-text

setup: $(READY)

$(READY): requirements-dev.lock pyproject.toml hatch_build.py src/atoll/kernels/_fused.c src/atoll/kernels/_native.c
	@echo "setting up $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q src
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/demo.py

test: $(READY)
	@$(PYTEST) $(ARGS)

test-fast: $(READY)
	@$(PYTEST) -m "not process and not server and not training" $(ARGS)

docs: $(READY)
	@$(PYTEST) -m docs $(ARGS)

lint: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(READY)
	@$(BIN)/mypy

check: lint types test

bench: $(READY)
	@$(BIN)/python benchmarks/launch.py

help-text: $(READY)
	@$(BIN)/python -m atoll.cli.write_help

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build runs demo-output
