"""PPO's update beside TRL's, the last release that has one: CPU seconds and memory.

    make bench-trl

One configuration, one thread, the same models, prompts and arithmetic (episodes, epochs, steps,
rows of a micro-batch). *fixed*: an untrained policy, whose responses all run to the limit;
*varied*: one that was taught to end, so that padding matters. TRL runs in an environment of its own
(`trl_peer.py`); both sides are timed by wrapping the functions that their loops call. *compiled* is
ours with the option `compile`; the passes that wait for the compiler are in the first update, which
no side counts.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedTokenizerBase,
)

from benchmarks.trl_peer import Phases, forget_peak, resident
from trainer import ppo, sft
from trainer.config import PPOConfig, SFTConfig
from trainer.data import Prompt, read_prompts, train_tokenizer, write_rows
from trainer.metrics import console

RUNS = Path("runs/bench/trl")
PROMPT, RESPONSE = 32, 64  # longest, in tokens; the shortest prompt is half of it
CASE = {
    "updates": 4,
    "episodes": 32,
    "micro_batch_rows": 8,
    "ppo_epochs": 4,
    "max_new_tokens": RESPONSE,
    "missing_eos_penalty": 1.0,
    "learning_rate": 1e-5,
    "kl_coef": 0.05,
}
SIDES = {"theirs": "TRL", "ours": "ours", "compiled": "compiled"}
SFT_STEPS = 250  # until the policy ends its responses


def prepare() -> dict[str, Path]:
    """Write text, models and prompts of both cases; returns their folders."""
    draw = random.Random(0)
    texts = [" ".join(part.split()) for key in sorted(topics) for part in topics[key].split("\n\n")]
    texts = [text for text in texts if len(text) > 60]
    tokenizer = train_tokenizer(texts, 8192)
    rows = [row for text in texts if (row := cut(text.split(), tokenizer, draw))]
    write_rows(RUNS / "text.jsonl", rows)
    fixed, varied = RUNS / "fixed", RUNS / "varied"

    torch.manual_seed(0)
    special = ("pad", "bos", "eos")
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=PROMPT + RESPONSE + 8,
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in special},
    )
    policy = AutoModelForCausalLM.from_config(config)
    config.num_labels = 1
    reward = AutoModelForSequenceClassification.from_config(config)
    reward.config.update({"reward_head_trained": True, "score_mean": 0.0, "score_std": 1.0})
    for folder in (fixed, varied):
        for name, model in {"policy": policy, "reward": reward}.items():
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
    taught = SFTConfig(
        run_dir=str(varied / "sft"),
        model=str(varied / "policy"),
        train=str(RUNS / "text.jsonl"),
        heldout=str(RUNS / "text.jsonl"),
        max_tokens=PROMPT + RESPONSE,
        sequences_per_step=16,
        steps=SFT_STEPS,
    )
    sft.run(taught, overwrite=True)
    for folder, model in {fixed: fixed / "policy", varied: varied / "sft" / "model"}.items():
        prompts = read_prompts(str(RUNS / "text.jsonl"), tokenizer, None, PROMPT)
        (folder / "prompts.json").write_text(json.dumps([prompt.ids for prompt in prompts]))
        (folder / "case.json").write_text(json.dumps(CASE | {"policy": str(model)}))
    return {"fixed": fixed, "varied": varied}


def cut(
    words: list[str], tokenizer: PreTrainedTokenizerBase, draw: random.Random
) -> dict[str, str] | None:
    """Return a prompt of the wanted length and what follows it; None where the text is short."""
    ends = [len(tokenizer(" ".join(words[:n])).input_ids) for n in range(1, min(len(words), 96))]
    wanted = draw.randint(PROMPT // 2, PROMPT - 4)
    prompt = next((n for n, end in enumerate(ends, 1) if end >= wanted), None)
    if prompt is None or ends[prompt - 1] > PROMPT:
        return None
    room = ends[prompt - 1] + draw.randint(14, RESPONSE - 4)
    if ends[-1] < room:
        return None
    last = max(n for n, end in enumerate(ends, 1) if end <= room)
    return {
        "prompt": " ".join(words[:prompt]),
        "completion": " " + " ".join(words[prompt:last]),
    }


def ours(folder: Path, side: str) -> None:
    """Runs our PPO, as it is or compiled, and writes ours.json or compiled.json."""
    torch.set_num_threads(1)
    case = json.loads((folder / "case.json").read_text())
    phases, lengths, loaded = Phases(), [], 0.0
    load, write, generate = ppo.load, ppo.RunLog.write, ppo.generate

    def load_and_weigh(*args: Any) -> ppo.Models:
        nonlocal loaded
        models = load(*args)
        loaded = resident("VmRSS")
        forget_peak()
        phases.end_update()  # what came before is none
        phases.updates.clear()
        return models

    def generate_and_count(policy: Any, prompts: list[Prompt], *args: Any, **options: Any) -> Any:
        rollouts = generate(policy, prompts, *args, **options)
        lengths.extend(len(response) for response in rollouts.responses())
        return rollouts

    def write_and_count(*args: Any) -> None:
        write(*args)
        phases.end_update()

    wrapped = {
        (ppo, "load"): load_and_weigh,
        (ppo, "generate"): phases.of("rollout", generate_and_count),
        (ppo, "score"): phases.of("experience", ppo.score),
        (ppo, "make_experience"): phases.of("experience", ppo.make_experience),
        (ppo, "learn"): phases.of("learn", ppo.learn),
        (ppo.RunLog, "write"): write_and_count,
    }
    for (owner, name), function in wrapped.items():
        setattr(owner, name, function)
    rows = case["micro_batch_rows"]
    config = PPOConfig(
        run_dir=str(folder / "ours"),
        model=case["policy"],
        critic=str(folder / "reward"),
        rewards={str(folder / "reward"): 1.0},
        train=str(RUNS / "text.jsonl"),
        updates=case["updates"],
        episodes_per_update=case["episodes"],
        max_tokens_per_micro_batch=rows * (PROMPT + RESPONSE),
        ppo_epochs=case["ppo_epochs"],
        minibatches=1,
        max_new_tokens=case["max_new_tokens"],
        missing_eos_penalty=case["missing_eos_penalty"],
        learning_rate=case["learning_rate"],
        critic_learning_rate=case["learning_rate"],
        kl_coef=case["kl_coef"],
        compile=side == "compiled",
    )
    ppo.run(config, overwrite=True)
    result = {
        "cpu_seconds": phases.medians(),
        "memory_mib": resident("VmHWM") - loaded,
        "mean_length": sum(lengths) / len(lengths),
    }
    (folder / f"{side}.json").write_text(json.dumps(result, indent=2))


def measure(folder: Path) -> dict[str, Any]:
    """Runs all sides on a case, each in a process of its own."""
    mine = [sys.executable, "-m", "benchmarks.against_trl", str(folder)]
    sides = {
        "theirs": [".venv-trl/bin/python", "benchmarks/trl_peer.py", str(folder)],
        "ours": [*mine, "ours"],
        "compiled": [*mine, "compiled"],
    }
    for side, command in sides.items():
        with (folder / f"{side}.log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    return {side: json.loads((folder / f"{side}.json").read_text()) for side in sides}


def compare() -> None:
    """Measures both cases; writes runs/bench/trl.json and prints the table."""
    results = {name: measure(folder) for name, folder in prepare().items()}
    ratios = {
        f"cpu_ratio_{name}{suffix}": case[side]["cpu_seconds"]["total"]
        / case["theirs"]["cpu_seconds"]["total"]
        for side, suffix in {"ours": "", "compiled": "_compiled"}.items()
        for name, case in results.items()
    }
    ratios["memory_ratio"] = max(
        case["ours"]["memory_mib"] / case["theirs"]["memory_mib"] for case in results.values()
    )
    RUNS.with_suffix(".json").write_text(json.dumps(ratios | results, indent=2) + "\n")
    table = Table(
        "CPU seconds an update",
        *(f"{name}, {side}" for name in results for side in SIDES.values()),
    )
    for phase in ("rollout", "experience", "learn", "other", "total"):
        seconds = [case[side]["cpu_seconds"][phase] for case in results.values() for side in SIDES]
        table.add_row(phase, *(f"{x:.2f}" for x in seconds))
    for name, key in {
        "MiB above the models": "memory_mib",
        "tokens of a response": "mean_length",
    }.items():
        table.add_row(
            name,
            *(f"{case[side][key]:.0f}" for case in results.values() for side in SIDES),
        )
    console.print(table)
    console.print({name: round(ratio, 3) for name, ratio in ratios.items()})


if __name__ == "__main__":
    ours(Path(sys.argv[1]), sys.argv[2]) if sys.argv[1:] else compare()
