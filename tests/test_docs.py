"""README and docs: what they show runs, and what they name is there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import ppokern

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
OWN_TEST = "engines.md"  # tests/trainer/test_engine.py runs it with a server
BLOCKS = [
    pytest.param(page, block, id=f"{page}-{i}")
    for page, text in sorted(PAGES.items())
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.S))
    if page != OWN_TEST
]
STAGES = ("sft", "reward", "ppo")


def commands(text: str) -> list[str]:
    """Return the lines of a page's shell blocks, continued ones as one."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line]


def help_of(stage: str) -> str:
    """Return what `ppokern STAGE --help` prints, on a terminal of 100 columns."""
    command = [sys.executable, "-m", "trainer", stage, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_examples_run(page: str, block: str) -> None:
    exec(compile(block, page, "exec"), {})


def test_there_are_examples_to_run() -> None:
    assert len(BLOCKS) >= 18


def test_the_first_example_prints_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.S)
    exec(compile(first, "README.md", "exec"), {})
    assert "n_tokens" in capsys.readouterr().out


def test_a_reward_function_takes_what_it_is_shown_to() -> None:
    (block,) = re.findall(r"```python\n(# mine.py.*?)```", PAGES["trainer.md"], re.S)
    mine: dict = {}
    exec(compile(block, "trainer.md", "exec"), mine)
    assert mine["short"](["the film"], ["is good"], stars=[5]) == [-0.7]


def test_the_readme_is_read_in_one_go() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = ROOT if page == "README.md" else ROOT / "docs"
    for to in re.findall(r"\]\(([^)#]+)\)", PAGES[page]):
        assert to.startswith("http") or (folder / to).exists(), to


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M)
    for name in re.findall(r"`make ([\w-]+)", PAGES[page]):
        assert name in targets, name
    for line in commands(PAGES[page]):
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        if "trainer" in words and words[words.index("trainer") + 1] in STAGES:
            known = help_of(words[words.index("trainer") + 1])
            for option in re.findall(r"--([\w.]+)", line.partition("-m trainer")[2]):
                assert option == "a.b" or f"--{option} " in known or f"--{option}\n" in known, line


@pytest.mark.parametrize("stage", STAGES)
def test_every_option_is_listed_as_help_has_it(stage: str) -> None:
    assert help_of(stage) in PAGES["options.md"], "python tests/test_docs.py writes them anew"


def test_every_public_op_is_named() -> None:
    ops = {name for name in ppokern.__all__ if name[0].islower()}
    assert {name for name in ops if f"`{name}`" not in PAGES["ops.md"]} == set()
    members = ", ".join(re.findall(r"members: \[(.*?)\]", PAGES["reference.md"]))
    assert set(members.split(", ")) == ops


def test_every_file_has_a_line_in_the_architecture() -> None:
    tree = PAGES["architecture.md"].partition("## What is where")[2]
    files = [*ROOT.glob("trainer/*.py"), *ROOT.glob("ppokern/*.py"), *ROOT.glob("csrc/*.*")]
    names = {path.name for path in files} - {"__init__.py"}
    assert {name for name in names if not re.search(rf"\b{re.escape(name)}", tree)} == set()
    rooms = {path.name for path in ROOT.glob("ppokern/*/") if (path / "op.py").exists()}
    assert {room for room in rooms if f"{room}/" not in tree} == set()
    named = set(re.findall(r"[\w/]+\.(?:py|h|cuh|cpp|cu|md)\b", PAGES["architecture.md"]))
    there = {path.name for path in ROOT.glob("**/*.*") if ".venv" not in path.parts}
    assert {name for name in named if name.rpartition("/")[2] not in there} == set()


if __name__ == "__main__":  # writes the options into their page
    page = ROOT / "docs/options.md"
    body = page.read_text().partition("\n## All of them")[0].rstrip()
    lists = "\n\n".join(f"### {stage}\n\n```text\n{help_of(stage)}\n```" for stage in STAGES)
    page.write_text(f"{body}\n\n## All of them\n\n{lists}\n")
