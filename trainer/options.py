"""How the options of the stages are shown in help, and what is said of one that does not exist."""

from __future__ import annotations

import argparse
import re
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser

from .config import DemoConfig, PPOConfig, RewardConfig, SFTConfig

STAGES = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "demo": DemoConfig}

# In help; what stands in none of them comes last.
GROUPS = {
    "run": "run_dir config seed parallel dry_run overwrite print_config help",
    "data": "train heldout text prompt_tokens max_tokens",
    "models": "model scratch critic critic_kind lora_rank lora_alpha",
    "reward": "reward rewards reward_scaling reward_clip missing_eos_penalty truncation",
    "sampling": "episodes_per_update samples_per_prompt max_new_tokens temperature",
    "steps": "steps epochs updates sequences_per_step pairs_per_step ppo_epochs minibatches "
    "learning_rate warmup_steps weight_decay critic_learning_rate critic_warmup_updates "
    "max_grad_norm target_kl",
    "loss": "objective clip_range clip_range_high dual_clip ratio aggregate penalty_coef "
    "penalty_target_per_token entropy_coef gamma gae_lambda value_clip_range value_coef",
    "KL to the reference": "kl_coef kl_in kl_kind_in_reward kl_kind_in_loss kl_controller "
    "kl_target_per_sequence kl_target_per_token kl_horizon_episodes",
    "evaluation": "evaluation_prompts evaluate_every_steps evaluate_every_updates judge "
    "best_metric check_every",
    "output": "save_every_steps save_every_updates keep_last_checkpoints sample_every "
    "tensorboard tracker",
    "memory and speed": "max_tokens_per_micro_batch compile precision gradient_checkpointing "
    "offload_frozen",
}

# What help says of options that are not ours.
SAID = {
    "help": "Print this.",
    "print_config": "Print all options as a YAML file for --config, and do nothing.",
}

# Options that others have, and why there are none here.
WHOLE = "the log-probs that PPO compares are of the whole softmax, and so must be what is sampled"
REFUSED = {"top_p": WHOLE, "top_k": WHOLE, "min_p": WHOLE}

# What others call an option: TRL, verl, OpenRLHF, transformers. The first that a stage has counts.
FOREIGN = {
    "actor_learning_rate": "learning_rate",
    "adap_kl_ctrl": "kl_controller",
    "batch_size": "sequences_per_step pairs_per_step episodes_per_update",
    "beta": "kl_coef",
    "bf16": "precision",
    "clip_eps": "clip_range",
    "clip_ratio": "clip_range",
    "clip_ratio_high": "clip_range_high",
    "cliprange": "clip_range",
    "cliprange_value": "value_clip_range",
    "critic_lr": "critic_learning_rate",
    "critic_warmup": "critic_warmup_updates",
    "dataset": "train",
    "dataset_name": "train",
    "ent_coef": "entropy_coef",
    "entropy_coeff": "entropy_coef",
    "eps_clip": "clip_range",
    "eval_dataset": "heldout",
    "eval_steps": "evaluate_every_steps evaluate_every_updates",
    "fp16": "precision",
    "gradient_accumulation_steps": "max_tokens_per_micro_batch",
    "horizon": "kl_horizon_episodes",
    "init_kl_coef": "kl_coef",
    "kl_ctrl": "kl_controller",
    "kl_estimator": "kl_kind_in_reward",
    "kl_penalty": "kl_kind_in_reward",
    "lam": "gae_lambda",
    "lambd": "gae_lambda",
    "lambda": "gae_lambda",
    "logging_dir": "run_dir",
    "lora_r": "lora_rank",
    "lr": "learning_rate",
    "max_epochs": "epochs ppo_epochs",
    "max_length": "max_tokens max_new_tokens",
    "max_prompt_length": "prompt_tokens",
    "max_response_length": "max_new_tokens",
    "max_seq_length": "max_tokens",
    "max_steps": "steps updates",
    "micro_batch_size": "max_tokens_per_micro_batch",
    "mini_batch_size": "minibatches",
    "model_name": "model",
    "model_name_or_path": "model",
    "n_samples_per_prompt": "samples_per_prompt",
    "num_generations": "samples_per_prompt",
    "num_mini_batches": "minibatches",
    "num_ppo_epochs": "ppo_epochs",
    "num_train_epochs": "epochs updates",
    "output_dir": "run_dir",
    "per_device_train_batch_size": "max_tokens_per_micro_batch",
    "report_to": "tracker",
    "response_length": "max_new_tokens",
    "reward_model": "rewards",
    "reward_model_path": "rewards",
    "rollout_batch_size": "episodes_per_update",
    "save_path": "run_dir",
    "save_steps": "save_every_steps save_every_updates",
    "save_total_limit": "keep_last_checkpoints",
    "sft_model_path": "model",
    "target": "kl_target_per_sequence",
    "torch_compile": "compile",
    "total_episodes": "updates",
    "train_batch_size": "sequences_per_step pairs_per_step episodes_per_update",
    "train_dataset": "train",
    "value_model": "critic",
    "vf_coef": "value_coef",
}


class StageParser(ArgumentParser):
    """The options of a stage. In help they stand in groups: kind, what it is, default."""

    def __init__(self, stage: type, **others: Any) -> None:
        """Takes the dataclass of the stage."""
        super().__init__(**others)
        self.stage = stage

    def format_help(self) -> str:
        """The help as argparse lays it out, of options that are regrouped and told in few words."""
        required = getattr(self.stage, "REQUIRED", {})
        kinds = dict(options(self.stage))
        program = self.prog.replace(" [options]", "")
        must = "".join(f"--{name} … " for name in required)
        shown = argparse.ArgumentParser(
            usage=f"{program} {must}[--OPTION VALUE …]",
            description=(self.stage.__doc__ or "").splitlines()[0],
            epilog=self.epilog,
            add_help=False,
            formatter_class=partial(argparse.HelpFormatter, max_help_position=36, width=100),
        )
        groups = {title: shown.add_argument_group(title) for title in [*GROUPS, "others"]}
        titles = {name: title for title, names in GROUPS.items() for name in names.split()}
        for action in self._actions:
            first, _, rest = action.dest.partition(".")
            if action.dest in (self.groups or {}) or (rest and first not in titles):
                continue  # a part as a whole, and those of the demo's stages
            says = SAID.get(action.dest, action.help or "").replace("%", "%%")
            if action.dest in required:
                says += " (required)"
            elif action.dest in kinds and action.default not in (None, "", {}):
                says += f" (default: {yaml.safe_dump(action.default).splitlines()[0]})"
            told: dict[str, Any] = {"help": says, "dest": action.dest}
            if action.dest in kinds:
                told["metavar"] = kind(kinds[action.dest]).removesuffix("|null")
            else:
                told |= {"metavar": "FILE"} if action.dest == "config" else {"action": "store_true"}
            groups[titles.get(first, "others")].add_argument(*action.option_strings, **told)
        return shown.format_help()


def options(stage: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and types of a stage's options; those of its parts with a dot."""
    hints = get_type_hints(stage)
    for option in fields(stage):
        if is_dataclass(hints[option.name]):
            yield from options(hints[option.name], f"{prefix}{option.name}.")
        else:
            yield prefix + option.name, hints[option.name]


def kind(hint: Any) -> str:
    """What values a type has, in few words."""
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if get_origin(hint) is dict:
        return "{{{}: {}, …}}".format(*map(kind, get_args(hint)))
    if get_args(hint):
        return "|".join(map(kind, get_args(hint)))
    return {str: "TEXT", float: "NUMBER", int: "INTEGER", bool: "true|false"}.get(hint, "null")


def explained(error: ArgumentError, words: Sequence[str]) -> str:
    """What an error of the parser says, in one sentence; it knows what was meant, if that is clear.

    Args:
        error: as jsonargparse words it.
        words: what was given: the command and its options.
    """
    said = " ".join(str(error).split())
    command = next((word for word in words if word in STAGES), None)
    if command is None:
        return said
    kinds = dict(options(STAGES[command]))
    unknown = re.search(r"unrecognized arguments: .*?--([\w.-]+)|not accept option '(.+)'", said)
    value = re.search(r'Parser key "([\w.]+)": .*?(?:Got|Given) value: (.*)', said)
    name, whole_file = "", re.search("Problems parsing config|Unexpected config", said)
    if unknown:
        name = unknown[1] or unknown[2]
        said = no_option(name, command)
    elif value and value[1] in kinds:
        name = value[1]
        said = f"{name}: expected {kind(kinds[name])}, got {value[2]}"
    on_line = any(word.partition("=")[0] == f"--{name}" for word in words)
    return f"{said}{in_file(words)}" if whole_file or (name and not on_line) else said


def in_file(words: Sequence[str]) -> str:
    """Where an option that is not on the command line must stand: in the file of --config."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--config"):
            return f" (in {word.partition('=')[2] or following})"
    return ""


def no_option(name: str, command: str) -> str:
    """What is said of an option that a stage does not have: which one may have been meant."""
    leaf = name.rpartition(".")[2].replace("-", "_")
    if leaf in REFUSED:
        return f"there is no {name}: {REFUSED[leaf]}"
    names = {stage: [option for option, _ in options(known)] for stage, known in STAGES.items()}
    for stage, known in names.items():
        known += ["config", "dry_run"] if stage == "demo" else ["config", "dry_run", "overwrite"]
    wanted = [leaf, *FOREIGN.get(leaf, "").split()]
    for want in wanted:
        if found := [option for option in names[command] if option.rpartition(".")[2] == want]:
            parent = name.rpartition(".")[0]
            near = [option for option in found if option.rpartition(".")[0] == parent] or found
            return f"{name}: did you mean {' or '.join(near)}?"
    for want in wanted:
        if found := [stage for stage in ("sft", "reward", "ppo") if want in names[stage]]:
            who = name if want == leaf else f"{name}: {want}"
            return f"{who} is an option of {' and '.join(found)}, not of {command}"
    if found := get_close_matches(name.replace("-", "_"), names[command], 1, 0.75):
        return f"{name}: did you mean {found[0]}?"
    return f"{name} is no option of {command}: `ppokern {command} --help` lists them"
