"""The ops in a loop of your own: no trainer, no transformers.

    python examples/bare_loop.py

A recurrent policy writes twelve tokens; each token 7 among them is worth 1. PPO has a critic on the
policy's states, and a KL to the policy that it started from.
"""

import copy

import torch
from torch import Tensor, nn

import ppokern

VOCAB, STEPS, BATCH, BONUS = 50, 12, 64, 7


class Policy(nn.Module):
    """Token ids to hidden states, and what reads them: a head and a critic."""

    def __init__(self) -> None:
        """Make the weights."""
        super().__init__()
        self.embedding = nn.Embedding(VOCAB + 1, 64)  # the last id stands before the first token
        self.trunk = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, VOCAB, bias=False)
        self.critic = nn.Linear(64, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the states before each token, ``(B, T, H)``."""
        before = torch.cat([torch.full_like(tokens[:, :1], VOCAB), tokens[:, :-1]], 1)
        return self.trunk(self.embedding(before))[0]


@torch.no_grad()
def sample(policy: Policy) -> Tensor:
    """Return ``(BATCH, STEPS)`` token ids."""
    tokens = torch.zeros(BATCH, STEPS, dtype=torch.long)
    for t in range(STEPS):
        logits = policy.head(policy(tokens)[:, t])
        tokens[:, t] = torch.multinomial(logits.softmax(-1), 1)[:, 0]
    return tokens


def update(policy: Policy, reference: Policy, optimiser: torch.optim.Optimizer) -> float:
    """Sample, score, shape, learn; return the mean score."""
    tokens = sample(policy)
    scores = (tokens == BONUS).sum(1).float()  # one per sequence
    with torch.no_grad():
        states = policy(tokens)
        old = ppokern.linear_selected_logprobs(states, policy.head.weight, tokens)
        ref = ppokern.linear_selected_logprobs(reference(tokens), reference.head.weight, tokens)
        old_values = policy.critic(states)[..., 0]
        rewards = ppokern.shaped_rewards(scores, old, ref, kl_coef=0.02).rewards
        advantages, returns = ppokern.gae(rewards, old_values, gamma=1.0, lam=0.95)
        advantages = ppokern.whiten(advantages)
    for _ in range(4):
        states = policy(tokens)
        policy_loss, _ = ppokern.linear_ppo_loss(
            states, policy.head.weight, tokens, old, advantages, clip_range=0.2, entropy_coef=0.001
        )
        values = policy.critic(states)[..., 0]
        value_loss, _ = ppokern.ppo_value_loss(values, old_values, returns, clip_range=None)
        optimiser.zero_grad()
        (policy_loss + 0.1 * value_loss).backward()
        optimiser.step()
    return scores.mean().item()


def main(updates: int = 40) -> list[float]:
    """Return the mean score of each update."""
    torch.manual_seed(0)
    policy = Policy()
    reference = copy.deepcopy(policy)
    optimiser = torch.optim.Adam(policy.parameters(), lr=3e-3)
    scores = [update(policy, reference, optimiser) for _ in range(updates)]
    print(f"score of the first update {scores[0]:.2f}, of the last {scores[-1]:.2f}")
    return scores


if __name__ == "__main__":
    main()
