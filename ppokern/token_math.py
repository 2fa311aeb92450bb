"""The maths page in plain torch: every formula of the package, once, with its equation and source.

Elementwise functions of tensors and nothing else: no masks, no layouts, no reductions. The C++ page
(``csrc/token_math.h``) bears the same names in the same order.

A slope is the derivative of a term with respect to its first argument.
"""

import torch
from torch import Tensor

# --- log-probs ------------------------------------------------------------------------------------


def softcap_logit(logit: Tensor, softcap: float) -> Tensor:
    """``softcap * tanh(logit / softcap)``; a forbidden token (``-inf``) stays forbidden.

    Source: Gemma 2 (2024), section 2.
    """
    return torch.where(logit == -torch.inf, logit, softcap * torch.tanh(logit / softcap))


def softcap_slope(logit: Tensor, softcap: float) -> Tensor:
    """``1 - tanh(logit / softcap)^2``."""
    return 1 - torch.tanh(logit / softcap).square()


def tempered_logit(logit: Tensor, row_max: Tensor, temperature: Tensor) -> Tensor:
    """``(logit - row_max) / temperature``: in this order extreme logits stay exact."""
    return (logit - row_max) / temperature


def own_logprob_slope(logprob: Tensor) -> Tensor:
    """``1 - exp(logprob)``: the slope of a token's log-prob in its own logit, exact near 0."""
    return -torch.expm1(logprob)


def entropy_term(prob: Tensor, logprob: Tensor) -> Tensor:
    """``-prob * logprob``, with ``0 log 0 = 0``."""
    return -prob * torch.where(prob == 0, 0.0, logprob)


def entropy_slope(prob: Tensor, logprob: Tensor, entropy: Tensor) -> Tensor:
    """``-prob * (logprob + entropy)``, the slope of a row's entropy in one of its logits."""
    return -prob * (torch.where(prob == 0, 0.0, logprob) + entropy)


# --- advantages -----------------------------------------------------------------------------------


def gae_delta(reward: Tensor, value: Tensor, next_value: Tensor, gamma: float) -> Tensor:
    """``r_t + gamma * V(s_{t+1}) - V(s_t)``; `next_value` is 0 where nothing is bootstrapped.

    Source: Schulman et al. 2016 (arXiv 1506.02438), equation 10.
    """
    return reward + gamma * next_value - value


def gae_step(delta: Tensor, decay: Tensor, next_advantage: Tensor) -> Tensor:
    """``A_t = delta_t + decay_t * A_{t+1}``; a `decay` of 0 shuts out whatever comes next.

    Source: Schulman et al. 2016 (arXiv 1506.02438), equation 16.
    """
    return torch.where(decay == 0, delta, delta + decay * next_advantage)


# --- KL -------------------------------------------------------------------------------------------


def kl_k1(log_ratio: Tensor) -> Tensor:
    """``d``, with ``d = log p - log q`` of a token sampled from p: unbiased. Schulman 2020."""
    return log_ratio


def kl_k2(log_ratio: Tensor) -> Tensor:
    """``d^2 / 2``: biased, of low variance. Schulman 2020, "Approximating KL divergence"."""
    return log_ratio.square() / 2


def kl_k3(log_ratio: Tensor) -> Tensor:
    """``exp(-d) - 1 + d``: unbiased, never negative. Schulman 2020."""
    return torch.expm1(-log_ratio) + log_ratio


def kl_k1_slope(log_ratio: Tensor) -> Tensor:
    """``1``."""
    return torch.ones_like(log_ratio)


def kl_k2_slope(log_ratio: Tensor) -> Tensor:
    """``d``."""
    return log_ratio


def kl_k3_slope(log_ratio: Tensor) -> Tensor:
    """``1 - exp(-d)``."""
    return -torch.expm1(-log_ratio)


# k3+ has the value of k3 and the slope of k2. Under the policy the mean of k2's slope times the
# slope of the log-prob is the gradient of KL(policy || reference); that of k3's is not.
KL = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3, "k3+": kl_k3}
KL_SLOPE = {"k1": kl_k1_slope, "k2": kl_k2_slope, "k3": kl_k3_slope, "k3+": kl_k2_slope}


# --- losses ---------------------------------------------------------------------------------------


def clip_surrogate(
    ratio: Tensor, advantage: Tensor, low: float, high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)``, for A < 0 not above ``-dual_clip * A``.

    The ratio that counts is chosen before it is multiplied, so that an infinite ratio meets no
    zero.

    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7; dual clip: Ye et al. 2020
    (arXiv 1912.09729), equation 3.

    Returns:
        The loss, its slope in ``log r`` (``-r A``, 0 on the flat side), and where it is flat.
    """
    used = torch.where(advantage == 0, 1.0, ratio)
    above = (advantage > 0) & (ratio > 1 + high)
    below = (advantage < 0) & (ratio < 1 - low)
    flat = above | below
    used = torch.where(above, 1 + high, torch.where(below, 1 - low, used))
    if dual_clip is not None:
        bound = (advantage < 0) & (ratio > dual_clip)
        flat = flat | bound
        used = torch.where(bound, dual_clip, used)
    loss = -used * advantage
    return loss, torch.where(flat, 0.0, loss), flat


def clip_value(
    value: Tensor, old_value: Tensor, target: Tensor, clip_range: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``max((v - R)^2, (clip(v, v_old - e, v_old + e) - R)^2) / 2``.

    Source: Schulman et al. 2016, as in OpenAI baselines' ppo2.

    Returns:
        The loss, its slope in `value`, and where the clipped error is the larger one.
    """
    error = value - target
    clipped = value.clamp(old_value - clip_range, old_value + clip_range) - target
    larger = clipped.square() > error.square()
    loss = torch.maximum(error.square(), clipped.square()) / 2
    return loss, torch.where(larger, 0.0, error), larger


def value_error(value: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """``(v - R)^2 / 2`` and its slope ``v - R``."""
    error = value - target
    return error.square() / 2, error
