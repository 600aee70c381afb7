"""Starting points of a training: texts, held-out parts, and questions of tasks."""

from __future__ import annotations

import json
import random
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.train import beginnings
from fp8bench.features.train.arms import check_training
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.tasks import (
    QUESTION_COUNT,
    list_retrieval_lengths,
    make_documents,
    make_task_items,
    make_task_text,
)
from fp8bench.features.train.values import TokenSpan, TrainingTokens
from tests.counts import for_each

LINES = [f"line {number} of a text, and of its {number % 7} relatives" for number in range(3000)]
TEXT = "\n".join(LINES).encode()
CUT = len(TEXT) - len(TEXT) // 10


@pytest.fixture
def given(tmp_path: Path) -> str:
    path = tmp_path / "given.txt"
    path.write_bytes(TEXT)
    return str(path)


def prepared(data: Path | str, window: int = 8) -> TrainingTokens:
    return beginnings.prepare_text(str(data), Path(data).parent / "data", window)


def decoded(span: TokenSpan) -> bytes:
    return bytes(np.fromfile(span.path, dtype=np.uint16)[span.start : span.stop].tolist())


def tokens_file(path: Path, tokens: list[int]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(array("H", tokens).tobytes())
    return str(path)


def test_the_last_tenth_is_held_out_behind_a_gap_of_a_window(given: str) -> None:
    text = prepared(given, window=96)
    assert decoded(text.train) == TEXT[:CUT] and decoded(text.held_out) == TEXT[CUT + 96 :]
    assert (text.vocabulary, text.tokens) == (256, "bytes") and text.identity.startswith("given:")


def test_token_files_are_made_again_only_when_damaged(given: str) -> None:
    """Also if a damaged file has the right length."""
    first = prepared(given)
    path = Path(first.train.path)
    whole = path.read_bytes()
    for damaged in (b"\0" * len(whole), whole[:1000], b""):
        path.write_bytes(damaged)
        assert prepared(given) == first and path.read_bytes() == whole


def test_token_files_are_mapped_where_they_lie(tmp_path: Path) -> None:
    data = tokens_file(tmp_path / "shakespeare.bin", list(range(1000)))
    text = prepared(data)
    assert (text.train, text.held_out) == (TokenSpan(data, 0, 900), TokenSpan(data, 908, 1000))
    assert (text.vocabulary, text.tokens) == (1000, "given")
    assert text.identity.startswith("shakespeare:") and not (tmp_path / "data").exists()


def test_a_held_out_token_file_beside_it_is_taken(tmp_path: Path) -> None:
    """With nanoGPT's file names; both count for vocabulary and identity."""
    data = tokens_file(tmp_path / "own" / "train.bin", [1, 2, 3] * 100)
    beside = tokens_file(tmp_path / "own" / "val.bin", [4, 500] * 30)
    (tmp_path / "own" / "meta.pkl").write_bytes(b"never read")
    text = prepared(tmp_path / "own")
    assert text == prepared(data)
    assert (text.train, text.held_out) == (TokenSpan(data, 0, 300), TokenSpan(beside, 0, 60))
    assert text.vocabulary == 501 and text.identity.startswith("own:")
    tokens_file(tmp_path / "own" / "val.bin", [4, 501] * 30)
    assert prepared(data).identity != text.identity


FILES = {"odd.bin": b"\0" * 999, "short.bin": b"\0" * 64, "empty.bin": b"", "text.txt": TEXT[: 1 << 16]}


@for_each(
    ("name", "words"),
    [
        ("odd.bin", "not a file of 16-bit tokens"),
        ("short.bin", "or a shorter --sequence"),
        ("empty.bin", "has 0 tokens"),
        ("text.txt", "the held-out part has 4505 tokens, and needs 8193"),
        ("nosuch.bin", r"--data .*nosuch.bin cannot be read"),
        ("", "folder without train.bin, and not a saved dataset"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(tmp_path: Path, name: str, words: str) -> None:
    for file, content in FILES.items():
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UsageError, match=words):
        prepared(tmp_path / name, 2048)


def saved(folder: Path, rows: list[dict[str, Any]], files: int = 2) -> Path:
    """The files of save_to_disk, as far as they are read."""
    pa = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        share = -(-len(rows) // files)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(number * share, share), max_chunksize=100)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


WHOLE = TEXT + b"\n"


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    """All files in order, a line break after each document.

    If there is a held-out part, the whole train part is trained on.
    """
    single = saved(tmp_path / "set", [{"id": number, "text": line, "title": "x"} for number, line in enumerate(LINES)])
    text = prepared(single)
    assert decoded(text.train) == WHOLE[: len(WHOLE) - len(WHOLE) // 10] and text.identity.startswith("set:")
    saved(tmp_path / "parts" / "train", [{"sentence": line} for line in LINES])
    saved(tmp_path / "parts" / "test", [{"sentence": "quite another line"}] * 100, files=1)
    (tmp_path / "parts" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    text = prepared(tmp_path / "parts")
    assert decoded(text.train) == WHOLE and decoded(text.held_out) == b"quite another line\n" * 100


def test_saved_datasets_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = saved(tmp_path / "two", [{"question": "a", "answer": "b"}])
    torn = saved(tmp_path / "torn", [{"text": line} for line in LINES])
    file = next(torn.glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:5000])
    for folder, notes, words in (
        (two, "", "has columns question, answer"),
        (torn, "", r"\.arrow cannot be read .*Save the dataset again"),
        *(
            (torn, notes, r"state\.json names no files")
            for notes in ("{}", "[]", '{"_data_files": [1]}', '{"_data_files": 7}')
        ),
        (torn, "{", r"state\.json cannot be read"),
    ):
        if notes:
            (folder / "state.json").write_text(notes)
        with pytest.raises(UsageError, match=words):
            prepared(folder)


def test_without_pyarrow_a_saved_dataset_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match="pip install pyarrow"):
        prepared(tmp_path)


PROSE = b" ".join(random.Random(1).choices([b"alpha", b"gamma", b"delta", b"theta", b"sigma", b"omega"], k=20_000))


@for_each("sequence", [16, 24, 65])
def test_answers_are_in_the_text_before_the_question(sequence: int) -> None:
    ((_, copies),) = make_task_items("copy", sequence, b"")
    retrievals = dict(make_task_items("retrieval", sequence, b""))
    assert [int(name.partition("@")[2]) for name in retrievals] == list(list_retrieval_lengths(sequence))
    for item in copies:
        before, _, after = item.texts[0].partition(b"=")
        assert before == after and len(item.texts[0]) <= sequence
        assert bytes(item.choices[right] for right in item.right) == bytes(item.texts[0][at] for at in item.positions)
    for name, items in retrievals.items():
        assert len(items) == QUESTION_COUNT and len({item.right for item in items}) == 10
        for item in items:
            text = item.texts[0][:-1]
            answer = item.choices[item.right[0]]
            assert len(item.texts[0]) == int(name.partition("@")[2]) and text.endswith(b"?")
            assert [byte for byte in text if byte in b"0123456789"] == [answer]


def test_a_cloze_offers_words_of_the_same_length() -> None:
    ((_, items),) = make_task_items("cloze", 48, PROSE)
    assert {item.right for item in items} == {(0,), (1,), (2,), (3,)}
    for item in items:
        assert len(set(item.texts)) == 4 and {len(text) for text in item.texts} == {48}
        assert item.texts[item.right[0]] in PROSE and not all(text in PROSE for text in item.texts)
    with pytest.raises(UsageError, match="held-out text has 0"):
        list(make_task_items("cloze", 48, b"a b c"))


def test_documents_fill_a_window_and_held_out_ones_differ() -> None:
    name, train, held_out = make_task_text("task:copy,retrieval", 32)
    assert name == "copy+retrieval" and len(train) % 32 == len(held_out) % 32 == 0
    own, others = ({text[at : at + 32] for at in range(0, len(text), 64)} for text in (train, held_out))
    assert not own & others and train == make_task_text("task:copy,retrieval", 32)[1]
    document = make_documents(("retrieval",), 32, "x", 1)
    (digit,) = {byte for byte in document if byte in b"0123456789"}
    asked = [at for at, byte in enumerate(document) if byte == ord("?")]
    assert asked and all(document[at + 1] == digit for at in asked)


@for_each(
    ("settings", "words"),
    [
        ({"tasks": ("copies",)}, "copy"),
        ({"tasks": ("copy",), "sequence": 8}, "at least 16"),
        ({"metric": ("f",)}, "is not a function"),
        ({"make": "pkg:make", "tasks": ("copy",)}, "Leave it out"),
    ],
)
def test_impossible_tasks_are_refused_before_anything_starts(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_training(TrainingRequest(settings=TrainerSettings(**settings)))  # type: ignore[arg-type]
    with pytest.raises(UnknownName):
        make_task_text("task:cloze", 32)
