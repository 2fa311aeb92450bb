"""Text to token ids: the four contracts a row can have, and how rows become batches.

    {"text"}    {"prompt", "completion"}    {"prompt"}    {"prompt", "chosen", "rejected"}

A value is a string or a list of chat messages, which goes through the tokenizer's chat template. A
sequence begins with at most one BOS and a finished one ends with one EOS; one inside is part of the
text. Other columns travel on to the reward function.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ppokern import position_ids

from .config import UserError, require
from .metrics import as_json, console
from .sources import rows_of

Row = dict[str, Any]
Value = str | list[dict[str, str]]
Item = TypeVar("Item")


@dataclass
class Example:
    """A whole sequence; the loss takes part from `start` on."""

    ids: list[int]
    start: int


class Pair(NamedTuple):
    """Two whole sequences, of which people prefer the first."""

    chosen: list[int]
    rejected: list[int]


@dataclass
class Prompt:
    """What a response is to be sampled for."""

    ids: list[int]
    value: Value  # as it stands in the file
    columns: Row = field(default_factory=dict)  # the row's other columns


def read_examples(path: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Example]:
    """Sequences to learn, from `{"text"}` or `{"prompt", "completion"}`."""
    rows = _placed(path, "text", "prompt completion")
    encode = Encoder(tokenizer, rows.values(), "text", "prompt", "completion")

    def example(row: Row) -> Example:
        if row.get("text") is not None:
            return encode.whole(row["text"])
        return encode.pair(row["prompt"], row["completion"])

    long = _longer_than(max_tokens)
    return _kept(path, _encoded(rows, example), long, lambda example: len(example.ids) > max_tokens)


def read_pairs(path: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Pair]:
    """Chosen and rejected sequences, from `{"prompt", "chosen", "rejected"}`."""
    rows = _placed(path, "prompt chosen rejected")
    encode = Encoder(tokenizer, rows.values(), "prompt", *Pair._fields)
    pairs = _encoded(
        rows, lambda row: Pair(*(encode.pair(row["prompt"], row[x]).ids for x in Pair._fields))
    )
    alike = "one text for chosen and rejected: there is nothing to prefer"
    pairs = _kept(path, pairs, alike, lambda pair: pair.chosen == pair.rejected)
    long = _longer_than(max_tokens)
    return _kept(path, pairs, long, lambda pair: max(map(len, pair)) > max_tokens)


def read_prompts(
    path: str, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int | None, max_tokens: int
) -> list[Prompt]:
    """Prompts, from `{"prompt"}` or, given `prompt_tokens`, the beginnings of `{"text"}`."""
    key = "prompt" if prompt_tokens is None else "text"
    rows = _placed(path, key)
    encode = Encoder(tokenizer, rows.values(), key)

    def prompt(row: Row) -> Prompt:
        value, columns = row[key], {name: row[name] for name in row if name != key}
        if prompt_tokens is None:
            return Prompt(encode.start(value), value, columns)
        texts = isinstance(value, str)
        require(texts, "prompt_tokens takes the beginning of a text, not of messages")
        ids = encode.whole(value).ids[:-1]
        ids = ids[: prompt_tokens + (ids[:1] == [encode.bos])]
        text: Any = tokenizer.decode(ids, skip_special_tokens=True)
        return Prompt(ids, text, columns)

    prompts, long = _encoded(rows, prompt), _longer_than(max_tokens)
    return _kept(path, prompts, long, lambda prompt: len(prompt.ids) > max_tokens)


def _encoded(rows: Mapping[str, Row], encode: Callable[[Row], Item]) -> list[Item]:
    """What is made of each row; what stands against one is told with its place."""
    made = []
    for place, row in rows.items():
        try:
            made.append(encode(row))
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        except Exception as error:  # a chat template is a program, and raises what it likes
            why = f"{type(error).__name__}: {error}"
            raise UserError(f"{place}: the tokenizer or its template refuses it, {why}") from None
    return made


def _longer_than(max_tokens: int) -> str:
    return f"more than {max_tokens} tokens"


def _kept(path: str, items: list[Item], why: str, left: Callable[[Item], bool]) -> list[Item]:
    """All but those that are left out, which are counted."""
    kept = [item for item in items if not left(item)]
    require(bool(kept), f"{path}: every row has {why}")
    if len(kept) < len(items):
        left_out = f"{len(items) - len(kept)} of {len(items)} rows left out"
        console.print(f"{path}: {left_out}: {why}")
    return kept


def read_rows(path: str, *keys: str) -> list[Row]:
    """The rows of a source, each of which must have one of the sets of keys, and one only.

    Args:
        path: a file, or a data set of the hub; see sources.py.
        *keys: sets of keys, each as one string with spaces.
    """
    return list(_placed(path, *keys).values())


def _placed(path: str, *keys: str) -> dict[str, Row]:
    """The rows by their places, which errors tell."""
    rows = {}
    needed = f"needs {' or '.join(map(repr, keys))}, texts or lists of messages"
    for place, row in rows_of(path):
        require(isinstance(row, dict), f"{place}: {needed}; got {repr(row)[:40]}")
        given = {key for group in keys for key in group.split() if row.get(key) is not None}
        for key in sorted(given):
            _require_value(row[key], f"{place}: {needed}; {key}")
        whole = [group for group in keys if given.issuperset(group.split())]
        require(bool(whole), f"{place}: {needed}; got the keys {sorted(row)}")
        require(len(whole) == 1, f"{place}: it has {' and '.join(map(repr, whole))}: which is it?")
        rows[place] = row
    require(bool(rows), f"{path} is empty")
    return rows


def _require_value(value: object, what: str) -> None:
    """Raises a `UserError` unless it is a text or messages, each with a role and a text."""
    if isinstance(value, str):
        return
    require(isinstance(value, list) and bool(value), f"{what} is {repr(value)[:40]}")
    for said in cast(list[Any], value):
        require(isinstance(said, dict), f"{what} has {repr(said)[:40]} for a message")
        for part in ("role", "content"):
            text = isinstance(said.get(part), str)
            came = repr(said[part])[:40] if part in said else "none"
            require(text, f"{what} has a message whose {part} must be a text, got {came}")


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes a JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(as_json(row) + "\n" for row in rows), encoding="utf-8")


def installed_file(packages: Sequence[str], name: str, sha256: str, instead: str) -> Path:
    """A file of the first of some packages that must be there, byte for byte the one that is meant.

    Args:
        packages: the first is not imported: its `__init__` may want what is not needed here.
        name: of the file, beside the first package's `__init__`.
        sha256: of its content.
        instead: what an error is to say of the ways out.
    """
    specs = [importlib.util.find_spec(package) for package in packages]
    for package, spec in zip(packages, specs, strict=True):
        require(spec is not None, f"{name} needs the package {package}: {instead}")
    path = Path(getattr(specs[0], "origin", None) or "").parent / name
    content = path.read_bytes() if path.is_file() else b""
    found = hashlib.sha256(content).hexdigest()
    require(found == sha256, f"{path} is not the file that is meant (SHA-256 {found}): {instead}")
    return path


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer that puts `<s>` before a text; no text is unknown to it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's EOS."""
    eos: Any = tokenizer.eos_token_id
    require(eos is not None, "the tokenizer has no EOS, so nothing could end a response")
    return eos


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation: object = None) -> list[int]:
    """The tokens that end a response: the tokenizer's EOS and those of a generation config."""
    others = getattr(generation, "eos_token_id", None)
    others = others if isinstance(others, list) else [others]
    return sorted({end_token(tokenizer), *others} - {None})


class Encoder:
    """Values to ids; the strings of a file are tokenised in one call."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rows: Iterable[Row], *keys: str) -> None:
        """Tokenises all strings that will be asked for.

        Args:
            tokenizer: it must have an EOS; a sequence begins with a BOS if it begins them so.
            rows: where they stand.
            *keys: under which keys.
        """
        self.tokenizer = tokenizer
        self.bos: Any = tokenizer.bos_token_id
        self.eos = end_token(tokenizer)
        self._begin = beginning(tokenizer)
        strings = {row[key] for row in rows for key in keys if isinstance(row.get(key), str)}
        texts = sorted(strings) or [""]
        try:
            ids = tokenizer(texts, add_special_tokens=False).input_ids
        except Exception:  # of one of them, whatever it was: it is met again, in its place
            texts = ids = []
        self._ids: dict[str, list[int]] = dict(zip(texts, ids, strict=True))

    def start(self, value: Value) -> list[int]:
        """Ids that a response can follow: begun with at most one BOS."""
        if isinstance(value, str):
            return self._begun(value, self._without_bos(self._tokens(value)))
        return self._templated(value, answered=False)

    def whole(self, value: Value) -> Example:
        """Ids of a text, ended with one EOS; the loss takes part in all but the first token."""
        if isinstance(value, str):
            ids = self._begun(value, self._unended(self._without_bos(self._tokens(value))))
        else:
            ids = self._answered(self._templated(value))
        return Example([*ids, self.eos], 1)

    def pair(self, prompt: Value, completion: Value) -> Example:
        """Ids of a prompt and its completion, ended with one EOS; the loss is on the completion."""
        start = self.start(prompt)
        if isinstance(prompt, str) and isinstance(completion, str):
            rest = self._tokens(completion)
            if self._begin or self.bos != self.eos:  # else it is an end inside, as in a dialogue
                rest = self._without_bos(rest)
            rest = self._unended(rest)
        else:
            whole = self._templated([*said("user", prompt), *said("assistant", completion)])
            require(
                whole[: len(start)] == start,
                "the chat template does not put the answer behind the prompt's own tokens",
            )
            rest = self._answered(whole[len(start) :])
        return Example([*start, *rest, self.eos], len(start))

    def _tokens(self, text: str) -> list[int]:
        """Ids of a string as it stands."""
        if text not in self._ids:
            self._ids[text] = self.tokenizer(text, add_special_tokens=False).input_ids
        return self._ids[text]

    def _begun(self, text: str, ids: list[int]) -> list[int]:
        """Puts the BOS before ids of a text that it brings itself or the tokenizer puts there."""
        own = self._tokens(text)[:1] == [self.bos]
        ids = ([self.bos] if own else self._begin) + ids
        if not ids:
            require(self.bos is not None, "a text or prompt is empty, and the tokenizer has no BOS")
            return [self.bos]
        return ids

    def _without_bos(self, ids: list[int]) -> list[int]:
        return list(itertools.dropwhile(lambda token: token == self.bos, ids))

    def _unended(self, ids: list[int]) -> list[int]:
        """What stands before an EOS at the very end; one inside is part of the text."""
        while ids and ids[-1] == self.eos:
            ids = ids[:-1]
        return ids

    def _templated(self, messages: list[dict[str, str]], *, answered: bool = True) -> list[int]:
        require(
            bool(self.tokenizer.chat_template),
            "chat messages need a tokenizer with a chat template",
        )
        ids: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=False, add_generation_prompt=not answered
        )
        require(bool(ids), "the chat template makes nothing of the messages")
        return [self.bos, *self._without_bos(ids)] if ids[0] == self.bos else ids

    def _answered(self, ids: list[int]) -> list[int]:
        """What a template puts before the end; it may put a line break behind it."""
        behind = list(itertools.takewhile(lambda token: token != self.eos, reversed(ids)))
        text: Any = self.tokenizer.decode(behind[::-1])
        ended = len(behind) < len(ids) and not text.strip()
        return self._unended(ids[: len(ids) - len(behind)]) if ended else ids


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The BOS that a tokenizer puts before a text; nothing where it puts none."""
    bos: Any = tokenizer.bos_token_id
    return [bos] if tokenizer("a").input_ids[:1] == [bos] else []


def known_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id that a tokenizer knows; an embedding may have more rows."""
    return max(tokenizer.get_vocab().values()) + 1


def said(role: str, value: Value) -> list[dict[str, str]]:
    """A text as the one message of a role; messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


class Order(Iterator[Item]):
    """An endless order, drawn a stretch at a time; its state is what was drawn and the cursor."""

    def __init__(self, draw: Callable[[int], list[Item]], rows: Sequence[Order[int]] = ()) -> None:
        """Takes what draws stretch 0, 1, …, and the orders that it draws from."""
        self._draw, self._rows = draw, rows
        self._stretch, self._cursor = -1, 0
        self._drawn: list[Item] = []

    def __next__(self) -> Item:
        """The next of the stretch, or the first of the next one."""
        if self._cursor == len(self._drawn):
            self._stretch, self._cursor = self._stretch + 1, 0
            self._drawn = self._draw(self._stretch)
        self._cursor += 1
        return self._drawn[self._cursor - 1]

    def state_dict(self) -> Row:
        """Where it stands."""
        return {
            "stretch": self._stretch,
            "cursor": self._cursor,
            "drawn": self._drawn,
            "rows": [rows.state_dict() for rows in self._rows],
        }

    def load_state_dict(self, state_dict: Row, /) -> None:
        """Goes on from there."""
        self._stretch, self._cursor = state_dict["stretch"], state_dict["cursor"]
        self._drawn = state_dict["drawn"]
        for rows, state in zip(self._rows, state_dict["rows"], strict=True):
            rows.load_state_dict(state)


def shuffled(count: int, seed: int) -> Order[int]:
    """Endless indices below `count`; each epoch is a permutation of its own."""
    return Order(lambda epoch: random.Random(f"{seed}/{epoch}").sample(range(count), count))


def length_batches(lengths: Sequence[int], size: int, seed: int) -> Order[list[int]]:
    """Endless batches of indices in random order, each of rows alike in length.

    A stretch of 32 batches is drawn, sorted by length, cut into batches, and these are shuffled.
    Fewer where there are fewer rows: else a batch would be of one row over and over.
    """
    rows = shuffled(len(lengths), seed)
    count = min(32, max(len(lengths) // size, 1))

    def draw(stretch: int) -> list[list[int]]:
        batches = _alike(list(itertools.islice(rows, count * size)), lengths, size)
        random.Random(f"{seed}/{stretch}").shuffle(batches)
        return batches

    return Order(draw, [rows])


def epoch_batches(lengths: Sequence[int], size: int, seed: int) -> Order[list[int]]:
    """As `length_batches`, but each epoch has each row once; some of its batches are smaller."""

    def draw(epoch: int) -> list[list[int]]:
        chance = random.Random(f"{seed}/{epoch}")
        rows = chance.sample(range(len(lengths)), len(lengths))
        stretches = (rows[i : i + 32 * size] for i in range(0, len(rows), 32 * size))
        batches = [batch for stretch in stretches for batch in _alike(stretch, lengths, size)]
        chance.shuffle(batches)
        return batches

    return Order(draw)


def _alike(rows: list[int], lengths: Sequence[int], size: int) -> list[list[int]]:
    """Rows cut into batches of `size`, each of rows alike in length."""
    rows = sorted(rows, key=lambda row: lengths[row])
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def mixed(counts: Sequence[int], weights: Sequence[float], seed: int) -> Order[int]:
    """Endless indices of the rows of several files, one file behind the other.

    Each is of a file drawn by its weight: the next in that file's own order, in which no row comes
    again before all have come.
    """
    files = [shuffled(count, seed) for count in counts]
    starts = list(itertools.accumulate(counts, initial=0))

    def draw(stretch: int) -> list[int]:
        chance = random.Random(f"{seed}/{stretch}/files")
        chosen = chance.choices(range(len(files)), weights, k=256)
        return [starts[file] + next(files[file]) for file in chosen]

    return Order(draw, files)


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows by length, in as few batches of at most `max_tokens` as that order allows, equally full.

    Rows alike in length stay together. A row with more tokens is a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])

    def cut(limit: int) -> list[list[int]]:
        batches: list[list[int]] = []
        room = 0
        for row in order:
            if not batches or lengths[row] > room:
                batches.append([])
                room = limit
            batches[-1].append(row)
            room -= lengths[row]
        return batches

    fewest = len(cut(max_tokens))
    limits = range(1, max_tokens)
    return cut(1 + bisect_left(limits, True, key=lambda limit: len(cut(limit)) == fewest))


def packed(
    rows: Sequence[Sequence[int]], device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Ids one row behind the other, `(total,)`, and where each begins and ends, `(S + 1,)`."""
    ids = torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=torch.long, device=device)
    ends = list(itertools.accumulate(map(len, rows), initial=0))
    return ids, torch.tensor(ends, dtype=torch.int32, device=device)


def select(cu_seqlens: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Where the tokens of some sequences stand, `(total',)`, and the boundaries of these alone."""
    index = torch.tensor(rows, dtype=torch.long, device=cu_seqlens.device)
    lengths = cu_seqlens.diff()[index].long()
    ends = nn.functional.pad(lengths.cumsum(0), (1, 0))
    shift = (cu_seqlens[index] - ends[:-1]).repeat_interleave(lengths)
    return torch.arange(len(shift), device=shift.device) + shift, ends.to(torch.int32)


def up_to_last(mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Places of each sequence up to its last in `mask`, `(total',)`, and their boundaries.

    Where none has one, it is the first token of the longest: a pass has to be over something.
    """
    positions = position_ids(cu_seqlens)
    reach = torch.where(mask, positions + 1, 0).float()
    lengths = torch.segment_reduce(reach, "max", offsets=cu_seqlens.long(), initial=0).long()
    lengths[cu_seqlens.diff().argmax()] += ~mask.any()
    kept = positions < lengths.repeat_interleave(cu_seqlens.diff())
    return kept.nonzero().squeeze(1), nn.functional.pad(lengths.cumsum(0), (1, 0))


def sums(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The sum of each sequence, `(total,)` to `(S,)`."""
    return torch.segment_reduce(x.float(), "sum", offsets=cu_seqlens.long(), initial=0)
