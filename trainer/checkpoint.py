"""Folders of a run: plain transformers folders and JSON, each written aside and then renamed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .config import require


def new_run(config: Any, overwrite: bool) -> Path:
    """Makes a stage's run folder; a run that it holds is replaced only if asked for."""
    run_dir = Path(config.run_dir)
    metrics = run_dir / "metrics.jsonl"
    free = overwrite or not metrics.exists()
    require(free, f"{run_dir} holds a run already: name another run_dir, or say --overwrite")
    run_dir.mkdir(parents=True, exist_ok=True)
    metrics.unlink(missing_ok=True)
    text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
    (run_dir / "config.yaml").write_text(text, encoding="utf-8")
    return run_dir


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes its name once it is whole."""
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)


def save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes a plain transformers folder."""
    with staged(folder) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON, aside and then renamed."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.rename(path)


def read_json(path: Path) -> Any:
    """What a JSON file of a run says; an error where there is none."""
    require(path.is_file(), f"{path} is missing: is {path.parent} the folder of a finished run?")
    return json.loads(path.read_text(encoding="utf-8"))
