# make setup      sets everything up in .venv
# make demo       trains on 4 local replicas with a live view
# make test       runs all tests on all cores, except those of the next target
# make test-controllers  runs the tests on AppWrapper, Kueue and MCAD; builds these controllers first
# make test-fast  runs the tests that start no process and no server and train nothing, in a minute or two
# make docs       runs the tests that hold the pages to the code
# make check      checks format, lint and types, then runs all tests
# make bench      measures how long a launch takes
# make cluster    runs the Kubernetes cluster of the tests until Ctrl-C, and prints its KUBECONFIG
# make test-coscheduling  runs the tests on a scheduler that places pods in groups; builds it first; not part of CI
# make test-clients  runs the Kubernetes tests with the oldest and the newest client library; not part of CI
# make test-servers  runs them on the oldest Kubernetes that Atoll supports; builds it first; not part of CI
# Each of them works in a fresh clone: it sets up first. ARGS goes to pytest: make test ARGS="-k rounds".
PYTHON ?= python3
# One worker more than cores, because some tests wait.
WORKERS ?= $(shell expr $$(nproc) + 1)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Without compiled files each process that a test starts would compile Atoll anew.
export PYTHONDONTWRITEBYTECODE :=
# What runs on the oldest Kubernetes: the dry runs of all golden requests, runs, the Role, and the executor contract.
OLD_SERVER = tests/executors/kubernetes/test_dry_run.py tests/executors/kubernetes/test_runs.py \
  tests/executors/kubernetes/test_role.py tests/contract/test_kubernetes.py
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test test-fast test-controllers test-coscheduling test-clients test-servers docs check lint types bench cluster clean setup help-text

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
	@$(PYTEST) -m "not controllers and not coscheduling" $(ARGS)

test-controllers: $(READY)
	@$(PYTEST) -m controllers $(ARGS)

test-coscheduling: $(READY)
	@$(BIN)/python -m pytest -q -m coscheduling $(ARGS)

test-fast: $(READY)
	@$(PYTEST) -m "not process and not server and not training" $(ARGS)

docs: $(READY)
	@$(PYTEST) -m docs $(ARGS)

lint: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(READY)
	@$(BIN)/mypy

check: lint types test test-controllers

bench: $(READY)
	@$(BIN)/python benchmarks/launch.py

cluster: $(READY)
	@PYTHONPATH=tests $(BIN)/python -m services.kubernetes $(ARGS)

test-clients: $(READY)
	@PYTHONPATH=tests $(BIN)/python -m services.kubernetes.clients $(ARGS)

test-servers: $(READY)
	@ATOLL_TEST_KUBERNETES=v1.29.6 $(BIN)/python -m pytest -q $(or $(ARGS),$(OLD_SERVER))

help-text: $(READY)
	@$(BIN)/python -m atoll.cli.write_help

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build runs demo-output
