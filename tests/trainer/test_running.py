"""Signals, locks, terminals: what happens around a run."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer import printing, running
from trainer.config import UserError
from trainer.metrics import console

ROOT = Path(__file__).parents[2]
STAGES = ("sft", "reward", "ppo")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ends")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/trainer/ends.py"), str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout) | {"folder": folder}


# --- signals ---


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.slow
def test_a_signal_ends_a_run_with_a_checkpoint_and_one_line(
    ends: dict[str, Any], stage: str
) -> None:
    code, printed = ends[f"{stage} cut"]
    assert code == {"sft": 130, "reward": 143, "ppo": 130}[stage]
    assert "Traceback" not in printed
    lines = [line for line in printed.splitlines() if line]
    assert lines.count("stops after this step; once more: at once") == 1
    run_dir = f"{ends['folder']}/{stage} cut"
    resume = f"`python -m trainer resume '{run_dir}'` goes on"
    assert lines[-1] == f"{run_dir} stopped after step 3: {resume}"
    assert ends[f"{stage} kept"][-1] == "00000003"
    assert not ends[f"{stage} left"]  # the lock


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.slow
def test_what_a_signal_ended_goes_on_to_the_same_bits(ends: dict[str, Any], stage: str) -> None:
    assert ends[f"{stage} uncut"][0] == 0
    code, printed = ends[f"{stage} resumed"]
    assert code == 0, printed
    assert "goes on after step 3" in printed
    assert ends[f"{stage} differences"] == []


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once(ends: dict[str, Any]) -> None:
    assert ends["waits after one signal"]
    code, printed = ends["two signals"]
    assert code == 143
    assert "Traceback" not in printed
    assert ends["two signals took"] < 5  # the reward function would have waited for ever


@pytest.mark.slow
def test_a_signal_before_the_first_step_leaves_nothing(ends: dict[str, Any]) -> None:
    code, printed = ends["early"]
    assert code == 130
    first, *rest = printed.splitlines()
    assert first.startswith("ppokern ") and rest == ["stopped before the first step"]
    assert not ends["early left"]


# --- one process ---


@pytest.mark.parametrize("name", ["a resume", "an overwriting one", "one by a link"])
@pytest.mark.slow
def test_beside_a_live_run_another_is_refused(ends: dict[str, Any], name: str) -> None:
    code, printed = ends[name]
    assert code == 2
    first, rest = printed.split("\n", 1)
    assert first.startswith("ppokern ") and rest.count("\n") == 1
    assert f"is being written by process {ends['pid']} on " in printed
    assert ends["untouched"]


@pytest.mark.slow
def test_of_two_resumes_the_second_is_refused(ends: dict[str, Any]) -> None:
    code, printed = ends["the second resume"]
    assert code == 2
    assert "is being written by process " in printed


@pytest.mark.slow
def test_a_dead_process_holds_no_lock(ends: dict[str, Any]) -> None:
    assert ends["a lock is left"]  # by kill -9
    code, printed = ends["after all"]
    assert code == 0, printed


def test_a_lock_leaves_nothing_and_may_be_taken_again(tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    with running.locked(folder), running.locked(tmp_path / "a/../a/b"):
        assert (folder / "lock").read_text().startswith(f"process {os.getpid()} on ")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="in the middle"), running.locked(folder):
        (folder / "kept").touch()
        raise UserError("in the middle")
    assert [path.name for path in folder.iterdir()] == ["kept"]
    assert not running._held


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lockf(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(running.fcntl, "lockf", lockf)
    with running.locked(tmp_path / "run"):
        pass
    assert "cannot be locked (Function not implemented)" in capsys.readouterr().out


# --- printing ---

EMOJI = "naïve \N{GRINNING FACE} \ud83d"


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", "na\\xefve \\U0001f600 \\ud83d"),
        ("latin-1", "naïve \\U0001f600 \\ud83d"),
        ("utf-8", "naïve \N{GRINNING FACE} \\ud83d"),
    ],
)
def test_what_a_terminal_cannot_show_is_escaped(
    encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdout", "stderr"):
        written = io.BytesIO()
        monkeypatch.setattr(sys, name, io.TextIOWrapper(written, encoding, write_through=True))
        with printing.steady():
            print(EMOJI, file=getattr(sys, name))
            if name == "stdout":
                console.print(EMOJI)
        assert set(written.getvalue().decode(encoding).splitlines()) == {shown}


@pytest.mark.parametrize("stream", ["closed pipe", "full disk", "closed file", "none"])
def test_what_nobody_reads_is_not_written(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    if stream == "full disk":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    file: Any = os.fdopen(writer, "w")
    if stream == "closed file":
        file.close()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None if stream == "none" else file)
    with printing.steady():
        for _ in range(3):
            print("x" * 9000)
            print("x", file=sys.stderr)
            console.print("x" * 9000)
    file.close()  # as Python does at its end: nothing is left that would fail


def test_head_ends_no_command() -> None:
    command = f"{sys.executable} -m trainer ppo --help | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[1:] == ["0"]
    assert done.stderr == ""
