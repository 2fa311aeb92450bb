"""Policy, critic, reference and reward model, as modules that go from token ids to numbers.

A wrapper (DDP, FSDP) goes around these two modules, so nothing outside reads a head's weight or
calls a trunk. Rows are padded on the right: a causal model never looks there, so a forward pass
needs no mask and padded rows cost only time. Only sampling knows another layout, and
`KeyValueCache` keeps it.

This is the one file that touches transformers' names for its cache.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from ppokern import Loss, linear_ppo_loss, linear_selected_logprobs

from .config import Scratch, require
from .data import micro_batches

logging.set_verbosity_error()  # warnings: of fresh heads, of padding without a mask; both are meant
logging.disable_progress_bar()


class KeyValueCache:
    """Keys and values of the rows that are still being sampled, and where each row stands.

    Prompts of unequal length are padded on the left; then each row's real tokens are marked and its
    positions counted.
    """

    def __init__(self, attended: Tensor) -> None:
        """Takes where the prompts' tokens stand: `(B, P)` bool."""
        self.past: Any = None
        self.attended = None if bool(attended.all()) else attended

    def inputs(self, ids: Tensor, config: PreTrainedConfig) -> dict[str, Any]:
        """What the trunk is told besides ids: the past and, if a row is padded, positions."""
        if self.past is None:
            self.past = DynamicCache(config=config)
        if self.attended is None:
            return {"past": self.past}
        new = self.past.get_seq_length() + ids.shape[1] - self.attended.shape[1]
        self.attended = torch.nn.functional.pad(self.attended, (0, new), value=True)
        positions = (self.attended.long().cumsum(-1) - 1).clamp(min=0)
        positions = positions[:, -ids.shape[1] :]
        return {
            "past": self.past,
            "attention_mask": self.attended.long(),
            "position_ids": positions,
        }

    def keep(self, rows: Tensor) -> None:
        """Leaves out all rows but these: `(b,)` indices."""
        self.past.batch_select_indices(rows)
        if self.attended is not None:
            self.attended = self.attended[rows]


class Policy(nn.Module):
    """A causal language model."""

    def __init__(self, lm: PreTrainedModel) -> None:
        """Takes a model with a language head."""
        super().__init__()
        self.lm = lm
        names = inspect.signature(lm.base_model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @property
    def context_tokens(self) -> int:
        """Longest sequence that the model can read."""
        return self.lm.config.max_position_embeddings

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        temperature: float = 1.0,
        cache: KeyValueCache | None = None,
        **ppo: Any,
    ) -> Tensor | Loss:
        """Log-probs of the tokens that follow, or a loss on them, or logits to sample from.

        Args:
            ids: `(B, T)`, padded on the right; with a cache: the ids that are new to it.
            mask: `(B, T - 1)` bool; position `i` stands for `ids[:, i + 1]`.
            temperature: of log-probs and loss.
            cache: asks for the logits behind the last token, `(B, V)`.
            **ppo: tensors `(B, T - 1)` and options of `ppokern.linear_ppo_loss`: ask for that loss.

        Returns:
            `(B, T - 1)` log-probs in nats, 0 where masked; or a `Loss`; or `(B, V)` logits.
        """
        head: Any = self.lm.get_output_embeddings()
        softcap = getattr(self.lm.config, "final_logit_softcapping", None)
        if cache is not None:
            logits = head(self._hidden(ids, **cache.inputs(ids, self.lm.config))[:, -1])  # (B, V)
            return logits if softcap is None else softcap * torch.tanh(logits / softcap)
        hidden = self._hidden(ids)[:, :-1]  # (B, T - 1, H): hidden i says what ids i + 1 may be
        op = linear_ppo_loss if ppo else linear_selected_logprobs
        options = {"bias": head.bias, "mask": mask, "temperature": temperature, "softcap": softcap}
        return op(hidden, head.weight, ids[:, 1:], **options, **ppo)

    def _hidden(self, ids: Tensor, past: DynamicCache | None = None, **extra: Any) -> Tensor:
        extra |= {"use_cache": past is not None, self._cache_name: past}
        return self.lm.base_model(input_ids=ids, **extra).last_hidden_state  # (B, T, H)

    @torch.no_grad()
    def knows_its_head(self) -> bool:
        """Whether log-probs made here are those that transformers itself would make."""
        ids = torch.arange(4, device=self.lm.device)[None]  # (1, 4)
        logprobs = self.lm(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        theirs = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
        return torch.allclose(self(ids), theirs, atol=1e-3)


class Scorer(nn.Module):
    """A body with a scalar head: a critic or a reward model.

    Its numbers are given in units of the config's `score_std` from its `score_mean`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes a model for sequence classification with one label."""
        super().__init__()
        self.model = model

    @property
    def context_tokens(self) -> int:
        """Longest sequence that the model can read."""
        return self.model.config.max_position_embeddings

    def forward(self, ids: Tensor) -> Tensor:
        """A number for each position, from the tokens up to it: `(B, T)` to `(B, T)`, float32."""
        config, head = self.model.config, cast(nn.Module, self.model.score)
        out = self.model.base_model(input_ids=ids, use_cache=False)
        raw = head(out.last_hidden_state).squeeze(-1).float()  # (B, T, H) to (B, T)
        return (raw - config.score_mean) / config.score_std


def pick_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def forward_all(
    module: Callable[[Tensor], Tensor], ids: Tensor, lengths: Tensor, micro_batch_tokens: int
) -> Tensor:
    """Runs `module` without gradients over all rows, in groups alike in length.

    Args:
        module: `(b, t)` ids to `(b, t)` or `(b, t - 1)` numbers.
        ids: `(B, T)`.
        lengths: `(B,)`.
        micro_batch_tokens: most tokens in a group.

    Returns:
        `(B, T)` or `(B, T - 1)` float32, 0 beyond a group's longest row.
    """
    out = torch.zeros(ids.shape, device=ids.device)
    short = 0
    with torch.inference_mode():
        for rows in micro_batches(lengths.tolist(), micro_batch_tokens):
            width = int(lengths[rows].max())
            result = module(ids[rows, :width])
            short = width - result.shape[1]
            out[rows, : result.shape[1]] = result
    return out[:, : ids.shape[1] - short]


def scratch_config(
    scratch: Scratch, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedConfig:
    """The transformers config of a small model."""
    common: dict[str, Any] = {
        "vocab_size": scratch.vocab_size if tokenizer is None else len(tokenizer),
        "initializer_range": 0.06,  # near width ** -.5 at these widths; .02 learns far slower
        "bos_token_id": getattr(tokenizer, "bos_token_id", None),
        "eos_token_id": getattr(tokenizer, "eos_token_id", None),
        "pad_token_id": getattr(tokenizer, "pad_token_id", None),
        "tie_word_embeddings": True,
    }
    if scratch.family == "gpt2":
        return GPT2Config(
            n_embd=scratch.width,
            n_layer=scratch.layers,
            n_head=scratch.heads,
            n_positions=scratch.context_tokens,
            activation_function="gelu_pytorch_tanh",  # gelu_new in one kernel
            **common,
        )
    return LlamaConfig(
        hidden_size=scratch.width,
        intermediate_size=scratch.width * 8 // 3,
        num_hidden_layers=scratch.layers,
        num_attention_heads=scratch.heads,
        max_position_embeddings=scratch.context_tokens,
        **common,
    )


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of `config` (models share what they are built from) with every dropout at 0."""
    config = copy.deepcopy(config)
    for name, value in vars(config).items():
        if ("drop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def dropout_of(module: nn.Module) -> list[str]:
    """Names of what would drop something in training: modules, and rates that attention reads."""
    found = []
    for name, part in module.named_modules():
        rates = {key: value for key, value in vars(part).items() if "drop" in key or key == "p"}
        found += [
            f"{name}.{key}"
            for key, value in rates.items()
            if isinstance(value, float) and value > 0
        ]
    return found


def new_policy(scratch: Scratch, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """A policy with fresh weights."""
    config = without_dropout(scratch_config(scratch, tokenizer))
    return Policy(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder."""
    require_model(folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_policy(folder: str) -> Policy:
    """A policy with the weights of a folder."""
    lm, missing = _load(AutoModelForCausalLM, folder)
    require(not missing, f"{folder} is not a whole language model: it lacks {', '.join(missing)}")
    policy = Policy(lm)
    require(
        policy.knows_its_head(),
        f"{folder}: a {lm.config.model_type} does something between trunk and logits that is not "
        "known here",
    )
    return policy


def new_scorer(folder: str) -> Scorer:
    """The body of the model in `folder` with a scalar head of zeros."""
    model, _ = _load(AutoModelForSequenceClassification, folder, num_labels=1)
    nn.init.zeros_(model.score.weight)
    model.config.update({"score_mean": 0.0, "score_std": 1.0, "reward_head_trained": False})
    return Scorer(model)


def load_scorer(folder: str) -> Scorer:
    """A reward model whose head was trained; anything else is an error."""
    model, missing = _load(AutoModelForSequenceClassification, folder, num_labels=1)
    record = ("reward_head_trained", "score_mean", "score_std")
    require(
        not missing and all(getattr(model.config, name, False) is not False for name in record),
        f"{folder} has no trained reward head: the reward stage writes one, and in config.json "
        f"{', '.join(record)}",
    )
    return Scorer(model)


def _load(auto: Any, folder: str, **options: Any) -> tuple[Any, list[str]]:
    """A model in float32 without dropout, and the names of the weights that its folder lacks."""
    require_model(folder)
    config = without_dropout(AutoConfig.from_pretrained(folder, local_files_only=True, **options))
    model, info = auto.from_pretrained(
        folder,
        config=config,
        local_files_only=True,
        use_safetensors=True,
        dtype=torch.float32,
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    return model.eval(), sorted(info["missing_keys"])


def require_model(folder: str) -> None:
    """Raises a `UserError` unless `folder` holds a model."""
    require(
        (Path(folder) / "config.json").is_file(),
        f"{folder} is not the folder of a model: it has no config.json",
    )


def parameter_count(config: PreTrainedConfig) -> int:
    """Parameters of a language model, without making it."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
