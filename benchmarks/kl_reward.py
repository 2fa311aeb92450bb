"""What the weight of the KL buys: the score, and an independent verdict, against the KL.

    OMP_WAIT_POLICY=passive python -m benchmarks.kl_reward [SEED ...]

For each seed (0, 1, 2 where none is named) the demo, and PPO again from its models with each
coefficient; what it writes to the demo's 256 held-out prompts is measured as there. Runs that are
there already are not made again. Writes runs/bench/kl_reward.json and the plot of docs/demo.md,
docs/kl_reward.png.
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path

import matplotlib
from rich.table import Table

from trainer import demo, ppo
from trainer.__main__ import parser
from trainer.checkpoint import read_json, write_json
from trainer.config import DemoConfig
from trainer.metrics import console

COEFFICIENTS = (0.035, 0.07, 0.14, 0.28, 0.56)
FOLDER = Path("runs/bench/kl_reward")
SIDES = {"reward": "score, standard deviations", "judge": "independent judge (VADER)"}
Point = dict[str, float]


def curve(seed: int) -> list[Point]:
    """One seed's points: the model before PPO, then each coefficient from the largest down."""
    options = parser("demo")
    args = options.parse_args(["demo", f"--seed={seed}", f"--run_dir={FOLDER / str(seed)}"])
    given = options.instantiate(args).demo
    config = DemoConfig(**{option.name: given[option.name] for option in fields(DemoConfig)})
    if not Path(config.run_dir, "summary.json").exists():
        demo.run(config)
    sft, _, learning = config.stages()
    points: list[Point] = []
    for coefficient in sorted(COEFFICIENTS, reverse=True):
        run_dir = f"{config.run_dir}/kl_{coefficient}"
        mine = replace(learning, run_dir=run_dir, kl_coef=coefficient)
        found = Path(run_dir, "point.json")
        if not found.exists():
            ppo.run(mine, overwrite=True)
            sides = demo.compare(mine, sft.heldout, config.evaluation_prompts)
            for path, samples in zip((found.with_stem("before"), found), sides, strict=True):
                kl = sum(sample.kl for sample in samples) / len(samples)
                point = demo.measure(samples) | {"judge": demo.judge(samples), "kl": kl}
                write_json(path, point | {"seed": seed})
        points = points or [read_json(found.with_stem("before"))]
        points.append(read_json(found) | {"kl_coef": coefficient})
    return points


def plot(curves: list[list[Point]], path: Path) -> None:
    """Draw score and verdict against the KL, a line a seed."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(SIDES), figsize=(9, 3.6), layout="constrained")
    for axes, (side, title) in zip(panels, SIDES.items(), strict=True):
        for points in curves:
            kl = [point["kl"] for point in points]
            axes.plot(
                kl, [point[side] for point in points], "o-", label=f"seed {points[0]['seed']}"
            )
        for point in curves[0][1:]:
            place = (point["kl"], point[side])
            axes.annotate(f"{point['kl_coef']:g}", place, (4, -10), textcoords="offset points")
        axes.set(xlabel="KL to the model before PPO, nats a text", ylabel=title)
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main(seeds: list[int]) -> None:
    """Measures, prints, draws."""
    curves = [curve(seed) for seed in seeds]
    write_json(FOLDER.with_suffix(".json"), curves)
    plot(curves, Path(__file__).parents[1] / "docs/kl_reward.png")
    names = ("kl", "reward", "judge", "perplexity", "distinct_2", "tokens")
    table = Table("seed", "kl_coef", *names)
    for point in [point for points in curves for point in points]:
        numbers = (f"{point[name]:.2f}" for name in names)
        table.add_row(str(point["seed"]), str(point.get("kl_coef", "before PPO")), *numbers)
    console.print(table)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [0, 1, 2])
