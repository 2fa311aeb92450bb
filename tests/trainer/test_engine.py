"""Another engine in place of the sampler: what it has to return, and what is refused."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crash import differences

from trainer import ppo
from trainer.check import check_answers
from trainer.config import CheckFailed, PPOConfig
from trainer.data import Prompt
from trainer.models import Policy
from trainer.rollout import Engine, Rollouts, generate, rollouts_of


class Server:
    """Stands for a server: it has weights of its own, which it takes over when it is told to.

    It keeps no tensor of the trainer's, and returns plain lists, as what comes over a wire.
    """

    def __init__(self, folder: str, takes: Sequence[int] | None = None) -> None:
        self.policy = ppo.load_policy(folder)
        self.version, self.takes = 0, takes
        self.seen: list[int] = []

    def __call__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        stop: Sequence[int],
        *,
        version: int,
        rows: Sequence[int] | None = None,
        **options: Any,
    ) -> Rollouts:
        self.seen.append(version)
        if self.takes is None or version in self.takes:
            self.policy.load_state_dict(policy.state_dict())
            self.version = version
        found = generate(self.policy, prompts, stop, rows=rows, **options)
        responses, logprobs = found.responses(), found.logprobs[found.mask].tolist()
        asked = prompts if rows is None else [prompts[row] for row in rows]
        return rollouts_of(asked, responses, torch.tensor(logprobs), stop, self.version)


def test_another_engine_trains_the_same_bits(ppo_config: PPOConfig, tmp_path: Path) -> None:
    ppo.run(replace(ppo_config, run_dir=str(tmp_path / "built-in")))
    engine: Engine = Server(ppo_config.model)
    ppo.run(ppo_config, engine=engine)
    assert differences(tmp_path / "built-in", Path(ppo_config.run_dir)) == []


def test_stale_rollouts_are_refused_by_name(ppo_config: PPOConfig) -> None:
    """4 steps an update: what was sampled by the weights before them is not learned from."""
    engine = Server(ppo_config.model, takes=[0])
    sentence = "stale rollouts: sampled by policy version 0, the policy is at 4; the likely cause"
    with pytest.raises(CheckFailed, match=sentence):
        ppo.run(ppo_config, engine=engine)
    lines = Path(ppo_config.run_dir, "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]


def test_stale_weights_under_a_new_name_are_seen_by_the_self_check(ppo_config: PPOConfig) -> None:
    """An engine that only says that it has taken them over."""

    class Liar(Server):
        def __call__(self, *args: Any, version: int, **options: Any) -> Rollouts:
            return replace(
                super().__call__(*args, version=version, **options), policy_version=version
            )

    config = replace(ppo_config, check_every=1, learning_rate=1e-2)
    with pytest.raises(CheckFailed, match=r"sampling and training disagree.*weights out of step"):
        ppo.run(config, engine=Liar(config.model, takes=[0]))


def test_the_version_goes_on_with_a_resumed_run(ppo_config: PPOConfig) -> None:
    """It is the optimiser's own count, so warm-up does not move it, and a checkpoint has it."""
    config = replace(ppo_config, updates=3, save_every_updates=1, critic_warmup_updates=1)
    whole = Server(config.model)
    ppo.run(config, engine=whole)
    assert whole.seen == [0, 0, 4]
    (last,) = Path(config.run_dir, "checkpoints").glob("00000003")
    last.rename(last.with_name("00000003.partial"))
    resumed = Server(config.model)
    ppo.run(config, resume=True, engine=resumed)
    assert resumed.seen == [4]
    last.rename(last.with_name("00000003.partial"))
    with pytest.raises(CheckFailed, match="policy version 0, the policy is at 4"):
        ppo.run(config, resume=True, engine=Server(config.model, takes=[]))


def test_the_engine_of_the_docs(ppo_config: PPOConfig) -> None:
    page = (Path(__file__).parents[2] / "docs/engines.md").read_text()
    (example,) = re.findall(r"```python\n((?:(?!```).)*rollouts_of.*?)```", page, re.S)
    policy, loaded, seeds_seen = ppo.load_policy(ppo_config.model), [], []

    def load(weights: dict[str, torch.Tensor], version: int) -> None:
        policy.lm.load_state_dict(weights)
        loaded.append(version)

    def sample(ids: list[list[int]], seeds: list[int], length: int, temperature: float) -> Any:
        seeds_seen.append(seeds)
        options = {"max_new_tokens": length, "temperature": temperature}
        chance = torch.Generator().manual_seed(seeds[0])
        found = generate(policy, [Prompt(x, "") for x in ids], [2], generator=chance, **options)
        return SimpleNamespace(
            ids=found.responses(),
            logprobs=found.logprobs[found.mask].tolist(),
            version=loaded[-1],
        )

    server = SimpleNamespace(load=load, sample=sample)
    example = example.replace("ppokern.trainer", "trainer")  # as it is called in a checkout
    exec(compile(example, "engines.md", "exec"), {"server": server, "config": ppo_config})
    assert loaded == [0, 4]
    assert len({seed for seeds in seeds_seen for seed in seeds}) == 16
    assert Path(ppo_config.run_dir, "summary.json").is_file()


@pytest.mark.parametrize(
    "answers",
    [
        [([1, 20], [5]), ([1, 30], [6])],  # as they ended
        [([1, 30], [6])],
        [([1, 30], [6]), ([1, 99], [5])],
        [([1], [6]), ([1, 20], [5])],
    ],
)
def test_answers_to_other_prompts_are_refused(answers: list[tuple[list[int], list[int]]]) -> None:
    def made(answers: list[tuple[list[int], list[int]]]) -> Rollouts:
        prompts = [Prompt(ids, "") for ids, _ in answers]
        responses = [response for _, response in answers]
        return rollouts_of(prompts, responses, torch.zeros(len(answers)), [2], 7)

    asked = [Prompt([1, 30], ""), Prompt([1, 20], "")]
    check_answers(made([([1, 30], [6]), ([1, 20], [5])]), asked, 7)
    with pytest.raises(CheckFailed, match="do not begin with the prompts that were asked for"):
        check_answers(made(answers), asked, 7)


def test_rollouts_of_what_an_engine_says() -> None:
    """Worked out: each response token is the choice of the place before it; an empty one is cut."""
    prompts = [Prompt([1, 7], "", {"n": 1}), Prompt([1], ""), Prompt([1, 8, 2], "")]
    logprobs = torch.tensor([-0.5, -0.25, -1.0], dtype=torch.float64)
    found = rollouts_of(prompts, [[5, 2], [], [6]], logprobs, [2], 3)
    assert found.sequences() == [[1, 7, 5, 2], [1], [1, 8, 2, 6]]
    assert found.mask.nonzero().squeeze(1).tolist() == [1, 2, 7]
    assert found.logprobs.tolist() == [0, -0.5, -0.25, 0, 0, 0, 0, -1.0, 0]
    assert found.terminated.tolist() == [True, False, False]
    assert (found.prompts, found.policy_version) == (prompts, 3)
