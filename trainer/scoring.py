"""The score of a response: a weighted sum of reward models and functions, each kept apart."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from . import distributed
from .config import UserError, require
from .data import end_token, packed, sums
from .models import Scorer, forward_all, load_scorer
from .rollout import Rollouts

RewardFunction = Callable[..., list[float]]


@dataclass
class RewardPart:
    """One term of the score."""

    name: str
    weight: float
    score: Callable[[Rollouts], Tensor]  # (S,) float32
    model: Scorer | None = None


def models_of(parts: Sequence[RewardPart]) -> list[Scorer]:
    """The models among them."""
    return [part.model for part in parts if part.model]


class Scaling:
    """Scales scores by the moments of all scores of the run so far, theirs included; then clips."""

    def __init__(self, kind: str, clip: float | None) -> None:
        """Takes a `reward_scaling` and a `reward_clip`."""
        self.kind, self.clip = kind, clip
        self.moments = torch.zeros(3, dtype=torch.float64)  # count, sum, sum of squares

    def __call__(self, scores: Tensor, counted: Tensor | None = None) -> Tensor:
        """Takes in those scores `(S,)` that count, and returns what is to be learned from."""
        if self.kind != "none":
            x = (scores if counted is None else scores[counted]).double().cpu()
            taken = distributed.total(torch.stack([torch.ones_like(x), x, x * x]).sum(1))
            self.moments = self.moments + taken
        if self.kind != "none" and self.moments[0] > 0:
            mean, square = (self.moments[1:] / self.moments[0]).tolist()
            variance = square - mean * mean
            std = variance**0.5 if variance > 1e-12 * square else 1.0  # else all are alike
            scores = (scores - mean * (self.kind == "mean_std")) / std
        return scores if self.clip is None else scores.clamp(-self.clip, self.clip)

    def state_dict(self) -> dict[str, Tensor]:
        """What changes while a run goes on."""
        return {"moments": self.moments}

    def load_state_dict(self, state_dict: dict[str, Tensor], /) -> None:
        """Goes on from there."""
        self.moments = state_dict["moments"]


def score(
    parts: Sequence[RewardPart],
    rollouts: Rollouts,
    missing_eos_penalty: float,
    scaling: Scaling | None = None,
    drop_truncated: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The score of each response, `(S,)`, and each part of it before its weight.

    The penalty is subtracted last: neither scaling nor clipping takes from it. A response without a
    token, or one that is dropped, does not move the scale: it will not be learned from.
    """
    each = {part.name: part.score(rollouts) for part in parts}
    total = torch.zeros(len(rollouts.prompts), device=rollouts.ids.device)
    total = sum((part.weight * each[part.name] for part in parts), total)
    if not total.isfinite().all():
        largest = ", ".join(f"{name} up to {_size(part)}" for name, part in each.items())
        raise UserError(f"the weighted sum of the rewards is not finite in float32: {largest}")
    if scaling is not None:
        counted = sums(rollouts.mask, rollouts.cu_seqlens) > 0  # (S,)
        total = scaling(total, counted & (rollouts.terminated | (not drop_truncated)))
    return total - missing_eos_penalty * (~rollouts.terminated).float(), each


def load_rewards(
    weights: Mapping[str, float],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    max_tokens_per_micro_batch: int,
) -> list[RewardPart]:
    """The parts of the score.

    Args:
        weights: of reward models' folders, `FILE.py:name` or `module:name`.
        tokenizer: the policy's; a reward model must have been made for its ids.
        device: for reward models.
        max_tokens_per_micro_batch: most tokens in one forward pass.
    """
    parts = []
    for (source, weight), name in zip(weights.items(), short_names([*weights]), strict=True):
        if is_function(source):
            function = load_function(source)
            parts.append(RewardPart(name, weight, _from_function(function, source, tokenizer)))
        else:
            model = load_scorer(source, tokenizer).requires_grad_(False).to(device)
            rule = _from_model(model, end_token(tokenizer), max_tokens_per_micro_batch)
            parts.append(RewardPart(name, weight, rule, model))
    return parts


def is_function(source: str) -> bool:
    """Whether a reward is a function; what exists as a folder is one, whatever its name."""
    return ":" in source and not os.path.isdir(source)


def short_names(sources: Sequence[str]) -> list[str]:
    """The shortest ends of rewards' paths that tell them apart: `f`, or `a.py:f` and `b.py:f`."""
    ends = [_ends(source) for source in sources]
    names = [end[0] for end in ends]
    for depth in range(1, max(map(len, ends), default=0)):
        twice = {name for name in names if names.count(name) > 1}
        pairs = zip(names, ends, strict=True)
        names = [end[min(depth, len(end) - 1)] if name in twice else name for name, end in pairs]
    require(len(set(names)) == len(names), f"two rewards are the same: {', '.join(sources)}")
    return names


def _ends(source: str) -> list[str]:
    """A reward's name, and what it is with one, two, … parts of its path before that."""
    where, colon, name = source.rpartition(":") if is_function(source) else (source, "", "")
    module = bool(colon) and not where.endswith(".py")
    path, separator = (where, ".") if module else (os.path.abspath(where), os.sep)
    parts = path.split(separator)
    joined = [separator.join(parts[-n:]) for n in range(1, len(parts) + 1)]
    return [name, *(f"{end}:{name}" for end in joined)] if colon else joined


def _size(part: Tensor) -> str:
    return f"{part.abs().max().item():.2g}"


def _from_model(
    scorer: Scorer, eos: int, max_tokens_per_micro_batch: int
) -> Callable[[Rollouts], Tensor]:
    def part(rollouts: Rollouts) -> Tensor:
        """The score at the last token; a text without the end that training had gets it."""
        whole = [ids if ids[-1] == eos else [*ids, eos] for ids in rollouts.sequences()]
        ids, cu_seqlens = packed(whole, rollouts.ids.device)
        return forward_all(scorer, max_tokens_per_micro_batch, cu_seqlens, ids)[cu_seqlens[1:] - 1]

    return part


def _from_function(
    function: RewardFunction, source: str, tokenizer: PreTrainedTokenizerBase
) -> Callable[[Rollouts], Tensor]:
    def part(rollouts: Rollouts) -> Tensor:
        """What the function says of the texts."""
        names = {name for prompt in rollouts.prompts for name in prompt.columns}
        rows = [copy.deepcopy((x.value, x.columns)) for x in rollouts.prompts]  # it may change them
        columns = {name: [row.get(name) for _, row in rows] for name in sorted(names)}
        completions = tokenizer.batch_decode(rollouts.responses(), skip_special_tokens=True)
        prompts, count = [value for value, _ in rows], len(rows)
        if prompts:  # a process may have none
            _require_fitting(function, source, columns)
        scores: Any = function(prompts, completions, **columns) if prompts else []
        came = f"{len(scores)} in a" if isinstance(scores, (list, tuple)) else "a"
        came = f"{came} {type(scores).__name__}: {repr(scores)[:60]}"
        must = f"{source} must return a list of {count} numbers, and returned {came}"
        require(isinstance(scores, (list, tuple)) and len(scores) == count, must)
        try:
            numbers = torch.tensor([float(score) for score in scores], dtype=torch.float32)
        except (TypeError, ValueError, OverflowError):
            raise UserError(must) from None
        wrong = (~numbers.isfinite()).nonzero().flatten().tolist()
        sentence = f"{source} returned a score that is not finite"
        require(not wrong, f"{sentence} in float32: {[scores[row] for row in wrong[:3]]}")
        return numbers.to(rollouts.ids.device)

    return part


def _require_fitting(function: RewardFunction, source: str, columns: Mapping[str, Any]) -> None:
    """Raises a `UserError` where a function wants columns that rows lack, or cannot take theirs."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of one that is built in
        return
    try:
        signature.bind([], [], **columns)
    except TypeError as error:
        found = ", ".join(columns) or "no others"
        raise UserError(
            f"{source}: {error}; it is called with a list of prompts, one of completions, and by "
            f"name the rows' other columns: {found}"
        ) from None


def source_file(source: str) -> Path:
    """The file that a reward function stands in; the interpreter for one that is built into it."""
    where, _, name = source.rpartition(":")
    if where.endswith(".py"):
        return Path(where)
    module = _imported(source)
    module = inspect.getmodule(getattr(module, name, None)) or module
    return Path(getattr(module, "__file__", None) or sys.executable)


def load_function(source: str) -> RewardFunction:
    """Imports `FILE.py:name` or `module:name`."""
    where, _, name = source.rpartition(":")
    function: Any = getattr(_imported(source), name, None)
    require(callable(function), f"the reward function {source}: {where} has no function {name!r}")
    return function


def _imported(source: str) -> ModuleType:
    """The module of a reward function; what it raises is told with its own line."""
    where = source.rpartition(":")[0]
    cannot = f"the reward function {source} cannot be imported"
    require(bool(where), f"{cannot}: it names no module")
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(f"reward {where}", where)
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise UserError(f"{cannot}: {error}") from None
    except (Exception, SystemExit) as error:  # whatever the file does as it is imported
        place = traceback.extract_tb(error.__traceback__)[-1]
        at = "" if isinstance(error, SyntaxError) else f" ({place.filename}, line {place.lineno})"
        raise UserError(f"{cannot}: {type(error).__name__}: {error}{at}") from error
