"""TRL's side of `against_trl`; runs in an environment of its own, which has TRL and no ppokern.

python trl_peer.py FOLDER: reads case.json, prompts.json and the models there, writes theirs.json.

TRL's trainer is timed by wrapping the functions that it calls; nothing of it is changed.
"""

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""}


def resident(key: str) -> float:
    """MiB of memory that the process holds (VmRSS), or held at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":"))


def forget_peak() -> None:
    """Begin VmHWM anew."""
    Path("/proc/self/clear_refs").write_text("5")


class Phases:
    """CPU seconds of each phase of each update."""

    def __init__(self) -> None:
        """Begins with none."""
        self.updates: list[dict[str, float]] = []
        self._spent: dict[str, float] = defaultdict(float)
        self._began = time.process_time()

    def of(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function whose time belongs to a phase."""

        def timed(*args: Any, **options: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **options)
            finally:
                self._spent[phase] += time.process_time() - began

        return timed

    def end_update(self) -> None:
        """Close an update; what belongs to no phase is `other`."""
        now = time.process_time()
        total = now - self._began
        self.updates.append(
            {**self._spent, "other": total - sum(self._spent.values()), "total": total}
        )
        self._spent.clear()
        self._began = now

    def medians(self) -> dict[str, float]:
        """Seconds of each phase, the median over all updates but the first."""
        later = self.updates[1:]
        names = {name for update in later for name in update}
        return {name: median(update.get(name, 0.0) for update in later) for name in sorted(names)}


def main(folder: Path) -> None:
    """Runs TRL's PPO."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    torch.set_num_threads(1)
    case = json.loads((folder / "case.json").read_text())
    prompts = json.loads((folder / "prompts.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(case["policy"], padding_side="left")
    policy, reference = (AutoModelForCausalLM.from_pretrained(case["policy"]) for _ in range(2))
    reward, value = (
        AutoModelForSequenceClassification.from_pretrained(folder / "reward") for _ in range(2)
    )

    phases, lengths = Phases(), []
    forward, generate = ppo_trainer.forward, ppo_trainer.batch_generation
    learning, scoring = phases.of("learn", forward), phases.of("experience", forward)

    def forward_of_phase(*args: Any, **options: Any) -> Any:
        return (learning if torch.is_grad_enabled() else scoring)(*args, **options)

    def generate_and_count(model: Any, queries: Any, *args: Any, **options: Any) -> Any:
        result = generate(model, queries, *args, **options)
        for row in result[0][:, queries.shape[1] :].tolist():
            end = tokenizer.eos_token_id
            lengths.append(row.index(end) + 1 if end in row else len(row))
        return result

    ppo_trainer.forward = forward_of_phase
    ppo_trainer.batch_generation = phases.of("rollout", generate_and_count)
    ppo_trainer.get_reward = phases.of("experience", ppo_trainer.get_reward)

    class Updates(TrainerCallback):
        def on_step_end(self, *args: Any, **options: Any) -> None:
            phases.end_update()

    episodes, micro = case["episodes"], case["micro_batch_rows"]
    with tempfile.TemporaryDirectory() as output:
        config = PPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            num_sample_generations=0,
            gradient_checkpointing=False,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=episodes // micro,
            local_rollout_forward_batch_size=episodes,
            total_episodes=episodes * case["updates"],
            num_mini_batches=1,
            num_ppo_epochs=case["ppo_epochs"],
            response_length=case["max_new_tokens"],
            temperature=1.0,
            stop_token="eos",
            missing_eos_penalty=case["missing_eos_penalty"],
            learning_rate=case["learning_rate"],
            kl_coef=case["kl_coef"],
        )
        trainer = PPOTrainer(
            args=config,
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=reward,
            value_model=value,
            train_dataset=Dataset.from_dict({"input_ids": prompts}),
            eval_dataset=Dataset.from_dict({"input_ids": prompts[:micro]}),
            callbacks=[Updates()],
        )
        trainer.accelerator.backward = phases.of("learn", trainer.accelerator.backward)
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        optimizer.step = phases.of("learn", optimizer.step)
        loaded = resident("VmRSS")
        forget_peak()
        phases.end_update()  # what came before is none
        phases.updates.clear()
        trainer.train()
    result = {
        "cpu_seconds": phases.medians(),
        "memory_mib": resident("VmHWM") - loaded,
        "mean_length": sum(lengths) / len(lengths),
    }
    (folder / "theirs.json").write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
