"""ppokern: fused kernels for the inner loop of reinforcement learning from human feedback."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# What is public comes with the first name that is asked for, and torch with it: it takes a second
# or two, for which a mistake on the command line does not wait.
_HOMES = (
    "_backend _check gae.op linear.loss linear.op logprob.op packing.op ppo_loss.op reward.op"
).split()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ppokern' has no attribute {name!r}")
    for home in _HOMES:
        found = vars(import_module(f"ppokern.{home}"))
        globals().update({public: found[public] for public in __all__ if public in found})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Two rooms bear the names of their ops: importing one puts it in no op's place."""

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute, as the import of `ppokern.gae` would."""
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
