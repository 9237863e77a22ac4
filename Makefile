# The same commands for people and CI: `make help` lists them. Everything is installed into .venv.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
# Tests start a thousand Python processes; without bytecode each compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

SEED ?= 1
PYTEST_ARGS ?=

DISTRIBUTIONS := $(patsubst %/pyproject.toml,%,$(sort $(wildcard */pyproject.toml)))
SOURCES := $(addsuffix /src,$(DISTRIBUTIONS))
BIN := .venv/bin
# The first interpreter with version 3.11 or later; python3 is tried first.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
# The name contains a hash of the files that determine the installation, so `make setup` does nothing while they are unchanged.
STAMP := .venv/setup-$(shell cat requirements/*.txt $(addsuffix /pyproject.toml,$(DISTRIBUTIONS)) | sha256sum | cut -c1-16)

.PHONY: help
help: ## List the commands
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.PHONY: setup
setup: $(STAMP) ## Install everything into .venv (the other commands do this first)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "rljob needs Python 3.11 or later; the PATH contains none" >&2; exit 2; }
	requirements/system.sh "$(PYTHON)"
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/uv.txt
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --compile-bytecode -r requirements/cpu.txt -r requirements/dev.txt
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation $(addprefix -e ./,$(DISTRIBUTIONS))
	@rm -f .venv/setup-*
	@touch $@

.PHONY: quickstart
quickstart: setup ## Train a tiny language model by reinforcement learning, live on screen (SEED=1)
	CUDA_VISIBLE_DEVICES= $(BIN)/rljob run examples/quickstart.yaml --set spec.seed=$(SEED) --run-dir runs/quickstart-seed-$(SEED)

.PHONY: test
test: setup ## Run the checks and all tests that need no Kubernetes programs (PYTEST_ARGS: only these tests, in one process)
	@$(BIN)/python -m tools.run_tests machine $(PYTEST_ARGS)

.PHONY: test-cluster
test-cluster: setup ## Run the tests on a real API server and in pods; builds what they need (PYTEST_ARGS as above)
	@$(BIN)/python -m tools.run_tests cluster $(PYTEST_ARGS)

.PHONY: thorough
thorough: setup ## make test with all cases of the fault matrix
	@RLJOB_THOROUGH=1 $(BIN)/python -m tools.run_tests machine $(PYTEST_ARGS)

.PHONY: unit
unit: setup ## Run the tests that need no engine and no Kubernetes programs
	$(BIN)/python -m pytest -m "not engine and not apiserver and not cluster" $(PYTEST_ARGS)

.PHONY: engine
engine: setup ## Run the tests that start a real vLLM server
	$(BIN)/python -m pytest -m engine $(PYTEST_ARGS)

.PHONY: sglang
sglang: setup ## Run the tests that start a real SGLang server on this CPU (1 GB, once)
	RLJOB_SGLANG_PYTHON="$$($(BIN)/python -m tools.sglang)" && export RLJOB_SGLANG_PYTHON && \
		$(BIN)/python -m pytest $(or $(PYTEST_ARGS),-k sglang rollout-image/tests/test_sglang_engine.py rollout-image/tests/test_engine_parallel.py)

RAY := .cache/ray

.PHONY: ray
ray: setup ## Run the tests of engines that span hosts with Ray itself: two Ray nodes on this machine (80 MB, once)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(RAY) --no-deps -r requirements/ray.txt
	PYTHONPATH=$(CURDIR)/$(RAY) $(BIN)/python -m pytest \
		$(or $(PYTEST_ARGS),rollout-image/tests/test_ray_node.py rollout-image/tests/test_engine_hosts.py)

.PHONY: fuzz
fuzz: setup ## Score 100,000 fuzzed answers with each reward that reads answers (20 minutes)
	RLJOB_FUZZ=1 $(BIN)/python -m pytest reward-services/tests/test_fuzzed_answers.py

.PHONY: controlplane
controlplane: programs ## Start a Kubernetes control plane with simulated nodes, until Ctrl-C
	@$(BIN)/python -m tools.cluster up

.PHONY: images
images: setup ## Build the container images that have changed (TAG=dev REGISTRY= VARIANT=cpu|gpu BASE= ENGINE=)
	@$(BIN)/python -m tools.images build $(if $(TAG),--tag '$(TAG)') $(if $(REGISTRY),--registry '$(REGISTRY)') \
		$(if $(VARIANT),--variant '$(VARIANT)') $(if $(BASE),--base '$(BASE)') $(if $(ENGINE),--engine '$(ENGINE)')

.PHONY: cluster
cluster: setup ## Start a real Kubernetes cluster on this machine; installs rljob if make images has been run (TAG=dev)
	@$(BIN)/python -m tools.cluster start $(if $(TAG),--tag '$(TAG)') $(if $(CONTEXT),--context '$(CONTEXT)')

.PHONY: cluster-down
cluster-down: setup ## Stop that cluster and remove its files except the images
	@$(BIN)/python -m tools.cluster stop

.PHONY: programs
programs: setup ## Build etcd, Kubernetes, CoreDNS, kwok and helm (12 minutes, once)
	@$(BIN)/python -m tools.cluster build >/dev/null

.PHONY: lint
lint: setup ## Check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

.PHONY: format
format: setup ## Format, and fix what can be fixed automatically
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: types
types: setup ## Check types with mypy, strictly for core, cli, coordinator and tools/images
	$(BIN)/mypy $(SOURCES) tools/images/*.py tools/images/torch/no_cuda.py tools/images/build/whose.py

.PHONY: layers
layers: setup ## Check that imports follow the layers of docs/design.md
	$(BIN)/lint-imports

.PHONY: docs
docs: setup ## Write the generated pages of docs/
	$(BIN)/rljob explain --docs > docs/manifest.md
	$(BIN)/python -m rljob.cli.reference > docs/cli.md
	$(BIN)/python -m rljob.rewards.openapi > docs/reward-openapi.json
	$(BIN)/python -m rljob.environments.session_openapi > docs/environment-openapi.json

.PHONY: crds
crds: setup ## Write the CustomResourceDefinitions and their chart
	$(BIN)/python -m tools.generate crds

.PHONY: dashboards
dashboards: setup ## Write the Grafana dashboards of the chart
	$(BIN)/python -m tools.generate dashboards

.PHONY: verify
verify: setup ## Check that all generated files are up to date
	$(BIN)/python -m tools.generate --check

.PHONY: bench
bench: setup ## Run the benchmarks; each prints one JSON object (minutes)
	$(BIN)/python -m benchmarks.rollout --json
	$(BIN)/python -m benchmarks.weight_sync --json
	$(BIN)/python -m benchmarks.time_to_reward --json
	$(BIN)/python -m benchmarks.operator --json
	$(BIN)/python -m benchmarks.trainer --json
	$(BIN)/python -m benchmarks.learning --json --quick
	$(BIN)/python -m benchmarks.peers --json
	$(BIN)/python -m benchmarks.rewards --json
	$(BIN)/python -m benchmarks.environments --json

.PHONY: scale-test
scale-test: programs ## The operator with 10 to 1,000 jobs of 16 simulated pods (an hour; SCALE_ARGS="--sizes 10,30")
	@$(BIN)/python -m benchmarks.operator_scale --json $(SCALE_ARGS)

.PHONY: soak
soak: setup ## Inject seventy faults into three runs with real engines and trainer (30 minutes; SEED=1)
	requirements/system.sh "$(PYTHON)" soak
	$(BIN)/python -W ignore -m e2e.soak --seed $(SEED) --json

.PHONY: e2e-full
e2e-full: programs ## Run all tests in pods, including the long ones, on the real cluster (about an hour)
	$(BIN)/python -m e2e.pods.full --json

.PHONY: clean
clean: ## Remove .venv and caches; runs/ stays
	rm -rf .venv .mypy_cache .ruff_cache .import_linter_cache .hypothesis .pytest_cache
