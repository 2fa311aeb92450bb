"""Cuts runs with `kill -9` at random moments, resumes them, and holds them against uncut ones.

    python tests/trainer/crash.py 50

All three stages in turn, on a tiny corpus. To import torch and transformers takes longer than such
a run, so this process imports them once and each run is a fork of it; it trains nothing itself, as
autograd's threads would not survive a fork. Every second kill waits for a checkpoint to be written
and falls into that.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny import KIND, TINY, UNKIND, sentences

from trainer import ppo, resume, reward, sft
from trainer.config import PPOConfig, RewardConfig, SFTConfig
from trainer.data import write_rows
from trainer.metrics import VARYING

# A reward function with all the chance that it can have.
REWARD = """
import random

import numpy
import torch


def kind(prompts, completions):
    chance = random.random() + numpy.random.rand() + torch.rand(()).item()
    return [float("good" in text) + chance for text in completions]
"""


def differences(one: Path, two: Path) -> list[str]:
    """The files in which two runs differ, but for seconds, memory and the folders' own names."""
    names = {path.relative_to(run) for run in (one, two) for path in run.rglob("*")}
    return [str(x) for x in sorted(names) if _content(one / x) != _content(two / x)]


def _content(path: Path) -> Any:
    """What a file says that two runs must have alike; a missing file says what no other does."""
    if path.is_dir() or path.name in ("manifest.json", "config.yaml"):
        return path.exists()  # what they are made from is compared
    if not path.exists():
        return object()
    if path.suffix == ".pt":
        return plain(torch.load(path, weights_only=True))
    if path.suffix == ".jsonl":
        return [_lasting(json.loads(line)) for line in path.read_text().splitlines()]
    if path.name in ("state.json", "summary.json"):
        state = _lasting(json.loads(path.read_text()))
        state.get("config", {}).pop("run_dir", None)
        state.pop("metrics_bytes", None)  # seconds have more digits or fewer
        return state
    return path.read_bytes()


def _lasting(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(VARYING)}


def plain(state: Any) -> Any:
    """Tensors as their bytes, so that all of it can be compared."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), tuple(state.shape), state.contiguous().numpy().tobytes()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(value) for value in state] if isinstance(state, (list, tuple)) else state


def make_stages(folder: Path) -> dict[str, tuple[Any, Any]]:
    """Each stage's module and its configuration; the corpus is written to `folder`."""
    for name, count in (("train", 200), ("heldout", 20)):
        texts = sentences(KIND + UNKIND, count, count)
        write_rows(folder / f"{name}.jsonl", ({"text": text} for text in texts))
        pairs = zip(sentences(KIND, count), sentences(UNKIND, count), strict=True)
        rows = ({"prompt": "", "chosen": a, "rejected": b} for a, b in pairs)
        write_rows(folder / f"{name}_pairs.jsonl", rows)
    (folder / "kind.py").write_text(REWARD)
    data = {"train": f"{folder}/train.jsonl", "heldout": f"{folder}/heldout.jsonl"}
    pairs = {"train": f"{folder}/train_pairs.jsonl", "heldout": f"{folder}/heldout_pairs.jsonl"}
    steps = {"steps": 30, "max_tokens": 32, "save_every_steps": 3, "evaluate_every_steps": 4}
    model, reward_model = f"{folder}/uncut/sft/model", f"{folder}/uncut/reward/model"
    ppo_config = PPOConfig(
        model=model,
        critic=reward_model,
        rewards={reward_model: 1.0, f"{folder}/kind.py:kind": 0.5},
        train=data["train"],
        prompt_tokens=2,
        updates=10,
        episodes_per_update=8,
        max_new_tokens=12,
        kl_controller="adaptive",
        kl_target_per_token=0.05,
        kl_horizon_episodes=40,
        save_every_updates=2,
    )
    return {
        "sft": (sft, SFTConfig(scratch=TINY, **data, **steps)),
        "reward": (reward, RewardConfig(model=model, **pairs, **steps)),
        "ppo": (ppo, ppo_config),
    }


def forked(work: Callable[[], Any], log: Path) -> int:
    """Starts a process that does `work`, and returns its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def finish(work: Callable[[], Any], log: Path) -> float:
    """Does `work` in a process of its own, and returns the seconds; NaN if it failed."""
    began = time.perf_counter()
    _, status = os.waitpid(forked(work, log), 0)
    return math.nan if status else time.perf_counter() - began


def cut(work: Callable[[], Any], run_dir: Path, log: Path, moment: float, in_save: bool) -> bool:
    """Kills a run after so many seconds, or in the midst of the next checkpoint after them.

    Returns:
        Whether it was still running.
    """
    pid = forked(work, log)
    time.sleep(moment)
    while in_save and not list(run_dir.glob("checkpoints/*.partial")):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(1e-4)
    time.sleep(random.uniform(0, 0.02) if in_save else 0)
    os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def main(kills: int, seed: int) -> bool:
    """Cuts and resumes so many runs, and says how many ended exactly as the uncut one."""
    torch.set_num_threads(1)
    random.seed(seed)
    counts, bad = {"in a checkpoint": 0, "before the first": 0}, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log, run_dir = folder / "log", folder / "cut"
        stages = make_stages(folder)
        uncut = {stage: folder / "uncut" / stage for stage in stages}
        seconds = {
            stage: finish(start(module, config, uncut[stage]), log)
            for stage, (module, config) in stages.items()
        }
        assert not math.isnan(sum(seconds.values())), log.read_text()
        for kill in range(kills):
            stage = list(stages)[kill % len(stages)]
            work = start(*stages[stage], run_dir)
            share = random.random()
            while not cut(work, run_dir, log, share * seconds[stage], in_save=kill % 2 == 1):
                shutil.rmtree(run_dir)  # it had ended before
                share *= 0.8
            counts["in a checkpoint"] += bool(list(run_dir.glob("checkpoints/*.partial")))
            counts["before the first"] += not list(run_dir.glob("checkpoints/*"))
            if (run_dir / "config.yaml").exists():  # else it was cut before there was a run
                work = functools.partial(resume.run, str(run_dir))
            if math.isnan(finish(work, log)):
                bad.append(log.read_text())
            elif found := differences(uncut[stage], run_dir):
                bad.append(f"{stage}, cut after {share:.0%} of its time: {', '.join(found)}")
            shutil.rmtree(run_dir)
    details = ", ".join(f"{count} cut {where}" for where, count in counts.items())
    print(*bad, f"{kills - len(bad)} exact, {len(bad)} not ({details})", sep="\n")
    return not bad


def start(module: Any, config: Any, run_dir: Path) -> Callable[[], Any]:
    """What runs a stage in that folder."""
    return functools.partial(module.run, replace(config, run_dir=str(run_dir)))


if __name__ == "__main__":
    sys.exit(not main(int(sys.argv[1]), int((*sys.argv, time.time_ns())[2])))
