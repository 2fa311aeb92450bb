"""ppokern: fused kernels for the inner loop of reinforcement learning from human feedback."""

from ppokern._backend import available_backends, cpu_capability, use_backend
from ppokern._check import set_validation
from ppokern.gae.op import Advantages, gae, whiten
from ppokern.linear.loss import linear_ppo_loss
from ppokern.linear.op import linear_selected_logprobs, linear_selected_logprobs_with_entropy
from ppokern.logprob.op import LogProbs, selected_logprobs, selected_logprobs_with_entropy
from ppokern.packing.op import Packed, next_token_targets, pack, position_ids, unpack
from ppokern.ppo_loss.op import Loss, ppo_loss, ppo_policy_loss, ppo_value_loss
from ppokern.reward.op import ShapedRewards, kl_estimate, shaped_rewards

__version__ = "0.1.0"

__all__ = [
    "Advantages",
    "LogProbs",
    "Loss",
    "Packed",
    "ShapedRewards",
    "available_backends",
    "cpu_capability",
    "gae",
    "kl_estimate",
    "linear_ppo_loss",
    "linear_selected_logprobs",
    "linear_selected_logprobs_with_entropy",
    "next_token_targets",
    "pack",
    "position_ids",
    "ppo_loss",
    "ppo_policy_loss",
    "ppo_value_loss",
    "selected_logprobs",
    "selected_logprobs_with_entropy",
    "set_validation",
    "shaped_rewards",
    "unpack",
    "use_backend",
    "whiten",
]
