from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import KIND, TINY, UNKIND, sentences

from trainer import ppo, reward, sft
from trainer.checkpoint import save_model
from trainer.config import PPOConfig, RewardConfig, SFTConfig
from trainer.data import train_tokenizer, write_rows
from trainer.models import Policy, load_policy, load_tokenizer, new_policy


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny corpus under all four contracts."""
    folder = tmp_path_factory.mktemp("text")
    for name, count, seed in (("train", 200, 0), ("heldout", 40, 1)):
        texts = sentences(KIND + UNKIND, count, seed)
        write_rows(folder / f"{name}.jsonl", ({"text": line} for line in texts))
        pairs = zip(sentences(KIND, count, seed), sentences(UNKIND, count, seed + 9), strict=True)
        write_rows(
            folder / f"{name}_pairs.jsonl",
            ({"prompt": "", "chosen": a, "rejected": b} for a, b in pairs),
        )
    prompts = [{"prompt": f"the {noun}", "noun": noun} for noun in ("film", "plot", "cast is")]
    write_rows(folder / "prompts.jsonl", prompts)
    return folder


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Makes the folder of an untrained model."""

    def make(family: str = "gpt2", seed: int = 0) -> str:
        folder = tmp_path_factory.mktemp(family) / "model"
        tokenizer = train_tokenizer(sentences(KIND + UNKIND, 200), TINY.vocab_size)
        torch.manual_seed(seed)
        policy = new_policy(replace(TINY, family=family), tokenizer)
        save_model(folder, policy.lm, tokenizer)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def untrained(make_model: Callable[..., str]) -> str:
    return make_model()


@pytest.fixture(scope="session")
def untrained_of(make_model: Callable[..., str], family: str) -> str:
    return make_model(family)


@pytest.fixture
def policy(untrained_of: str) -> Policy:
    return load_policy(untrained_of)


@pytest.fixture(scope="session")
def sft_config(text: Path) -> SFTConfig:
    return SFTConfig(
        train=str(text / "train.jsonl"),
        heldout=str(text / "heldout.jsonl"),
        scratch=TINY,
        steps=150,
        sequences_per_step=16,
        learning_rate=1e-2,
        max_tokens=32,
    )


@pytest.fixture(scope="session")
def trained(
    text: Path, sft_config: SFTConfig, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """A language model and a reward model of the tiny corpus, and how well they learned."""
    folder = tmp_path_factory.mktemp("trained")
    learned = sft.run(replace(sft_config, run_dir=str(folder / "sft")))
    model = str(folder / "sft/model")
    preferred = reward.run(
        RewardConfig(
            run_dir=str(folder / "reward"),
            model=model,
            train=str(text / "train_pairs.jsonl"),
            heldout=str(text / "heldout_pairs.jsonl"),
            steps=40,
            max_tokens=32,
            learning_rate=3e-3,
        )
    )
    return {
        "model": model,
        "reward_model": str(folder / "reward/model"),
        "loss": learned["loss"],
        "accuracy": preferred["accuracy"],
    }


@pytest.fixture
def ppo_config(text: Path, trained: dict[str, Any], tmp_path: Path) -> PPOConfig:
    return PPOConfig(
        run_dir=str(tmp_path / "ppo"),
        model=trained["model"],
        critic=trained["reward_model"],
        rewards={trained["reward_model"]: 1.0},
        train=str(text / "train.jsonl"),
        prompt_tokens=2,
        updates=2,
        episodes_per_update=8,
        max_new_tokens=12,
        learning_rate=1e-3,
    )


@pytest.fixture
def models(ppo_config: PPOConfig) -> ppo.Models:
    return ppo.load(ppo_config, torch.device("cpu"))


@pytest.fixture(scope="session")
def tokenizer(untrained: str) -> Any:
    return load_tokenizer(untrained)
