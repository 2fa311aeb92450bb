"""State: what is written, when it is whole, and what a run needs to go on."""

import ctypes
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml
from crash import differences
from torch import nn

from trainer import __main__ as cli
from trainer import ppo, reward, running, sft
from trainer.checkpoint import (
    Chance,
    Checkpoints,
    damage_of,
    finished,
    new_run,
    newest_whole,
    read_config,
    staged,
)
from trainer.config import PPOConfig, RewardConfig, SFTConfig, UserError
from trainer.data import Order, epoch_batches, length_batches, mixed, shuffled
from trainer.metrics import RunLog
from trainer.optimise import adamw

ROOT = Path(__file__).parents[2]


class Small:
    """A run with one matrix to train, whose state is written as any other's."""

    def __init__(self, folder: Path, name: str = "run", **options: Any) -> None:
        self.config = SFTConfig(
            run_dir=str(folder / name),
            train=str(folder / "data.jsonl"),
            steps=9,
            save_every_steps=1,
            **options,
        )
        Path(self.config.train).write_text("{}\n")
        torch.manual_seed(0)
        self.model = nn.Linear(30, 30)
        self.optimizer = adamw(self.model, 0.1)
        self.order = shuffled(5, 0)
        self.generator = torch.Generator().manual_seed(0)
        self.folder = Path(self.config.run_dir, "checkpoints")

    def checkpoints(self) -> Checkpoints:
        parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "order": self.order,
            "generator": self.generator,
        }
        return Checkpoints(self.config, {"data": Path(self.config.train)}, parts)

    def step(self) -> float:
        """Trains on what the order and the generator give."""
        x = torch.randn(30, generator=self.generator) * (1 + next(self.order)) * random.random()
        loss = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def save(self, step: int, before: Callable[[], Any] = lambda: None) -> None:
        """Writes a checkpoint of the run as it stands; does something just before it."""
        checkpoints = self.checkpoints()
        checkpoints.run_dir.mkdir(exist_ok=True)
        with closing(RunLog(checkpoints.run_dir, "sft", 9, False)) as log:
            before()
            checkpoints.after(step, log)

    def run(self, begin: int, end: int, **how: bool) -> list[float]:
        """Steps `begin` to `end`, each with a checkpoint."""
        checkpoints = self.checkpoints()
        assert checkpoints.begin(**{"overwrite": False, "resume": begin > 1} | how) == begin - 1
        losses = []
        with closing(RunLog(checkpoints.run_dir, "sft", 9, False, begin - 1)) as log:
            for step in range(begin, end + 1):
                losses.append(self.step())
                log.write(step, {"loss": losses[-1]}, "")
                checkpoints.after(step, log)
        return losses


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_in_two_pieces_is_the_run_in_one(tmp_path: Path) -> None:
    whole = Small(tmp_path, "one").run(1, 9)
    assert len(set(whole)) == 9
    assert Small(tmp_path, "two").run(1, 4) == whole[:4]
    random.seed(5)
    assert Small(tmp_path, "two").run(5, 9) == whole[4:]
    assert differences(tmp_path / "one", tmp_path / "two") == []


def test_differences_sees_any_bit(tmp_path: Path) -> None:
    """The comparison that all of this rests on."""
    one, two = tmp_path / "one", tmp_path / "two"
    for run_dir in (one, two):
        Small(tmp_path, run_dir.name).run(1, 2)
    assert differences(one, two) == []
    last = two / "checkpoints/00000002"
    optimizer = torch.load(last / "optimizer.pt", weights_only=True)
    optimizer["state"][0]["exp_avg"][0, 0] = optimizer["state"][0]["exp_avg"][0, 0].nextafter(
        torch.tensor(9.0)
    )
    torch.save(optimizer, last / "optimizer.pt")
    row = json.loads((two / "metrics.jsonl").read_text().splitlines()[0])
    with (two / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    (two / "checkpoints/00000001/model.safetensors").unlink()
    assert differences(one, two) == [
        "checkpoints/00000001/model.safetensors",
        "checkpoints/00000002/optimizer.pt",
        "metrics.jsonl",
    ]


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    small = Small(tmp_path, keep_last_checkpoints=3)
    small.run(1, 5)
    assert names(small.folder) == ["00000003", "00000004", "00000005"]
    assert names(small.folder / "00000005") == [
        "chance.pt",
        "generator.pt",
        "manifest.json",
        "model.safetensors",
        "optimizer.pt",
        "order.pt",
        "state.json",
    ]


ORDERS = [
    lambda: shuffled(7, 3),
    lambda: length_batches([5] * 70, 2, 3),
    lambda: epoch_batches([5] * 70, 2, 3),
    lambda: mixed([3, 5], [1, 2], 3),
]


@pytest.mark.parametrize("draw", ORDERS)
@pytest.mark.parametrize("taken", [0, 3, 7, 40])
def test_an_order_goes_on_where_it_was(draw: Callable[[], Order], taken: int) -> None:
    one, two = draw(), draw()
    drawn = [next(one) for _ in range(90)]
    assert drawn[:taken] == [next(two) for _ in range(taken)]
    state, three = two.state_dict(), draw()
    three.load_state_dict(state)
    assert [next(three) for _ in range(90 - taken)] == drawn[taken:]


def test_all_chance_comes_back(tmp_path: Path) -> None:
    def drawn() -> list[Any]:
        return [random.random(), random.gauss(0, 1), *numpy.random.randn(3), *torch.randn(3)]

    chance = Chance(3)
    first = drawn()
    random.gauss(0, 1)  # leaves a second number for the next call, which is part of the state
    torch.save(chance.state_dict(), tmp_path / "chance.pt")
    second = drawn()
    assert first != second
    chance.load_state_dict(torch.load(tmp_path / "chance.pt", weights_only=True))
    assert drawn() == second
    Chance(3)
    assert drawn() == first


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "optimizer.pt.*No such file": lambda c: (c / "optimizer.pt").unlink(),
    "model.safetensors has 40 bytes": lambda c: os.truncate(c / "model.safetensors", 40),
    "order.pt has other bytes": lambda c: flip(c / "order.pt"),
    "manifest.json.*No such file": lambda c: (c / "manifest.json").unlink(),
    "manifest.json cannot be read": lambda c: os.truncate(c / "manifest.json", 90),
}


def flip(path: Path) -> None:
    """Another bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_T8_a_damaged_checkpoint_is_passed_over_and_named(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Small(tmp_path).run(1, 9)
    small = Small(tmp_path)
    small.run(1, 4, overwrite=True)
    DAMAGES[damage](small.folder / "00000004")
    assert Small(tmp_path).checkpoints().begin(overwrite=False, resume=True) == 3
    assert f"{small.folder}/00000004 is passed over" in capsys.readouterr().out
    assert names(small.folder) == ["00000003"]
    assert Small(tmp_path).run(4, 9) == whole[3:]  # from the one before: none of it is guessed
    assert damage_of(small.folder / "00000009") == ""


@pytest.mark.parametrize("damage", DAMAGES)
def test_T8_without_a_whole_checkpoint_a_run_does_not_go_on(damage: str, tmp_path: Path) -> None:
    small = Small(tmp_path, keep_last_checkpoints=1)
    small.run(1, 4)
    DAMAGES[damage](small.folder / "00000004")
    with pytest.raises(UserError, match=f"no checkpoint in .* is whole: .*{damage}"):
        small.checkpoints().begin(overwrite=False, resume=True)


def test_T8_state_that_was_never_written_is_an_error(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.run(1, 2)
    for checkpoint in finished(small.folder):
        (checkpoint / "optimizer.pt").unlink()
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        del manifest["optimizer.pt"]
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        assert damage_of(checkpoint) == ""
    with pytest.raises(UserError, match=r"00000002/optimizer\.pt is missing"):
        small.checkpoints().begin(overwrite=False, resume=True)


def test_metrics_that_lost_lines_are_an_error(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.run(1, 2)
    os.truncate(tmp_path / "run/metrics.jsonl", 9)
    with pytest.raises(UserError, match=r"metrics\.jsonl has 9 bytes"):
        small.checkpoints().begin(overwrite=False, resume=True)


def test_options_that_change_a_run_must_be_as_they_were(tmp_path: Path) -> None:
    Small(tmp_path).run(1, 2)
    Small(tmp_path, keep_last_checkpoints=1).checkpoints().begin(overwrite=False, resume=True)
    small = Small(tmp_path, learning_rate=0.5, seed=3)
    with pytest.raises(UserError, match=r"learning_rate, seed in config\.yaml: changed since"):
        small.checkpoints().begin(overwrite=False, resume=True)


def test_a_run_of_before_is_gone_before_another_begins(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.run(1, 4)
    (tmp_path / "run/model").mkdir()
    Small(tmp_path).checkpoints().begin(overwrite=True, resume=False)
    assert names(tmp_path / "run") == ["config.yaml"]


# --- what is read, and what is not a run's, is never removed ---


@pytest.fixture
def finished_sft(untrained: str, tmp_path: Path) -> Path:
    """A run's folder with a model in it, as the first stage leaves it."""
    run_dir = tmp_path / "r"
    config = SFTConfig(run_dir=str(run_dir), train="t", heldout="h", model="m")
    with running.locked(run_dir):
        new_run(config, False, {})
    shutil.copytree(untrained, run_dir / "model")
    (run_dir / "metrics.jsonl").write_text("{}\n")
    return run_dir


def tree(folder: Path) -> dict[str, bytes | None]:
    paths = sorted(folder.rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


READS = {
    "reference": lambda r: {"model": f"{r}/model"},
    "reference by a link": lambda r: {"model": f"{r.parent}/link/model"},
    "reference by a link out": lambda r: {"model": f"{r}/policy"},
    "reference and ..": lambda r: {"model": f"{r}/checkpoints/../model"},
    "critic": lambda r: {"critic": f"{r}/model"},
    "reward": lambda r: {"rewards": {f"{r}/model": 1.0}},
    "reward function": lambda r: {"rewards": {f"{r}/model/mine.py:f": 1.0}},
    "judge": lambda r: {"judge": f"{r}/model"},
    "data in": lambda r: {"train": {f"{r}/metrics.jsonl": 1.0}},
    "held-out data": lambda r: {"heldout": f"{r}/best/rows.jsonl"},
}


@pytest.mark.parametrize("name", READS)
def test_what_a_run_reads_is_never_removed(
    name: str, finished_sft: Path, text: Path, trained: dict[str, Any]
) -> None:
    r = finished_sft
    (r.parent / "link").symlink_to(r)
    (r / "policy").symlink_to(trained["model"])
    for name_of_one in ("best", "checkpoints"):
        (r / name_of_one).mkdir()
    (r / "best/rows.jsonl").write_bytes((text / "heldout.jsonl").read_bytes())
    (r / "metrics.jsonl").write_bytes((text / "train.jsonl").read_bytes())
    (r / "model/mine.py").write_text("def f(p, c):\n    return [0.0 for _ in c]\n")
    options: dict[str, Any] = {
        "model": trained["model"],
        "train": str(text / "train.jsonl"),
        "heldout": str(text / "heldout.jsonl"),
        "rewards": {"math:sqrt": 1.0},
    } | READS[name](r)
    before = tree(r)
    config = PPOConfig(run_dir=str(r), prompt_tokens=2, **options)
    checkpoints = Checkpoints(config, ppo.inputs(config), {})
    with pytest.raises(UserError, match=f"the {name.split(' ')[0]}.* is part of the run that"):
        checkpoints.begin(overwrite=True, resume=False)
    assert tree(r) == before


def test_the_run_before_is_no_model_of_the_run_that_replaces_it(
    finished_sft: Path, ppo_config: PPOConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    before, r = tree(finished_sft), str(finished_sft)
    config = replace(ppo_config, run_dir=r, model=f"{r}/model", critic="", rewards={"math:log": 1})
    with pytest.raises(UserError, match=r"the reference .* name another run_dir"):
        ppo.run(config, overwrite=True)
    assert tree(finished_sft) == before
    path = finished_sft.parent / "mine.yaml"  # nor is the file of its options
    (finished_sft / "config.yaml").rename(path)
    (finished_sft / "config.yaml").symlink_to(path)
    for given in (path, finished_sft / "config.yaml"):
        code = cli.main(["sft", f"--config={given}", f"--run_dir={r}", "--overwrite"])
        assert code == 2
        told = "the config file" if given != path else "h is not a file"  # a link alone is removed
        assert given == path or told in capsys.readouterr().err
    assert path.is_file()


@pytest.mark.parametrize("stage", [sft, ppo])
def test_a_models_own_folder_is_no_run_dir(
    stage: Any, untrained: str, ppo_config: PPOConfig, text: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(untrained, tmp_path / "model")
    before = tree(folder)
    data = {"train": str(text / "train.jsonl"), "heldout": str(text / "heldout.jsonl")}
    config: Any = SFTConfig(run_dir=str(folder), model=str(folder), max_tokens=32, **data)
    if stage is ppo:
        config = replace(ppo_config, run_dir=str(folder))
    with pytest.raises(UserError, match=r"is a model's own folder, with a config\.json"):
        stage.run(config, overwrite=True)
    assert tree(folder) == before


@pytest.mark.parametrize("name", ["model", "checkpoints", "metrics.jsonl", "x.partial"])
def test_a_folder_that_no_run_made_is_left_alone(name: str, tmp_path: Path) -> None:
    """It may hold a folder of one's own by the name `model`, and another program's config.yaml."""
    folder = tmp_path / "mine"
    (folder / name).mkdir(parents=True)
    (folder / name / "letter.txt").write_text("dear")
    small = Small(tmp_path, "mine")
    for content in (None, "port: 80\n"):
        if content:
            (folder / "config.yaml").write_text(content)
        before = tree(folder)
        for overwrite in (False, True):
            with pytest.raises(UserError, match=f"mine has .*{name}.* is no run's folder"):
                small.checkpoints().begin(overwrite=overwrite, resume=False)
            assert tree(folder) == before


def test_of_a_link_the_link_is_replaced(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.run(1, 2)
    for name in ("model", "policy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").touch()
        (tmp_path / "run" / name).symlink_to(tmp_path / name)
    (tmp_path / "run/best").symlink_to(tmp_path / "nowhere")
    with staged(tmp_path / "run/model") as aside:
        (aside / "new").touch()
    small.checkpoints().begin(overwrite=True, resume=False)
    assert names(tmp_path / "run") == ["config.yaml"]
    assert names(tmp_path / "model") == names(tmp_path / "policy") == ["kept"]


def test_options_of_a_run_are_read_as_those_of_the_command_line(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.run(1, 2)
    path = tmp_path / "run/config.yaml"
    content = path.read_bytes()
    changes = {
        b"steps: many": r"config\.yaml: Parser key \"steps\"",
        b"steps: \xff": "cannot be read",
        b"\t- :": "cannot be read",
        b"scratch: {family: gpt5}": "scratch",
    }
    for change, sentence in changes.items():
        path.write_bytes(content + change)
        with pytest.raises(UserError, match=sentence):
            read_config(str(tmp_path / "run"))
    path.write_bytes(content.replace(b"steps: 9", b"steps: null"))
    with pytest.raises(UserError, match="steps must have a value: it is null"):
        sft.run(read_config(str(tmp_path / "run")), resume=True)
    path.write_bytes(content)
    assert read_config(str(tmp_path / "run")) == small.config


# --- a full disk, and a kill in the midst of writing ---


@pytest.mark.parametrize("kind", ["file", "broken link", "long", "read-only", "below a file"])
def test_a_run_dir_that_cannot_be_made_is_one_sentence(
    kind: str, ppo_config: PPOConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`read-only` as the system says it: root may write in spite of a folder's mode."""
    inner, file = Path.mkdir, tmp_path / "file"
    file.write_text("kept")
    run_dir = {"file": file, "below a file": file / "run", "long": tmp_path / ("x" * 300)}.get(
        kind, tmp_path / "run"
    )
    sentence = {
        "file": "is not a folder: name another run_dir",
        "broken link": "is not a folder: name another run_dir",
        "long": "could not be written: File name too long",
        "read-only": "could not be written: Read-only file system",
        "below a file": "could not be written: Not a directory",
    }[kind]
    if kind == "broken link":
        run_dir.symlink_to(tmp_path / "nowhere")

    def mkdir(path: Path, *args: Any, **options: Any) -> None:
        if path == run_dir and kind == "read-only":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        inner(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(UserError, match=sentence):
        ppo.run(replace(ppo_config, run_dir=str(run_dir)), overwrite=True)
    assert file.read_text() == "kept"
    assert not (tmp_path / "nowhere").exists()
    if kind == "long":
        with pytest.raises(UserError, match="is not the folder of a run"):
            read_config(str(run_dir))


@pytest.mark.parametrize("name", ["policy", "samples.json", "metrics.jsonl"])
def test_a_disk_that_is_full_at_the_end_of_a_run_loses_nothing(
    name: str, ppo_config: PPOConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = replace(ppo_config, run_dir=str(tmp_path / "whole"), save_every_updates=1)
    ppo.run(whole)
    config, inner = replace(whole, run_dir=ppo_config.run_dir), os.fsync
    log_write, steps = RunLog.write, []

    def fsync(handle: int) -> None:
        where = os.readlink(f"/proc/self/fd/{handle}")
        if where.startswith(f"{config.run_dir}/{name}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        inner(handle)

    def write(log: RunLog, step: int, *rest: Any) -> None:
        log_write(log, step, *rest)
        if name == "metrics.jsonl" and step == 2:
            steps.append(step)

    def sync(log: RunLog) -> int:
        if steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return log_sync(log)

    log_sync = RunLog.sync
    with monkeypatch.context() as patch:
        if name == "metrics.jsonl":
            patch.setattr(RunLog, "write", write)
            patch.setattr(RunLog, "sync", sync)
        else:
            patch.setattr(os, "fsync", fsync)
        assert cli.main(argv_of(config, tmp_path)) == 2
    newest = newest_whole(Path(config.run_dir, "checkpoints"))
    assert newest is not None and int(newest.name) == (1 if name == "metrics.jsonl" else 2)
    assert not list(Path(config.run_dir).glob("*.partial"))
    assert cli.main(["resume", config.run_dir]) == 0
    assert differences(Path(whole.run_dir), Path(config.run_dir)) == []


def argv_of(config: PPOConfig, folder: Path) -> list[str]:
    path = folder / "options.yaml"
    path.write_text(yaml.safe_dump(asdict(config)))
    return ["ppo", f"--config={path}"]


def is_a_whole_run(small: Small, last: int) -> None:
    """The newest checkpoint is that of step `last`, and it loads."""
    newest = newest_whole(small.folder)
    assert newest is not None and newest.name == f"{last:08d}"
    assert small.checkpoints().begin(overwrite=False, resume=True) == last


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Sets the bytes that a file may have; a write beyond is refused, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, limit: Callable[[int], None]
) -> None:
    """At whatever byte of it."""
    small = Small(tmp_path)
    small.run(1, 2)
    largest = max(path.stat().st_size for path in (small.folder / "00000002").iterdir())
    sizes = [0, 1, 100, *range(300, largest, largest // 9)]
    for size in sizes:
        with pytest.raises(UserError, match=r"00000003 could not be written: is the disk full"):
            small.save(3, lambda size=size: limit(size))
        limit(resource.RLIM_INFINITY)
        assert names(small.folder) == ["00000001", "00000002"]
        is_a_whole_run(small, 2)
    small.save(3)
    is_a_whole_run(small, 3)


def in_fork(work: Callable[[], Any]) -> int:
    """Does `work` in a fork, which trains nothing, and returns how that ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """On a file system of 256 KiB that only a fork sees, so that none is left mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    libc = ctypes.CDLL(None)
    new_namespace, private = 0x20000, 0x44000

    def mounted() -> None:
        options = (b"tmpfs", str(disk).encode(), b"tmpfs", 0, b"size=256k")
        assert libc.unshare(new_namespace) == 0
        assert libc.mount(b"none", b"/", None, private, None) == 0
        assert libc.mount(*options) == 0

    def work() -> None:
        mounted()
        small = Small(disk)
        small.save(1)
        room = shutil.disk_usage(disk).free
        for left in (0, 4096, 16384, 32768):
            (disk / "filler").write_bytes(bytes(room - left))
            with pytest.raises(UserError, match=r"could not be written: is the disk full\?"):
                small.save(2)
            (disk / "filler").unlink()
            assert names(small.folder) == ["00000001"]
            assert small.checkpoints().begin(overwrite=False, resume=True) == 1
        for step in range(2, 9):  # there is room for one more than are kept
            small.save(step)
        assert small.checkpoints().begin(overwrite=False, resume=True) == 8

    if in_fork(mounted):
        pytest.skip("only root may mount a small file system")
    assert in_fork(work) == 0


def killed_in_save(small: Small, event: int) -> bool:
    """Saves step 3 in a fork that `kill -9` ends at its so-many-th file operation.

    Returns:
        Whether it came so far.
    """
    seen = -1

    def watch(name: str, _: tuple[Any, ...]) -> None:
        nonlocal seen
        if name in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

    return os.WIFSIGNALED(in_fork(lambda: small.save(3, lambda: sys.addaudithook(watch))))


def test_a_kill_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    small, last = Small(tmp_path), []
    small.run(1, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "as it was")
    while True:
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "as it was", tmp_path / "run")
        killed = killed_in_save(small, len(last))
        newest = newest_whole(small.folder)
        assert newest is not None
        last.append(int(newest.name))
        is_a_whole_run(Small(tmp_path), last[-1])
        assert not list(small.folder.glob("*.partial"))  # what was left is cleared away
        if not killed:
            break
    before, after = last.count(2), last.count(3)
    assert last == [2] * before + [3] * after
    assert before > 15 and after > 5  # kills while writing, and while the oldest was removed


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_kill_in_the_midst_of_a_file_leaves_a_whole_checkpoint(
    share: float, tmp_path: Path
) -> None:
    """By the kernel, at a byte of the largest file (SIGXFSZ, which Python otherwise ignores)."""
    small = Small(tmp_path)
    small.run(1, 2)
    largest = max(path.stat().st_size for path in (small.folder / "00000002").iterdir())

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * largest),) * 2)

    status = in_fork(lambda: small.save(3, limited))
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ
    assert names(small.folder) == ["00000001", "00000002", "00000003.partial"]
    is_a_whole_run(small, 2)


# --- the stages ---


class Cut(Exception):
    """Ends a run in a test."""


@pytest.fixture
def cut_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, int], None]:
    """Ends a stage in its so-many-th optimiser step, once that was taken."""

    def cut(module: Any, step: int) -> None:
        inner, taken = module.clipped_step, 0

        def clipped_step(*args: Any) -> Any:
            nonlocal taken
            taken += 1
            result = inner(*args)
            if taken == step:
                monkeypatch.setattr(module, "clipped_step", inner)
                raise Cut
            return result

        monkeypatch.setattr(module, "clipped_step", clipped_step)

    return cut


@pytest.fixture
def adaptive(ppo_config: PPOConfig) -> PPOConfig:
    return replace(
        ppo_config,
        updates=4,
        save_every_updates=2,
        kl_coef=0.3,
        kl_controller="adaptive",
        kl_target_per_token=0.05,
        kl_horizon_episodes=50,
    )


def rows_of(run_dir: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def test_T6_four_updates_or_two_resume_two(
    adaptive: PPOConfig, tmp_path: Path, cut_at: Callable[[Any, int], None]
) -> None:
    """4 steps an update: the cut falls into the last update, two behind the checkpoint."""
    whole = replace(adaptive, run_dir=str(tmp_path / "whole"))
    ppo.run(whole)
    cut_at(ppo, 14)
    with pytest.raises(Cut):
        ppo.run(adaptive)
    assert len(rows_of(adaptive.run_dir)) == 3
    assert names(Path(adaptive.run_dir, "checkpoints")) == ["00000002"]
    assert cli.main(["resume", adaptive.run_dir]) == 0
    assert differences(Path(whole.run_dir), Path(adaptive.run_dir)) == []
    rows = rows_of(adaptive.run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    betas = [row["kl_coef"] for row in rows]
    assert len({0.3, *betas}) == 4  # it moved with every update, and did not go back
    assert abs(rows[2]["objective/kl"]) > 1e-3  # T7: the reference is still that of the start


def test_T6_a_beta_that_moved_stays_where_it_was(adaptive: PPOConfig, tmp_path: Path) -> None:
    moved, fresh = (ppo.KLController.of(adaptive) for _ in range(2))
    moved.coef = 0.31
    torch.save(moved.state_dict(), tmp_path / "controller.pt")
    fresh.load_state_dict(torch.load(tmp_path / "controller.pt", weights_only=True))
    assert fresh == moved


def test_a_cut_before_the_first_checkpoint_begins_again(
    adaptive: PPOConfig,
    tmp_path: Path,
    cut_at: Callable[[Any, int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = replace(adaptive, run_dir=str(tmp_path / "whole"))
    ppo.run(whole)
    cut_at(ppo, 6)
    with pytest.raises(Cut):
        ppo.run(adaptive)
    assert len(rows_of(adaptive.run_dir)) == 1
    assert cli.main(["resume", adaptive.run_dir]) == 0
    assert "has no checkpoint yet: it begins again" in capsys.readouterr().out
    assert differences(Path(whole.run_dir), Path(adaptive.run_dir)) == []


def test_a_finished_run_is_resumed_to_the_same(
    ppo_config: PPOConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ppo.run(ppo_config)
    shutil.copytree(ppo_config.run_dir, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/policy")  # as if it had been cut while it wrote its results
    assert cli.main(["resume", str(tmp_path / "copy")]) == 0
    assert "copy is finished: it writes its results" in capsys.readouterr().out
    assert differences(Path(ppo_config.run_dir), tmp_path / "copy") == []


def copied(path: str, folder: Path) -> str:
    """A copy of a file or folder, which a test may change."""
    folder.mkdir(exist_ok=True)
    target = folder / f"copy of {Path(path).name}"
    shutil.copytree(path, target) if Path(path).is_dir() else shutil.copy(path, target)
    return str(target)


def is_held_against(config: Any, changes: dict[str, str], capsys: Any) -> None:
    """A file is changed, the run does not go on and says which, the file is changed back."""
    for name, path in changes.items():
        content = Path(path).read_bytes()
        add(path, "\n")
        capsys.readouterr()
        assert cli.main(["resume", config.run_dir]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: the {name} (") and "has changed since" in error
        Path(path).write_bytes(content)
    assert cli.main(["resume", config.run_dir]) == 0


def test_T7_what_a_ppo_run_reads_must_be_as_it_was(
    ppo_config: PPOConfig,
    trained: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The reference is not in the checkpoint, its hash is."""
    function = tmp_path / "length.py"
    function.write_text("def length(p, c):\n    return [float(len(x)) for x in c]\n")
    sources = (ppo_config.model, ppo_config.critic, trained["reward_model"])
    model, critic, reward_model = (copied(x, tmp_path / str(i)) for i, x in enumerate(sources))
    config = replace(
        ppo_config,
        model=model,
        critic=critic,
        rewards={reward_model: 1.0, f"{function}:length": 0.1},
        train=copied(ppo_config.train, tmp_path),
    )
    ppo.run(config)
    changes = {
        "reference": f"{model}/config.json",
        f"data in {config.train}": config.train,
        "critic": f"{critic}/config.json",
        f"reward {reward_model}": f"{reward_model}/config.json",
        f"reward {function}:length": str(function),
    }
    is_held_against(config, changes, capsys)


def test_T7_other_weights_are_another_reference(
    ppo_config: PPOConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(ppo_config, model=copied(ppo_config.model, tmp_path), updates=1)
    ppo.run(config)
    flip(Path(config.model, "model.safetensors"))
    assert cli.main(["resume", config.run_dir]) == 2
    assert f"the reference ({config.model}) has changed since" in capsys.readouterr().err


def add(path: str, text: str) -> None:
    with Path(path).open("a") as file:
        file.write(text)


def test_a_reward_function_of_a_module_is_known_by_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outer_rewards.py").write_text("from inner_rewards import f\n")
    (tmp_path / "inner_rewards.py").write_text("def f(p, c):\n    return [0.0] * len(c)\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = PPOConfig(model="m", train="t", rewards={"outer_rewards:f": 1.0, "math:sqrt": 1.0})
    found = ppo.inputs(config)
    assert found["reward outer_rewards:f"] == tmp_path / "inner_rewards.py"
    assert found["reward math:sqrt"].is_file()


@pytest.mark.parametrize("stage", [sft, reward])
def test_what_a_supervised_run_reads_must_be_as_it_was(
    stage: Any, text: Path, untrained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, made = ("", SFTConfig) if stage is sft else ("_pairs", RewardConfig)
    config = made(
        run_dir=str(tmp_path / "run"),
        model=copied(untrained, tmp_path),
        train=copied(str(text / f"train{kind}.jsonl"), tmp_path),
        heldout=copied(str(text / f"heldout{kind}.jsonl"), tmp_path),
        steps=3,
        max_tokens=32,
    )
    stage.run(config)
    changes = {
        "model": f"{config.model}/config.json",
        "data": config.train,
        "held-out data": config.heldout,
    }
    is_held_against(config, changes, capsys)


def test_tensorboard_shows_no_step_twice(
    ppo_config: PPOConfig, cut_at: Callable[[Any, int], None]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(ppo_config, updates=4, save_every_updates=2, tensorboard=True)
    cut_at(ppo, 14)  # in the fourth update
    with pytest.raises(Cut):
        ppo.run(config)
    time.sleep(1.1)  # its files are put in order by the second
    assert cli.main(["resume", config.run_dir]) == 0
    assert len(list(Path(config.run_dir).glob("events.*"))) == 2
    board = EventAccumulator(config.run_dir)
    board.Reload()
    assert [event.step for event in board.Scalars("objective/kl")] == [1, 2, 3, 4]


def test_what_follows_a_run_follows_a_resumed_one(
    adaptive: PPOConfig,
    tmp_path: Path,
    cut_at: Callable[[Any, int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir, out = adaptive.run_dir, tmp_path / "out"
    cut_at(ppo, 10)
    with pytest.raises(Cut):
        ppo.run(adaptive)
    assert cli.main(["export", run_dir, str(out)]) == 2
    assert "is not finished: go on with `python -m trainer resume" in capsys.readouterr().err
    assert cli.main(["resume", run_dir]) == 0
    assert cli.main(["sample", run_dir, "--prompt", "the film"]) == 0
    assert cli.main(["report", run_dir]) == 0
    assert cli.main(["export", run_dir, str(out)]) == 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lm = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert AutoTokenizer.from_pretrained(out, local_files_only=True)("the film").input_ids
    assert names(out) == names(Path(run_dir, "policy"))
    before = ppo.load(adaptive, torch.device("cpu")).policy
    assert any(
        not torch.equal(a, b) for a, b in zip(lm.parameters(), before.parameters(), strict=True)
    )
    assert cli.main(["export", run_dir, str(out)]) == 2
    assert "exists: name a folder that does not" in capsys.readouterr().err


def test_export_of_the_other_stages(trained: dict[str, Any], tmp_path: Path) -> None:
    for stage in ("model", "reward_model"):
        folder = Path(trained[stage])
        assert cli.main(["export", str(folder.parent), str(tmp_path / stage)]) == 0
        assert differences(folder, tmp_path / stage) == []


# --- processes ---


@pytest.mark.slow
def test_crashes() -> None:
    """`make crash-test` with five kills; where they strike is chance, and at its fifty all over."""
    command = [sys.executable, str(ROOT / "tests/trainer/crash.py"), "5", "0"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("5 exact, 0 not (")
