import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_rollouts

from trainer import metrics as m
from trainer import ppo
from trainer.config import PPOConfig
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
