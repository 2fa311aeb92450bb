"""What compiles CUDA C++ for the CPU catches faults, each planted in a small kernel.

And the op tests on the CUDA kernels compiled that way, of each a few cases: `make cuda-on-cpu` runs
all of them.
"""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("pybind11", reason="it comes with the extra `dev`")
from cuda_on_cpu import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif("PPOKERN_CUDA_ON_CPU" in os.environ, reason="inside of such a run"),
]

ROOT = Path(__file__).parent.parent
ORDERS = ("ascending", "descending", "random")

# Of each kernel in planted.cu what is said where its fault is planted, in both builds.
SAID = {
    "misaligned_vector": "misaligned address",
    "misaligned_store": "misaligned address",
    "misaligned_load": "16 bytes at an address that is no multiple of that",
    "ended_before_barrier": "waits in __syncthreads, but thread (127, 0, 0) has ended",
    "barriers_apart": "waits in __syncthreads, but thread (127, 0, 0) waits in __syncthreads_count",
    "barrier_in_a_branch": "waits in __shfl_xor_sync(0xffffffff) for lane 16, which waits",
    "absent_lane": "waits in __shfl_down_sync(0xffffffff) for lane 13, which has ended",
    "partial_warp": "waits in __shfl_xor_sync(0xffffffff) for lane 4, which the block lacks",
    "lane_outside_mask": "__shfl_sync from lane 16, not named in its mask",
    "caller_outside_mask": "__any_sync by a lane that its mask does not name",
    "too_many_threads": "CUDA error 9: invalid configuration argument",
    "no_threads": "CUDA error 9: invalid configuration argument",
    "too_much_shared": "CUDA error 1: invalid argument",
}
SAID_BY_ASAN = {
    "global_bounds": "heap-buffer-overflow",
    "static_shared_bounds": "global-buffer-overflow",
    "dynamic_shared_bounds": "use-after-poison",
}
# What shows in the results, in one of the orders at least.
SHOWN = (
    "missing_barrier",
    "missing_barrier_one_way",
    "missing_warp_barrier",
    "missing_second_barrier",
    "unwritten_shared",
)


@pytest.fixture(scope="module", params=["plain", "sanitize"])
def how(request: pytest.FixtureRequest) -> str:
    return request.param


@cache
def program(how: str) -> Path:
    return build.program("planted", how == "sanitize")


def run(how: str, order: str, fault: str, *kernels: str) -> tuple[int, str]:
    done = subprocess.run(
        [program(how), fault, *kernels],
        env=os.environ | {"PPOKERN_CUDA_ON_CPU_ORDER": order},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


@cache
def right(how: str, order: str) -> dict[str, str]:
    """The results of every kernel without its fault."""
    kernels = [*SAID, *SAID_BY_ASAN, *SHOWN, "everything", "last_block"]
    status, results = run(how, order, "right", *kernels)
    assert status == 0, results
    return dict(zip(kernels, results.splitlines(), strict=True))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", SAID)
def test_a_fault_is_reported(how: str, kernel: str, order: str) -> None:
    status, said = run(how, order, "planted", kernel)
    assert status != 0 and SAID[kernel] in said


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", SAID_BY_ASAN)
def test_an_access_out_of_bounds_is_reported(kernel: str, order: str) -> None:
    status, said = run("sanitize", order, "planted", kernel)
    assert status != 0 and SAID_BY_ASAN[kernel] in said


def test_a_write_beyond_dynamic_shared_memory_is_reported_without_asan() -> None:
    status, said = run("plain", "ascending", "planted", "dynamic_shared_bounds")
    assert status != 0 and "a write beyond the 512 bytes of shared memory" in said


def test_a_report_names_kernel_block_and_thread() -> None:
    _, said = run("plain", "ascending", "planted", "absent_lane")
    assert said.startswith("{anonymous}::absent_lane, block (0, 0, 0): thread (64, 0, 0) waits")


@pytest.mark.parametrize("kernel", SHOWN)
def test_what_is_missing_shows_in_some_order(how: str, kernel: str) -> None:
    planted = [run(how, order, "planted", kernel) for order in ORDERS]
    assert all(status == 0 for status, _ in planted)
    assert any(results.strip() != right(how, "ascending")[kernel].strip() for _, results in planted)


def test_without_its_fault_every_kernel_is_right_in_every_order(how: str) -> None:
    first = right(how, "ascending")
    assert all(right(how, order) == first for order in ORDERS)
    assert set(first["everything"].split()) == {"1"}
    assert set(first["last_block"].split()) == {"28"}


def test_an_order_that_is_none() -> None:
    status, said = run("plain", "sideways", "right", "everything")
    assert status != 0 and "expected ascending, descending or random, got sideways" in said


# The op tests -------------------------------------------------------------------------------------

ROOMS = ("logprob", "linear", "linear_loss", "gae", "ppo_loss")
ROOMS += ("logprob_cuda", "linear_cuda", "gae_native")  # the kernels themselves


@pytest.mark.parametrize("order", ORDERS)
def test_the_ops_on_the_kernels(order: str) -> None:
    files = [f"tests/test_{room}.py" for room in ROOMS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "cuda", "--sample", "1", *files],
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "PPOKERN_CUDA_ON_CPU": str(build.module(sanitize=False)),
            "PPOKERN_CUDA_ON_CPU_ORDER": order,
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed >= 100, "most of it was deselected"
