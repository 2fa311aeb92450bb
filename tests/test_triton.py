"""The Triton kernels without a GPU: interpreted, compiled, and what compiles them anew.

Interpreted, they run on the CPU through the tests of their ops, of each a few cases. What the
interpreter would not show stands here: the code they become, and that a float32 becomes a bfloat16
by rounding (it cuts off, and `rounded` makes up for it there).
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="no Triton: make triton installs it")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")

ROOT = Path(__file__).parent.parent
ROOMS = (
    "logprob",
    "linear",
    "linear_loss",
    "gae",
    "ppo_loss",
    "whiten",
    "reward",
    "token_math_triton",
    "logprob_triton",
    "linear_triton",
)
ARCHS = [int(arch) for arch in os.environ.get("PPOKERN_TEST_ARCHS", "90").split(",")]
SLOW = ("test_gae.py::test_determinism", "test_ppo_loss.py::test_determinism")  # many sequences

if not INTERPRETED:
    from benchmarks import kernel_report as report

    LAUNCHES = report.configurations()


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )


# Interpreted --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_interpreted(room: str) -> None:
    skipped = [f"--deselect=tests/{test}" for test in SLOW]
    done = python(
        *("-m", "pytest", "-q", "-x", "-k", "triton", "--sample", "2", *skipped),
        f"tests/test_{room}.py",
        TRITON_INTERPRET="1",
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed >= 8, "most of it was deselected"


ONE_CALL = """
import torch, ppokern
try:
    with ppokern.use_backend("triton"):
        ppokern.selected_logprobs(torch.zeros(1, 4), torch.tensor([2]))
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is available")
def test_tensors_on_the_cpu_need_the_interpreter() -> None:
    assert "TRITON_INTERPRET=1" in python("-c", ONE_CALL, TRITON_INTERPRET="0").stdout
    assert python("-c", ONE_CALL, TRITON_INTERPRET="1").stdout == ""


def test_the_import_does_not_bring_triton() -> None:
    code = "import sys, ppokern; print('triton' in sys.modules)"
    assert python("-c", code).stdout == "False\n"


def test_float64_is_refused() -> None:
    code = ONE_CALL.replace("zeros(1, 4)", "zeros(1, 4).double()")
    done = python("-c", code, TRITON_INTERPRET="1")
    assert "'triton' cannot do torch.float64 on cpu; can: torch" in done.stdout


# Compiled -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", LAUNCHES if not INTERPRETED else (), ids=": ".join)
def test_every_configuration_compiles(name: tuple[str, str], arch: int) -> None:
    """Without a spilled register, and so that enough of it fits on a multiprocessor."""
    kernel, call = name
    code = report.compiled(LAUNCHES[name], arch)
    assert code.stack == 0
    assert code.shared <= 16 * 1024
    assert code.resident >= (2 if kernel.startswith("logprob") else 1)
    if kernel == "logprob.reduce_kernel" and "V=64" not in call:
        assert code.resident >= 3
    if "8192" in call and kernel != "logprob.finish_kernel":
        # a tile is 4 vectors a thread in float32, 2 in 16 bits; one that moves rows, twice as many
        reads = {"reduce_kernel": 1, "gradient_kernel": 2, "move_up_kernel": 4}
        vectors = 4 if "float32" in call else 2
        assert code.wide == vectors * reads[kernel.removeprefix("logprob.")]
    if kernel == "logprob.gradient_kernel" and "bfloat16" in call:
        assert "cvt.rn.bf16" in code.ptx and "cvt.rz.bf16" not in code.ptx
    assert not re.search(r"\b(atom|red)\.", code.ptx), "sums in no fixed order"


@pytest.mark.slow
@pytest.mark.skipif(len(ARCHS) == 1, reason="make triton compiles for all")
@pytest.mark.parametrize("name", LAUNCHES if not INTERPRETED else (), ids=": ".join)
def test_every_configuration_compiles_for_amd(name: tuple[str, str]) -> None:
    registers, stack, shared = report.compiled_for_amd(LAUNCHES[name])
    assert 0 < registers <= 256 and stack == 0
    assert shared <= 16 * 1024


def keys(calls: Callable[..., dict[str, Callable]], *sizes: float) -> set:
    with report.recorded() as launches:
        for call in calls(*sizes).values():
            call()
    return set(launches)


@pytest.mark.parametrize(
    "calls",
    [
        "logprob_calls",
        "linear_calls",
        "gae_calls",
        "whiten_calls",
        "ppo_loss_calls",
        "reward_calls",
    ],
)
def test_nothing_is_compiled_anew_for_another_size(calls: str) -> None:
    """Over 20 shapes and numbers, those that Triton looks at among them: 1, and multiples of 16."""
    make = getattr(report, calls)
    first = keys(make)
    assert first
    for i, n in enumerate([1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 127, 128, 200, 5, 7]):
        if calls == "logprob_calls":
            assert keys(make, n, 8192, 0.1 * (i + 1)) <= first
        elif calls == "linear_calls":
            assert keys(make, n, 5 * 4096, 0.1 * (i + 1)) <= first
        else:
            assert keys(make, n, 65 + 16 * i, 1 / (i + 1)) <= first
            assert keys(make, i + 1, 64 + n, 1.0) <= first
