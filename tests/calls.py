"""One valid call of every public op, with every optional tensor: what all ops have to do alike."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from measure import leaf
from torch import Tensor

import ppokern

V, H = 11, 4


class Call(NamedTuple):
    fn: Callable[..., Any]
    args: dict[str, Any]
    flows: tuple[str, ...] = ()  # the arguments that gradients flow into

    def leaves(self) -> dict[str, Any]:
        """The arguments, with fresh leaves where gradients flow."""
        return {k: leaf(x) if k in self.flows else x for k, x in self.args.items()}

    def run(self, args: dict[str, Any], fn: Callable[..., Any] | None = None) -> list[Tensor]:
        """Every output tensor, then every gradient."""
        out = outputs((fn or self.fn)(**args))
        kept = [o for o in out if o.requires_grad]
        inputs = [args[k] for k in self.flows]
        grads = torch.autograd.grad([o.sum() for o in kept], inputs) if kept else ()
        return [*(o.detach() for o in out), *grads]


def outputs(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        return list(result.values())
    return [t for part in result for t in outputs(part)] if isinstance(result, tuple) else []


def every(dtype: torch.dtype = torch.float32, rows: int = 3, columns: int = 5) -> dict[str, Call]:
    shape = (rows, columns)

    def floats(*tail: int) -> Tensor:
        return torch.randn(*shape, *tail).to(dtype)

    def mask() -> Tensor:
        out = torch.rand(shape) < 0.7
        out[0, 0] = True
        return out

    old = -torch.rand(shape) * 3 - 0.1
    ids = torch.randint(0, V - 2, shape)
    head = {
        "hidden": floats(H),
        "weight": torch.randn(V, H).to(dtype),
        "token_ids": ids,
        "bias": torch.randn(V).to(dtype),
        "mask": mask(),
        "temperature": torch.rand(shape) + 0.5,
        "softcap": 5.0,
        "vocab_size": V - 2,
        "max_logits_bytes": 6 * V * 4,
    }
    logits = {"logits": floats(V), **{k: x for k, x in head.items() if k in LOGITS}}
    policy = {
        "logprobs": (old + 0.3 * torch.randn(shape)).to(dtype),
        "old_logprobs": old.to(dtype),
        "advantages": floats(),
        "mask": mask(),
    }
    options = {
        "weights": torch.rand(shape),
        "dual_clip": 3.0,
        "aggregate": "sequence_mean",
        "denominator": torch.tensor(4.0),
    }
    value = {"values": floats(), "old_values": floats(), "returns": floats()}
    joint = {
        "value_mask": mask(),
        "entropy": torch.rand(shape).to(dtype),
        "entropy_coef": 0.1,
        "ref_logprobs": old.to(dtype),
        "kl_coef": 0.2,
    }
    bootstrap = torch.rand(shape) < 0.8
    trunk = {k: head[k] for k in ("hidden", "weight", "bias", "mask", "temperature", "token_ids")}
    return {
        "selected_logprobs": Call(ppokern.selected_logprobs, logits, ("logits",)),
        "selected_logprobs_with_entropy": Call(
            ppokern.selected_logprobs_with_entropy, logits, ("logits",)
        ),
        "linear_selected_logprobs": Call(
            ppokern.linear_selected_logprobs, head, ("hidden", "weight", "bias")
        ),
        "linear_selected_logprobs_with_entropy": Call(
            ppokern.linear_selected_logprobs_with_entropy, head, ("hidden", "weight", "bias")
        ),
        "gae": Call(
            ppokern.gae,
            {
                "rewards": floats(),
                "values": floats(),
                "mask": mask(),
                "bootstrap": bootstrap,
                "continues": bootstrap & (torch.rand(shape) < 0.7),
                "next_values": floats(),
                "gamma": 0.9,
            },
        ),
        "whiten": Call(ppokern.whiten, {"x": floats(), "mask": mask()}),
        "kl_estimate": Call(
            ppokern.kl_estimate,
            {"logprobs": policy["logprobs"], "ref_logprobs": old.to(dtype), "kind": "k3"},
            ("logprobs",),
        ),
        "shaped_rewards": Call(
            ppokern.shaped_rewards,
            {
                "scores": torch.randn(rows).to(dtype),
                "logprobs": policy["logprobs"],
                "ref_logprobs": old.to(dtype),
                "kl_coef": 0.1,
                "mask": mask(),
                "score_mask": torch.rand(rows) < 0.5,
                "token_rewards": floats(),
            },
        ),
        "ppo_policy_loss": Call(ppokern.ppo_policy_loss, {**policy, **options}, ("logprobs",)),
        "ppo_policy_loss_of_sequences": Call(
            ppokern.ppo_policy_loss,
            {**policy, "ratio": "sequence", "clip_range": (0.01, 0.02)},
            ("logprobs",),
        ),
        "ppo_value_loss": Call(
            ppokern.ppo_value_loss, {**value, "mask": mask(), "aggregate": "sum"}, ("values",)
        ),
        "ppo_loss": Call(
            ppokern.ppo_loss,
            {**policy, **options, **value, **joint},
            ("logprobs", "values", "entropy"),
        ),
        "linear_ppo_loss": Call(
            ppokern.linear_ppo_loss,
            {
                **trunk,
                "old_logprobs": -torch.rand(shape) * 3,
                "advantages": torch.randn(shape),
                "entropy_coef": 0.1,
                "ref_logprobs": -torch.rand(shape),
                "kl_coef": 0.1,
                "weights": torch.rand(shape),
            },
            ("hidden", "weight", "bias"),
        ),
        "linear_ppo_loss_of_sequences": Call(
            ppokern.linear_ppo_loss,
            {
                **trunk,
                "old_logprobs": -torch.rand(shape) * 3,
                "advantages": torch.randn(shape),
                "ratio": "sequence",
                "clip_range": 0.5,
            },
            ("hidden", "weight", "bias"),
        ),
    }


LOGITS = ("token_ids", "mask", "temperature", "softcap", "vocab_size")
NAMES = tuple(every())


def packed() -> dict[str, Call]:
    """The calls that take cu_seqlens, with it."""
    cu = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    calls = every(rows=1, columns=9)
    for call in calls.values():
        for k, x in call.args.items():
            if isinstance(x, Tensor) and x.ndim > 1 and k != "weight":
                call.args[k] = x[0]
    calls["shaped_rewards"].args.update(scores=torch.randn(3), score_mask=torch.rand(3) < 0.7)
    taking = ("gae", "shaped_rewards", "ppo_policy_loss", "ppo_policy_loss_of_sequences")
    taking += ("ppo_value_loss", "ppo_loss", "linear_ppo_loss", "linear_ppo_loss_of_sequences")
    for name in taking:
        calls[name].args["cu_seqlens"] = cu
    return {name: calls[name] for name in taking}


PACKED_NAMES = tuple(packed())


def packing() -> dict[str, Call]:
    cu = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    mask = torch.tensor([[True, True, False], [False] * 3, [True, True, True]])
    return {
        "pack": Call(ppokern.pack, {"x": torch.randn(3, 3, 2), "mask": mask}, ("x",)),
        "unpack": Call(ppokern.unpack, {"values": torch.randn(5), "cu_seqlens": cu}, ("values",)),
        "position_ids": Call(ppokern.position_ids, {"cu_seqlens": cu}),
        "next_token_targets": Call(
            ppokern.next_token_targets, {"token_ids": torch.arange(5), "cu_seqlens": cu}
        ),
    }
