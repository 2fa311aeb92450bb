"""Two real processes beside one: the same loss, gradients, metrics, weights, checkpoints."""

import contextlib
import functools
import importlib.util
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
from trainer import distributed, heartbeat, ppo, reward, sft
from trainer.checkpoint import damage_of
from trainer.config import PPOConfig, RewardConfig, SFTConfig, Stopped
from trainer.data import packed
from trainer.metrics import VARYING, Metrics
from trainer.models import LogProbs
from trainer.optimise import adamw

pytestmark = pytest.mark.slow

ROUNDED = "optimizer policy_optimizer critic_optimizer kl_controller reward_scaling best".split()
STAGES: dict[type, Any] = {PPOConfig: ppo, SFTConfig: sft, RewardConfig: reward}
WAYS = ("ddp", "fsdp")
BACK = (
    "ppo",
    "ppo_lora",
    "sft_lora",
    "reward_lora",
)  # saved by two, gone on with by one, and the other way round
REWARD = """
import os, signal, time

answered = []


def vowels(prompts, completions):
    return [sum(letter in "aeiou" for letter in text) / 4 for text in completions]


def broken(prompts, completions):
    if os.environ["RANK"] == "1":
        raise RuntimeError("the reward is broken")
    return vowels(prompts, completions)


def not_finite(prompts, completions):
    return [float("nan") if os.environ["RANK"] == "1" else 0.0 for _ in completions]


def killed(prompts, completions):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return vowels(prompts, completions)


def orphaned(prompts, completions):
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return vowels(prompts, completions)


def signalled(prompts, completions):
    if os.environ.get("RANK", "0") == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return vowels(prompts, completions)


def stopped(prompts, completions):
    # first slower than a silent process may be, then silent
    if os.environ["RANK"] == "1":
        if not answered:
            time.sleep(8)
        else:
            print("stopped at", time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
    answered.append(len(prompts))
    return vowels(prompts, completions)
"""
# The command line, but that a process may be silent for so long.
IMPATIENT = """
import sys

from trainer import heartbeat
from trainer.__main__ import main

heartbeat.SILENCE = 4.0
sys.exit(main())
"""


def start(config: Any, run_dir: Path, resume: bool = False, **options: Any) -> None:
    STAGES[type(config)].run(replace(config, run_dir=str(run_dir), **options), resume=resume)


@pytest.fixture(scope="module")
def configs(text: Path, untrained: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Five rows to a step: two for one process, three for the other; and steps of one row.

    Of the responses of `ppo_choices` some end, at one of many tokens, the others are left out.
    """
    ending = tmp_path_factory.mktemp("ending") / "model"
    shutil.copytree(untrained, ending)
    options = json.loads((ending / "generation_config.json").read_text())
    options["eos_token_id"] = list(range(0, 280, 8))
    (ending / "generation_config.json").write_text(json.dumps(options))
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
        "evaluate_every_steps": 1,
    }
    # the second step goes too far: the best model is that of the first; no rows are held out
    adapters: Any = {"lora_rank": 2, "steps": 2, "save_every_steps": 1, "warmup_steps": 0}
    adapters |= {"heldout": "", "epochs": 0.05}
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
    lora = replace(ppo_config, lora_rank=2, lora_alpha=4.0, learning_rate=1e-2)
    return {
        "sft": SFTConfig(**data, **steps, sequences_per_step=5),
        "reward": RewardConfig(**pairs, **steps, pairs_per_step=5),
        "ppo": ppo_config,
        "sft_empty": SFTConfig(**data, **steps, sequences_per_step=1),
        "reward_empty": RewardConfig(**pairs, **steps, pairs_per_step=1),
        "ppo_choices": replace(
            ppo_config,
            model=str(ending),
            truncation="drop",
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
        "ppo_penalty": replace(ppo_config, objective="penalty", penalty_target_per_token=1e-4),
    } | (
        {
            "ppo_lora": lora,
            "ppo_lora_empty": replace(lora, episodes_per_update=1, minibatches=1),
            "sft_lora": SFTConfig(
                **data | steps | adapters, sequences_per_step=5, learning_rate=0.03
            ),
            "reward_lora": RewardConfig(
                **pairs | steps | adapters, pairs_per_step=5, learning_rate=0.3
            ),
        }
        if importlib.util.find_spec("peft")
        else {}
    )


def do_all(configs: dict[str, Any], folder: Path, rank: int) -> None:
    """All that needs two processes, which take seconds to start."""
    learn_all(configs["ppo"], folder, rank)
    for way in WAYS:
        for name, config in configs.items():
            start(config, folder / way / name, parallel=way)
        for name in filter(configs.__contains__, BACK):
            start(configs[name], folder / way / f"{name}_back", resume=True, parallel=way)
        signalled(configs["ppo"], folder / way / "signalled", way, rank)


def signalled(config: PPOConfig, run_dir: Path, way: str, rank: int) -> None:
    """One of two processes is sent a signal: both end the run after its first update."""
    (source,) = config.rewards
    os.environ["RANK"] = str(rank)
    source = source.replace("vowels", "signalled")
    options = {"rewards": {source: 1.0}, "parallel": way, "save_every_updates": 5, "updates": 5}
    try:
        start(config, run_dir, **options)
    except Stopped as stop:
        Path(f"{run_dir} {rank}").write_text(f"{stop.code} {stop}")


@pytest.fixture(scope="module")
def runs(configs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages by one process and by two, with DDP and FSDP2; and resumed the other way round."""
    folder = tmp_path_factory.mktemp("runs")
    for name, config in configs.items():
        start(config, folder / "one" / name)
    ways = [(way, name) for way in WAYS for name in filter(configs.__contains__, BACK)]
    for way, name in ways:
        cut(folder / "one" / name, folder / way / f"{name}_back")
    ranks.run(functools.partial(do_all, configs, folder))
    for way, name in ways:
        cut(folder / way / name, folder / "one" / f"{name}_{way}")
        start(configs[name], folder / "one" / f"{name}_{way}", resume=True)
    return folder


def cut(run: Path, copy: Path) -> None:
    """A copy of a run as it was after its first update or step."""
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
    for name in (path.relative_to(run) for path in run.rglob("*.pt")):
        a, b = (torch.load(folder / name, weights_only=True) for folder in (run, other))
        if name.stem in ROUNDED:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        elif name.stem != "evaluation":  # its best is among the metrics
            assert plain(a) == plain(b)  # data order, generators: nothing to round


STAGE = "sft reward ppo ppo_choices ppo_penalty ppo_lora sft_lora reward_lora".split()


def needs(stage: str) -> None:
    if "_lora" in stage:
        pytest.importorskip("peft", reason="needs the extra lora")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", STAGE)
def test_two_processes_do_what_one_does(runs: Path, stage: str, way: str) -> None:
    needs(stage)
    assert_same(runs / "one" / stage, runs / way / stage)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", ["sft_empty", "reward_empty", "ppo_empty", "ppo_lora_empty"])
def test_so_they_do_if_one_has_no_row(runs: Path, stage: str, way: str) -> None:
    needs(stage)
    assert_same(runs / "one" / stage, runs / way / stage)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", BACK)
def test_a_run_saved_by_two_is_gone_on_with_by_one(runs: Path, stage: str, way: str) -> None:
    needs(stage)
    assert_same(runs / "one" / stage, runs / "one" / f"{stage}_{way}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", BACK)
def test_a_run_saved_by_one_is_gone_on_with_by_two(runs: Path, stage: str, way: str) -> None:
    needs(stage)
    assert_same(runs / "one" / stage, runs / way / f"{stage}_back")


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_to_one_process_ends_the_run_of_all(runs: Path, way: str) -> None:
    run_dir = runs / way / "signalled"
    resume = f"`torchrun --nproc-per-node=2 -m trainer resume {run_dir}` goes on"
    for rank in (0, 1):
        told = Path(f"{run_dir} {rank}").read_text()
        assert told == f"143 {run_dir} stopped after step 1: {resume}"
    assert len(lines(run_dir)) == 1
    assert damage_of(run_dir / "checkpoints/00000001") == ""


@pytest.mark.parametrize("way", ("one", *WAYS))
@pytest.mark.parametrize("stage", ["sft_lora", "reward_lora"])
def test_the_best_model_is_not_the_last(runs: Path, stage: str, way: str) -> None:
    """Else the comparison above would not be of what is kept."""
    needs(stage)
    first, second = lines(runs / way / stage)
    assert first["eval/best"] == second["eval/best"] == first["eval/loss"] < second["eval/loss"]


@pytest.mark.parametrize("way", ("one", *WAYS))
def test_the_penalty_moves(runs: Path, way: str) -> None:
    """Else the comparison above would be of a constant."""
    first, second = (row["penalty_coef"] for row in lines(runs / way / "ppo_penalty"))
    assert second != first


def test_some_responses_end_and_some_do_not(runs: Path) -> None:
    """Else the comparison of counts would be of zeros."""
    for row in lines(runs / "one/ppo_choices"):
        assert 0 < row["val/num_eos_tokens"] < 5
        assert row["val/num_eos_tokens"] + row["objective/unscored"] == 5


@pytest.mark.parametrize("way", ("one", *WAYS))
def test_a_checkpoint_of_lora_holds_the_adapter_alone(runs: Path, way: str) -> None:
    needs("ppo_lora")
    run = runs / way / "ppo_lora"
    kept = safetensors.torch.load_file(run / "checkpoints/00000002/policy.safetensors")
    assert kept
    assert all("lora_" in name for name in kept)
    assert any(x.abs().max() > 1e-3 for name, x in kept.items() if "lora_B" in name)
    assert (run / "policy/adapter_model.safetensors").exists()


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
    found["sharded"] = sharded(config)
    found["largest"] = distributed.largest(float(rank))
    metrics = Metrics()
    metrics.add("both", float(rank))
    metrics.add(f"of {rank} alone", 1.0)
    metrics.across_processes()
    found["names"] = metrics.means()
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


def sharded(config: PPOConfig) -> tuple[int, set[bool]]:
    """How many moments this process makes whole, and what an error leaves sharded."""
    policy = distributed.wrap(ppo.load(config, torch.device("cpu")).policy, "fsdp")
    optimizer = adamw(policy, 1e-3)
    policy(LogProbs(*packed([[1, 20, 30]]))).sum().backward()
    optimizer.step()
    state = distributed.optimizer_state(optimizer)["state"]
    with contextlib.suppress(KeyError), distributed.whole(policy):
        raise KeyError
    left = {isinstance(p, DTensor) for p in policy.parameters()}
    return sum(moments["exp_avg"].numel() for moments in state.values()), left


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


def test_moments_are_made_whole_for_the_first_process_only(both: Any, configs: Any) -> None:
    whole = ppo.load(configs["ppo"], torch.device("cpu")).policy
    count = sum(p.numel() for p in whole.parameters())
    assert [two["sharded"] for two in both] == [(count, {True}), (0, {True})]


def test_a_metric_may_be_known_to_one_process_alone(both: Any) -> None:
    for two in both:
        assert two["largest"] == 1.0
        assert two["names"] == {"both": 0.5, "of 0 alone": 1.0, "of 1 alone": 1.0}


FATES = {
    "broken": "RuntimeError: the reward is broken",
    "not_finite": "not_finite returned a score that is not finite",
    "killed": "SIGKILL",
    "orphaned": "torchrun has gone",
    "stopped": "process 1 has been silent for 4 s",
}


@pytest.mark.parametrize("fate", FATES)
def test_a_dead_process_ends_the_run(configs: Any, tmp_path: Path, fate: str) -> None:
    """With what it died of, and long before any time-out."""
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
    script = tmp_path / "impatient.py"
    script.write_text(IMPATIENT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(script)] if fate == "stopped" else ["-m", "trainer"]
    command += ["ppo", *(f"--{key}={value}" for key, value in words.items())]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.monotonic()
    done = subprocess.run(  # returns once none is left that could write
        command,
        cwd=root,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    ended = time.monotonic()
    assert fate == "stopped" or ended - began < 60
    assert done.returncode != 0
    assert FATES[fate] in done.stderr
    assert not (tmp_path / "run/policy").exists()
    if fate == "stopped":  # in the second update: in the first it was slow
        assert len(lines(tmp_path / "run")) == 1
        late = ended - float(done.stdout.split("stopped at")[1].split()[0])
        assert late - 4 + heartbeat.SILENCE < 60
