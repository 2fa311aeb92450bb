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

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from . import distributed
from .checkpoint import Checkpoints, save_model, write_json
from .config import RewardConfig, require
from .data import Pair, length_batches, micro_batches, packed, read_pairs
from .metrics import Metrics, RunLog
from .models import Scorer, equip, load_tokenizer, new_scorer, pick_device
from .optimise import adamw, clipped_step, schedule

NOTHING = Pair([0], [0])  # stands where a process has no pair, and counts for nothing


def run(config: RewardConfig, overwrite: bool = False, resume: bool = False) -> dict[str, float]:
    """Trains, writes the model to `run_dir/model`, and returns its accuracy on held-out pairs."""
    config.check()
    tokenizer, scorer = load_tokenizer(config.model), new_scorer(config.model)
    room = scorer.context_tokens
    require(
        config.max_tokens <= room, f"max_tokens is {config.max_tokens}, the model's context {room}"
    )
    train = read_pairs(config.train, tokenizer, config.max_tokens)
    heldout = read_pairs(config.heldout, tokenizer, config.max_tokens)
    device = pick_device()
    equip(config, [scorer.to(device).eval()])
    scorer = distributed.wrap(scorer, config.parallel)
    optimizer = adamw(scorer, config.learning_rate, config.weight_decay)
    batches = length_batches(
        [max(map(len, pair)) for pair in train], config.pairs_per_step, config.seed
    )

    inputs = {"data": config.train, "held-out data": config.heldout, "model": config.model}
    parts = {"model": scorer, "optimizer": optimizer, "batches": batches}
    checkpoints = Checkpoints(config, inputs, parts)
    done = checkpoints.begin(overwrite, resume)
    run_dir = checkpoints.run_dir
    log = RunLog(run_dir, "reward", config.steps, config.tensorboard, done, config.tracker)
    with closing(log):
        for step, rows in zip(range(done + 1, config.steps + 1), batches, strict=False):
            schedule(optimizer, config, step)
            metrics = Metrics()
            batch = [train[rows[i]] for i in distributed.share(len(rows))]
            tokens = [sum(map(len, pair)) for pair in batch]
            cuts = micro_batches(tokens, config.max_tokens_per_micro_batch)
            for part, last in distributed.passes(cuts):
                pairs = [batch[row] for row in part] or [NOTHING]
                with distributed.step_pass(scorer, last):
                    margins = _margins(scorer, pairs, device)[: len(part)]  # (b,)
                    losses = -logsigmoid(margins)
                    (losses.sum() / len(rows) * distributed.size()).backward()
                metrics.add("loss", losses.detach())
                metrics.add("accuracy", margins > 0)
            (norm,), stepped = clipped_step([(scorer, optimizer)], config.max_grad_norm)
            metrics.add("grad_norm", norm)
            metrics.add("skipped_steps", not stepped)
            metrics.across_processes()
            line = f"loss {metrics.mean('loss'):.2f}, accuracy {metrics.mean('accuracy'):.2f}"
            log.write(step, metrics.means(), line)
            checkpoints.after(step, log)

        with distributed.whole(scorer):
            result = _measure(scorer, heldout, config.max_tokens_per_micro_batch, device)
        log.print(f"reward: right on {result['accuracy']:.1%} of {len(heldout)} held-out pairs")
    spread = result["score_std"]
    require(  # else no score could be told in its units, nor the model be loaded
        0 < spread < math.inf,
        f"the scores of the held-out texts spread by {spread}: the head has learned nothing, or "
        f"{config.heldout} has nothing to tell apart; no reward model is written",
    )
    record = {
        "score_mean": result["score_mean"],
        "score_std": result["score_std"],
        "reward_head_trained": True,
    }
    scorer.model.config.update(record)
    save_model(run_dir / "model", scorer.model, tokenizer)
    write_json(run_dir / "summary.json", result)
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
    """Accuracy on pairs, and mean and standard deviation of the scores of their texts."""
    texts = [ids for pair in pairs for ids in pair]
    scores = torch.empty(len(texts), device=device)
    for rows in micro_batches([len(ids) for ids in texts], max_tokens_per_micro_batch):
        scores[rows] = _scores(scorer, [texts[row] for row in rows], device)
    chosen, rejected = scores.view(-1, 2).unbind(1)
    return {
        "accuracy": (chosen > rejected).float().mean().item(),
        "score_mean": scores.mean().item(),
        "score_std": scores.std().item(),
    }
