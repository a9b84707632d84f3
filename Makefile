# Everything a fresh checkout needs; each target first installs what it uses into .venv.
#   make demo    train with two worker groups on the CPU and compare with DDP
#   make demo-federation    a hub and three sites on this machine: one is killed, and comes back
#   make test    run the fast tests: six minutes on two cores
#   make large   run those with models of real sizes
#   make slow    run those that take more than a minute each
#   make chaos   let everything that can fail in a federation fail, for ten minutes; make soak: a thousand times, for hours
#   make foreign run projects that were written for DDP, in .venv-foreign
#   make oldest  run tests of the strategies with the oldest Lightning that is allowed, in .venv-oldest
#   make gpu     what a CUDA device shows in ten minutes, with the torch and Lightning of PYTHON; it installs nothing
#   make lint types docs venv clean

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
DEMO_ARGS ?=
GPU_ARGS ?=
# Many tests start several ranks and bound their waits. On a busy machine one may be held up for longer, so a test that
# fails is tried once more, and shows as R and in the summary. They wait for a third of their time: three at a time keep
# two cores busy.
PYTEST_ARGS ?= --numprocesses 3 --reruns 1

BIN := $(VENV)/bin
BUILT_FROM := pyproject.toml hatch_build.py lightning_sdiloco/compression/fp4.c
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable

# The register of Lightning's names, and at least one fit for each promise that rests on them.
OLDEST_TESTS := tests/test_surface.py \
  $(patsubst %,tests/lightning/test_%.py,register strategy silence checkpoint works_with)

.PHONY: venv demo demo-federation test large slow chaos soak foreign oldest gpu lint types docs clean

venv: $(VENV)/.installed

demo: $(VENV)/.installed-examples
	$(BIN)/python examples/demo.py $(DEMO_ARGS)

demo-federation: $(VENV)/.installed-examples $(VENV)/.installed-federated
	$(BIN)/python examples/demo_federation.py $(DEMO_ARGS)

# One thread per process: tests start several ranks on the same cores, and mostly wait for each other.
test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not large and not slow and not chaos and not soak and not foreign" $(PYTEST_ARGS)

large slow: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m $@ $(PYTEST_ARGS)

# One after the other, and once: who stands still is timed.
chaos soak: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m $@ tests/chaos/test_chaos.py

foreign:
	$(MAKE) .venv-foreign/.installed-foreign VENV=.venv-foreign CONSTRAINTS=constraints-foreign.txt
	@# litgpt asks for older releases of what the others need, and runs with these.
	.venv-foreign/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints-foreign.txt litgpt
	OMP_NUM_THREADS=1 .venv-foreign/bin/python -m pytest -m foreign $(PYTEST_ARGS) tests/foreign tests/lightning/test_loggers.py

oldest: build/constraints-oldest.txt
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=$< PYTEST_ARGS='$(PYTEST_ARGS) $(OLDEST_TESTS)'

# The other versions are those of constraints.txt, torch among them.
build/constraints-oldest.txt: constraints.txt constraints-oldest.txt
	@mkdir -p build
	{ cat constraints-oldest.txt; grep -vE '^(fsspec|lightning|pytorch-lightning|rich)=' constraints.txt; } > $@

# Not in .venv: on a machine with a GPU, torch and Lightning are there already, and perhaps no network.
gpu:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu $(GPU_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-oldest .venv-foreign build dist site runs data .pytest_cache .mypy_cache .ruff_cache lightning_sdiloco/compression/libfp4.so .hypothesis *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: PYTHON=... make")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# The stamps are newer than what they were made from, so nothing is installed twice.
$(VENV)/.installed: $(BUILT_FROM) $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing into $(VENV); PyTorch is large, so this can take some minutes ..."
	$(INSTALL) .
	@touch $@

$(VENV)/.installed-%: $(BUILT_FROM) $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing into $(VENV), with what '$*' needs ..."
	$(INSTALL) ".[$*]"
	@touch $@
