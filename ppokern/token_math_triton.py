"""The maths page in Triton: every formula once, under the names and in the order of token_math.py.

Functions of blocks of float32 (float64 for the advantages), called from kernels.
"""

import triton
import triton.language as tl

# --- what tl lacks, or its interpreter ------------------------------------------------------------

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Return float32 in `dtype`, to the nearest even; the interpreter cuts bfloat16 off instead."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def tanh(x):
    """Cephes' tanhf: a polynomial near 0, where the quotient of exponentials cancels."""
    size, square = tl.abs(x), x * x
    p = -5.70498872745e-3 * square + 2.06390887954e-2
    p = (p * square - 5.37397155531e-2) * square + 1.33314422036e-1
    p = (p * square - 3.33332819422e-1) * square
    large = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.625, p * x + x, tl.where(x < 0.0, -large, large))


@triton.jit
def expm1(x):
    """``exp(x) - 1``, near 0 as ``2 t / (1 - t)`` with ``t = tanh(x / 2)``."""
    t = tanh(0.5 * x)
    return tl.where(tl.abs(x) < 1.0, 2.0 * t / (1.0 - t), tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """``log(1 + x)`` for ``x >= 0``: what was lost in the sum is made up for by a factor."""
    one_more = 1.0 + x
    lost = one_more - 1.0
    return tl.where(lost == 0.0, x, tl.log(one_more) * (x / tl.where(lost == 0.0, 1.0, lost)))


# --- log-probs ------------------------------------------------------------------------------------


@triton.jit
def softcap_logit(logit, softcap):
    """``softcap * tanh(logit / softcap)``; a forbidden token (``-inf``) stays forbidden."""
    return tl.where(logit == float("-inf"), logit, softcap * tanh(logit / softcap))


@triton.jit
def softcap_slope(logit, softcap):
    """``1 - tanh(logit / softcap)^2``."""
    t = tanh(logit / softcap)
    return 1.0 - t * t


@triton.jit
def tempered_logit(logit, row_max, factor):
    """``(logit - row_max) * factor``, the factor being ``1 / temperature``.

    In this order extreme logits stay exact. With a factor times log2(e) the result is in bits.
    """
    return (logit - row_max) * factor


@triton.jit
def own_logprob_slope(logprob):
    """``1 - exp(logprob)``: the slope of a token's log-prob in its own logit, exact near 0."""
    return -expm1(logprob)


@triton.jit
def entropy_term(prob, logprob):
    """``-prob * logprob``, with ``0 log 0 = 0``."""
    return -prob * tl.where(prob == 0.0, 0.0, logprob)


@triton.jit
def entropy_slope(prob, logprob, entropy):
    """``-prob * (logprob + entropy)``, the slope of a row's entropy in one of its logits."""
    return -prob * (tl.where(prob == 0.0, 0.0, logprob) + entropy)


# --- advantages -----------------------------------------------------------------------------------


@triton.jit
def gae_delta(reward, value, next_value, gamma):
    """``r_t + gamma * V(s_{t+1}) - V(s_t)``; `next_value` is 0 where nothing is bootstrapped."""
    return reward + gamma * next_value - value


@triton.jit
def gae_step(delta, decay, next_advantage):
    """``A_t = delta_t + decay_t * A_{t+1}``; a `decay` of 0 shuts out whatever comes next."""
    return tl.where(decay == 0.0, delta, delta + decay * next_advantage)


# --- KL -------------------------------------------------------------------------------------------


@triton.jit
def kl_k1(log_ratio):
    """``d``, with ``d = log p - log q``."""
    return log_ratio


@triton.jit
def kl_k2(log_ratio):
    """``d^2 / 2``."""
    return log_ratio * log_ratio / 2.0


@triton.jit
def kl_k3(log_ratio):
    """``exp(-d) - 1 + d``."""
    return expm1(-log_ratio) + log_ratio


@triton.jit
def kl_k1_slope(log_ratio):
    """``1``."""
    return tl.full(log_ratio.shape, 1.0, log_ratio.dtype)


@triton.jit
def kl_k2_slope(log_ratio):
    """``d``."""
    return log_ratio


@triton.jit
def kl_k3_slope(log_ratio):
    """``1 - exp(-d)``."""
    return -expm1(-log_ratio)


@triton.jit
def kl(log_ratio, KIND: tl.constexpr):
    """The estimate of a kind: the table ``KL``."""
    if KIND == "k1":
        return kl_k1(log_ratio)
    elif KIND == "k2":
        return kl_k2(log_ratio)
    else:
        return kl_k3(log_ratio)


@triton.jit
def kl_slope(log_ratio, KIND: tl.constexpr):
    """Its slope: the table ``KL_SLOPE``."""
    if KIND == "k1":
        return kl_k1_slope(log_ratio)
    elif KIND == "k2" or KIND == "k3+":
        return kl_k2_slope(log_ratio)
    else:
        return kl_k3_slope(log_ratio)


# --- losses ---------------------------------------------------------------------------------------


@triton.jit
def clip_surrogate(ratio, advantage, low, high, dual_clip):
    """``-min(r A, clip(r, 1 - low, 1 + high) A)``, for A < 0 not above ``-dual_clip * A``.

    A `dual_clip` of infinity is none. Returns the loss, its slope in ``log r``, where it is flat.
    """
    above = (advantage > 0.0) & (ratio > 1.0 + high)
    below = (advantage < 0.0) & (ratio < 1.0 - low)
    bound = (advantage < 0.0) & (ratio > dual_clip)
    used = tl.where(advantage == 0.0, 1.0, ratio)  # an infinite ratio meets no zero
    used = tl.where(above, 1.0 + high, tl.where(below, 1.0 - low, used))
    used = tl.where(bound, dual_clip, used)
    loss, flat = -used * advantage, above | below | bound
    return loss, tl.where(flat, 0.0, loss), flat


@triton.jit
def clip_value(value, old_value, target, clip_range):
    """``max((v - R)^2, (clip(v, v_old - e, v_old + e) - R)^2) / 2``, its slope, where clipped."""
    error = value - target
    lower, upper = old_value - clip_range, old_value + clip_range
    # in this order an old value of NaN makes NaN
    nearest = tl.where(value >= lower, tl.where(value <= upper, value, upper), lower)
    clipped = nearest - target
    larger = clipped * clipped > error * error
    used = tl.where(larger | (clipped != clipped), clipped, error)
    return used * used / 2.0, tl.where(larger, 0.0, error), larger


@triton.jit
def value_error(value, target):
    """``(v - R)^2 / 2`` and its slope ``v - R``."""
    error = value - target
    return error * error / 2.0, error
