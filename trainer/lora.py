"""LoRA: a model learns in small adapters beside weights that stay as they are.

PPO's reference is the policy without its adapter: the same weights, held once. An adapter begins
with zeros, so the two agree before the first step. Only adapters (and a reward model's head) are
trained and kept. PPO writes them as they are, and `export` merges them into a whole model; SFT and
reward model, whose models others start from, merge at their end.

Source: Hu et al. 2021.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from ppokern._install import pip_install

from . import distributed
from .checkpoint import fingerprint, read_json, save_model, staged, write_json
from .config import UserError, require
from .models import Policy, load_policy, require_whole, settings_of


def add_adapter(policy: Policy, folder: str, rank: int, alpha: float, seed: int) -> Policy:
    """Gives a policy an adapter on each linear layer of its trunk, and freezes all else.

    Args:
        policy: with the weights of `folder`.
        folder: written down with the adapter, which is nothing without it.
        rank: of the adapter's matrices.
        alpha: their product is weighted by `alpha / rank`.
        seed: of the one that does not begin with zeros.

    Returns:
        The reference: the policy's own weights, without the adapter.
    """
    reference = copy.deepcopy(policy, {id(p): p for p in policy.parameters()})
    adapt(policy.lm, folder, rank, alpha, seed)
    return reference.requires_grad_(False)


def adapt(model: PreTrainedModel, folder: str, rank: int, alpha: float, seed: int) -> Any:
    """Puts an adapter on each linear layer of a trunk, and freezes all else but a scalar head.

    The arguments are those of `add_adapter`.

    Returns:
        peft's hold on the model.
    """
    peft = _peft()
    head = getattr(model, "score", None)
    options = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules="all-linear",  # in peft's words: without the head
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        base_model_name_or_path=folder,
        task_type="CAUSAL_LM" if head is None else "SEQ_CLS",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tuner = peft.LoraModel(model, options, "default")
    if head is not None:
        head.requires_grad_(True)
    return tuner


def merged(model: PreTrainedModel, state: dict[str, Tensor], *adapter: Any) -> PreTrainedModel:
    """A whole model of what was learned.

    Args:
        model: as it was when learning began.
        state: what `adapter_of` and `distributed.model_state` gave of the one that has learned.
        *adapter: the further arguments of `adapt`, as they were.
    """
    tuner = adapt(model, *adapter)
    adapter_of(model).load_state_dict(state)
    return tuner.merge_and_unload()


def adapter_of(lm: nn.Module) -> nn.Module:
    """The parameters that a model learns in, and no others: what a checkpoint keeps of it."""
    learned = {name: p for name, p in lm.named_parameters() if p.requires_grad}
    return nn.ParameterDict({name.replace(".", "/"): p for name, p in learned.items()})


def save_policy(folder: Path, lm: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes a plain transformers folder; of an adapter what peft does, and what it belongs to.

    All processes must call it, the first writes.
    """
    if not hasattr(lm, "peft_config"):
        save_model(folder, lm, tokenizer)
        return
    state = distributed.model_state(adapter_of(lm))
    if not distributed.first():
        return
    options = lm.peft_config["default"]
    base = options.base_model_name_or_path
    named = {name.replace("/", "."): x for name, x in state.items()}
    learned = _peft().get_peft_model_state_dict(lm, named)
    tensors = {f"base_model.model.{name}": x.contiguous() for name, x in learned.items()}
    with staged(folder) as aside:
        options.save_pretrained(aside)
        safetensors.torch.save_file(tensors, aside / "adapter_model.safetensors")
        write_json(aside / "base.json", {"folder": base, "sha256": fingerprint(Path(base))})
        tokenizer.save_pretrained(aside)


def load_trained(folder: str) -> Policy:
    """A policy that a run has written: whole, or an adapter, which is merged with its weights."""
    path = Path(folder)
    if not (path / "adapter_config.json").is_file():
        return load_policy(folder)
    peft = _peft()
    settings_of(path / "adapter_config.json")
    require_whole(path / "adapter_model.safetensors")
    base = read_json(path / "base.json")
    policy = load_policy(base["folder"])
    require(
        fingerprint(Path(base["folder"])) == base["sha256"],
        f"{base['folder']} has changed: it is not the model that the adapter in {folder} was "
        "trained beside",
    )
    tuner = peft.LoraModel(policy.lm, peft.LoraConfig.from_pretrained(folder), "default")
    tensors = safetensors.torch.load_file(path / "adapter_model.safetensors")
    names = {name for name, p in tuner.named_parameters() if p.requires_grad}
    given = {name.removeprefix("base_model."): x for name, x in tensors.items()}
    found = peft.set_peft_model_state_dict(tuner, given)
    require(
        not found.unexpected_keys and not names & set(found.missing_keys),
        f"the adapter in {folder} does not fit the model in {base['folder']}",
    )
    policy.lm = tuner.merge_and_unload()
    return policy


def _peft() -> Any:
    try:
        import peft  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(f"lora_rank needs peft: {pip_install('lora')}") from None
    return peft
