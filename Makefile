# Everything a fresh checkout needs; each target first installs what it uses into .venv.
#   make demo    train with two worker groups on the CPU and compare with DDP
#   make demo-federation    a hub and three sites on this machine: one is killed, and comes back
#   make test    run the fast tests
#   make large   run those with models of real sizes
#   make slow    run those that take more than half a minute each; make long: both in one run
#   make tests   run the fast, the large and the slow ones in one run, as .ci/run does
#   make chaos   let everything that can fail in a federation fail, for ten minutes; make soak: a thousand times, and over 5,000 rounds, for hours
#   make foreign run projects that were written for DDP, in .venv-foreign
#   make oldest  run tests of the strategies with the oldest Lightning that is allowed, in .venv-oldest
#   make newest  run tests of the engine and the strategies with the newest torch, in .venv-newest: some gigabytes
#   make audit   make coverage, of lines by the fast tests, with a floor; and make mutants, a hundred: hours, weekly in CI
#   make gpu     what a CUDA device shows in ten minutes, with the torch and Lightning of PYTHON; it installs nothing
#   make gpu-curve  train 10 million parameters in groups on a CUDA device, for MINUTES at a time; it needs CORPUS
#   make dist    wheels and sources in dist/, checked, and the demo run from each wheel without this checkout
#   make lint types docs venv clean

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
DEMO_ARGS ?=
GPU_ARGS ?=
MINUTES ?= 9
CORPUS ?= data/linux.xz
AUDIT_ARGS ?=
# Many tests start several ranks and bound their waits. On a busy machine one may be held up for longer, so a test that
# fails is tried once more, and shows as R and in the summary. They wait for a third of their time: three at a time keep
# two cores busy. Neighbours share what they have trained, so each process starts with a stretch of its own, and takes from
# another's end when it is through.
PYTEST_ARGS ?= --numprocesses 3 --dist worksteal --reruns 1

# Hundreds of processes import the package, and each process of pytest all tests: without bytecode that takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
BUILT_FROM := pyproject.toml hatch_build.py lightning_sdiloco/compression/fp4.c
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# The oldest Lightning that pyproject.toml allows, and what it needs older than constraints.txt has it. No marker can say
# this: the interpreter is the same.
OLDEST := fsspec==2025.12.0 lightning==2.5.0 packaging==24.2 pytorch-lightning==2.5.0 rich==14.0.0

# The register of Lightning's names, and at least one fit for each promise that rests on them.
OLDEST_TESTS := tests/test_surface.py \
  $(patsubst %,tests/lightning/test_%.py,register strategy silence checkpoint works_with)

# What rests on torch: arithmetic, process groups and devices, and fits with a Trainer, Fabric and sharded models.
NEWEST_TESTS := tests/algorithm tests/compression tests/comm tests/engine \
  $(patsubst %,tests/lightning/test_%.py,register strategy fabric sharded checkpoint works_with loops)

.PHONY: venv demo demo-federation test large slow long tests chaos soak foreign environment-foreign oldest environment-oldest newest audit coverage mutants gpu gpu-curve dist lint types docs clean

venv: $(VENV)/.installed

demo: $(VENV)/.installed-examples
	$(BIN)/sdiloco demo $(DEMO_ARGS)

demo-federation: $(VENV)/.installed-examples
	$(BIN)/python examples/demo_federation.py $(DEMO_ARGS)

# One thread per process: tests start several ranks on the same cores, and mostly wait for each other.
test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not large and not slow and not chaos and not soak and not foreign" $(PYTEST_ARGS)

large slow: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m $@ $(PYTEST_ARGS)

# While the slow ones wait for processes, the large ones train.
long: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "large or slow" $(PYTEST_ARGS)

# One run collects the tests once.
tests: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not chaos and not soak and not foreign" $(PYTEST_ARGS)

# One after the other, and once: who stands still is timed.
chaos soak: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m $@ tests/chaos

foreign: environment-foreign
	OMP_NUM_THREADS=1 .venv-foreign/bin/python -m pytest -m foreign $(PYTEST_ARGS) tests/foreign tests/lightning/test_loggers.py

environment-foreign: .venv-foreign/.installed-vision

.venv-foreign/.installed-vision: $(BUILT_FROM) $(CONSTRAINTS) Makefile
	$(MAKE) .venv-foreign/.installed-foreign VENV=.venv-foreign
	@# These ask for older releases of what the others need, and run with the newer ones.
	.venv-foreign/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint $(CONSTRAINTS) \
	  litgpt pytorch-tabular
	@# In a folder of their own: see tests/foreign/__init__.py.
	.venv-foreign/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint $(CONSTRAINTS) \
	  --upgrade --target .venv-foreign/vision anomalib kornia lightly segmentation-models-pytorch timm torchgeo torchvision
	@touch $@

oldest: build/constraints-oldest.txt
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=$< PYTEST_ARGS='$(PYTEST_ARGS) $(OLDEST_TESTS)'

environment-oldest: build/constraints-oldest.txt
	$(MAKE) .venv-oldest/.installed-test VENV=.venv-oldest CONSTRAINTS=$<

# The first pin of a package counts: the other versions are those of constraints.txt, torch among them.
build/constraints-oldest.txt: constraints.txt Makefile
	@mkdir -p build
	printf '%s\n' $(OLDEST) | awk -F= '!seen[$$1]++' - constraints.txt > $@

# A torch for CUDA that asks a driver for devices can no longer fork processes that use CUDA, and tests fork their ranks.
newest: build/constraints-newest.txt
	CUDA_VISIBLE_DEVICES= PYTORCH_NVML_BASED_CUDA_CHECK=1 $(MAKE) test VENV=.venv-newest CONSTRAINTS=$< PYTEST_ARGS='$(PYTEST_ARGS) $(NEWEST_TESTS)'

# Without a pin pip takes the newest. One that was installed before stays until make clean.
build/constraints-newest.txt: constraints.txt Makefile
	@mkdir -p build
	grep --invert-match --extended-regexp '^(torch|torchvision)==' constraints.txt > $@

audit: coverage mutants

# Lines that only a killed process ran are not counted.
coverage: $(VENV)/.installed-audit
	rm -rf build/coverage
	mkdir -p build/coverage
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -m "not large and not slow and not chaos and not soak and not foreign" $(PYTEST_ARGS)
	$(BIN)/coverage combine
	$(BIN)/coverage report

# Those that survive are listed with a reason, or have no test that they should have.
mutants: $(VENV)/.installed-audit
	$(BIN)/python -m tests.audit.mutants $(AUDIT_ARGS)

# Not in .venv: on a machine with a GPU, torch and Lightning are there already, and perhaps no network.
gpu:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu $(GPU_ARGS)

# `python -m benchmarks.corpus` makes the corpus. Two at a time: a training waits for its host half of the time.
gpu-curve:
	PYTHONPATH=. $(PYTHON) -m benchmarks.curve --corpus $(CORPUS) --workers 2 --minutes $(MINUTES) --json docs/benchmarks/curve.json

# A wheel with fp4.c in it, tagged for the oldest glibc that its library runs with, one without for everything else, and
# that of a hub, which `make slow` runs without torch.
dist: $(VENV)/.installed-dev
	rm -rf dist build/linux
	$(BIN)/python -m build --no-isolation --outdir build/linux
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/linux/*.whl
	HATCH_BUILD_NO_HOOKS=true $(BIN)/python -m build --no-isolation --wheel --outdir dist
	mv build/linux/*.tar.gz dist
	$(BIN)/python -m build --no-isolation --wheel --outdir dist hub
	$(BIN)/twine check --strict dist/*
	for wheel in dist/lightning_sdiloco-*.whl; do .ci/try-wheel "$$wheel" $(VENV) || exit; done

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-foreign build dist site runs data .pytest_cache .mypy_cache .ruff_cache lightning_sdiloco/compression/libfp4.so .hypothesis *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: PYTHON=... make")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# The group dev includes what these stand for.
DEV_STAMPS := $(VENV)/.installed $(patsubst %,$(VENV)/.installed-%,test docs examples)

# The stamps are newer than what they were made from, so nothing is installed twice. The pip of an old Python knows no
# --group.
$(VENV)/.installed: $(BUILT_FROM) $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing into $(VENV); PyTorch is large, so this can take some minutes ..."
	$(PIP) --constraint $(CONSTRAINTS) --editable .
	@touch $@

$(VENV)/.installed-%: $(BUILT_FROM) $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing into $(VENV), with what '$*' needs ..."
	$(PIP) 'pip>=25.1'
	$(PIP) --constraint $(CONSTRAINTS) --editable '.[federated]' --group $*
	@touch $@ $(if $(filter dev,$*),$(DEV_STAMPS))
