# One release of PyTorch for machines that have none. Without a GPU only its CPU build is taken, so that set-up never
# pulls gigabytes of CUDA libraries; another release or build: make setup TORCH=...
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# A row of logits takes the interpreter seconds: of the samplers it runs the rules of ties, NaN and temperatures.
INTERPRETED := not test_sampling and not test_lm_head or c28 or c29

HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
HAS_TORCH := $(shell $(PYTHON) -c 'import torch, triton' >/dev/null 2>&1 && echo yes)
ifeq ($(shell uname -s)$(HAS_GPU),Linux)
BUILD := +cpu
endif

.PHONY: setup demo test test-gpu lint bench clean

setup: $(BIN)/.setup  ## the package with its command and everything that tests and benchmarks need

$(BIN)/.setup: pyproject.toml
ifeq ($(HAS_GPU)$(HAS_TORCH),yesyes)
	$(PYTHON) -m venv --system-site-packages $(VENV)
else
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)$(if $(filter default file,$(origin TORCH)),$(BUILD))" || \
		{ echo 'no build of $(TORCH)$(BUILD) found: name one that pip can install, make setup TORCH=...' >&2; exit 1; }
endif
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

demo: setup  ## generate with the built-in pair, on the GPU if there is one
	$(BIN)/tridraft demo

test: setup  ## on any machine: definitions, models, decoding, kernels compiled for five targets and interpreted
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n auto tests/kernels -k "$(INTERPRETED)"

test-gpu: setup  ## on a machine with a CUDA device: the same tests on it, and those that need one
	$(BIN)/python -m pytest -q

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: setup  ## microbenchmarks on the GPU, into bench/results
	for file in bench/[a-z]*.py; do case $$file in bench/train_*|bench/report.py|bench/conftest.py) ;; *) $(BIN)/python $$file || exit 1;; esac; done
	$(BIN)/python bench/report.py

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache
