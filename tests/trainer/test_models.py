import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TINY, numbers_of
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2Model

from trainer import attention, check, ppo, reward, sft
from trainer.config import CheckFailed, PPOConfig, RewardConfig, Scratch, SFTConfig, UserError
from trainer.data import Prompt, packed
from trainer.models import (
    LogProbs,
    Policy,
    PPOLoss,
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
from trainer.rollout import generate

ROWS = [[1, 20, 30, 40, 50], [1, 99], [1, 7, 8, 9, 10, 11, 12, 13, 14], [1, 30, 20]]


def test_a_mask_leaves_out(policy: Policy) -> None:
    ids, cu_seqlens = packed(ROWS)
    mask = torch.arange(len(ids)) % 2 == 0
    with torch.no_grad():
        whole = policy(LogProbs(ids, cu_seqlens))
        assert (whole[cu_seqlens[1:] - 1] == 0).all()  # nothing follows the last token
        torch.testing.assert_close(policy(LogProbs(ids, cu_seqlens, mask)), whole * mask)


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
        out = numbers_of(module)(ids, cu_seqlens, read)[mask]
        module.zero_grad()
        out.sum().backward()
        found.append((out, [p.grad for p in module.parameters()]))
    assert seen == [[7, 4, 5], whole]
    assert all(grad.count_nonzero() for grad in found[0][1])
    torch.testing.assert_close(*found)


def test_a_pass_over_nothing_that_is_read(policy: Policy) -> None:
    ids, cu_seqlens = packed([[], *ROWS])
    assert (policy(LogProbs(ids, cu_seqlens, torch.zeros_like(ids).bool())) == 0).all()


@pytest.mark.parametrize("tokens", [1, 10, 99])
def test_forward_all_restores_the_order(policy: Policy, tokens: int) -> None:
    ids, cu_seqlens = packed(ROWS)
    mask = torch.arange(len(ids)) % 3 > 0
    out = forward_all(numbers_of(policy), tokens, cu_seqlens, ids, mask)
    with torch.no_grad():
        torch.testing.assert_close(out, policy(LogProbs(ids, cu_seqlens, mask)), atol=1e-5, rtol=0)
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
    numbers = numbers_of(module)
    assert torch.equal(numbers(*packed(ROWS)), numbers(*packed(ROWS)))


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
    ppo.run(replace(ppo_config, updates=1))
    with pytest.raises(UserError, match="has no trained reward head"):
        load_scorer(f"{ppo_config.run_dir}/critic")


def test_a_folder_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it has no config\.json"):
        load_policy(str(tmp_path))


def damaged(folder: Path, name: str, content: bytes | dict[str, Any] | None) -> None:
    """Replaces a file of a model's folder, some settings in it, or takes it away."""
    path = folder / name
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content).encode()
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("model.safetensors", None, r"model has no weights in safetensors$"),
        ("model.safetensors", POINTER, r"model\.safetensors is a pointer .* run `git lfs pull`"),
        ("tokenizer.json", POINTER, r"tokenizer\.json is a pointer .* run `git lfs pull`"),
        ("config.json", POINTER, r"config\.json is a pointer .* run `git lfs pull`"),
        ("model.safetensors", b"", r"model\.safetensors is damaged or cut short .*copy it again"),
        ("config.json", b"{", r"config\.json is not JSON .*: copy it again"),
        ("config.json", b"\xff\xfe", r"config\.json is not JSON"),
        ("config.json", b"[]", r"config\.json holds nothing: copy it again"),
        ("config.json", b'{"model_type": "none"}', r"\(config\.json\) cannot be .*`none`"),
        ("config.json", {"n_head": 3}, "cannot be loaded .*divisible"),
        ("config.json", {"n_embd": 32}, r"c_attn.bias is \(48,\) in its weights, \(96,\) by"),
        (
            "config.json",
            {"quantization_config": {"bits": 4}},
            r"weights are quantised, {'bits': 4}",
        ),
        ("generation_config.json", b"{", r"generation_config\.json is not JSON"),
        ("tokenizer.json", b"{}", r"tokenizer\.json holds nothing: copy it again"),
        ("tokenizer.json", b'{"version": "1.0"}', r"tokenizer\.json, .* cannot be loaded"),
        ("tokenizer.json", None, r"tokenizer\.json, .* cannot be loaded"),
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json is not JSON"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "model-1.safetensors"}}',
            r"model-1\.safetensors is missing: copy the folder again",
        ),
    ],
)
@pytest.mark.parametrize("load", [load_policy, new_scorer])
def test_a_folder_with_a_damaged_file_is_refused_by_its_name(
    load: Callable[[str], nn.Module],
    name: str,
    content: Any,
    sentence: str,
    untrained: str,
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(untrained, tmp_path / "model")
    damaged(folder, name, content)
    with pytest.raises(UserError, match=sentence):
        load(str(folder))


def test_truncated_weights_are_refused_by_name(untrained: str, tmp_path: Path) -> None:
    folder = shutil.copytree(untrained, tmp_path / "model")
    whole = (folder / "model.safetensors").read_bytes()
    damaged(folder, "model.safetensors", whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged or cut short"):
        load_policy(str(folder))


def test_pickled_weights_are_refused_with_the_way_out(untrained: str, tmp_path: Path) -> None:
    folder = shutil.copytree(untrained, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"but pytorch_model\.bin: pickles, .*save_pretrained"):
        load_policy(str(folder))


@pytest.mark.parametrize("load", [load_policy, new_scorer])
def test_weights_that_are_not_finite_are_refused_by_name(
    load: Callable[[str], nn.Module], untrained: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(untrained, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.1.mlp.c_fc.weight"][3, 5] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"not finite: transformer\.h\.1\.mlp\.c_fc\.weight$"):
        load(str(folder))


@pytest.mark.parametrize("load", [load_policy, new_scorer])
def test_tokens_that_the_embedding_has_no_rows_for(
    load: Callable[[str], nn.Module], untrained: str, tmp_path: Path
) -> None:
    """Tokens were added to the tokenizer, the embedding was not resized."""
    folder = str(shutil.copytree(untrained, tmp_path / "model"))
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(folder)
    sentence = r"tokenizer has 282 ids, the model's embedding 280 rows: .*resize_token_embeddings"
    with pytest.raises(UserError, match=sentence):
        load(folder)
    lm = AutoModelForCausalLM.from_pretrained(folder)
    lm.resize_token_embeddings(282)
    lm.save_pretrained(folder)
    load(folder)  # the way out that the sentence names


def with_rows_more(folder: str, out: Path, rows: int = 64) -> str:
    """A copy of a model whose embedding has more rows than its tokenizer has tokens."""
    shutil.copytree(folder, out)
    lm = AutoModelForCausalLM.from_pretrained(folder)
    lm.resize_token_embeddings(lm.config.vocab_size + rows)
    with torch.no_grad():  # likely ones, so that it shows where they count
        lm.get_input_embeddings().weight[-rows:] = lm.get_input_embeddings().weight[7] * 3
    lm.save_pretrained(out)
    return str(out)


def test_rows_that_the_tokenizer_lacks_are_outside_of_every_softmax(
    policy: Policy, untrained_of: str, tmp_path: Path
) -> None:
    padded = load_policy(with_rows_more(untrained_of, tmp_path / "padded"))
    assert padded.lm.config.vocab_size == 344
    ids, cu_seqlens = packed(ROWS)
    options = {
        "old_logprobs": torch.full([len(ids)], -1.0),
        "advantages": torch.linspace(-1, 1, len(ids)),
        "ref_logprobs": torch.full([len(ids)], -1.0),
        "entropy_stats": True,
        "entropy_coef": 0.1,
    }
    prompts = [Prompt(row, "") for row in ROWS * 25]
    found = []
    for module in (policy, padded):
        of = LogProbs(ids, cu_seqlens, temperature=0.7)
        logprobs = module(of)
        loss, _ = module(PPOLoss(of, options))
        module.zero_grad()
        loss.loss.backward()
        gradient = module.lm.get_input_embeddings().weight.grad
        chance = torch.Generator().manual_seed(0)
        rollouts = generate(
            module, prompts, [2], max_new_tokens=6, temperature=2.0, generator=chance
        )
        stats = [loss.stats["entropy"], loss.stats["approx_kl_k3"]]
        found.append((logprobs, loss.loss, *stats, gradient[:280], rollouts.logprobs))
        assert max(map(max, rollouts.responses())) < 280
        assert not gradient[280:].any()
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def test_stages_learn_and_write_a_padded_embedding(
    trained: dict, sft_config: SFTConfig, ppo_config: PPOConfig, text: Path, tmp_path: Path
) -> None:
    """The loss is that of the model without the rows, and the folder keeps them."""
    padded = with_rows_more(trained["model"], tmp_path / "padded")
    short = replace(sft_config, scratch=Scratch(), steps=1)
    losses = [
        sft.run(replace(short, model=model, run_dir=str(tmp_path / name)))["loss"]
        for name, model in (("plain", trained["model"]), ("sft", padded))
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    before = load_file(f"{padded}/model.safetensors")["transformer.wte.weight"]
    after = load_file(tmp_path / "sft/model/model.safetensors")["transformer.wte.weight"]
    assert before.shape == after.shape == (344, 16)
    ppo.run(replace(ppo_config, model=padded, updates=1, heldout=str(text / "heldout.jsonl")))
    written = load_policy(f"{ppo_config.run_dir}/policy")
    assert (written.lm.config.vocab_size, written.vocab_size) == (344, 280)


def retokenised(folder: str, out: Path, **names: str) -> str:
    """A copy of a model whose tokenizer begins or ends its texts with other tokens."""
    shutil.copytree(folder, out)
    damaged(out, "tokenizer_config.json", names)
    if "bos_token" not in names:
        return str(out)
    begun = json.loads((out / "tokenizer.json").read_text())
    begun["post_processor"] = None
    (out / "tokenizer.json").write_text(json.dumps(begun))
    return str(out)


def given_as(role: str, folder: str, config: PPOConfig) -> PPOConfig:
    """The options of a run with a model in one of its places."""
    if role == "rewards":
        return replace(config, rewards={folder: 1.0})
    heldout = config.train.replace("train", "heldout") if role == "judge" else ""
    return replace(config, heldout=heldout, **{role: folder})


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ({"eos_token": "!"}, "trained on end with !, those of the policy with </s>"),
        (
            {"bos_token": "<s>"},  # which no text is begun with
            "begin with no token of their own, those of the policy with <s>",
        ),
    ],
)
@pytest.mark.parametrize("role", ["rewards", "critic", "judge"])
def test_a_model_trained_on_other_beginnings_and_ends_is_refused(
    role: str, names: dict[str, str], sentence: str, ppo_config: PPOConfig, tmp_path: Path
) -> None:
    other = retokenised(ppo_config.critic or "", tmp_path / "other", **names)
    with pytest.raises(UserError, match=f"{other}: .*{sentence}"):
        ppo.run(given_as(role, other, ppo_config))


def test_a_policy_that_begins_no_text_needs_a_reward_model_that_does_not(
    ppo_config: PPOConfig, tmp_path: Path
) -> None:
    model = retokenised(ppo_config.model, tmp_path / "other", bos_token="<s>")
    with pytest.raises(UserError, match="begin with <s>, those of the policy with none"):
        ppo.run(replace(ppo_config, model=model))


@pytest.mark.parametrize("role", ["rewards", "critic", "judge"])
def test_a_model_of_another_vocabulary_is_refused(
    role: str, ppo_config: PPOConfig, tmp_path: Path
) -> None:
    other = shutil.copytree(ppo_config.critic or "", tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids["!"], ids["?"] = ids["?"], ids["!"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="other: its model has another vocabulary than the policy"):
        ppo.run(given_as(role, str(other), ppo_config))


def test_a_language_model_that_lacks_weights_is_an_error(untrained: str, tmp_path: Path) -> None:
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
