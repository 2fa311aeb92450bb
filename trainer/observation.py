"""What is told of an update of PPO: its metrics, its line of progress, a few of its texts."""

from __future__ import annotations

import resource

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppokern import kl_estimate
from ppokern._names import KLKind

from . import distributed
from .data import sums
from .experience import Experience
from .metrics import Metrics, distinct, repeated
from .rollout import Rollouts


def observe(
    metrics: Metrics,
    rollouts: Rollouts,
    experience: Experience,
    parts: dict[str, Tensor],
    kl_coef: float,
    kl_in_reward: float,
    kl_kind: KLKind = "k1",
) -> None:
    """What there is to say of an update's episodes, in the names that TRL's users know."""
    mask, ends = experience.mask, experience.cu_seqlens
    kept = sums(mask, ends) > 0  # (S,) those that learn
    scores, kl = experience.scores[kept], sums(experience.kl, ends)[kept]
    metrics.add("objective/scores", scores)
    for name, part in parts.items():
        metrics.add(f"objective/scores/{name}", part[kept])
    metrics.add_sum("objective/unscored", (~kept).sum(), 1 / distributed.size())
    metrics.add("objective/kl", kl)
    metrics.add("objective/kl_per_token", experience.kl, mask)
    k3 = kl_estimate(rollouts.logprobs, experience.ref_logprobs, "k3", mask)
    metrics.add("objective/kl_k3", sums(k3, ends)[kept])
    sampled = -sums(rollouts.logprobs, ends)[kept]  # nats: a proxy; policy/entropy_avg is exact
    metrics.add("objective/entropy", sampled)
    penalty = kl_estimate(rollouts.logprobs, experience.ref_logprobs, kl_kind, mask)
    penalty = kl_in_reward * sums(penalty, ends)[kept]
    metrics.add("objective/non_score_reward", -penalty)
    metrics.add("objective/rlhf_reward", scores - penalty)
    metrics.add("objective/shaped_reward", experience.rewards, mask)
    metrics.add("objective/advantage", experience.returns - experience.values, mask)
    metrics.add("objective/whitened_advantage_abs", experience.advantages.abs(), mask)
    metrics.add("kl_coef", kl_coef)

    responses = rollouts.responses()
    lengths = sums(rollouts.mask, ends)  # (S,)
    metrics.add("response/length", lengths)
    metrics.add("response/truncated", ~rollouts.terminated)
    metrics.add_sum("val/num_eos_tokens", rollouts.terminated.sum(), 1 / distributed.size())
    metrics.add_sum("response/repetition", *repeated(responses))
    everyone = [ids for part in distributed.gathered(responses) for ids in part]
    for n in (1, 2):
        metrics.add_sum(f"response/distinct_{n}", *distinct(everyone, n))
    metrics.add_pairs("score_length", experience.scores, lengths, kept)
    metrics.add_pairs("value", experience.values, experience.returns, mask)


def derived(metrics: Metrics) -> dict[str, float]:
    """What is made of other metrics once they are whole."""
    seconds = sum(metrics.mean(f"time/{part}") for part in ("rollout", "experience", "learn"))
    return {
        "response/score_length_correlation": metrics.correlation("score_length"),
        "val/explained_variance": metrics.explained("value"),
        "time/tokens_per_second": metrics.total("response/length") / seconds,
        "memory/peak_bytes": peak_memory(),
    }


def peak_memory() -> float:
    """Most memory held so far: of the GPU if there is one, else of the process."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def line(row: dict[str, float]) -> str:
    """What the progress line says of an update."""
    return (
        f"score {row['objective/scores']:+.2f}, KL {round(row['objective/kl'], 1) + 0:.1f} nats, "
        f"{row['response/length']:.0f} tokens, {row['time/tokens_per_second']:.0f} tokens/s"
    )


def samples(tokenizer: PreTrainedTokenizerBase, rollouts: Rollouts, experience: Experience) -> str:
    """Three responses of an update, each with its score and KL."""
    texts = tokenizer.batch_decode(rollouts.sequences()[:3], skip_special_tokens=True)
    kls = sums(experience.kl, experience.cu_seqlens).tolist()
    numbers = zip(experience.scores.tolist(), kls, texts, strict=False)
    return "\n".join(f"  [score {score:+.2f}, KL {kl:.1f}] {text}" for score, kl, text in numbers)
