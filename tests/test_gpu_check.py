"""The script for a machine with a GPU, as far as it goes without one."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
HANGS = """
import sys, time
from pathlib import Path
from benchmarks.gpu_check import Report

report = Report(Path(sys.argv[1]))
report.line("fast", lambda: {"ms": 1.5, "right": True})
report.line("wrong", lambda: 1 // 0)
time.sleep(600)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "gpu_check: no CUDA device\n"


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_and_keeps_its_lines(tmp_path: Path) -> None:
    from benchmarks.gpu_check import run_part

    path, begun = tmp_path / "lines.jsonl", time.monotonic()
    run_part("slow", [sys.executable, "-c", HANGS, str(path)], 20.0, path)
    run_part("broken", [sys.executable, "-c", "raise SystemExit(3)"], 30.0, path)
    lines = {line.pop("name"): line for line in map(json.loads, path.read_text().splitlines())}
    assert lines["fast"].items() >= {"ms": 1.5, "right": True}.items()
    assert "ZeroDivisionError" in lines["wrong"]["failed"]
    assert lines["the part slow"] == {"failed": "no end after 20 s"}
    assert lines["the part broken"] == {"failed": "ended with 3"}
    assert time.monotonic() - begun < 120
