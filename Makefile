# `make train` runs the main job on the CPU, `make test` everything that CI runs, `make test-fast` the tests for between
# two edits. All make .venv first if it is missing.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
export PYTHONHASHSEED ?= 0
# Tests start many processes, which import compiled files a sixth faster.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-fast lint docs docs-pages format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	DS_BUILD_OPS=0 $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,docs]"
	$(VENV)/bin/python -m pip check
	touch $@

train: $(STAMP)
	$(VENV)/bin/harts train recipes/tiny_grpo.yaml

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The site, into site/. Fails at a link that leads nowhere and at a page that is not what the code says; fetches nothing.
docs: $(STAMP)
	$(VENV)/bin/python docs/tools/configuration.py --check
	$(VENV)/bin/python docs/tools/build_site.py

# Pages that are made from the code.
docs-pages: $(STAMP)
	$(VENV)/bin/python docs/tools/configuration.py

# Three for two cores where tests of several processes wait for one another; each takes ten seconds to import.
WORKERS := -n 3 --dist worksteal

test: lint docs
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(WORKERS)

test-fast: $(STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(WORKERS) -m "not slow and not exhaustive and not distributed and not gpu"

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) outputs site build
