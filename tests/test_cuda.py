"""The CUDA C++ kernels without a GPU: what nvcc makes of them.

On the CPU, compiled by g++, they run through the tests of their ops: see test_cuda_on_cpu.py.
"""

import os
import re
from pathlib import Path

import pytest

from benchmarks import cuda_report as report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(report.NVCC is None, reason="needs nvcc"),
]
ARCHS = [int(arch) for arch in os.environ.get("PPOKERN_TEST_ARCHS", "90").split(",")]

# Loads and stores of 16 bytes that a kernel has at least: a lane has 4 vectors in flight, which may
# lie across two each.
WIDE = {
    "logprob.reduce_kernel": 8,
    "logprob.gradient_kernel": 8 + 4,
    "logprob.move_up_kernel<uint4>": 8 + 8,
    "linear.loss_rows_kernel": 8 + 8 + 4,
    "gae.gae_kernel": 3 + 2,
}

# Blocks that a multiprocessor holds at least.
RESIDENT = {"logprob.": 3, "linear.": 1, "gae.gae_kernel": 4, "gae.check_kernel": 2, "ppo_loss.": 2}


def least(of: dict[str, int], name: str) -> int:
    return next((n for start, n in of.items() if name.startswith(start)), 0)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", report.SOURCES, ids=lambda path: path.parent.name)
def test_every_kernel_compiles(source: Path, arch: int) -> None:
    """Without a spilled register, and so that enough of it fits on a multiprocessor."""
    if not report.known([arch]):
        pytest.skip(f"this nvcc does not know sm_{arch}")
    kernels = report.compiled(source, arch)
    assert kernels
    for name, code in kernels.items():
        name = f"{source.parent.name}.{name}"
        assert code.stack == code.spilled == 0, name
        assert code.shared <= 16 * 1024, name
        assert code.resident >= max(least(RESIDENT, name), 1), name
        assert code.wide >= least(WIDE, name), name


@pytest.mark.parametrize("source", report.SOURCES, ids=lambda path: path.parent.name)
def test_no_float_is_added_atomically(source: Path) -> None:
    """Sums in no fixed order would differ from run to run."""
    assert not re.search(r"\batomicAdd\b", source.read_text())
