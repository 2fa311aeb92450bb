"""What the loops of SFT and reward model have in common.

Rows to learn from and to measure on, the optimiser's step, measurements, checkpoints, and the model
that is written in the end: of all that were measured the one with the lowest held-out loss. The
last step is always measured; if no other was (`evaluate_every_steps` is null), it is the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import distributed
from .checkpoint import Checkpoints, save_model, write_json
from .config import CheckFailed, RewardConfig, SFTConfig, Supervised, require
from .data import epoch_batches, length_batches, shuffled
from .lora import adapt, adapter_of, merged
from .metrics import Metrics, RunLog, console
from .models import Policy, Scorer, equip, load_policy, new_scorer, pick_device
from .optimise import adamw, clipped_step, schedule

Row = TypeVar("Row")


def rows_of(config: Supervised, read: Callable[[str], list[Row]]) -> tuple[list[Row], list[Row]]:
    """Rows to learn from and rows to measure on; without `heldout` a tenth of `train` is held out.

    Which rows these are is drawn by the seed, so a run that goes on holds out the same.
    """
    rows = read(config.train)
    if config.heldout:
        return rows, read(config.heldout)
    require(len(rows) > 1, f"{config.train} has one row, so none can be held out: name a heldout")
    held, order = max(len(rows) // 10, 1), shuffled(len(rows), config.seed)
    drawn = {next(order) for _ in range(held)}
    console.print(
        f"{config.train}: {held} of {len(rows)} rows, drawn by the seed, are held out to measure "
        "on: no heldout was given"
    )
    return [x for i, x in enumerate(rows) if i not in drawn], [rows[i] for i in sorted(drawn)]


def require_room(config: Supervised, context_tokens: int) -> None:
    """Raises a `UserError` unless a model can read the longest sequences that are kept."""
    sentence = f"max_tokens is {config.max_tokens}, the model's context {context_tokens}"
    require(config.max_tokens <= context_tokens, sentence)


class Best:
    """The measurement with the lowest loss so far, and the weights that had it."""

    def __init__(self) -> None:
        """Begins with none."""
        self.step, self.found = 0, dict[str, float]()
        self.weights: dict[str, Tensor] = {}  # none of the last step: they are the model's

    def state_dict(self) -> dict[str, Any]:
        """What changes while a run goes on."""
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Goes on from there."""
        vars(self).update(state_dict)


class Training:
    """A run of one of the two stages."""

    def __init__(
        self,
        stage: str,
        config: SFTConfig | RewardConfig,
        model: Policy | Scorer,
        tokenizer: PreTrainedTokenizerBase,
        lengths: Sequence[int],
        overwrite: bool,
        resume: bool,
    ) -> None:
        """Makes the run's folder, or brings the run back.

        Args:
            stage: its name.
            config: its options.
            model: as it is when learning begins; from here on `self.model` is to be called.
            tokenizer: written beside it.
            lengths: tokens of each row to learn from.
            overwrite: whether a run that is there is replaced.
            resume: whether it is gone on with.
        """
        self.stage, self.tokenizer, self.device = stage, tokenizer, pick_device()
        self.config = config = config.counted(len(lengths))
        self.inner = _inner(model)
        self.fresh = load_policy if isinstance(model, Policy) else new_scorer
        if config.lora_rank:
            adapt(self.inner, *self._adapter())
        equip(config, [model.to(self.device).eval()])
        self.model: Any = distributed.wrap(model, config.parallel)
        self.learned = adapter_of(self.inner) if config.lora_rank else self.inner
        self.optimizer = adamw(self.model, config.learning_rate, config.weight_decay)
        draw = length_batches if config.epochs is None else epoch_batches
        self.batches, self.best = draw(lengths, config.rows_per_step, config.seed), Best()

        inputs = {"data": config.train, "held-out data": config.heldout, "model": config.model}
        parts = {
            "model": self.learned if config.lora_rank else self.model,
            "optimizer": self.optimizer,
            "batches": self.batches,
            "best": self.best,
        }
        self.checkpoints = Checkpoints(config, {x: y for x, y in inputs.items() if y}, parts)
        self.done = self.checkpoints.begin(overwrite, resume)
        run_dir, shown = self.checkpoints.run_dir, (config.tensorboard, self.done, config.tracker)
        self.log = RunLog(run_dir, stage, config.steps, *shown)

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """The steps that are left, each with its rows."""
        left = range(self.done + 1, self.config.steps + 1)
        for step, rows in zip(left, self.batches, strict=False):
            schedule(self.optimizer, self.config, step)
            yield step, rows

    def step(self, metrics: Metrics) -> None:
        """Moves the weights by their gradients, and makes the step's metrics whole."""
        rate = self.optimizer.param_groups[0]["lr"]
        (norm,), stepped = clipped_step([(self.model, self.optimizer)], self.config.max_grad_norm)
        metrics.add("grad_norm", norm)
        metrics.add("learning_rate", rate)
        metrics.add("skipped_steps", not stepped)
        metrics.across_processes()

    def end(
        self, step: int, metrics: Metrics, line: str, measure: Callable[[], dict[str, float]]
    ) -> None:
        """Measures where it is due, writes the step's metrics, and a checkpoint where that is due.

        Args:
            step: which one.
            metrics: whole, as `step` leaves them.
            line: what the progress line is to say.
            measure: finds the held-out `loss` and what else there is, the same in all processes.
        """
        if self.config.evaluates_after(step):
            with metrics.timed("time/evaluation"), distributed.whole(self.model):
                found = measure()
            self._keep(step, found)
            for name, value in found.items():
                metrics.add(f"eval/{name}", value)
            metrics.add("eval/best", self.best.found.get("loss", math.nan))
        self.log.write(step, metrics.means(), line)
        self.checkpoints.after(step, self.log)

    def _keep(self, step: int, found: dict[str, float]) -> None:
        """Takes the model for the best if it is: a loss that is no number is not below another."""
        if not found["loss"] < self.best.found.get("loss", math.inf):
            return
        self.best.step, self.best.found, self.best.weights = step, found, {}
        if step < self.config.steps:
            state = distributed.model_state(self.learned)
            self.best.weights = {name: x.to("cpu", copy=True) for name, x in state.items()}

    def result(self) -> dict[str, float]:
        """What was found of the model that is to be written."""
        if not self.best.found:
            raise CheckFailed(
                f"{self.checkpoints.run_dir} has learned nothing: its held-out loss was never a "
                "finite number; the likely cause: a learning_rate that is too high"
            )
        return self.best.found

    def save(self) -> dict[str, float]:
        """Writes the best model to `run_dir/model`, its `result` to summary.json; returns that."""
        result, step, steps = self.result(), self.best.step, self.config.steps
        folder, state = self.checkpoints.run_dir / "model", self.best.weights
        if step == steps:
            state = distributed.model_state(self.learned)
        else:
            self.log.print(f"{self.stage}: the best model, that of step {step} of {steps}, is kept")
        if not self.config.lora_rank:
            save_model(folder, self.inner, self.tokenizer, state)
        elif distributed.first():
            whole = merged(_inner(self.fresh(self.config.model)), state, *self._adapter())
            whole.config = self.inner.config
            save_model(folder, whole, self.tokenizer)
        write_json(self.checkpoints.run_dir / "summary.json", result)
        return result

    def _adapter(self) -> tuple[str, int, float, int]:
        config = self.config
        assert config.lora_rank is not None
        return config.model, config.lora_rank, config.lora_alpha, config.seed


def _inner(model: Policy | Scorer) -> PreTrainedModel:
    return model.lm if isinstance(model, Policy) else model.model
