"""Where rows come from: a JSONL file, a Parquet file, or a data set of the Hugging Face hub.

    rows.jsonl    rows.parquet    hub:NAME    hub:NAME:SPLIT    hub:NAME:CONFIG:SPLIT

A hub data set is what `datasets` makes of the name: of the hub, or of a local folder. Without a
split it is `train`. A set that needs code of its own to be loaded is refused.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ppokern._install import pip_install

from .config import UserError, require

HUB = "hub:"


def rows_of(source: str) -> Iterator[tuple[str, Any]]:
    """What stands in a source, each with a name for its place that an error can tell."""
    if source.startswith(HUB):
        rows = enumerate(_hub_rows(source), start=1)
        return ((f"{source}, row {number}", row) for number, row in rows)
    require(Path(source).is_file(), f"{source} is not a file")
    return _parquet_rows(source) if source.endswith(".parquet") else _jsonl_rows(source)


def hub_sha256(source: str) -> str:
    """SHA-256 of the rows of a hub data set, wherever they are kept."""
    digest = hashlib.sha256()
    for row in _hub_rows(source):
        digest.update(json.dumps(row, default=_told).encode() + b"\n")
    return digest.hexdigest()


def _told(value: Any) -> str:
    """What JSON does not know, the same in every process: pictures and arrays by their bytes."""
    if hasattr(value, "tobytes"):
        return hashlib.sha256(value.tobytes()).hexdigest()
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _jsonl_rows(path: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}, line {number}", json.loads(line.decode("utf-8"))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error.msg})") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, line {number}: not UTF-8 ({error.reason})") from None


def _parquet_rows(path: str) -> Iterator[tuple[str, Any]]:
    parquet, errors = _imported("pyarrow.parquet", path), _imported("pyarrow", path).ArrowException
    try:
        rows = parquet.read_table(path).to_pylist()
    except (errors, OSError) as error:
        raise UserError(f"{path}: not Parquet ({error})") from None
    return ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


def _hub_rows(source: str) -> Any:
    name, *rest = source.removeprefix(HUB).split(":")
    fits = bool(name) and len(rest) <= 2 and all(rest)
    require(fits, f"{source} is not of the form hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT")
    split = rest.pop() if rest else "train"
    try:
        return _imported("datasets", source).load_dataset(name, *rest, split=split)
    except (OSError, ValueError, RuntimeError) as error:  # no such name or split, no network, code
        raise UserError(f"{source} cannot be loaded: {error}") from None


def _imported(module: str, source: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{source} needs {package}: {pip_install('data')}") from None
