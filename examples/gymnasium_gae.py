"""Advantages of rollouts from Gymnasium's vector environments.

    python examples/gymnasium_gae.py

Since Gymnasium 1.0 a vector environment resets in the step *after* the one that ended an episode.
That step ignores its action, has reward 0, and is no transition: it is masked. The observation
that came with the end is the last one of the episode, also where a time limit cut it. Its value
goes into `next_values`: nothing has to be added to a reward.

    mask[t]        = not done[t - 1]
    terminated[t], truncated[t]: as the environment says
    next_values[t] = critic(the observation that step t returned)

`dones` of CleanRL and `episode_starts` of SB3 are `done[t - 1]`. They know one kind of end: a time
limit counts as a termination, unless the value behind it is added to the reward.
"""

from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor

import ppokern

STEPS, ENVS, GAMMA, LAMBDA = 64, 4, 0.99, 0.95


class Rollout(NamedTuple):
    """What a rollout leaves, ``(T, n_envs)`` each."""

    rewards: Tensor
    values: Tensor
    next_values: Tensor
    terminated: Tensor
    truncated: Tensor
    mask: Tensor


def critic(observations: np.ndarray) -> Tensor:
    """Return the values of observations; a network, in earnest."""
    return torch.as_tensor(observations, dtype=torch.float32).square().sum(-1)


def rollout(steps: int = STEPS) -> Rollout:
    """Take random steps in CartPole, with a time limit of 15."""
    envs = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.make("CartPole-v1", max_episode_steps=15)] * ENVS
    )
    envs.action_space.seed(0)
    observations, _ = envs.reset(seed=0)
    ended = np.zeros(ENVS, dtype=bool)  # in the step before
    rows = []
    for _ in range(steps):
        values, valid = critic(observations), ~ended
        observations, rewards, terminated, truncated, _ = envs.step(envs.action_space.sample())
        ended = terminated | truncated
        row = [torch.as_tensor(x) for x in (rewards, terminated, truncated, valid)]
        rows.append((row[0].float(), values, critic(observations), *row[1:]))
    envs.close()
    return Rollout(*(torch.stack(column) for column in zip(*rows, strict=True)))


def advantages_of(x: Rollout) -> Tensor:
    """Return advantages, 0 where there was no transition."""
    return ppokern.gae(
        x.rewards,
        x.values,
        gamma=GAMMA,
        lam=LAMBDA,
        mask=x.mask,
        terminated=x.terminated,
        truncated=x.truncated,
        next_values=x.next_values,
        time_dim=0,
    ).advantages


def main() -> None:
    """Print what there was, and its advantages."""
    x = rollout()
    advantages = advantages_of(x)
    print(
        f"{int(x.mask.sum())} transitions, {int((x.mask & x.terminated).sum())} ends, "
        f"{int((x.mask & x.truncated).sum())} time limits, "
        f"mean advantage {advantages[x.mask].mean():.3f}"
    )


if __name__ == "__main__":
    main()
