import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ppokern
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
    config = PPOConfig(run_dir=evil, rewards={"f.py:f": 1.0})
    written = [{"before": side, "after": side}]
    page = Page(report.html(evil, "", {evil: 1.0}, written, [evil], config, evil))
    # title, heading, what is unfinished, words, summary, three cells, and an option
    assert "".join(page.text).count(evil) == 9
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


def copied(run_dir: str, folder: Path, *names: str) -> Path:
    """Some files of a run."""
    for name in names:
        (folder / name).write_bytes(Path(run_dir, name).read_bytes())
    return folder


def shown(folder: Path) -> str:
    """The words of a run's page."""
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    page = Page((folder / "report.html").read_text())
    assert [link[:22] for link in page.links] == ["data:image/png;base64,"]
    return " ".join("".join(page.text).split())


def test_report_of_an_unfinished_run_says_so(run_dir: str, tmp_path: Path) -> None:
    """Its last line may be in the midst of being written."""
    copied(run_dir, tmp_path, "config.yaml", "metrics.jsonl")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text(f"{lines[0]}\n{lines[1]}\n{lines[2][:50]}")
    report.run(str(tmp_path))
    page = shown(tmp_path)
    assert "Unfinished: 2 of 3 updates are done" in page
    assert f"`resume {tmp_path}` goes on with it" in page
    assert "2 updates of 8 responses: the score went from" in page
    assert "before and after" not in page
    assert "Unfinished" not in shown(Path(run_dir))


def test_report_before_the_first_step(run_dir: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the folder of a run"):
        report.run(str(tmp_path))
    copied(run_dir, tmp_path, "config.yaml")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="is empty: the run has not ended its first step"):
        report.run(str(tmp_path))


def test_report_of_the_other_stages(trained: dict[str, Any]) -> None:
    folder = Path(trained["model"]).parent
    report.run(str(folder))
    page = shown(folder)
    assert "150 steps of 16 sequences: the loss went from" in page
    assert f"of 1 measured is {trained['loss']:.3g} nats a token, a perplexity of" in page
    assert "sequences_per_step16" in page and "weight_decay0.01" in page  # given, and by default
    folder = Path(trained["reward_model"]).parent
    report.run(str(folder))
    page = shown(folder)
    assert f"{trained['accuracy']:.1%} of the pairs are told apart rightly: that of step 40" in page


def test_report_of_an_evaluated_run(run_dir: str, tmp_path: Path) -> None:
    """Evaluation and judge are drawn and told, and so is what the page was made with."""
    copied(run_dir, tmp_path, "config.yaml", "metrics.jsonl", "summary.json", "samples.json")
    rows = report.read_metrics(tmp_path)
    for row, verdict in zip(rows, (0.25, None, 0.75), strict=True):
        if verdict:
            row |= {"eval/score": 2 * verdict, "eval/kl": 1.0, "eval/length": 3.0}
            row |= {"eval/judge": verdict}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report.run(str(tmp_path))
    page = shown(tmp_path)
    assert "of 2 evaluations, the score went from 0.5 to 1.5, the judge's verdict from 0.25" in page
    for library in (ppokern, torch, transformers):
        assert library.__version__ in page
    assert "cpu" in page and "max_new_tokens12" in page


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn, which stay as they were when they were saved."""
    figures: list[Any] = []
    monkeypatch.setattr(report.pyplot, "close", figures.append)
    return figures


def test_a_picture_has_as_many_panels_as_curves(
    run_dir: str, trained: dict[str, Any], drawn: list[Any], tmp_path: Path
) -> None:
    """No hole, each line of the same width, and the colour bar beside all of them."""
    rows = report.read_metrics(Path(run_dir))
    sft = report.read_metrics(Path(trained["model"]).parent)
    judged = [row | {"eval/judge": 1.0} for row in rows]
    cases: list[Any] = [(sft, {}, 3), (rows, {}, 11), (judged, {}, 12), (judged, {"sft": sft}, 13)]
    for its, earlier, count in cases:
        report.draw(its, earlier, tmp_path / "report.png")
        figure = drawn[-1]
        panels = [x for x in figure.axes if x.get_title(loc="left")]
        assert len(panels) == count
        assert all(panel.has_data() for panel in panels)
        boxes = [panel.get_position() for panel in panels]
        lines = {round(box.y0, 2) for box in boxes}
        right = [max(b.x1 for b in boxes if round(b.y0, 2) == line) for line in lines]
        assert max(right) - min(right) < 0.01
        bars = [x.get_position().x0 for x in figure.axes if x not in panels]
        assert all(bar > max(right) for bar in bars) and len(bars) == (its is not sft)


def test_a_curve_that_is_not_in_the_metrics_is_left_out(
    run_dir: str, drawn: list[Any], tmp_path: Path
) -> None:
    """As those of the policy are where only the critic has learned so far."""
    rows = report.read_metrics(Path(run_dir))
    rows = [{k: v for k, v in row.items() if k != "policy/clipfrac_avg"} for row in rows]
    report.draw(rows, {}, tmp_path / "report.png")
    titles = {panel.get_title(loc="left") for panel in drawn[-1].axes}
    assert "score" in titles and "clipped, share of tokens" not in titles


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
