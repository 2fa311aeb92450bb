"""Curves and samples of a PPO run: report.png and one self-contained report.html.

python -m trainer report runs/demo
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from .checkpoint import read_json
from .config import require
from .metrics import console

Rows = Sequence[dict[str, Any]]

BLUE, PALE = "#1f6feb", "#b6d4fe"

BEFORE = {
    "sft": ("SFT loss, nats a token", "loss"),
    "reward": ("reward model, accuracy", "accuracy"),
}
CURVES = {
    "score": "objective/scores",
    "KL to the reference, nats a response": "objective/kl",
    "response length, tokens": "response/length",
    "policy loss": "loss/policy_avg",
    "value loss": "loss/value_avg",
    "entropy, nats a token": "policy/entropy_avg",
    "clipped share of tokens": "policy/clipfrac_avg",
}


def run(run_dir: str) -> None:
    """Writes the report of a PPO run, with the stages before it where its folder holds them."""
    folder = Path(run_dir)
    rows = read_metrics(folder)
    require("objective/scores" in rows[-1], f"{run_dir} is not the folder of a PPO run")
    samples = read_json(folder / "samples.json")
    summary = read_json(folder / "summary.json")
    earlier = {stage: read_metrics(folder / stage) for stage in BEFORE if (folder / stage).is_dir()}
    draw(rows, earlier, folder / "report.png")
    picture = base64.b64encode((folder / "report.png").read_bytes()).decode()
    page = html(folder.name, picture, summary, samples[:40])
    (folder / "report.html").write_text(page, encoding="utf-8")
    console.print(f"report: {folder / 'report.html'} and {folder / 'report.png'}")


def read_metrics(folder: Path) -> Rows:
    """The rows of a run's metrics.jsonl."""
    path = folder / "metrics.jsonl"
    require(path.is_file(), f"{folder} is not the folder of a run: it has no metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    require(bool(rows), f"{path} is empty")
    return rows


def draw(rows: Rows, earlier: dict[str, Rows], path: Path) -> None:
    """Draws all curves into one picture."""
    figure, axes = pyplot.subplots(3, 4, figsize=(16, 9), layout="constrained")
    panels = iter(axes.flat)
    for stage, stage_rows in earlier.items():
        title, name = BEFORE[stage]
        curve(next(panels), stage_rows, title, name)
    for title, name in CURVES.items():
        curve(next(panels), rows, title, name)
    frontier(next(panels), rows)
    for panel in panels:
        panel.set_axis_off()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def column(rows: Rows, name: str) -> list[float]:
    """A metric of all rows; what was the mean of nothing is a gap."""
    return [math.nan if row[name] is None else row[name] for row in rows]


def curve(panel: Axes, rows: Rows, title: str, name: str) -> None:
    """One metric over the steps, and its mean over a twentieth of them."""
    steps, values = column(rows, "step"), column(rows, name)
    window = max(len(values) // 20, 1)
    means = [
        sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))
    ]
    panel.plot(steps, values, color=PALE, linewidth=1)
    panel.plot(steps, means, color=BLUE, linewidth=2)
    label(panel, title, "step" if "objective/kl" not in rows[0] else "update")


def frontier(panel: Axes, rows: Rows) -> None:
    """What each nat of KL has bought."""
    points = panel.scatter(
        column(rows, "objective/kl"),
        column(rows, "objective/scores"),
        c=column(rows, "step"),
        cmap="viridis",
        s=18,
    )
    panel.figure.colorbar(points, ax=panel, label="update")
    label(panel, "score against KL", "KL, nats a response")


def label(panel: Axes, title: str, below: str) -> None:
    """Title, axis and grid in one style."""
    panel.set_title(title, fontsize=11, loc="left")
    panel.set_xlabel(below, fontsize=9)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24 }
body { margin: 2em auto; max-width: 76em; padding: 0 1em }
h1 { font-size: 1.5em }
h2 { font-size: 1.15em; margin-top: 2em }
img { width: 100% }
table { border-collapse: collapse }
td, th { border-bottom: 1px solid #d8dee4; padding: .4em 1.5em .4em 0 }
td, th { text-align: left; vertical-align: top }
small { color: #656d76; display: block }
"""


def html(
    name: str, picture: str, summary: dict[str, Any], samples: Sequence[dict[str, Any]]
) -> str:
    """The page. All that a model or a user wrote is escaped."""
    texts = "".join(
        f"<tr><td>{escape(row['before']['prompt'])}{response(row['before'])}{response(row['after'])}"
        for row in samples
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{escape(name)}</title><style>{STYLE}</style>
<h1>{escape(name)}</h1>
<img alt="Curves of the run" src="data:image/png;base64,{picture}">
<h2>Summary</h2>
<table>{facts(summary)}</table>
<h2>The same prompts before and after</h2>
<table><tr><th>prompt<th>before<th>after{texts}</table>
</html>
"""


def facts(summary: dict[str, Any]) -> str:
    """Rows of numbers; what has a before and an after stands in one."""
    rows = []
    for key, value in summary.items():
        name, _, side = key.rpartition("_")
        both = f"{name}_before" in summary and f"{name}_after" in summary
        if both and side == "before":
            key, values = f"{name}, before and after", [value, summary[f"{name}_after"]]
        else:
            values = [value]
        if not (both and side == "after") and None not in values:
            cells = "".join(f"<td>{value:.4g}" for value in values)
            rows.append(f"<tr><td>{escape(key)}{cells}")
    return "".join(rows)


def response(sample: dict[str, Any]) -> str:
    """A cell with a response, its score and its KL."""
    known = f"score {sample['score']:+.2f}, KL {round(sample['kl'], 1) + 0:.1f} nats"
    return f"<td>{escape(sample['text'])}<small>{known}</small>"
