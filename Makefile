# make setup   a fresh clone: sets everything up in .venv
# make demo    a fresh clone: sets everything up, then trains on 4 local replicas with a live view
# make test    a fresh clone: sets everything up, then runs the tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check bench clean setup help-text

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
	@$(BIN)/python -m pytest $(ARGS)

check: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest $(ARGS)

bench: $(READY)
	@$(BIN)/python benchmarks/launch.py

help-text: $(READY)
	@$(BIN)/python -m atoll.cli.write_help

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build runs demo-output
