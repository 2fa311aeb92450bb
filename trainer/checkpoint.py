"""What a run keeps: checkpoints that hold all of its state, models, JSON. None is ever half there.

    RUN_DIR/checkpoints/00000020/
        NAME.safetensors   a model's weights
        NAME.pt            optimiser, generator, data order, …, for `torch.load(weights_only=True)`
        state.json         step, config, hashes of what the run reads, length of metrics.jsonl
        manifest.json      size and SHA-256 of each of these

A checkpoint is written to a folder beside, synced to the disk and then renamed; the oldest goes
once the newest stands. So a folder with a number for its name is whole, unless something has
damaged it since: then it is passed over with a warning, and if no other is left, that is an error.

Of many processes the first writes, and the state is gathered whole for it, so that any number of
processes can go on with it. `torch.distributed.checkpoint`'s own files would hold pickles, which
nothing here loads; its gathering is used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
from argparse import ArgumentError
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

import numpy
import safetensors.torch
import torch
import yaml
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import distributed, running
from .config import (
    CheckFailed,
    PPOConfig,
    RewardConfig,
    SFTConfig,
    Stopped,
    UserError,
    require,
)
from .metrics import RunLog, as_json, console, finite, writing
from .optimise import steps_taken
from .sources import HUB, hub_sha256

Config = SFTConfig | RewardConfig | PPOConfig

# Options that change no number of a run, so that a run may go on with others.
FREE = (
    "run_dir tensorboard tracker parallel gradient_checkpointing offload_frozen "
    "keep_last_checkpoints save_every_steps save_every_updates".split()
)

# What a stage writes to its folder; the file `lock` stands there only while it runs.
OUTPUTS = (
    "config.yaml checkpoints metrics.jsonl model policy best critic samples.json summary.json "
    "events.* *.partial"
).split()


class Stateful(Protocol):
    """What can say its state, and take it back."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, strings, lists, tuples and dicts of them."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes back what `state_dict` said."""
        ...


class Chance:
    """The generators that a process has unasked, which a reward function may use."""

    def __init__(self, seed: int) -> None:
        """Seeds them all."""
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)  # CUDA's as well

    def state_dict(self) -> dict[str, Any]:
        """NumPy's numbers as a list: nothing here needs pickle."""
        state: Any = numpy.random.get_state(legacy=True)
        name, numbers, *rest = state
        return {
            "python": random.getstate(),
            "numpy": (name, numbers.tolist(), *rest),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all(),
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes back what `state_dict` said."""
        random.setstate(state_dict["python"])
        numpy.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        torch.cuda.set_rng_state_all(state_dict["cuda"])


class Checkpoints:
    """The checkpoints of a run: writes those that are due, and brings the run back from one."""

    def __init__(
        self,
        config: Config,
        inputs: Mapping[str, Path | str],
        parts: Mapping[str, nn.Module | torch.Generator | Stateful],
    ) -> None:
        """Takes what a run consists of.

        Args:
            config: its options.
            inputs: data, files and model folders that it reads. They are not kept, but must be the
                same when it goes on.
            parts: all that changes while it runs.
        """
        self.config, self.run_dir = config, Path(config.run_dir)
        self.folder = self.run_dir / "checkpoints"
        self.parts = {**parts, "chance": Chance(config.seed)}
        self._paths, self._inputs = inputs, {name: fingerprint(x) for name, x in inputs.items()}

    def begin(self, overwrite: bool, resume: bool) -> int:
        """Makes the folder of a new run or brings a run back.

        Returns:
            The step after which the run goes on; 0 for a new one.
        """
        newest = distributed.from_first(lambda: self._start(overwrite, resume))
        running.underway()
        if newest is None:
            return 0
        state = self._load(newest)
        distributed.from_first(lambda: self._cut(newest, state))
        step, config = state["step"], self.config
        over = config.finished_after(step)
        told = "is finished: it writes its results" if over else f"goes on after step {step}"
        console.print(f"{self.run_dir} {told}")
        self._check_learned(step)
        return step

    def _check_learned(self, step: int) -> None:
        """After its last step a run must have learned something."""
        if self.config.finished_after(step):
            for name, part in self.parts.items():
                if isinstance(part, Optimizer) and not steps_taken(part):
                    raise CheckFailed(
                        f"{self.run_dir} has learned nothing: its {name} took no step, each had "
                        "nothing to learn from or a gradient that is not finite (skipped_steps, "
                        "grad_norm in metrics.jsonl); the likely cause: scores that are far too "
                        "large, responses that are all cut and dropped, too high a learning rate"
                    )

    def _start(self, overwrite: bool, resume: bool) -> Path | None:
        """The checkpoint to go on from; without one the run folder is as that of a new run."""
        if not resume:
            new_run(self.config, overwrite, self._paths)
            return None
        newest = newest_whole(self.folder)
        for left in self.folder.glob("*.partial"):
            shutil.rmtree(left)
        if newest is None:
            (self.run_dir / "metrics.jsonl").unlink(missing_ok=True)
            console.print(f"{self.run_dir} has no checkpoint yet: it begins again")
        return newest

    def _cut(self, newest: Path, state: dict[str, Any]) -> None:
        """Takes away what was written after the checkpoint."""
        metrics = self.run_dir / "metrics.jsonl"
        written, length = metrics.stat().st_size if metrics.exists() else 0, state["metrics_bytes"]
        require(written >= length, f"{metrics} has {written} bytes, {newest} knows of {length}")
        os.truncate(metrics, length)
        for damaged in (x for x in finished(self.folder) if x > newest):
            shutil.rmtree(damaged)  # else it would count as one that is kept

    def after(self, step: int, log: RunLog) -> None:
        """Ends a step: writes a checkpoint where one is due, and stops where a signal asks for it.

        Of the checkpoints before, those that are too many are removed.
        """
        signum = running.heard()
        if self.config.saves_after(step) or signum:
            self._save(step, log)
        if signum:
            distributed.gathered(None)  # none ends while the first is still writing
            resume = running.to_resume(self.run_dir)
            raise Stopped(signum, f"{self.run_dir} stopped after step {step}: `{resume}` goes on")
        self._check_learned(step)

    def _save(self, step: int, log: RunLog) -> None:
        if not distributed.first():
            for part in self.parts.values():
                _state(part)  # the first process waits for this one's share of it
            return
        folder = self.folder / f"{step:08d}"
        with writing(folder):
            state = {
                "step": step,
                "metrics_bytes": log.sync(),
                "config": dataclasses.asdict(self.config),
                "inputs": self._inputs,
            }
        with staged(folder) as aside:
            for name, part in self.parts.items():
                _write(_file(aside, name, part), part)
            _write_text(aside / "state.json", as_json(state, indent=2) + "\n")
            manifest = {path.name: [path.stat().st_size, sha256(path)] for path in _files(aside)}
            _write_text(aside / "manifest.json", as_json(manifest, indent=2) + "\n")
        for old in finished(self.folder)[: -self.config.keep_last_checkpoints]:
            shutil.rmtree(old.rename(old.with_name(old.name + ".partial")))

    def _load(self, folder: Path) -> dict[str, Any]:
        """Brings all parts to where they were; anything that is missing or other is an error."""
        state = read_json(folder / "state.json")
        now, then = finite(dataclasses.asdict(self.config)), state["config"]
        names = sorted((now.keys() | then.keys()).difference(FREE))
        changed = ", ".join(name for name in names if now.get(name) != then.get(name))
        require(not changed, f"{changed} in config.yaml: changed since {folder} was written")
        for name, path in self._paths.items():
            require(
                state["inputs"].get(name) == self._inputs[name],
                f"the {name} ({path}) has changed since {folder} was written",
            )
        files = {name: _file(folder, name, part) for name, part in self.parts.items()}
        for path in files.values():
            require(path.is_file(), f"{path} is missing")
        for name, part in self.parts.items():
            _read(files[name], part)
        return state


def _file(folder: Path, name: str, part: object) -> Path:
    return folder / f"{name}.{'safetensors' if isinstance(part, nn.Module) else 'pt'}"


def _write(path: Path, part: nn.Module | torch.Generator | Stateful) -> None:
    if isinstance(part, nn.Module):
        safetensors.torch.save_file(_state(part), str(path))
    else:
        torch.save(_state(part), path)


def _state(part: nn.Module | torch.Generator | Stateful) -> Any:
    if isinstance(part, nn.Module):
        return distributed.model_state(part)
    if isinstance(part, Optimizer):
        return distributed.optimizer_state(part)
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()


def _read(path: Path, part: nn.Module | torch.Generator | Stateful) -> None:
    if isinstance(part, nn.Module):
        distributed.load_model_state(part, safetensors.torch.load_file(path))
        return
    state = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(part, torch.Generator):
        part.set_state(state)
    elif isinstance(part, Optimizer):
        distributed.load_optimizer_state(part, state)
    else:
        part.load_state_dict(state)


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint that is as it was written; none where none was ever finished."""
    damages = []
    for checkpoint in reversed(finished(folder)):
        damage = damage_of(checkpoint)
        if not damage:
            return checkpoint
        damages.append(damage)
        console.print(f"warning: {checkpoint} is passed over: {damage}")
    require(not damages, f"no checkpoint in {folder} is whole: {'; '.join(damages)}")
    return None


def finished(folder: Path) -> list[Path]:
    """The checkpoints that were finished, oldest first."""
    return sorted(path for path in folder.glob("*") if path.name.isdigit())


def damage_of(checkpoint: Path) -> str:
    """What is not as it was written; nothing if all is."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_bytes())
        for name, (size, digest) in manifest.items():
            path = checkpoint / name
            if path.stat().st_size != size:
                return f"{path} has {path.stat().st_size} bytes, {size} were written"
            if sha256(path) != digest:
                return f"{path} has other bytes than were written"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, TypeError, AttributeError):
        return f"{checkpoint / 'manifest.json'} cannot be read"
    return ""


def fingerprint(source: Path | str) -> str:
    """SHA-256 of a file, of all files of a model's folder and their names, or of hub data."""
    if str(source).startswith(HUB):
        return hub_sha256(str(source))
    folder = Path(source)
    if not folder.is_dir():
        return sha256(folder)
    names = "".join(f"{path.name} {sha256(path)}\n" for path in _files(folder))
    return hashlib.sha256(names.encode()).hexdigest()


def sha256(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def new_run(config: Config, overwrite: bool, inputs: Mapping[str, Path | str]) -> None:
    """Makes a stage's run folder; a run that it holds is replaced only if asked for.

    Nothing is removed but what a run has written, and nothing that this one reads.
    """
    run_dir = Path(config.run_dir)
    spare(run_dir, inputs)
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    found = [path for path in sorted(run_dir.iterdir()) if is_output(path.name)]
    if found:
        try:
            read_config(config.run_dir)
        except UserError as error:
            names = ", ".join(path.name for path in found)
            raise UserError(
                f"{run_dir} has {names}, of a name that a run would write over, and is no run's "
                f"folder ({error}): name another run_dir"
            ) from None
    free = overwrite or not found
    require(free, f"{run_dir} holds a run already: name another run_dir, or say --overwrite")
    path = run_dir / "config.yaml"  # stays until it is replaced: what it stands for may be removed
    with writing(run_dir):
        for old in found:
            if old != path:
                remove(old)
        _write_text(path, yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))


def is_output(name: str) -> bool:
    """Whether a stage writes something of this name to its folder."""
    return any(fnmatch(name, pattern) for pattern in OUTPUTS)


def spare(run_dir: Path, inputs: Mapping[str, Path | str]) -> None:
    """Raises a `UserError` where what a run reads is part of what it removes or writes over.

    Both by the paths as given and by those that links lead to.
    """
    for name, source in inputs.items():
        if str(source).startswith(HUB):
            continue
        for of in (os.path.abspath, os.path.realpath):
            for place in (os.path.abspath(run_dir), os.path.realpath(run_dir)):
                inner = os.path.relpath(of(source), place).split(os.sep)[0]
                theirs = is_output(inner) or inner in ("lock", ".")
                require(
                    not theirs,
                    f"the {name} ({source}) is part of the run that {run_dir} holds, which would "
                    "be removed or written over: name another run_dir",
                )


def read_config(run_dir: str) -> Config:
    """The configuration of a run, of the stage that has its options."""
    path = Path(run_dir, "config.yaml")
    require(os.path.isfile(path), f"{run_dir} is not the folder of a run: it has no config.yaml")
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    for stage in (SFTConfig, RewardConfig, PPOConfig):
        if isinstance(options, dict) and set(options) <= {
            x.name for x in dataclasses.fields(stage)
        }:
            return _typed(stage, options, path)
    raise UserError(f"{path} does not have the options of any stage")


def _typed(stage: type[Config], options: dict[str, Any], path: Path) -> Config:
    """Options as the command line would take them, each of its type."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(stage)
    try:
        given = parser.instantiate(parser.parse_object(options))
    except ArgumentError as error:
        raise UserError(f"{path}: {error}") from None
    return stage(**{x.name: given[x.name] for x in dataclasses.fields(stage)})


def result_of(run_dir: str, name: str) -> Path:
    """The folder of the model that a run has written at its end; an error before."""
    folder = Path(run_dir) / name
    resume = running.to_resume(run_dir)
    require(folder.is_dir(), f"{run_dir} is not finished: go on with `{resume}`")
    return folder


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes its name once all of it is on the disk."""
    aside = folder.with_name(folder.name + ".partial")
    with writing(folder):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            yield aside
            for path in (*aside.rglob("*"), aside):
                _sync(path)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)  # a full disk needs the room
            raise
        if os.path.lexists(folder):
            remove(folder)
        aside.rename(folder)
        _sync(folder.parent)


def remove(path: Path) -> None:
    """Removes a file or folder; of a link the link alone, never what it leads to."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def save_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Writes a plain transformers folder. All processes must call it, the first writes.

    `state` are weights of the model that it no longer has, as `distributed.model_state` gave them.
    """
    state = distributed.model_state(model) if state is None else state
    if not distributed.first():
        return
    with staged(folder) as aside:
        model.save_pretrained(aside, state_dict=distributed.with_ties(model, state))
        tokenizer.save_pretrained(aside)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON, aside and then renamed; of many processes the first does."""
    if not distributed.first():
        return
    with writing(path):
        _write_text(path, as_json(content, indent=2) + "\n")


def _write_text(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".partial")
    try:
        aside.write_text(text, encoding="utf-8", errors="backslashreplace")  # half a surrogate pair
        _sync(aside)
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    """What a JSON file of a run says; an error where there is none."""
    require(path.is_file(), f"{path} is missing: is {path.parent} the folder of a finished run?")
    return json.loads(path.read_text(encoding="utf-8"))
