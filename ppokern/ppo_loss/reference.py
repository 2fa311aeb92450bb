"""The PPO losses in plain torch: the specification. Value, statistics and gradients in one pass."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ppokern import _check, _library
from ppokern import token_math as tm
from ppokern._library import Coefficient, PerToken
from ppokern._sequences import Sequences, spoil


class Inputs(NamedTuple):
    """The tensors of a call; None = that part is off."""

    logprobs: PerToken = None
    entropy: PerToken = None
    values: PerToken = None
    old_logprobs: PerToken = None
    advantages: PerToken = None
    weights: PerToken = None
    ref_logprobs: PerToken = None
    old_values: PerToken = None
    returns: PerToken = None
    mask: Tensor | None = None  # per token, bool, as the next
    value_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    denominator: Tensor | None = None  # 0-d
    value_denominator: Tensor | None = None  # 0-d


numbers_of = _library.of_kind(Inputs, PerToken)  # its tensors that the arithmetic is about


class Options(NamedTuple):
    """The numbers of a call."""

    low: float
    high: float
    dual_clip: float | None
    sequence_ratio: bool
    log_ratio_limit: float | None
    aggregate: str
    entropy_coef: Coefficient
    kl_coef: Coefficient
    kl_kind: str
    value_clip_range: float | None
    value_coef: Coefficient


class Output(NamedTuple):
    """The loss, its statistics in the order of `stat_names`, and its slopes.

    Slopes are per token, and empty where a part is off. `ratio_slopes` belong to ratios of
    sequences: each is shared by all tokens of its sequence.
    """

    loss: Tensor
    stats: Tensor
    logprob_slopes: Tensor
    ratio_slopes: Tensor
    entropy_slopes: Tensor
    value_slopes: Tensor


def stat_names(x: Inputs, o: Options) -> tuple[str, ...]:
    """Return the names of the statistics of a call, in order."""
    names = []
    if x.logprobs is not None:
        names += ["policy_loss", "ratio_mean", "ratio_min", "ratio_max"]
        names += ["approx_kl_k1", "approx_kl_k2", "approx_kl_k3"]
        names += ["clip_fraction", "clip_fraction_active"]
    if x.entropy is not None:
        names.append("entropy")
    if x.ref_logprobs is not None:
        names.append("kl")
    if x.values is not None:
        names.append("value_loss")
        names += ["value_clip_fraction"] if o.value_clip_range is not None else []
    return (*names, "n_tokens", "n_sequences")


def arithmetic(x: Inputs) -> torch.dtype:
    """Return the dtype of a call's arithmetic."""
    return _check.arithmetic(*numbers_of(x))


def empty_output(x: Inputs, o: Options) -> Output:
    """Return the outputs of a call, not yet written."""
    like, dtype = next(t for t in x if t is not None), arithmetic(x)

    def new(on: bool, shape: tuple = like.shape) -> Tensor:
        return like.new_empty(shape if on else 0, dtype=dtype)

    policy, kl = x.logprobs is not None, x.ref_logprobs is not None and o.kl_coef != 0
    return Output(
        new(True, like.shape if o.aggregate == "none" else ()),
        new(True, (len(stat_names(x, o)),)),
        new((policy and not o.sequence_ratio) or kl),
        new(policy and o.sequence_ratio),
        new(x.entropy is not None and o.entropy_coef != 0),
        new(x.values is not None and o.value_coef != 0),
    )


class _Part(NamedTuple):
    """A part of the loss: what it adds, its statistics, its slopes by their name in `Output`."""

    loss: Tensor
    stats: dict[str, Tensor]
    slopes: dict[str, Tensor]


def forward(x: Inputs, o: Options) -> Output:
    """Return the loss with its statistics and slopes."""
    dtype = arithmetic(x)
    like = next(t for t in x if t is not None)
    sequences = Sequences(like.shape, x.cu_seqlens)
    valid = like.new_ones(like.shape, dtype=torch.bool) if x.mask is None else x.mask
    parts = []
    if x.logprobs is not None:
        parts.append(_policy_part(x, o, valid, sequences, dtype))
    if x.values is not None:
        parts.append(_value_part(x, o, valid, sequences, dtype))
    stats = {name: stat for part in parts for name, stat in part.stats.items()}
    stats["n_tokens"] = valid.sum().to(dtype)
    stats["n_sequences"] = (sequences.sum(valid.to(dtype)) > 0).sum().to(dtype)
    loss = parts[0].loss if len(parts) == 1 else parts[0].loss + parts[1].loss
    out = empty_output(x, o)._replace(
        loss=loss,
        stats=torch.stack([stats[name] for name in stat_names(x, o)]),
        **{name: slope for part in parts for name, slope in part.slopes.items()},
    )
    out = Output(*(t.contiguous() for t in out))
    spoil(x.cu_seqlens, sequences.length, *out)
    return out


def _policy_part(
    x: Inputs, o: Options, valid: Tensor, sequences: Sequences, dtype: torch.dtype
) -> _Part:
    mean = _Mean(valid, dtype)
    scale = token_scale(valid, sequences, o.aggregate, x.denominator, dtype)
    logprobs, old_logprobs, advantages = (
        _masked(t, valid, dtype) for t in (x.logprobs, x.old_logprobs, x.advantages)
    )
    weights = None if x.weights is None else _masked(x.weights, valid, dtype)
    log_ratio = own_log_ratio = logprobs - old_logprobs
    if o.sequence_ratio:
        means = sequences.sum(log_ratio) / sequences.sum(valid.to(dtype)).clamp(min=1)
        log_ratio = torch.where(valid, sequences.spread(means), 0.0)
    terms, slope, flat, ratio = surrogate(log_ratio, logprobs, old_logprobs, advantages, weights, o)
    loss = policy = _aggregate(terms, scale, o)
    slopes = {"ratio_slopes" if o.sequence_ratio else "logprob_slopes": scale * slope}
    outside = (ratio < 1 - o.low) | (ratio > 1 + o.high)
    stats = {
        "policy_loss": mean(terms) if o.aggregate == "none" else policy,
        "ratio_mean": mean(ratio),
        "ratio_min": mean.extreme(ratio, torch.amin, torch.inf),
        "ratio_max": mean.extreme(ratio, torch.amax, -torch.inf),
        "clip_fraction": mean(outside.to(dtype)),
        "clip_fraction_active": mean(flat.to(dtype)),
    }
    for kind in ("k1", "k2", "k3"):
        stats[f"approx_kl_{kind}"] = mean(tm.KL[kind](-own_log_ratio))
    if x.entropy is not None:
        entropy = _masked(x.entropy, valid, dtype)
        stats["entropy"] = mean(entropy)
        if o.entropy_coef != 0:
            loss = loss - o.entropy_coef * _aggregate(entropy, scale, o)
            slopes["entropy_slopes"] = -o.entropy_coef * scale
    if x.ref_logprobs is not None:
        ref_logprobs = _masked(x.ref_logprobs, valid, dtype)
        kl = tm.KL[o.kl_kind](logprobs - ref_logprobs)
        stats["kl"] = mean(kl)
        if o.kl_coef != 0:
            loss = loss + o.kl_coef * _aggregate(kl, scale, o)
            of_policy = slopes.get("logprob_slopes", 0.0)
            slopes["logprob_slopes"] = kl_slopes(logprobs, ref_logprobs, scale, o) + of_policy
    return _Part(loss, stats, slopes)


def _value_part(
    x: Inputs, o: Options, valid: Tensor, sequences: Sequences, dtype: torch.dtype
) -> _Part:
    valid = valid if x.value_mask is None else x.value_mask
    mean = _Mean(valid, dtype)
    scale = token_scale(valid, sequences, o.aggregate, x.value_denominator, dtype)
    values, returns = (_masked(t, valid, dtype) for t in (x.values, x.returns))
    stats = {}
    if o.value_clip_range is None:
        terms, slope = tm.value_error(values, returns)
    else:
        old_values = _masked(x.old_values, valid, dtype)
        terms, slope, larger = tm.clip_value(values, old_values, returns, o.value_clip_range)
        stats["value_clip_fraction"] = mean(larger.to(dtype))
    value = _aggregate(terms, scale, o)
    stats["value_loss"] = mean(terms) if o.aggregate == "none" else value
    if o.value_coef == 0:
        return _Part(torch.zeros_like(value), stats, {})
    return _Part(o.value_coef * value, stats, {"value_slopes": o.value_coef * scale * slope})


def surrogate(
    log_ratio: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor | None,
    o: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each token's policy loss, its slope in the log-ratio, where it is flat, the ratio.

    A log-prob of ``-inf`` makes a ratio of 0 without a slope; any other value that is not finite
    makes the loss NaN.
    """
    forbidden = log_ratio == -torch.inf
    limit = torch.inf if o.log_ratio_limit is None else o.log_ratio_limit
    limited = log_ratio.clamp(-limit, limit)
    ratio = torch.where(forbidden, 0.0, limited.exp())
    loss, slope, flat = tm.clip_surrogate(ratio, advantages, o.low, o.high, o.dual_clip)
    slope = torch.where((log_ratio.abs() > limit) | forbidden, 0.0, slope)
    broken = ~old_logprobs.isfinite() | ~advantages.isfinite()
    broken = broken | logprobs.isnan() | (logprobs == torch.inf)
    if weights is not None:
        off = weights == 0
        loss = torch.where(off, 0.0, weights * loss)
        slope = torch.where(off, 0.0, weights * slope)
        broken = broken | ~weights.isfinite()
    loss, slope = (torch.where(broken, torch.nan, term) for term in (loss, slope))
    return loss, slope, flat, ratio


def kl_slopes(logprobs: Tensor, ref_logprobs: Tensor, scale: Tensor, o: Options) -> Tensor:
    """Return the slopes of the KL term as it enters the loss."""
    slope = tm.KL_SLOPE[o.kl_kind](logprobs - ref_logprobs)
    return torch.where(scale == 0, 0.0, o.kl_coef * scale * slope)


class TokenSlopes:
    """The loss's slopes for some tokens of a call at a time, before all log-probs are known.

    Its tensors are flat, dense and of the arithmetic's dtype, and 0 at masked positions.
    """

    def __init__(self, x: Inputs, o: Options, valid: Tensor, dtype: torch.dtype) -> None:
        """Take a call with a ratio per token, but for its log-probs, entropy and mask."""
        sequences = Sequences(valid.shape, x.cu_seqlens)
        scale = token_scale(valid, sequences, o.aggregate, x.denominator, dtype)
        self.options, self.scale = o, scale.view(-1)
        self.old_logprobs, self.advantages = (
            _masked(t, valid, dtype).view(-1) for t in (x.old_logprobs, x.advantages)
        )
        self.weights, self.ref_logprobs = (
            None if t is None else _masked(t, valid, dtype).view(-1)
            for t in (x.weights, x.ref_logprobs if o.kl_coef != 0 else None)
        )

    def raise_to_one(self) -> Tensor:
        """Multiply the slopes by a power of two, returned, that brings their scale to 1 or 2."""
        largest = self.scale.amax() if len(self.scale) else self.scale.new_ones(())
        power = torch.ldexp(torch.ones_like(largest), 1 - torch.frexp(largest).exponent)
        self.scale = self.scale * power
        return power

    def __call__(self, logprobs: Tensor, rows: Tensor | slice) -> tuple[Tensor, Tensor | None]:
        """Return some tokens' slopes in log-probs and in entropies (None: no bonus)."""
        o, scale, old = self.options, self.scale[rows], self.old_logprobs[rows]
        weights = None if self.weights is None else self.weights[rows]
        slope = surrogate(logprobs - old, logprobs, old, self.advantages[rows], weights, o)[1]
        slope = scale * slope
        if self.ref_logprobs is not None:
            slope = slope + kl_slopes(logprobs, self.ref_logprobs[rows], scale, o)
        return slope, -o.entropy_coef * scale if o.entropy_coef != 0 else None


def token_scale(
    valid: Tensor,
    sequences: Sequences,
    aggregate: str,
    denominator: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return what each token's term is multiplied by in the aggregate's sum."""
    ones = valid.to(dtype)
    if aggregate in ("none", "sum"):
        return ones
    if aggregate == "token_mean":
        count = valid.sum() if denominator is None else denominator
        return torch.where(valid, 1 / count.to(dtype), 0.0)
    lengths = sequences.sum(ones)
    count = (lengths > 0).sum() if denominator is None else denominator
    each = 1 / count.to(dtype)
    if aggregate == "sequence_mean":
        each = each / lengths
    return torch.where(valid, sequences.spread(each.expand(lengths.shape)), 0.0)


def share_ratio_slopes(slopes: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return the slopes in tokens' log-probs, from those in their sequences' log-ratios."""
    sequences = Sequences(slopes.shape, cu_seqlens)
    valid = torch.ones_like(slopes) if mask is None else mask.to(slopes.dtype)
    shares = sequences.sum(slopes) / sequences.sum(valid).clamp(min=1)
    return torch.where(valid != 0, sequences.spread(shares), 0.0)


def _masked(x: Tensor | None, valid: Tensor, dtype: torch.dtype) -> Tensor:
    assert x is not None
    return torch.where(valid, x.to(dtype), 0.0)


def _aggregate(term: Tensor, scale: Tensor, o: Options) -> Tensor:
    term = torch.where(scale == 0, 0.0, scale * term)
    return term if o.aggregate == "none" else term.sum()


class _Mean:
    """Means over unmasked tokens; 0 where there are none."""

    def __init__(self, valid: Tensor, dtype: torch.dtype) -> None:
        self._valid = valid
        self._count = valid.sum()
        self._zero = torch.zeros((), dtype=dtype, device=valid.device)

    def __call__(self, x: Tensor) -> Tensor:
        total = torch.where(self._valid, x, 0.0).sum()
        return torch.where(self._count > 0, total / self._count, self._zero)

    def extreme(self, x: Tensor, pick: Callable[[Tensor], Tensor], filler: float) -> Tensor:
        if not x.numel():
            return self._zero
        return torch.where(self._count > 0, pick(torch.where(self._valid, x, filler)), self._zero)
