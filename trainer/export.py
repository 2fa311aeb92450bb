"""A plain transformers folder of the model that a run has trained.

python -m trainer export runs/ppo out
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .checkpoint import read_config, result_of, staged
from .config import PPOConfig, require
from .lora import load_trained
from .metrics import console
from .models import load_tokenizer


def run(run_dir: str, out: str) -> None:
    """Copies the policy of a PPO run, its adapter merged, or the model of another stage's."""
    name = "policy" if isinstance(read_config(run_dir), PPOConfig) else "model"
    model = result_of(run_dir, name)
    for path in (out, f"{out}.partial"):  # to the latter it is written
        require(not os.path.lexists(path), f"{path} exists: name a folder that does not")
    adapted = (model / "adapter_config.json").is_file()
    merged = load_trained(str(model)).lm if adapted else None
    with staged(Path(out)) as aside:
        if merged is not None:
            merged.save_pretrained(aside)
            load_tokenizer(str(model)).save_pretrained(aside)
        else:
            shutil.copytree(model, aside, dirs_exist_ok=True)
    console.print(f"{model} is in {out}")
