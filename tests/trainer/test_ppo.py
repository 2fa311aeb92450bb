import contextlib
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny import make_rollouts
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from trainer import distributed, ppo, report
from trainer.config import CheckFailed, PPOConfig
from trainer.experience import Experience
from trainer.metrics import Metrics
from trainer.models import LogProbs, Policy
from trainer.optimise import adamw, clipped_step
from trainer.ppo import KLController, Models
from trainer.rollout import Rollouts, generate, rollouts_of


def made(rows: list[list[int]], start: int, advantages: list[float], models: Models) -> Experience:
    """An experience whose old log-probs are the policy's own, with one advantage a row."""
    rollouts = make_rollouts(rows, [start] * len(rows), [True] * len(rows))
    with torch.no_grad():
        logprobs = models.policy(LogProbs(rollouts.ids, rollouts.cu_seqlens, rollouts.mask))
        values = models.values(rollouts.ids, rollouts.cu_seqlens)
    mask = rollouts.mask
    zeros = torch.zeros(mask.shape)
    return Experience(
        ids=rollouts.ids,
        cu_seqlens=rollouts.cu_seqlens,
        mask=mask,
        logprobs=logprobs,
        ref_logprobs=logprobs,
        values=values,
        rewards=zeros,
        kl=zeros,
        advantages=torch.tensor(advantages).repeat_interleave(rollouts.lengths).where(mask, zeros),
        returns=values + 1,
        scores=torch.tensor(advantages),
    )


def trained_by(models: Models, config: PPOConfig) -> list:
    return [
        (models.policy, adamw(models.policy, config.learning_rate)),
        (models.critic, adamw(models.critic, config.critic_learning_rate)),
    ]


def gradients(models: Models) -> list[torch.Tensor]:
    parameters = (*models.policy.parameters(), *models.critic.parameters())
    found = [p.grad.clone() for p in parameters if p.grad is not None]
    models.policy.zero_grad()
    models.critic.zero_grad()
    return found


def test_T9_the_loss_does_not_depend_on_the_cut(ppo_config: PPOConfig, models: Models) -> None:
    """Lengths 1 and 3, advantages +1 and -1: -(1 - 3) / 4 = .5, in one micro-batch or in two."""
    x = made([[1, 20, 30], [1, 20, 40, 50, 60]], 2, [1.0, -1.0], models)
    found = []
    for max_tokens_per_micro_batch in (64, 1):
        metrics = Metrics()
        config = replace(ppo_config, max_tokens_per_micro_batch=max_tokens_per_micro_batch)
        ppo.backward(models, x, config, 0.0, metrics)
        assert metrics.mean("loss/policy_avg") == pytest.approx(0.5, abs=1e-6)
        assert metrics.mean("loss/value_avg") == pytest.approx(0.5, abs=1e-6)  # half of 1 squared
        found.append((metrics.means(), gradients(models)))
    assert len(found[0][1]) > 20
    for a, b in zip(*(grads for _, grads in found), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)


def varied(models: Models, count: int = 12) -> Experience:
    """Responses of 1 to 12 tokens, advantages of both signs."""
    draw = random.Random(0)
    rows = [[1, 20, *(draw.randrange(3, 200) for _ in range(1 + i % 12))] for i in range(count)]
    return made(rows, 2, [(-1.0) ** i * (1 + i) for i in range(count)], models)


@pytest.mark.parametrize("tokens", [1, 20, 33, 64])
def test_T9_nor_how_full_micro_batches_are(
    ppo_config: PPOConfig, models: Models, tokens: int
) -> None:
    x, found = varied(models), []
    for limit in (tokens, 10_000):
        config, metrics = replace(ppo_config, max_tokens_per_micro_batch=limit), Metrics()
        ppo.backward(models, x, config, 0.1, metrics)
        found.append((metrics.means(), gradients(models)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4, abs=1e-6)
    for a, b in zip(*(grads for _, grads in found), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_the_order_of_prompts_in_a_batch_is_no_matter(
    ppo_config: PPOConfig, models: Models
) -> None:
    x, found = varied(models), []
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist()
    assert order != sorted(order)
    for experience in (x, x.rows(order)):
        metrics = Metrics()
        ppo.backward(models, experience, ppo_config, 0.1, metrics)
        found.append((metrics.means(), gradients(models)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4, abs=1e-6)
    for a, b in zip(*(grads for _, grads in found), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_P5_micro_batches_of_10_and_1000_tokens_add_up_to_the_batch(
    ppo_config: PPOConfig, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    lengths = [10, *[40] * 25]
    rows = [[1, 20, *(draw.randrange(3, 200) for _ in range(n))] for n in lengths]
    x, found = made(rows, 2, [5.0, *[-1.0] * 25], models), []
    for cut in ([[0], list(range(1, 26))], [list(range(26))]):
        monkeypatch.setattr(ppo, "micro_batches", lambda *_, cut=cut: cut)
        assert [int(x.rows(part).mask.sum()) for part in cut] in ([10, 1000], [1010])
        metrics = Metrics()
        ppo.backward(models, x, ppo_config, 0.0, metrics)
        assert metrics.mean("loss/policy_avg") == pytest.approx((1000 - 50) / 1010, rel=1e-5)
        found.append(gradients(models))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


class Largest(TorchDispatchMode):
    """Watches the numbers of the largest tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.numel())
        return result


def test_the_logits_of_a_batch_are_never_made(ppo_config: PPOConfig, models: Models) -> None:
    """Neither in the update nor for the reference: 16,384 tokens of V = 8,192 are 512 MiB."""
    rows, width = 512, 33
    lm = GPT2LMHeadModel(
        GPT2Config(vocab_size=8192, n_embd=8, n_layer=1, n_head=1, n_positions=width)
    )
    policy = Policy(lm.eval())
    models = replace(models, policy=policy, critic=models.critic)
    ids = torch.randint(1, 200, (rows, width))
    x = made(ids.tolist(), 1, [1.0] * rows, models)
    config = replace(ppo_config, max_tokens_per_micro_batch=rows * width)
    with Largest() as of_update:
        ppo.backward(models, x, config, 0.0, Metrics())
    with Largest() as of_reference, torch.no_grad():
        policy(LogProbs(x.ids, x.cu_seqlens))
    assert policy.lm.lm_head.weight.grad.abs().sum() > 0
    for seen in (of_update, of_reference):
        assert 2**22 < seen.numbers <= 2**28 // 4 < rows * (width - 1) * 8192


def test_P2_before_the_first_step_the_ratio_is_1(ppo_config: PPOConfig, models: Models) -> None:
    metrics = Metrics()
    x = made([[1, 20, 30], [1, 20, 40, 50, 60]], 2, [1.0, -1.0], models)
    ppo.backward(models, x, ppo_config, 0.0, metrics)
    assert metrics.mean("val/ratio") == pytest.approx(1.0, abs=1e-6)
    assert metrics.mean("policy/approxkl_k3") == pytest.approx(0.0, abs=1e-6)
    assert metrics.mean("policy/clipfrac_avg") == 0


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 4), (3, 2), (2, 3)])
def test_T11_optimiser_steps_are_those_asked_for(
    ppo_config: PPOConfig, models: Models, epochs: int, minibatches: int
) -> None:
    config = replace(ppo_config, ppo_epochs=epochs, minibatches=minibatches)
    x = made([[1, 20, 30 + i] for i in range(7)], 2, [1.0] * 7, models)
    trained, metrics = trained_by(models, config), Metrics()
    shuffle = torch.Generator().manual_seed(0)
    ppo.learn(models, x, config, trained, 0.0, shuffle, metrics)
    assert metrics.mean("optimizer_steps") == epochs * minibatches
    for _, optimizer in trained:
        assert ppo.steps_taken(optimizer) == epochs * minibatches


def test_each_epoch_sees_all_episodes_in_an_order_of_its_own(
    ppo_config: PPOConfig, models: Models
) -> None:
    x = made([[1, 20, 30 + i] for i in range(8)], 2, [1.0] * 8, models)
    config = replace(ppo_config, ppo_epochs=2, minibatches=2)
    shuffle = torch.Generator().manual_seed(0)
    seen = [m.ids[2::3].tolist() for m in ppo.minibatches(x, config, shuffle)]
    first, second = seen[0] + seen[1], seen[2] + seen[3]
    assert sorted(first) == sorted(second) == list(range(30, 38))
    assert first != second


def test_T14_gradients_are_clipped_and_the_norm_before_is_logged(
    ppo_config: PPOConfig, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = made([[1, 20, 30], [1, 20, 40, 50, 60]], 2, [1.0, -1.0], models)
    ppo.backward(models, x, ppo_config, 0.0, Metrics())
    whole = torch.stack(
        [g.norm() for g in gradients(models)[: len(list(models.policy.parameters()))]]
    )
    used = []

    def spy(self: torch.optim.AdamW) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        used.append(torch.stack([g.norm() for g in grads if g is not None]).norm().item())
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = torch.tensor(1.0)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    config = replace(ppo_config, max_grad_norm=0.01, ppo_epochs=1, minibatches=1)
    metrics = Metrics()
    ppo.learn(models, x, config, trained_by(models, config), 0.0, torch.Generator(), metrics)
    assert used == pytest.approx([0.01, 0.01], rel=1e-3)
    assert metrics.mean("grad_norm/policy") == pytest.approx(whole.norm().item(), rel=1e-4)
    assert metrics.mean("grad_norm/policy") > 0.1


def test_a_step_that_is_not_finite_is_skipped_and_counted(
    ppo_config: PPOConfig, models: Models
) -> None:
    x = made([[1, 20, 30], [1, 20, 40]], 2, [1.0, -1.0], models)
    x.returns[1] = math.inf
    before = [p.clone() for p in models.policy.parameters()]
    trained, metrics = trained_by(models, ppo_config), Metrics()
    config = replace(ppo_config, ppo_epochs=1, minibatches=2)
    ppo.learn(models, x, config, trained, 0.0, torch.Generator().manual_seed(0), metrics)
    assert metrics.total("skipped_steps") == 1
    assert metrics.mean("optimizer_steps") == 1
    assert all(p.isfinite().all() for p in models.policy.parameters())
    assert any(
        not torch.equal(a, b) for a, b in zip(before, models.policy.parameters(), strict=True)
    )


def test_a_norm_that_is_not_finite_steps_no_module() -> None:
    modules = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
    trained = [(module, adamw(module, 0.1)) for module in modules]
    for module, factor in zip(modules, (1.0, math.nan), strict=True):
        (module(torch.ones(2)) * factor).sum().backward()
    before = modules[0].weight.clone()
    norms, stepped = clipped_step(trained, 1.0)
    assert not stepped
    assert norms[0].isfinite() and not norms[1].isfinite()
    assert torch.equal(before, modules[0].weight)
    assert modules[0].weight.grad is None


def test_target_kl_ends_an_update_before_the_step(ppo_config: PPOConfig, models: Models) -> None:
    x = made([[1, 20, 30 + i] for i in range(8)], 2, [1.0, -1.0] * 4, models)
    config = replace(
        ppo_config, learning_rate=0.1, ppo_epochs=4, minibatches=1, target_kl=1e-3, clip_range=9.0
    )
    trained, metrics = trained_by(models, config), Metrics()
    ppo.learn(models, x, config, trained, 0.0, torch.Generator().manual_seed(0), metrics)
    # the first step starts from ratio 1 and moves far; the second is not taken
    assert metrics.mean("optimizer_steps") == 1
    assert metrics.total("early_stops") == 1
    assert all(p.grad is None for p in models.policy.parameters())


def test_the_kl_in_the_loss_pulls_to_the_reference(ppo_config: PPOConfig, models: Models) -> None:
    x = made([[1, 20, 30], [1, 20, 40, 50, 60]], 2, [0.0, 0.0], models)
    x.ref_logprobs = x.ref_logprobs + 0.5
    ppo.backward(models, x, ppo_config, 0.0, Metrics())
    without = gradients(models)[: len(list(models.policy.parameters()))]
    assert all((g == 0).all() for g in without)
    ppo.backward(models, x, ppo_config, 0.3, Metrics())
    assert any((g != 0).any() for g in gradients(models))


@pytest.mark.parametrize(
    ("target", "kl", "coef"),
    [
        ({"kl_target_per_sequence": 4.0}, {"objective/kl": 4.4}, 0.1 * (1 + 0.1 * 50 / 1000)),
        ({"kl_target_per_sequence": 4.0}, {"objective/kl": 40.0}, 0.1 * (1 + 0.2 * 50 / 1000)),
        ({"kl_target_per_sequence": 4.0}, {"objective/kl": 0.0}, 0.1 * (1 - 0.2 * 50 / 1000)),
        (
            {"kl_target_per_token": 0.2},
            {"objective/kl_per_token": 0.22},
            0.1 * (1 + 0.1 * 50 / 1000),
        ),
        ({"kl_target_per_token": 0.2}, {}, 0.1),  # nothing was kept to learn from
        ({}, {"objective/kl": 99.0}, 0.1),
    ],
)
def test_the_kl_controller_in_both_units(target: dict, kl: dict[str, float], coef: float) -> None:
    config = PPOConfig(kl_horizon_episodes=1000, kl_controller="adaptive", **target)
    controller, metrics = KLController.of(config), Metrics()
    for name, value in kl.items():
        metrics.add(name, value)
    controller.update(metrics, episodes=50)
    assert controller.coef == pytest.approx(coef)


def test_an_unequal_start_is_no_matter(ppo_config: PPOConfig, models: Models) -> None:
    """A batch with nothing to learn leaves everything as it is, and no number is NaN."""
    x = made([[1, 20, 30], [1, 20, 40]], 2, [1.0, 1.0], models)
    x.mask = torch.zeros_like(x.mask)
    metrics = Metrics()
    ppo.backward(models, x, ppo_config, 0.0, metrics)
    assert all((g == 0).all() for g in gradients(models))
    assert metrics.mean("loss/policy_avg") == 0


def rows_of(run_dir: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


NAMES = """
    objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores
    policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg loss/policy_avg loss/value_avg
    val/ratio val/clipfrac_avg val/num_eos_tokens kl_coef policy/approxkl_k1 policy/approxkl_k3
    val/explained_variance grad_norm/policy grad_norm/critic objective/shaped_reward
    objective/advantage objective/whitened_advantage_abs response/length response/truncated
    response/repetition response/distinct_1 response/distinct_2
    response/score_length_correlation consistency/ratio_error_max
    consistency/logprob_difference time/rollout time/experience time/learn time/tokens_per_second
    memory/peak_bytes optimizer_steps skipped_steps objective/unscored objective/kl_k3
    objective/kl_per_token
"""


def test_a_run_logs_every_metric_and_gives_the_same_bits_again(
    ppo_config: PPOConfig, tmp_path: Path
) -> None:
    again = replace(ppo_config, run_dir=str(tmp_path / "again"))
    torch.manual_seed(1)
    ppo.run(ppo_config)
    torch.manual_seed(2)  # no matter: all chance has a generator of its own
    ppo.run(again)
    first, second = rows_of(ppo_config.run_dir), rows_of(again.run_dir)
    assert set(NAMES.split()) <= set(first[0])
    assert all(math.isfinite(value) for row in first for value in row.values() if value != "ppo")
    changing = ("time/", "memory/")
    for a, b in zip(first, second, strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(changing)} == {
            k: v for k, v in b.items() if not k.startswith(changing)
        }
    for name in ("policy", "critic"):
        weights = [
            Path(c.run_dir, name, "model.safetensors").read_bytes() for c in (ppo_config, again)
        ]
        assert weights[0] == weights[1]


def test_sums_in_a_log_agree(ppo_config: PPOConfig) -> None:
    ppo.run(replace(ppo_config, kl_coef=0.3))
    for row in rows_of(ppo_config.run_dir):
        assert row["objective/rlhf_reward"] == pytest.approx(
            row["objective/scores"] + row["objective/non_score_reward"], abs=1e-6
        )
        assert row["objective/non_score_reward"] == pytest.approx(
            -0.3 * row["objective/kl"], abs=1e-6
        )
        assert row["objective/kl_per_token"] == pytest.approx(
            row["objective/kl"] / row["response/length"], abs=1e-6
        )
        assert row["objective/shaped_reward"] == pytest.approx(
            row["objective/rlhf_reward"] / row["response/length"], abs=1e-6
        )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_at_the_start_the_ratio_is_1_and_the_kl_is_0(
    ppo_config: PPOConfig, temperature: float
) -> None:
    """What was sampled step by step, prompts shared, against packed micro-batches of training."""
    options = {"samples_per_prompt": 2, "max_tokens_per_micro_batch": 40, "minibatches": 1}
    ppo.run(replace(ppo_config, **options, temperature=temperature, ppo_epochs=1, updates=1))
    (row,) = rows_of(ppo_config.run_dir)
    assert row["consistency/ratio_error_max"] < 1e-4
    assert row["val/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert row["objective/kl"] == pytest.approx(0.0, abs=1e-4)


def test_what_is_dropped_is_held_against_the_reference_too(ppo_config: PPOConfig) -> None:
    with contextlib.suppress(CheckFailed):  # where all of them are dropped
        ppo.run(replace(ppo_config, truncation="drop", max_new_tokens=3, updates=1))
    (row,) = rows_of(ppo_config.run_dir)
    assert 0 < row["response/truncated"] <= 1


def test_the_frozen_models_stay_as_they_were(ppo_config: PPOConfig) -> None:
    paths = [Path(ppo_config.model), Path(next(iter(ppo_config.rewards)))]
    before = [(path / "model.safetensors").read_bytes() for path in paths]
    ppo.run(ppo_config)
    assert before == [(path / "model.safetensors").read_bytes() for path in paths]
    trained = (Path(ppo_config.run_dir) / "policy/model.safetensors").read_bytes()
    assert trained != before[0]


def test_samples_per_prompt_answers_each_prompt_so_often(
    ppo_config: PPOConfig, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    inner = ppo.generate

    def spy(policy, prompts, *args, **kwargs):
        seen.append([prompt.value for prompt in prompts])
        return inner(policy, prompts, *args, **kwargs)

    monkeypatch.setattr(ppo, "generate", spy)
    config = replace(
        ppo_config,
        train=str(text / "prompts.jsonl"),
        prompt_tokens=None,
        samples_per_prompt=2,
        episodes_per_update=6,
    )
    ppo.run(config)
    for asked in seen[:2]:
        assert sorted(asked) == sorted(["the film", "the plot", "the cast is"] * 2)
        assert asked[::2] == asked[1::2]
    assert seen[0] != seen[1]


def test_P4_an_update_with_nothing_to_learn_from(ppo_config: PPOConfig) -> None:
    """Every response is cut and dropped: nothing moves, and means of nothing are null."""
    config = replace(
        ppo_config,
        truncation="drop",
        max_new_tokens=1,
        sample_every=1,
        kl_controller="adaptive",
        kl_target_per_token=0.1,
        reward_scaling="mean_std",
        best_metric="eval/score",
        heldout=ppo_config.train + ".heldout",
    )
    Path(config.heldout).write_bytes(Path(config.train).read_bytes())
    with pytest.raises(CheckFailed, match="has learned nothing: its policy_optimizer took no step"):
        ppo.run(config)
    for row in rows_of(config.run_dir):
        assert (row["objective/unscored"], row["objective/scores"]) == (8, None)
        assert (row["loss/policy_avg"], row["grad_norm/policy"], row["kl_coef"]) == (0, 0, 0.1)
        assert (row["optimizer_steps"], row["skipped_steps"]) == (0, 1)
    assert math.isfinite(row["eval/score"])
    run_dir = Path(config.run_dir)
    assert not (run_dir / "policy").exists()
    start = ppo.load(config, torch.device("cpu"))
    for name, side in (("policy", start.policy), ("critic", start.critic)):
        kept = safetensors.torch.load_file(run_dir / f"checkpoints/00000002/{name}.safetensors")
        torch.testing.assert_close(kept, distributed.model_state(side), rtol=0, atol=0)
    for name, content in (("samples", "[]"), ("summary", "{}")):
        (run_dir / f"{name}.json").write_text(content)
    report.run(config.run_dir)  # rows of nulls are shown
    with pytest.raises(CheckFailed, match="has learned nothing"):
        ppo.run(config, resume=True)


def test_a_step_with_nothing_to_learn_from_is_not_taken(
    ppo_config: PPOConfig, models: Models
) -> None:
    """Adam would go on where the steps before it went."""
    x = made([[1, 20, 30], [1, 20, 40]], 2, [1.0, -1.0], models)
    config, metrics = replace(ppo_config, ppo_epochs=1, minibatches=1), Metrics()
    trained = trained_by(models, config)
    ppo.learn(models, x, config, trained, 0.0, torch.Generator(), metrics)
    before = [p.clone() for module, _ in trained for p in module.parameters()]
    x.mask = torch.zeros_like(x.mask)
    ppo.learn(models, x, config, trained, 0.0, torch.Generator(), metrics)
    assert metrics.total("optimizer_steps") == metrics.total("skipped_steps") == 1
    after = [p for module, _ in trained for p in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("size", [1e30, -1e30])
def test_scores_that_are_too_large_to_learn_from_end_the_run(
    ppo_config: PPOConfig, tmp_path: Path, size: float
) -> None:
    source = tmp_path / "large.py"
    source.write_text(f"def f(p, c):\n    return [{size} * (i + 1) for i, _ in enumerate(c)]\n")
    with pytest.raises(CheckFailed, match="scores that are far too large"):
        ppo.run(replace(ppo_config, rewards={f"{source}:f": 1.0}))
    text = Path(ppo_config.run_dir, "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text


def test_a_response_without_a_token_is_counted_and_gets_no_score(ppo_config: PPOConfig) -> None:
    def engine(policy: Policy, prompts: Any, stop: Any, **options: Any) -> Rollouts:
        found = generate(policy, prompts, stop, **options)
        kept = found.mask.clone()
        ends = found.cu_seqlens.tolist()
        kept[ends[1] : ends[2]] = False  # the second answers nothing
        responses = found.responses()
        responses[1] = []
        return rollouts_of(prompts, responses, found.logprobs[kept], stop, options["version"])

    ppo.run(replace(ppo_config, missing_eos_penalty=50.0, sample_every=1), engine=engine)
    for row in rows_of(ppo_config.run_dir):
        assert row["objective/unscored"] == 1
        assert all(math.isfinite(value) for value in row.values() if value != "ppo")
        whole = 8 * row["response/truncated"]  # the empty one is one of them
        penalty = 50 * (whole - 1) / 7
        name = Path(next(iter(ppo_config.rewards))).name
        assert row["objective/scores"] == pytest.approx(
            row[f"objective/scores/{name}"] - penalty, abs=1e-4
        )
