# make demo | figures | test | mutation | lint | format | docs | speed | venv
#
# The first command makes .venv with the first Python >= 3.11 that is found. PYTHON=/path/to/python
# names another one. Later commands install again only if pyproject.toml or constraints.txt has
# changed. pip's own variables (PIP_INDEX_URL, PIP_FIND_LINKS, ...) apply.
#
# SYSTEM_TORCH=1 keeps the torch that PYTHON already imports, for example one built for this
# machine's GPU. .venv then sees PYTHON's packages, and torch is neither downloaded nor replaced.
# The variable is read when .venv is made. To change it later, remove .venv.

VENV := .venv
STAMP := $(VENV)/.installed
RUN := $(VENV)/bin/python -m
SYSTEM_TORCH ?=

# The first Python that can make a virtual environment. If there is none, the first that is new
# enough is taken, and the error of .ci/make-venv says what it lacks.
NEW := import sys; sys.exit(sys.version_info < (3, 11))
NAMES := python3 python3.13 python3.12 python3.11 python3.14 python
PYTHON ?= $(shell for program in 'import venv, ensurepip; $(NEW)' '$(NEW)'; do \
	for name in $(NAMES); do \
	$$name -c "$$program" >/dev/null 2>&1 && { command -v $$name; exit; }; done; done)
PIP_INSTALL := $(VENV)/bin/pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.PHONY: help demo figures test mutation lint format docs speed venv

help:
	@echo "make demo    train a small model whose weights stream, and compare with the prediction"
	@echo "make figures draw the paper's figures from stored results, into figures/"
	@echo "make test    run the tests"
	@echo "make mutation break single lines, count how many the tests notice: hours, docs/mutation.md"
	@echo "make lint    ruff, mypy, import rules"
	@echo "make format  rewrite the code in the house format"
	@echo "make docs    build the documentation as a site, build/docs/index.html"
	@echo "make speed   time the command and planning, and compare with the stored result"
	@echo "make venv    make or refresh $(VENV); PYTHON=... chooses the interpreter,"
	@echo "             and SYSTEM_TORCH=1 keeps its torch"

demo: venv
	$(RUN) megatrain.experiments.demo --out demo

figures: venv
	$(RUN) megatrain.experiments.cli figures --out figures

# Bytecode is written even if the shell says otherwise. Without it, each worker compiles all tests,
# and each process that a test starts compiles the package.
test: venv
	PYTHONDONTWRITEBYTECODE= $(RUN) pytest -n 2

mutation: venv
	$(PIP_INSTALL) --no-build-isolation -e '.[dev,mutation]' -c constraints.txt
	$(RUN) pytest -m nightly tests/mutation

lint: venv
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	PYTHONPATH=typings $(VENV)/bin/lint-imports

format: venv
	$(RUN) ruff check --fix-only --quiet .
	$(RUN) ruff format .

docs: venv
	$(PIP_INSTALL) --no-build-isolation -e '.[docs]' -c $(VENV)/constraints.txt
	$(RUN) sphinx -q -W --keep-going -c docs -d build/docs/.doctrees . build/docs
	@echo "the site: build/docs/index.html"

speed: venv
	$(RUN) megatrain.experiments.benchmarks.speed

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@PYTHON="$(PYTHON)" SYSTEM_TORCH="$(SYSTEM_TORCH)" bash .ci/make-venv $(VENV)
	@touch $@
