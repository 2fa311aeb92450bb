"""Goes on with a run that was cut: the same bits as if it had not been.

python -m trainer resume runs/ppo
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from . import ppo, reward, sft
from .checkpoint import read_config
from .config import PPOConfig, RewardConfig, SFTConfig

STAGES: dict[type, ModuleType] = {SFTConfig: sft, RewardConfig: reward, PPOConfig: ppo}


def run(run_dir: str) -> None:
    """Goes on from the newest whole checkpoint; a finished run writes its results once more."""
    config = replace(read_config(run_dir), run_dir=run_dir)  # the folder may have been moved
    STAGES[type(config)].run(config, resume=True)
