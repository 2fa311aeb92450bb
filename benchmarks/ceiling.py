"""What the machine's memory can do."""

import ctypes
import functools
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from torch import Tensor


@functools.cache
def _library() -> ctypes.CDLL:
    """Compile ``ceiling.cpp`` for this machine; needs g++."""
    source = Path(__file__).with_name("ceiling.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "ceiling.so")
        command = ["g++", "-O3", "-march=native", "-Wno-psabi", "-shared", "-fPIC"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


def bytes_per_second(x: Tensor, write: bool = False) -> float:
    """Bytes that four streams read, or read and write (both count), of a contiguous ``(N, V)``."""
    run = _library().write_rows if write else _library().read_rows
    rows, size = x.shape[0], x[0].nbytes
    best = float("inf")
    for _ in range(6):  # an even number: two writes make the same again
        start = time.process_time()
        run(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(rows), ctypes.c_int64(size))
        best = min(best, time.process_time() - start)
    return rows * size * (2 if write else 1) / best


class Moved(NamedTuple):
    """Bytes that an op has to move, and bytes per second that the memory can."""

    bytes: int
    ceiling: float


def reading(x: Tensor) -> Moved:
    """Return what an op moves that reads a tensor once."""
    return Moved(x.nbytes, bytes_per_second(x))


def rewriting(x: Tensor) -> Moved:
    """Return what an op moves that reads a tensor once and writes it once."""
    return Moved(2 * x.nbytes, bytes_per_second(x, write=True))
