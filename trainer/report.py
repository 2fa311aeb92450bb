"""A run of any stage, finished or not: report.png and one self-contained report.html.

python -m trainer report runs/demo

The picture has the run's curves, the page the picture, the run in words, its summary, samples,
options and the versions it stands on.
"""

from __future__ import annotations

import base64
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import torch
import transformers
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

import ppokern

from .checkpoint import Config, read_config, read_json
from .config import PPOConfig, RewardConfig, SFTConfig, require
from .metrics import console, plain

Rows = Sequence[dict[str, Any]]

BLUE, PALE, ORANGE = "#1f6feb", "#b6d4fe", "#d9480f"
MOST_IN_A_ROW = 4  # panels


class Curve(NamedTuple):
    """What a panel shows: a metric of each step, and the same on held-out rows where it is."""

    title: str
    metric: str
    heldout: str = ""
    smooth: bool = True


LEARNING = [
    Curve("norm of the gradient, before clipping", "grad_norm"),
    Curve("learning rate", "learning_rate", smooth=False),
]
CURVES = {
    "sft": [Curve("loss, nats a token", "loss", "eval/loss"), *LEARNING],
    "reward": [
        Curve("loss, nats a pair", "loss", "eval/loss"),
        Curve("accuracy, share of pairs", "accuracy", "eval/accuracy"),
        *LEARNING,
    ],
    "ppo": [
        Curve("score", "objective/scores", "eval/score"),
        Curve("KL to the reference, nats a response", "objective/kl", "eval/kl"),
        Curve("judge's verdict on held-out prompts", "", "eval/judge"),
        Curve("response length, tokens", "response/length", "eval/length"),
        Curve("cut for length, share of responses", "response/truncated"),
        Curve("weight of the KL, kl_coef", "kl_coef", smooth=False),
        Curve("policy loss", "loss/policy_avg"),
        Curve("value loss", "loss/value_avg"),
        Curve("explained variance of the returns, share", "val/explained_variance"),
        Curve("entropy, nats a token", "policy/entropy_avg"),
        Curve("clipped, share of tokens", "policy/clipfrac_avg"),
    ],
}
EARLIER = {
    "sft": Curve("SFT: loss, nats a token", "loss", "eval/loss"),
    "reward": Curve("reward model: accuracy, share of pairs", "accuracy", "eval/accuracy"),
}


def run(run_dir: str) -> None:
    """Writes the report of a run, of PPO's with the stages before it where its folder has them."""
    folder, config = Path(run_dir), read_config(run_dir)
    rows = read_metrics(folder)
    stage = rows[0]["stage"]
    stages = EARLIER if stage == "ppo" else {}
    earlier = {x: read_metrics(folder / x) for x in stages if (folder / x / FILE).is_file()}
    draw(rows, earlier, folder / "report.png")
    picture = base64.b64encode((folder / "report.png").read_bytes()).decode()
    summary, samples = folder / "summary.json", folder / "samples.json"
    page = html(
        folder.resolve().name,
        picture,
        read_json(summary) if summary.is_file() else {},
        read_json(samples)[:40] if samples.is_file() else [],
        in_words(config, rows),
        config,
        unfinished(folder, config, rows),
    )
    (folder / "report.html").write_text(page, encoding="utf-8", errors="backslashreplace")
    console.print(f"report: {folder / 'report.html'} and {folder / 'report.png'}")


FILE = "metrics.jsonl"


def read_metrics(folder: Path) -> Rows:
    """The rows of a run's metrics.jsonl, but for a last one that is being written."""
    path = folder / FILE
    require(path.is_file(), f"{folder} is not the folder of a run: it has no {FILE}")
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    require(bool(lines), f"{path} is empty: the run has not ended its first step")
    return [json.loads(line) for line in lines]


def draw(rows: Rows, earlier: dict[str, Rows], path: Path) -> None:
    """Draws all curves into one picture, as many panels as there are curves."""
    panels = [(stage_rows, EARLIER[stage]) for stage, stage_rows in earlier.items()]
    panels += [(rows, curve) for curve in CURVES[rows[0]["stage"]]]
    panels = [(its, curve) for its, curve in panels if known(its, curve[1:3])]
    points = known(rows, ["objective/kl"]) and known(rows, ["objective/scores"])
    count = len(panels) + points
    lines = math.ceil(count / MOST_IN_A_ROW)
    figure = pyplot.figure(figsize=(16, 3.1 * lines), layout="constrained")
    grid = figure.add_gridspec(lines, math.lcm(*range(1, MOST_IN_A_ROW + 1)))
    places = []
    for line in range(lines):
        width = grid.ncols // (count // lines + (line < count % lines))
        places += [grid[line, x : x + width] for x in range(0, grid.ncols, width)]
    axes = [figure.add_subplot(place) for place in places]
    for panel, (its, curve) in zip(axes, panels, strict=False):
        draw_curve(panel, its, curve)
    if points:
        draw_frontier(axes, rows)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def known(rows: Rows, names: Sequence[str]) -> bool:
    """Whether one of some metrics has a value in one of the rows."""
    return any(row.get(name) is not None for row in rows for name in names)


def column(rows: Rows, name: str) -> list[float]:
    """A metric of all rows; what was the mean of nothing, or not measured, is a gap."""
    values = [row.get(name) for row in rows]
    return [math.nan if value is None else value for value in values]


def mean(values: Sequence[float]) -> float:
    """Of those that are known."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def draw_curve(panel: Axes, rows: Rows, curve: Curve) -> None:
    """A metric over the steps, its mean over a twentieth of them, and what was measured apart."""
    steps, values = column(rows, "step"), column(rows, curve.metric)
    training, heldout = known(rows, [curve.metric]), known(rows, [curve.heldout])
    if training:
        window = max(len(values) // 20, 1) if curve.smooth else 1
        means = [mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]
        if window > 1:
            panel.plot(steps, values, color=PALE, linewidth=1)
        dot = {"marker": "o", "markersize": 3} if len(rows) < 20 else {}
        panel.plot(steps, means, color=BLUE, linewidth=2, label="in training", **dot)
        if len({*values}) == 1:
            panel.set_ylim(*sorted((0, 2 * values[0] or 1)))  # of a constant, its height
    if heldout:
        apart = [row for row in rows if row.get(curve.heldout) is not None]
        points = column(apart, "step"), column(apart, curve.heldout)
        style: Any = {"color": ORANGE, "linewidth": 1.5, "marker": "o", "markersize": 4}
        panel.plot(*points, label="held out", **style)
    if training and heldout:
        panel.legend(fontsize=8, frameon=False)
    label(panel, curve.title, "update" if rows[0]["stage"] == "ppo" else "step")
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def draw_frontier(axes: Sequence[Axes], rows: Rows) -> None:
    """What each nat of KL has bought, in the last panel; its colour bar stands beside all."""
    points = axes[-1].scatter(
        column(rows, "objective/kl"),
        column(rows, "objective/scores"),
        c=column(rows, "step"),
        cmap="viridis",
        s=18,
    )
    said = "update, as coloured in “score against KL”"
    bar = axes[-1].figure.colorbar(points, ax=axes, label=said, pad=0.01, aspect=50)
    bar.locator = MaxNLocator(10, integer=True)
    label(axes[-1], "score against KL", "KL, nats a response")


def label(panel: Axes, title: str, below: str) -> None:
    """Title, axis and grid in one style."""
    panel.set_title(title, fontsize=11, loc="left")
    panel.set_xlabel(below, fontsize=9)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.ticklabel_format(axis="y", useOffset=False)


def unfinished(folder: Path, config: Config, rows: Rows) -> str:
    """What is to be said of a run that has not finished; nothing of one that has."""
    if (folder / "summary.json").is_file():
        return ""
    return (
        f"Unfinished: {rows[-1]['step']:,} of {steps_of(config):,} {unit_of(config)} are done. "
        f"Unless it is running, `resume {folder}` goes on with it; samples and summary come last."
    )


def steps_of(config: Config) -> int:
    """Of the whole run."""
    return config.updates if isinstance(config, PPOConfig) else config.steps


def unit_of(config: Config) -> str:
    """What they are called."""
    return "updates" if isinstance(config, PPOConfig) else "steps"


def in_words(config: Config, rows: Rows) -> list[str]:
    """The run in sentences."""
    if isinstance(config, PPOConfig):
        told = _ppo_in_words(config, rows)
    else:
        told = _supervised_in_words(config, rows)
    skipped = sum((row.get("skipped_steps") or 0) > 0 for row in rows)
    if skipped:
        told.append(
            f"In {skipped:,} {unit_of(config)} a step was skipped: its gradient was not finite."
        )
    return told


def _supervised_in_words(config: SFTConfig | RewardConfig, rows: Rows) -> list[str]:
    what, per = ("sequences", "token") if isinstance(config, SFTConfig) else ("pairs", "pair")
    told = [
        f"{rows[-1]['step']:,} steps of {config.rows_per_step:,} {what}: the loss went "
        f"{_change(rows, 'loss')} nats a {per}."
    ]
    if config.lora_rank:
        told.append(f"Only adapters of rank {config.lora_rank} were trained.")
    apart = [row for row in rows if row.get("eval/loss") is not None]
    if apart:
        best = min(apart, key=lambda row: row["eval/loss"])
        loss = best["eval/loss"]
        more = f", a perplexity of {math.exp(min(loss, 700)):.3g}"
        if isinstance(config, RewardConfig):
            more = f", and {best['eval/accuracy']:.1%} of the pairs are told apart rightly"
        told.append(
            f"On held-out rows the lowest loss of {len(apart)} measured is {loss:.3g} nats a {per}"
            f"{more}: that of step {best['step']:,}, whose model is the one that is written."
        )
    return told


def _ppo_in_words(config: PPOConfig, rows: Rows) -> list[str]:
    last = rows[-max(len(rows) // 20, 1) :]
    explained = mean(column(last, "val/explained_variance"))
    told = [
        f"{rows[-1]['step']:,} updates of {config.episodes_per_update:,} responses: the score went "
        f"{_change(rows, 'objective/scores')}. For that the policy has moved away from its "
        f"reference by {mean(column(last, 'objective/kl')):.3g} nats a response.",
        f"Responses went {_change(rows, 'response/length')} tokens; of the last "
        f"{mean(column(last, 'response/truncated')):.0%} were cut at {config.max_new_tokens} "
        "tokens, without an end.",
        f"The critic explains {max(explained, 0):.0%} of the variance of the last returns.",
    ]
    apart = [row for row in rows if row.get("eval/score") is not None]
    if apart:
        judged = known(apart, ["eval/judge"])
        verdict = f", the judge's verdict {_change(apart, 'eval/judge')}" if judged else ""
        told.append(
            f"On held-out prompts, of {len(apart)} evaluations, the score went "
            f"{_change(apart, 'eval/score')}{verdict}."
        )
    if known(apart, ["eval/best"]):
        best = column(apart, "eval/best")[-1]
        told.append(f"The best policy by {config.best_metric}, {best:.3g}, is in the folder best.")
    return told


def _change(rows: Rows, name: str) -> str:
    """From the mean of the first twentieth of the rows to that of the last."""
    values, window = column(rows, name), max(len(rows) // 20, 1)
    return f"from {mean(values[:window]):.3g} to {mean(values[-window:]):.3g}"


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24 }
body { margin: 2em auto; max-width: 76em; padding: 0 1em }
h1 { font-size: 1.5em }
h2 { font-size: 1.15em; margin-top: 2em }
img { width: 100%; margin-top: 1em }
table { border-collapse: collapse }
td, th { border-bottom: 1px solid #d8dee4; padding: .4em 1.5em .4em 0 }
td, th { text-align: left; vertical-align: top; min-width: 7em; overflow-wrap: anywhere }
.text { white-space: pre-wrap }
small { color: #656d76; display: block }
summary { cursor: pointer; margin: 1em 0 }
"""
LEGEND = """Pale: each step. Blue: the mean of a twentieth of the steps. Orange: measured on rows
that nothing is learned from."""


def html(
    name: str,
    picture: str,
    summary: dict[str, Any],
    samples: Sequence[dict[str, Any]],
    words: Sequence[str] = (),
    config: Config | None = None,
    unfinished: str = "",
) -> str:
    """The page. All that a model or a user wrote is escaped."""
    marked = f"<p><mark>{shown(unfinished)}</mark>" if unfinished else ""
    told = "".join(f"<p>{shown(sentence)}" for sentence in words)
    numbers = f"<table>{facts(summary)}</table>" if summary else ""
    if "objective/scores" in summary:  # the last row of all metrics, not a choice of them
        numbers = folded("Metrics of the last update", numbers)
    texts = "".join(
        f'<tr><td class="text">{shown(row["before"]["prompt"])}'
        f"{response(row['before'])}{response(row['after'])}"
        for row in samples
    )
    parts = {
        "Summary": numbers,
        "The same prompts before and after": texts
        and f"<table><tr><th>prompt<th>before<th>after{texts}</table>",
        "Options": config and options(config),
    }
    below = "".join(f"<h2>{title}</h2>\n{part}\n" for title, part in parts.items() if part)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{shown(name)}</title><style>{STYLE}</style>
<h1>{shown(name)}</h1>
{marked}{told}
<img alt="Curves of the run" src="data:image/png;base64,{picture}">
<small>{LEGEND}</small>
{below}
<small>{shown(versions())}</small>
</html>
"""


def shown(text: str) -> str:
    """Text as it stands: escaped, and control characters made visible."""
    return escape(plain(text).plain)


def options(config: Config) -> str:
    """Those that were given, and all others behind a click."""
    rows: dict[bool, str] = {True: "", False: ""}
    for item in fields(config):
        made = item.default_factory
        default = item.default if made is MISSING else made()
        value = getattr(config, item.name)
        told = asdict(value) if hasattr(value, "__dataclass_fields__") else value
        text = told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)
        rows[value != default] += f"<tr><td>{escape(item.name)}<td>{shown(text)}"
    others = folded("Those that are as they are by default", f"<table>{rows[False]}</table>")
    return f"<table>{rows[True]}</table>\n{others}"


def folded(title: str, part: str) -> str:
    """A part of the page that a click opens."""
    return f"<details><summary>{title}</summary>{part}</details>"


def versions() -> str:
    """What the page was made with: what the run stands on, if nothing has changed since."""
    backends = [*ppokern.available_backends(), ppokern.cpu_capability() or "no C++ kernels"]
    return (
        f"Made with ppokern {ppokern.__version__} ({', '.join(backends)}), torch "
        f"{torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}, on {platform.machine()}."
    )


WORDS = {
    "sft_loss": "SFT loss on held-out text, nats a token",
    "reward_model_accuracy": "reward model, share of held-out pairs told apart rightly",
    "kl_per_sequence": "KL to the model before PPO, nats a text",
    "distinct": "share of texts that differ from all others",
    "judge": "independent judge, mean of its verdicts",
    "reward": "score",
    "perplexity": "perplexity under the model before PPO",
    "distinct_2": "different pairs of tokens, share",
    "repetition": "pairs of tokens seen before in the same text, share",
    "tokens": "tokens",
    "setup_seconds": "seconds to set up",
    "seconds": "seconds in all",
    "loss": "loss on held-out rows, nats",
    "accuracy": "share of held-out pairs told apart rightly",
    "score_mean": "mean of the scores of held-out texts, before it is taken off",
    "score_std": "their standard deviation, which is the unit of scores from here on",
}


def facts(summary: dict[str, Any]) -> str:
    """Rows of numbers; what has a before and an after stands in one."""
    rows = []
    for key, value in summary.items():
        name, _, side = key.rpartition("_")
        both = f"{name}_before" in summary and f"{name}_after" in summary
        if both and side == "before":
            values = [value, summary[f"{name}_after"]]
            told, wide = f"{WORDS.get(name, name)}, before and after", ""
        else:
            told, values, wide = WORDS.get(key, key), [value], " colspan=2"
        if not (both and side == "after") and None not in values:
            cells = "".join(f"<td{wide}>{value:.4g}" for value in values)
            rows.append(f"<tr><td>{shown(told)}{cells}")
    return "".join(rows)


def response(sample: dict[str, Any]) -> str:
    """A cell with a response, its score and its KL."""
    known = f"score {sample['score']:+.2f}, KL {round(sample['kl'], 1) + 0:.1f} nats"
    return f'<td class="text">{shown(sample["text"])}<small>{known}</small>'
