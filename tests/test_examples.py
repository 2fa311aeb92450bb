"""The programs in examples/: each does what it says."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: object, cwd: Path) -> str:
    command = [sys.executable, EXAMPLES / f"{name}.py", *arguments]
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_bare_loop_learns() -> None:
    scores = load("bare_loop").main()
    assert scores[0] < 0.5 and sum(scores[-5:]) / 5 > 2


def test_advantages_of_gymnasium_are_those_of_each_episode() -> None:
    example = load("gymnasium_gae")
    x = example.rollout()
    assert (x.mask & x.truncated).any() and (x.mask & x.terminated).any() and (~x.mask).any()
    found = example.advantages_of(x)
    for env in range(x.mask.shape[1]):
        behind = 0.0
        for t in reversed(range(len(x.mask))):
            if not x.mask[t, env]:
                assert found[t, env] == 0
                continue
            bootstrap = not x.terminated[t, env]
            done = bool(x.terminated[t, env] | x.truncated[t, env])
            delta = x.rewards[t, env] + 0.99 * bootstrap * x.next_values[t, env] - x.values[t, env]
            behind = float(delta + 0.99 * 0.95 * (0.0 if done else behind))
            assert torch.isclose(found[t, env], torch.tensor(behind), atol=1e-4)


def test_a_step_that_resets_is_no_transition() -> None:
    x = load("gymnasium_gae").rollout()
    ended = x.terminated | x.truncated
    assert torch.equal(~x.mask[1:], ended[:-1]) and (x.rewards[~x.mask] == 0).all()
    # the value behind a time limit is that of the episode's last observation
    assert torch.equal(x.next_values[:-1][~x.mask[1:]], x.values[1:][~x.mask[1:]])


@pytest.mark.slow
def test_own_data_end_to_end_and_with_an_engine_of_its_own(tmp_path: Path) -> None:
    run("own_data", tmp_path / "run", cwd=tmp_path)
    folder = tmp_path / "run"
    rows = [json.loads(line) for line in (folder / "ppo/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 10
    assert rows[-1]["objective/scores"] > rows[0]["objective/scores"]
    assert (folder / "model/model.safetensors").exists()
    assert list((folder / "ppo").glob("*.html"))
    model, prompts = folder / "sft/model", folder / "prompts.jsonl"
    run("own_engine", model, prompts, tmp_path / "engine", cwd=tmp_path)
    rows = (tmp_path / "engine/metrics.jsonl").read_text().splitlines()
    assert len(rows) == 2
    assert json.loads(rows[0])["consistency/ratio_error_max"] < 1e-3
