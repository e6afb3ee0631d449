# `make train` and `make test` do all the set-up that they need. Another Python in its own environment:
#   make test VENV=.venv-312 PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/quickstart.py
# More arguments for train.py or pytest: make train ARGS=--config.train.steps=50
ARGS ?=
# Tests spend most of their time tracing, on one core each, and some wait: for processes that they start, for deadlines.
# So three workers fill two cores. A file's tests share what they compile, and stay together.
# Files run in their order, and short ones come last: those with most tests first would leave the longest for the end.
# A worker that dies ends the run: the others would wait for it for ever.
WORKERS ?= -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
TPU_STAMP := $(VENV)/.installed-tpu
GPU_STAMP := $(VENV)/.installed-gpu

.PHONY: setup train test test-all test-gpu test-notebooks soak golden notebooks docs lint format clean

setup: $(STAMP)

train: $(STAMP)
	$(BIN)/python train.py --config=$(CONFIG) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-all: $(TPU_STAMP) $(GPU_STAMP)
	$(BIN)/python -m pytest $(WORKERS) -m "slow or not slow" $(ARGS)

# Small models, compiled for GPUs that are not here.
test-gpu: $(GPU_STAMP)
	$(BIN)/python -m pytest -m slow tests/analysis/test_gpu_configs.py $(ARGS)

# Every notebook, run anew, shows what is stored of it: about 3 minutes on 2 cores.
test-notebooks: $(STAMP)
	$(BIN)/python -m pytest -n 2 --max-worker-restart=0 -m "slow or not slow" tests/test_notebooks.py $(ARGS)

# About 7 minutes on 2 cores.
soak: $(STAMP)
	$(BIN)/python benchmarks/soak.py $(ARGS)

golden: $(STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python tests/goldens.py

# Notebooks whose outputs have changed are stored with the new ones; one alone: make notebooks ARGS=04
notebooks: $(STAMP)
	$(BIN)/python tests/notebook_runs.py $(ARGS)

# The site, in build/site; a page that nobody lists and a link that leads nowhere are errors.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info

# The stamp comes last, so that an interrupted set-up is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c '' 2>/dev/null || { \
	  echo 'Error: "$(PYTHON)" does not start; Parallax needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	  "Error: $(PYTHON) is Python %d.%d, Parallax needs 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -m venv $(VENV) || { \
	  echo 'Error: $(PYTHON) cannot make the environment $(VENV); on Debian or Ubuntu: apt install python3-venv' >&2; exit 1; }
	@echo 'Installing into $(VENV), once; this takes a few minutes.'
	$(BIN)/python -m pip install -q -e '.[tests]' -c constraints.txt
	@touch $(STAMP)

# The TPU compiler that this jax pins, with which the slow tests compile for chips that are not here.
$(TPU_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q -e '.[tests,tpu]' -c constraints.txt
	@touch $(TPU_STAMP)

# XLA's compiler for GPUs, about 5 GB; nothing where the system is not Linux.
$(GPU_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q -e '.[tests,gpu-compiler]' -c constraints.txt
	@touch $(GPU_STAMP)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q -e '.[docs]' -c constraints.txt
	@touch $(DOCS_STAMP)
