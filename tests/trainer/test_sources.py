"""Rows from JSONL, Parquet and the hub: the same rows, the same bits, the same errors."""

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crash import differences

from ppokern._install import pip_install
from trainer import __main__ as cli
from trainer import demo, ppo, reward, sft
from trainer.checkpoint import fingerprint
from trainer.config import PPOConfig, RewardConfig, SFTConfig, UserError
from trainer.data import read_examples, read_rows, write_rows

ROWS = [
    {"prompt": "a\u2028b", "completion": "c", "stars": 5},
    {"prompt": [{"role": "user", "content": "a"}], "completion": "c", "stars": None},
]
KEYS = ("text", "prompt completion")


@pytest.fixture
def parquet() -> Any:
    pytest.importorskip("pyarrow", reason="needs the extra data")
    import pyarrow.parquet

    return pyarrow.parquet


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Makes a local folder that `datasets` reads as it does one of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="needs the extra data")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()

    def make(folder: str = "set", **splits: list[dict[str, Any]]) -> str:
        for split, rows in splits.items():
            write_rows(tmp_path / folder / f"{split}.jsonl", rows)
        return f"hub:{tmp_path / folder}"

    return make


def test_parquet_has_the_rows_of_jsonl(parquet: Any, tmp_path: Path) -> None:
    """Texts and messages in files of their own: a column of Parquet has one type."""
    for row in ROWS:
        write_rows(tmp_path / "rows.jsonl", [row])
        path = write_parquet(tmp_path / "rows.parquet", [row])
        assert read_rows(path, *KEYS) == read_rows(str(tmp_path / "rows.jsonl"), *KEYS) == [row]


def test_a_column_that_a_row_has_nothing_in(parquet: Any, tmp_path: Path, tokenizer: Any) -> None:
    """Of two contracts in one file each row has the columns of both."""
    rows = [{"text": "a film"}, {"prompt": "the", "completion": " plot"}]
    names = ("text", "prompt", "completion")
    path = write_parquet(tmp_path / "r.parquet", [{n: row.get(n) for n in names} for row in rows])
    write_rows(tmp_path / "rows.jsonl", rows)
    expected = read_examples(str(tmp_path / "rows.jsonl"), tokenizer, 99)
    assert read_examples(path, tokenizer, 99) == expected


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [{"text": "a"}, {"text": None}],
            r"r\.parquet, row 2: needs 'text' or 'prompt completion'",
        ),
        ([{"text": b"a"}], r"r\.parquet, row 1: needs 'text'"),
        ([], r"r\.parquet is empty"),
    ],
)
def test_rows_of_parquet_that_will_not_do(
    parquet: Any, tmp_path: Path, rows: list[dict[str, Any]], sentence: str
) -> None:
    path = write_parquet(tmp_path / "r.parquet", rows)
    with pytest.raises(UserError, match=sentence):
        read_rows(path, *KEYS)


def test_a_file_that_is_not_parquet(parquet: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    with pytest.raises(UserError, match=r"r\.parquet is not a file"):
        read_rows(str(path), *KEYS)
    write_rows(path, ROWS)
    with pytest.raises(UserError, match=r"r\.parquet: not Parquet"):
        read_rows(str(path), *KEYS)
    whole = Path(write_parquet(path, [{"text": "a" * 1000}])).read_bytes()
    path.write_bytes(whole[:4] + b"\0" * 100 + whole[104:])  # its pages are damaged
    with pytest.raises(UserError, match=r"r\.parquet"):
        read_rows(str(path), *KEYS)


def test_rows_of_the_hub(hub: Callable[..., str]) -> None:
    source = hub(train=ROWS[:1], test=ROWS[:1] * 3)
    assert read_rows(source, *KEYS) == read_rows(f"{source}:train", *KEYS) == ROWS[:1]
    assert read_rows(f"{source}:test", *KEYS) == ROWS[:1] * 3
    assert read_rows(f"{source}:default:test", *KEYS) == ROWS[:1] * 3
    assert read_rows(hub("chat", train=ROWS[1:]), *KEYS) == ROWS[1:]


@pytest.mark.parametrize(
    ("rest", "sentence"),
    [
        (":none", r'set:none cannot be loaded: Unknown split "none"'),
        (":other:train", "set:other:train cannot be loaded: BuilderConfig 'other' not found"),
        ("/no/such", "set/no/such cannot be loaded"),
        (":a:b:c", "is not of the form hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT"),
        (":", "is not of the form"),
        (":test", "set:test, row 2: needs 'text' or 'prompt completion', .* got the keys"),
    ],
)
def test_hub_data_that_will_not_do(hub: Callable[..., str], rest: str, sentence: str) -> None:
    source = hub(train=[{"text": "a"}], test=[{"text": "a"}, {"text": None}])
    with pytest.raises(UserError, match=sentence):
        read_rows(source + rest, *KEYS)


def test_a_set_that_brings_code_is_not_run(hub: Callable[..., str], tmp_path: Path) -> None:
    folder = Path(hub(train=ROWS[:1]).removeprefix("hub:"))
    touch = f"import pathlib\npathlib.Path({str(tmp_path / 'touched')!r}).touch()\n"
    (folder / "set.py").write_text(touch)
    for source in (f"hub:{folder}", f"hub:{folder / 'set.py'}"):
        with pytest.raises(UserError, match="cannot be loaded: Dataset scripts are no longer"):
            read_rows(source, *KEYS)
    assert not (tmp_path / "touched").exists()


def test_of_a_name_nothing_but_name_configuration_and_split_is_asked(
    hub: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no hub in a test: what is asked of it stands for it."""
    import datasets
    import pyarrow

    asked = []

    def load(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        return datasets.Dataset(pyarrow.Table.from_pylist(ROWS[:1]), fingerprint="one")

    monkeypatch.setattr(datasets, "load_dataset", load)
    for source in ("hub:some/one", "hub:gsm8k:main:test"):
        assert read_rows(source, *KEYS) == ROWS[:1]
    assert asked == [
        (("some/one",), {"split": "train"}),
        (("gsm8k", "main"), {"split": "test"}),
    ]


@pytest.mark.parametrize(
    ("source", "missing"), [("rows.parquet", "pyarrow"), ("hub:some/one", "datasets")]
)
def test_without_the_extra_its_name_is_told(
    source: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = importlib.import_module
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.parquet", ROWS)

    def absent(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return inner(name, *args)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UserError, match=f"needs {missing}: {re.escape(pip_install('data'))}"):
        read_rows(source, *KEYS)


def test_hub_data_are_known_by_their_rows(hub: Callable[..., str], tmp_path: Path) -> None:
    first, same = hub("first", train=ROWS[:1]), hub("same", train=ROWS[:1])
    other = hub("other", train=[ROWS[0] | {"stars": 4}])
    assert fingerprint(first) == fingerprint(same) != fingerprint(other)
    two = hub("two", train=ROWS[:1] * 2)
    assert fingerprint(two) != fingerprint(first)


def test_pictures_of_the_hub_are_known_by_their_bytes(
    hub: Callable[..., str], tmp_path: Path
) -> None:
    """Each reading makes objects of its own, and an object's name has its address."""
    image = pytest.importorskip("PIL.Image")

    def make(name: str, colour: int) -> str:
        (tmp_path / name / "train").mkdir(parents=True)
        image.new("RGB", (2, 2), colour).save(tmp_path / name / "train/0.png")
        write_rows(
            tmp_path / name / "train/metadata.jsonl", [{"file_name": "0.png", "text": "a film"}]
        )
        return f"hub:{tmp_path / name}"

    one, other = make("one", 1), make("other", 2)
    rows = read_rows(one, "text")  # kept, so that no other object takes its address
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)
    assert rows[0]["text"] == "a film"


@pytest.mark.parametrize("kind", ["parquet", "hub"])
def test_a_run_on_other_files_is_the_run_on_jsonl(
    kind: str,
    hub: Callable[..., str],
    ppo_config: PPOConfig,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same bits; it goes on with the same rows, and stops at others by name."""
    rows = {name: read_rows(str(text / f"{name}.jsonl"), "text") for name in ("train", "heldout")}
    if kind == "hub":
        source = hub(train=rows["train"], test=rows["heldout"])
        train, heldout = f"{source}:train", f"{source}:test"
    else:
        train, heldout = (write_parquet(tmp_path / f"{x}.parquet", y) for x, y in rows.items())
    config = replace(
        ppo_config,
        heldout=str(text / "heldout.jsonl"),
        evaluation_prompts=3,
        save_every_updates=1,
    )
    ppo.run(replace(config, run_dir=str(tmp_path / "jsonl")))
    config = replace(config, train=train, heldout=heldout)
    ppo.run(config)
    found = differences(tmp_path / "jsonl", Path(config.run_dir))
    assert {Path(name).name for name in found} == {"state.json"}  # which names its data
    Path(config.run_dir, "checkpoints/00000002/manifest.json").unlink()
    assert cli.main(["resume", config.run_dir]) == 0
    changed = rows["train"] + [{"text": "the film"}]
    hub(train=changed) if kind == "hub" else write_parquet(tmp_path / "train.parquet", changed)
    assert cli.main(["resume", config.run_dir]) == 2
    assert f"the data in {train} ({train}) has changed since" in capsys.readouterr().err


@pytest.mark.parametrize("stage", [sft, reward])
def test_the_other_stages_take_them_too(
    stage: Any, hub: Callable[..., str], text: Path, untrained: str, tmp_path: Path
) -> None:
    kind, made = ("", SFTConfig) if stage is sft else ("_pairs", RewardConfig)
    paths = [str(text / f"{name}{kind}.jsonl") for name in ("train", "heldout")]
    options: Any = {"model": untrained, "steps": 2, "max_tokens": 32}
    train, heldout = paths
    runs = {"jsonl": (train, heldout)}
    rows = [read_rows(path, "text", "chosen rejected") for path in paths]
    runs["parquet"] = (write_parquet(tmp_path / "train.parquet", rows[0]), heldout)
    runs["hub"] = (train, hub(test=rows[1]) + ":test")
    results = [
        stage.run(made(run_dir=str(tmp_path / name), train=train, heldout=heldout, **options))
        for name, (train, heldout) in runs.items()
    ]
    assert results[0] == results[1] == results[2]
    files = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in runs]
    assert files[0] == files[1] == files[2]


def test_own_text_of_the_demo_in_parquet(parquet: Any, tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "b"}]
    assert demo.own_texts(write_parquet(tmp_path / "mine.parquet", rows)) == rows


def test_own_text_of_the_demo_in_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(b"\xef\xbb\xbfa\n\nb\n")  # a byte order mark is no part of the text
    assert demo.own_texts(str(path)) == [{"text": "a"}, {"text": "b"}]
    path.write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(UserError, match=r"mine\.txt: not UTF-8"):
        demo.own_texts(str(path))


def test_what_a_library_raises_at_a_row_is_told_with_its_number(
    hub: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    class Undecodable(datasets.Dataset):
        def __iter__(self) -> Any:
            yield {"text": "a"}
            raise SyntaxError("broken PNG file")  # as Pillow does

    made = Undecodable.from_list([{"text": "a"}]).data
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Undecodable(made))
    with pytest.raises(UserError, match=r"hub:some/one, row 2: cannot be read .broken PNG file"):
        read_rows("hub:some/one", "text")


def test_hub_data_in_a_broken_file(hub: Callable[..., str]) -> None:
    source = hub(train=[{"text": "a"}])
    (Path(source.removeprefix("hub:")) / "train.jsonl").write_text('{"text": "a"}\n{"text"')
    with pytest.raises(UserError, match="cannot be loaded"):
        read_rows(source, "text")
