"""The reward model: a body with a scalar head learns which of two texts people prefer.

    python -m trainer reward --run_dir runs/reward --model runs/sft/model --train pairs.jsonl
    --heldout pairs2.jsonl

The loss is `-log sigmoid(score of the chosen - score of the rejected)`, each read at the end token.
Afterwards scores are put in units of the standard deviation of held-out texts, so that `kl_coef`
means the same for every reward model.

Source: Bradley and Terry 1952; Ouyang et al. 2022, equation 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from . import distributed
from .config import RewardConfig, require
from .data import Pair, micro_batches, packed, read_pairs
from .metrics import Metrics
from .models import Scorer, load_tokenizer, new_scorer
from .running import stage
from .supervised import Training, require_room, rows_of

NOTHING = Pair([0], [0])  # stands where a process has no pair, and counts for nothing


@stage
def run(config: RewardConfig, overwrite: bool = False, resume: bool = False) -> dict[str, float]:
    """Trains, writes the model to `run_dir/model`, and returns its accuracy on held-out pairs."""
    tokenizer, scorer = load_tokenizer(config.model), new_scorer(config.model)
    require_room(config, scorer.context_tokens)
    read = partial(read_pairs, tokenizer=tokenizer, max_tokens=config.max_tokens)
    train, heldout = rows_of(config, read)
    lengths = [max(map(len, pair)) for pair in train]
    training = Training("reward", config, scorer, tokenizer, lengths, overwrite, resume)
    scorer, device, most = training.model, training.device, config.max_tokens_per_micro_batch
    measure = partial(_measure, scorer, heldout, most, device)
    with closing(training.log):
        for step, rows in training.steps():
            metrics = Metrics()
            batch = [train[rows[i]] for i in distributed.share(len(rows))]
            cuts = micro_batches([sum(map(len, pair)) for pair in batch], most)
            for part, last in distributed.passes(cuts):
                pairs = [batch[row] for row in part] or [NOTHING]
                with distributed.step_pass(scorer, last):
                    margins = _margins(scorer, pairs, device)[: len(part)]  # (b,)
                    losses = -logsigmoid(margins)
                    (losses.sum() / len(rows) * distributed.size()).backward()
                metrics.add("loss", losses.detach())
                metrics.add("accuracy", margins > 0)
            training.step(metrics)
            line = f"loss {metrics.mean('loss'):.2f}, accuracy {metrics.mean('accuracy'):.2f}"
            training.end(step, metrics, line, measure)

        result = training.result()
        mean, std = result["score_mean"], result["score_std"]
        require(  # else no score could be told in its units, nor the model be loaded
            0 < std < math.inf,
            f"the scores of the held-out texts spread by {std}: the head has learned nothing, or "
            f"{config.heldout or config.train} has nothing to tell apart; no reward model is "
            "written",
        )
        record = {"score_mean": mean, "score_std": std, "reward_head_trained": True}
        scorer.model.config.update(record)
        training.save()
        right = f"right on {result['accuracy']:.1%} of {len(heldout)} held-out pairs"
        training.log.print(f"reward: {right}")
    return result


def _margins(scorer: Scorer, pairs: Sequence[Pair], device: torch.device) -> Tensor:
    """Score of the chosen less that of the rejected text, `(b,)`."""
    chosen, rejected = _scores(
        scorer, [*(p.chosen for p in pairs), *(p.rejected for p in pairs)], device
    ).chunk(2)
    return chosen - rejected


def _scores(scorer: Scorer, texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The number at the end token of each text, `(b,)`."""
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    ids, cu_seqlens = packed([texts[row] for row in order], device)
    places = torch.tensor(order, device=device).argsort()
    return scorer(ids, cu_seqlens)[cu_seqlens[1:] - 1][places]


@torch.inference_mode()
def _measure(
    scorer: Scorer, pairs: Sequence[Pair], max_tokens_per_micro_batch: int, device: torch.device
) -> dict[str, float]:
    """Loss and accuracy on held-out pairs, mean and standard deviation of their texts' scores.

    Each process scores a share of the pairs.
    """
    texts = [ids for i in distributed.share(len(pairs)) for ids in pairs[i]]
    mine = torch.empty(len(texts), device=device)
    for rows in micro_batches([len(ids) for ids in texts], max_tokens_per_micro_batch):
        mine[rows] = _scores(scorer, [texts[row] for row in rows], device)
    scores = torch.cat(distributed.gathered(mine.cpu()))  # (2 * pairs,)
    chosen, rejected = scores.view(-1, 2).unbind(1)
    return {
        "loss": -logsigmoid(chosen - rejected).mean().item(),
        "accuracy": (chosen > rejected).float().mean().item(),
        "score_mean": scores.mean().item(),
        "score_std": scores.std().item(),
    }
