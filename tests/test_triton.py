"""The Triton kernels without a GPU: interpreted, compiled, and what compiles them anew.

Interpreted, they run on the CPU through the tests of their ops (`make triton`; here one case of
each). What the interpreter gets wrong, or cannot show, and what stands in for it:

- float32 becomes bfloat16 by cutting off: `rounded` makes up for it there, for every number
  (test_token_math_triton.py); here the PTX has to round to nearest. Subnormal bfloat16 are wrong;
  no test has any.
- `tl.dot` of bfloat16 is nonsense: no kernel has one, the GEMMs are torch's.
- The larger of NaN and a number is NaN, on a GPU the number; `tl.exp` is exact, on a GPU a product
  and an approximate power of two; scans run in order, on a GPU in a tree: interpreter.py does as a
  GPU does. `tl.exp2` and division are still exact, up to 2 units in the last place on a GPU; a GPU
  fuses products and sums, flushes subnormal powers of two: `make gpu-check`. `tl.log` has to be no
  approximation in the PTX: its relative error near 1 would be without bound.
- Programs run one after the other, so none shows a race: all outputs are the same to the bit with
  the last program first (test_programs_triton.py), no kernel has atomics, and none waits for
  another. Inside a program nothing shows a missing barrier: rows that move up are read and
  written in one (`move_up_kernel`), with one in between.
- Addresses out of range read and write what stands there: interpreter.py makes them errors.
- int32 overflows in silence, as on a GPU: offsets are of int64, and test_logprob.py has rows
  more than 2**31 elements apart.
- Time, registers, the width of loads, what is compiled anew: here.
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
ARCHS = [int(arch) for arch in os.environ.get("PPOKERN_TEST_ARCHS", "90").split(",")]

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
def test_interpreted() -> None:
    files = [str(path) for path in sorted(ROOT.glob("tests/test_*.py"))]
    done = python(
        "-m", "pytest", "-q", "-k", "triton", "--sample", "1", *files, TRITON_INTERPRET="1"
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed >= 120, "most of it was deselected"


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
    alone = kernel.startswith("gae") or (kernel.startswith("linear") and "long" in call)
    assert code.resident >= (1 if alone else 2)
    if kernel == "logprob.reduce_kernel" and "V=64" not in call:
        assert code.resident >= 3
    if ("V=8192" in call or "V=151936" in call) and kernel != "logprob.finish_kernel":
        # a tile is 4 vectors a thread in float32, 2 in 16 bits; one that moves rows, twice as many
        reads = {"reduce_kernel": 1, "gradient_kernel": 2, "move_up_kernel": 4}
        vectors = 4 if "float32" in call else 2
        assert code.wide == vectors * reads[kernel.removeprefix("logprob.")]
    if kernel == "logprob.gradient_kernel" and "bfloat16" in call:
        assert "cvt.rn.bf16" in code.ptx and "cvt.rz.bf16" not in code.ptx
    assert not re.search(r"\b(atom|red)\.", code.ptx), "sums in no fixed order"
    assert "lg2.approx" not in code.ptx


def test_what_the_gate_measures() -> None:
    """A tile that is too large spills; unaligned rows have no wide loads."""
    launch = LAUNCHES["logprob.reduce_kernel", "bfloat16 V=8192 all"]
    columns = [p.name for p in launch.kernel.params].index("COLUMNS")
    constants = list(launch.constants)
    constants[columns] *= 8
    assert report.compiled(launch._replace(constants=tuple(constants)), ARCHS[0]).stack > 0
    unaligned = LAUNCHES["logprob.reduce_kernel", "bfloat16 V=8193 all"]
    assert report.compiled(unaligned, ARCHS[0]).wide == 0


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


SIZES = (1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 127, 128, 200, 256)


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
    for i, n in enumerate(SIZES):
        if calls == "logprob_calls":
            assert keys(make, n, 8192, 0.1 * (i + 1)) <= first
        elif calls == "linear_calls":
            assert keys(make, n, 5 * 4096, 0.1 * (i + 1)) <= first
        else:
            assert keys(make, n, 65 + 16 * i, 1 / (i + 1)) <= first
            assert keys(make, i + 1, 64 + n, 1.0) <= first
