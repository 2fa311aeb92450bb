"""Where rows come from: a JSONL file, a Parquet file, or a data set of the Hugging Face hub.

    rows.jsonl    rows.parquet    hub:NAME    hub:NAME:SPLIT    hub:NAME:CONFIG:SPLIT

A hub data set is what `datasets` makes of the name: of the hub, or of a local folder. Without a
split it is `train`. A set that needs code of its own to be loaded is refused.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ppokern._install import pip_install

from .config import UserError, require

HUB = "hub:"


def rows_of(source: str) -> Iterator[tuple[str, Any]]:
    """What stands in a source, each with a name for its place that an error can tell."""
    if source.startswith(HUB):
        return _numbered(source, _hub_rows(source))
    require(Path(source).is_file(), f"{source} is not a file")
    if source.endswith(".parquet"):
        return _numbered(source, _parquet_rows(source))
    return _jsonl_rows(source)


def _numbered(source: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Rows by number; whatever a library raises while it reads one is told in a sentence."""
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield f"{source}, row {number}", row
    except Exception as error:  # pyarrow, datasets, and what they decode pictures with
        raise UserError(f"{source}, row {number + 1}: cannot be read ({error})") from None


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
    lines = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
            if b"\\u" in line:  # may be half of a surrogate pair, which is no character
                json.dumps(row, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error.msg})") from None
        except (UnicodeDecodeError, UnicodeEncodeError) as error:
            raise UserError(f"{path}, line {number}: not UTF-8 ({error.reason})") from None
        except (ValueError, RecursionError) as error:  # thousands of digits, of brackets
            raise UserError(f"{path}, line {number}: JSON that is too much ({error})") from None
        yield f"{path}, line {number}", row


def _parquet_rows(path: str) -> list[Any]:
    parquet = _imported("pyarrow.parquet", path)
    try:
        return parquet.read_table(path).to_pylist()
    except Exception as error:  # whatever pyarrow makes of a damaged file
        raise UserError(f"{path}: not Parquet ({error})") from None


def _hub_rows(source: str) -> Any:
    name, *rest = source.removeprefix(HUB).split(":")
    fits = bool(name) and len(rest) <= 2 and all(rest)
    require(fits, f"{source} is not of the form hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT")
    split, datasets = rest.pop() if rest else "train", _imported("datasets", source)
    try:
        return datasets.load_dataset(name, *rest, split=split)
    except Exception as error:  # no such name or split, no network, code of its own, bad files
        raise UserError(f"{source} cannot be loaded: {error}") from None


def _imported(module: str, source: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{source} needs {package}: {pip_install('data')}") from None
