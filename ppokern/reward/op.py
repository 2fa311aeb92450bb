"""KL estimates and shaped rewards: the public functions."""

from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ppokern import _backend, _check, _library
from ppokern._names import KL_KINDS, KLKind
from ppokern.reward import reference
from ppokern.reward.reference import Inputs, Options

# of `shaped_rewards`; `kl_estimate` is one formula per token, plain torch for all
KERNELS = {
    "torch": reference.shaped_rewards,
    "cpu": reference.shaped_rewards,  # a few passes over what is small beside the logits
    "triton": "ppokern.reward.kernel_triton:shaped_rewards",
}


@_library.loadable
class ShapedRewards(NamedTuple):
    """Rewards per token and the KL estimate in them, in nats."""

    rewards: Tensor
    kl: Tensor


def _kl(logprobs: Tensor, ref_logprobs: Tensor, kind: str, mask: Tensor | None) -> Tensor:
    return reference.kl_estimate(logprobs, ref_logprobs, kind, mask)


def _kl_fake(logprobs: Tensor, ref_logprobs: Tensor, *rest: Any) -> Tensor:
    return logprobs.new_empty(logprobs.shape, dtype=_check.arithmetic(logprobs, ref_logprobs))


def _kl_keep(
    logprobs: Tensor, ref_logprobs: Tensor, kind: str, mask: Tensor | None, kl: Tensor
) -> tuple:
    return logprobs, ref_logprobs, kind, mask


def _kl_backward(
    grad: Tensor,
    needed: tuple,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kind: str,
    mask: Tensor | None,
) -> Tensor:
    return reference.kl_gradient(grad, logprobs, ref_logprobs, kind, mask)


_kl_op = _library.register(
    "kl_estimate", _kl, _kl_fake, trained=("logprobs",), keep=_kl_keep, backward=_kl_backward
)


def kl_estimate(
    logprobs: Float[Tensor, "*batch"],
    ref_logprobs: Float[Tensor, "*batch"],
    kind: KLKind = "k1",
    mask: Bool[Tensor, "*batch"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Estimate, per token, ``KL(policy || reference)`` from tokens that the policy sampled.

    With ``d = logprobs - ref_logprobs``: ``k1 = d``, ``k2 = d^2 / 2``, ``k3 = exp(-d) - 1 + d``.

    Args:
        logprobs: ``(...)``, nats. Takes the gradient.
        ref_logprobs: ``(...)``, nats, constant.
        kind: ``"k1"`` (unbiased), ``"k2"`` (biased, low variance), ``"k3"`` (unbiased, never
            negative) or ``"k3+"`` (the value of k3 with the gradient of k2). For a loss: on tokens
            that the policy sampled, the gradient of k2 is on average that of the KL; those of k1
            (0 on average) and k3 are not.
        mask: ``(...)``, True = take part.

    Returns:
        ``(...)``, nats, float32 or float64; 0 where masked.

    Raises:
        ValueError: a shape or kind that does not fit.
        TypeError: a dtype that does not fit.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    _check.choice("kind", kind, KL_KINDS)
    _check.tensor("logprobs", logprobs)
    _check.like("ref_logprobs", ref_logprobs, logprobs.shape, logprobs.device)
    _check.mask_like("mask", mask, logprobs.shape, logprobs.device)
    return _kl_op(logprobs, _check.constant(ref_logprobs), kind, mask)


def _shaped(x: Inputs, o: Options, backend: str) -> ShapedRewards:
    dtype = reference.arithmetic(x)
    _check.finite_number("kl_coef", o.kl_coef, dtype)
    kernel = _backend.select("shaped_rewards", KERNELS, backend, x.logprobs.device, dtype)
    return ShapedRewards(*kernel(x, o))


def _shaped_fake(x: Inputs, o: Options, backend: str) -> ShapedRewards:
    new, dtype = x.logprobs.new_empty, reference.arithmetic(x)
    return ShapedRewards(new(x.logprobs.shape, dtype=dtype), new(x.logprobs.shape, dtype=dtype))


_shaped_op = _library.register("shaped_rewards", _shaped, _shaped_fake)


def shaped_rewards(
    scores: Float[Tensor, "*sequences"],
    logprobs: Float[Tensor, "*batch"],
    ref_logprobs: Float[Tensor, "*batch"],
    *,
    kl_coef: float,
    mask: Bool[Tensor, "*batch"] | None = None,
    score_mask: Bool[Tensor, "*sequences"] | None = None,
    token_rewards: Float[Tensor, "*batch"] | None = None,
    kl_kind: KLKind = "k1",
    cu_seqlens: Integer[Tensor, " boundaries"] | None = None,
) -> ShapedRewards:
    """Rewards per token: a KL penalty at each, and each sequence's score once, at its last token.

    ``rewards = -kl_coef * kl + token_rewards``, plus the score at the last unmasked position of its
    sequence, so that ``sum(rewards) = score - kl_coef * sum(kl) + sum(token_rewards)``.

    Args:
        scores: one per sequence: ``(...)`` without the time dimension (0-d for ``(T,)``), packed
            ``(S,)``.
        logprobs: ``(..., T)`` or packed ``(total,)``, nats, of the policy that sampled.
        ref_logprobs: the same of the reference.
        kl_coef: factor of the KL penalty, per nat; 0 switches it off.
        mask: True = a token of the response.
        score_mask: one per sequence, False = no outcome yet: no score is added, and it is not read.
        token_rewards: added per token.
        kl_kind: see `kl_estimate`.
        cu_seqlens: ``(S + 1,)``, int32 or int64: the per-token tensors are packed.

    Returns:
        ``ShapedRewards(rewards, kl)``, per token, float32 or float64, constant; 0 where masked.

    Masking: a sequence without an unmasked position gets no score.

    Raises:
        ValueError: a shape, number or kind that does not fit.
        TypeError: a dtype that does not fit.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), equation 2; Stiennon et al. 2020 (arXiv
    2009.01325).
    """
    kl_coef = _check.number("kl_coef", kl_coef)
    _check.choice("kl_kind", kl_kind, KL_KINDS)
    _check.tensor("logprobs", logprobs)
    shape, device = logprobs.shape, logprobs.device
    _check.like("ref_logprobs", ref_logprobs, shape, device)
    _check.like("token_rewards", token_rewards, shape, device, optional=True)
    _check.mask_like("mask", mask, shape, device)
    if cu_seqlens is not None:
        _check.cu_seqlens(cu_seqlens, shape, device)
    per_sequence = shape[:-1] if cu_seqlens is None else (cu_seqlens.shape[0] - 1,)
    _check.like("scores", scores, per_sequence, device)
    _check.mask_like("score_mask", score_mask, per_sequence, device)
    x = Inputs(scores, logprobs, ref_logprobs, mask, score_mask, token_rewards, cu_seqlens)
    return _shaped_op(_check.constants(x), Options(kl_coef, kl_kind), _backend.asked_for())
