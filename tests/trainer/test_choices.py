"""The choices of the field: each has the effect that its name says, by hand-worked numbers."""

import json
import math
import shutil
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from crash import differences
from test_experience import experience
from test_ppo import gradients, made, trained_by
from tiny import make_rollouts

from trainer import __main__ as cli
from trainer import evaluation, ppo, scoring
from trainer.check import check_sums
from trainer.config import CheckFailed, PPOConfig, UserError
from trainer.data import read_prompts, write_rows
from trainer.evaluation import Evaluation
from trainer.experience import Experience
from trainer.metrics import Metrics
from trainer.models import LogProbs, ValueHead, load_policy
from trainer.ppo import Models
from trainer.rollout import generate
from trainer.sample import respond
from trainer.scoring import RewardPart, Scaling, score

ROWS = [[1, 20, 30], [1, 20, 40, 50, 60]]  # responses of one token and of three


def moved(models: Models, advantages: list[float], log_ratios: list[float]) -> Experience:
    """An experience in which the log-ratio of each response token is as given."""
    x = made(ROWS, 2, advantages, models)
    x.logprobs[x.mask] -= torch.tensor(log_ratios)
    return x


def policy_loss(models: Models, config: PPOConfig, x: Experience, kl_coef: float = 0.0) -> float:
    """The same however it is cut."""
    found = []
    for tokens in (64, 1):
        metrics = Metrics()
        ppo.backward(
            models, x, replace(config, max_tokens_per_micro_batch=tokens), kl_coef, metrics
        )
        found.append((metrics.mean("loss/policy_avg"), gradients(models)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    for a, b in zip(*(grads for _, grads in found), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    return found[0][0]


UP = [math.log(1.5), math.log(2.0), 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "advantages", "log_ratios", "loss"),
    [
        # ratios 1.5; 2, 1, 1 and advantages 1; 1: kept at 1.2, 1.2, 1, 1
        ({}, [1.0, 1.0], UP, -(1.2 + 1.2 + 1 + 1) / 4),
        ({"clip_range_high": 0.6}, [1.0, 1.0], UP, -(1.5 + 1.6 + 1 + 1) / 4),
        # below 1 the range is as it was: .5 under a negative advantage is kept at .8
        ({"clip_range_high": 0.6}, [-1.0, 1.0], [math.log(0.5), 0.0, 0.0, 0.0], (0.8 - 3) / 4),
        # with negative advantages nothing is clipped above, but by the second clip
        ({}, [-1.0, -1.0], UP, (1.5 + 2 + 1 + 1) / 4),
        ({"dual_clip": 1.25}, [-1.0, -1.0], UP, (1.25 + 1.25 + 1 + 1) / 4),
        # one ratio a response: 1.5 and 2 ** (1 / 3) = 1.26
        ({"ratio": "sequence", "clip_range": 0.9}, [1.0, 1.0], UP, -(1.5 + 3 * 2 ** (1 / 3)) / 4),
        ({"ratio": "sequence"}, [1.0, 1.0], UP, -(1.2 + 3 * 1.2) / 4),
        # advantages 1 and 2: means 1.2 and 2 * 3.2 / 3, and sums
        ({"aggregate": "sequence_mean"}, [1.0, 2.0], UP, -(1.2 + 6.4 / 3) / 2),
        ({"aggregate": "sequence_sum"}, [1.0, 2.0], UP, -(1.2 + 6.4) / 2),
    ],
)
def test_the_policys_loss(
    options: dict[str, Any],
    advantages: list[float],
    log_ratios: list[float],
    loss: float,
    ppo_config: PPOConfig,
    models: Models,
) -> None:
    x = moved(models, advantages, log_ratios)
    assert policy_loss(models, replace(ppo_config, **options), x) == pytest.approx(loss, rel=1e-5)


KL_OF_2 = {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 0.5 - 1 + math.log(2)}


@pytest.mark.parametrize("kind", KL_OF_2)
def test_each_kl_in_the_loss(kind: str, ppo_config: PPOConfig, models: Models) -> None:
    """One of four tokens is twice as likely as under the reference, and the gradient is the KL's.

    With respect to that log-prob it is 1, log 2 and 1 - 1/2, a quarter of it in the mean.
    """
    x = moved(models, [0.0, 0.0], [0.0] * 4)
    x.ref_logprobs = x.logprobs.clone()
    x.ref_logprobs[1] -= math.log(2)
    config = replace(ppo_config, kl_in="loss", kl_kind_in_loss=kind)
    metrics, slope = Metrics(), {"k1": 1.0, "k2": math.log(2), "k3": 0.5}[kind]
    ppo.backward(models, x, config, 0.4, metrics)
    found = gradients(models)
    chosen = models.policy(LogProbs(x.ids, x.cu_seqlens, x.mask))
    if kind == "k1":  # those of the other tokens do not vanish where the ratio is 1
        (0.4 * chosen.sum() / 4).backward()
    else:
        (0.4 * slope * chosen[1] / 4).backward()
    for a, b in zip(found, gradients(models), strict=False):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", KL_OF_2)
def test_each_kl_in_the_reward(kind: str) -> None:
    """The reference gives token 7 half the probability that sampling had."""
    rollouts = make_rollouts([[5, 7]], [1], [True], logprob=-1.5 + math.log(2))
    x = experience(rollouts, [2.0], kl_coef=0.3, kl_kind_in_reward=kind)
    assert x.rewards[0] == pytest.approx(2 - 0.3 * KL_OF_2[kind])
    assert x.kl[0] == pytest.approx(math.log(2))  # what is logged stays comparable
    check_sums(rollouts, x, 0.3, kind)
    with pytest.raises(CheckFailed, match="do not add up"):
        check_sums(rollouts, x, 0.3, next(k for k in KL_OF_2 if k != kind))


def test_scores_are_scaled_by_the_moments_of_all_so_far() -> None:
    """1 and 3: mean 2, deviation 1. With 2, 4, 5: mean 3, squares 55 / 5 = 11, deviation sqrt 2."""
    std, mean_std = Scaling("std", None), Scaling("mean_std", None)
    first, second = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0, 5.0])
    assert std(first).tolist() == [1.0, 3.0]
    assert mean_std(first).tolist() == [-1.0, 1.0]
    root = 2**0.5
    resumed = Scaling("mean_std", None)
    resumed.load_state_dict(mean_std.state_dict())
    torch.testing.assert_close(std(second), second / root)
    torch.testing.assert_close(resumed(second), (second - 3) / root)


def test_scores_that_are_all_alike_are_not_divided_by_0() -> None:
    alike = torch.full((3,), 0.1)
    assert Scaling("std", None)(alike).tolist() == alike.tolist()
    torch.testing.assert_close(Scaling("mean_std", None)(alike), torch.zeros(3))


def test_clipping_comes_after_scaling_and_before_the_penalty() -> None:
    """Of 2 * 4 and 2 * -4, deviation 8, remain 1 and -1, then .5 and -.5; the first has no end."""
    rollouts = make_rollouts([[5, 7], [5, 9]], [1, 1], [False, True])
    parts = [RewardPart("a", 2.0, lambda rollouts: torch.tensor([4.0, -4.0]))]
    assert score(parts, rollouts, 3.0, Scaling("none", None))[0].tolist() == [5.0, -8.0]
    assert score(parts, rollouts, 3.0, Scaling("std", None))[0].tolist() == [-2.0, -1.0]
    total, each = score(parts, rollouts, 3.0, Scaling("std", 0.5))
    assert total.tolist() == [-2.5, -0.5]
    assert each["a"].tolist() == [4.0, -4.0]


@pytest.fixture
def shared(ppo_config: PPOConfig) -> tuple[PPOConfig, Models]:
    """A critic that is a head on the policy's trunk, and not at its start."""
    config = replace(ppo_config, critic="", critic_kind="head")
    models = ppo.load(config, torch.device("cpu"))
    torch.nn.init.normal_(models.critic.score.weight)
    return config, models


def test_a_value_head_learns_as_a_critic_with_the_same_trunk(
    shared: tuple[PPOConfig, Models],
) -> None:
    """Its gradient is that of 0.1 times the value loss, in the head and through it in the trunk.

    The trunk is passed through once for log-probs and values.
    """
    config, models = shared
    assert isinstance(models.critic, ValueHead)
    x = made(ROWS, 2, [1.0, -1.0], models)
    passes = []
    models.policy.lm.base_model.register_forward_hook(lambda *_: passes.append(1))
    metrics = Metrics()
    ppo.backward(models, x, config, 0.0, metrics)
    assert len(passes) == 1
    assert metrics.mean("loss/policy_avg") == pytest.approx(0.5, abs=1e-6)  # T9's
    assert metrics.mean("loss/value_avg") == pytest.approx(0.5, abs=1e-6)
    together = gradients(models)

    mask = x.mask
    logprobs = models.policy(LogProbs(x.ids, x.cu_seqlens, mask))
    ratio = (logprobs - x.logprobs).exp()
    wrong = models.values(x.ids, x.cu_seqlens) - x.returns
    (-(ratio * x.advantages)[mask].sum() / 4 + 0.1 * 0.5 * wrong[mask].square().mean()).backward()
    for a, b in zip(together, gradients(models), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    assert together[-2].abs().sum() > 0  # the head's weight


def test_a_value_head_has_a_learning_rate_of_its_own(shared: tuple[PPOConfig, Models]) -> None:
    """Adam's first step is the learning rate itself, either way."""
    config, models = shared
    config = replace(config, critic_learning_rate=0.25, ppo_epochs=1, minibatches=1)
    x, before = made(ROWS, 2, [1.0, -1.0], models), models.critic.score.weight.clone()
    trained = trained_by(models, config)
    ppo.learn(models, x, config, trained, 0.0, torch.Generator(), Metrics())
    torch.testing.assert_close(
        (models.critic.score.weight - before).abs(),
        torch.full_like(before, 0.25),
        rtol=1e-3,
        atol=0,
    )


@pytest.mark.parametrize("kind", ["separate", "head"])
def test_while_the_critic_warms_up_the_policy_stands_still(
    kind: str, ppo_config: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Models, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
    inner = ppo.learn

    def spy(models: Models, *rest: Any) -> float:
        states = [
            {k: v.clone() for k, v in module.state_dict().items()}
            for module in (models.policy, models.critic)
        ]
        result = inner(models, *rest)
        seen.append((models, *states))
        return result

    monkeypatch.setattr(ppo, "learn", spy)
    given = {"critic_kind": kind, "critic": "" if kind == "head" else ppo_config.critic}
    ppo.run(replace(ppo_config, updates=3, critic_warmup_updates=2, **given))
    models, policies = seen[0][0], [policy for _, policy, _ in seen]
    policies.append(models.policy.state_dict())
    critics = [critic for _, _, critic in seen] + [models.critic.state_dict()]
    same = [
        [all(torch.equal(a[k], b[k]) for k in a) for a, b in pairwise(x)]
        for x in (policies, critics)
    ]
    assert same == [[True, True, False], [False, False, False]]


def test_prompts_come_from_several_files_by_weight(
    ppo_config: PPOConfig, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given as YAML; each file is among the inputs that must be as they were."""
    write_rows(tmp_path / "other.jsonl", [{"prompt": "another one"}])
    files = {str(text / "prompts.jsonl"): 1, str(tmp_path / "other.jsonl"): 4}
    seen = []
    inner = ppo.generate

    def spy(policy: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(prompt.value for prompt in prompts)
        return inner(policy, prompts, *args, **kwargs)

    monkeypatch.setattr(ppo, "generate", spy)
    options = replace(ppo_config, episodes_per_update=64, updates=1, prompt_tokens=None)
    given = {**asdict(options), "train": files}
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(given))
    assert cli.main(["ppo", "--config", str(tmp_path / "ppo.yaml")]) == 0
    assert 40 < seen[:64].count("another one") < 60  # of 64, 4 / 5 are to be
    assert set(seen) == {"another one", "the film", "the plot", "the cast is"}
    (tmp_path / "other.jsonl").write_text('{"prompt": "yet another"}\n')
    with pytest.raises(UserError, match=r"the data in .*other\.jsonl .* has changed"):
        ppo.run(replace(options, train=files), resume=True)


def judged(policies: list[int]) -> Any:
    """A judge whose verdict is, call after call, each of the given numbers."""
    verdicts = iter(policies)

    def judge(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [float(next(verdicts))] * len(completions)

    return judge


@pytest.fixture
def evaluated(ppo_config: PPOConfig, text: Path) -> PPOConfig:
    return replace(
        ppo_config,
        heldout=str(text / "heldout.jsonl"),
        judge=str(Path(__file__).parent / "judges.py:length"),
        evaluate_every_updates=1,
        evaluation_prompts=5,
        learning_rate=1e-2,
        updates=4,
        save_every_updates=2,
    )


def rows_of(config: PPOConfig) -> list[dict[str, Any]]:
    lines = Path(config.run_dir, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_best_policy_is_kept_by_the_metric_that_was_named(
    evaluated: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts 1, 3, 2, 3: the best is the policy after the second update, no matter its score."""
    config, written, inner = replace(evaluated, best_metric="eval/judge"), [], ppo.learn

    def spy(models: Models, *rest: Any) -> float:
        result = inner(models, *rest)
        written.append(models.policy.lm.lm_head.weight.clone())
        return result

    monkeypatch.setattr(ppo, "learn", spy)
    monkeypatch.setattr(scoring, "load_function", lambda source: judged([1, 3, 2, 3]))
    ppo.run(config)
    best = load_policy(str(Path(config.run_dir, "best"))).lm.lm_head.weight
    assert [torch.equal(best, x) for x in written] == [False, True, False, False]
    rows = rows_of(config)
    assert [row["eval/judge"] for row in rows] == [1, 3, 2, 3]
    assert [row["eval/best"] for row in rows] == [1, 3, 3, 3]


def test_a_verdict_that_is_nan_is_never_the_best(
    evaluated: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = iter([math.nan, 2.0, math.nan, 1.0])
    monkeypatch.setattr(Evaluation, "measure", lambda self, p, ref, rewards, metrics: metrics.add(
        "eval/judge", next(verdicts)
    ))  # fmt: skip
    config = replace(evaluated, best_metric="eval/judge")
    ppo.run(config)
    assert [row.get("eval/best") for row in rows_of(config)] == [None, 2, 2, 2]
    kept = torch.load(f"{config.run_dir}/checkpoints/00000004/evaluation.pt", weights_only=True)
    assert kept == {"best": 2.0}


def test_an_evaluation_is_what_held_out_prompts_say(evaluated: PPOConfig) -> None:
    """The same numbers as `respond`, on the same prompts, with the same chance."""
    ppo.run(replace(evaluated, updates=1))
    (row,) = rows_of(evaluated)
    policy = load_policy(str(Path(evaluated.run_dir, "policy")))
    models = ppo.load(evaluated, torch.device("cpu"))
    prompts = read_prompts(evaluated.heldout, models.tokenizer, 2, 20)[:5]
    said = respond(policy, models.reference, models.rewards, models.tokenizer, prompts, evaluated)
    means = {
        "eval/judge": sum(len(x.text) for x in said) / 5,
        "eval/score": sum(x.score for x in said) / 5,
        "eval/kl": sum(x.kl for x in said) / 5,
        "eval/rlhf_reward": sum(x.score - 0.1 * x.kl for x in said) / 5,
        "eval/length": sum(len(x.ids) for x in said) / 5,
    }
    assert {name: row[name] for name in means} == pytest.approx(means, abs=1e-5)
    assert not Path(evaluated.run_dir, "best").exists()  # no metric was named


def test_held_out_prompts_leave_room_in_the_judges_context(
    evaluated: PPOConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judge that reads less than the policy: longer prompts are left out, or none would fit."""
    inner, asked = scoring.load_scorer, []

    def short(folder: str, *args: Any) -> Any:
        scorer = inner(folder, *args)
        if folder == judge:
            scorer.model.config.max_position_embeddings = context
        return scorer

    def written(policy: Any, prompts: list[Any], *rest: Any, **options: Any) -> Any:
        asked.extend(len(prompt.ids) for prompt in prompts)
        return generate(policy, prompts, *rest, **options)

    judge = str(shutil.copytree(evaluated.critic, tmp_path / "judge"))
    monkeypatch.setattr(scoring, "load_scorer", short)
    monkeypatch.setattr(evaluation, "generate", written)
    heldout = tmp_path / "prompts.jsonl"
    write_rows(heldout, [{"text": "film"}, {"text": "the film is good to me"}])
    options = {"heldout": str(heldout), "judge": judge, "prompt_tokens": 4, "updates": 1}
    config = replace(evaluated, **options, evaluation_prompts=2)
    context = config.max_new_tokens + 1 + 4
    ppo.run(config)
    assert asked and max(asked) <= 4
    context = config.max_new_tokens + 1
    with pytest.raises(UserError, match="max_new_tokens is 12: too many for a context of 13"):
        ppo.run(config, overwrite=True)


def test_evaluation_is_of_no_matter_to_training(evaluated: PPOConfig, tmp_path: Path) -> None:
    quiet = replace(
        evaluated, run_dir=str(tmp_path / "quiet"), evaluate_every_updates=10, updates=2
    )
    evaluated = replace(evaluated, updates=2)
    for config in (evaluated, quiet):
        ppo.run(config)
    assert ["eval/judge" in row for row in rows_of(quiet)] == [False, True]
    policies = [Path(c.run_dir, "policy/model.safetensors") for c in (evaluated, quiet)]
    assert policies[0].read_bytes() == policies[1].read_bytes()


def test_choices_with_state_go_on_to_the_same_bits(
    evaluated: PPOConfig, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running moments, the order of two files, the best value, a value head."""
    config = replace(
        evaluated,
        critic="",
        critic_kind="head",
        critic_warmup_updates=1,
        reward_scaling="mean_std",
        best_metric="eval/rlhf_reward",
        train={str(text / "train.jsonl"): 1.0, str(text / "other.jsonl"): 2.0},
    )
    write_rows(text / "other.jsonl", [{"text": "the plot is dull to me"}] * 3)
    whole = replace(config, run_dir=str(tmp_path / "whole"))
    ppo.run(whole)
    ppo.run(config)
    shutil.rmtree(Path(config.run_dir, "checkpoints/00000004"))
    ppo.run(config, resume=True)
    assert [row["step"] for row in rows_of(config)] == [1, 2, 3, 4]
    assert differences(Path(whole.run_dir), Path(config.run_dir)) == []


def test_the_penalty_in_place_of_the_clip(ppo_config: PPOConfig, models: Models) -> None:
    """Ratios 1.5; 2, 1, 1 count in full, and `b * (r - 1 - log r)` beside them has its gradient."""
    x = moved(models, [1.0, 1.0], UP)
    config, metrics = replace(ppo_config, objective="penalty"), Metrics()
    ppo.backward(models, x, config, 0.0, metrics, penalty_coef=0.7)
    assert metrics.mean("loss/policy_avg") == pytest.approx(-(1.5 + 2 + 1 + 1) / 4, rel=1e-5)
    assert metrics.mean("policy/clipfrac_avg") == 0
    found = gradients(models)
    log_ratio = (models.policy(LogProbs(x.ids, x.cu_seqlens, x.mask)) - x.logprobs)[x.mask]
    ratio = log_ratio.exp()
    (-ratio * 1.0 + 0.7 * (ratio - 1 - log_ratio)).mean().backward()
    expected = [p.grad for p in models.policy.parameters() if p.grad is not None]
    for a, b in zip(found, expected, strict=False):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("moved", "coef"), [(0.019, 0.5), (0.021, 1.0), (0.044, 1.0), (0.046, 2.0)]
)
def test_the_penaltys_weight_follows_its_target(moved: float, coef: float) -> None:
    """Target .03: halved below .02, doubled above .045."""
    controller = ppo.PenaltyController(1.0, 0.03)
    controller.update(moved)
    assert controller.coef == coef


def test_a_run_with_a_penalty_moves_its_weight(ppo_config: PPOConfig) -> None:
    config = replace(ppo_config, objective="penalty", penalty_target_per_token=9.0, updates=3)
    ppo.run(config)
    assert [row["penalty_coef"] for row in rows_of(config)] == [1.0, 0.5, 0.25]


def test_the_penaltys_weight_stands_where_every_response_was_left_out(
    ppo_config: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ppo, "stop_ids", lambda *args: [])
    config = replace(ppo_config, objective="penalty", truncation="drop", updates=3)
    with pytest.raises(CheckFailed, match="has learned nothing"):
        ppo.run(config)
    assert [row["penalty_coef"] for row in rows_of(config)] == [1.0, 1.0, 1.0]
