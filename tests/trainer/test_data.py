import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trainer.config import UserError
from trainer.data import (
    Encoder,
    epoch_batches,
    length_batches,
    micro_batches,
    mixed,
    packed,
    read_examples,
    read_pairs,
    read_prompts,
    read_rows,
    select,
    shuffled,
    stop_ids,
    sums,
    write_rows,
)

TEMPLATE = (
    "<s>{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["<pad>", "<s>", "</s>", "<user>", "<assistant>", "a", "b", "c", "\n", " ", "?"]


@pytest.fixture
def words() -> Any:
    """Every character or tag a token, so that ids can be read off; begins each text with a BOS."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(WORDS[:5])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def file(folder: Path, *rows: dict) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tokens(ids: list[int]) -> str:
    return "".join(WORDS[i] for i in ids)


@pytest.mark.parametrize(
    ("row", "ids", "start"),
    [
        ({"text": "abc"}, "<s>abc</s>", 1),
        ({"text": "<s>abc</s>"}, "<s>abc</s>", 1),
        ({"prompt": "ab", "completion": "c"}, "<s>abc</s>", 3),
        ({"prompt": "<s>ab", "completion": "<s>c</s>"}, "<s>abc</s>", 3),
        ({"prompt": "", "completion": "c"}, "<s>c</s>", 1),
        (
            {
                "prompt": [{"role": "user", "content": "a"}],
                "completion": [{"role": "assistant", "content": "b"}],
            },
            "<s><user>a</s>\n<assistant>b</s>",
            6,
        ),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": "b"},
            "<s><user>a</s>\n<assistant>b</s>",
            6,
        ),
        ({"text": [{"role": "user", "content": "a"}]}, "<s><user>a</s>", 1),
        # an end inside is part of the text, and only one at the very end is the end
        ({"text": "ab</s>c"}, "<s>ab</s>c</s>", 1),
        ({"text": "ab</s>c</s>"}, "<s>ab</s>c</s>", 1),
        ({"text": "a</s>\n"}, "<s>a</s>\n</s>", 1),
        ({"prompt": "a</s>", "completion": "b</s>c"}, "<s>a</s>b</s>c</s>", 3),
        ({"text": [{"role": "user", "content": "a</s>b"}]}, "<s><user>a</s>b</s>", 1),
        ({"text": ""}, "<s></s>", 1),
    ],
)
def test_examples(words: Any, tmp_path: Path, row: dict, ids: str, start: int) -> None:
    (example,) = read_examples(file(tmp_path, row), words, 99)
    assert tokens(example.ids) == ids
    assert example.start == start


def begins_with(tokenizer: Any, start: str, bos: str) -> None:
    """Makes a tokenizer begin each text so."""
    single = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(bos, WORDS.index(bos))]
    )
    tokenizer.backend_tokenizer.post_processor = single


SAID = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("begins", ["template", "tokenizer", "text"])
def test_never_a_second_bos(words: Any, tmp_path: Path, begins: str) -> None:
    """Whoever would put two: there is one before a text, a prompt, a pair, and chat messages."""
    own = "<s><s>" if begins == "text" else ""
    if begins == "template":
        words.chat_template = "<s>" + TEMPLATE
    if begins == "tokenizer":
        begins_with(words, "<s> <s>", "<s>")
        assert words("a").input_ids == [1, 1, 5]
    rows = [
        {"text": f"{own}ab"},
        {"prompt": f"{own}a", "completion": f"{own}b"},
        {"prompt": SAID, "completion": "b"},
        {"text": SAID},
    ]
    found = [tokens(x.ids) for x in read_examples(file(tmp_path, *rows), words, 99)]
    chat = "<s><user>a</s>\n<assistant>b</s>"
    assert found == ["<s>ab</s>", "<s>ab</s>", chat, "<s><user>a</s>"]
    prompts = read_prompts(file(tmp_path, {"prompt": f"{own}a"}, {"prompt": SAID}), words, None, 99)
    assert [tokens(x.ids) for x in prompts] == ["<s>a", "<s><user>a</s>\n<assistant>"]
    (prompt,) = read_prompts(file(tmp_path, {"text": f"{own}abc"}), words, 2, 99)
    assert tokens(prompt.ids) == "<s>ab"


def test_a_bos_that_is_the_eos_stays(words: Any, tmp_path: Path) -> None:
    """As of OPT: one token begins a text and ends it."""
    words.bos_token = "</s>"
    begins_with(words, "</s>", "</s>")
    words.chat_template = TEMPLATE.replace("<s>", "</s>", 1)
    rows = [
        {"text": "ab"},
        {"text": "</s>ab</s>"},
        {"text": "a</s>b"},
        {"text": ""},
        {"prompt": "a", "completion": "b"},
        {"prompt": "</s>a", "completion": "</s>b</s>"},
        {"prompt": SAID, "completion": "b"},
    ]
    found = read_examples(file(tmp_path, *rows), words, 99)
    chat = "</s><user>a</s>\n<assistant>b</s>"
    assert [tokens(x.ids) for x in found] == [
        "</s>ab</s>", "</s>ab</s>", "</s>a</s>b</s>", "</s></s>",
        "</s>ab</s>", "</s>ab</s>", chat,
    ]  # fmt: skip
    assert [x.start for x in found] == [1, 1, 1, 1, 2, 2, 6]
    (prompt,) = read_prompts(file(tmp_path, {"text": "abc"}), words, 2, 99)
    assert tokens(prompt.ids) == "</s>ab"


def test_a_bos_that_is_the_eos_and_begins_no_text(words: Any, tmp_path: Path) -> None:
    """As of GPT-2: it stands between the turns of a dialogue, and none of them is lost."""
    words.bos_token = "</s>"
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    rows = [
        {"text": "a</s>b"},
        {"prompt": "a", "completion": "</s>b"},
        {"prompt": "a</s>", "completion": "b"},
        {"text": "</s>a"},
    ]
    found = [tokens(x.ids) for x in read_examples(file(tmp_path, *rows), words, 99)]
    assert found == ["a</s>b</s>", "a</s>b</s>", "a</s>b</s>", "</s>a</s>"]


def test_a_turn_behind_the_last_end_is_kept(words: Any, tmp_path: Path) -> None:
    """A template that ends the assistant's turns alone: the user's last one has no end."""
    words.chat_template = (
        "<s>{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% if m.role == 'assistant' %}</s>\n{% endif %}{% endfor %}"
    )
    turns = [*SAID, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (example,) = read_examples(file(tmp_path, {"text": turns}), words, 99)
    assert tokens(example.ids) == "<s><user>a<assistant>b</s>\n<user>c</s>"


def test_tokenizer_without_bos_gets_none(words: Any, tmp_path: Path) -> None:
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    examples = read_examples(file(tmp_path, {"text": "ab"}), words, 99)
    assert tokens(examples[0].ids) == "ab</s>"
    # a text that brings its own keeps it: a chat template's BOS is no decoration
    prompts = read_prompts(file(tmp_path, {"prompt": "<s>ab"}), words, None, 99)
    assert tokens(prompts[0].ids) == "<s>ab"
    # an empty prompt still needs a token to predict from
    prompts = read_prompts(file(tmp_path, {"prompt": ""}), words, None, 99)
    assert tokens(prompts[0].ids) == "<s>"
    words.bos_token = None
    with pytest.raises(UserError, match="prompt is empty"):
        read_prompts(file(tmp_path, {"prompt": ""}), words, None, 99)


def test_pairs(words: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "cc"}]
    (pair,) = read_pairs(file(tmp_path, *rows), words, 99)
    assert (tokens(pair.chosen), tokens(pair.rejected)) == ("<s>ab</s>", "<s>acc</s>")


def test_pairs_with_nothing_to_prefer_are_left_out(
    words: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = {"prompt": "a", "chosen": "b", "rejected": "b</s>"}
    path = file(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"}, same)
    assert len(read_pairs(path, words, 99)) == 1
    assert "1 of 2 rows left out: one text for chosen and rejected" in capsys.readouterr().out
    with pytest.raises(UserError, match="every row has one text for chosen and rejected"):
        read_pairs(file(tmp_path, same, same), words, 99)


def test_prompts_keep_other_columns(words: Any, tmp_path: Path) -> None:
    (prompt,) = read_prompts(file(tmp_path, {"prompt": "ab", "stars": 5}), words, None, 99)
    assert (tokens(prompt.ids), prompt.value, prompt.columns) == ("<s>ab", "ab", {"stars": 5})


def test_prompt_tokens_do_not_count_the_bos(words: Any, tmp_path: Path) -> None:
    (prompt,) = read_prompts(file(tmp_path, {"text": "abc", "stars": 5}), words, 2, 99)
    assert (tokens(prompt.ids), prompt.value, prompt.columns) == ("<s>ab", "ab", {"stars": 5})


def test_prompt_tokens_of_messages_are_refused(words: Any, tmp_path: Path) -> None:
    path = file(tmp_path, {"text": [{"role": "user", "content": "a"}]})
    with pytest.raises(UserError, match="beginning of a text, not of messages"):
        read_prompts(path, words, 2, 99)


def test_template_that_rewrites_the_prompt_is_refused(words: Any, tmp_path: Path) -> None:
    words.chat_template = (
        "{% if add_generation_prompt %}<assistant>{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    row = {"prompt": [{"role": "user", "content": "a"}], "completion": "b"}
    with pytest.raises(UserError, match="chat template does not put the answer behind"):
        read_examples(file(tmp_path, row), words, 99)


def test_messages_need_a_template(words: Any, tmp_path: Path) -> None:
    words.chat_template = None
    with pytest.raises(UserError, match="chat template"):
        read_examples(file(tmp_path, {"text": [{"role": "user", "content": "a"}]}), words, 99)


def test_long_rows_are_left_out_and_counted(
    words: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(tmp_path, {"text": "a" * 8}, {"text": "a" * 9})
    assert len(read_examples(path, words, 10)) == 1
    assert "1 of 2 rows left out: more than 10 tokens" in capsys.readouterr().out
    with pytest.raises(UserError, match="every row has more than 9 tokens"):
        read_examples(path, words, 9)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "is empty"),
        ("\n", "is empty"),
        ("{", "line 1: not JSON"),
        ('{"text": "a"}\n{"txt": "b"}', r"line 2: needs 'prompt' or 'text'.* got the keys"),
        ('{"text": 5}', "line 1: needs 'prompt' or 'text', texts or lists of messages"),
        ("[1]", "line 1: needs 'prompt' or 'text'"),
        ('{"text": []}', "line 1: needs 'prompt' or 'text', texts or lists of messages"),
        ('{"text": ["a"]}', "line 1: needs 'prompt' or 'text', texts or lists of messages"),
        ('{"text": [{"content": "a"}]}', "line 1: needs 'prompt' or 'text', texts or lists of"),
        (b'{"text": "a"}\n{"text": "\xff"}', "line 2: not UTF-8"),
        ('{"text": "a"}\n{"text": "\\ud83d"}', "line 2: not UTF-8 .surrogates not allowed"),
        ('{"text": "a", "note": ["\\ud83d"]}', "line 1: not UTF-8 .surrogates not allowed"),
        ('{"text": "a"}\n' + "[" * 20000, "line 2: JSON that is too much"),
        ('{"text": "a"}\n{"text": %s}' % ("1" * 5000), "line 2: JSON that is too much"),
        ('{"text": [{"role": "user"}]}', "message whose content must be a text, got none"),
        ('{"text": [{"role": "user", "content": null}]}', "content must be a text, got None"),
        (
            '{"text": "a"}\n{"text": [{"role": "user", "content": [{"type": "text"}]}]}',
            r"line 2: .*content must be a text, got \[",
        ),
        ('{"text": [{"role": 5, "content": "a"}]}', "whose role must be a text, got 5"),
        ('{"text": 5, "prompt": "b"}', "line 1: needs .*; text is 5"),
        ('{"text": "a", "prompt": "b"}', "line 1: it has 'prompt' and 'text': which is it"),
    ],
)
def test_bad_files(tmp_path: Path, content: str | bytes, sentence: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=sentence):
        read_rows(str(path), "prompt", "text")


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"text": 5, "prompt": "a", "completion": "b"}, "text is 5"),
        ({"text": "a", "prompt": "a", "completion": "b"}, "has 'text' and 'prompt completion'"),
        ({"text": "a", "prompt": "a", "completion": ["b"]}, "completion has 'b' for a message"),
    ],
)
def test_a_row_is_one_thing_or_the_other(
    words: Any, tmp_path: Path, row: dict, sentence: str
) -> None:
    with pytest.raises(UserError, match=f"line 2: .*{sentence}"):
        read_examples(file(tmp_path, {"text": "a"}, row), words, 99)


def test_half_of_what_the_other_contract_needs_is_another_column(
    words: Any, tmp_path: Path
) -> None:
    (example,) = read_examples(file(tmp_path, {"text": "a", "prompt": "b"}), words, 99)
    assert tokens(example.ids) == "<s>a</s>"


def test_a_byte_order_mark_is_read(words: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n')
    assert read_rows(str(path), "text") == [{"text": "a"}, {"text": "b"}]


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00"}\n')
    assert read_rows(str(path), "text") == [{"text": "\U0001f600"}]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "UndefinedError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("", "chat template"),
        ("{% if no %}a{% endif %}", "makes nothing of the messages"),
    ],
)
@pytest.mark.parametrize("read", ["examples", "pairs", "prompts"])
def test_what_a_template_raises_is_told_with_its_row(
    words: Any, tmp_path: Path, template: str, why: str, read: str
) -> None:
    words.chat_template = template
    second = {"prompt": SAID, "completion": "b", "chosen": "b", "rejected": "c"}
    first = second | {"prompt": "a"}
    del first["completion"], second["completion"]
    if read == "examples":
        first, second = {"text": "a"}, {"text": SAID}
    path = file(tmp_path, first, second)
    with pytest.raises(UserError, match=rf"rows\.jsonl, line 2: .*{why}"):
        if read == "prompts":
            read_prompts(path, words, None, 99)
        else:
            (read_examples if read == "examples" else read_pairs)(path, words, 99)


def test_what_a_tokenizer_raises_is_told_with_its_row(words: Any, tmp_path: Path) -> None:
    inner = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="?"))  # which it lacks
    lacking = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    path = file(tmp_path, {"text": "a"}, {"text": "b"})
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: .*UNK"):
        read_examples(path, lacking, 99)


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    """Not at the other characters that Unicode calls line breaks; they may stand in a text."""
    rows = [{"text": "a\u2028b\x85c"}, {"text": "d"}]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(str(tmp_path / "rows.jsonl"), "text") == rows


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a file"):
        read_rows(str(tmp_path / "none.jsonl"), "text")


def test_T2_several_stop_ids(words: Any) -> None:
    generation = SimpleNamespace(eos_token_id=[7, 2])
    assert stop_ids(words, generation) == [2, 7]
    assert stop_ids(words) == [2]


def test_an_epoch_is_a_permutation() -> None:
    order = shuffled(10, seed=3)
    first, second = ([next(order) for _ in range(10)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first == [row for row, _ in zip(shuffled(10, seed=3), range(10), strict=False)]


@pytest.mark.parametrize("count", [10, 33, 100])
def test_a_batch_of_few_rows_has_none_over_and_over(count: int) -> None:
    batches = length_batches(list(range(count)), 10, 0)
    for batch in itertools.islice(batches, count // 10):
        assert len(set(batch)) == 10


def test_an_epoch_has_each_row_once() -> None:
    lengths = [1 + row % 9 for row in range(103)]
    batches, epochs = epoch_batches(lengths, 10, 0), []
    for _ in range(3):
        epochs.append([next(batches) for _ in range(11)])
        assert sorted(row for batch in epochs[-1] for row in batch) == list(range(103))
        assert sorted(map(len, epochs[-1])) == [3, *[10] * 10]
        assert all(lengths[b[-1]] - lengths[b[0]] <= 1 for b in epochs[-1])
    assert epochs[0] != epochs[1] != epochs[2]


def test_length_batches_are_alike_in_length() -> None:
    lengths = [1 + (i * 7) % 30 for i in range(640)]
    batches = [batch for batch, _ in zip(length_batches(lengths, 10, 0), range(64), strict=False)]
    assert sorted(row for batch in batches for row in batch) == list(range(640))
    spread = [max(lengths[r] for r in b) - min(lengths[r] for r in b) for b in batches]
    assert max(spread) <= 2
    firsts = [lengths[batch[0]] for batch in batches]
    assert firsts != sorted(firsts)


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ([5, 1, 9, 3, 3, 20], [[1, 3, 4], [0], [2], [5]]),  # by length; 20 alone is too much
        ([4] * 5, [[0, 1], [2, 3], [4]]),
        ([2] * 6, [[0, 1, 2], [3, 4, 5]]),  # not 5 and 1
        ([10, 10], [[0], [1]]),
        ([3], [[0]]),
        ([], []),
    ],
)
def test_micro_batches_are_few_and_equally_full(
    lengths: list[int], batches: list[list[int]]
) -> None:
    assert micro_batches(lengths, max_tokens=10) == batches


def test_micro_batches_hold_no_more_than_their_tokens() -> None:
    draw = random.Random(0)
    for _ in range(200):
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 60))]
        batches = micro_batches(lengths, limit := draw.randint(1, 200))
        assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
        held = [sum(lengths[row] for row in batch) for batch in batches]
        assert all(n <= limit or len(b) == 1 for n, b in zip(held, batches, strict=True))
        # two neighbours would not fit into one, so there are at most twice as many as need be
        assert all(a + b > limit for a, b in itertools.pairwise(held))


def test_sequences_are_selected_with_their_tokens() -> None:
    ids, cu_seqlens = packed([[1, 2, 3], [4], [5, 6]])
    assert (ids.tolist(), cu_seqlens.tolist()) == ([1, 2, 3, 4, 5, 6], [0, 3, 4, 6])
    places, ends = select(cu_seqlens, [2, 0])
    assert (ids[places].tolist(), ends.tolist()) == ([5, 6, 1, 2, 3], [0, 2, 5])
    assert sums(ids, cu_seqlens).tolist() == [6, 4, 11]


def test_one_call_to_the_tokenizer_gives_what_single_calls_give(tokenizer: Any) -> None:
    texts = ["the film is good", "", " spaces ", "é ☃"]
    encode = Encoder(tokenizer, [{"text": text} for text in texts], "text")
    assert [encode.start(text) for text in texts] == [tokenizer(text).input_ids for text in texts]


def test_files_are_drawn_by_their_weights() -> None:
    """Of files of 3 and 6 rows the second has three quarters, each in its own order, none twice."""
    drawn = list(itertools.islice(mixed([3, 6], [1.0, 3.0], 0), 4000))
    second = [row for row in drawn if row >= 3]
    assert len(second) == pytest.approx(3000, abs=100)  # 3.6 standard deviations
    for i in range(0, 600, 6):
        assert sorted(second[i : i + 6]) == [3, 4, 5, 6, 7, 8]
    first = [row for row in drawn if row < 3]
    for i in range(0, 300, 3):
        assert sorted(first[i : i + 3]) == [0, 1, 2]
    assert drawn != list(itertools.islice(mixed([3, 6], [1.0, 3.0], 1), 4000))


def test_one_file_alone_is_in_its_own_order() -> None:
    drawn = itertools.islice(mixed([7], [0.1], 5), 700)
    assert list(drawn) == list(itertools.islice(shuffled(7, 5), 700))
