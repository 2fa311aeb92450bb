"""The PPO losses in Triton: loss, statistics and slopes in one pass.

Bytes moved per token, in float32: for the policy 12 read and 4 written, for the values 12 and 4,
4 for each of weights and reference, 8 for entropies with a bonus, 1 for each mask; masks are read
once before, to be counted. Only a ratio of sequences reads log-probs a second time.

A program adds up its tokens' terms, and a single one adds up the programs' sums: no atomics, the
same bits each time. Where the scale of a term is its sequence's, a program does one sequence; else
tokens are shared out evenly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppokern import _launch
from ppokern import token_math_triton as tm
from ppokern._sequences import spoil
from ppokern.ppo_loss import reference
from ppokern.ppo_loss.reference import Inputs, Options, Output

BLOCK = 512  # tokens: 2 a thread; with 4 they take registers for one program alone
WARPS = 8
RESIDENT = 2  # programs of a multiprocessor

# The lanes of a program's sums: the statistics in order, and the loss.
NAMES = ("policy_loss", "ratio_mean", "ratio_min", "ratio_max")
NAMES += ("approx_kl_k1", "approx_kl_k2", "approx_kl_k3", "clip_fraction", "clip_fraction_active")
NAMES += ("entropy", "kl", "value_loss", "value_clip_fraction", "n_tokens", "n_sequences")
_LANES = tl.constexpr(16)
_POLICY, _RATIO, _MIN, _MAX = (tl.constexpr(i) for i in range(4))
_K1, _K2, _K3, _OUTSIDE, _FLAT = (tl.constexpr(i) for i in range(4, 9))
_ENTROPY, _KL, _VALUE, _CLIPPED = (tl.constexpr(i) for i in range(9, 13))
_TOKENS, _SEQUENCES, _LOSS = (tl.constexpr(i) for i in range(13, 16))


@triton.jit
def read(x, token, valid):
    """Return tokens' values as float32, 0 where they are not valid."""
    return tl.load(x + token, valid, other=0.0).to(tl.float32)


@triton.jit
def _is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _span(cu_seqlens, length, tokens):
    """Return where the program's sequence starts and ends."""
    sequence = tl.program_id(0).to(tl.int64)
    if cu_seqlens is not None:
        start, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
        return tl.maximum(start, 0), tl.minimum(end, tokens)
    return sequence * length, (sequence + 1) * length


@triton.jit
def scaled(term, scale, valid):
    """Return terms times their scale, of which 0 switches a term off."""
    return tl.where(valid & (scale != 0.0), scale * term, 0.0)


@triton.jit
def surrogate(
    log_ratio, logprob, old_logprob, advantage, weights, token, valid, low, high, dual_clip, limit
):
    """Return loss, slope in the log-ratio, where it is flat, ratio: `reference.surrogate`."""
    forbidden = log_ratio == float("-inf")
    limited = tl.where(log_ratio > limit, limit, tl.where(log_ratio < -limit, -limit, log_ratio))
    ratio = tl.where(forbidden, 0.0, tl.exp(limited))
    loss, slope, flat = tm.clip_surrogate(ratio, advantage, low, high, dual_clip)
    slope = tl.where((tl.abs(log_ratio) > limit) | forbidden, 0.0, slope)
    broken = ~_is_finite(old_logprob) | ~_is_finite(advantage)
    broken |= (logprob != logprob) | (logprob == float("inf"))
    if weights is not None:
        weight = read(weights, token, valid)
        loss = tl.where(weight == 0.0, 0.0, weight * loss)
        slope = tl.where(weight == 0.0, 0.0, weight * slope)
        broken |= ~_is_finite(weight)
    return tl.where(broken, float("nan"), loss), tl.where(broken, float("nan"), slope), flat, ratio


_OF_RATIO = ["logprobs", "old_logprobs", "mask", "cu_seqlens", "length", "tokens", "means"]


@triton.jit(do_not_specialize=_OF_RATIO)
def mean_log_ratio_kernel(
    logprobs,
    old_logprobs,
    mask,
    cu_seqlens,
    length: tl.int64,
    tokens: tl.int64,
    means,
    BLOCK: tl.constexpr,
):
    """Write a sequence's mean log-ratio."""
    start, end = _span(cu_seqlens, length, tokens)
    total, count = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        valid = token < end
        if mask is not None:
            valid &= tl.load(mask + token, valid, other=0) != 0
        total += read(logprobs, token, valid) - read(old_logprobs, token, valid)
        count += valid.to(tl.float32)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1.0)
    tl.store(means + tl.program_id(0), mean)


_TENSORS = ["logprobs", "entropy", "values", "old_logprobs", "advantages", "weights"]
_TENSORS += ["ref_logprobs", "old_values", "returns", "mask", "value_mask", "cu_seqlens", "means"]
_TENSORS += ["scales", "value_scales", "sums", "losses", "logprob_slopes", "ratio_slopes"]
_TENSORS += ["entropy_slopes", "value_slopes"]


@triton.jit(do_not_specialize=[*_TENSORS, "scale_stride", "value_scale_stride", "length", "tokens"])
def loss_kernel(
    logprobs,
    entropy,
    values,
    old_logprobs,
    advantages,
    weights,
    ref_logprobs,
    old_values,
    returns,
    mask,
    value_mask,  # None: that of the policy
    cu_seqlens,
    means,  # the sequences' mean log-ratios, None: each token has its own
    length: tl.int64,  # of a sequence, where there is no cu_seqlens
    tokens: tl.int64,
    scales,
    scale_stride: tl.int64,
    value_scales,
    value_scale_stride: tl.int64,
    low: tl.float32,
    high: tl.float32,
    dual_clip: tl.float32,
    limit: tl.float32,
    entropy_coef: tl.float32,
    kl_coef: tl.float32,
    value_clip: tl.float32,
    value_coef: tl.float32,
    sums,  # (programs, 16)
    losses,  # per token, None: a sum is wanted
    logprob_slopes,
    ratio_slopes,
    entropy_slopes,
    value_slopes,
    KL: tl.constexpr,  # the kind of KL
    BY_SEQUENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute some tokens' terms, or a sequence's, with their slopes, and add them up."""
    program = tl.program_id(0).to(tl.int64)
    if BY_SEQUENCE:
        start, end = _span(cu_seqlens, length, tokens)
        step = tl.cast(BLOCK, tl.int64)
    else:
        start, end = program * BLOCK, tokens
        step = tl.num_programs(0).to(tl.int64) * BLOCK
    nothing = tl.zeros([BLOCK], tl.float32)
    scale = nothing + tl.load(scales + program * scale_stride).to(tl.float32)
    value_scale = nothing + tl.load(value_scales + program * value_scale_stride).to(tl.float32)
    of_policy, of_ratio, of_entropy, of_scaled_entropy = nothing, nothing, nothing, nothing
    of_k1, of_k2, of_k3, of_outside, of_flat = nothing, nothing, nothing, nothing, nothing
    of_kl, of_scaled_kl, of_value, of_clipped = nothing, nothing, nothing, nothing
    least, most = nothing + float("inf"), nothing - float("inf")

    for first in range(start, end, step):
        token = first + tl.arange(0, BLOCK)
        inside = token < end
        valid = inside
        if mask is not None:
            valid &= tl.load(mask + token, inside, other=0) != 0
        loss = tl.zeros([BLOCK], tl.float32)
        if logprobs is not None:
            logprob = read(logprobs, token, valid)
            old_logprob = read(old_logprobs, token, valid)
            advantage = read(advantages, token, valid)
            own_log_ratio = logprob - old_logprob
            log_ratio = own_log_ratio
            if means is not None:
                log_ratio = tl.where(valid, tl.load(means + program), 0.0)
            term, slope, flat, ratio = surrogate(
                log_ratio, logprob, old_logprob, advantage, weights, token, valid,
                low, high, dual_clip, limit,
            )  # fmt: skip
            policy = scaled(term, scale, valid)
            of_policy += policy
            loss += policy
            of_ratio += tl.where(valid, ratio, 0.0)
            least = tl.minimum(least, tl.where(valid, ratio, float("inf")))
            most = tl.maximum(most, tl.where(valid, ratio, float("-inf")))
            of_k1 += tl.where(valid, tm.kl_k1(-own_log_ratio), 0.0)
            of_k2 += tl.where(valid, tm.kl_k2(-own_log_ratio), 0.0)
            of_k3 += tl.where(valid, tm.kl_k3(-own_log_ratio), 0.0)
            outside = (ratio < 1.0 - low) | (ratio > 1.0 + high)
            of_outside += tl.where(valid & outside, 1.0, 0.0)
            of_flat += tl.where(valid & flat, 1.0, 0.0)
            slope = tl.where(valid, scale * slope, 0.0)
            if ratio_slopes is not None:
                tl.store(ratio_slopes + token, slope, inside)
                slope = tl.zeros([BLOCK], tl.float32)
            if entropy is not None:
                of_token = read(entropy, token, valid)
                of_entropy += of_token
                if entropy_slopes is not None:
                    bonus = scaled(of_token, scale, valid)
                    of_scaled_entropy += bonus
                    loss -= entropy_coef * bonus
                    rise = tl.where(valid, -entropy_coef * scale, 0.0)
                    tl.store(entropy_slopes + token, rise, inside)
            if ref_logprobs is not None:
                log_ratio = logprob - read(ref_logprobs, token, valid)
                of_token = tm.kl(log_ratio, KL)
                of_kl += tl.where(valid, of_token, 0.0)
                if kl_coef != 0.0:
                    penalty = scaled(of_token, scale, valid)
                    of_scaled_kl += penalty
                    loss += kl_coef * penalty
                    slope += scaled(tm.kl_slope(log_ratio, KL), kl_coef * scale, valid)
            if logprob_slopes is not None:
                tl.store(logprob_slopes + token, slope, inside)
        if values is not None:
            counts = valid
            if value_mask is not None:
                counts = inside & (tl.load(value_mask + token, inside, other=0) != 0)
            value, target = read(values, token, counts), read(returns, token, counts)
            if old_values is not None:
                old_value = read(old_values, token, counts)
                term, slope, larger = tm.clip_value(value, old_value, target, value_clip)
                of_clipped += tl.where(counts & larger, 1.0, 0.0)
            else:
                term, slope = tm.value_error(value, target)
            term = scaled(term, value_scale, counts)
            of_value += term
            if value_slopes is not None:
                loss += value_coef * term
                slope = tl.where(counts, value_coef * value_scale * slope, 0.0)
                tl.store(value_slopes + token, slope, inside)
        if losses is not None:
            tl.store(losses + token, loss, inside)

    at = sums + program * _LANES
    loss = tl.zeros([], tl.float32)
    if logprobs is not None:
        loss += tl.sum(of_policy, 0)
        tl.store(at + _POLICY, loss)
        tl.store(at + _RATIO, tl.sum(of_ratio, 0))
        tl.store(at + _MIN, tl.min(least, 0))
        tl.store(at + _MAX, tl.max(most, 0))
        tl.store(at + _K1, tl.sum(of_k1, 0))
        tl.store(at + _K2, tl.sum(of_k2, 0))
        tl.store(at + _K3, tl.sum(of_k3, 0))
        tl.store(at + _OUTSIDE, tl.sum(of_outside, 0))
        tl.store(at + _FLAT, tl.sum(of_flat, 0))
    if entropy is not None:
        tl.store(at + _ENTROPY, tl.sum(of_entropy, 0))
        if entropy_slopes is not None:
            loss -= entropy_coef * tl.sum(of_scaled_entropy, 0)
    if ref_logprobs is not None:
        tl.store(at + _KL, tl.sum(of_kl, 0))
        if kl_coef != 0.0:
            loss += kl_coef * tl.sum(of_scaled_kl, 0)
    if values is not None:
        total = tl.sum(of_value, 0)
        tl.store(at + _VALUE, total)
        tl.store(at + _CLIPPED, tl.sum(of_clipped, 0))
        if value_slopes is not None:
            loss += value_coef * total
    tl.store(at + _LOSS, loss)


@triton.jit(do_not_specialize=["sums", "programs", "counts", "loss", "stats"])
def finish_kernel(
    sums,
    programs: tl.int64,
    counts,  # tokens, sequences, tokens with a value
    loss,  # None: it is per token
    stats,
    PRESENT: tl.constexpr,  # a bit for each of NAMES
    BLOCK: tl.constexpr,
):
    """Add up the programs' sums, in one order, and turn them into the loss and means."""
    lane = tl.arange(0, _LANES)
    empty = tl.where(lane == _MIN, float("inf"), tl.where(lane == _MAX, float("-inf"), 0.0))
    total, least, most = tl.zeros([_LANES], tl.float64), empty, empty
    for first in range(0, programs, BLOCK):
        program = first + tl.arange(0, BLOCK).to(tl.int64)
        at = sums + program[:, None] * _LANES + lane[None, :]
        there = (program < programs)[:, None]
        x = tl.where(there, tl.load(at, there, other=0.0), empty[None, :])
        total += tl.sum(x.to(tl.float64), 0)
        least, most = tl.minimum(least, tl.min(x, 0)), tl.maximum(most, tl.max(x, 0))
    if loss is not None:
        tl.store(loss, tl.sum(tl.where(lane == _LOSS, total, 0.0), 0).to(tl.float32))

    tokens, sequences, valued = tl.load(counts), tl.load(counts + 1), tl.load(counts + 2)
    of_values = (lane == _VALUE) | (lane == _CLIPPED)
    count = tl.where(of_values, valued, tokens).to(tl.float64)
    mean = tl.where(count > 0.0, total / tl.where(count > 0.0, count, 1.0), 0.0)
    ratio = tl.sum(tl.where(lane == _RATIO, total, 0.0), 0)  # NaN: so are its extremes
    extreme = tl.where(lane == _MIN, least, most).to(tl.float64)
    extreme = tl.where(ratio == ratio, extreme, ratio)
    is_extreme = (lane == _MIN) | (lane == _MAX)
    stat = tl.where(is_extreme & (tokens > 0), extreme, mean)
    if loss is not None:  # as they enter it
        stat = tl.where((lane == _POLICY) | (lane == _VALUE), total, stat)
    stat = tl.where(is_extreme & (tokens == 0), 0.0, stat)
    stat = tl.where(lane == _TOKENS, tokens.to(tl.float64), stat)
    stat = tl.where(lane == _SEQUENCES, sequences.to(tl.float64), stat)
    present = (PRESENT >> lane) & 1
    tl.store(stats + tl.cumsum(present, 0) - 1, stat.to(tl.float32), present != 0)


def forward(x: Inputs, o: Options) -> Output:
    """Return the loss with its statistics and slopes."""
    like = next(t for t in x if t is not None)
    tokens, device = like.numel(), like.device
    if tokens == 0:
        return reference.forward(x, o)
    length = like.shape[-1] if like.dim() else 1
    cu_seqlens = None if x.cu_seqlens is None else x.cu_seqlens.long()
    sequences = tokens // length if cu_seqlens is None else cu_seqlens.shape[0] - 1
    x = x._replace(cu_seqlens=cu_seqlens)
    x = Inputs(*(None if t is None else t.contiguous() for t in x))
    if o.value_clip_range is None:
        x = x._replace(old_values=None)
    lengths = _lengths(x.mask, length, tokens, sequences, cu_seqlens, device)
    same = x.value_mask is None or x.value_mask is x.mask
    value_lengths = lengths
    if not same:
        value_lengths = _lengths(x.value_mask, length, tokens, sequences, cu_seqlens, device)
    counts = torch.stack([lengths.sum(), (lengths > 0).sum(), value_lengths.sum()])
    scale = _scale(o.aggregate, lengths, x.denominator)
    value_scale = _scale(o.aggregate, value_lengths, x.value_denominator)

    out = reference.empty_output(x, o)
    per_token = o.aggregate == "none"
    by_sequence = o.sequence_ratio or o.aggregate == "sequence_mean"
    fit = min(triton.cdiv(tokens, BLOCK), _launch.resident(device, RESIDENT))
    programs = sequences if by_sequence else fit
    sums = torch.empty((programs, _LANES.value), dtype=torch.float32, device=device)
    slopes = (out.logprob_slopes, out.ratio_slopes, out.entropy_slopes, out.value_slopes)
    names = reference.stat_names(x, o)
    means = None
    with _launch.on_device_of(like):
        if o.sequence_ratio and x.logprobs is not None:
            means = torch.empty(sequences, dtype=torch.float32, device=device)
            mean_log_ratio_kernel[(sequences,)](
                x.logprobs, x.old_logprobs, x.mask, cu_seqlens, length, tokens, means,
                BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
        loss_kernel[(programs,)](
            *reference.numbers_of(x), x.mask, None if same else x.value_mask, x.cu_seqlens, means,
            length, tokens,
            scale, _step(scale), value_scale, _step(value_scale), o.low, o.high,
            torch.inf if o.dual_clip is None else o.dual_clip,
            torch.inf if o.log_ratio_limit is None else o.log_ratio_limit,
            o.entropy_coef, o.kl_coef, o.value_clip_range or 0.0, o.value_coef, sums,
            out.loss if per_token else None, *(s if s.numel() else None for s in slopes),
            KL=o.kl_kind, BY_SEQUENCE=by_sequence, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        finish_kernel[(1,)](
            sums, programs, counts, None if per_token else out.loss, out.stats,
            PRESENT=sum((name in names) << i for i, name in enumerate(NAMES)),
            BLOCK=64, num_warps=4,
        )  # fmt: skip
    spoil(cu_seqlens, tokens, *out)
    return out


def _lengths(
    mask: Tensor | None,
    length: int,
    tokens: int,
    sequences: int,
    cu_seqlens: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Return how many unmasked tokens each sequence has."""
    if cu_seqlens is None:
        if mask is None:
            return torch.full((sequences,), length, device=device)
        return mask.view(sequences, length).sum(-1)
    if mask is None:
        return cu_seqlens.diff()
    before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    return before[cu_seqlens.clamp(0, tokens)].diff()


def _scale(aggregate: str, lengths: Tensor, denominator: Tensor | None) -> Tensor:
    """Return what tokens' terms are multiplied by: one number, or one per sequence."""
    one = torch.ones((), device=lengths.device)
    if aggregate in ("none", "sum"):
        return one
    if aggregate == "token_mean":
        return one / (lengths.sum() if denominator is None else denominator.float())
    each = one / ((lengths > 0).sum() if denominator is None else denominator.float())
    return each if aggregate == "sequence_sum" else each / lengths


def _step(scale: Tensor) -> int:
    return scale.dim()
