"""Packed, padded and single rows are the same; what packing does not know is refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from trainer.attention import KeyValueCache, Packed, use_packed
from trainer.config import UserError
from trainer.data import packed
from trainer.models import LogProbs, NextLogits, Policy, Scorer, States

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 60, "max_position_embeddings": 40,
    "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 40,
    "initializer_range": 0.3, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "gpt2": GPT2Config(**GPT2),
    "gpt2, scaled by layer": GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True),
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, untied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
}
ROWS = [[1, 20, 30], [7], [1, 7, 8, 9, 10, 11, 12, 13, 14], [5, 30, 20], [2, 3], [9, 8, 7]]


def made(config: PreTrainedConfig, auto: Any = AutoModelForCausalLM) -> Any:
    torch.manual_seed(0)
    return auto.from_config(config, attn_implementation="eager").eval()


def by_transformers(config: PreTrainedConfig, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probs of the next tokens by transformers' own eager attention, `(B, T - 1)`."""
    logits = made(config)(input_ids=ids, attention_mask=mask.long()).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_T4_packed_padded_and_single_rows_have_the_same_logprobs(family: str) -> None:
    config = FAMILIES[family]
    together = Policy(made(config))(LogProbs(*packed(ROWS)))
    width = max(map(len, ROWS))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in ROWS])
    mask = torch.arange(width) < torch.tensor([len(row) for row in ROWS])[:, None]
    padded = by_transformers(config, ids, mask)
    for i, (row, found) in enumerate(zip(ROWS, together.split([*map(len, ROWS)]), strict=True)):
        one = torch.tensor([row])
        single = by_transformers(config, one, torch.ones_like(one, dtype=torch.bool))[0]
        torch.testing.assert_close(found[:-1], single, atol=1e-5, rtol=0)
        torch.testing.assert_close(found[:-1], padded[i, : len(row) - 1], atol=1e-5, rtol=0)
        alone = Policy(made(config))(LogProbs(*packed([row])))
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)
        assert found[-1] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_T4_gradients_are_those_of_single_rows(family: str) -> None:
    together, apart = Policy(made(FAMILIES[family])), Policy(made(FAMILIES[family]))
    together(LogProbs(*packed(ROWS))).sum().backward()
    for row in ROWS:
        apart(LogProbs(*packed([row]))).sum().backward()
    for a, b in zip(together.parameters(), apart.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_T4_a_scorer_gives_a_row_what_it_gives_it_alone(family: str) -> None:
    config = type(FAMILIES[family])(**{**FAMILIES[family].to_dict(), "num_labels": 1})
    config.score_mean, config.score_std = 0.5, 2.0
    scorer = Scorer(made(config, AutoModelForSequenceClassification))
    together = scorer(*packed(ROWS)).split([*map(len, ROWS)])
    theirs = made(config, AutoModelForSequenceClassification)
    for row, found in zip(ROWS, together, strict=True):
        torch.testing.assert_close(found, scorer(*packed([row])), atol=1e-5, rtol=0)
        last = theirs(input_ids=torch.tensor([row])).logits[0, 0]
        torch.testing.assert_close(found[-1], (last - 0.5) / 2, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompts", [[[1, 2], [3, 4]], [[1, 2, 3, 4, 5], [6], [7, 8]]])
@torch.no_grad()
def test_T4_step_by_step_is_as_all_at_once(family: str, prompts: list[list[int]]) -> None:
    """Prompts of one length and of several, shared by rows; half of the rows leave on the way."""
    policy = Policy(made(FAMILIES[family]))
    asked = torch.tensor([0, 1, 0, len(prompts) - 1])
    ids, cu_seqlens = packed(prompts)
    cache = KeyValueCache(cu_seqlens, asked, room=6)
    logits = policy(NextLogits(ids, cache))
    rows = [[*prompts[i]] for i in asked]
    for step in range(6):
        for row, found in zip(rows, logits, strict=True):
            out = policy.lm(**Packed(packed([row])[1]).inputs(torch.tensor(row)), use_cache=False)
            torch.testing.assert_close(found, out.logits[0, -1], atol=1e-4, rtol=1e-5)
        if step == 2:
            cache.keep(torch.tensor([1, 3]))
            rows = [rows[1], rows[3]]
        for i, row in enumerate(rows):
            row.append((7 * step + i) % 60)
        logits = policy(NextLogits(torch.tensor([row[-1] for row in rows]), cache))


WINDOW = {**SIZES, "sliding_window": 3, "max_window_layers": 1}
UNKNOWN = {
    "mistral.*sliding_attention|sliding_window": MistralConfig(**SIZES, sliding_window=3),
    "qwen2: .*sliding_attention": Qwen2Config(**WINDOW, use_sliding_window=True),
    "a window beyond any probe.*|sliding": MistralConfig(**SIZES, sliding_window=4096),
    "gemma2: .*(sliding_attention|softcap)": Gemma2Config(**SIZES, head_dim=8),
    "gemma2: .*attn_logit_softcapping": Gemma2Config(
        **SIZES, head_dim=8, layer_types=["full_attention"] * 2
    ),
    "bloom": BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=60),  # alibi
    "gpt_neo": GPTNeoConfig(
        hidden_size=32, num_layers=2, num_heads=4, vocab_size=60, window_size=3,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=40,
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", UNKNOWN)
def test_T15_what_packing_does_not_know_is_refused_by_name(sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        use_packed(made(UNKNOWN[sentence]))


def test_T15_what_shows_in_numbers_only_is_refused() -> None:
    """A model that masks on its own, in its modules, and tells no one."""
    lm = made(FAMILIES["llama"])
    inner = lm.model.layers[0].self_attn.forward

    def own(hidden_states: Tensor, **options: Any) -> Any:
        out, weights = inner(hidden_states, **options)
        return out + hidden_states.mean(1, keepdim=True), weights  # from the whole row

    lm.model.layers[0].self_attn.forward = own
    with pytest.raises(UserError, match="llama: packed sequences differ by"):
        use_packed(lm)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"softcap": 30.0}, "LlamaAttention asks for softcap"),
        ({"sliding_window": 4}, "LlamaAttention asks for sliding_window"),
        ({"s_aux": torch.zeros(4)}, "LlamaAttention asks for s_aux"),
        ({"dropout": 0.1}, "LlamaAttention asks for dropout"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "asks for a mask of its own"),
    ],
)
def test_T15_what_a_block_asks_of_attention_is_refused(option: Any, sentence: str) -> None:
    from trainer.attention import attend

    module = made(FAMILIES["llama"]).model.layers[0].self_attn
    layout, states = Packed(torch.tensor([0, 3])), [torch.zeros(1, 4, 3, 8)] * 3
    given: dict[str, Any] = {"attention_mask": None, "layout": layout, "scaling": None} | option
    with pytest.raises(UserError, match=sentence):
        attend(module, *states, **given)


def test_nothing_of_a_pass_is_left_behind() -> None:
    """A pass that fails, then another: no layout stays with the model."""
    policy = Policy(made(FAMILIES["qwen2"]))
    before = policy(LogProbs(*packed(ROWS)))
    with pytest.raises(IndexError):
        policy(LogProbs(*packed([[1, 2, 99]])))
    torch.testing.assert_close(policy(LogProbs(*packed(ROWS))), before, rtol=0, atol=0)
    with pytest.raises(UserError, match="Qwen2Attention is told nothing of the pass"):
        policy.lm(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_neighbours_of_equal_length_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer import attention

    shapes: list[tuple[int, ...]] = []
    inner = attention.scaled_dot_product_attention

    def spy(query: Tensor, *args: Any, **options: Any) -> Tensor:
        shapes.append(tuple(query.shape))
        return inner(query, *args, **options)

    policy = Policy(made(FAMILIES["llama"]))
    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    policy(States(*packed([[1], [2, 3], [4, 5], [], [6, 7, 8]])))
    assert shapes == [(1, 4, 1, 8), (2, 4, 2, 8), (1, 4, 3, 8)] * 2  # no token is padding
