import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_rollouts

from ppokern._install import pip_install
from trainer import metrics as m
from trainer import ppo
from trainer.checkpoint import write_json
from trainer.config import CheckFailed, PPOConfig, UserError
from trainer.experience import make_experience
from trainer.metrics import Metrics, RunLog, distinct, repeated
from trainer.scoring import score


def test_a_mean_is_over_tokens_not_over_batches() -> None:
    metrics = Metrics()
    metrics.add("x", torch.tensor([1.0, 2.0, 3.0]))
    metrics.add("x", torch.tensor([10.0, math.nan]), torch.tensor([True, False]))
    metrics.add_sum("x", 4.0, 1)
    assert metrics.means() == {"x": 4.0}


def test_a_mean_of_nothing_is_nan() -> None:
    metrics = Metrics()
    metrics.add("x", torch.tensor([]))
    assert math.isnan(metrics.mean("x"))
    assert math.isnan(metrics.mean("y"))


def test_correlation_and_explained_variance_from_moments() -> None:
    x, y = torch.randn(2, 50, dtype=torch.float64)
    y = y + x
    metrics = Metrics()
    for part in (slice(0, 7), slice(7, 50)):
        metrics.add_pairs("both", x[part], y[part])
    expected = torch.corrcoef(torch.stack([x, y]))[0, 1].item()
    assert metrics.correlation("both") == pytest.approx(expected)
    explained = 1 - ((y - x).var() / y.var()).item()
    assert metrics.explained("both") == pytest.approx(explained)
    assert metrics.means() == {}  # moments are not shown


def test_correlation_of_a_constant_is_0() -> None:
    metrics = Metrics()
    metrics.add_pairs("both", torch.ones(3), torch.arange(3))
    assert metrics.correlation("both") == 0
    assert metrics.explained("both") == pytest.approx(0.0)


def test_ngrams() -> None:
    assert distinct([[1, 2, 1, 2], [1, 2]], 1) == (2, 6)
    assert distinct([[1, 2, 1, 2], [1, 2]], 2) == (2, 4)
    assert repeated([[1, 2, 1, 2], [1, 2]]) == (1, 4)
    assert distinct([[], [1]], 2) == (0, 0)


def test_T13_metrics_are_those_of_the_rows_whatever_they_stand_beside(
    ppo_config: PPOConfig, models: Any
) -> None:
    """All rows at once, and each alone: where nothing is padded, nothing can count padding."""
    rows = [[1, 20, 30, 40, 2], [1, 20, 31], [1, 20, 30, 31, 30, 31, 2]]
    terminated = [True, False, True]
    rollouts = make_rollouts(rows, [2, 2, 2], terminated)
    scores, parts = score(models.rewards, rollouts, 1.0)
    x = make_experience(rollouts, scores, models.reference, models.critic, ppo_config, kl_coef=0.1)
    together, apart = Metrics(), Metrics()
    ppo.observe(together, rollouts, x, parts, 0.1, 0.1)
    for i, row in enumerate(rows):
        alone = {name: part[i : i + 1] for name, part in parts.items()}
        ppo.observe(
            apart, make_rollouts([row], [2], terminated[i : i + 1]), x.rows([i]), alone, 0.1, 0.1
        )
    found = []
    for metrics in (together, apart):
        others = {
            "correlation": metrics.correlation("score_length"),
            "explained": metrics.explained("value"),
        }
        found.append(metrics.means() | others)
    for metrics in found:  # of different n-grams: those of a batch are not those of its rows
        del metrics["response/distinct_1"], metrics["response/distinct_2"]
        metrics["val/num_eos_tokens"] = 2
    assert found[0]["response/length"] == pytest.approx(3.0)
    assert together.total("val/num_eos_tokens") == 2
    assert found[0]["response/truncated"] == pytest.approx(1 / 3)
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-6)


def test_unscored_responses_are_counted(ppo_config: PPOConfig, models: Any) -> None:
    rollouts = make_rollouts([[1, 20, 30], [1, 20, 2]], [2, 2], [False, True])
    config = replace(ppo_config, truncation="drop")
    scores = torch.tensor([5.0, 1.0])
    x = make_experience(rollouts, scores, models.reference, models.critic, config, kl_coef=0.1)
    metrics = Metrics()
    ppo.observe(metrics, rollouts, x, {}, 0.1, 0.1)
    assert metrics.total("objective/unscored") == 1
    assert metrics.mean("objective/scores") == 1.0


def test_every_metric_has_a_line_in_the_docs(
    ppo_config: PPOConfig, trained: dict[str, Any]
) -> None:
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    heldout = ppo_config.train.replace("train.jsonl", "heldout.jsonl")
    ppo.run(replace(ppo_config, updates=1, heldout=heldout))
    runs = [Path(trained[name]).parent for name in ("model", "reward_model")]
    names = {
        name
        for run in (*runs, Path(ppo_config.run_dir))
        for line in (run / "metrics.jsonl").read_text().splitlines()
        for name in json.loads(line)
    }
    parts = {name for name in names if name.startswith("objective/scores/")}
    firsts = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    told = set(re.findall(r"`(.+?)`", " ".join(firsts)))  # named in passing is not enough
    assert len(names) > 40 and names - parts - {"stage", "step"} - told == set()


def test_a_log_is_jsonl_and_ten_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path, "sft", 30, tensorboard=False)
    for step in range(1, 31):
        log.write(step, {"loss": 1.0 / step}, f"loss {step}")
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[2] == {"stage": "sft", "step": 3, "loss": 1 / 3}
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(lines) == 10
    assert lines[0].startswith("sft 3/30: loss 3, ")


def test_tensorboard_is_written_if_asked_for(tmp_path: Path) -> None:
    for asked in (False, True):
        log = RunLog(tmp_path, "sft", 1, tensorboard=asked)
        log.write(1, {"loss": 1.0}, "")
        log.close()
        assert bool(list(tmp_path.glob("events.*"))) == asked


@pytest.mark.parametrize("terminal", [False, True])
def test_T18_text_is_printed_as_it_is(
    terminal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(m, "console", m.Console(force_terminal=terminal, soft_wrap=True))
    log = RunLog(tmp_path, "[/b]", 1, tensorboard=False)
    log.write(1, {"loss": 1.0}, "[/i] [red]")
    log.print("a [/b] [bold]text[/bold] </script> \\[x]")
    log.close()
    printed = capsys.readouterr().out
    assert "a [/b] [bold]text[/bold] </script> \\[x]" in printed
    assert "[/b]: [/i] [red]" in printed or "[/b] 1/1: [/i] [red]" in printed


def test_T18_names_and_control_characters_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders may bear names that rich would read as markup, texts what a terminal obeys."""
    m.console.print("runs/[/b] [red] :smile:")
    m.console.print(m.plain("\x1b[31mred\x07 \x9b2J \r\x00\t[b]\n"))
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "runs/[/b] [red] :smile:"
    assert "\\x1b[31mred\\x07 \\x9b2J \\r\\x00" in printed and "[b]" in printed
    assert not set("\x1b\x07\x9b\r\x00") & set(printed)
    log = RunLog(tmp_path, "sft", 1, tensorboard=False)
    log.print("\x1b]0;title\x07")
    log.close()
    assert "\\x1b]0;title\\x07" in capsys.readouterr().out


def test_the_progress_of_a_run_and_three_samples(
    ppo_config: PPOConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    ppo.run(replace(ppo_config, updates=4, sample_every=2))
    lines = capsys.readouterr().out.splitlines()
    number = r"[-+]?\d+(\.\d+)?"
    told = rf"ppo \d/4: score {number}, KL {number} nats, \d+ tokens, \d+ tokens/s, \d+ s left"
    assert sum(bool(re.fullmatch(told, line)) for line in lines) == 4
    samples = [line for line in lines if re.match(rf"  \[score {number}, KL {number}\] the ", line)]
    assert len(samples) == 6


def test_each_part_of_the_score_is_logged_on_its_own(ppo_config: PPOConfig) -> None:
    judge = str(Path(__file__).parent / "judges.py:length")
    (model,) = ppo_config.rewards
    ppo.run(replace(ppo_config, rewards={model: 2.0, judge: -0.5}, updates=1))
    row = json.loads(Path(ppo_config.run_dir, "metrics.jsonl").read_text())
    parts = [row[f"objective/scores/{name}"] for name in (Path(model).name, "length")]
    assert row["objective/scores"] == pytest.approx(2 * parts[0] - 0.5 * parts[1], abs=1e-5)
    assert parts[1] > 5


class Tracker:
    """Stands for wandb and trackio: what of them is used, and no more."""

    __spec__ = "as a module's"

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, *, project: str, name: str, group: str, config: dict[str, Any]) -> "Tracker":
        self.runs.append({"project": project, "name": name, "group": group, "config": config})
        return self

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, metrics))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_rows_of_a_run(
    name: str, ppo_config: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, name, tracker)
    config = replace(ppo_config, tracker=name, truncation="drop", max_new_tokens=1)
    with pytest.raises(CheckFailed, match="has learned nothing"):
        ppo.run(config)
    (run,) = tracker.runs
    assert (run["project"], run["name"], run["group"]) == ("ppokern", "ppo", config.run_dir)
    assert (run["config"]["model"], run["config"]["tracker"]) == (config.model, name)
    lines = Path(config.run_dir, "metrics.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    known = [{k: v for k, v in row.items() if v is not None and k != "stage"} for row in written]
    assert [{"step": step} | row for step, row in tracker.rows] == known
    assert any(None in row.values() for row in written)  # means of nothing are no points
    assert tracker.finished == 1


class Failing(Tracker):
    """One that fails at one of its calls."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def __getattribute__(self, name: str) -> Any:
        if name not in ("at", "__class__", "__spec__") and name == self.at:
            raise ConnectionError("the network is [/gone]")
        return super().__getattribute__(name)


@pytest.mark.parametrize("at", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_warned_of_once_and_ends_nothing(
    at: str, ppo_config: PPOConfig, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Failing(at))
    config = replace(ppo_config, tracker="wandb")
    ppo.run(config)
    assert len(Path(config.run_dir, "metrics.jsonl").read_text().splitlines()) == 2
    printed = capsys.readouterr().out
    assert printed.count("warning: wandb gets no more of this run") == 1
    assert "(ConnectionError: the network is [/gone])" in printed


def test_tensorboard_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    log = RunLog(tmp_path, "sft", 2, tensorboard=True)
    board = log._others["tensorboard"]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(board._writer, "add_scalar", full)
    for step in (1, 2):
        log.write(step, {"loss": 1.0}, "")
    log.sync()
    log.close()
    board.finish()
    assert capsys.readouterr().out.count("warning: tensorboard gets no more of this run") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_what_json_does_not_know_is_null(tmp_path: Path) -> None:
    content = {"a": [math.nan, {"b": (math.inf, 1.5)}], "c": -math.inf, "d": "NaN", "e": True}
    write_json(tmp_path / "x.json", content)
    text = (tmp_path / "x.json").read_text()
    strict = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert strict == {"a": [None, {"b": [None, 1.5]}], "c": None, "d": "NaN", "e": True}


def test_a_full_disk_under_the_metrics_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = RunLog(tmp_path, "sft", 2, tensorboard=False)
    with pytest.raises(UserError, match=r"metrics\.jsonl could not be written: is the disk full\?"):
        log.write(1, {"loss": 1.0}, "")
    log.close()


def test_a_tracker_that_is_not_there(
    ppo_config: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)  # importing it fails
    with pytest.raises(UserError, match=f"needs trackio: {re.escape(pip_install('trackio'))}"):
        ppo.run(replace(ppo_config, tracker="trackio"))
    assert not Path(ppo_config.run_dir).exists()  # nothing was begun
