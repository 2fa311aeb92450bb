"""PPO whose responses come from an engine of your own.

    python examples/own_engine.py MODEL PROMPTS.jsonl RUN_DIR

The engine here is plain transformers in the same process. A server does the same three steps: it
takes the weights over, samples, and returns ids with their log-probs and the version of the
weights. PPO's self-check says if these log-probs are not those of the weights that are trained.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from ppokern.trainer import ppo
from ppokern.trainer.config import PPOConfig
from ppokern.trainer.data import Prompt
from ppokern.trainer.rollout import Rollouts, rollouts_of
from transformers import AutoModelForCausalLM


class Engine:
    """Stands for a server with weights of its own."""

    def __init__(self, folder: str) -> None:
        """Load the model that PPO starts from."""
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def sample(
        self, ids: list[int], stop: Sequence[int], most: int, temperature: float, seed: int
    ) -> tuple[list[int], list[float]]:
        """Return a response and the log-probs of its tokens."""
        chance, response, logprobs = torch.Generator().manual_seed(seed), [], []
        while len(response) < most and (not response or response[-1] not in stop):
            logits = self.model(torch.tensor([ids + response])).logits[0, -1].float()
            distribution = (logits / temperature).log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=chance))
            response.append(token)
            logprobs.append(float(distribution[token]))
        return response, logprobs

    def __call__(
        self,
        policy: Any,
        prompts: Sequence[Prompt],
        stop: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        generator: torch.Generator,
        version: int,
        rows: Sequence[int] | None = None,
    ) -> Rollouts:
        """Sample a response to each prompt of this process."""
        self.model.load_state_dict(policy.lm.state_dict())
        seeds = torch.randint(2**31, (len(prompts),), generator=generator).tolist()  # for all
        rows = range(len(prompts)) if rows is None else rows
        asked = [prompts[row] for row in rows]
        found = [
            self.sample(prompts[row].ids, stop, max_new_tokens, temperature, seeds[row])
            for row in rows
        ]
        logprobs = torch.tensor([x for _, of_tokens in found for x in of_tokens])
        return rollouts_of(asked, [ids for ids, _ in found], logprobs, stop, version)


def brief(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Reward short responses."""
    return [-len(completion) / 10 for completion in completions]


def main(model: str, prompts: str, run_dir: str) -> None:
    """Train for two updates."""
    config = PPOConfig(
        run_dir=run_dir,
        model=model,
        train=prompts,
        rewards={f"{__file__}:brief": 1.0},
        updates=2,
        episodes_per_update=8,
        max_new_tokens=8,
    )
    ppo.run(config, engine=Engine(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
