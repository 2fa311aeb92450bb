"""What takes less memory: bfloat16, activations made again, frozen models that wait elsewhere."""

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crash import differences
from test_check import rolled
from test_distributed import lines
from test_ppo import gradients, varied
from tiny import numbers_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import attention, check, models, ppo
from trainer.config import CheckFailed, PPOConfig, UserError
from trainer.data import packed
from trainer.metrics import Metrics
from trainer.models import (
    LogProbs,
    Policy,
    forward_all,
    lent,
    load_policy,
    new_scorer,
    recompute_blocks,
    set_precision,
)

ROWS = [[1, 20, 30, 40], [1, 7, 9]]
LOW: dict[str, Any] = {"precision": "bfloat16"}
CPU = torch.device("cpu")


class Casts(TorchDispatchMode):
    """Counts the casts of each tensor to bfloat16, and the dtypes of products."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: Counter[int] = Counter()
        self.products: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        if name in ("aten::_to_copy", "aten::to.dtype"):
            if torch.bfloat16 in (*args, *kwargs.values()):
                self.casts[args[0].data_ptr()] += 1
        if any(
            part in name for part in ("aten::mm", "aten::addmm", "attention", "ppokern::linear")
        ):
            factors = [x for x in args if isinstance(x, Tensor) and x.dim() > 1][:2]
            self.products |= {(name, x.dtype) for x in factors}
        return func(*args, **kwargs)


def test_products_are_in_bfloat16_and_all_else_in_float32(policy: Policy) -> None:
    exact = policy(LogProbs(*packed(ROWS)))
    exact.sum().backward()
    before = [p.grad for p in policy.parameters()]
    policy.zero_grad()
    set_precision("bfloat16", policy)
    with Casts() as seen:
        logprobs = policy(LogProbs(*packed(ROWS)))
        logprobs.sum().backward()
    assert len(seen.products) >= 4
    assert {dtype for _, dtype in seen.products} == {torch.bfloat16}
    assert logprobs.dtype == torch.float32
    assert 0 < (logprobs - exact).abs().max() < 0.02
    for p, gradient in zip(policy.parameters(), before, strict=True):
        assert p.dtype == p.grad.dtype == torch.float32  # type: ignore[union-attr]
        assert (p.grad - gradient).norm() < 0.03 * gradient.norm() + 1e-6  # type: ignore[operator]


def test_scores_and_values_are_not_rounded_to_bfloat16(untrained_of: str) -> None:
    scorer = new_scorer(untrained_of)
    torch.nn.init.normal_(scorer.model.score.weight)
    exact = scorer(*packed(ROWS))
    set_precision("bfloat16", scorer)
    found = scorer(*packed(ROWS))
    assert 0 < (found - exact).abs().max() < 0.1
    assert not torch.equal(found, found.bfloat16().float())


def test_attention_gets_what_flash_attn_takes(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 bits for queries and keys too, which some models rotate in float32; and in the cache."""
    seen = set()
    inner = attention.Packed.attend

    def spy(self: Any, module: Any, *tensors: Any) -> Tensor:
        seen.update(x.dtype for x in tensors[:3])
        return inner(self, module, *tensors)

    monkeypatch.setattr(attention.Packed, "attend", spy)
    set_precision("bfloat16", policy)
    policy(LogProbs(*packed(ROWS)))
    rolled(policy)
    assert seen == {torch.bfloat16}


def test_sampling_casts_each_weight_once(policy: Policy) -> None:
    set_precision("bfloat16", policy)
    with Casts() as seen:
        rollouts = rolled(policy)
    assert rollouts.mask.sum() > 2 * len(rollouts.prompts)  # several steps
    matrices = {p.data_ptr() for p in policy.parameters() if p.dim() == 2}
    cast = [seen.casts[pointer] for pointer in matrices if seen.casts[pointer]]
    assert len(cast) > 4 * 2
    assert set(cast) == {1}


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_self_check_in_bfloat16(policy: Policy, temperature: float) -> None:
    set_precision("bfloat16", policy)
    metrics = Metrics()
    rollouts = rolled(policy, temperature)
    check.check_paths(policy, rollouts, PPOConfig(**LOW, temperature=temperature), metrics)
    assert metrics.mean("consistency/ratio_error_max") < 0.05
    other = 1.7 - temperature
    with pytest.raises(CheckFailed, match=r"likely cause: temperature"):
        check.check_paths(policy, rollouts, PPOConfig(**LOW, temperature=other), metrics)


def test_the_self_check_sees_a_tenth_of_temperature_in_a_trained_model(
    trained: dict[str, Any],
) -> None:
    policy = load_policy(trained["model"])
    set_precision("bfloat16", policy)
    rollouts = rolled(policy)
    check.check_paths(policy, rollouts, PPOConfig(**LOW), Metrics())
    with pytest.raises(CheckFailed, match="sampling and training disagree"):
        check.check_paths(policy, rollouts, PPOConfig(**LOW, temperature=1.1), Metrics())


def test_the_reference_is_the_policy_to_the_bit_in_bfloat16(ppo_config: PPOConfig) -> None:
    loaded = ppo.load(replace(ppo_config, **LOW), CPU)
    ids, cu_seqlens = packed(ROWS)
    sides = [
        forward_all(numbers_of(x), 64, cu_seqlens, ids)
        for x in (loaded.policy, loaded.reference, load_policy(ppo_config.model))
    ]
    assert torch.equal(sides[0], sides[1])
    assert not torch.equal(sides[0], sides[2])


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_in_bfloat16_that_recomputes_goes_on_to_the_same_bits(
    lora: bool, ppo_config: PPOConfig, tmp_path: Path
) -> None:
    if lora:
        pytest.importorskip("peft", reason="needs the extra lora")
    options: dict[str, Any] = LOW | {
        "gradient_checkpointing": True,
        "lora_rank": 2 if lora else None,
    }
    config = replace(ppo_config, **options, updates=2, save_every_updates=1)
    ppo.run(replace(config, run_dir=str(tmp_path / "whole")))
    ppo.run(config)
    shutil.rmtree(Path(config.run_dir, "checkpoints/00000002"))
    ppo.run(config, resume=True)
    assert differences(tmp_path / "whole", Path(config.run_dir)) == []


def learned(config: PPOConfig) -> tuple[dict[str, Any], list[Tensor], int]:
    """Metrics and gradients of a minibatch, and the bytes that its passes keep until backward."""
    loaded = ppo.load(config, CPU)
    torch.manual_seed(0)
    for p in (*loaded.policy.parameters(), *loaded.critic.parameters()):
        torch.nn.init.normal_(p, std=0.1)  # adapters and heads of zeros as well
    x, metrics, kept = varied(loaded), Metrics(), [0]

    def keep(tensor: Tensor) -> Tensor:
        kept[0] += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ppo.backward(loaded, x, config, 0.1, metrics)
    return metrics.means(), gradients(loaded), kept[0]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{}, {"critic_kind": "head"}, {"lora_rank": 2}], ids=["whole", "head", "lora"]
)
def test_activations_made_again_give_the_same_bits(
    precision: str, options: dict[str, Any], untrained_of: str, ppo_config: PPOConfig
) -> None:
    if "lora_rank" in options:
        pytest.importorskip("peft", reason="needs the extra lora")
    known = {"model": untrained_of, "critic": "", "rewards": {"math:fsum": 1.0}}
    config = replace(ppo_config, **known, **options, precision=precision)
    before = learned(config)
    after = learned(replace(config, gradient_checkpointing=True))
    assert before[0] == after[0]
    assert len(before[1]) == len(after[1]) >= 8
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    assert any(gradient.any() for gradient in after[1])
    assert after[2] < 0.6 * before[2]


def test_a_trunk_whose_blocks_nobody_knows_is_refused(policy: Policy) -> None:
    for model in (policy.lm, policy.lm.base_model):
        vars(model)["_no_split_modules"] = None
    with pytest.raises(UserError, match="gradient_checkpointing: transformers does not say"):
        recompute_blocks(policy)


def test_lent_weights_are_copies_and_what_is_at_rest_comes_back(policy: Policy) -> None:
    at_rest = [(p, p.data_ptr(), p.detach().clone()) for p in policy.parameters()]
    with pytest.raises(RuntimeError, match="in the middle"), lent(CPU, policy):
        for p, pointer, values in at_rest:
            assert p.data_ptr() != pointer
            assert torch.equal(p, values)
        assert len({p.data_ptr() for p in policy.parameters()}) == len(at_rest)  # a tied head: once
        with torch.no_grad():
            next(policy.parameters()).zero_()
        raise RuntimeError("in the middle")
    for p, pointer, values in at_rest:
        assert p.data_ptr() == pointer
        assert torch.equal(p, values)


def test_weights_come_back_where_the_device_has_no_room_for_the_last(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_rest, inner, moved = [p.data_ptr() for p in policy.parameters()], Tensor.to, []

    def to(self: Tensor, *args: Any, **options: Any) -> Tensor:
        moved.append(self)
        if len(moved) == 4:
            raise torch.OutOfMemoryError("no room")
        return inner(self, *args, **options)

    monkeypatch.setattr(Tensor, "to", to)
    with pytest.raises(torch.OutOfMemoryError), lent(CPU, policy):
        pass
    assert [p.data_ptr() for p in policy.parameters()] == at_rest


def test_offload_needs_a_gpu(ppo_config: PPOConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="offload_frozen needs a GPU"):
        ppo.run(replace(ppo_config, offload_frozen=True))


def test_frozen_models_run_only_while_they_are_lent(
    ppo_config: PPOConfig,
    trained: dict[str, Any],
    text: Path,
    make_model: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """On the CPU, where `lent` copies as well: the same as without, but for how copies lie."""
    judge = shutil.copytree(trained["reward_model"], tmp_path / "judge")
    config = replace(
        ppo_config, heldout=str(text / "heldout.jsonl"), judge=str(judge),
        evaluation_prompts=4, evaluate_every_updates=1,
    )  # fmt: skip
    monkeypatch.setattr(ppo, "pick_device", lambda offload: CPU)
    ppo.run(replace(config, run_dir=str(tmp_path / "whole")))
    inner, load = models._hidden, models._load
    passes, resting = Counter[bool](), set[int]()

    def spy(model: Any, *args: Any) -> Tensor:
        weight = next(model.parameters())
        if not weight.requires_grad:
            passes[weight.data_ptr() in resting] += 1
        return inner(model, *args)

    def remembering(*args: Any, **options: Any) -> Any:
        model, missing = load(*args, **options)
        resting.update(p.data_ptr() for p in model.parameters())
        return model, missing

    monkeypatch.setattr(models, "_hidden", spy)
    monkeypatch.setattr(models, "_load", remembering)
    ppo.run(replace(config, offload_frozen=True))
    assert passes[True] == 0
    assert passes[False] >= 2 * 2 + 2 * 3 + 2
    one, two = lines(tmp_path / "whole"), lines(Path(config.run_dir))
    assert len(one) == len(two) == 2
    for before, after in zip(one, two, strict=True):
        assert after == pytest.approx(before, rel=1e-4, abs=2e-5)
