"""From three files of your own to a model: SFT, reward model, PPO, report, export.

    python examples/own_data.py FOLDER

The rows here are made up, and the model is tiny and starts from nothing, so that it takes half a
minute: with your rows in the three files and `--model` in place of `--scratch` it is a real run.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

SCRATCH = ["--scratch.vocab_size=280", "--scratch.width=32", "--scratch.layers=2"]


def write_rows(folder: Path) -> None:
    """Write the files of the three stages, a JSON object a line."""
    draw = random.Random(0)
    good, bad = ("warm", "funny", "great"), ("dull", "loud", "awful")
    rows: dict[str, list[dict[str, str]]] = {"sft": [], "pairs": [], "prompts": []}
    for _ in range(200):
        prompt = f"The {draw.choice(('film', 'plot', 'cast'))}"
        completion = f" is {draw.choice(good + bad)}."
        chosen, rejected = f" is {draw.choice(good)}.", f" is {draw.choice(bad)}."
        rows["sft"].append({"prompt": prompt, "completion": completion})
        rows["pairs"].append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        rows["prompts"].append({"prompt": prompt})
    for name, of_stage in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in of_stage)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def ppokern(*arguments: object) -> None:
    """Run a command of the trainer, as in a shell."""
    subprocess.run([sys.executable, "-m", "ppokern", *map(str, arguments)], check=True)


def main(folder: Path) -> None:
    """Run the five commands in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder)
    sft, reward, ppo = (folder / name for name in ("sft", "reward", "ppo"))
    learns = ["--learning_rate=0.005", "--max_tokens=32"]
    ppokern(
        "sft", f"--run_dir={sft}", f"--train={folder}/sft.jsonl", "--steps=100", *learns, *SCRATCH
    )
    model = f"--model={sft}/model"
    ppokern(
        "reward",
        f"--run_dir={reward}",
        model,
        f"--train={folder}/pairs.jsonl",
        "--steps=40",
        *learns,
    )
    rewards = f"--rewards={{{reward}/model: 1}}"
    steps = ["--updates=10", "--episodes_per_update=32", "--learning_rate=0.002"]
    ppokern("ppo", f"--run_dir={ppo}", model, f"--train={folder}/prompts.jsonl", rewards, *steps)
    ppokern("report", ppo)
    ppokern("export", ppo, folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
