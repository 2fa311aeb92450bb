"""The learning step of PPO, `trainer.ppo.backward`: forward and backward of policy and critic.

"eager" is the same trainer with a policy that makes the logits of the whole micro-batch.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppokern
from ppokern import next_token_targets
from ppokern.ppo_loss.op import Loss
from trainer import ppo
from trainer.attention import Packed
from trainer.config import PPOConfig, Scratch
from trainer.data import packed
from trainer.experience import Experience
from trainer.metrics import Metrics
from trainer.models import LogProbs, Policy, Scorer, scratch_config, without_dropout

LLAMA = Scratch("llama", vocab_size=8192, width=256, layers=6, heads=8, context_tokens=256)
CASES = {  # model, sequences, tokens of each
    "embedded default, 1.2 M": (Scratch(), 64, 22),
    "Llama, 7 M, V = 8,192": (LLAMA, 32, 256),
}


class PlainPolicy(Policy):
    """Log-probs, entropy and the clipped loss from the logits of the batch."""

    def forward(self, request: Any) -> Any:
        """See `Policy`; answers a `PPOLoss`."""
        ids, cu_seqlens, mask = request.of.ids, request.of.cu_seqlens, request.of.mask
        options = request.options
        inputs = Packed(cu_seqlens).inputs(ids)
        logits = self.lm(**inputs, use_cache=False).logits[0, :-1]  # (total - 1, V)
        logprobs = logits.float().log_softmax(-1)
        entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
        logprobs = logprobs.gather(-1, ids[1:, None]).squeeze(-1)
        old, advantages = options["old_logprobs"][:-1], options["advantages"][:-1]
        count = options["denominator"]
        mask = mask[:-1]  # type: ignore[index]

        def mean(x: Tensor) -> Tensor:
            return torch.where(mask, x, 0.0).sum() / count  # type: ignore[arg-type]

        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -mean(torch.minimum(ratio * advantages, clipped * advantages))
        difference = (logprobs - old).detach()
        stats = {
            "policy_loss": loss.detach(),
            "entropy": mean(entropy),
            "approx_kl_k1": mean(-difference),
            "approx_kl_k2": mean(difference.square() / 2),
            "approx_kl_k3": mean(difference.exp() - 1 - difference),
            "clip_fraction": mean((ratio != clipped).float()),
            "ratio_mean": mean(ratio.detach()),
        }
        return Loss(loss, stats), None  # the states are for a value head: there is none


@functools.cache
def data(case: str) -> tuple[Any, Any, Experience]:
    """Return the two models and a minibatch with responses of varied length."""
    scratch, rows, width = CASES[case]
    torch.manual_seed(0)
    config = without_dropout(scratch_config(scratch))
    config.num_labels, config.pad_token_id = 1, 0
    config.score_mean, config.score_std = 0.0, 1.0
    lm = AutoModelForCausalLM.from_config(config)
    critic = Scorer(AutoModelForSequenceClassification.from_config(config))
    lengths = torch.randint(width // 2, width + 1, (rows,)).tolist()
    ids, cu_seqlens = packed([torch.randint(1, scratch.vocab_size, (n,)).tolist() for n in lengths])
    mask = next_token_targets(ids, cu_seqlens)[1]
    with torch.no_grad():
        logprobs, values = Policy(lm)(LogProbs(ids, cu_seqlens, mask)), critic(ids, cu_seqlens)
    noise = torch.randn(mask.shape)
    return lm, critic, Experience(
        ids=ids, cu_seqlens=cu_seqlens, mask=mask, logprobs=logprobs + 0.1 * noise,
        ref_logprobs=logprobs, values=values, rewards=noise, kl=noise, advantages=noise,
        returns=values + noise, scores=noise[:rows],
    )  # fmt: skip


@pytest.mark.parametrize("form", ["eager", *ppokern.available_backends()])
@pytest.mark.parametrize("case", CASES)
def bench_update(measure: Callable, case: str, form: str) -> None:
    """One micro-batch; time and memory."""
    lm, critic, minibatch = data(case)
    policy = (PlainPolicy if form == "eager" else Policy)(lm)
    models = ppo.Models(None, policy, critic, policy, [])  # type: ignore[arg-type]
    config = PPOConfig(max_tokens_per_micro_batch=2**16)

    def step() -> None:
        policy.zero_grad()
        critic.zero_grad()
        ppo.backward(models, minibatch, config, 0.0, Metrics())

    measure(f"PPO's learning step, {case}", form, step, rounds=3, peak=True)
