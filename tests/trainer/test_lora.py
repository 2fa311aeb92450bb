import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crash import differences

from trainer import export, ppo
from trainer.check import check_frozen
from trainer.checkpoint import sha256
from trainer.config import CheckFailed, PPOConfig, UserError
from trainer.data import packed
from trainer.lora import adapter_of, add_adapter, load_trained
from trainer.models import LogProbs, Policy, load_policy, load_tokenizer, new_scorer

peft: Any = pytest.importorskip("peft", reason="needs the extra lora")


@pytest.fixture
def config(ppo_config: PPOConfig) -> PPOConfig:
    return replace(ppo_config, lora_rank=2, lora_alpha=4.0, learning_rate=1e-2)


def some(policy: Policy) -> torch.Tensor:
    """Log-probs of a few tokens."""
    with torch.no_grad():
        return policy(LogProbs(*packed([[1, 20, 30, 40], [1, 7, 9]])))


@pytest.mark.parametrize("seed", [0, 1])
def test_an_adapter_begins_as_its_reference_and_adds_a_product(
    policy: Policy, untrained_of: str, seed: int
) -> None:
    """The same bits at the start; then `x @ A.T @ B.T * alpha / rank` beside each linear layer."""
    whole, before = load_policy(untrained_of), torch.get_rng_state()
    reference = add_adapter(policy, untrained_of, 2, 8.0, seed)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(some(policy), some(reference))
    assert torch.equal(some(reference), some(whole))
    linear = {
        name: module
        for name, module in policy.lm.base_model.named_modules()
        if hasattr(module, "base_layer")
    }
    assert len(linear) == (4 if "gpt2" in policy.lm.config.model_type else 7) * 2
    by_name = dict(whole.lm.base_model.named_modules())
    for name, module in linear.items():
        torch.nn.init.normal_(module.lora_B["default"].weight, std=0.1)
        added = module.lora_B["default"].weight @ module.lora_A["default"].weight * 8.0 / 2
        weight = by_name[name].weight.data
        weight += added if isinstance(by_name[name], torch.nn.Linear) else added.T
    torch.testing.assert_close(some(policy), some(whole), atol=1e-5, rtol=1e-5)
    assert (some(policy) - some(reference)).abs().max() > 1e-2


def test_the_reference_holds_the_same_weights_once(policy: Policy, untrained_of: str) -> None:
    reference = add_adapter(policy, untrained_of, 2, 8.0, 0)
    held = {p.data_ptr() for p in policy.parameters() if not p.requires_grad}
    assert held == {p.data_ptr() for p in reference.parameters()}
    critic = new_scorer(untrained_of)
    check_frozen([policy, critic], [reference])
    policy.lm.get_output_embeddings().weight.requires_grad_(True)
    with pytest.raises(CheckFailed):
        check_frozen([policy, critic], [reference])


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")  # peft's, and rightly
def test_L15_a_head_with_an_adapter_is_an_error(policy: Policy) -> None:
    """Its `weight` is that of the layer below: the ops would go on without what is learned."""
    options = peft.LoraConfig(r=2, target_modules=["lm_head"])
    below = policy.lm.get_output_embeddings().weight
    peft.LoraModel(policy.lm, options, "default")
    assert policy.lm.get_output_embeddings().weight is below
    with pytest.raises(UserError, match="head has an adapter"):
        some(policy)


def test_only_the_adapter_is_trained_and_kept(config: PPOConfig, tmp_path: Path) -> None:
    source = Path(config.model, "model.safetensors")
    before = sha256(source)
    ppo.run(config)
    run_dir = Path(config.run_dir)
    (checkpoint, *_) = (run_dir / "checkpoints").iterdir()
    kept = checkpoint / "policy.safetensors"
    assert kept.stat().st_size < source.stat().st_size / 2
    assert sha256(source) == before
    first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert first["objective/kl"] == pytest.approx(0.0, abs=1e-4)
    written = {path.name for path in (run_dir / "policy").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= written
    assert "model.safetensors" not in written


def test_export_merges(config: PPOConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers reads from the folder is the policy as it was when the run ended."""
    kept = []
    inner = ppo.save_policy

    def spy(folder: Path, lm: Any, tokenizer: Any) -> None:
        kept.append(some(Policy(lm)))
        inner(folder, lm, tokenizer)

    monkeypatch.setattr(ppo, "save_policy", spy)
    ppo.run(config)
    out = tmp_path / "out"
    export.run(config.run_dir, str(out))
    whole = load_policy(str(out))
    torch.testing.assert_close(some(whole), kept[0], atol=1e-5, rtol=1e-5)
    assert (some(whole) - some(load_policy(config.model))).abs().max() > 1e-3
    assert load_tokenizer(str(out)).get_vocab() == load_tokenizer(config.model).get_vocab()
    assert not any("lora" in name for name, _ in whole.named_parameters())


def test_an_adapter_is_never_read_beside_other_weights(
    config: PPOConfig, make_model: Callable[..., str]
) -> None:
    config = replace(config, model=make_model(), critic="", rewards={"math:fsum": 1.0})
    models = ppo.load(config, torch.device("cpu"))
    folder = Path(config.run_dir, "policy")
    ppo.save_policy(folder, models.policy.lm, models.tokenizer)
    load_trained(str(folder))
    with pytest.raises(UserError, match="is an adapter and no whole model"):
        load_policy(str(folder))
    shutil.copy(Path(make_model(seed=1), "model.safetensors"), config.model)
    with pytest.raises(UserError, match="is not the model that the adapter"):
        load_trained(str(folder))


def test_a_run_with_an_adapter_goes_on_to_the_same_bits(
    config: PPOConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, updates=2, save_every_updates=1)
    ppo.run(replace(config, run_dir=str(tmp_path / "whole")))
    ppo.run(config)
    last = Path(config.run_dir, "checkpoints/00000002")
    shutil.rmtree(last)
    ppo.run(config, resume=True)
    assert differences(tmp_path / "whole", Path(config.run_dir)) == []


def test_what_a_checkpoint_keeps_comes_back(policy: Policy, untrained_of: str) -> None:
    add_adapter(policy, untrained_of, 2, 8.0, 0)
    kept = adapter_of(policy.lm)
    state = copy.deepcopy(kept.state_dict())
    before = some(policy)
    for p in kept.parameters():
        torch.nn.init.normal_(p)
    assert not torch.equal(some(policy), before)
    kept.load_state_dict(state)
    assert torch.equal(some(policy), before)
