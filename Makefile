# `make help` lists what there is. Everything runs in .venv, which `make setup` creates.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# one thread a test process, two processes: right for two cores, and for many
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m pytest
RUN := runs/quickstart
EXPORT := exports/quickstart

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all test-gpu check format chaos verify-kernels bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv and install the project into it; a second time changes nothing

$(STAMP): pyproject.toml setup.py constraints.txt scripts/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) bash scripts/setup.sh
	@touch $@

train: setup  ## train the quickstart hybrid on the bundled text, stop and resume it, export it, print a sample
	$(PY) -m llm.train experiment=quickstart run_dir=$(RUN) stop_after=100
	$(PY) -m llm.train experiment=quickstart run_dir=$(RUN)
	@test -d $(EXPORT) && echo "$(EXPORT) exists already: delete it to export again" || $(PY) scripts/export_hf.py $(RUN) $(EXPORT)
	$(PY) -m llm.generate $(RUN) --prompt "It was a dark night, and the captain" --max-new-tokens 120

test: setup  ## run the tests (CPU)
	$(PYTEST) -n 2 -m "not gpu and not slow"

test-all: setup  ## run the tests, the slow ones too
	$(PYTEST) -n 2 -m "not gpu"

test-gpu:  ## run the GPU tests with the python that has your CUDA torch (PYTHON=...)
	PYTHONPATH=.:kernels $(PYTHON) -m pytest -m gpu tests

check: setup  ## lint and check the format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: setup  ## format, and mend what the linter can mend
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

chaos: setup  ## kill training 100 times at random and at chosen instants; docs/reliability.md says what came out
	$(PY) -m llm.chaos --kills 100 --out runs/chaos --into docs/reliability.md

verify-kernels:  ## check the Triton kernels on your GPU against fp64 (PYTHON=the python with your CUDA torch)
	PYTHONPATH=kernels $(PYTHON) scripts/verify_kernels.py

bench:  ## time the operators on your GPU, beside torch's attention and, where installed, flash-linear-attention
	PYTHONPATH=kernels $(PYTHON) scripts/bench_kernels.py

clean:  ## delete .venv and caches; runs and exports stay
	rm -rf $(VENV) .pytest_cache .ruff_cache build ./*.egg-info
