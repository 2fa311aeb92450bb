"""SFT and reward model: how long they learn, what they measure, which model is written."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from crash import differences
from tiny import numbers_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from trainer import __main__ as cli
from trainer import reward, sft, supervised
from trainer.checkpoint import read_config
from trainer.config import CheckFailed, RewardConfig, SFTConfig, UserError
from trainer.data import read_examples
from trainer.models import load_policy, load_scorer, load_tokenizer
from trainer.supervised import rows_of


@pytest.fixture
def configs(text: Path, trained: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A short run of each stage."""
    common: Any = {"model": trained["model"], "max_tokens": 32, "steps": 8, "warmup_steps": 0}
    paths = {key: str(text / f"{key}.jsonl") for key in ("train", "heldout")}
    pairs = {key: path.replace(".jsonl", "_pairs.jsonl") for key, path in paths.items()}
    return {
        "sft": SFTConfig(run_dir=str(tmp_path / "sft"), **paths, **common),
        "reward": RewardConfig(run_dir=str(tmp_path / "reward"), **pairs, **common),
    }


STAGES: dict[str, Any] = {"sft": sft, "reward": reward}
each_stage = pytest.mark.parametrize("stage", STAGES)


def rows_in(config: Any) -> list[dict[str, Any]]:
    lines = Path(config.run_dir, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def weights(model: Any) -> dict[str, Tensor]:
    inner = model.lm if hasattr(model, "lm") else model.model
    return {name: p.detach().clone() for name, p in inner.named_parameters()}


def written(config: Any) -> dict[str, Tensor]:
    load = load_policy if isinstance(config, SFTConfig) else load_scorer
    return weights(load(f"{config.run_dir}/model"))


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(x, two[name]) for name, x in one.items())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Tensor]]]:
    """Replaces the held-out losses of a stage, and gives the weights of each measurement."""
    originals = {stage: stage._measure for stage in STAGES.values()}

    def script(stage: Any, losses: list[float]) -> list[dict[str, Tensor]]:
        seen: list[dict[str, Tensor]] = []

        def measure(model: Any, *args: Any) -> dict[str, float]:
            seen.append(weights(model))
            return originals[stage](model, *args) | {"loss": losses[len(seen) - 1]}

        monkeypatch.setattr(stage, "_measure", measure)
        return seen

    return script


# --- how long ---


@each_stage
def test_in_an_epoch_each_row_is_learned_from_once(
    stage: str, configs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(configs[stage], steps=1000, epochs=2.0, evaluate_every_steps=5)
    inner, drawn = supervised.Training.steps, []

    def steps(self: supervised.Training) -> Any:
        for step, rows in inner(self):
            drawn.extend(rows)
            yield step, rows

    monkeypatch.setattr(supervised.Training, "steps", steps)
    STAGES[stage].run(config)
    per_step = config.rows_per_step
    assert sorted(drawn) == sorted([*range(200), *range(200)])
    assert sorted(drawn[:200]) == list(range(200))
    assert [row["step"] for row in rows_in(config)] == list(range(1, 2 * -(-200 // per_step) + 1))
    # what the run writes down runs again, to the same
    again = replace(read_config(config.run_dir), run_dir=config.run_dir + "2")
    assert (again.epochs, again.steps) == (2.0, rows_in(config)[-1]["step"])
    STAGES[stage].run(again)
    assert same(written(config), written(again))


# --- what is measured ---


def test_the_held_out_loss_is_that_of_transformers(configs: dict[str, Any]) -> None:
    config = replace(configs["sft"], evaluate_every_steps=3)
    found = sft.run(config)
    rows = rows_in(config)
    assert [row["step"] for row in rows if "eval/loss" in row] == [3, 6, 8]
    assert found["loss"] == min(row["eval/loss"] for row in rows if "eval/loss" in row)
    assert json.loads(Path(config.run_dir, "summary.json").read_text()) == found
    model = AutoModelForCausalLM.from_pretrained(f"{config.run_dir}/model").eval()
    tokenizer = load_tokenizer(config.model)
    total, tokens = 0.0, 0
    for example in read_examples(config.heldout, tokenizer, config.max_tokens):
        ids = torch.tensor([example.ids])
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids).loss
        total, tokens = total + loss.item() * (len(example.ids) - 1), tokens + len(example.ids) - 1
    assert found["loss"] == pytest.approx(total / tokens, abs=1e-5)


def test_loss_and_accuracy_of_a_reward_model_on_held_out_pairs(configs: dict[str, Any]) -> None:
    config = replace(configs["reward"], evaluate_every_steps=4)
    found = reward.run(config)
    scorer = load_scorer(f"{config.run_dir}/model")
    pairs = reward.read_pairs(config.heldout, load_tokenizer(config.model), config.max_tokens)
    with torch.no_grad():
        margins = reward._margins(scorer, pairs, torch.device("cpu")) * found["score_std"]
    assert found["loss"] == pytest.approx((1 + (-margins).exp()).log().mean().item(), abs=1e-5)
    assert found["accuracy"] == (margins > 0).float().mean().item()
    rows = [row for row in rows_in(config) if "eval/loss" in row]
    assert [row["step"] for row in rows] == [4, 8]
    assert rows[-1]["eval/accuracy"] == found["accuracy"]


# --- which model is written ---


@each_stage
def test_the_best_model_is_written_and_a_nan_is_never_the_best(
    stage: str, configs: dict[str, Any], measured: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(configs[stage], evaluate_every_steps=2)
    seen = measured(STAGES[stage], [math.nan, 0.5, math.nan, 0.7])
    found = STAGES[stage].run(config)
    assert found["loss"] == 0.5
    assert same(written(config), seen[1])
    assert not same(seen[1], seen[3])
    assert "the best model, that of step 4 of 8, is kept" in capsys.readouterr().out
    best = [row["eval/best"] for row in rows_in(config) if "eval/best" in row]
    assert best == [None, 0.5, 0.5, 0.5]


@each_stage
def test_where_only_the_last_step_is_measured_its_model_is_written(
    stage: str, configs: dict[str, Any], measured: Any
) -> None:
    config = replace(configs[stage], steps=3)
    seen = measured(STAGES[stage], [0.9])
    assert STAGES[stage].run(config)["loss"] == 0.9
    assert same(written(config), seen[0])


@each_stage
@pytest.mark.parametrize("lora", [None, 2])
def test_a_run_that_goes_on_knows_its_best(
    stage: str,
    lora: int | None,
    configs: dict[str, Any],
    measured: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The best of all was measured before the checkpoint that it goes on from."""
    if lora:
        pytest.importorskip("peft", reason="needs the extra lora")
    options: Any = {"evaluate_every_steps": 2, "save_every_steps": 3, "lora_rank": lora}
    config = replace(configs[stage], **options)
    whole = replace(config, run_dir=config.run_dir + "_whole")
    measured(STAGES[stage], [0.5, 0.7, 0.6, 0.8])
    STAGES[stage].run(whole)

    measured(STAGES[stage], [0.5, 0.7])
    inner = supervised.clipped_step
    taken: list[int] = []

    def clipped_step(*args: Any) -> Any:
        taken.append(1)
        if len(taken) == 6:
            raise InterruptedError
        return inner(*args)

    monkeypatch.setattr(supervised, "clipped_step", clipped_step)
    with pytest.raises(InterruptedError):
        STAGES[stage].run(config)
    measured(STAGES[stage], [0.7, 0.6, 0.8])
    assert cli.main(["resume", config.run_dir]) == 0
    assert differences(Path(whole.run_dir), Path(config.run_dir)) == []
    assert [row["eval/best"] for row in rows_in(config) if "eval/best" in row] == [0.5] * 4
    checkpoint = Path(config.run_dir, "checkpoints/00000006/best.pt")
    assert torch.load(checkpoint, weights_only=True)["step"] == 2


@each_stage
def test_a_run_whose_loss_was_never_a_number_writes_no_model(
    stage: str, configs: dict[str, Any], measured: Any
) -> None:
    measured(STAGES[stage], [math.nan, math.inf, math.nan])
    config = replace(configs[stage], steps=3, evaluate_every_steps=1)
    with pytest.raises(CheckFailed, match="its held-out loss was never a finite number"):
        STAGES[stage].run(config)
    assert not Path(config.run_dir, "model").exists()


def test_a_reward_model_that_tells_nothing_apart_is_refused(
    configs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"loss": 0.7, "accuracy": 0.0, "score_mean": 0.0, "score_std": 0.0}
    monkeypatch.setattr(reward, "_measure", lambda *_: found)
    with pytest.raises(UserError, match=r"spread by 0\.0: the head has learned nothing"):
        reward.run(replace(configs["reward"], steps=1))


# --- without held-out rows ---


def test_a_tenth_is_held_out_by_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    config = SFTConfig(train="t")
    train, heldout = rows_of(config, lambda _: list(range(53)))
    assert "t: 5 of 53 rows, drawn by the seed, are held out" in capsys.readouterr().out
    assert len(heldout) == 5
    assert sorted([*train, *heldout]) == list(range(53))
    assert (train, heldout) == rows_of(config, lambda _: list(range(53)))
    assert heldout != rows_of(replace(config, seed=1), lambda _: list(range(53)))[1]
    assert heldout != list(range(5))
    with pytest.raises(UserError, match="t has one row, so none can be held out"):
        rows_of(config, lambda _: [0])
    given = rows_of(replace(config, heldout="h"), lambda path: [path])
    assert given == (["t"], ["h"])


@each_stage
def test_a_run_without_held_out_rows_measures_on_some_of_its_own(
    stage: str, configs: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(configs[stage], heldout="", save_every_steps=4)
    STAGES[stage].run(config)
    assert "20 of 200 rows, drawn by the seed, are held out" in capsys.readouterr().out
    result = Path(config.run_dir, "summary.json").read_text()
    assert cli.main(["resume", config.run_dir]) == 0
    assert Path(config.run_dir, "summary.json").read_text() == result
    assert yaml.safe_load(Path(config.run_dir, "config.yaml").read_text())["heldout"] == ""


# --- adapters ---


@each_stage
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_adapters_are_merged_into_a_plain_model(
    stage: str,
    kind: str,
    configs: dict[str, Any],
    make_model: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is written is what was measured; only adapters, and the scalar head, were learned."""
    pytest.importorskip("peft", reason="needs the extra lora")
    config = replace(configs[stage], model=make_model(kind), lora_rank=2, learning_rate=1e-2)
    ids = torch.tensor([1, 20, 30, 40, 1, 7, 9]), torch.tensor([0, 4, 7], dtype=torch.int32)
    inner, said = STAGES[stage]._measure, []

    def measure(model: Any, *args: Any) -> dict[str, float]:
        said.append(numbers_of(model)(*ids))
        return inner(model, *args)

    monkeypatch.setattr(STAGES[stage], "_measure", measure)
    found = STAGES[stage].run(config)
    folder = Path(config.run_dir, "model")
    assert not (folder / "adapter_config.json").exists()
    load = load_policy if stage == "sft" else load_scorer
    model = load(str(folder))
    with torch.no_grad():
        read = numbers_of(model)(*ids)
    if stage == "reward":
        read = read * found["score_std"] + found["score_mean"]
    torch.testing.assert_close(read, said[0], atol=1e-5, rtol=1e-5)

    kept = safetensors.torch.load_file(
        Path(config.run_dir, "checkpoints/00000008/model.safetensors")
    )
    others = {name for name in kept if "lora_" not in name}
    assert others == (set() if stage == "sft" else {"score/weight"})
    before, after = written(replace(config)), weights(load_policy(config.model))
    names = set(before) & set(after)
    moved = {name for name in names if not torch.equal(before[name], after[name])}
    assert moved and all(x.endswith("weight") and before[x].dim() == 2 for x in moved)
    assert not any("wte" in name or "embed" in name or "norm" in name for name in moved)


def test_adapters_cost_the_checkpoint_little(configs: dict[str, Any]) -> None:
    pytest.importorskip("peft", reason="needs the extra lora")
    config = replace(configs["sft"], lora_rank=1, steps=4, evaluate_every_steps=2)
    sft.run(config)
    model = Path(config.model, "model.safetensors").stat().st_size
    folder = Path(config.run_dir, "checkpoints/00000004")
    assert sum(path.stat().st_size for path in folder.glob("[mb]*")) < model
