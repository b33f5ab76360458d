# make demo | quick | test | native | lint | docs | bench | dist | clean; what takes longer: make nightly WHAT=mutants (make nightly: what there is)
#
# A virtual environment is made in .venv if there is none, and reused. A stamp records that it is complete, so that a second
# run starts at once; a change to the packaging or to the engine's sources installs (and so builds) again.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
PY := $(VENV)/bin/python
STAMP := $(VENV)/.pmstore-installed
NATIVE := $(filter-out native/tests/%,$(wildcard native/*/*.c native/*/*.h)) native/pms.cdef
BINDING := pmstore/_engine/_build_ffi.py $(wildcard pmstore/_engine/*.c pmstore/_engine/*.h)

# Without bytecode each process compiles what it imports: collecting the tests takes twice as long. An environment may forbid
# it for images of containers.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: all venv demo quick test native lint docs bench dist nightly clean

all: venv
venv: $(STAMP)

$(PY):
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml setup.py constraints.txt $(BINDING) $(NATIVE) | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

demo: $(STAMP)
	$(VENV)/bin/pmstore demo

# On all processors. While a test that is marked `alone` runs, no other one does.
WORKERS ?= $(shell nproc)
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal
test: $(STAMP)
	$(PYTEST)

# What tests/durations.json does not know to be slow: two minutes are aimed at.
quick: $(STAMP)
	$(PYTEST) -m quick

# The engine's own tests, plain and under sanitizers: as many side by side as there are processors; what each prints stays together.
native:
	$(MAKE) -C native -j$(shell nproc) --output-sync=target test

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy --strict tests/typed/program.py tools/release
	$(MAKE) -C native lint

# The documents as a site, build/site/index.html, with no dead link. Needs no network to be looked at.
DOCS_STAMP := $(VENV)/.pmstore-docs
$(DOCS_STAMP): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

docs: $(DOCS_STAMP)
	$(PY) -m sphinx -q -W --keep-going -b html -c docs/site -d build/doctrees . build/site
	$(PY) docs/site/links.py build/site

bench: $(STAMP)
	$(PY) -m benchmarks --results

# The source package and wheels (manylinux_2_28, x86-64 and aarch64) for each CPython from 3.10 on that is here, in dist/, tried. zig, from a Python
# package, compiles them. DIST_OPTIONS: see `python -m tools.release.dist --help`.
dist:
	$(PYTHON) -m tools.release.dist $(DIST_OPTIONS)

# tests/nightly.py has the table. Variables of this command line are theirs, too: make nightly WHAT=fuzz FUZZ_SECONDS=30
nightly:
	@$(PYTHON) tests/nightly.py $(WHAT)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f pmstore/_engine/*.so pmstore/_engine/_native.c $(STAMP) $(DOCS_STAMP)
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	$(MAKE) -C native clean
