"""The README: its example runs, and what it names is there."""

import re
from pathlib import Path

import ppokern

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_examples_run(capsys):
    ops, reward, _ = re.findall(r"```python\n(.*?)```", README, re.S)  # the third: test_engine.py
    exec(compile(ops, "README.md", "exec"), {})
    assert "n_tokens" in capsys.readouterr().out
    mine = {}
    exec(compile(reward, "README.md", "exec"), mine)
    assert mine["short"](["the film"], ["is good"], stars=[5]) == [-0.7]


def test_every_public_op_is_named():
    named = README.replace("`…_with_entropy`", "`linear_selected_logprobs_with_entropy`")
    ops = {name for name in ppokern.__all__ if name[0].islower()}
    assert {name for name in ops if f"`{name}`" not in named} == set()


def test_every_file_of_the_trainer_has_a_line():
    files = {path.name for path in (ROOT / "trainer").glob("*.py")} - {"__init__.py"}
    assert {name for name in files if name not in README} == set()
