# make train    train on the handwritten digits          make train ARGS="--model convnet --devices 4"
# make test     prove that jaxddp and PyTorch DDP agree  make test ARGS="tests/unit/data/test_sampler.py"
# make test-all and what takes longer
# make lint     ruff and the types
# make bench    steps per second, as ratios
#
# Each makes .venv if it is missing and installs into it what it needs, once.

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
# Where there is an NVIDIA GPU, jax comes with CUDA.
CUDA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda12)
comma := ,
extras = $(subst $() $(),$(comma),$(strip $(CUDA) $(filter-out train,$1)))
package = .$(addprefix [,$(addsuffix ],$(extras)))

# What takes half of the time.
HALF := tests/examples tests/equivalence

.PHONY: train test test-all lint bench clean

train: .venv/installed-train
	$(BIN)/python -m jaxddp.train $(ARGS)

# In two processes side by side: thousands of compiled programs in one are more memory maps than Linux
# allows it, and two cores are not busy with one. What the second says follows what the first has said.
test: .venv/installed-test
ifeq ($(ARGS),)
	@said=$$(mktemp); \
	$(BIN)/python -m pytest $(HALF) >$$said 2>&1 & half=$$!; \
	trap 'kill $$half 2>/dev/null; rm -f $$said' EXIT; trap 'exit 130' INT TERM; \
	$(BIN)/python -m pytest $(HALF:%=--ignore %); rest=$$?; \
	wait $$half; half_code=$$?; cat $$said; exit $$((rest | half_code))
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-all: .venv/installed-test .venv/cuda-plugin
	$(BIN)/python -m pytest -m "large or not large" $(HALF:%=--ignore %)
	$(BIN)/python -m pytest -m "large or not large" $(HALF)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed-test
	$(BIN)/python -m benchmarks.steps_per_second $(ARGS)

clean:
	rm -rf .venv

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: PYTHON=$(PYTHON): jaxddp needs Python 3.11 or newer" >&2; exit 2; }
	$(PYTHON) -m venv .venv

# With which XLA compiles for GPUs that are not there; beside the packages, not among them: jax would use it.
.venv/cuda-plugin: .venv/installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ \
		$$($(BIN)/python -c 'from jaxlib.version import __version__ as v; \
		print(f"jax-cuda12-plugin=={v} jax-cuda12-pjrt=={v}")')
	@touch $@

# What was installed is written down in a file per set of extras, so that the next call skips it.
.venv/installed-%: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e "$(call package,$*)"
	@touch $@
