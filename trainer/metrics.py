"""Numbers of a run: a (sum, count) each until the end, then in metrics.jsonl and on one line.

So none is averaged over padding, and none twice: a mean over micro-batches is the mean over their
tokens.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unicodedata import category

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from safetensors import SafetensorError
from torch import Tensor

from . import distributed
from .config import Unwritten

Number = Tensor | float | int

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a full disk says

VARYING = ("time/", "memory/")  # begin the names of metrics that two runs do not have alike

console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


class Metrics:
    """Named means, each a sum and a count until it is read."""

    def __init__(self) -> None:
        """Begins with none."""
        self._pairs: dict[str, list[Number]] = {}

    def add(self, name: str, values: Number | Sequence[float], mask: Tensor | None = None) -> None:
        """Takes in values, those that `mask` leaves."""
        values = torch.as_tensor(values, dtype=torch.float64)
        values = values if mask is None else values[mask]
        self.add_sum(name, values.sum(), values.numel())

    def add_sum(self, name: str, total: Number, count: Number) -> None:
        """Takes in a sum of `count` values."""
        pair = self._pairs.setdefault(name, [0.0, 0.0])
        pair[0], pair[1] = pair[0] + total, pair[1] + count

    def add_pairs(self, name: str, x: Tensor, y: Tensor, mask: Tensor | None = None) -> None:
        """Takes in the moments that `correlation` and `explained` are made of."""
        x, y = x.double(), y.double()
        for key, values in {"x": x, "y": y, "xx": x * x, "yy": y * y, "xy": x * y}.items():
            self.add(f"_{name}_{key}", values, mask)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Takes in the seconds that a block takes."""
        began = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - began)

    def across_processes(self) -> None:
        """Adds up what all processes took in; a name may be known to some of them alone."""
        mine = {name: (float(total), float(count)) for name, (total, count) in self._pairs.items()}
        self._pairs = {}
        for pairs in distributed.gathered(mine):
            for name, pair in pairs.items():
                self.add_sum(name, *pair)

    def take(self, others: Metrics) -> None:
        """Takes in all that others took in."""
        for name, pair in others._pairs.items():
            self.add_sum(name, *pair)

    def total(self, name: str) -> float:
        """The sum alone."""
        return float(self._pairs[name][0])

    def mean(self, name: str) -> float:
        """Sum over count; NaN of nothing."""
        total, count = self._pairs.get(name, (0.0, 0.0))
        return float(total) / float(count) if count else math.nan

    def correlation(self, name: str) -> float:
        """Pearson's, of what `add_pairs` took in; 0 where one of the two does not vary."""
        x, y, xx, yy, xy = (self.mean(f"_{name}_{key}") for key in ("x", "y", "xx", "yy", "xy"))
        scale = max(xx - x * x, 0.0) * max(yy - y * y, 0.0)
        return (xy - x * y) / math.sqrt(scale) if scale > 0 else 0.0

    def explained(self, name: str) -> float:
        """Share of the variance of `y` that `x` explains, of what `add_pairs` took in."""
        x, y, xx, yy, xy = (self.mean(f"_{name}_{key}") for key in ("x", "y", "xx", "yy", "xy"))
        variance, rest = yy - y * y, (xx - 2 * xy + yy) - (x - y) ** 2
        return 1 - rest / variance if variance > 0 else 0.0

    def means(self) -> dict[str, float]:
        """All means by name."""
        return {name: self.mean(name) for name in self._pairs if not name.startswith("_")}


def plain(text: str) -> Text:
    """Text as it stands: no markup is read in it, control characters are shown and not obeyed."""
    shown = [x if x in "\n\t" or category(x) != "Cc" else ascii(x)[1:-1] for x in text]
    return Text("".join(shown))


def as_json(content: Any, indent: int | None = None) -> str:
    """Content as JSON, which knows no NaN and no infinity: a mean of nothing is null."""
    return json.dumps(finite(content), indent=indent, ensure_ascii=False, allow_nan=False)


def finite(content: Any) -> Any:
    """Content with None in place of each number that JSON lacks."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    return [finite(x) for x in content] if isinstance(content, (list, tuple)) else content


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, a file or folder is written; what the disk does not take is told in one sentence.

    torch and safetensors raise errors of their own, and do not say why.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        why = f"is the disk full? ({error})"
        if isinstance(error, OSError) and error.strerror and error.errno not in FULL:
            why = error.strerror
        raise Unwritten(f"{path} could not be written: {why}") from error


def distinct(responses: Sequence[Sequence[int]], n: int) -> tuple[int, int]:
    """How many different n-grams responses have, and how many in all."""
    grams = [tuple(ids[i : i + n]) for ids in responses for i in range(len(ids) - n + 1)]
    return len(set(grams)), len(grams)


def repeated(responses: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many pairs of neighbours stood in the same response before, and how many there are."""
    counts = [distinct([ids], 2) for ids in responses]
    return sum(total - different for different, total in counts), sum(total for _, total in counts)


class RunLog:
    """A stage's metrics.jsonl (and TensorBoard, and a tracker), and its progress.

    On a terminal that is one line, rewritten with each step; elsewhere ten lines in all.
    """

    def __init__(
        self,
        run_dir: Path,
        stage: str,
        steps: int,
        tensorboard: bool,
        done: int = 0,
        tracker: str | None = None,
    ) -> None:
        """Opens the files of a stage of so many steps, of which some are done.

        Of many processes the first writes.
        """
        self.stage, self.steps, self.done = stage, steps, done
        self._path = run_dir / "metrics.jsonl" if distributed.first() else Path(os.devnull)
        with writing(self._path):
            self._file = self._path.open("a+", encoding="utf-8", errors="backslashreplace")
        self._others: dict[str, Any] = {}  # those that are shown the same numbers
        if tensorboard and distributed.first():
            self._others["tensorboard"] = partial(_Board, run_dir, done)
        if tracker and distributed.first():
            self._others[tracker] = partial(_tracked, tracker, run_dir)
        self._tell(lambda name, begin: self._others.update({name: begin()}))
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal or console.quiet,
        )
        self._task = self._bar.add_task(stage, total=steps, completed=done)
        self._bar.start()
        self._began = time.perf_counter()

    def write(self, step: int, row: dict[str, float], line: str) -> None:
        """Takes in the metrics of a step and what the progress line is to say of it."""
        with writing(self._path):
            self._file.write(as_json({"stage": self.stage, "step": step, **row}) + "\n")
            self._file.flush()
        known = {name: value for name, value in row.items() if math.isfinite(value)}
        self._tell(lambda _, other: other.log(known, step=step))
        self._bar.update(self._task, completed=step, description=f"{self.stage}: {line}")
        if not console.is_terminal and step % max(self.steps // 10, 1) == 0:
            seconds = (time.perf_counter() - self._began) / (step - self.done)  # a step
            left = seconds * (self.steps - step)
            self.print(f"{self.stage} {step}/{self.steps}: {line}, {left:.0f} s left")

    def sync(self) -> int:
        """Waits until metrics.jsonl is on the disk, and returns its bytes."""
        self._tell(lambda _, other: other.flush() if isinstance(other, _Board) else None)
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def last(self) -> dict[str, float | None]:
        """The metrics of the last step, as metrics.jsonl has them; known to who writes it."""
        if not distributed.first():
            return {}
        self._file.seek(0)
        *_, line = self._file
        return {k: v for k, v in json.loads(line).items() if k not in ("stage", "step")}

    def print(self, text: str) -> None:
        """Prints text as it is, above the progress line."""
        console.print(plain(text))

    def close(self) -> None:
        """Ends the line and closes the files."""
        self._bar.stop()
        with suppress(OSError):  # of a write that has failed, and was told
            self._file.close()
        self._tell(lambda _, other: other.finish())

    def _tell(self, tell: Callable[[str, Any], object]) -> None:
        """Turns to TensorBoard and the tracker; of one that fails a warning is all that is left."""
        for name, other in list(self._others.items()):
            try:
                tell(name, other)
            except Exception as error:  # a library's own, the network's, the disk's
                del self._others[name]
                why = f"{type(error).__name__}: {error}"
                self.print(f"warning: {name} gets no more of this run, as it failed ({why})")


class _Board:
    """TensorBoard, as if it were a tracker."""

    def __init__(self, run_dir: Path, done: int) -> None:
        """Goes on after the steps that are done: what a cut run wrote behind them is not shown."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_dir), purge_step=done + 1)
        self.flush = self._writer.flush
        self.finish = self._writer.close

    def log(self, metrics: dict[str, float], step: int) -> None:
        """A point on each curve."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)


def _tracked(tracker: str, run_dir: Path) -> Any:
    """A run of wandb or trackio, which are alike in all that is used here.

    A resumed run is another one there, in the same group.
    """
    config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    names = {"project": "ppokern", "name": run_dir.name, "group": str(run_dir)}
    return importlib.import_module(tracker).init(**names, config=config)
