# make run   create the environment, install, run the main job on an embedded checkpoint
# make test  the tests of every change; make test-long adds what takes longer; make test-gpu needs a CUDA device
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
GPU_JOBS ?= $(shell nproc)
OUT ?= runs/quick-$(shell date -u +%Y%m%d-%H%M%S)

export PYTHONSAFEPATH = 1
export OMP_NUM_THREADS = 1
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
OLD = build/transformers-5.17
OLD_PACKAGES = transformers==5.17.0 huggingface-hub==1.33.0 httpx==0.28.1 httpcore h11 anyio idna certifi
OLD_TRITON = build/triton-3.6
OLD_TESTS = tests/test_adapters.py tests/test_adapters_families.py tests/test_lockstep.py tests/test_models.py tests/test_checkpoints.py
DEV_STAMP = $(VENV)/.installed-dev

.PHONY: run test test-long test-gpu lint clean

run: $(STAMP)
	$(BIN)/driftgate run --out $(OUT)

test: $(DEV_STAMP)
	$(BIN)/pytest -n $(JOBS) -m "not gpu and not long"

test-long: $(DEV_STAMP) $(OLD)/.installed $(OLD_TRITON)/.installed
	RUN_LONG=1 $(BIN)/pytest -m "long and not gpu"  # one at a time: the main job is timed
	PYTHONPATH=$(OLD) $(BIN)/pytest -n $(JOBS) -m "not gpu and not long" $(OLD_TESTS)
	PYTHONPATH=$(OLD_TRITON) $(BIN)/pytest -n $(JOBS) -m "not gpu and not long" tests/test_compile.py tests/test_compile_strides.py

# the oldest transformers that is covered, beside the pinned one
$(OLD)/.installed: $(DEV_STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $(OLD) $(OLD_PACKAGES)
	touch $@

# the oldest Triton that is covered: it chooses other layouts than the pinned one
$(OLD_TRITON)/.installed: $(DEV_STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $(OLD_TRITON) triton==3.6.0
	touch $@

# compiles some hundred kernels, so one worker per core; the environment that has a CUDA torch: make test-gpu BIN=/path/bin
test-gpu:
	$(BIN)/pytest tests/gpu tests/test_quant_device.py tests/test_loading.py -m gpu -n $(GPU_JOBS) -p no:benchmark

lint: $(DEV_STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,lint,notebooks]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
