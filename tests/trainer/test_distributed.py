"""Two real processes beside one: the same loss, gradients, metrics, weights, checkpoints."""

import functools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import safetensors.torch
import torch
from crash import plain
from test_ppo import made, trained_by
from torch.distributed.tensor import DTensor

from ppokern import linear_selected_logprobs
from trainer import distributed, ppo, reward, sft
from trainer.config import PPOConfig, RewardConfig, SFTConfig
from trainer.metrics import VARYING, Metrics

ROUNDED = (
    "optimizer policy_optimizer critic_optimizer kl_controller reward_scaling evaluation".split()
)
STAGES: dict[type, Any] = {PPOConfig: ppo, SFTConfig: sft, RewardConfig: reward}
WAYS = ("ddp", "fsdp")
REWARD = """
import os, signal


def vowels(prompts, completions):
    return [sum(letter in "aeiou" for letter in text) / 4 for text in completions]


def broken(prompts, completions):
    if os.environ["RANK"] == "1":
        raise RuntimeError("the reward is broken")
    return vowels(prompts, completions)


def killed(prompts, completions):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return vowels(prompts, completions)
"""


def start(config: Any, run_dir: Path, resume: bool = False, **options: Any) -> None:
    STAGES[type(config)].run(replace(config, run_dir=str(run_dir), **options), resume=resume)


@pytest.fixture(scope="module")
def configs(text: Path, untrained: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Five rows to a step: two for one process, three for the other; and steps of one row."""
    source = tmp_path_factory.mktemp("reward") / "reward.py"
    source.write_text(REWARD)
    data = {"train": str(text / "train.jsonl"), "heldout": str(text / "heldout.jsonl")}
    pairs = {key: path.replace(".jsonl", "_pairs.jsonl") for key, path in data.items()}
    steps: Any = {
        "model": untrained,
        "steps": 3,
        "max_tokens": 32,
        "save_every_steps": 2,
        "max_tokens_per_micro_batch": 50,
    }
    ppo_config = PPOConfig(
        model=untrained,
        rewards={f"{source}:vowels": 1.0},
        train=data["train"],
        prompt_tokens=2,
        updates=2,
        episodes_per_update=5,
        max_new_tokens=9,
        max_tokens_per_micro_batch=16,  # of the two processes one has more of these
        missing_eos_penalty=0.5,
        kl_controller="adaptive",
        kl_target_per_token=0.01,
        kl_horizon_episodes=10,
        save_every_updates=1,
        check_every=1,
    )
    return {
        "sft": SFTConfig(**data, **steps, sequences_per_step=5),
        "reward": RewardConfig(**pairs, **steps, pairs_per_step=5),
        "ppo": ppo_config,
        "sft_empty": SFTConfig(**data, **steps, sequences_per_step=1),
        "reward_empty": RewardConfig(**pairs, **steps, pairs_per_step=1),
        "ppo_choices": replace(
            ppo_config,
            critic_kind="head",
            gradient_checkpointing=True,
            critic_warmup_updates=1,
            reward_scaling="mean_std",
            aggregate="sequence_mean",
            heldout=data["heldout"],
            evaluation_prompts=5,
            evaluate_every_updates=1,
            best_metric="eval/rlhf_reward",
        ),
        "ppo_empty": replace(ppo_config, episodes_per_update=1, minibatches=1),
    }


def do_all(configs: dict[str, Any], folder: Path, rank: int) -> None:
    """All that needs two processes, which take seconds to start."""
    learn_all(configs["ppo"], folder, rank)
    for way in WAYS:
        for name, config in configs.items():
            start(config, folder / way / name, parallel=way)
        start(configs["ppo"], folder / way / "back", resume=True, parallel=way)


@pytest.fixture(scope="module")
def runs(configs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages by one process and by two, with DDP and FSDP2; and resumed the other way round."""
    folder = tmp_path_factory.mktemp("runs")
    for name, config in configs.items():
        start(config, folder / "one" / name)
    for way in WAYS:
        cut(folder / "one/ppo", folder / way / "back")
    ranks.run(functools.partial(do_all, configs, folder))
    for way in WAYS:
        cut(folder / way / "ppo", folder / "one" / way)
        start(configs["ppo"], folder / "one" / way, resume=True)
    return folder


def cut(run: Path, copy: Path) -> None:
    """A copy of a PPO run as it was after its first update."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints/00000002")


def lines(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("stage", *VARYING))} for row in rows]


def assert_same(run: Path, other: Path) -> None:
    """Metrics, weights and Adam's moments, but for rounding."""
    assert len(lines(run)) == len(lines(other)) >= 2
    for a, b in zip(lines(run), lines(other), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=2e-5)
    files = [path.relative_to(run) for path in run.rglob("*.safetensors")]
    assert len(files) >= 2
    for name in files:
        a, b = (safetensors.torch.load_file(folder / name) for folder in (run, other))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    for name in (path.relative_to(run) for path in run.rglob("*optimizer.pt")):
        a, b = (torch.load(folder / name, weights_only=True) for folder in (run, other))
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    for name in (path.relative_to(run) for path in run.rglob("*.pt")):
        if name.stem not in ROUNDED:
            a, b = (torch.load(folder / name, weights_only=True) for folder in (run, other))
            assert plain(a) == plain(b)  # data order, generators: nothing to round


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo", "ppo_choices"])
def test_two_processes_do_what_one_does(runs: Path, stage: str, way: str) -> None:
    assert_same(runs / "one" / stage, runs / way / stage)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", ["sft_empty", "reward_empty", "ppo_empty"])
def test_so_they_do_if_one_has_no_row(runs: Path, stage: str, way: str) -> None:
    assert_same(runs / "one" / stage, runs / way / stage)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_saved_by_two_is_gone_on_with_by_one(runs: Path, way: str) -> None:
    assert_same(runs / "one/ppo", runs / "one" / way)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_saved_by_one_is_gone_on_with_by_two(runs: Path, way: str) -> None:
    assert_same(runs / "one/ppo", runs / way / "back")


def learned(config: PPOConfig, rows: dict[int, list], moved: dict[int, float]) -> dict[str, Any]:
    """Gradients of one minibatch, then an update with `target_kl`; rows of some lengths by rank.

    `moved` says by how much the policy has moved, nats a token, since it sampled a rank's rows.
    """
    models = ppo.load(config, torch.device("cpu"))
    rank = distributed.rank()
    mine = rows[rank] if distributed.size() > 1 else [row for part in rows.values() for row in part]
    shifts = [moved[r] for r, part in rows.items() for _ in part]
    shifts = [moved[rank]] * len(mine) if distributed.size() > 1 else shifts
    x = made(mine or [[1, 2]], 2, [1.0 + len(row) for row in mine or [[1, 2]]], models)
    if not mine:
        x = x.rows([])
    lengths = x.cu_seqlens.diff().long()
    shift = torch.tensor(shifts).repeat_interleave(lengths).where(x.mask, 0.0)
    x.logprobs = x.logprobs - shift
    models.policy = distributed.wrap(models.policy, config.parallel)
    models.critic = distributed.wrap(models.critic, config.parallel)
    metrics, found = Metrics(), {}
    found["moved"] = ppo.backward(models, x, config, 0.1, metrics)
    metrics.across_processes()
    found["metrics"] = metrics.means()
    for side in (models.policy, models.critic):
        for name, p in side.named_parameters():
            assert p.grad is not None, name
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            found[f"{type(side).__name__}.{name}".split(".", 1)[1].removeprefix("module.")] = (
                grad.tolist()
            )
        side.zero_grad()
    metrics = Metrics()
    shuffle = torch.Generator().manual_seed(0)
    ppo.learn(models, x, config, trained_by(models, config), 0.1, shuffle, metrics)
    found["steps"] = metrics.mean("optimizer_steps")
    found["stops"] = metrics.mean("early_stops")
    return found


ROWS = {  # three tokens for one process and none for the other; then many for the other
    "A8": {0: [[1, 20, 30, 40, 50]], 1: []},
    "uneven": {
        0: [[1, 20, 30]],
        1: [[1, 20, *(3 + (7 * i * j) % 200 for i in range(j))] for j in range(1, 9)],
    },
}
STILL = {0: 0.0, 1: 0.0}


def learn_all(config: PPOConfig, folder: Path, rank: int) -> None:
    found: dict[str, Any] = {}
    for way in WAYS:
        small = replace(config, parallel=way, ppo_epochs=1, minibatches=1)
        for name, rows in ROWS.items():
            found[f"{name} {way}"] = learned(small, rows, STILL)
        # k3 of a token that moved by x is exp(x) - 1 - x: .0 and .718, their mean .359
        for limit in (0.3, 0.5):
            rows = {0: [[1, 20, 30]], 1: [[1, 20, 40]]}
            stop = replace(small, target_kl=limit)
            found[f"T10 {way} {limit}"] = learned(stop, rows, {0: 0.0, 1: 1.0})
        found[f"NaN {way}"] = learned(small, ROWS["uneven"], {0: 0.0, 1: math.nan})
        found[f"T17 {way}"] = heads(config, way)
    torch.save(found, folder / f"{rank}.pt")  # more than a queue takes before it is read


def heads(config: PPOConfig, way: Any) -> str:
    """What comes of a head's weight that is read outside the wrapper's forward."""
    policy = distributed.wrap(ppo.load(config, torch.device("cpu")).policy, way)
    head = policy.lm.get_output_embeddings().weight
    hidden, ids = torch.zeros(2, head.shape[1]), torch.tensor([1, 2])
    try:
        return str(linear_selected_logprobs(hidden, head, ids).shape)
    except TypeError as error:
        return str(error)


@pytest.fixture(scope="module")
def both(runs: Path) -> list[dict[str, Any]]:
    return [torch.load(runs / f"{rank}.pt") for rank in (0, 1)]


def assert_as_one(both: list[dict[str, Any]], config: PPOConfig, name: str, way: str) -> None:
    one = learned(replace(config, ppo_epochs=1, minibatches=1), ROWS[name], STILL)
    for two in both:
        found = two[f"{name} {way}"]
        assert found.keys() == one.keys()
        assert found.pop("metrics") == pytest.approx(one["metrics"], rel=1e-4, abs=1e-6)
        for key, value in found.items():
            torch.testing.assert_close(
                torch.tensor(value), torch.tensor(one[key]), rtol=1e-4, atol=1e-6, equal_nan=True
            )


@pytest.mark.parametrize("way", WAYS)
def test_A8_two_ranks_with_3_and_0_valid_tokens(both: Any, configs: Any, way: str) -> None:
    assert_as_one(both, configs["ppo"], "A8", way)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_uneven_micro_batches(both: Any, configs: Any, way: str) -> None:
    assert_as_one(both, configs["ppo"], "uneven", way)


@pytest.mark.parametrize("way", WAYS)
def test_T10_an_early_stop_is_decided_by_all(both: Any, way: str) -> None:
    """One process alone would stop at either limit, the other at none."""
    for limit, steps in ((0.3, 0), (0.5, 1)):
        for found in (two[f"T10 {way} {limit}"] for two in both):
            assert found["moved"] == pytest.approx((2.718281828 - 2) / 2, rel=1e-4)
            assert found["steps"] == steps


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_is_not_finite_in_one_process_is_skipped_by_all(both: Any, way: str) -> None:
    assert [two[f"NaN {way}"]["steps"] for two in both] == [0, 0]
    assert [two[f"uneven {way}"]["steps"] for two in both] == [1, 1]


def test_T17_nothing_goes_past_a_wrapper(both: Any, configs: Any) -> None:
    """Data differ by rank, gradients do not; a sharded head is refused by name."""
    for way in WAYS:
        assert (
            both[0][f"uneven {way}"]["lm.transformer.wte.weight"]
            == (both[1][f"uneven {way}"]["lm.transformer.wte.weight"])
        )
    for two in both:
        assert two["T17 ddp"] == "torch.Size([2])"
        assert "weight" in two["T17 fsdp"]
        assert "DTensor" in two["T17 fsdp"]


@pytest.mark.parametrize("fate", ["broken", "killed"])
def test_a_dead_process_ends_the_run(configs: Any, tmp_path: Path, fate: str) -> None:
    """By torchrun, with what it died of, and long before any time-out."""
    config = configs["ppo"]
    (source,) = config.rewards
    words = {
        "run_dir": tmp_path / "run",
        "model": config.model,
        "train": config.train,
        "prompt_tokens": 2,
        "episodes_per_update": 4,
        "rewards": json.dumps({source.replace("vowels", fate): 1.0}),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "trainer", "ppo", *(f"--{key}={value}" for key, value in words.items())]
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert time.monotonic() - began < 60
    assert done.returncode != 0
    assert ("RuntimeError: the reward is broken" if fate == "broken" else "SIGKILL") in done.stderr
    assert not (tmp_path / "run/policy").exists()
