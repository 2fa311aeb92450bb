"""What two processes cost beside one: PPO updates on CPUs, by gloo.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -m benchmarks.processes FOLDER

FOLDER is made, for a model of random weights and the runs. CPU seconds of an update are both
processes' together, its other seconds the clock's; bytes are those that the loopback device counts,
other programs' as well.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from trainer import distributed, ppo
from trainer.checkpoint import save_model
from trainer.config import PPOConfig, Scratch
from trainer.data import train_tokenizer, write_rows
from trainer.models import new_policy, parameter_count

UPDATES = 4
REWARD = "def vowels(prompts, completions):\n    return [float(len(x)) for x in completions]\n"


def make(folder: Path) -> int:
    """A model, prompts and a reward; returns the model's parameters."""
    folder.mkdir(parents=True)
    texts = [f"the {i} film number {i * i} is good" for i in range(500)]
    write_rows(folder / "text.jsonl", ({"text": text} for text in texts))
    (folder / "reward.py").write_text(REWARD)
    tokenizer = train_tokenizer(texts, 1024)
    torch.manual_seed(0)
    policy = new_policy(Scratch(vocab_size=1024, width=256, layers=4), tokenizer)
    save_model(folder / "model", policy.lm, tokenizer)
    return parameter_count(policy.lm.config)


def sent() -> int:
    """Bytes that the loopback device has carried."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def measure(folder: Path, way: str) -> None:
    """Runs the updates; the first process prints a line."""
    config = PPOConfig(
        run_dir=str(folder / f"{way}{distributed.size()}"),
        model=str(folder / "model"),
        train=str(folder / "text.jsonl"),
        prompt_tokens=2,
        rewards={f"{folder}/reward.py:vowels": 1.0},
        updates=UPDATES,
        max_new_tokens=40,
        parallel="fsdp" if way == "fsdp" else "ddp",
        save_every_updates=UPDATES,
    )
    short = replace(config, run_dir=config.run_dir + "-warm", updates=1)
    ppo.run(short, overwrite=True)
    usage, carried = resource.getrusage(resource.RUSAGE_SELF), sent()
    began, clock = usage.ru_utime + usage.ru_stime, time.perf_counter()
    ppo.run(config, overwrite=True)
    elapsed = time.perf_counter() - clock
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = sum(distributed.gathered(usage.ru_utime + usage.ru_stime - began))
    mib = max(distributed.gathered(usage.ru_maxrss)) / 1024
    steps = UPDATES * config.ppo_epochs * config.minibatches
    if distributed.first():
        print(
            f"{way}: {seconds / UPDATES:.1f} CPU s and {elapsed / UPDATES:.1f} s an update, "
            f"{mib:,.0f} MiB a process, "
            f"{(sent() - carried) / steps / 2**20:.1f} MiB sent a step",
            file=sys.stderr,
        )


def main(folder: Path) -> None:
    """One process, two with DDP, two with FSDP2, each started anew."""
    print(f"{make(folder):,} parameters in each of policy and critic", file=sys.stderr)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for way, count in (("one", 1), ("ddp", 2), ("fsdp", 2)):
        words = [f"--nproc-per-node={count}", "-m", "benchmarks.processes", str(folder), way]
        subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        with distributed.processes():
            measure(Path(sys.argv[1]), sys.argv[2])
    else:
        main(Path(sys.argv[1]))
