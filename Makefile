# One place for every command. `make` alone lists them.
#
# Settings: PYTHON names the interpreter that makes the virtual environment (3.11 or newer), ARGS goes to pytest.
# A user's own KUBECONFIG is never read: only E2E_KUBECONFIG points `demo`, `e2e` and `test-cluster` at another cluster.

MAKEFLAGS += --no-print-directory
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
unexport KUBECONFIG

PYTHON ?= python3
ARGS ?=
# Proxies of bench-scale, and histories of `make histories`.
N ?= 1000
EXAMPLES ?= 50
# Test files go to this many processes; each that holds an e2e test starts a control plane of its own (0.7 GB).
WORKERS ?= 3
IMAGE ?= operator-app:dev
# buildah, docker and podman all know `build`.
BUILDER ?= $(firstword $(foreach tool,buildah docker podman,$(if $(shell command -v $(tool)),$(tool))) docker)

# The stamp's name is the lock file's content, so a changed lock makes a new environment and an old one is never mixed in.
STAMP := .venv/locked-$(shell git hash-object requirements/dev.txt)
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
UV_VERSION := 0.13.9

.PHONY: help
help: ## List the commands
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do \
	  printf '  make %-10s %s\n' "$$name" "$$text"; done

.PHONY: venv
venv: $(STAMP) ## Make .venv from the lock file (nothing to do when it is current)
	@:

$(STAMP):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: there is no '$(PYTHON)'; install Python 3.11 or newer, or name one: make venv PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: Python 3.11 or newer is needed and '$(PYTHON)' is $$($(PYTHON) -V 2>&1); name another: make venv PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' can't make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "== venv: installing the locked development dependencies into .venv"
	@rm -f .venv/locked-*
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@touch $@

.PHONY: check
check: $(STAMP) ## Format, lint, types, import contracts and new commits' messages; runs all, then tells which failed
	@failed=; \
	try() { \
	  echo "== check: $$1"; name=$$1; shift; \
	  said=$$("$(BIN)/$$@" 2>&1) || { echo "$$said"; said=; failed="$$failed, $$name"; }; \
	}; \
	try format ruff format --check --quiet; \
	try lint ruff check --quiet; \
	try types mypy --no-error-summary; \
	try imports lint-imports --no-logo; \
	try commits python -m tests.unit.project.commit_messages; [ -z "$$said" ] || echo "$$said"; \
	if [ -n "$$failed" ]; then echo "== check: failed: $${failed#, }" >&2; exit 1; fi; echo "== check: all five hold"

.PHONY: format
format: $(STAMP) ## Rewrite the sources as the formatter and the safe lint fixes want them
	@$(BIN)/ruff check --quiet --fix --exit-zero
	@$(BIN)/ruff format

.PHONY: unit
unit: $(STAMP) ## Unit tests: seconds, no cluster
	@$(PYTEST) tests/unit $(ARGS)

.PHONY: unit-pythons
unit-pythons: ## Unit tests on every Python that is supported and found here, each in a fresh environment outside of .venv
	@for minor in 11 12 13; do \
	  python=; for found in python3.$$minor $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.$$minor.*/bin/python3.$$minor; do \
	    if "$$found" -c "" 2>/dev/null; then python="$$found"; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then echo "== unit-pythons: no Python 3.$$minor here"; continue; fi; \
	  echo "== unit-pythons: $$python"; \
	  place="$${TMPDIR:-/tmp}/operator-app-python3.$$minor-$$(git hash-object requirements/dev.txt)"; \
	  if [ ! -e "$$place/complete" ]; then \
	    "$$python" -m venv --clear "$$place"; \
	    "$$place/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt; \
	    touch "$$place/complete"; \
	  fi; \
	  "$$place/bin/python" -m pytest tests/unit -p no:cacheprovider $(ARGS); \
	done

.PHONY: e2e
e2e: $(STAMP) ## End-to-end tests on a real API server; ARGS="-k drift -x" goes to pytest
	@$(PYTEST) tests/e2e $(ARGS)

.PHONY: test
test: $(STAMP) ## Unit and end-to-end tests in one run
	@$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/unit tests/e2e $(ARGS)

.PHONY: histories
histories: $(STAMP) ## EXAMPLES=50 random histories of users, other writers, policies and crashes; shrinks what fails
	@STATE_MACHINE_EXAMPLES=$(EXAMPLES) FOREIGN_EXAMPLES=$(EXAMPLES) $(PYTEST) \
	  tests/e2e/apply/test_state_machine.py tests/e2e/apply/test_foreign_bytes.py $(ARGS)

.PHONY: mutants
mutants: $(STAMP) ## Wrong versions of the modules that carry the guarantees, against their unit tests (up to an hour)
	@$(BIN)/python -m tests.mutants $(ARGS)

.PHONY: faults
faults: $(STAMP) ## Every fault at every point, in parts, two at a time; writes docs/reliability.md
	@$(BIN)/python -m tests.e2e.faults $(ARGS)

.PHONY: demo
demo: $(STAMP) ## A local API server, the operator and a sample proxy, shown and stopped again
	@$(BIN)/python -m tests.e2e.demo $(ARGS)

.PHONY: dev
dev: $(STAMP) ## Start the local cluster, leave it running and print its KUBECONFIG
	@$(BIN)/python -m tests.e2e.dev

.PHONY: dev-stop
dev-stop: $(STAMP) ## Stop what `make dev` left running
	@$(BIN)/python -m tests.e2e.dev stop

.PHONY: bench-tenants
bench-tenants: $(STAMP) ## What one tenant feels of another that misbehaves, lanes against one FIFO (some minutes)
	@$(BIN)/python -m benchmarks.tenants $(ARGS)

.PHONY: bench-memory
bench-memory: $(STAMP) ## Bytes for each EnvoyProxy at 1,000 and 10,000, against decoded objects
	@$(BIN)/python -m benchmarks.memory $(ARGS)

.PHONY: bench-hostile
bench-hostile: $(STAMP) ## Memory, event loop and another tenant's waits beside the worst tenants (half an hour)
	@$(BIN)/python -m benchmarks.hostile $(ARGS)

.PHONY: bench-scale
bench-scale: $(STAMP) ## What N=1000 proxies of varied specs cost: start, resync, memory, event loop
	@$(BIN)/python -m benchmarks.scale $(N)

.PHONY: bench-converge
bench-converge: $(STAMP) ## First reconciles against the same writes by a bare script; ARGS=--profile says where CPU goes
	@$(BIN)/python -m benchmarks.converge $(ARGS)

.PHONY: bench-recreate
bench-recreate: $(STAMP) ## Seconds until a child is there again after a deletion in the foreground (two minutes)
	@$(BIN)/python -m benchmarks.recreate $(ARGS)

.PHONY: bench-pauses
bench-pauses: $(STAMP) ## How long the garbage collector holds the process, as Python does it and as shipped
	@$(BIN)/python -m benchmarks.pauses $(ARGS)

.PHONY: bench-sharding
bench-sharding: $(STAMP) ## What three replicas are sent with server-side sharding and without it (some minutes)
	@$(BIN)/python -m benchmarks.sharding $(ARGS)

.PHONY: bench-failover
bench-failover: $(STAMP) ## Kill and stop replicas under load: who waits how long, and does anything get two writers
	@$(BIN)/python -m benchmarks.failover $(ARGS)

.PHONY: bench-reload
bench-reload: $(STAMP) ## Seconds from an edit to its answer by all of 1, 10 and 50 Pods, and what it costs (root; minutes)
	@$(BIN)/python -m benchmarks.reload $(ARGS)

.PHONY: bench-proxies
bench-proxies: $(STAMP) ## What an idle proxy takes of a node: inotify instances, open files, memory of 100 (root; minutes)
	@$(BIN)/python -m benchmarks.proxies $(ARGS)

.PHONY: bench-image
bench-image: $(STAMP) ## Size of the operator's image, and seconds from a Pod's start to in sync (root; minutes)
	@$(BIN)/python -m benchmarks.image $(ARGS)

.PHONY: lock
lock: ## Write requirements/*.txt from pyproject.toml; ARGS=--upgrade takes newer versions
	@tool=$$(mktemp -d); trap 'rm -rf "$$tool"' EXIT; \
	$(PYTHON) -m venv "$$tool" && "$$tool/bin/pip" install --quiet --disable-pip-version-check uv==$(UV_VERSION); \
	for lock in runtime:pyproject.toml "dev:pyproject.toml --group dev" build:requirements/build.in \
	    go:requirements/go.in; do \
	  echo "== lock: requirements/$${lock%%:*}.txt"; \
	  "$$tool/bin/uv" pip compile --quiet $${lock#*:} --universal --generate-hashes --python-version 3.11 \
	    --custom-compile-command "make lock" $(ARGS) -o "requirements/$${lock%%:*}.txt"; \
	done

.PHONY: manifests
manifests: $(STAMP) ## Write the CRDs in manifests/crd from the models in operator_app/api/models.py
	@$(BIN)/python -c 'from pathlib import Path; from operator_app.api.crd import crds, to_yaml; \
	  [Path("manifests/crd", crd["metadata"]["name"] + ".yaml").write_text(to_yaml((crd,))) for crd in crds()]'

.PHONY: image
image: ## Build the container image IMAGE=operator-app:dev with buildah, docker or podman
	@echo "== image: $(IMAGE) with $(BUILDER)"
	@$(BUILDER) build -t $(IMAGE) $(ARGS) .

.PHONY: image-test
image-test: $(STAMP) ## Build the image on this machine alone and run it (root, buildah, debootstrap; minutes)
	@$(PYTEST) tests/delivery $(ARGS)

.PHONY: test-cluster
test-cluster: $(STAMP) ## The image in Pods on two real nodes, disrupted, and the e2e suite beside it (root; half an hour)
	@$(PYTEST) tests/cluster $(ARGS)

.PHONY: clean
clean: ## Remove .venv and what tools left behind in the working tree
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
