"""The clipped PPO losses: the public functions, and how they are differentiated."""

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ppokern import _backend, _check, _library
from ppokern._names import AGGREGATES, KL_KINDS, RATIOS, Aggregate, KLKind, Ratio
from ppokern.ppo_loss import kernel_native, reference
from ppokern.ppo_loss.reference import Inputs, Options, Output

KERNELS = {
    "torch": reference.forward,
    "cpu": kernel_native.forward,
    "cuda": partial(kernel_native.forward, on_cuda=True),
    "triton": "ppokern.ppo_loss.kernel_triton:forward",
}
_OPTIONAL = ("weights", "entropy", "ref_logprobs")


@_library.loadable
class Loss(NamedTuple):
    """A loss and its statistics, detached 0-d tensors taken in the same pass."""

    loss: Tensor
    stats: dict[str, Tensor]


def _forward(x: Inputs, o: Options, backend: str) -> Output:
    device, dtype = next(t.device for t in x if t is not None), reference.arithmetic(x)
    x = with_checked_numbers(x, o, dtype)
    kernel = _backend.select("ppo_loss", KERNELS, backend, device, dtype)
    return kernel(x, o)


def _forward_fake(x: Inputs, o: Options, backend: str) -> Output:
    return reference.empty_output(x, o)


def _keep(x: Inputs, o: Options, backend: str, out: Output) -> tuple:
    kept = Inputs(
        logprobs=x.logprobs,
        entropy=x.entropy,
        values=x.values,
        mask=x.mask,
        value_mask=x.mask if x.value_mask is None else x.value_mask,
        cu_seqlens=x.cu_seqlens,
    )
    return kept, out


def _backward(grad: Tensor, needed: tuple, x: Inputs, out: Output) -> tuple[Tensor | None, ...]:
    shape = next(t.shape for t in x if t is not None)

    def scaled(like: Tensor | None, slopes: Tensor, mask: Tensor | None) -> Tensor | None:
        if like is None or slopes.shape != shape:
            return None
        found = grad * slopes  # the gradient is not read where it is masked
        return found if mask is None or grad.dim() == 0 else torch.where(mask, found, 0.0)

    in_logprobs = scaled(x.logprobs, out.logprob_slopes, x.mask)
    shared = scaled(x.logprobs, out.ratio_slopes, x.mask)
    if shared is not None:
        shared = reference.share_ratio_slopes(shared, x.mask, x.cu_seqlens)
        in_logprobs = shared if in_logprobs is None else in_logprobs + shared
    in_entropy = scaled(x.entropy, out.entropy_slopes, x.mask)
    in_values = scaled(x.values, out.value_slopes, x.value_mask)
    return tuple(
        None if g is None or t is None else g.to(t.dtype)
        for g, t in ((in_logprobs, x.logprobs), (in_entropy, x.entropy), (in_values, x.values))
    )


TRAINED = ("logprobs", "entropy", "values")
_ppo_loss = _library.register(
    "ppo_loss", _forward, _forward_fake, trained=TRAINED, keep=_keep, backward=_backward
)


def checked_denominator(
    name: str, denominator: float | Tensor | None, aggregate: str, device: torch.device
) -> Tensor | None:
    """Check a denominator and return it as a 0-d tensor without a gradient."""
    if denominator is None:
        return None
    if aggregate in ("sum", "none"):
        _check.fail(name, f"None with aggregate={aggregate!r}", denominator)
    if not isinstance(denominator, Tensor):
        return _library.scalar(_check.number(name, denominator))
    denominator = _check.tensor(name, denominator.detach(), _check.NUMBERS)
    if denominator.dim():
        _check.fail(name, "a number or a 0-d tensor", f"shape {tuple(denominator.shape)}")
    if denominator.device != device and denominator.device.type != "cpu":
        _check.fail(name, f"a tensor on {device}", f"one on {denominator.device}")
    return denominator


def checked_options(
    clip_range: float | tuple[float, float] = 0.2,
    dual_clip: float | None = None,
    ratio: Ratio = "token",
    aggregate: Aggregate = "token_mean",
    log_ratio_limit: float | None = None,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k3",
    value_clip_range: float | None = None,
    value_coef: float = 1.0,
) -> Options:
    """Check the options of a call, but for the values of its numbers."""
    pair = clip_range if isinstance(clip_range, (tuple, list)) else (clip_range, clip_range)
    if len(pair) != 2:
        _check.fail("clip_range", "a number or (low, high)", clip_range)
    _check.choice("ratio", ratio, RATIOS)
    _check.choice("aggregate", aggregate, AGGREGATES)
    _check.choice("kl_kind", kl_kind, KL_KINDS)
    number = _check.number
    return Options(
        number("clip_range", pair[0]),
        number("clip_range", pair[1]),
        None if dual_clip is None else number("dual_clip", dual_clip),
        ratio == "sequence",
        None if log_ratio_limit is None else number("log_ratio_limit", log_ratio_limit),
        aggregate,
        number("entropy_coef", entropy_coef),
        number("kl_coef", kl_coef),
        kl_kind,
        None if value_clip_range is None else number("value_clip_range", value_clip_range),
        number("value_coef", value_coef),
    )


def with_checked_numbers(x: Inputs, o: Options, dtype: torch.dtype) -> Inputs:
    """Check the numbers of a call in the dtype that they are used in, where they can be read.

    A denominator that cannot be read and is not above 0 becomes NaN.
    """
    _check.limit("clip_range", o.low, 0, dtype)
    _check.limit("clip_range", o.high, 0, dtype)
    if o.dual_clip is not None:
        _check.limit("dual_clip", o.dual_clip, 1, dtype)
        if o.dual_clip == 1:
            _check.fail("dual_clip", "a number above 1", o.dual_clip)
    if o.log_ratio_limit is not None:
        _check.positive("log_ratio_limit", o.log_ratio_limit, dtype)
    alone = "" if x.values is not None and x.logprobs is None else "value_"  # `ppo_value_loss`
    if o.value_clip_range is not None:
        _check.limit(f"{alone}clip_range", o.value_clip_range, 0, dtype)
    _check.finite_number("entropy_coef", o.entropy_coef, dtype)
    _check.finite_number("kl_coef", o.kl_coef, dtype)
    _check.finite_number("value_coef", o.value_coef, dtype)
    own, of_values = x.denominator, x.value_denominator
    if own is None and of_values is None:
        return x
    same = of_values is own
    own = _positive_or_nan("denominator", own, dtype)
    of_values = own if same else _positive_or_nan(f"{alone}denominator", of_values, dtype)
    return x._replace(denominator=own, value_denominator=of_values)


def _positive_or_nan(name: str, x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if x is None:
        return None
    if _check.values_of(x):
        _check.positive(name, float(x), dtype)
        return x
    low, high = _check.range_of(dtype)
    x = x.to(dtype)
    return torch.where((x >= low) & (x <= high), x, torch.nan)


def checked_tensors(like: Tensor, cu_seqlens: Tensor | None, **tensors: Tensor | None) -> None:
    """Check per-token tensors against `like`; those whose name ends in `mask` are bool."""
    for name, x in tensors.items():
        if name.endswith("mask"):
            _check.mask_like(name, x, like.shape, like.device)
        else:
            _check.like(name, x, like.shape, like.device, optional=name in _OPTIONAL)
    if cu_seqlens is not None:
        _check.cu_seqlens(cu_seqlens, like.shape, like.device)
    if _check.validating() and like.device.type == "cpu":
        mask, value_mask = tensors.get("mask"), tensors.get("value_mask")
        for name, x in tensors.items():
            if x is None or name.endswith("mask"):
                continue
            if name == "logprobs":  # -inf is a forbidden token
                x = x.masked_fill(x == -torch.inf, 0.0)
            of_values = name in ("values", "old_values", "returns") and value_mask is not None
            _check.finite(name, x, value_mask if of_values else mask)


def run(x: Inputs, o: Options) -> Loss:
    """Run the op on checked arguments."""
    trained = x.logprobs, x.entropy, x.values
    x = _check.constants(x)._replace(**dict(zip(TRAINED, trained, strict=True)))
    out = _ppo_loss(x, o, _backend.asked_for())
    names = reference.stat_names(x, o)
    return Loss(out.loss, dict(zip(names, out.stats.unbind(), strict=True)))


def ppo_policy_loss(
    logprobs: Float[Tensor, "*batch"],
    old_logprobs: Float[Tensor, "*batch"],
    advantages: Float[Tensor, "*batch"],
    *,
    mask: Bool[Tensor, "*batch"] | None = None,
    clip_range: float | tuple[float, float] = 0.2,
    dual_clip: float | None = None,
    ratio: Ratio = "token",
    weights: Float[Tensor, "*batch"] | None = None,
    aggregate: Aggregate = "token_mean",
    denominator: float | Tensor | None = None,
    cu_seqlens: Integer[Tensor, " boundaries"] | None = None,
    log_ratio_limit: float | None = 20.0,
) -> Loss:
    """The clipped policy loss of PPO, with its statistics.

    Per token ``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r = exp(logprobs - old_logprobs)``.
    The gradient in a log-prob is ``-r A``, and 0 where ``A > 0`` and ``r > 1 + high``, or ``A < 0``
    and ``r < 1 - low``. On the edge itself it flows.

    Args:
        logprobs: ``(...)``, nats, of the current policy. Takes the gradient; all else is constant.
        old_logprobs: ``(...)``, nats, of the policy that sampled, at the same temperature.
        advantages: ``(...)``.
        mask: ``(...)``, True = take part.
        clip_range: a number or ``(low, high)``; ``inf`` does not clip.
        dual_clip: a number above 1: for ``A < 0`` the objective is not below ``dual_clip * A``.
        ratio: ``"token"``, or ``"sequence"``: one ratio per sequence, the exponential of its mean
            log-ratio (GSPO).
        weights: ``(...)``, factors of the tokens' losses (truncated importance weights,
            ``gamma**t``).
        aggregate: ``"token_mean"``, over all unmasked tokens; ``"sequence_mean"``, over sequences,
            of their token means; ``"sequence_sum"``, over sequences, of their token sums;
            ``"sum"``; ``"none"``, per token. A sequence is a row of ``(..., T)``, all of ``(N,)``,
            or a segment of `cu_seqlens`; one without an unmasked token does not count.
        denominator: above 0; takes the place of the count of tokens or sequences, so that
            micro-batches and ranks add up to the whole batch. A tensor on CUDA that is not above 0
            makes the result NaN, where values are not validated.
        cu_seqlens: ``(S + 1,)``, int32 or int64: the tensors are packed, ``(total,)``.
        log_ratio_limit: the (mean) log-ratio is limited to plus or minus this before the
            exponential, without a gradient beyond; None = no limit.

    Returns:
        ``Loss(loss, stats)``: a 0-d tensor (``(...)`` for ``"none"``), float32 or float64, and a
        dict of detached 0-d tensors: ``policy_loss``, ``ratio_mean``, ``ratio_min``, ``ratio_max``,
        ``approx_kl_k1``, ``approx_kl_k2``, ``approx_kl_k3`` (old against new), ``clip_fraction``
        (ratio outside the range), ``clip_fraction_active`` (of these, without a gradient),
        ``n_tokens``, ``n_sequences``. The ``approx_kl_*`` see sampled actions only: a policy that
        moves mass between actions that were not sampled can be far away while they read 0.

    Masking: what stands at a masked position is never read. Nothing unmasked: loss, gradients and
    statistics are 0.

    Numerics: a log-prob of ``-inf`` is a ratio of 0 without a gradient; any other value that is not
    finite makes the loss NaN or infinite, whatever it is multiplied by.

    Raises:
        ValueError: a shape, device, option or number that does not fit; `denominator` with
            ``"sum"`` or ``"none"``; under validation a value that is not finite, with its place.
        TypeError: a dtype that does not fit.

    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7; dual clip: Ye et al. 2020 (arXiv
    1912.09729); sequence ratio: Zheng et al. 2025 (arXiv 2507.18071), equation 5.
    """
    o = checked_options(clip_range, dual_clip, ratio, aggregate, log_ratio_limit)
    _check.tensor("logprobs", logprobs)
    checked_tensors(
        logprobs, cu_seqlens, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages,
        mask=mask, weights=weights,
    )  # fmt: skip
    denominator = checked_denominator("denominator", denominator, aggregate, logprobs.device)
    x = Inputs(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        weights=weights,
        mask=mask,
        cu_seqlens=cu_seqlens,
        denominator=denominator,
    )
    return run(x, o)


def ppo_value_loss(
    values: Float[Tensor, "*batch"],
    old_values: Float[Tensor, "*batch"],
    returns: Float[Tensor, "*batch"],
    *,
    mask: Bool[Tensor, "*batch"] | None = None,
    clip_range: float | None = 0.2,
    aggregate: Aggregate = "token_mean",
    denominator: float | Tensor | None = None,
    cu_seqlens: Integer[Tensor, " boundaries"] | None = None,
) -> Loss:
    """The clipped value loss of PPO, with its statistics.

    Per token ``0.5 * max((v - R)^2, (clip(v, v_old - e, v_old + e) - R)^2)``.

    Args:
        values: ``(...)``, of the current critic. Takes the gradient; all else is constant.
        old_values: ``(...)``, of the critic at sampling; not read without clipping.
        returns: ``(...)``, the targets.
        mask: ``(...)``, True = take part.
        clip_range: ``e``, in units of value; None = no clipping.
        aggregate: see `ppo_policy_loss`.
        denominator: see `ppo_policy_loss`.
        cu_seqlens: see `ppo_policy_loss`.

    Returns:
        ``Loss(loss, stats)`` with ``value_loss``, ``value_clip_fraction`` (the clipped error is the
        larger one; absent without clipping), ``n_tokens``, ``n_sequences``.

    Masking and Numerics: see `ppo_policy_loss`.

    Raises:
        ValueError, TypeError: see `ppo_policy_loss`.

    Source: OpenAI baselines, ppo2; Engstrom et al. 2020 (arXiv 2005.12729), section 3.
    """
    if clip_range is not None:
        clip_range = _check.number("clip_range", clip_range)
    o = checked_options(aggregate=aggregate, value_clip_range=clip_range)
    _check.tensor("values", values)
    checked_tensors(
        values, cu_seqlens, values=values, old_values=old_values, returns=returns, mask=mask
    )
    denominator = checked_denominator("denominator", denominator, aggregate, values.device)
    x = Inputs(
        values=values,
        old_values=old_values,
        returns=returns,
        mask=mask,
        cu_seqlens=cu_seqlens,
        value_denominator=denominator,
    )
    return run(x, o)


def ppo_loss(
    logprobs: Float[Tensor, "*batch"],
    old_logprobs: Float[Tensor, "*batch"],
    advantages: Float[Tensor, "*batch"],
    values: Float[Tensor, "*batch"] | None,
    old_values: Float[Tensor, "*batch"] | None,
    returns: Float[Tensor, "*batch"] | None,
    *,
    mask: Bool[Tensor, "*batch"] | None = None,
    value_mask: Bool[Tensor, "*batch"] | None = None,
    clip_range: float | tuple[float, float] = 0.2,
    value_clip_range: float | None = 0.2,
    value_coef: float = 0.5,
    value_denominator: float | Tensor | None = None,
    entropy: Float[Tensor, "*batch"] | None = None,
    entropy_coef: float = 0.0,
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
) -> Loss:
    """The whole loss of PPO in one pass: policy, value, entropy bonus and KL to a reference.

    ``policy + value_coef * value - entropy_coef * entropy + kl_coef * KL(kl_kind)``, each term
    aggregated in the same way. A coefficient of 0 switches its term off.

    Args:
        logprobs: see `ppo_policy_loss`.
        old_logprobs: see `ppo_policy_loss`.
        advantages: see `ppo_policy_loss`.
        values: see `ppo_value_loss`; None, at `value_coef` 0, is no value term at all.
        old_values: see `ppo_value_loss`.
        returns: see `ppo_value_loss`.
        mask: see `ppo_policy_loss`.
        value_mask: of the value term; by default `mask`.
        clip_range: see `ppo_policy_loss`.
        value_clip_range: ``clip_range`` of `ppo_value_loss`.
        value_coef: factor of the value term.
        value_denominator: of the value term; by default `denominator`.
        entropy: ``(...)``, nats. Takes a gradient.
        entropy_coef: factor of the entropy bonus.
        ref_logprobs: ``(...)``, nats, of the reference policy.
        kl_coef: factor of the KL term.
        kl_kind: see `ppokern.kl_estimate`.
        dual_clip: see `ppo_policy_loss`, as for all that follow.
        ratio: see there.
        weights: see there; of the policy term only.
        aggregate: see there.
        denominator: see there.
        cu_seqlens: see there.
        log_ratio_limit: see there.

    Returns:
        ``Loss(loss, stats)`` with the statistics of both losses; ``policy_loss`` and ``value_loss``
        are the terms as they enter the loss, before their factors. ``entropy`` and ``kl`` (means)
        are there where the tensors are. ``n_tokens`` and ``n_sequences`` are those of `mask`.

    Masking and Numerics: see `ppo_policy_loss`.

    Raises:
        ValueError, TypeError: see `ppo_policy_loss`; a coefficient other than 0 without its tensor.

    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 9.
    """
    o = checked_options(
        clip_range, dual_clip, ratio, aggregate, log_ratio_limit, entropy_coef, kl_coef, kl_kind,
        value_clip_range, value_coef,
    )  # fmt: skip
    _check.tensor("logprobs", logprobs)
    need_tensor("entropy", entropy, o.entropy_coef)
    need_tensor("ref_logprobs", ref_logprobs, o.kl_coef)
    need_tensor("values", values, o.value_coef)
    of_values = {"values": values, "old_values": old_values, "returns": returns}
    checked_tensors(
        logprobs, cu_seqlens, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages,
        mask=mask, value_mask=value_mask, entropy=entropy, ref_logprobs=ref_logprobs,
        weights=weights, **({} if values is None else of_values),
    )  # fmt: skip
    device = logprobs.device
    denominator = checked_denominator("denominator", denominator, aggregate, device)
    value_denominator = checked_denominator(
        "value_denominator", value_denominator, aggregate, device
    )
    x = Inputs(
        logprobs=logprobs,
        entropy=entropy,
        values=values,
        old_logprobs=old_logprobs,
        advantages=advantages,
        weights=weights,
        ref_logprobs=ref_logprobs,
        old_values=old_values,
        returns=returns,
        mask=mask,
        value_mask=mask if value_mask is None else value_mask,
        cu_seqlens=cu_seqlens,
        denominator=denominator,
        value_denominator=denominator if value_denominator is None else value_denominator,
    )
    return run(x, o)


def need_tensor(name: str, x: Tensor | None, coef: float) -> None:
    """Check that a term that is on has its tensor."""
    if x is None and coef != 0:
        _check.fail(name, f"a tensor, as its coefficient is {coef:g}", "None")
