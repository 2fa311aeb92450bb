"""What leads the weights of PPO's two KL terms, from update to update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .config import PPOConfig
from .metrics import Metrics


@dataclass
class KLController:
    """The weight of the KL to the reference: fixed, or led to a target.

    `coef *= 1 + clip(kl / target - 1, -.2, .2) * episodes / horizon` (Ziegler et al. 2019, section
    2.2).
    """

    coef: float
    target: float | None
    measure: str  # the metric that the target is one of
    horizon_episodes: int

    @staticmethod
    def of(config: PPOConfig) -> KLController:
        """The controller that a configuration asks for."""
        if config.kl_target_per_token is not None:
            target, measure = config.kl_target_per_token, "objective/kl_per_token"
        else:
            target, measure = config.kl_target_per_sequence, "objective/kl"
        return KLController(config.kl_coef, target, measure, config.kl_horizon_episodes)

    def update(self, metrics: Metrics, episodes: int) -> None:
        """Moves the coefficient after an update of so many episodes."""
        if self.target is not None:
            error = metrics.mean(self.measure) / self.target - 1
            if math.isfinite(error):  # nothing to go by where every response was left out
                self.coef *= 1 + min(max(error, -0.2), 0.2) * episodes / self.horizon_episodes

    def state_dict(self) -> dict[str, Any]:
        """What changes while a run goes on."""
        return {"coef": self.coef}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Goes on from there."""
        self.coef = state_dict["coef"]


@dataclass
class PenaltyController:
    """The weight of the KL from old to new policy, where that is what keeps a step small.

    Halved where the KL is below `target / 1.5`, doubled above `1.5 * target` (Schulman et al. 2017,
    section 4).
    """

    coef: float
    target: float

    def update(self, moved: float) -> None:
        """Moves the weight after an update that has come so far; NaN tells nothing."""
        if moved < self.target / 1.5:
            self.coef /= 2
        elif moved > self.target * 1.5:
            self.coef *= 2

    def state_dict(self) -> dict[str, Any]:
        """What changes while a run goes on."""
        return {"coef": self.coef}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Goes on from there."""
        self.coef = state_dict["coef"]
