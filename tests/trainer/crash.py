"""Cuts runs with `kill -9` at random moments, resumes them, and holds them against uncut ones.

    python tests/trainer/crash.py 50

All three stages in turn, on a tiny corpus. To import torch and transformers takes longer than such
a run, so this process imports them once and each run is a fork of it; it trains nothing itself, as
autograd's threads would not survive a fork. Every second kill waits for a checkpoint to be written
and falls into that; every fourth run is cut again after it was resumed.
"""

from __future__ import annotations

import json
import os
import random
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
        return _plain(torch.load(path, weights_only=True))
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


def _plain(state: Any) -> Any:
    """Tensors as their bytes, so that all of it can be compared."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), tuple(state.shape), state.contiguous().numpy().tobytes()
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return [_plain(value) for value in state] if isinstance(state, (list, tuple)) else state


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
    steps = {"steps": 40, "max_tokens": 32, "save_every_steps": 3}
    model, reward_model = f"{folder}/uncut/sft/model", f"{folder}/uncut/reward/model"
    ppo_config = PPOConfig(
        model=model,
        critic=reward_model,
        rewards={reward_model: 1.0, f"{folder}/kind.py:kind": 0.5},
        train=data["train"],
        prompt_tokens=2,
        updates=12,
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
    """Does `work` in a process of its own, and returns the seconds that it took."""
    began = time.perf_counter()
    _, status = os.waitpid(forked(work, log), 0)
    if status:
        raise SystemExit(f"a run failed:\n{log.read_text()}")
    return time.perf_counter() - began


def go_on(module: Any, config: Any) -> Callable[[], Any]:
    """Resumes the run; or starts it, where it was cut before there was anything to resume."""
    if Path(config.run_dir, "config.yaml").exists():
        return lambda: resume.run(config.run_dir)
    return lambda: module.run(config)


def cut(work: Callable[[], Any], run_dir: Path, log: Path, moment: float, in_save: bool) -> bool:
    """Kills a run after so many seconds, or in the midst of the next checkpoint after them.

    Returns:
        Whether it was still running.
    """
    pid = forked(work, log)
    time.sleep(moment)
    if in_save:
        until = time.perf_counter() + 2
        while time.perf_counter() < until and not list(run_dir.glob("checkpoints/*.partial")):
            time.sleep(1e-4)
        time.sleep(random.uniform(0, 0.02))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def main(kills: int) -> None:
    """Cuts and resumes so many runs, and says how many ended exactly as the uncut one."""
    torch.set_num_threads(1)
    random.seed(time.time_ns() if len(sys.argv) < 3 else int(sys.argv[2]))
    with tempfile.TemporaryDirectory() as name:
        folder, counts, bad = Path(name), {"in a checkpoint": 0, "before the first": 0}, []
        log = folder / "log"
        stages = make_stages(folder)
        uncut = {stage: replace(c, run_dir=f"{folder}/uncut/{stage}") for stage, (_, c) in stages.items()}
        seconds = {x: finish(lambda x=x: stages[x][0].run(uncut[x]), log) for x in stages}
        killed = 0
        while killed < kills:
            stage = list(stages)[killed % len(stages)]
            module, config = stages[stage]
            run_dir = folder / f"cut{killed}"
            config = replace(config, run_dir=str(run_dir))
            for _ in range(1 + (killed % 4 == 3)):
                moment, in_save = random.uniform(0, seconds[stage]), killed % 2 == 1
                while not cut(go_on(module, config), run_dir, log, moment, in_save):
                    moment *= 0.7  # it had ended before; ended runs are resumed, too
                killed += 1
                counts["in a checkpoint"] += bool(list(run_dir.glob("checkpoints/*.partial")))
                counts["before the first"] += not list(run_dir.glob("checkpoints/*"))
            finish(go_on(module, config), log)
            if found := differences(folder / "uncut" / stage, run_dir):
                bad.append(f"{stage}, cut after about {moment:.2f} s: {', '.join(found)}")
        details = ", ".join(f"{count} {where}" for where, count in counts.items())
        print(*bad, f"{killed - len(bad)} exact, {len(bad)} not ({details})", sep="\n")
        sys.exit(bool(bad))


if __name__ == "__main__":
    main(int(sys.argv[1]))
