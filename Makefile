# make demo | test | programs | native-test | fuzz | fuzz-formats | asan-python | asan-python-quick | crashtest | crashtest-long | crashtest-peers | crashtest-vm | mutants | stress
#      lint tidy | bench | instructions | clean
#
# A virtual environment is made in .venv if there is none, and reused. A stamp records that it is complete, so that a second
# run starts at once; a change to the packaging or to the engine's sources installs (and so builds) again.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
PY := $(VENV)/bin/python
STAMP := $(VENV)/.pmstore-installed
NATIVE := $(filter-out native/tests/%,$(wildcard native/*/*.c native/*/*.h)) native/pms.cdef

BINDING := pmstore/engine/_build_ffi.py $(wildcard pmstore/engine/*.c pmstore/engine/*.h)

.PHONY: all demo test programs native-test fuzz fuzz-formats asan-python asan-python-quick crashtest crashtest-long crashtest-peers crashtest-vm mutants stress lint tidy bench bench-quick instructions clean venv

all: venv
venv: $(STAMP)

$(PY):
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml setup.py constraints.txt $(BINDING) $(NATIVE) | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

demo: $(STAMP)
	$(VENV)/bin/pmstore demo

test: $(STAMP)
	$(PY) -m pytest

# Training programs of many kinds, killed and stopped: minutes. A short choice of them is in `make test`.
programs: $(STAMP)
	$(PY) -m tests.programs

native-test:
	$(MAKE) -C native test

fuzz:
	$(MAKE) -C native fuzz

# Dumps, npz, safetensors and manifests, damaged and forged: FORMATS_SECONDS together.
FORMATS_SECONDS ?= 600
FORMATS_SEED ?= 2
fuzz-formats: $(STAMP)
	$(PY) -m crashtests.formats --seconds $(FORMATS_SECONDS) --seed $(FORMATS_SEED)

# Python tests with an engine built under AddressSanitizer (gcc). Its allocator also stands in for Python's, so that a view or a buffer that
# outlives its memory is seen. Leaks are not asked for: the interpreter has some. Run from build/asan, so that children import that engine, too.
# Left out: gdb (slow under ASan); DataLoader's workers, which are forked beside running threads and allocate: they may wait for ever for a lock
# of ASan's allocator that a thread held at the fork; test_deaths, whose limits of address space leave no room for ASan's shadow; what is slow by
# its many processes (kills of training runs, the demo, crashtests); what has no native code (scheduler, simulation).
ASAN := $(CURDIR)/build/asan
ASAN_QUICK := lifetimes lists slots store
ASAN_ALL := $(ASAN_QUICK) any_array bad_input cli cli_data compact dtypes fork_threads full interrupt kill limits machine processes repair signals \
    slots_beside values tiers/local tiers/enemy_tiers torch/attach torch/mirrors torch/optim torch/rollback
ASAN_TESTS ?= $(ASAN_ALL)
ASAN_RUN := cd $(ASAN) && PYTHONPATH=$(ASAN) PYTHONMALLOC=malloc \
    LD_PRELOAD="$$(gcc -print-file-name=libasan.so):$$(gcc -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0:handle_segv=0:handle_sigbus=0:detect_stack_use_after_return=0 $(abspath $(PY))
asan-python: $(STAMP)
	CC=gcc CFLAGS='-O1 -fsanitize=address -fno-omit-frame-pointer' LDFLAGS=-fsanitize=address \
	    $(PY) setup.py -q build --build-lib $(ASAN) --build-temp build/asan-objects
	$(ASAN_RUN) -c 'import pmstore.engine._native as engine; assert engine.__file__.startswith("$(ASAN)"), engine.__file__'
	PMSTORE_EXAMPLES=$${PMSTORE_EXAMPLES-10}; export PMSTORE_EXAMPLES; \
	$(ASAN_RUN) -m pytest -c $(CURDIR)/pyproject.toml --rootdir=$(CURDIR) -p no:cacheprovider -k 'not gdb and not data_loader' $(PYTEST_OPTIONS) \
	    $(foreach t,$(ASAN_TESTS),$(CURDIR)/tests/$(dir $(t))test_$(notdir $(t)).py)
asan-python-quick:
	$(MAKE) asan-python ASAN_TESTS='$(ASAN_QUICK)'

crashtest: $(STAMP)
	$(PY) -m crashtests.mixtures
	$(PY) -m crashtests.tiers
	$(PY) -m crashtests

mutants: $(STAMP)
	$(PY) -m crashtests.mutants

# An hour or more; interrupted, it goes on where it was when it is started again.
crashtest-long: $(STAMP)
	$(PY) -m crashtests.coverage
	$(PY) -m crashtests.long
	$(PY) -m crashtests.mixtures --examples 300
	$(PY) -m crashtests.tiers --images 20000 --fault-stride 1

# An hour: programs that do everything at once, 10,000 kills.
stress: $(STAMP)
	$(PY) -m crashtests.stress --seconds 3600 --kills 10000

crashtest-peers: $(STAMP)
	$(PY) -m crashtests.peers

# As root: installs Debian's QEMU and kernel, and takes minutes.
crashtest-vm: $(STAMP)
	$(PY) -m crashtests.vm

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(MAKE) -C native lint

tidy: $(STAMP)
	$(MAKE) -C native tidy

bench: $(STAMP)
	$(PY) -m benchmarks --results

bench-quick: $(STAMP)
	$(PY) -m benchmarks --quick

instructions: $(STAMP)
	$(PY) -m benchmarks.instructions --check

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f pmstore/engine/*.so pmstore/engine/_native.c $(STAMP)
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	$(MAKE) -C native clean
