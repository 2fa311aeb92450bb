"""Compiles CUDA C++ for the CPU: `python tests/cuda_on_cpu/build.py [--sanitize]`.

Prints the folder with the module, for ``PPOKERN_CUDA_ON_CPU``. What is up to date stays.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
FLAGS = [
    *("-std=c++17", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"),
    *("-Wall", "-Wextra", "-Wno-unused-function", "-Wno-unknown-pragmas"),
    *(f"-I{HERE}", f"-I{CSRC}"),
]
PLAIN = ["-O2", "-fsanitize=alignment", "-fno-sanitize-recover=alignment"]
SANITIZE = [
    *("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "-fsanitize-sections=cuda_shared",  # red zones in shared memory
]


def gcc(*arguments: object) -> None:
    """Run g++, and pass on what it says where it fails."""
    subprocess.run(["g++", *map(str, arguments)], check=True, stdout=sys.stderr)


def build(name: str, sources: list[Path], sanitize: bool, flags: list[str]) -> Path:
    """Return the program or module made of the sources; what is up to date stays."""
    folder = ROOT / "build" / "cuda_on_cpu" / ("sanitize" if sanitize else "plain")
    folder.mkdir(parents=True, exist_ok=True)
    how = SANITIZE if sanitize else PLAIN
    headers = [*CSRC.rglob("*.h"), *CSRC.rglob("*.cuh"), *HERE.glob("*.h"), Path(__file__)]
    newest = max(header.stat().st_mtime for header in headers)
    made = folder / name

    def compiled(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        if not out.exists() or out.stat().st_mtime < max(newest, source.stat().st_mtime):
            includes = [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]
            gcc(*FLAGS, *how, *includes, "-x", "c++", "-c", source, "-o", out)
        return out

    objects = [compiled(source) for source in sources]
    if not made.exists() or made.stat().st_mtime < max(x.stat().st_mtime for x in objects):
        gcc(*how, *flags, *objects, "-o", made)
    return made


def program(name: str, sanitize: bool) -> Path:
    """Return the program made of a file in this folder."""
    return build(name, [HERE / f"{name}.cu"], sanitize, [])


def module(sanitize: bool) -> Path:
    """Return the folder of the module ppokern._cuda."""
    name = f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = [CSRC / "bindings_cuda.cpp", *sorted(CSRC.glob("*/*_cuda.cu"))]
    return build(name, sources, sanitize, ["-shared"]).parent


if __name__ == "__main__":
    print(module("--sanitize" in sys.argv))
