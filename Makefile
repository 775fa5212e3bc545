# Everything a newcomer needs is `make run` and `make test`; the rest is for those who change kvrelay.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GEN_VENV := .venv-gen
# The oldest grpcio-tools whose code every supported protobuf runtime loads (6.31 to 7.x).
GEN_TOOLS := grpcio-tools==1.76.0 mypy-protobuf==5.0.0
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
BENCH ?= fleet
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv venv-dev run smoke test test-slow lint fix gen gen-check bench chaos-kv clean

help: ## Show this help
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvrelay needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 run" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone: nixl asks for "torch" without a version, and would bring a second, larger build of it.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (a few minutes on the first run)"
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable '.[worker]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

venv: $(VENV)/.installed ## Make .venv with what a fleet needs

venv-dev: $(VENV)/.installed-dev ## Make .venv with what the tests need, too

run: venv ## Start a fleet on the bundled model, watch it answer twice, leave it running until Ctrl-C
	@$(BIN)/kvrelay up --disaggregate always --demo $(ARGS)

smoke: venv ## The same, then stop; fails when nothing went over NIXL or nothing was cached
	@$(BIN)/kvrelay up --disaggregate always --demo --exit $(ARGS)

test: venv-dev ## Run the tests that need no GPU (under 15 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: venv-dev ## Run the tests that take longer
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: venv-dev gen-check ## Lint, types, import contracts, protos, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint

fix: venv-dev ## Format, and fix what can be fixed by machine
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(GEN_VENV)/.installed: Makefile
	$(PYTHON) -m venv $(GEN_VENV)
	$(GEN_VENV)/bin/python -m pip install --quiet $(GEN_TOOLS)
	@touch $@

define generate
	PATH="$(CURDIR)/$(GEN_VENV)/bin:$$PATH" python -m grpc_tools.protoc --proto_path=proto --python_out=$(1) \
		--mypy_out=quiet:$(1) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) proto/kvrelay/v1/*.proto
endef

gen: $(GEN_VENV)/.installed venv ## Generate kvrelay/v1 from proto/, and the generated parts of docs/
	$(call generate,.)
	$(BIN)/python -m docs.generate

gen-check: $(GEN_VENV)/.installed ## Fail when kvrelay/v1 is not what proto/ generates
	@rm -rf build/gen && mkdir -p build/gen
	@$(call generate,build/gen)
	@diff --recursive --exclude=__pycache__ --exclude=__init__.py build/gen/kvrelay/v1 kvrelay/v1 || \
		{ echo "kvrelay/v1 is stale: run 'make gen' and commit" >&2; exit 1; }

bench: venv-dev ## Run a benchmark: make bench BENCH=fleet ARGS=--quick
	@mkdir -p bench/results
	$(BIN)/python -m bench.$(BENCH) --json bench/results/$(BENCH).json $(ARGS)

chaos-kv: venv-dev ## Prove the KV hand-off under faults: 2,000 simulated schedules, 200 rounds of kills (about half an hour)
	$(BIN)/python -m ops.chaos.kv $(ARGS)

clean: ## Remove what was built here
	rm -rf $(VENV) $(GEN_VENV) build *.egg-info
