import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trainer import __main__ as cli
from trainer import ppo, report, sample
from trainer.config import PPOConfig, UserError
from trainer.data import Prompt


@pytest.fixture(scope="module")
def run_dir(text: Path, trained: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("report") / "ppo")
    ppo.run(
        PPOConfig(
            run_dir=folder,
            model=trained["model"],
            rewards={trained["reward_model"]: 1.0},
            train=str(text / "train.jsonl"),
            prompt_tokens=2,
            updates=3,
            episodes_per_update=8,
            max_new_tokens=12,
        )
    )
    return folder


class Page(HTMLParser):
    """Text and tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_report_is_one_picture_and_one_page(run_dir: str) -> None:
    assert cli.main(["report", run_dir]) == 0
    png = Path(run_dir, "report.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 20_000
    page = Page(Path(run_dir, "report.html").read_text())
    assert [link[:22] for link in page.links] == ["data:image/png;base64,"]  # self-contained
    shown = "".join(page.text)
    for row in json.loads(Path(run_dir, "samples.json").read_text()):
        for side in ("before", "after"):
            assert row[side]["text"] in shown
            assert f"score {row[side]['score']:+.2f}" in shown
    assert "objective/scores" in shown


def test_T18_samples_are_shown_as_text(run_dir: str) -> None:
    evil = '</script><img src=x onerror=alert(1)> [/b] & "quoted" </td>'
    side = {"prompt": evil, "text": evil, "score": 1.0, "kl": 2.0}
    page = Page(report.html(evil, "", {evil: 1.0}, [{"before": side, "after": side}]))
    assert "".join(page.text).count(evil) == 6  # title, heading, summary, and three cells
    assert page.tags.count("img") == 1 and "script" not in page.tags


def test_T18_samples_are_printed_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    side = {"prompt": "[red]", "text": "[/b] </script>", "score": 1.0, "kl": 2.0}
    sample.show([{"before": side, "after": side}])
    printed = capsys.readouterr().out
    assert printed.count("[/b] </script>") == 2
    assert "[red]" in printed and "[score +1.00, KL 2.0 nats]" in printed


def test_a_gap_in_a_metric_is_a_gap_in_its_curve(run_dir: str, tmp_path: Path) -> None:
    rows = report.read_metrics(Path(run_dir))
    rows = [row | {"objective/scores": None} if row["step"] == 2 else row for row in rows]
    report.draw(rows, {}, tmp_path / "report.png")
    assert (tmp_path / "report.png").exists()


def test_report_of_an_unfinished_run_says_so(run_dir: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(Path(run_dir, "metrics.jsonl").read_bytes())
    with pytest.raises(UserError, match=r"samples\.json is missing.*finished run"):
        report.run(str(tmp_path))


def test_report_of_another_stage_says_so(trained: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is not the folder of a PPO run"):
        report.run(str(Path(trained["model"]).parent))


def test_sample_shows_both_sides(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", run_dir, "--prompt", "the film"]) == 0
    printed = capsys.readouterr().out
    assert "the film" in printed
    assert printed.count("[score ") == 2
    assert printed.count(" nats]") == 1


def test_sample_asks_in_messages_where_the_run_did(
    run_dir: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = tmp_path / "chat.jsonl"
    train.write_text('{"prompt": [{"role": "user", "content": "a film"}]}\n')
    config = replace(sample.read_config(run_dir), prompt_tokens=None, train=str(train))
    tokenizer = sample.load_tokenizer(f"{run_dir}/policy")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} asks: {{ m.content }}{% endfor %}"
    )
    monkeypatch.setattr(sample, "read_config", lambda _: config)
    monkeypatch.setattr(sample, "load_tokenizer", lambda _: tokenizer)
    sample.run(run_dir, "the plot")
    assert "user asks: the plot" in " ".join(capsys.readouterr().out.split())


def test_sample_refuses_a_prompt_without_room(
    run_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sample", run_dir, "--prompt", "the film " * 30]) == 2
    assert "there is room for 35" in capsys.readouterr().err


def test_what_a_sample_says_of_itself(run_dir: str) -> None:
    """The reference against itself has a KL of 0; the policy's is that of its own tokens."""
    rows = json.loads(Path(run_dir, "samples.json").read_text())
    assert len(rows) == 8
    assert all(abs(row["before"]["kl"]) < 1e-3 for row in rows)
    assert any(abs(row["after"]["kl"]) > 1e-3 for row in rows)
    assert all(row["before"]["prompt"] == row["after"]["prompt"] for row in rows)


def test_sampling_is_repeatable(run_dir: str, models: Any, ppo_config: PPOConfig) -> None:
    asked = [Prompt([1, 20, 30], "", {})] * 4
    policy, tokenizer = models.policy, models.tokenizer
    args: Any = (policy, models.reference, models.rewards, tokenizer, asked)
    first = sample.respond(*args, ppo_config)
    assert first == sample.respond(*args, ppo_config)
    assert first != sample.respond(*args, replace(ppo_config, seed=5))


def test_sample_of_an_unfinished_run_says_so(
    run_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_bytes(Path(run_dir, "config.yaml").read_bytes())
    assert cli.main(["sample", str(tmp_path), "--prompt", "the film"]) == 2
    goes_on = f"is not finished: go on with `python -m trainer resume {tmp_path}`"
    assert goes_on in capsys.readouterr().err


def test_rewards_named_as_the_sides_of_a_comparison(run_dir: str, tmp_path: Path) -> None:
    """`facts` puts NAME_before and NAME_after into one row; a reward may bear either name."""
    summary = {"x_before": 1.0, "x_after": 2.0, "scores/f_before": 3.0, "scores/g_after": 4.0}
    shown = "".join(Page(f"<table>{report.facts(summary)}</table>").text)
    assert shown == "x, before and after12scores/f_before3scores/g_after4"


EVIL = "a\x1b]0;title\x07\x1b[31mred\x9b2J\rb\x00\tc\nd"


def test_T18_control_characters_are_shown_and_not_obeyed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    side = {"prompt": EVIL, "text": EVIL, "score": 1.0, "kl": 2.0}
    sample.show([{"before": side, "after": side}])
    printed = capsys.readouterr().out
    assert not set("\x1b\x07\x9b\r\x00") & set(printed)
    assert "\\x1b" in printed and "\\x07" in printed


def test_sample_shows_the_reward_function_what_it_asks_for(
    run_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Columns are of the data: a prompt on the command line has none."""
    path = tmp_path / "mine.py"
    path.write_text("def f(prompts, completions, noun):\n    return [0.0] * len(noun)\n")
    config = replace(sample.read_config(run_dir), rewards={f"{path}:f": 1.0})
    monkeypatch.setattr(sample, "read_config", lambda _: config)
    assert cli.main(["sample", run_dir, "--prompt", "the film"]) == 2
    assert f"{path}:f: missing a required argument: 'noun'" in capsys.readouterr().err
