"""What is around the run of a stage: one process writes it, and a signal ends it at a boundary.

A run's folder is locked while it is written. The lock is the system's, on a process: it is gone
when that dies, however it does, and a child does not inherit it. Of many processes the first holds
it.

Ctrl-C, SIGTERM and SIGHUP end a run after the step or update that it is in, with a checkpoint; a
second one ends it at once, and so does one before the first step. Many processes decide together.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Concatenate, ParamSpec, TypeVar

from . import distributed
from .config import Stage, Stopped, Unwritten, UserError, require
from .metrics import console, writing
from .printing import steady

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TAKEN = (errno.EACCES, errno.EAGAIN)  # what a lock says that another process holds

Config = TypeVar("Config", bound=Stage)
Options = ParamSpec("Options")
Result = TypeVar("Result")

_held: set[str] = set()  # folders that this process has locked


def stage(
    run: Callable[Concatenate[Config, Options], Result],
) -> Callable[Concatenate[Config, Options], Result]:
    """Makes a stage's `run` check its configuration, and have its folder for itself."""

    @wraps(run)
    def around(config: Config, *args: Options.args, **kwargs: Options.kwargs) -> Result:
        config.check()
        run_dir = Path(config.run_dir)
        with steady(), locked(run_dir), heeded(config.run_dir):
            try:
                return run(config, *args, **kwargs)
            except Unwritten as error:
                goes_on = (run_dir / "config.yaml").is_file()
                hint = f": once it can, `{to_resume(config.run_dir)}` goes on" if goes_on else ""
                raise UserError(f"{error}{hint}") from error

    return around


def to_resume(run_dir: str | Path) -> str:
    """What to type to go on with a run, as the program was called."""
    called = Path(sys.argv[0]).name
    program = called if called == "ppokern" else f"python -m {__package__}"
    if distributed.size() > 1:
        program = f"torchrun --nproc-per-node={distributed.size()} -m {__package__}"
    return f"{program} resume {shlex.quote(str(run_dir))}"


# --- one process ---


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, no other process writes this run; the folder is made, and goes again if left empty.

    Who has it locked may lock it once more: the demo's last stage writes to the demo's own folder.
    """
    name = os.path.realpath(folder)
    with ExitStack() as held:
        free = name not in _held
        distributed.from_first(lambda: held.enter_context(_lock(folder)) if free else None)
        yield


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Has a folder's file `lock`, which says who has it."""
    require(
        os.path.isdir(folder) or not os.path.lexists(folder),
        f"{folder} is not a folder: name another run_dir",
    )
    not_a_models_own(folder)
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    path, name = folder / "lock", os.path.realpath(folder)
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            handle = _taken(path)
        _held.add(name)
        try:
            yield
        finally:
            _held.discard(name)
            path.unlink(missing_ok=True)  # first: who opened it meanwhile finds another, or none
            os.close(handle)
    finally:
        with suppress(OSError):  # it is not empty
            for folder in made:
                folder.rmdir()


def _taken(path: Path) -> int:
    """A handle on a file that this process has locked; a `UserError` where another one has."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in TAKEN:  # a network's file system may know no locks
                console.print(
                    f"warning: {path} cannot be locked ({error.strerror}): see to it "
                    "that no other process writes this run"
                )
                return handle
            holder = os.read(handle, 200).decode(errors="replace")
            os.close(handle)
            raise UserError(
                f"{path.parent} is being written by {holder or 'another process'}: wait until it "
                "has ended, or name another run_dir"
            ) from None
        if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(handle)):
            os.truncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
            return handle
        os.close(handle)  # the one before has ended in between, and taken it away


def not_a_models_own(folder: Path) -> None:
    """Raises a `UserError` for a folder that is a model's: nothing else is written there."""
    for name in ("config.json", "adapter_config.json"):
        own = os.path.lexists(folder / name)
        require(not own, f"{folder} is a model's own folder, with a {name}: name another one")


# --- signals ---


@dataclass
class _State:
    heard: int = 0  # the signal's number
    underway: bool = False  # there is a boundary to come, and something to go on from


_state = _State()


@contextmanager
def heeded(run_dir: str) -> Iterator[None]:
    """Inside, signals that would end the process are noted for the next boundary.

    Those that the process ignores, or that a program around this one takes, stay with it.
    """
    global _state
    _state = _State()
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    ours = threading.current_thread() is threading.main_thread()
    usual = (signal.SIG_DFL, signal.default_int_handler)
    taken = [signum for signum in SIGNALS if ours and before[signum] in usual]
    for signum in taken:
        signal.signal(signum, _hear)
    try:
        yield
        if signum := heard():
            raise Stopped(signum, f"{run_dir} is finished")
    finally:
        for signum in taken:
            signal.signal(signum, before[signum])


def underway() -> None:
    """From now on a run can be gone on with, and is ended at its boundaries alone."""
    _state.underway = True


def heard() -> int:
    """The signal that one of the processes has been sent; 0 without one. All must ask."""
    return int(distributed.largest(_state.heard))


def _hear(signum: int, frame: FrameType | None) -> None:
    again, _state.heard = _state.heard, signum
    if again:
        if os.isatty(1):
            os.write(1, b"\x1b[?25h\n")  # the progress line hides the cursor
        os._exit(128 + signum)
    if not _state.underway:
        raise Stopped(signum, "stopped before the first step")
    if distributed.first():
        with suppress(OSError):  # not `print`: it may be what was interrupted
            os.write(2, b"\nstops after this step; once more: at once\n")
