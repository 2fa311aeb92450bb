"""How the package came here, from a wheel or as a clone, and what it came without.

Loads no torch: the command line asks before it has a use for it.
"""

import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
CLONE = (ROOT / "csrc/bindings.cpp").is_file()  # what is imported is a folder of the sources
_MINE = ("dev", "test")  # extras for those who change the package


def pip_install(extra: str) -> str:
    """Return the command that adds an extra to this installation."""
    if not CLONE:
        return f"pip install 'ppokern[{extra}]'"
    return f"pip install -e '{'.' if Path.cwd() == ROOT else ROOT}[{extra}]'"


def no_trainer(error: ModuleNotFoundError) -> int:
    """Say what the trainer lacks, and return the command's exit code."""
    print(f"error: the trainer needs {error.name}: {pip_install('trainer')}", file=sys.stderr)
    return 2


def extras() -> dict[str, list[str]]:
    """Return what each extra lacks here; nothing is known of a folder that was never installed."""
    here = _distribution("ppokern")
    lacks: dict[str, list[str]] = {}
    for line in (here and here.requires) or ():
        found = re.match(r"([\w.-]+).*\bextra == .(\w+)", line)
        if found and found[2] not in _MINE:
            lacks.setdefault(found[2], []).extend([] if _distribution(found[1]) else [found[1]])
    return lacks


def why_unbuilt() -> tuple[str, bool]:
    """Return why there are no C++ kernels, and whether that is likely to be a mistake."""
    if os.environ.get("PPOKERN_BUILD") == "0" or _is_pure():
        return "left out by PPOKERN_BUILD=0", False
    named = os.environ.get("CXX", "").split()[:1]
    compiler = next(filter(shutil.which, named or ("c++", "g++", "clang++", "cl")), None)
    if compiler is None:
        return "not built: no C++ compiler on PATH", False
    if CLONE:
        return f"not built in {ROOT}: `pip install -e .` there builds them", True
    again = "PPOKERN_BUILD=1 pip install -v --force-reinstall --no-deps"
    return f"not built when it was installed: `{again}`, of the sources, says why", True


def _is_pure() -> bool:
    """Return whether the wheel that was installed had no place for kernels: PPOKERN_BUILD=0."""
    here = _distribution("ppokern")
    return here is not None and "Root-Is-Purelib: true" in (here.read_text("WHEEL") or "")


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
