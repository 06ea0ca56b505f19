# make train    train on the handwritten digits          make train ARGS="--model convnet --devices 4"
# make test     prove that jaxddp and PyTorch DDP agree  make test ARGS="tests/unit/data/test_sampler.py"
# make test-all and everything that takes longer
# make test-without-torch what each command says in an environment without torch
# make lint     ruff and the types
# make mutants  the check's verdict on edited ports      make mutants SHARE=1 ARGS="--scores scores.jsonl"
# make bench    speed beside torch DDP and other JAX     make bench ARGS="--workloads mlp --devices 2"
# make newcomer what the README says, in an empty environment   make newcomer ARGS=--pip-cache
# make gpu      all that takes a GPU, in 40 minutes      make gpu SMOKE=1   (tiny, on CPU devices)
# make docs     the site, into site/
#
# Each makes .venv if it is missing and installs into it what it needs, once.

PYTHON ?= python3
ARGS ?=
OPTIONS ?=

BIN := .venv/bin
# Where there is an NVIDIA GPU, jax comes with CUDA.
CUDA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda12)
comma := ,
extras = $(subst $() $(),$(comma),$(strip $(CUDA) $(filter-out train,$1)))
package = .$(addprefix [,$(addsuffix ],$(extras)))

# Tests run in three processes side by side: two cores are not busy with two, which wait for their children, and
# thousands of compiled programs are more memory maps than Linux allows one process. The third prints at once, the others
# after; a failure comes last.
FIRST := tests/end_to_end $(addprefix tests/unit/parity/,convert jax_side)
SECOND := tests/equivalence/test_matrix.py tests/examples tests/fuzz tests/faults tests/unit/test_pitfalls.py \
	$(addprefix tests/unit/,checkpoint data distributed models nn optim plan step torch_ref tracking)
define side_by_side
	@folder=$$(mktemp -d); \
	trap 'kill $$first $$second 2>/dev/null; rm -rf $$folder' EXIT; trap 'exit 130' INT TERM; \
	$(BIN)/python -m pytest $1 $(OPTIONS) $(FIRST) >$$folder/first 2>&1 & first=$$!; \
	$(BIN)/python -m pytest $1 $(OPTIONS) $(SECOND) >$$folder/second 2>&1 & second=$$!; \
	$(BIN)/python -m pytest $1 $(OPTIONS) $(patsubst %,--ignore %,$(FIRST) $(SECOND)); third_code=$$?; \
	wait $$first; first_code=$$?; wait $$second; second_code=$$?; \
	code=$$((first_code | second_code | third_code)); \
	show() { if [ $$2 -eq 0 ] && [ $$code -ne 0 ]; then tail -n 1 $$folder/$$1; else cat $$folder/$$1; fi; }; \
	if [ $$first_code -eq 0 ]; then show first 0; show second $$second_code; \
	else show second $$second_code; show first $$first_code; fi; \
	exit $$code
endef

OLD_PROCESSOR := $(addprefix tests/equivalence/test_,matrix.py comm_hooks.py amp.py anomaly.py) \
	$(addprefix tests/unit/,comm_hooks data nn optim) jaxddp/nn jaxddp/optim jaxddp/comm_hooks jaxddp/data

.PHONY: train test test-all test-eighth test-shard-map test-old-processor test-without-torch lint mutants newcomer bench gpu docs clean

train: .venv/installed-train
	$(BIN)/jaxddp train $(ARGS)

# A first run compiles for minutes: here with a faster compiler, in CI and in all other tests with the users'.
COMPILER ?= --fast-compiler
test: .venv/installed-test
ifeq ($(ARGS),)
	$(call side_by_side,$(COMPILER))
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-all: .venv/installed-test .venv/cuda-plugin
	$(call side_by_side,-m "not gpu")

# An eighth of what `make test` leaves to `make test-all`, by `large`, `one_in` and tests/rotation.txt; eight commits in a row run all of it.
EIGHTH ?= $(shell echo $$(($$(git rev-list --count --first-parent HEAD) % 8)))
test-eighth: .venv/installed-test .venv/cuda-plugin
	$(call side_by_side,-m large --eighth $(EIGHTH))

# Replicas mapped by shard_map give the bits of pmap, in all of tests/equivalence.
test-shard-map: .venv/installed-test
	$(BIN)/python -m pytest --shard-map $(COMPILER) tests/equivalence

# What depends on the processor, as older ones without AVX2 would compute it.
test-old-processor: .venv/installed-test
	XLA_FLAGS=--xla_cpu_max_isa=SSE4_2 ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest $(OLD_PROCESSOR)

# Where `pip install -e .` alone was run: training in JAX works, and all else says in a line what to install.
test-without-torch: .venv/installed-test .venv/without-torch/installed
	$(BIN)/python -m pytest -m "not gpu" -k absent tests/end_to_end/test_without_torch.py

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Three quarters of the 700 in half an hour on two cores (measured: 3.2 s each). With --scores a stopped run continues.
SHARE ?= 0.75
mutants: .venv/installed-test
	$(BIN)/python -m benchmarks.scoreboard --parts exam --share $(SHARE) $(ARGS)

newcomer:
	$(PYTHON) benchmarks/newcomer.py $(ARGS)

bench: .venv/installed-test
	$(BIN)/python -m benchmarks $(ARGS)

# With a Python that has everything already, jax for CUDA included: make -o .venv/installed-test gpu BIN=/usr/bin
gpu: .venv/installed-test
	$(BIN)/python -m benchmarks.gpu $(if $(SMOKE),--smoke) $(ARGS)

# Material's banner on MkDocs 2 is not about this site.
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

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

.venv/without-torch/installed: pyproject.toml | .venv/bin/python
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

# What was installed is written down in a file per set of extras, so that the next call skips it.
.venv/installed-%: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e "$(call package,$*)"
	@touch $@
