"""What `--dry_run` expects a stage to take, against what the stage took."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import KIND, UNKIND, sentences
from transformers import AutoConfig

import ppokern
from trainer.config import PPOConfig, Scratch, SFTConfig, UserError
from trainer.data import write_rows
from trainer.models import parameter_count, scratch_config
from trainer.plan import memory, plan
from trainer.report import column, read_metrics

ROOT = Path(__file__).parents[2]


# A child begins with the memory of the process that starts it, so that must be a small one.
LAUNCH = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def peak(command: str, options: dict[str, object]) -> int:
    """Most bytes that a stage's process held."""
    flags = [f"--{name}={value}" for name, value in options.items()]
    stage = [sys.executable, "-m", "trainer", command, *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launched = [sys.executable, "-c", LAUNCH, *stage]
    done = subprocess.run(launched, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE)
    return int(done.stdout)


def test_a_judge_that_is_a_model_is_one_of_the_frozen() -> None:
    model = scratch_config(Scratch(layers=2))
    config = PPOConfig(rewards={"a": 1.0})
    judged, by_function = (replace(config, judge=judge) for judge in ("b", "mine.py:f"))
    assert memory(judged, model, 9) - memory(config, model, 9) == 4 * parameter_count(model)
    assert memory(by_function, model, 9) == memory(config, model, 9)
    assert plan(judged, model, 9)["parameters"].endswith("in 2 trained, 3 frozen models")


def test_frozen_models_that_are_offloaded_take_no_room_beside_activations() -> None:
    model = scratch_config(Scratch(layers=2))
    config = PPOConfig(rewards={"a": 1.0, "b": 1.0, "mine.py:f": 1.0})
    away = replace(config, offload_frozen=True)
    saved = memory(config, model, 9) - memory(away, model, 9)
    assert saved == 3 * 4 * parameter_count(model)
    short = {"max_tokens_per_micro_batch": 1, "episodes_per_update": 2}
    few, none = (memory(replace(x, **short), model, 9) for x in (config, away))
    assert 0 < few - none < saved  # while they score, they are there
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="offload_frozen needs a GPU"):
            plan(away, model, 9)


def test_what_a_supervised_stage_keeps_in_memory() -> None:
    model = scratch_config(Scratch(layers=2))
    config, weights = SFTConfig(model="m"), 4 * parameter_count(model)
    adapters = replace(config, lora_rank=4)
    assert memory(config, model) - memory(adapters, model) == 3 * weights  # gradient, two moments
    best = replace(config, evaluate_every_steps=9)
    assert memory(best, model) - memory(config, model) == weights
    assert memory(config, model, 32) < memory(config, model, 64) == memory(config, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "habits"),
    [
        ("gpt2", {}),
        ("llama", {}),
        ("llama", {"gradient_checkpointing": True}),  # a GPT-2's is not known as well: see plan.py
        ("llama", {"precision": "bfloat16"}),
    ],
    ids=["gpt2", "llama", "llama-checkpointing", "llama-bfloat16"],
)
def test_the_memory_that_a_dry_run_expects(
    family: str, habits: dict[str, Any], tmp_path: Path
) -> None:
    """A model against one of nearly no size, so that the program itself drops out."""
    if habits.get("precision") and "avx512" not in (ppokern.cpu_capability() or ""):
        pytest.skip("without AVX-512 bfloat16 products take minutes, and copies of their own")
    lines = zip(*[iter(sentences(KIND + UNKIND, 1200))] * 6, strict=True)
    texts = [{"text": " and ".join(line)} for line in lines]
    write_rows(tmp_path / "text.jsonl", texts)
    (tmp_path / "mine.py").write_text(
        "def f(prompts, completions):\n    return [0.5] * len(prompts)\n"
    )
    common: dict[str, Any] = habits | {
        "train": tmp_path / "text.jsonl",
        "max_tokens_per_micro_batch": 2048,
    }
    found: list[list[int]] = []
    for width, layers in ((256, 6), (16, 1)):
        run = tmp_path / str(width)
        scratch = Scratch(family, 280, width, layers, heads=4, context_tokens=128)  # type: ignore[arg-type]
        options = {f"scratch.{name}": value for name, value in vars(scratch).items()}
        sft = common | {
            "run_dir": run / "sft", "heldout": tmp_path / "text.jsonl", "max_tokens": 96,
            "sequences_per_step": 48, "steps": 4,
        }  # fmt: skip
        ppo = common | {
            "run_dir": run / "ppo", "model": run / "sft/model", "prompt_tokens": 20, "updates": 2,
            "episodes_per_update": 48, "minibatches": 1, "ppo_epochs": 1, "max_new_tokens": 60,
        }  # fmt: skip
        rewards = f'{{"{tmp_path}/mine.py:f": 1.0}}'
        measured = [peak("sft", sft | options), peak("ppo", ppo | {"rewards": rewards})]
        model = AutoConfig.from_pretrained(run / "sft/model")
        # The plan is for the longest answers; these end when their end token is drawn.
        lengths = column(read_metrics(run / "ppo"), "response/length")
        asked = PPOConfig(**ppo | {"max_new_tokens": round(max(lengths))}, rewards={"f.py:f": 1.0})
        supervised = SFTConfig(**sft)
        found.append([*measured, memory(supervised, model, 0), memory(asked, model, 21)])
    large, small = found
    for stage in (0, 1):
        taken, expected = large[stage] - small[stage], large[stage + 2] - small[stage + 2]
        assert expected > 2e8
        assert expected == pytest.approx(taken, rel=0.25), (taken >> 20, expected >> 20)
