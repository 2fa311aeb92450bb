"""Policy, critic, reference and reward model, as modules that go from token ids to numbers.

A wrapper (DDP, FSDP) goes around these two modules, so nothing outside reads a head's weight or
calls a trunk. Sequences are packed, one behind the other in one row: `ids` is `(total,)`, and
`cu_seqlens` `(S + 1,)` says where each begins. What a token may see is attention.py's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from ppokern import Loss, linear_ppo_loss, linear_selected_logprobs, next_token_targets

from .attention import KeyValueCache, Packed, use_packed
from .config import Scratch, Stage, UserError, require
from .data import (
    beginning,
    end_token,
    known_ids,
    micro_batches,
    packed,
    select,
    up_to_last,
)
from .distributed import blocks_of

logging.set_verbosity_error()  # warnings: of fresh heads, of padding without a mask; both are meant
logging.disable_progress_bar()

T = TypeVar("T")


class Trunk(nn.Module):
    """A transformers model with its head."""

    precision: Literal["float32", "bfloat16"] = "float32"

    def autocast(self) -> torch.autocast:
        """Inside, products are made in `precision`; weights are cast once, and stay in float32."""
        device = next(self.parameters()).device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.precision == "bfloat16")


class Policy(Trunk):
    """A causal language model."""

    def __init__(self, lm: PreTrainedModel, vocab_size: int | None = None) -> None:
        """Takes a model with a language head, and how many ids its tokenizer knows.

        Rows of the embedding from there on are padding: outside of every softmax, never sampled.
        """
        super().__init__()
        use_packed(lm)
        self.lm, self.vocab_size = lm, vocab_size

    @property
    def context_tokens(self) -> int:
        """Longest sequence that the model can read."""
        return self.lm.config.max_position_embeddings

    if TYPE_CHECKING:

        def __call__(self, request: Request[T]) -> T:
            """Answers a request."""
            ...

    def forward(self, request: Request[T]) -> T:
        """Answers a request: every pass comes through here, where DDP and FSDP2 take part in it."""
        return request.answer(self)

    def head(self) -> Any:
        """The language head, whose weight the ops read."""
        head: Any = self.lm.get_output_embeddings()
        if hasattr(head, "base_layer"):  # the ops would pass over what is added
            raise UserError(
                "the language head has an adapter on it: put adapters on the trunk alone"
            )
        return head

    @property
    def softcap(self) -> float | None:
        """Of the logits."""
        return getattr(self.lm.config, "final_logit_softcapping", None)

    @torch.no_grad()
    def knows_its_head(self) -> bool:
        """Whether log-probs made here are those that transformers itself would make."""
        ids, cu_seqlens = packed([[0, 1, 2, 3]], self.lm.device)
        out = self.lm(**Packed(cu_seqlens).inputs(ids), use_cache=False)
        theirs = out.logits[0, :-1].float().log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        return torch.allclose(self(LogProbs(ids, cu_seqlens))[:-1], theirs, atol=1e-3)


class Request(Generic[T]):
    """What a policy is asked for, with the tokens of its pass."""

    def answer(self, policy: Policy) -> T:
        """What the policy says; called by its `forward`."""
        raise NotImplementedError


@dataclass(frozen=True)
class NextLogits(Request[Tensor]):
    """Logits behind the last token of each row, `(b, V)`, to sample from.

    `ids` are the prompts that the cache was made for, `(total,)`; then a token a row, `(b,)`.
    """

    ids: Tensor
    cache: KeyValueCache

    def answer(self, policy: Policy) -> Tensor:
        """Leaves torch.compile out: with a token a row there is nothing to gain."""
        head, softcap = policy.head(), policy.softcap
        with policy.autocast(), torch.compiler.set_stance("force_eager"):
            hidden = _hidden(policy.lm, self.cache, self.ids)
            logits = head(self.cache.last(hidden))[:, : policy.vocab_size]
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@dataclass(frozen=True)
class States(Request[Tensor]):
    """What a `ValueHead` reads, `(total, H)`; 0 behind the last place of a sequence's mask."""

    ids: Tensor  # (total,)
    cu_seqlens: Tensor  # (S + 1,)
    mask: Tensor | None = None  # (total,) bool

    def answer(self, policy: Policy) -> Tensor:
        """The trunk alone."""
        with policy.autocast():
            return _states(policy.lm, self.ids, self.cu_seqlens, self.mask)


@dataclass(frozen=True)
class LogProbs(Request[Tensor]):
    """Log-probs of the tokens that follow, `(total,)`, nats; 0 where masked.

    Place `i` of the mask stands for the token behind `ids[i]` in its sequence. The last place of a
    sequence has none and counts as masked.
    """

    ids: Tensor  # (total,)
    cu_seqlens: Tensor  # (S + 1,)
    mask: Tensor | None = None  # (total,) bool
    temperature: float = 1.0

    def answer(self, policy: Policy) -> Tensor:
        """Through the head without the logits of the whole batch."""
        _, *arguments, options = self.read(policy)
        return linear_selected_logprobs(*arguments, **options)

    def read(self, policy: Policy) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """The states, and what the linear ops take: states, weight, targets, options."""
        head = policy.head()
        targets, followed = next_token_targets(self.ids, self.cu_seqlens)
        mask = followed if self.mask is None else self.mask & followed
        with policy.autocast():
            hidden = _states(policy.lm, self.ids, self.cu_seqlens, mask)
        read, weight = hidden, head.weight
        if policy.precision == "bfloat16":  # the ops' GEMMs are those of what they are given
            read, weight = hidden.bfloat16(), weight.bfloat16()
        options = {
            "bias": head.bias,
            "mask": mask,
            "temperature": self.temperature,
            "softcap": policy.softcap,
            "vocab_size": policy.vocab_size,
        }
        return hidden, read, weight, targets, options


@dataclass(frozen=True)
class PPOLoss(Request[tuple[Loss, Tensor]]):
    """PPO's loss on tokens that followed, and the states that it was made of, `(total, H)`."""

    of: LogProbs
    options: dict[str, Any]  # tensors `(total,)` and options of `ppokern.linear_ppo_loss`

    def answer(self, policy: Policy) -> tuple[Loss, Tensor]:
        """The states carry a gradient of their own, for a `ValueHead`."""
        hidden, *arguments, options = self.of.read(policy)
        options |= {"cu_seqlens": self.of.cu_seqlens}
        return linear_ppo_loss(*arguments, **options, **self.options), hidden


class Scorer(Trunk):
    """A body with a scalar head: a critic or a reward model.

    Its numbers are given in units of the config's `score_std` from its `score_mean`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes a model for sequence classification with one label."""
        super().__init__()
        use_packed(model)
        self.model = model

    @property
    def context_tokens(self) -> int:
        """Longest sequence that the model can read."""
        return self.model.config.max_position_embeddings

    def forward(self, ids: Tensor, cu_seqlens: Tensor, mask: Tensor | None = None) -> Tensor:
        """A number for each token, from those of its sequence up to it: `(total,)`, float32.

        Only those in `mask` (bool, all if None) are to be read.
        """
        config, head = self.model.config, cast(nn.Module, self.model.score)
        with self.autocast():
            hidden = _states(self.model, ids, cu_seqlens, mask)
        return (head(hidden).squeeze(-1).float() - config.score_mean) / config.score_std


class ValueHead(nn.Module):
    """A critic on the policy's trunk: it reads the states that the policy's own pass has made.

    It stands beside the policy, not in it, so that it has an optimiser of its own and its gradient
    flows through what the policy returns.
    """

    def __init__(self, width: int) -> None:
        """Begins with zeros."""
        super().__init__()
        self.score = nn.Linear(width, 1)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def forward(self, states: Tensor) -> Tensor:
        """A value for each state: `(total, H)` to `(total,)`, float32."""
        return self.score(states).squeeze(-1).float()


def _states(model: PreTrainedModel, ids: Tensor, cu_seqlens: Tensor, mask: Tensor | None) -> Tensor:
    """States of packed sequences, `(total, H)`; 0 behind the last of a sequence in `mask`.

    No token sees one behind it, so what stands there need not be computed.
    """
    if mask is None:
        return _hidden(model, Packed(cu_seqlens), ids)
    places, ends = up_to_last(mask, cu_seqlens)
    hidden = _hidden(model, Packed(ends), ids[places])
    return hidden.new_zeros(len(ids), hidden.shape[1]).index_copy(0, places, hidden)


def _hidden(model: PreTrainedModel, layout: Packed | KeyValueCache, ids: Tensor) -> Tensor:
    """What the trunk makes of the tokens of a pass, `(tokens, H)`."""
    out = model.base_model(**layout.inputs(ids), use_cache=False)
    return out.last_hidden_state.flatten(0, 1)


def equip(config: Stage, trained: Sequence[nn.Module], frozen: Sequence[nn.Module] = ()) -> None:
    """Sets models up as the options of a stage ask for."""
    set_precision(config.precision, *trained, *frozen)
    if config.compile:
        compile_blocks(*trained, *frozen)
    if config.gradient_checkpointing:
        recompute_blocks(*trained)


def set_precision(precision: Literal["float32", "bfloat16"], *modules: nn.Module) -> None:
    """In which the products of models are made from now on."""
    for module in modules:
        if isinstance(module, Trunk):
            module.precision = precision


def compile_blocks(*modules: nn.Module) -> None:
    """Hands the blocks of trunks to torch.compile, each by itself.

    Blocks are alike, so that one graph serves them all, in models of one shape too.
    """
    for block in _blocks(modules, "compile"):
        block.forward = torch.compile(block.forward, dynamic=True)


def recompute_blocks(*modules: nn.Module) -> None:
    """Keeps of each block of a trunk what goes into it, until the backward pass runs it again."""
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # none draws chance
    for block in _blocks(modules, "gradient_checkpointing"):
        block.forward = partial(again, block.forward)


def _blocks(modules: Sequence[nn.Module], option: str) -> list[nn.Module]:
    """The blocks of all trunks, each once; the policy and the reference of LoRA share theirs."""
    found = [blocks_of(module) for module in modules if isinstance(module, Trunk)]
    sentence = f"{option}: transformers does not say what this model's blocks are"
    require(all(found), sentence)
    return list(dict.fromkeys(block for blocks in found for block in blocks))


@contextmanager
def lent(device: torch.device, *modules: nn.Module) -> Iterator[None]:
    """Inside, copies of the modules' weights are on `device`; what is written there is lost."""
    held = [(x, x.data) for part in modules for x in (*part.parameters(), *part.buffers())]
    try:
        for x, at_rest in held:  # the device may have no room for the last of them
            x.data = at_rest.to(device, copy=True)
        yield
    finally:
        for x, at_rest in held:
            x.data = at_rest


def pick_device(offload: bool = False) -> torch.device:
    """The first GPU, or the CPU, from which nothing can be offloaded."""
    gpu = torch.cuda.is_available()
    require(gpu or not offload, "offload_frozen needs a GPU: here models are on the CPU as it is")
    return torch.device("cuda" if gpu else "cpu")


def forward_all(
    module: Callable[..., Tensor],
    max_tokens_per_micro_batch: int,
    cu_seqlens: Tensor,
    *tokens: Tensor,
) -> Tensor:
    """Runs `module` without gradients over all sequences, in micro-batches.

    Args:
        module: takes packed ids, `cu_seqlens` and further tensors `(total,)`; gives `(total,)`.
        max_tokens_per_micro_batch: most tokens in one pass.
        cu_seqlens: `(S + 1,)`.
        *tokens: the ids, and the further tensors.

    Returns:
        `(total,)` float32.
    """
    out = torch.empty(len(tokens[0]), device=cu_seqlens.device)
    with torch.inference_mode():
        for rows in micro_batches(cu_seqlens.diff().tolist(), max_tokens_per_micro_batch):
            places, ends = select(cu_seqlens, rows)
            ids, *others = (x[places] for x in tokens)
            out[places] = module(ids, ends, *others)
    return out


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
    return Policy(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder, or of an adapter's."""
    if not (Path(folder) / "adapter_config.json").is_file():
        require_model(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        settings_of(Path(folder, file))
    tokenizer = from_folder(AutoTokenizer, folder)
    require(bool(tokenizer.get_vocab()), f"{folder}: its tokenizer knows no token")
    return tokenizer


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
    policy.vocab_size = require_fitting(folder, lm)
    return policy


def new_scorer(folder: str) -> Scorer:
    """The body of the model in `folder` with a scalar head of zeros."""
    model, _ = _load(AutoModelForSequenceClassification, folder, num_labels=1)
    require_fitting(folder, model)
    nn.init.zeros_(model.score.weight)
    model.config.update({"score_mean": 0.0, "score_std": 1.0, "reward_head_trained": False})
    return Scorer(model)


def load_scorer(folder: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Scorer:
    """A reward model whose head was trained; anything else is an error.

    It must be made for the ids of `tokenizer`, the policy's, where that is given.
    """
    model, missing = _load(AutoModelForSequenceClassification, folder, num_labels=1)
    record = ("reward_head_trained", "score_mean", "score_std")
    require(
        not missing and all(getattr(model.config, name, False) is not False for name in record),
        f"{folder} has no trained reward head: the reward stage writes one, and in config.json "
        f"{', '.join(record)}",
    )
    require_fitting(folder, model, tokenizer)
    return Scorer(model)


def require_fitting(
    folder: str, model: PreTrainedModel, policys: PreTrainedTokenizerBase | None = None
) -> int:
    """Holds model, tokenizer and the policy's tokenizer against each other.

    Args:
        folder: whose tokenizer it is.
        model: loaded from there.
        policys: the tokenizer of the policy whose ids the model is to read.

    Returns:
        How many ids the tokenizer knows.

    Raises:
        UserError: the embedding or the head has too few rows; or the model was made for other ids,
            or for texts that begin or end with another token.
    """
    own = load_tokenizer(folder)
    count = known_ids(own)
    layers = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    for name, layer in layers.items():
        rows = count if layer is None else len(cast(Tensor, layer.weight))
        require(
            count <= rows,
            f"{folder}: the tokenizer has {count} ids, the model's {name} {rows} rows: "
            "model.resize_token_embeddings(len(tokenizer)) adds those that are missing",
        )
    if policys is not None:
        same = own.get_vocab() == policys.get_vocab()
        require(same, f"{folder}: its model has another vocabulary than the policy")
        sides = [
            [tokenizer.convert_ids_to_tokens([*ids]) for ids in (beginning(tokenizer), [end])]
            for tokenizer in (own, policys)
            for end in [end_token(tokenizer)]
        ]
        for what, ours, theirs in zip(("begin", "end"), *sides, strict=True):
            require(
                ours == theirs,
                f"{folder}: the texts that its model was trained on {what} with "
                f"{''.join(ours) or 'no token of their own'}, those of the policy with "
                f"{''.join(theirs) or 'none'}: it would read what it does not know; train it from "
                "the policy's model",
            )
    return count


def _load(auto: Any, folder: str, **options: Any) -> tuple[Any, list[str]]:
    """A model in float32 without dropout, and the names of the weights that its folder lacks."""
    require_model(folder)
    _require_weights(Path(folder))
    config = without_dropout(from_folder(AutoConfig, folder, **options))
    require(
        type(config) in auto._model_mapping.keys(),
        f"{folder}: transformers has no {auto.__name__} of the family {config.model_type}",
    )
    model, info = from_folder(
        auto,
        folder,
        config=config,
        use_safetensors=True,
        dtype=torch.float32,
        attn_implementation="eager",  # its own, which `use_packed` is held against
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # transformers would tell them in a log; here is a sentence
    )
    if auto is AutoModelForSequenceClassification:
        head = isinstance(getattr(model, "score", None), nn.Linear)
        require(head, f"{folder}: a {config.model_type} scores with a head that is not known here")
    for name, stored, made in sorted(info["mismatched_keys"]):
        raise UserError(
            f"{folder}: {name} is {tuple(stored)} in its weights, {tuple(made)} by its config.json"
        )
    bad = [name for name, x in model.state_dict().items() if not x.isfinite().all()]
    require(not bad, f"{folder}: weights are not finite: {_some(bad)}")
    return model.eval(), sorted(info["missing_keys"])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def from_folder(auto: Any, folder: str, **options: Any) -> Any:
    """What transformers makes of a folder; no code that it brings is run, and nobody is asked to.

    Where nothing is said of it, transformers asks on the terminal, and runs it after a `y`.
    """
    options |= {"local_files_only": True, "trust_remote_code": False}
    try:
        return auto.from_pretrained(folder, **options)
    except Exception as error:  # whatever it makes of files that are not what it takes them for
        files = {AutoConfig: "config.json", AutoTokenizer: "tokenizer.json, tokenizer_config.json"}
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        read = f" ({files[auto]})" if auto in files else ""
        raise UserError(f"{folder}{read} cannot be loaded by {auto.__name__}: {what}") from None


def require_model(folder: str) -> None:
    """Raises a `UserError` unless `folder` holds a model that can be trained."""
    path = Path(folder)
    require(
        not (path / "adapter_config.json").is_file(),
        f"{folder} is an adapter and no whole model: `export` makes one of its run",
    )
    config = settings_of(path / "config.json")
    require(config is not None, f"{folder} is not the folder of a model: it has no config.json")
    how = config.get("quantization_config")
    require(
        how is None,
        f"{path / 'config.json'}: the weights are quantised, {repr(how)[:60]}; trained are floats: "
        "take the model as it was before",
    )
    settings_of(path / "generation_config.json")  # if broken, transformers passes over it


def settings_of(path: Path) -> Any:
    """The object in a JSON file of a model's folder; None where there is no file."""
    if not path.is_file():
        return None
    _require_no_pointer(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): copy it again") from None
    require(isinstance(content, dict) and bool(content), f"{path} holds nothing: copy it again")
    return content


def _require_no_pointer(path: Path) -> None:
    with path.open("rb") as file:
        pointer = file.read(20).startswith(b"version https://git")
    require(not pointer, f"{path} is a pointer of git-lfs and not the file: run `git lfs pull`")


def _require_weights(folder: Path) -> None:
    """Raises a `UserError` unless a folder's weights are there, whole, and no pickles."""
    index = settings_of(folder / "model.safetensors.index.json") or {}
    named = {folder / str(name) for name in dict(index.get("weight_map", {})).values()}
    files = sorted(named or folder.glob("*.safetensors"))
    others = [path.name for path in sorted((*folder.glob("*.bin"), *folder.glob("*.pt*")))]
    there = f", but {_some(others)}: pickles, which can hold code and are not loaded; where you "
    there += "trust them, save_pretrained of transformers writes what it has loaded anew"
    missing = f"{folder} has no weights in safetensors{there * bool(others)}"
    require(bool(files), missing)
    for path in files:
        require_whole(path)


def require_whole(path: Path) -> None:
    """Raises a `UserError` unless a file of weights is all there."""
    require(path.is_file(), f"{path} is missing: copy the folder again")
    _require_no_pointer(path)
    try:
        with safe_open(path, "pt"):
            pass
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or cut short ({error}): copy it again") from None


def parameter_count(config: PreTrainedConfig) -> int:
    """Parameters of a language model, without making it."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def parameter_names(config: PreTrainedConfig) -> list[str]:
    """Their names."""
    with torch.device("meta"):
        return [name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()]
