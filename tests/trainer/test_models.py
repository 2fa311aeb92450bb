import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import TINY
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2Model

from trainer import attention, check, reward
from trainer.config import CheckFailed, RewardConfig, UserError
from trainer.data import packed
from trainer.models import (
    Policy,
    Scorer,
    dropout_of,
    forward_all,
    load_policy,
    load_scorer,
    load_tokenizer,
    new_policy,
    new_scorer,
    without_dropout,
)

ROWS = [[1, 20, 30, 40, 50], [1, 99], [1, 7, 8, 9, 10, 11, 12, 13, 14], [1, 30, 20]]


def test_a_mask_leaves_out(policy: Policy) -> None:
    ids, cu_seqlens = packed(ROWS)
    mask = torch.arange(len(ids)) % 2 == 0
    with torch.no_grad():
        whole = policy(ids, cu_seqlens)
        assert (whole[cu_seqlens[1:] - 1] == 0).all()  # nothing follows the last token
        torch.testing.assert_close(policy(ids, cu_seqlens, mask), whole * mask)


@pytest.mark.parametrize(
    ("load", "whole"), [(load_policy, [7, 8, 4, 5, 1]), (new_scorer, [7, 8, 9, 4, 5, 6, 1, 2])]
)
def test_the_trunk_computes_no_state_that_is_not_read(
    load: Callable[[str], nn.Module], whole: list[int], untrained: str
) -> None:
    module = load(untrained)
    if isinstance(module, Scorer):
        nn.init.normal_(module.model.score.weight)
    seen: list[list[int]] = []
    (trunk,) = (part for part in module.modules() if isinstance(part, GPT2Model))
    trunk.register_forward_pre_hook(
        lambda _, __, told: seen.append(told["input_ids"][0].tolist()), with_kwargs=True
    )
    ids, cu_seqlens = packed([[7, 8, 9], [4, 5, 6], [1, 2]])
    mask = torch.tensor([1, 0, 0, 0, 1, 0, 0, 0]).bool()
    found = []
    for read in (mask, None):
        out = module(ids, cu_seqlens, read)[mask]
        module.zero_grad()
        out.sum().backward()
        found.append((out, [p.grad for p in module.parameters()]))
    assert seen == [[7, 4, 5], whole]
    assert all(grad.count_nonzero() for grad in found[0][1])
    torch.testing.assert_close(*found)


def test_a_pass_over_nothing_that_is_read(policy: Policy) -> None:
    ids, cu_seqlens = packed([[], *ROWS])
    assert (policy(ids, cu_seqlens, torch.zeros_like(ids).bool()) == 0).all()


@pytest.mark.parametrize("tokens", [1, 10, 99])
def test_forward_all_restores_the_order(policy: Policy, tokens: int) -> None:
    ids, cu_seqlens = packed(ROWS)
    mask = torch.arange(len(ids)) % 3 > 0
    out = forward_all(policy, tokens, cu_seqlens, ids, mask)
    with torch.no_grad():
        torch.testing.assert_close(out, policy(ids, cu_seqlens, mask), atol=1e-5, rtol=0)
    assert not out.is_inference()


@pytest.fixture
def with_dropout(untrained: str, tmp_path: Path) -> str:
    folder = shutil.copytree(untrained, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    (folder / "config.json").write_text(json.dumps(config | rates))
    return str(folder)


@pytest.mark.parametrize("load", [load_policy, new_scorer])
def test_T5_dropout_in_a_config_is_off(with_dropout: str, load: Callable[[str], nn.Module]) -> None:
    module = load(with_dropout)
    assert dropout_of(module) == []
    module.train()  # gradient checkpointing needs this mode; nothing may be dropped in it either
    assert torch.equal(module(*packed(ROWS)), module(*packed(ROWS)))


def test_T5_dropout_is_checked(policy: Policy) -> None:
    policy.lm.base_model.late = nn.Dropout(0.1)
    with pytest.raises(CheckFailed, match=r"dropout is on in Policy: .*late"):
        check.check_frozen([policy], [])


def test_T5_a_rate_that_attention_reads_is_seen(untrained: str) -> None:
    policy = load_policy(untrained)
    policy.lm.base_model.h[0].attn.attention_dropout = 0.1
    assert dropout_of(policy) == ["lm.transformer.h.0.attn.attention_dropout"]


def test_T16_each_model_has_a_config_of_its_own(untrained: str) -> None:
    tokenizer = load_tokenizer(untrained)
    config = load_policy(untrained).lm.config
    copied = without_dropout(config)
    copied.n_head = 99
    assert config.n_head == TINY.heads
    first, second = new_policy(TINY, tokenizer), new_policy(TINY, tokenizer)
    first.lm.set_attn_implementation("eager")
    assert second.lm.config._attn_implementation == attention.NAME
    given = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=16)
    lm = AutoModelForCausalLM.from_config(given)  # transformers keeps the very object
    Policy(AutoModelForCausalLM.from_config(without_dropout(given)))
    assert lm.config is given
    assert given._attn_implementation == "sdpa"


def test_a_scorer_gives_units_of_its_config(untrained: str) -> None:
    scorer = new_scorer(untrained)
    nn.init.normal_(scorer.model.score.weight)
    raw = scorer(*packed(ROWS))
    scorer.model.config.update({"score_mean": 2.0, "score_std": 4.0})
    torch.testing.assert_close(scorer(*packed(ROWS)), (raw - 2) / 4)


def test_a_scorer_reads_no_token_after(untrained: str) -> None:
    scorer = new_scorer(untrained)
    nn.init.normal_(scorer.model.score.weight)
    with torch.no_grad():
        torch.testing.assert_close(
            scorer(*packed([[1, 5, 9]]))[:2], scorer(*packed([[1, 5]])), atol=1e-6, rtol=0
        )


def test_a_reward_model_is_reloaded_as_it_was(trained: dict) -> None:
    scorer = load_scorer(trained["reward_model"])
    assert isinstance(scorer, Scorer)
    assert scorer.model.config.score_std > 0


def test_a_folder_without_a_trained_reward_head_is_an_error(trained: dict, tmp_path: Path) -> None:
    sentence = "has no trained reward head"
    with pytest.raises(UserError, match=sentence):
        load_scorer(trained["model"])
    # a head that is there but was not trained, and a record without a head
    fresh = new_scorer(trained["model"])
    fresh.model.save_pretrained(tmp_path / "fresh")
    with pytest.raises(UserError, match=sentence):
        load_scorer(str(tmp_path / "fresh"))
    folder = shutil.copytree(trained["model"], tmp_path / "claims")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"reward_head_trained": True}))
    with pytest.raises(UserError, match=sentence):
        load_scorer(str(folder))


def test_a_reward_model_whose_scores_do_not_differ_is_not_written(
    trained: dict, text: Path, tmp_path: Path
) -> None:
    config = RewardConfig(
        run_dir=str(tmp_path / "reward"),
        model=trained["model"],
        train=str(text / "train_pairs.jsonl"),
        heldout=str(text / "heldout_pairs.jsonl"),
        steps=1,
        max_tokens=32,
        learning_rate=1e-60,  # the head stays at zero
    )
    with pytest.raises(UserError, match=r"spread by 0\.0: the head has learned nothing"):
        reward.run(config)
    assert not (tmp_path / "reward/model").exists()


def test_a_critic_is_no_reward_model(trained: dict, ppo_config, tmp_path: Path) -> None:
    from trainer import ppo

    ppo.run(replace(ppo_config, updates=1))
    with pytest.raises(UserError, match="has no trained reward head"):
        load_scorer(f"{ppo_config.run_dir}/critic")


def test_a_folder_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it has no config\.json"):
        load_policy(str(tmp_path))


def test_a_language_model_that_lacks_weights_is_an_error(untrained: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(untrained, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights.pop("transformer.ln_f.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks transformer\.ln_f\.weight"):
        load_policy(str(folder))


def test_a_head_that_is_not_known_is_refused(
    untrained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPT2LMHeadModel

    inner = GPT2LMHeadModel.forward

    def scaled(self, *args, **kwargs):
        out = inner(self, *args, **kwargs)
        out.logits = out.logits * 3
        return out

    monkeypatch.setattr(GPT2LMHeadModel, "forward", scaled)
    with pytest.raises(UserError, match="between trunk and logits"):
        load_policy(untrained)
