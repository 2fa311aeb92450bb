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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy
import safetensors.torch
import torch
import yaml
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import distributed
from .config import PPOConfig, RewardConfig, Scratch, SFTConfig, UserError, require
from .metrics import RunLog, console
from .sources import HUB, hub_sha256

Config = SFTConfig | RewardConfig | PPOConfig

# Options that change no number of a run, so that a run may go on with others.
FREE = (
    "run_dir tensorboard tracker parallel gradient_checkpointing offload_frozen "
    "keep_last_checkpoints save_every_steps save_every_updates".split()
)

# What a stage writes besides config.yaml.
OUTPUTS = (
    "checkpoints metrics.jsonl model policy best critic samples.json summary.json events.*".split()
)


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
        if newest is None:
            return 0
        state = self._load(newest)
        distributed.from_first(lambda: self._cut(newest, state))
        step, config = state["step"], self.config
        last = config.updates if isinstance(config, PPOConfig) else config.steps
        told = f"goes on after step {step}" if step < last else "is finished: it writes its results"
        console.print(f"{self.run_dir} {told}")
        return state["step"]

    def _start(self, overwrite: bool, resume: bool) -> Path | None:
        """The checkpoint to go on from; without one the run folder is as that of a new run."""
        if not resume:
            new_run(self.config, overwrite)
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
        """Writes a checkpoint where one is due, then removes those that are too many."""
        if not self.config.saves_after(step):
            return
        if not distributed.first():
            for part in self.parts.values():
                _state(part)  # the first process waits for this one's share of it
            return
        state = {
            "step": step,
            "metrics_bytes": log.sync(),
            "config": dataclasses.asdict(self.config),
            "inputs": self._inputs,
        }
        folder = self.folder / f"{step:08d}"
        try:
            with staged(folder) as aside:
                for name, part in self.parts.items():
                    _write(_file(aside, name, part), part)
                write_json(aside / "state.json", state)
                manifest = {
                    path.name: [path.stat().st_size, sha256(path)] for path in _files(aside)
                }
                write_json(aside / "manifest.json", manifest)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise UserError(  # torch does not say why
                f"{folder} could not be written: is the disk full? ({error}) Once there is room, "
                f"`resume {self.run_dir}` goes on from the checkpoint before"
            ) from error
        for old in finished(self.folder)[: -self.config.keep_last_checkpoints]:
            shutil.rmtree(old.rename(old.with_name(old.name + ".partial")))

    def _load(self, folder: Path) -> dict[str, Any]:
        """Brings all parts to where they were; anything that is missing or other is an error."""
        state = read_json(folder / "state.json")
        now, then = json.loads(json.dumps(dataclasses.asdict(self.config))), state["config"]
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


def new_run(config: Config, overwrite: bool) -> None:
    """Makes a stage's run folder; a run that it holds is replaced only if asked for."""
    run_dir = Path(config.run_dir)
    free = overwrite or not (run_dir / "metrics.jsonl").exists()
    require(free, f"{run_dir} holds a run already: name another run_dir, or say --overwrite")
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "config.yaml"
    path.unlink(missing_ok=True)  # first of all: without it nothing of the old run is gone on with
    for old in (path for pattern in OUTPUTS for path in run_dir.glob(pattern)):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    _write_text(path, yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))


def read_config(run_dir: str) -> Config:
    """The configuration of a run, of the stage that has its options."""
    path = Path(run_dir) / "config.yaml"
    require(path.is_file(), f"{run_dir} is not the folder of a run: it has no config.yaml")
    options = yaml.safe_load(path.read_text(encoding="utf-8"))
    for stage in (SFTConfig, RewardConfig, PPOConfig):
        if isinstance(options, dict) and set(options) <= {
            x.name for x in dataclasses.fields(stage)
        }:
            if "scratch" in options:
                options["scratch"] = Scratch(**options["scratch"])
            return stage(**options)
    raise UserError(f"{path} does not have the options of any stage")


def result_of(run_dir: str, name: str) -> Path:
    """The folder of the model that a run has written at its end; an error before."""
    folder = Path(run_dir) / name
    require(folder.is_dir(), f"{run_dir} is not finished: go on with `resume {run_dir}`")
    return folder


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes its name once all of it is on the disk."""
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in (*aside.rglob("*"), aside):
            _sync(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # a full disk needs the room
        raise
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)
    _sync(folder.parent)


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
    _write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".partial")
    aside.write_text(text, encoding="utf-8")
    _sync(aside)
    aside.rename(path)


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
