import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import calls
import pytest
import torch
from matrix import CAN

import ppokern
from ppokern import available_backends, set_validation, use_backend

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("torch", "cpu", "triton", "cuda")
ONE_CALL = """
import torch, ppokern
logits, ids = torch.zeros(1, 4), torch.tensor([2])
print(ppokern.selected_logprobs(logits, ids).item())
"""


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PPOKERN_")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**kept, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_folder_without_cuda_kernels(tmp_path: Path) -> None:
    """Not those of a GPU in silence, where they were built too."""
    done = python("import ppokern; ppokern.gae", PPOKERN_CUDA_ON_CPU=str(tmp_path))
    assert f"PPOKERN_CUDA_ON_CPU: expected a folder with the module _cuda, got '{tmp_path}'" in (
        done.stderr
    )


def test_names() -> None:
    names = available_backends()
    assert isinstance(names, tuple) and "torch" in names
    assert set(names) <= set(NAMES) and len(set(names)) == len(names)


def test_every_available_backend_is_in_the_matrix() -> None:
    assert set(available_backends()) <= set(CAN)


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ValueError, match="nonsense"), use_backend("nonsense"):
        pass


@pytest.mark.parametrize("name", [n for n in NAMES if n not in available_backends()])
def test_an_absent_backend_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=name), use_backend(name):
        ppokern.selected_logprobs(torch.zeros(1, 4), torch.tensor([2]))


WITH_KERNELS = ("logprob", "linear", "gae", "ppo_loss")  # the others are plain torch on the CPU


def op_of(name: str) -> str:
    first = name.split("_")[0]
    rooms = {"selected": "logprob", "kl": "reward", "shaped": "reward", "ppo": "ppo_loss"}
    return rooms.get(first, first)


@pytest.mark.parametrize("backend", [n for n in available_backends() if n != "torch"])
@pytest.mark.parametrize("name", [n for n in calls.NAMES if op_of(n) in WITH_KERNELS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_named_backend_does_the_call_or_says_what_can(
    backend: str, name: str, dtype: torch.dtype
) -> None:
    """Never another one in silence: what is not in the matrix is an error."""
    can = CAN[backend]
    with torch.device(can.device):
        call = calls.every(dtype)[name]
    if op_of(name) in can.ops and dtype in can.dtypes:
        with use_backend("torch"):
            expected = calls.outputs(call.fn(**call.args))
        with use_backend(backend):
            out = calls.outputs(call.fn(**call.args))
        for a, b in zip(out, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    else:
        with use_backend(backend), pytest.raises(ValueError, match=rf"{backend}.*torch"):
            call.fn(**call.args)


@pytest.mark.parametrize("name", calls.NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_default_does_every_call(name: str, dtype: torch.dtype) -> None:
    """Also in float64, whatever the fast backend lacks."""
    call = calls.every(dtype)[name]
    with use_backend("torch"):
        expected = calls.outputs(call.fn(**call.args))
    for a, b in zip(calls.outputs(call.fn(**call.args)), expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def chosen() -> str:
    """The backend that refuses float64, or torch, which doesn't."""
    try:
        ppokern.gae(torch.zeros(3).double(), torch.zeros(3).double())
    except ValueError as error:
        return next(n for n in reversed(NAMES) if n in str(error))
    return "torch"


def test_nesting_and_leaving() -> None:
    other = available_backends()[-1]
    default = chosen()
    with use_backend(other):
        assert chosen() == other
        with use_backend("torch"):
            assert chosen() == "torch"
        assert chosen() == other
    assert chosen() == default
    with pytest.raises(KeyError), use_backend(other):
        raise KeyError
    assert chosen() == default


def test_another_thread_is_not_affected() -> None:
    seen: list[str] = []
    with use_backend(available_backends()[-1]):
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
    assert seen == ["torch"]


def test_backward_uses_what_forward_used() -> None:
    """Leaving the block between forward and backward is fine."""
    x = torch.randn(2, 5, requires_grad=True)
    with use_backend("torch"):
        lp = ppokern.selected_logprobs(x, torch.tensor([1, 2]))
    lp.sum().backward()
    assert x.grad is not None


# The environment ----------------------------------------------------------------------------------


def test_backend_from_the_environment() -> None:
    done = python(ONE_CALL, PPOKERN_BACKEND="torch")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(-1.3862943, abs=1e-6)


@pytest.mark.parametrize("name", ["nonsense", *(n for n in NAMES if n not in available_backends())])
def test_a_wrong_backend_in_the_environment(name: str) -> None:
    done = python(ONE_CALL, PPOKERN_BACKEND=name)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError") and name in last


def test_use_backend_beats_the_environment() -> None:
    code = ONE_CALL.replace("print(", "with ppokern.use_backend('torch'): print(")
    name = next(n for n in NAMES if n not in available_backends())
    assert python(code, PPOKERN_BACKEND=name).returncode == 0


NAN_CALL = """
import torch, ppokern
bad, good = torch.tensor([0.0, float("nan")]), torch.zeros(2)
try:
    print(ppokern.ppo_policy_loss(good, bad, good).loss.isnan().item())
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(("value", "checked"), [("1", True), ("0", False), (None, False)])
def test_validation_from_the_environment(value: str | None, checked: bool) -> None:
    done = python(NAN_CALL, **({} if value is None else {"PPOKERN_VALIDATE": value}))
    assert done.returncode == 0, done.stderr
    assert ("old_logprobs" in done.stdout) == checked
    assert ("True" in done.stdout) != checked


def test_set_validation_switches_on_and_off() -> None:
    bad, good = torch.tensor([0.0, float("nan")]), torch.zeros(2)
    assert ppokern.ppo_policy_loss(good, bad, good).loss.isnan()
    set_validation(True)
    try:
        with pytest.raises(ValueError, match="old_logprobs"):
            ppokern.ppo_policy_loss(good, bad, good)
    finally:
        set_validation(False)
    assert ppokern.ppo_policy_loss(good, bad, good).loss.isnan()


# Imports ------------------------------------------------------------------------------------------


def test_import_needs_nothing_but_torch() -> None:
    """No compiler, no Triton, no extension, no CUDA, no trainer."""
    code = """
import sys
for name in ("triton", "transformers", "trainer", "ppokern._native", "numpy.f2py", "setuptools"):
    sys.modules[name] = None
import torch, ppokern
assert ppokern.available_backends() == ("torch",), ppokern.available_backends()
assert ppokern.gae(torch.zeros(2), torch.zeros(2)).advantages.tolist() == [0, 0]
assert ppokern.selected_logprobs(torch.zeros(1, 4), torch.tensor([2])).isfinite().all()
"""
    done = python(code, PATH="/nonexistent", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr


def test_import_does_not_bring_the_trainer() -> None:
    code = """
import sys, ppokern
print([n for n in sys.modules if n.split(".")[0] in ("transformers", "trainer")])
"""
    done = python(code)
    assert done.stdout.strip() == "[]", done.stderr


TYPED = """
import sys
sys.path.insert(0, "tests")
from jaxtyping import install_import_hook
with install_import_hook("ppokern", "typed.checker"):
    import ppokern
    from ppokern import gae  # all ops are loaded with the first
import torch
import calls
torch.manual_seed(0)
tables = [calls.every(d) for d in (torch.float32, torch.bfloat16, torch.float64)]
for table in (*tables, calls.packed(), calls.packing()):
    for name, call in table.items():
        call.run(call.leaves())
ppokern.selected_logprobs(torch.randn(2, 3), torch.tensor([0, 1]), temperature=1)
ppokern.selected_logprobs(torch.randn(3), torch.tensor(1), temperature=torch.tensor(2.0))
ppokern.gae(torch.zeros(2, 3), torch.zeros(2, 3), last_values=torch.zeros(2))
ppokern.gae(torch.zeros(3), torch.zeros(3), last_values=torch.tensor(0.0))
ppokern.gae(torch.zeros(3, 2), torch.zeros(3, 2), time_dim=0, last_values=torch.zeros(2))
x = torch.zeros(2, 3)
ppokern.ppo_policy_loss(x, x, x, denominator=5, log_ratio_limit=None)
ppokern.ppo_value_loss(x, x, x, clip_range=None)
ppokern.ppo_loss(x, x, x, x, x, x, value_clip_range=None)
try:
    ppokern.ppo_policy_loss(x, torch.zeros(3, 2), x)
except Exception as error:
    print(type(error).__module__)
"""


def test_annotations_hold() -> None:
    """One call of each op, with its shapes and dtypes checked at the public boundary."""
    done = python(TYPED)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "jaxtyping" in done.stdout or "beartype" in done.stdout, "the hook checks nothing"


def test_the_readme_of_the_names() -> None:
    """Everything that is promised is there."""
    promised: dict[str, tuple[str, ...] | Any] = {
        "LogProbs": ("logprobs", "entropy"),
        "Advantages": ("advantages", "returns"),
        "ShapedRewards": ("rewards", "kl"),
        "Loss": ("loss", "stats"),
        "Packed": ("values", "cu_seqlens", "max_seqlen"),
    }
    for name, fields in promised.items():
        assert getattr(ppokern, name)._fields == fields


AFTER_FORK = """
import os, signal, sys
import torch, ppokern
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(2)
logits, ids = torch.randn(8, 20_000), torch.randint(0, 20_000, (8,))
rewards, values = torch.randn(2, 256, 400)


def run():
    return ppokern.selected_logprobs(logits, ids), *ppokern.gae(rewards, values)


class Same(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        outputs = run()
        torch.set_num_threads(1)  # torch.equal itself waits
        return all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


expected = run()
if sys.argv[1] == "fork":
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    signal.alarm(60)
    os._exit(0 if Same()[0] else 1)
loader = DataLoader(Same(), num_workers=2, multiprocessing_context="fork", timeout=60)
assert all(loader)
"""


@pytest.mark.parametrize("how", ["fork", "loader"])
def test_a_forked_process_does_not_wait_for_the_threads_of_its_parent(how: str) -> None:
    command = [sys.executable, "-c", AFTER_FORK, how]
    assert subprocess.run(command, cwd=ROOT, timeout=240).returncode == 0
