"""What is installed, and what is said where something is missing."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from ppokern import __main__ as command
from ppokern import _backend, _install, info
from ppokern._names import BACKENDS

ROOT = Path(__file__).parents[1]
PLAIN_ON_CPU = {"whiten", "shaped_rewards"}  # torch's own passes are at the memory's speed
needs_native = pytest.mark.skipif(_backend.native is None, reason="needs the C++ kernels")

LAZY = """
import sys, ppokern
assert {"gae", "whiten", "__version__"} <= set(dir(ppokern))
assert not hasattr(ppokern, "gea") and "torch" not in sys.modules
from ppokern.gae import kernel_native, op
import ppokern.ppo_loss.reference
import torch
def returns(rewards, values):
    return ppokern.gae(rewards, values, gamma=1.0, lam=1.0).returns
rows = torch.tensor([[0.0, 1.0]])
compiled = torch.compile(returns, fullgraph=True, backend="eager")  # the first use of all
assert compiled(rows, rows).tolist() == returns(rows, rows).tolist() == [[1.0, 1.0]]
assert ppokern.gae is op.gae and ppokern.ppo_loss is sys.modules["ppokern.ppo_loss.op"].ppo_loss
names = {}
exec("from ppokern import *", names)
assert set(ppokern.__all__) <= set(names) and names["gae"] is op.gae
"""

WITHOUT_THE_TRAINER = """
import runpy, sys
sys.modules["jsonargparse"] = None
runpy.run_module("trainer", run_name="__main__")
"""


def test_the_package_loads_torch_with_its_first_op_and_rooms_hide_no_op() -> None:
    done = subprocess.run([sys.executable, "-c", LAZY], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_op_with_a_choice_is_listed_with_the_backend_that_it_takes() -> None:
    assert set(info.KERNELS) == set(_backend.ON_CUDA)
    for op in info.KERNELS:
        plain = op in PLAIN_ON_CPU or _backend.native is None
        assert info.taken(op, info.CPU) == ("torch" if plain else "cpu")
        row = rf"^  {op} +{info.taken(op, info.CPU)} +{info.taken(op, info.CUDA)}$"
        assert re.search(row, info.report(), re.M)


def test_the_report_says_what_runs_and_what_the_rest_lacks() -> None:
    report = info.report()
    assert len(report.splitlines()) <= 32 and max(map(len, report.splitlines())) <= 120
    assert str(ROOT / "ppokern") in report and torch.__version__ in report
    for name in BACKENDS:
        said = re.findall(rf"^  {name} +(.+)$", report, re.M)[0]
        assert said.startswith("here") == (name in _backend.available_backends())
    if not torch.cuda.is_available():
        assert re.search(r"^  cuda .*torch finds no CUDA device$", report, re.M)
    for extra, lacking in _install.extras().items():
        said = re.findall(rf"^  {extra} +(\S.+)$", report, re.M)[-1]
        assert said == (_install.pip_install(extra) if lacking else "installed")


@needs_native
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the line names it")
def test_the_line_names_version_backend_and_instruction_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PPOKERN_BACKEND", raising=False)
    kernels = f"cpu kernels \\({_backend.cpu_capability()}\\)"
    rest = r"torch \d+\.\d+\.\d+, \d+ threads?"
    assert re.fullmatch(rf"ppokern 0\.1\.0, {kernels}, {rest}", info.line())
    monkeypatch.setenv("PPOKERN_BACKEND", "torch")
    assert re.fullmatch(rf"ppokern 0\.1\.0, plain torch, {rest}", info.line())
    monkeypatch.setenv("PPOKERN_BACKEND", "nonsense")
    with pytest.raises(ValueError, match="PPOKERN_BACKEND: expected one of"):
        info.line()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing but a C++ compiler."""
    path = tmp_path / "bin" / "g++"
    path.parent.mkdir()
    path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(path.parent))
    for name in ("CXX", "PPOKERN_BUILD", "PPOKERN_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    return path


def test_kernels_that_could_have_been_built_are_missed(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why, mistaken = _install.why_unbuilt()
    assert why == f"not built in {ROOT}: `pip install -e .` there builds them" and mistaken
    monkeypatch.setattr(_install, "CLONE", False)
    assert "pip install -v --force-reinstall" in _install.why_unbuilt()[0]
    monkeypatch.setenv("CXX", "no-such-compiler -m64")  # as setuptools would take it
    assert _install.why_unbuilt() == ("not built: no C++ compiler on PATH", False)
    monkeypatch.delenv("CXX")
    compiler.unlink()
    assert _install.why_unbuilt() == ("not built: no C++ compiler on PATH", False)


def test_kernels_that_were_left_out_are_not_missed(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meant = ("left out by PPOKERN_BUILD=0", False)
    monkeypatch.setenv("PPOKERN_BUILD", "0")
    assert _install.why_unbuilt() == meant
    monkeypatch.delenv("PPOKERN_BUILD")
    about = tmp_path / "ppokern-0.1.0.dist-info"  # what a wheel without a place for kernels leaves
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ppokern\nVersion: 0.1.0\n")
    (about / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _install.why_unbuilt() == meant


def test_missing_kernels_are_warned_of_unless_plain_torch_is_asked_for(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(RuntimeWarning, match=r"in plain torch.*`pip install -e \.` there builds"):
        _backend._say_what_is_missing()
    monkeypatch.setitem(_backend.UNLOADABLE, "_native", "built, and cannot be loaded: libgomp")
    with pytest.warns(RuntimeWarning, match="cannot be loaded: libgomp"):
        _backend._say_what_is_missing()
    monkeypatch.setenv("PPOKERN_BACKEND", "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _backend._say_what_is_missing()


def test_extras_are_named_as_this_installation_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert _install.pip_install("lora") == "pip install -e '.[lora]'"
    monkeypatch.chdir(tmp_path)
    assert _install.pip_install("lora") == f"pip install -e '{ROOT}[lora]'"
    monkeypatch.setattr(_install, "CLONE", False)
    assert _install.pip_install("lora") == "pip install 'ppokern[lora]'"


def test_the_command_without_the_trainer_says_what_is_installed_and_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "jsonargparse", None)  # importing it fails
    monkeypatch.setattr(_install, "extras", lambda: {"trainer": ["jsonargparse"]})

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["ppokern", *words])
        return command.main()

    assert run("info") == 0
    assert capsys.readouterr().out == info.report() + "\n"
    assert run("--version") == 0
    assert capsys.readouterr().out == "ppokern 0.1.0\n"
    assert run("sft") == 2
    needs = "error: the trainer needs jsonargparse: pip install -e '.[trainer]'\n"
    assert capsys.readouterr().err == needs
    monkeypatch.setattr(_install, "extras", lambda: {"trainer": []})
    with pytest.raises(ModuleNotFoundError):  # something else is wrong: not to be hidden
        run("sft")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_TRAINER], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, needs)


def test_what_is_installed_may_be_read_by_a_program_that_stops_reading() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ppokern", "info"]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
