"""What the stages say of a model is what transformers says of the folder that they wrote.

Tiny models of each family, with biases that are not zero. A family that packing does not know is
refused for its own reason.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import KIND, UNKIND, sentences
from tokenizers import processors
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from trainer import reward, sft
from trainer.checkpoint import save_model
from trainer.config import RewardConfig, SFTConfig, UserError
from trainer.data import Prompt, known_ids, packed, train_tokenizer, write_rows
from trainer.models import load_policy, load_scorer, load_tokenizer
from trainer.rollout import generate

WIDTH: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 48, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OLD: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
HEAD: dict[str, Any] = {"head_dim": 8}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}  # fmt: skip

# what each needs besides WIDTH
SCORED: dict[str, dict[str, Any]] = {
    "biogpt": {},
    "deepseek_v3": {"n_routed_experts": 4, "n_shared_experts": 1} | LATENT | MOE,
    "gemma": HEAD,
    "glm4": HEAD,
    "gpt2": OLD,
    "gpt_bigcode": OLD,
    "gpt_neox": {},
    "gptj": OLD | {"rotary_dim": 4},
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "olmo2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16} | MOE,
    "qwen3": HEAD,
    "qwen3_moe": {"num_experts": 4} | HEAD | MOE,
    "smollm3": {},
    "starcoder2": {"sliding_window": None},
}
WITHOUT_SCORE: dict[str, dict[str, Any]] = {  # transformers has no classifier of these
    "codegen": OLD | {"rotary_dim": 4},
    "granite": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom: transformers lets no other attention", {"n_layer": 2, "n_head": 4}),
    "cohere": ("a cohere does something between trunk and logits", {}),
    "falcon": ("falcon: transformers lets no other attention", {}),
    "gemma2": ("gemma2: packing does not know sliding_attention", HEAD),
    "gemma3_text": ("gemma3_text: packing does not know sliding_attention", HEAD),
    "gpt_neo": (
        "gpt_neo: transformers lets no other attention",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    "gpt_oss": ("packing does not know sliding_attention", {"num_local_experts": 4} | HEAD),
    "granite": ("a granite does something between trunk and logits", {"logits_scaling": 8.0}),
    "llama4_text": (
        "packing does not know chunked_attention",
        {"num_local_experts": 2, "intermediate_size_mlp": 48} | HEAD,
    ),
    "mamba": ("mamba: packing does not know linear_attention", {}),
    "mixtral": (
        "mixtral: output_router_logits asks for a loss of the router",
        {"num_local_experts": 4, "sliding_window": None, "output_router_logits": True},
    ),
    "nemotron": ("NemotronAttention is told nothing of the pass", {}),
    "qwen3_next": ("packing does not know linear_attention", {"num_experts": 4} | HEAD | MOE),
    "rwkv": ("rwkv: transformers lets no other attention", {"attention_hidden_size": 32}),
    "stablelm": ("StableLmAttention is told nothing of the pass", {}),
    "t5": (
        "transformers has no AutoModelForCausalLM of the family t5",
        {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    ),
}
TEXTS = {"train": sentences(KIND, 8), "heldout": sentences(KIND, 4, seed=1)}
REJECTED = {"train": sentences(UNKIND, 8), "heldout": sentences(UNKIND, 4, seed=1)}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Makes the folder of a random model of a family."""

    def make(family: str, extra: dict[str, Any]) -> str:
        folder = tmp_path_factory.mktemp(family) / "model"
        tokenizer = train_tokenizer(itertools.chain(*TEXTS.values(), *REJECTED.values()), 280)
        if family == "opt":  # its BOS is its EOS
            single = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
            tokenizer.backend_tokenizer.post_processor = single
            tokenizer.bos_token = "</s>"
        # a family may have a tokenizer of its own, which knows a token more
        config = AutoConfig.for_model(family, **WIDTH | extra)
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        config.vocab_size = known_ids(load_tokenizer(str(folder)))
        torch.manual_seed(0)
        auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
        lm = auto.from_config(config)
        with torch.no_grad():
            for name, x in lm.named_parameters():
                if name.endswith("bias"):
                    x.normal_(0, 0.3)
        save_model(folder, lm, tokenizer)
        return str(folder)

    return make


def ids_of(folder: str, text: str) -> Tensor:
    """A text as its tokenizer begins it, and the end behind it, `(1, T)`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])


def logprobs_of(lm: Any, ids: Tensor) -> Tensor:
    """Log-probs of all but the first token by transformers alone, `(T - 1,)`."""
    found = lm(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return found.gather(-1, ids[0, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("family", [*SCORED, *WITHOUT_SCORE])
def test_the_held_out_loss_is_that_of_transformers(
    family: str, make: Callable[..., str], tmp_path: Path
) -> None:
    """Of the folder that two steps of SFT have written; and so are log-probs at sampling."""
    files = {name: str(tmp_path / f"{name}.jsonl") for name in TEXTS}
    for name, file in files.items():
        write_rows(Path(file), ({"text": text} for text in TEXTS[name]))
    model = make(family, (SCORED | WITHOUT_SCORE)[family])
    options: dict[str, Any] = {"steps": 2, "sequences_per_step": 4, "max_tokens": 48}
    result = sft.run(SFTConfig(run_dir=str(tmp_path / "sft"), model=model, **files, **options))

    folder = str(tmp_path / "sft/model")
    lm = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        nats = [logprobs_of(lm, ids_of(folder, text)) for text in TEXTS["heldout"]]
        assert min(map(len, nats)) > 3  # whole texts, and not their ends alone
        assert result["loss"] == pytest.approx(-torch.cat(nats).mean().item(), abs=1e-5)
        prompts = [Prompt(ids_of(folder, text)[0, :n].tolist(), "") for n, text in enumerate(
            TEXTS["heldout"], start=2)]  # fmt: skip
        rolled = generate(
            load_policy(folder), prompts, [2], max_new_tokens=6, temperature=1.0,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        sampled = rolled.logprobs.split(rolled.lengths.tolist())
        for ids, prompt, found in zip(rolled.sequences(), prompts, sampled, strict=True):
            start = len(prompt.ids) - 1
            theirs = logprobs_of(lm, torch.tensor([ids]))[start:]
            torch.testing.assert_close(found[start:-1], theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", SCORED)
def test_a_score_is_that_of_transformers(
    family: str, make: Callable[..., str], tmp_path: Path
) -> None:
    """Of the folder that the reward stage has written, read at the end of each text."""
    files = {name: str(tmp_path / f"{name}.jsonl") for name in TEXTS}
    for name, file in files.items():
        pairs = zip(TEXTS[name], REJECTED[name], strict=True)
        write_rows(Path(file), ({"prompt": "", "chosen": a, "rejected": b} for a, b in pairs))
    model = make(family, SCORED[family])
    options: dict[str, Any] = {"steps": 2, "pairs_per_step": 4, "max_tokens": 48}
    config = RewardConfig(
        run_dir=str(tmp_path / "reward"), model=model, learning_rate=1e-2, **files, **options
    )
    result = reward.run(config)

    folder = str(tmp_path / "reward/model")
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = [ids_of(folder, text) for text in (*TEXTS["heldout"], *REJECTED["heldout"])]
    with torch.no_grad():
        raw = torch.stack([theirs(input_ids=ids).logits[0, 0] for ids in rows])
        ids, cu_seqlens = packed([row[0].tolist() for row in rows])
        units = load_scorer(folder)(ids, cu_seqlens)[cu_seqlens[1:] - 1]
    assert result["score_std"] == pytest.approx(raw.std().item(), abs=1e-5)
    ours = units * result["score_std"] + result["score_mean"]
    torch.testing.assert_close(ours, raw, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", WITHOUT_SCORE)
def test_a_family_without_a_classifier_is_no_reward_model(
    family: str, make: Callable[..., str]
) -> None:
    sentence = f"transformers has no AutoModelForSequenceClassification of the family {family}"
    with pytest.raises(UserError, match=sentence):
        load_scorer(make(family, WITHOUT_SCORE[family]))


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_is_not_known_is_refused_for_its_own_reason(
    family: str, make: Callable[..., str]
) -> None:
    sentence, extra = REFUSED[family]
    with pytest.raises(UserError, match=sentence):
        load_policy(make(family, extra))
