"""What the CUDA C++ kernels compile to: ``python -m benchmarks.cuda_report [--arch 90]``.

Needs nvcc and no GPU. Of each kernel, what a multiprocessor can hold of it: registers a thread,
bytes of stack and of registers spilled there, static shared memory, blocks that fit at a time, and
how many of its loads and stores are 16 bytes wide: in the machine code where cuobjdump is found
(beside nvcc, on PATH, or Triton's), else in PTX, of which they become one for one.
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = sorted(ROOT.glob("csrc/*/*_cuda.cu"))
ARCHS = (80, 90, 100)
REGISTERS, THREADS = 65536, 2048  # of a multiprocessor
NVCC = shutil.which("nvcc")


class Compiled(NamedTuple):
    """What a kernel became."""

    registers: int
    stack: int
    spilled: int  # bytes stored and loaded
    shared: int
    resident: int  # blocks that a multiprocessor holds
    wide: int  # loads and stores of 16 bytes
    narrow: int


def known(archs: Sequence[int]) -> list[int]:
    """Return those that nvcc compiles for."""
    names = _run(str(NVCC), "--list-gpu-arch").split()
    return [arch for arch in archs if f"compute_{arch}" in names]


@cache
def compiled(source: Path, arch: int) -> dict[str, Compiled]:
    """Compile a file and look at what came out, by kernel."""
    with tempfile.TemporaryDirectory() as folder:
        said = _run(
            *(str(NVCC), "-std=c++17", "-O3", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}"),
            *(f"-arch=sm_{arch}", "-cubin", "-Xptxas=-v", "--keep", f"--keep-dir={folder}"),
            *(str(source), "-o", f"{folder}/out.cubin"),
        )
        moves, (ptx,) = dict(_moves(folder)), Path(folder).glob("*.ptx")
        blocks = dict(_sections(r"\.entry (\w+)", ptx.read_text()))
    found: dict[str, Compiled] = {}
    for entry, lines in _sections(r"Compiling entry function '(\w+)'", said):
        usage = re.findall(r"(\d+) (bytes (?:stack|spill)|registers|bytes smem)", lines)
        counts = {what: sum(int(n) for n, w in usage if w == what) for _, what in usage}
        registers, shared = counts["registers"], counts.get("bytes smem", 0)
        match = re.search(r"\.maxntid (\d+)", blocks[entry])
        assert match is not None, f"{entry}: no __launch_bounds__"
        block = int(match[1])
        fit = REGISTERS // (-(-registers // 8) * 8 * block)
        stack, spilled = counts["bytes stack"], counts["bytes spill"]
        found[_name(entry)] = Compiled(
            registers, stack, spilled, shared, min(fit, THREADS // block), *moves[entry]
        )
    return dict(sorted(found.items()))


def _moves(folder: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield how many loads and stores of a kernel are wide, and how many not."""
    if tool := _cuobjdump():
        text, start = _run(tool, "-sass", f"{folder}/out.cubin"), r"Function : (\w+)"
        move, wide = r"\b(?:LDG|STG)\.\S+", ".128"
    else:
        (ptx,) = Path(folder).glob("*.ptx")
        text, start = ptx.read_text(), r"\.entry (\w+)"
        move, wide = r"\b(?:ld|st)\.global\S+", ".v4."
    for entry, lines in _sections(start, text):
        moves = re.findall(move, lines)
        count = sum(wide in each for each in moves)
        yield entry, (count, len(moves) - count)


def _sections(start: str, text: str) -> Iterator[tuple[str, str]]:
    _, *parts = re.split(start, text)
    return zip(parts[::2], parts[1::2], strict=True)


def _cuobjdump() -> str | None:
    triton = importlib.util.find_spec("triton")
    where = [str(Path(str(NVCC)).resolve().parent)]
    if triton is not None and triton.origin is not None:
        where.append(str(Path(triton.origin).parent / "backends/nvidia/bin"))
    beside = (shutil.which("cuobjdump", path=path) for path in where)
    return next(filter(None, beside), None) or shutil.which("cuobjdump")


def _name(entry: str) -> str:
    """Return a kernel's name and template arguments as they stand in the source."""
    name = _run("c++filt", entry).replace("(anonymous namespace)::", "").split("(")[0]
    return re.sub(r"^void |ppokern::|cuda::", "", name).strip()


def _run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}")
    return done.stdout


def report(archs: Sequence[int]) -> None:
    """Print the table."""
    if NVCC is None:
        print("CUDA C++: no nvcc here")
        return
    print(_run(NVCC, "--version").splitlines()[-1])
    titles = Compiled._fields
    print(f"{'kernel':55} sm_  {' '.join(f'{t:>9}' for t in titles)}")
    for source in SOURCES:
        tables = {arch: compiled(source, arch) for arch in known(archs)}
        for name in next(iter(tables.values()), {}):
            for arch, table in tables.items():
                room = source.parent.name
                print(f"{f'{room}.{name}':55} {arch:<4} {' '.join(f'{x:9}' for x in table[name])}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, choices=ARCHS, action="append")
    report(parser.parse_args().arch or ARCHS)
