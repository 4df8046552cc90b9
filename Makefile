# Two commands do everything on a fresh machine: `make demo` and `make test`.
export PYTHONSAFEPATH = 1# the folder kernels/ must not shadow an installed package of that name
PYTHON ?= python3
BIN = .venv/bin

.PHONY: venv demo test check bench gpu clean

venv: .venv/ready

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[demo,test]'
	touch $@

demo: venv
	$(BIN)/commrt train --workers 4 --algorithm torus2d --compare ddp

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/pytest -n 2 --dist worksteal

bench: venv
	$(BIN)/pytest bench --benchmark-only

# All that needs a GPU: checks, the checks again under the sanitizer where it is installed, figures to bench/results.
GPU_CHECKS = -m pytest bench/test_on_gpu.py -n0 -q
gpu: export PYTHONPATH = bench
gpu: venv
	$(BIN)/python -c 'import torch; assert torch.cuda.is_available(), "torch finds no GPU here: nothing was measured"'
	$(BIN)/python $(GPU_CHECKS)
	if command -v compute-sanitizer; then PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
		compute-sanitizer --error-exitcode 9 $(BIN)/python $(GPU_CHECKS) -k "not two_to_the_31"; fi
	mkdir -p bench/results
	$(BIN)/python bench/ceiling.py | tee bench/results/ceiling.json
	$(BIN)/pytest bench/test_kernels.py --benchmark-only -n0 --benchmark-json=bench/results/kernels.json
	$(BIN)/python bench/tune_kernels.py --variants | tee bench/results/sizes.txt

clean:
	rm -rf .venv build dist *.egg-info
