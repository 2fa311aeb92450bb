"""The clipped PPO policy loss straight from hidden states, with its gradients in three GEMMs."""

from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ppokern import _backend, _check, _library
from ppokern._names import Aggregate, KLKind, Ratio
from ppokern._sequences import spoil
from ppokern.linear import reference
from ppokern.linear.op import (
    checked_head,
    flat_temperatures,
    gradients_like,
    linear_logprobs,
    taken,
)
from ppokern.linear.reference import Head, LossPass
from ppokern.logprob import kernel_native
from ppokern.logprob import reference as logprob_reference
from ppokern.logprob.op import check_numbers
from ppokern.ppo_loss import reference as loss_reference
from ppokern.ppo_loss.op import (
    Loss,
    checked_denominator,
    checked_options,
    checked_tensors,
    need_tensor,
    run,
    with_checked_numbers,
)
from ppokern.ppo_loss.reference import Inputs, Options

KERNELS: dict[str, LossPass | str] = {
    "torch": partial(reference.two_passes, logprob_reference),
    "cpu": partial(reference.two_passes, kernel_native),
    "triton": "ppokern.linear.kernel_triton:loss_pass",
    "cuda": "ppokern.linear.kernel_native:loss_pass",
}


class HeadInputs(NamedTuple):
    """What makes the logits."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    token_ids: Tensor
    temperatures: Tensor | None


class HeadOptions(NamedTuple):
    """How they are made, and which gradients are wanted."""

    temperature: float  # where there are no `temperatures`
    softcap: float | None
    vocab_size: int
    max_logits_bytes: int
    with_entropy: bool
    compact: bool
    need_hidden: bool
    need_weight: bool
    need_bias: bool


_STRUCTS = (HeadInputs, Inputs, HeadOptions, Options)


def _split(args: tuple) -> tuple[HeadInputs, Inputs, HeadOptions, Options, str]:
    parts, start = [], 0
    for struct in _STRUCTS:
        end = start + len(struct._fields)
        parts.append(struct(*args[start:end]))
        start = end
    return *parts, args[start]


def _forward(*args: Any) -> tuple[Tensor, ...]:
    h, x, how, o, backend = _split(args)
    dtype = _dtype(h, x)
    check_numbers(how.temperature, how.softcap, dtype)
    x = with_checked_numbers(x, o, dtype)
    loss_pass = _backend.select("linear_ppo_loss", KERNELS, backend, h.hidden.device, dtype)
    shape, valid = h.token_ids.shape, taken(h.token_ids, x.mask)
    mask = valid.view(shape)
    scale = flat_temperatures(h.temperatures)
    scale = how.temperature if scale is None else scale
    head = Head(h.weight, h.bias, scale, how.softcap, how.vocab_size, dtype)
    hidden = h.hidden.reshape(len(valid), h.hidden.shape[-1])
    plan = reference.plan(hidden, head, valid, how.compact, how.max_logits_bytes)
    logprobs, entropy, gradients = reference.loss_gradients(
        hidden, head, h.token_ids.reshape(-1), plan, loss_reference.TokenSlopes(x, o, mask, dtype),
        how.with_entropy, (how.need_hidden, how.need_weight, how.need_bias), loss_pass,
    )  # fmt: skip
    entropy = None if entropy is None else entropy.view(shape)
    loss, stats, *_ = loss_reference.forward(
        x._replace(logprobs=logprobs.view(shape), entropy=entropy, mask=mask), o
    )
    spoil(x.cu_seqlens, len(valid), *gradients)
    in_hidden, in_weight, in_bias = gradients
    if how.need_hidden:
        in_hidden = in_hidden.view(h.hidden.shape)
    return loss, stats, in_hidden, in_weight, in_bias


def _dtype(h: HeadInputs, x: Inputs) -> torch.dtype:
    return _check.arithmetic(h.hidden, h.weight, h.bias, h.temperatures, *x[:9])


def _named(x: Inputs, h: HeadInputs, how: HeadOptions) -> Inputs:
    """Return the inputs as `stat_names` looks at them: log-probs there, entropy if it is made."""
    return x._replace(logprobs=h.token_ids, entropy=h.token_ids if how.with_entropy else None)


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    h, x, how, o, _ = _split(args)
    dtype, names = _dtype(h, x), loss_reference.stat_names(_named(x, h, how), o)
    return (
        h.hidden.new_empty((), dtype=dtype),
        h.hidden.new_empty(len(names), dtype=dtype),
        *gradients_like(
            h[:3], (how.need_hidden, how.need_weight, how.need_bias), reference.held_dtype
        ),
    )


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    ctx.save_for_backward(*tensors)
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.gradients, ctx.dtypes = output[2:], [None if x is None else x.dtype for x in inputs[:3]]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Any, grad: Tensor | None, *rest: Any) -> tuple:
    *_, how, _, _ = _split(tuple(ctx.others))
    needed = (how.need_hidden, how.need_weight, how.need_bias)
    result: tuple = (None,) * 3
    if grad is not None:
        # scaled where they stand and handed out; for a second backward pass they are made again
        gradients = ctx.gradients
        if not ctx.compiled:
            ctx.gradients = None
        if gradients is None:
            saved = zip(ctx.saved_tensors, ctx.others, strict=True)
            gradients = _forward(*(other if x is None else x for x, other in saved))[2:]
        each = zip(gradients, needed, ctx.dtypes, strict=True)
        scale = torch.mul if ctx.compiled else Tensor.mul_
        result = tuple(scale(g, grad).to(dtype) if need else None for g, need, dtype in each)
    return result


_linear_ppo_loss = _library.register(
    "linear_ppo_loss",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_backward,
    schema=_library.schema_of(*_STRUCTS, returns=5),
    learned=3,
)


def linear_ppo_loss(
    hidden: Float[Tensor, "*batch H"],
    weight: Float[Tensor, "V H"],
    token_ids: Integer[Tensor, "*batch"],
    old_logprobs: Float[Tensor, "*batch"],
    advantages: Float[Tensor, "*batch"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    mask: Bool[Tensor, "*batch"] | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    clip_range: float | tuple[float, float] = 0.2,
    entropy_coef: float = 0.0,
    entropy_stats: bool = False,
    ref_logprobs: Float[Tensor, "*batch"] | None = None,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k3",
    dual_clip: float | None = None,
    ratio: Ratio = "token",
    weights: Float[Tensor, "*batch"] | None = None,
    aggregate: Aggregate = "token_mean",
    denominator: float | Tensor | None = None,
    cu_seqlens: Integer[Tensor, " boundaries"] | None = None,
    log_ratio_limit: float | None = 20.0,
    max_logits_bytes: int = 2**28,
    compact: bool = True,
) -> Loss:
    """The clipped policy loss of PPO straight from hidden states, in three GEMMs of ``N x H x V``.

    Equals `ppo_policy_loss` on `linear_selected_logprobs`, with an entropy bonus and a KL term, to
    rounding. All that the gradient needs is known before the forward pass, so that it makes the
    gradients as it goes: logits, their gradient in the same buffer, hidden states, weight. The
    backward pass only scales them; a second one over the same graph makes them again.

    In float16 the gradients are rounded behind the loss scale (`torch.amp.GradScaler`), not before:
    until the backward pass they are float32, made of logits' gradients that stand in float16 times
    a power of two, the mean taken out, so that the number of tokens makes none of them vanish.

    Args:
        hidden: see `linear_selected_logprobs`, as for all of the head. Takes a gradient.
        weight: see there. Takes a gradient.
        token_ids: see there.
        old_logprobs: see `ppo_policy_loss`, as for all of the loss.
        advantages: see there.
        bias: see `linear_selected_logprobs`. Takes a gradient.
        mask: see there.
        temperature: see there.
        softcap: see there.
        vocab_size: see there.
        clip_range: see `ppo_policy_loss`.
        entropy_coef: factor of the entropy bonus.
        entropy_stats: add the mean entropy to the statistics at coefficient 0 as well.
        ref_logprobs: ``(...)``, nats, of the reference policy.
        kl_coef: factor of the KL term.
        kl_kind: see `ppokern.kl_estimate`.
        dual_clip: see `ppo_policy_loss`.
        ratio: see there; ``"sequence"`` takes four GEMMs.
        weights: see there.
        aggregate: see there; ``"none"`` is refused.
        denominator: see there.
        cu_seqlens: see there.
        log_ratio_limit: see there.
        max_logits_bytes: see `linear_selected_logprobs`.
        compact: leave rows that are masked, or whose token has no gradient, out of the GEMMs; on
            CUDA that reads a count back per chunk.

    Returns:
        ``Loss(loss, stats)``, see `ppo_loss`.

    Masking, Numerics: see `linear_selected_logprobs` and `ppo_policy_loss`.

    Raises:
        IndexError, ValueError, TypeError: see both; ``aggregate="none"``.
    """
    if aggregate == "none":
        _check.fail(
            "aggregate",
            "a reduction (per token: linear_selected_logprobs, then ppo_policy_loss)",
            "'none'",
        )
    o = checked_options(
        clip_range, dual_clip, ratio, aggregate, log_ratio_limit, entropy_coef, kl_coef, kl_kind
    )
    need_tensor("ref_logprobs", ref_logprobs, o.kl_coef)
    ids, temperatures, number, cap, size, most = checked_head(
        hidden, weight, bias, token_ids, mask, temperature, softcap, vocab_size, max_logits_bytes
    )
    checked_tensors(
        ids, cu_seqlens, old_logprobs=old_logprobs, advantages=advantages, weights=weights,
        ref_logprobs=ref_logprobs, mask=mask,
    )  # fmt: skip
    denominator = checked_denominator("denominator", denominator, aggregate, hidden.device)
    with_entropy = entropy_stats or _library.is_on(o.entropy_coef)
    x = Inputs(
        old_logprobs=_check.constant(old_logprobs),
        advantages=_check.constant(advantages),
        weights=_check.constant(weights),
        ref_logprobs=_check.constant(ref_logprobs),
        mask=mask,
        cu_seqlens=cu_seqlens,
        denominator=denominator,
    )
    learns = torch.is_grad_enabled()
    needs = [learns and p is not None and p.requires_grad for p in (hidden, weight, bias)]
    if ratio == "sequence" or not any(needs):
        logprobs, entropy = linear_logprobs(
            hidden, weight, ids, bias, mask, temperature, softcap, vocab_size, max_logits_bytes,
            compact, with_entropy,
        )  # fmt: skip
        valid = taken(ids, mask).view(ids.shape)
        entropy = entropy if with_entropy else None
        x = x._replace(logprobs=logprobs, entropy=entropy, mask=valid)
        return run(x, o)
    h = HeadInputs(hidden, weight, bias, ids, temperatures)
    how = HeadOptions(number, cap, size, most, with_entropy, compact, *needs)
    backend = _backend.asked_for()
    loss, stats, *_ = _linear_ppo_loss(*h, *x, *how, *o, backend)
    names = loss_reference.stat_names(_named(x, h, how), o)
    return Loss(loss, dict(zip(names, stats.unbind(), strict=True)))
