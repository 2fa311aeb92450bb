"""The clipped PPO policy loss straight from hidden states, with its gradients in three GEMMs."""

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ppokern import _backend, _check, _library
from ppokern._names import Aggregate, KLKind, Ratio
from ppokern._sequences import spoil
from ppokern.linear import reference
from ppokern.linear.op import (
    arithmetic,
    checked_head,
    gradients_like,
    laid_out,
    linear_logprobs,
    valid_tokens,
)
from ppokern.linear.reference import HeadGradients, HeadInputs, HeadOptions, LossPass
from ppokern.logprob import kernel_native
from ppokern.logprob import reference as logprob_reference
from ppokern.logprob.op import check_numbers
from ppokern.ppo_loss import reference as loss_reference
from ppokern.ppo_loss.op import KERNELS as LOSS_KERNELS
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


class Needed(NamedTuple):
    """Which inputs want a gradient: it is made in the forward pass."""

    hidden_learns: bool
    weight_learns: bool
    bias_learns: bool


class _Output(NamedTuple):
    loss: Tensor
    stats: Tensor
    in_hidden: Tensor  # gradients of the loss, empty where not needed
    in_weight: Tensor
    in_bias: Tensor

    def gradients(self) -> HeadGradients:
        return HeadGradients(self.in_hidden, self.in_weight, self.in_bias)


class _Made:
    """Gradients of a call, which are handed out once, to be scaled where they stand."""

    def __init__(self, gradients: HeadGradients) -> None:
        self._gradients: HeadGradients | None = gradients

    def take(self) -> HeadGradients | None:
        gradients, self._gradients = self._gradients, None
        return gradients


def _forward(
    h: HeadInputs, x: Inputs, how: HeadOptions, o: Options, learns: Needed, backend: str
) -> _Output:
    dtype = _dtype(h, x)
    check_numbers(how.temperature, how.softcap, dtype)
    x = with_checked_numbers(x, o, dtype)
    loss_pass = _backend.select("linear_ppo_loss", KERNELS, backend, h.hidden.device, dtype)
    shape, valid = h.token_ids.shape, valid_tokens(h.token_ids, x.mask)
    mask = valid.view(shape)
    hidden, ids, head, plan = laid_out(h, how, valid, dtype)
    slopes = loss_reference.TokenSlopes(x, o, mask, dtype)
    logprobs, entropy, gradients = reference.loss_gradients(
        hidden, head, ids, plan, slopes, how.with_entropy, learns, loss_pass
    )
    entropy = None if entropy is None else entropy.view(shape)
    loss_of = _backend.select("ppo_loss", LOSS_KERNELS, backend, h.hidden.device, dtype)
    loss, stats, *_ = loss_of(
        x._replace(logprobs=logprobs.view(shape), entropy=entropy, mask=mask), o
    )
    spoil(x.cu_seqlens, len(valid), *gradients)
    if learns.hidden_learns:
        gradients = gradients._replace(hidden=gradients.hidden.view(h.hidden.shape))
    return _Output(loss, stats, *gradients)


def _dtype(h: HeadInputs, x: Inputs) -> torch.dtype:
    return torch.promote_types(arithmetic(h), loss_reference.arithmetic(x))


def _named(x: Inputs, h: HeadInputs, how: HeadOptions) -> Inputs:
    """Return the inputs as `stat_names` looks at them: log-probs there, entropy if it is made."""
    return x._replace(logprobs=h.token_ids, entropy=h.token_ids if how.with_entropy else None)


def _forward_fake(
    h: HeadInputs, x: Inputs, how: HeadOptions, o: Options, learns: Needed, backend: str
) -> _Output:
    dtype, names = _dtype(h, x), loss_reference.stat_names(_named(x, h, how), o)
    gradients = gradients_like(h, learns, reference.held_dtype)
    new = h.hidden.new_empty
    return _Output(new((), dtype=dtype), new(len(names), dtype=dtype), *gradients)


def _keep(
    h: HeadInputs, x: Inputs, how: HeadOptions, o: Options, learns: Needed, backend: str,
    out: _Output,
) -> tuple:  # fmt: skip
    return h, x, how, o, learns, backend, _Made(out.gradients())


def _backward(
    grad: Tensor,
    needed: tuple,
    h: HeadInputs,
    x: Inputs,
    how: HeadOptions,
    o: Options,
    learns: Needed,
    backend: str,
    made: _Made,
) -> tuple[Tensor | None, ...]:
    graph = _library.makes_graph((grad,))
    gradients = made.take()
    if gradients is None:  # for a second backward pass they are made again
        gradients = _forward(h, x, how, o, learns, backend).gradients()
    each = zip(gradients, learns, (h.hidden, h.weight, h.bias), strict=True)
    scale = torch.mul if graph else Tensor.mul_
    return tuple(
        scale(g, grad).to(p.dtype) if need and p is not None else None for g, need, p in each
    )


_linear_ppo_loss = _library.register(
    "linear_ppo_loss",
    _forward,
    _forward_fake,
    trained=HeadGradients._fields,
    keep=_keep,
    backward=_backward,
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
    with_entropy = entropy_stats or _library.is_on(o.entropy_coef)
    h, how = checked_head(
        hidden, weight, bias, token_ids, mask, temperature, softcap, vocab_size, max_logits_bytes,
        compact, with_entropy,
    )  # fmt: skip
    ids = h.token_ids
    checked_tensors(
        ids, cu_seqlens, old_logprobs=old_logprobs, advantages=advantages, weights=weights,
        ref_logprobs=ref_logprobs, mask=mask,
    )  # fmt: skip
    denominator = checked_denominator("denominator", denominator, aggregate, hidden.device)
    x = Inputs(
        old_logprobs=_check.constant(old_logprobs),
        advantages=_check.constant(advantages),
        weights=_check.constant(weights),
        ref_logprobs=_check.constant(ref_logprobs),
        mask=mask,
        cu_seqlens=cu_seqlens,
        denominator=denominator,
    )
    trained, on = (hidden, weight, bias), torch.is_grad_enabled()
    learns = Needed(*(on and p is not None and p.requires_grad for p in trained))
    if ratio == "sequence" or not any(learns):
        logprobs, entropy = linear_logprobs(h, mask, how)
        entropy = entropy if with_entropy else None
        x = x._replace(
            logprobs=logprobs, entropy=entropy, mask=valid_tokens(ids, mask).view(ids.shape)
        )
        return run(x, o)
    loss, stats, *_ = _linear_ppo_loss(h, x, how, o, learns, _backend.asked_for())
    names = loss_reference.stat_names(_named(x, h, how), o)
    return Loss(loss, dict(zip(names, stats.unbind(), strict=True)))
