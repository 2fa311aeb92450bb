"""`compile`: the trunk's blocks by torch.compile."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from ppokern import Loss
from trainer import models, ppo, reward, sft
from trainer.config import PPOConfig, RewardConfig, SFTConfig
from trainer.data import packed
from trainer.distributed import blocks_of
from trainer.models import (
    LogProbs,
    Policy,
    PPOLoss,
    compile_blocks,
    recompute_blocks,
    scratch_config,
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def policy_loss(policy: nn.Module, rows: list[list[int]]) -> Tensor:
    ids, cu_seqlens = packed(rows)
    draw = torch.Generator().manual_seed(0)
    old, advantages = torch.randn(2, len(ids), generator=draw)
    options = {"old_logprobs": old / 9 - 5.6, "advantages": advantages}
    loss, _ = policy(PPOLoss(LogProbs(ids, cu_seqlens), options))
    assert isinstance(loss, Loss)
    return loss.loss


WARNINGS = ("ignore::DeprecationWarning:torch", "ignore:The .grad attribute")  # torch's own


@pytest.mark.filterwarnings(*WARNINGS)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.slow
def test_a_compiled_trunk_gives_the_same_loss_and_gradients(again: bool) -> None:
    torch.manual_seed(0)
    config = scratch_config(replace(TINY, family="llama"))
    policy = Policy(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    batches = [[[1, 2, 3], [4, 5, 6, 7]], [[9] * 9, [8], [1, 2, 3, 4, 5]], [[3, 2, 1, 5, 6]]]

    def run(batches: list[list[list[int]]]) -> list[Any]:
        found = []
        for rows in batches:
            policy.zero_grad()
            loss = policy_loss(policy, rows)
            loss.backward()
            found.append((loss.detach(), [p.grad for p in policy.parameters()]))
        return found

    eager = run(batches)
    compile_blocks(policy)
    if again:
        recompute_blocks(policy)
    run(batches[:1])
    with torch.compiler.set_stance("fail_on_recompile"):  # one graph for all lengths and blocks
        torch.testing.assert_close(run(batches), eager, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings(*WARNINGS)
@pytest.mark.slow
def test_a_run_of_ppo_with_compiled_trunks(ppo_config: PPOConfig) -> None:
    eager = ppo.run(ppo_config)
    compiled = ppo.run(replace(ppo_config, run_dir=ppo_config.run_dir + "2", compile=True))
    assert counters["frames"]["ok"] > 0
    same = [name for name in eager if not name.startswith(("time/", "memory/"))]
    torch.testing.assert_close(
        [compiled[name] for name in same], [eager[name] for name in same], rtol=1e-3, atol=1e-4
    )


def test_other_stages_compile_too(
    sft_config: SFTConfig,
    trained: dict[str, Any],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(models, "compile_blocks", compiled.append)
    sft.run(replace(sft_config, run_dir=str(tmp_path / "sft"), compile=True, steps=1))
    files = {"train": "train_pairs.jsonl", "heldout": "heldout_pairs.jsonl"}
    files = {name: str(text / file) for name, file in files.items()}
    model, run_dir = trained["model"], str(tmp_path / "reward")
    reward.run(
        RewardConfig(run_dir=run_dir, model=model, compile=True, steps=1, max_tokens=32, **files)
    )
    assert [len(blocks_of(module)) for module in compiled] == [TINY.layers] * 2
