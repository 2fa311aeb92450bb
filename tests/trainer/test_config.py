import hashlib
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer import ppo, reward, sft
from trainer.config import (
    DemoConfig,
    PPOConfig,
    RewardConfig,
    Scratch,
    SFTConfig,
    Stage,
    UserError,
)

GOOD_PPO = PPOConfig(run_dir="r", model="m", train="t", rewards={"f.py:f": 1.0})
GOOD_SFT = SFTConfig(run_dir="r", train="t", heldout="h")
GOOD_REWARD = RewardConfig(run_dir="r", train="t", heldout="h", model="m")
PENALTY: dict[str, Any] = {"objective": "penalty"}
BAD: list[tuple[Any, dict[str, Any], str]] = [
    (GOOD_PPO, {"run_dir": ""}, "run_dir is missing"),
    (GOOD_PPO, {"train": ""}, "train is missing"),
    (GOOD_PPO, {"model": ""}, "model is missing"),
    (GOOD_PPO, {"rewards": {}}, "rewards is missing"),
    (GOOD_PPO, {"rewards": {"f.py:f": float("nan")}}, "weight of each part must be a number"),
    (GOOD_PPO, {"rewards": {"f.py:f": float("inf")}}, "weight of each part must be a number"),
    (GOOD_PPO, {"updates": 0}, "updates must be positive"),
    (GOOD_PPO, {"max_new_tokens": 0}, "max_new_tokens must be positive"),
    (GOOD_PPO, {"temperature": 0.0}, "temperature must be positive"),
    (GOOD_PPO, {"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
    (GOOD_PPO, {"keep_last_checkpoints": 0}, "keep_last_checkpoints must be positive"),
    (GOOD_PPO, {"save_every_updates": 0}, "save_every_updates must be positive"),
    (GOOD_SFT, {"save_every_steps": 0}, "save_every_steps must be positive"),
    (GOOD_PPO, {"kl_coef": -0.1}, "kl_coef must not be negative"),
    (GOOD_PPO, {"gamma": 1.1}, "gamma must be within"),
    (GOOD_PPO, {"gae_lambda": -0.1}, "gae_lambda must be within"),
    (GOOD_PPO, {"target_kl": 0.0}, "target_kl must be positive"),
    (GOOD_PPO, {"prompt_tokens": 0}, "prompt_tokens must be positive"),
    (GOOD_PPO, {"clip_range_high": 0.0}, "clip_range_high must be positive"),
    (GOOD_PPO, {"reward_clip": 0.0}, "reward_clip must be positive"),
    (GOOD_PPO, {"critic_warmup_updates": -1}, "critic_warmup_updates must not be negative"),
    (GOOD_PPO, {"critic_warmup_updates": 60}, "critic_warmup_updates must be below updates"),
    (GOOD_PPO, {"critic": "c", "critic_kind": "head"}, "critic has no effect where"),
    (GOOD_PPO, {"value_coef": 0.5}, "value_coef has no effect on a critic of its own"),
    (GOOD_PPO, {"critic_kind": "head", "value_coef": 0.0}, "value_coef must be positive"),
    (GOOD_PPO, {"lora_rank": 0}, "lora_rank must be positive"),
    (GOOD_PPO, {"lora_rank": 2, "lora_alpha": 0.0}, "lora_alpha must be positive"),
    (GOOD_PPO, {"lora_alpha": 8.0}, "lora_alpha has no effect without a lora_rank"),
    (GOOD_PPO, {"lora_rank": 2, "offload_frozen": True}, "offload_frozen does not go with lora"),
    (GOOD_PPO, {"train": {}}, "train is missing"),
    (GOOD_PPO, {"train": {"a": 1.0, "b": 0.0}}, "weight of each file must be positive"),
    (GOOD_PPO, {"judge": "g.py:g"}, "judge has no effect without heldout"),
    (GOOD_PPO, {"evaluation_prompts": 9}, "evaluation_prompts has no effect without heldout"),
    (GOOD_PPO, {"best_metric": "eval/score"}, "best_metric has no effect without heldout"),
    (GOOD_PPO, {"heldout": "t"}, "heldout is a file that is learned from"),
    (GOOD_PPO, {"heldout": "h", "judge": "f.py:f"}, "judge is one of the rewards"),
    (GOOD_PPO, {"heldout": "h", "best_metric": "eval/judge"}, "eval/judge needs a judge"),
    (GOOD_PPO, {"heldout": "h", "evaluate_every_updates": 0}, "every_updates must be positive"),
    (GOOD_PPO, {"penalty_coef": 2.0}, "penalty_coef has no effect where objective is clip"),
    (GOOD_PPO, PENALTY | {"clip_range": 0.1}, "clip_range has no effect where objective is pen"),
    (GOOD_PPO, PENALTY | {"kl_in": "loss"}, "kl_in has no effect where objective is penalty"),
    (GOOD_PPO, PENALTY | {"penalty_coef": 0.0}, "penalty_coef must be positive"),
    (GOOD_PPO, PENALTY | {"ppo_epochs": 1, "minibatches": 1}, "more than one step an update"),
    (GOOD_PPO, {"dual_clip": 1.0}, "dual_clip must be above 1"),
    (GOOD_PPO, {"kl_kind_in_loss": "k2"}, "kl_kind_in_loss has no effect where kl_in is reward"),
    (
        GOOD_PPO,
        {"kl_in": "loss", "kl_kind_in_reward": "k2"},
        "kl_kind_in_reward has no effect where kl_in is loss",
    ),
    (GOOD_PPO, {"samples_per_prompt": 3}, "multiple of samples_per_prompt"),
    (GOOD_PPO, {"minibatches": 65}, "minibatches is 65, more than episodes_per_update, 64"),
    (GOOD_SFT, {"epochs": 0.0}, "epochs must be positive"),
    (GOOD_SFT, {"epochs": float("nan")}, "epochs must be positive"),
    (GOOD_SFT, {"evaluate_every_steps": 0}, "evaluate_every_steps must be positive"),
    (GOOD_SFT, {"lora_rank": 2}, "lora_rank needs a model to start from"),
    (GOOD_REWARD, {"lora_rank": 0}, "lora_rank must be positive"),
    (GOOD_REWARD, {"lora_alpha": 8.0}, "lora_alpha has no effect without a lora_rank"),
    (GOOD_SFT, {"steps": 0}, "steps must be positive"),
    (GOOD_SFT, {"max_tokens": 1}, "max_tokens must be at least 2"),
    (GOOD_SFT, {"max_tokens": 65}, "more than scratch.context_tokens, 64"),
    (GOOD_SFT, {"model": "m", "scratch": Scratch(width=64)}, "scratch has no effect beside"),
    (GOOD_SFT, {"warmup_steps": -1}, "warmup_steps must not be negative"),
    (GOOD_SFT, {"scratch": Scratch(width=30)}, "multiple of scratch.heads"),
    (GOOD_SFT, {"scratch": Scratch(vocab_size=258)}, "at least 259"),
    (GOOD_REWARD, {"model": ""}, "model is missing"),
    (GOOD_REWARD, {"pairs_per_step": 0}, "pairs_per_step must be positive"),
    (DemoConfig(), {"text": "mine.txt"}, "--text needs --reward"),
    (DemoConfig(), {"evaluation_prompts": 0}, "evaluation_prompts must be positive"),
    (DemoConfig(), {"ppo": PPOConfig(updates=0, prompt_tokens=2)}, "updates must be positive"),
    (DemoConfig(), {"sft": SFTConfig(seed=1)}, "the demo sets the seed of its stages itself"),
    (
        DemoConfig(),
        {"ppo": PPOConfig(critic="c", prompt_tokens=2)},
        "the demo sets the critic of its stages",
    ),
]


@pytest.mark.parametrize(("good", "change", "sentence"), BAD)
def test_values_out_of_range_are_refused(good: Any, change: dict[str, Any], sentence: str) -> None:
    good.check()
    with pytest.raises(UserError, match=sentence):
        replace(good, **change).check()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kl_target_per_sequence": 0.0}, "must be positive"),
        ({"kl_target_per_token": 0.0}, "must be positive"),
        ({"kl_target_per_sequence": 1.0, "kl_horizon_episodes": 0}, "kl_horizon_episodes must be"),
        ({"kl_target_per_sequence": 1.0, "kl_target_per_token": 1.0}, "needs one target"),
        ({}, "needs one target"),
        ({"kl_target_per_token": 1.0, "kl_coef": 0.0}, "a kl_coef above 0"),
        ({"kl_controller": "fixed", "kl_target_per_token": 1.0}, "no effect with a fixed"),
    ],
)
def test_T12_kl_targets_that_lead_nowhere(change: dict[str, Any], sentence: str) -> None:
    adaptive = replace(GOOD_PPO, kl_controller="adaptive")
    replace(adaptive, kl_target_per_token=0.1).check()
    with pytest.raises(UserError, match=sentence):
        replace(adaptive, **change).check()


# Every option: what else must be set for it to matter, and its change.
Change = tuple[dict[str, Any], dict[str, Any]]
COMMON: dict[str, Change] = {
    "seed": ({}, {"seed": 1}),
    "max_tokens_per_micro_batch": ({}, {"max_tokens_per_micro_batch": 20}),
    "max_grad_norm": ({}, {"max_grad_norm": 1e-3}),
    "precision": ({}, {"precision": "bfloat16"}),
    "tensorboard": ({}, {"tensorboard": True}),
    "tracker": ({}, {"tracker": "wandb"}),
    "keep_last_checkpoints": (
        {"save_every_steps": 1, "save_every_updates": 1},
        {"keep_last_checkpoints": 1},
    ),
}
SUPERVISED: dict[str, Change] = COMMON | {
    "max_tokens": ({}, {"max_tokens": 11}),
    "steps": ({}, {"steps": 4}),
    "epochs": ({"steps": 1000, "epochs": 0.2}, {"epochs": 0.4}),
    "evaluate_every_steps": ({}, {"evaluate_every_steps": 2}),
    "lora_rank": ({}, {"lora_rank": 2}),
    "lora_alpha": ({"lora_rank": 2}, {"lora_alpha": 1.0}),
    "learning_rate": ({}, {"learning_rate": 1e-4}),
    "warmup_steps": ({}, {"warmup_steps": 1}),
    "weight_decay": ({}, {"weight_decay": 1.0}),
    "save_every_steps": ({}, {"save_every_steps": 2}),
}
SFT: dict[str, Change] = SUPERVISED | {
    "sequences_per_step": ({}, {"sequences_per_step": 4}),
    "scratch": ({}, {"scratch": Scratch(width=32, layers=2, heads=2, vocab_size=280)}),
}
REWARD: dict[str, Change] = SUPERVISED | {"pairs_per_step": ({}, {"pairs_per_step": 4})}
# steps so large that the sampled KL is above 0
LARGE_STEPS: dict[str, Any] = {"updates": 3, "learning_rate": 1e-2}
ADAPTIVE = LARGE_STEPS | {"kl_controller": "adaptive", "kl_horizon_episodes": 100}
JUDGE = str(Path(__file__).parent / "judges.py:length")
PPO: dict[str, Change] = COMMON | {
    "prompt_tokens": ({}, {"prompt_tokens": 3}),
    "critic": ({}, {"critic": ""}),
    "lora_rank": ({}, {"lora_rank": 2}),
    "lora_alpha": ({"lora_rank": 2}, {"lora_alpha": 1.0}),
    "updates": ({}, {"updates": 1}),
    "episodes_per_update": ({}, {"episodes_per_update": 4}),
    "samples_per_prompt": ({}, {"samples_per_prompt": 2}),
    "max_new_tokens": ({}, {"max_new_tokens": 5}),
    "temperature": ({}, {"temperature": 0.7}),
    "reward_scaling": ({"reward_scaling": "std"}, {"reward_scaling": "mean_std"}),
    "reward_clip": ({}, {"reward_clip": 0.1}),
    "missing_eos_penalty": ({}, {"missing_eos_penalty": 1.0}),
    "truncation": ({"truncation": "bootstrap"}, {"truncation": "drop"}),
    "ppo_epochs": ({}, {"ppo_epochs": 1}),
    "minibatches": ({}, {"minibatches": 1}),
    "learning_rate": ({}, {"learning_rate": 1e-4}),
    "critic_learning_rate": ({}, {"critic_learning_rate": 1e-4}),
    "critic_kind": ({"critic": ""}, {"critic_kind": "head"}),
    "critic_warmup_updates": ({}, {"critic_warmup_updates": 1}),
    "value_coef": ({"critic": "", "critic_kind": "head"}, {"value_coef": 0.5}),
    "objective": ({}, {"objective": "penalty"}),
    "penalty_coef": ({"objective": "penalty"}, {"penalty_coef": 9.0}),
    "penalty_target_per_token": (
        LARGE_STEPS | {"objective": "penalty", "penalty_target_per_token": 9.0},
        {"penalty_target_per_token": 1e-9},
    ),
    "clip_range": ({}, {"clip_range": 0.01}),
    "clip_range_high": ({}, {"clip_range_high": 0.001}),
    "dual_clip": (LARGE_STEPS, {"dual_clip": 1.001}),
    "ratio": ({}, {"ratio": "sequence"}),
    "aggregate": ({"aggregate": "sequence_mean"}, {"aggregate": "sequence_sum"}),
    "value_clip_range": ({}, {"value_clip_range": None}),
    "gamma": ({}, {"gamma": 0.5}),
    "gae_lambda": ({}, {"gae_lambda": 0.5}),
    "entropy_coef": ({}, {"entropy_coef": 0.1}),
    "target_kl": ({}, {"target_kl": 1e-6}),
    "kl_coef": ({}, {"kl_coef": 0.5}),
    "kl_in": ({"kl_in": "both"}, {"kl_in": "loss"}),
    "kl_kind_in_reward": (LARGE_STEPS, {"kl_kind_in_reward": "k2"}),
    "kl_kind_in_loss": (LARGE_STEPS | {"kl_in": "loss"}, {"kl_kind_in_loss": "k2"}),
    "kl_controller": ({}, {"kl_controller": "adaptive", "kl_target_per_token": 0.1}),
    "kl_target_per_sequence": (
        ADAPTIVE | {"kl_target_per_sequence": 99.0},
        {"kl_target_per_sequence": 1e-3},
    ),
    "kl_target_per_token": (
        ADAPTIVE | {"kl_target_per_token": 99.0},
        {"kl_target_per_token": 1e-4},
    ),
    "kl_horizon_episodes": (
        ADAPTIVE | {"kl_target_per_token": 0.1},
        {"kl_horizon_episodes": 50},
    ),
    "evaluation_prompts": ({}, {"evaluation_prompts": 3}),
    "evaluate_every_updates": ({}, {"evaluate_every_updates": 1}),
    "judge": ({}, {"judge": JUDGE}),
    "best_metric": ({}, {"best_metric": "eval/score"}),
    "check_every": ({}, {"check_every": 2}),
    "sample_every": ({}, {"sample_every": 1}),
    "save_every_updates": ({}, {"save_every_updates": 1}),
}
PATHS = {"run_dir", "model", "train", "heldout", "rewards"}  # no run without them
# for several processes: test_distributed.py; what takes less memory for the same: test_memory.py,
# less time: test_compiled.py
ELSEWHERE = {"parallel", "gradient_checkpointing", "offload_frozen", "compile"}


def outcome(run: Any, config: Stage, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """All that can be seen of a run, but for times and memory."""
    capsys.readouterr()
    run(replace(config, run_dir=str(folder)))
    seen = [line for line in capsys.readouterr().out.splitlines() if " s left" not in line]
    for path in sorted(folder.rglob("*")):
        if path.name == "metrics.jsonl":
            parts = path.read_text().replace("\n", ", ").split(", ")
            seen += [part for part in parts if "time/" not in part and "memory/" not in part]
        elif path.suffix == ".safetensors":
            seen.append(hashlib.sha256(path.read_bytes()).hexdigest())
        elif path.parent.name == "checkpoints":
            seen.append(path.name)
        elif path.name.startswith("events"):
            seen.append("TensorBoard")
    return "\n".join(seen)


@pytest.fixture
def bases(
    ppo_config: PPOConfig, sft_config: SFTConfig, trained: dict[str, Any], text: Path
) -> dict[str, Any]:
    short = {"steps": 5, "learning_rate": 1e-3}
    pairs = {key: str(text / f"{key}_pairs.jsonl") for key in ("train", "heldout")}
    return {
        "sft": (sft.run, replace(sft_config, **short)),
        "reward": (
            reward.run,
            RewardConfig(model=trained["model"], max_tokens=32, **short, **pairs),
        ),
        "ppo": (ppo.run, replace(ppo_config, heldout=str(text / "heldout.jsonl"))),
    }


@pytest.mark.parametrize(
    ("stage", "option"),
    [
        *(("sft", option) for option in SFT),
        *(("reward", option) for option in REWARD),
        *(("ppo", option) for option in PPO),
    ],
)
def test_every_option_has_an_effect(
    stage: str,
    option: str,
    bases: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if option.startswith("lora"):
        pytest.importorskip("peft", reason="needs the extra lora")
    if option.startswith("lora") and stage == "sft":  # needs a model to start from
        start = {"model": bases["ppo"][1].model, "scratch": Scratch()}
        bases[stage] = (sft.run, replace(bases[stage][1], **start))
    if option == "tracker":  # a stand-in: it says that it was called
        tracked = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: print("tracked"))
        stub = SimpleNamespace(__spec__="", init=lambda **_: tracked)
        monkeypatch.setitem(sys.modules, "wandb", stub)
    run, config = bases[stage]
    base, change = {"sft": SFT, "reward": REWARD, "ppo": PPO}[stage][option]
    known = {item.name for item in fields(config)}
    config = replace(config, **{name: base[name] for name in known & set(base)})
    if option == "seed":  # the same again is the same, so that the test can fail
        same = [outcome(run, config, tmp_path / name, capsys) for name in ("one", "two")]
        assert same[0] == same[1]
    before = outcome(run, config, tmp_path / "before", capsys)
    assert before != outcome(run, replace(config, **change), tmp_path / "after", capsys)


@pytest.mark.parametrize(
    "change",
    [
        {"family": "llama"},
        {"vocab_size": 270},
        {"width": 8},
        {"layers": 1},
        {"heads": 1},
        {"context_tokens": 32},
    ],
)
def test_every_option_of_a_model_from_scratch_has_an_effect(
    change: dict[str, Any], bases: dict[str, Any], tmp_path: Path
) -> None:
    run, config = bases["sft"]
    assert {next(iter(change))} <= {item.name for item in fields(Scratch)}
    run(replace(config, run_dir=str(tmp_path), scratch=replace(config.scratch, **change), steps=1))
    made = json.loads((tmp_path / "model/config.json").read_text())
    names = {
        "family": ("model_type", "llama"),
        "vocab_size": ("vocab_size", 270),
        "width": ("n_embd", 8),
        "layers": ("n_layer", 1),
        "heads": ("n_head", 1),
        "context_tokens": ("n_positions", 32),
    }
    name, value = names[next(iter(change))]
    assert made[name] == value


def test_epochs_are_steps_and_are_not_given_beside_others() -> None:
    config = replace(GOOD_SFT, epochs=3.0, sequences_per_step=32)
    assert config.counted(100).steps == 12  # four steps an epoch, the last of four rows
    assert replace(config, epochs=0.01).counted(100).steps == 1
    assert config.counted(100).counted(100) == config.counted(100)  # as config.yaml has them
    assert GOOD_SFT.counted(100).steps == 1000
    with pytest.raises(UserError, match="steps is 50, but 3 epochs of 100 rows are 12: give one"):
        replace(config, steps=50).counted(100)


def test_no_option_is_left_out() -> None:
    for config, tested in ((SFTConfig, SFT), (RewardConfig, REWARD), (PPOConfig, PPO)):
        assert {item.name for item in fields(config)} - PATHS - ELSEWHERE == set(tested)
