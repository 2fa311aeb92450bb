"""A process that is stopped or frozen ends the run, by name, instead of holding up all others.

Each beats once a second and listens to the next. One that works or waits still beats, however long
that takes; one that is stopped does not. torch has nothing like it: gloo's time-out and
`monitored_barrier` cannot tell the two apart, and torchrun's timers are off but for a variable that
is set before it starts.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed import TCPStore  # type: ignore[attr-defined]

BEAT, SILENCE = 1.0, 45.0  # seconds


@contextmanager
def beating(rank: int, size: int) -> Iterator[None]:
    """Inside, the next process is listened to: after too long a silence this one ends."""
    over = threading.Event()
    heart = threading.Thread(target=_heart, args=(rank, size, over), daemon=True)
    heart.start()
    try:
        yield
    finally:
        over.set()
        heart.join(BEAT)


def _heart(rank: int, size: int, over: threading.Event) -> None:
    try:
        _beat(rank, (rank + 1) % size, over)
    except RuntimeError as error:  # the store is torchrun's
        if not over.is_set():
            _end(f"torchrun has gone: {error}")


def _beat(me: int, other: int, over: threading.Event) -> None:
    """Silence is counted in own beats, so that a machine that slept ends nothing."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*address, is_master=False, wait_for_workers=False)  # calls on one wait in line
    place = [socket.gethostname(), os.getppid()]
    store.set(f"place {me}", json.dumps([*place, os.getpid()]))
    heard, missed = 0, 0
    while not over.wait(BEAT):
        store.add(f"beats {me}", 1)
        before, heard = heard, store.add(f"beats {other}", 0)
        missed = missed + 1 if heard == before else 0
        if missed * BEAT >= SILENCE:
            known = store.check([f"place {other}"])  # else `get` would wait for it
            *where, pid = json.loads(store.get(f"place {other}")) if known else [0]
            why = f"process {other} has been silent for {SILENCE:g} s: it is stopped or frozen"
            _end(why, pid if where == place else None)


def _end(why: str, other: int | None = None) -> None:
    """Ends this process, and one beside it that would not listen to torchrun for half a minute."""
    print(f"error: {why}", file=sys.stderr, flush=True)
    if other is not None:
        with suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)
    os._exit(1)
