"""The texts of a training: what they are made of, what is held out, and what is refused."""

from __future__ import annotations

import json
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8bench.errors import UsageError
from fp8bench.features.train import beginnings as texts
from fp8bench.features.train.beginnings import prepare_text
from fp8bench.features.train.values import TokenSpan, TrainingText
from fp8bench.plan.bpe import token_bytes
from tests.counts import for_each

LINES = [f"line {number} of a text, and of its {number % 7} relatives" for number in range(3000)]
TEXT = "\n".join(LINES).encode()


@pytest.fixture
def given(tmp_path: Path) -> str:
    """A text of the user's."""
    path = tmp_path / "given.txt"
    path.write_bytes(TEXT)
    return str(path)


def read(span: TokenSpan) -> list[int]:
    return np.fromfile(span.path, dtype=np.uint16)[span.start : span.stop].tolist()


def decoded(text: TrainingText, span: TokenSpan) -> bytes:
    known = token_bytes(text.merges)
    return b"".join(known[token] for token in read(span))


def test_the_last_tenth_is_held_out_behind_a_gap_of_a_window(tmp_path: Path, given: str) -> None:
    """A window that is trained on ends before the first that is validated on, whatever their places."""
    text = prepare_text(given, None, "bytes", tmp_path / "data", 96)
    cut = len(TEXT) - len(TEXT) // 10
    assert decoded(text, text.train) == TEXT[:cut]
    assert decoded(text, text.held_out) == TEXT[cut + 96 :]
    assert (text.vocabulary, text.tokens, text.merges) == (256, "bytes", ())
    assert text.identity.startswith("given:")


def test_byte_pairs_are_learnt_from_what_is_trained_on_alone(tmp_path: Path) -> None:
    """A word that only the held-out part has is no token; both parts come back, but for the gap in tokens."""
    cut = len(TEXT) - len(TEXT) // 12
    late = TEXT[:cut] + b" hippopotamus" * ((len(TEXT) - cut) // 13)
    path = tmp_path / "late.txt"
    path.write_bytes(late)
    text = prepare_text(str(path), None, "bpe:200", tmp_path / "data", 64)
    trained = decoded(text, text.train)
    assert late.startswith(trained) and len(trained) == len(late) - len(late) // 10
    assert late.endswith(decoded(text, text.held_out))
    assert not any(b"hippo" in token for token in token_bytes(text.merges))
    assert any(token == b" text" for token in token_bytes(text.merges))
    assert text.held_out.start - text.train.stop == 64
    assert text.vocabulary == 456 and text.tokens == "bpe"


def test_what_was_made_is_not_made_again(tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges and tokens are found; where the notes are damaged they are made anew, the same."""
    folder = tmp_path / "data"
    first = prepare_text(given, None, "bpe:100", folder, 64)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with monkeypatch.context() as nobody_learns:
        nobody_learns.setattr(texts, "learnt_merges", None)
        assert prepare_text(given, None, "bpe:100", folder, 64) == first
    for path in folder.glob("*.json"):
        path.write_text("[[")
    assert prepare_text(given, None, "bpe:100", folder, 64) == first
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("tokens", ["bytes", "bpe:20"])
def test_tokens_that_were_damaged_are_made_again(tmp_path: Path, given: str, tokens: str) -> None:
    """Where they are as long as they should be, too: nobody would learn from zeros and be told of a text."""
    first = prepare_text(given, None, tokens, tmp_path / "data", 64)
    path = Path(first.train.path)
    whole = path.read_bytes()
    for damaged in (b"\0" * len(whole), whole[:1000], b""):
        path.write_bytes(damaged)
        assert prepare_text(given, None, tokens, tmp_path / "data", 64) == first
        assert path.read_bytes() == whole


def test_other_text_is_pythons_documentation_or_the_users(tmp_path: Path, given: str) -> None:
    """In the same tokens as the text that is trained on."""
    text = prepare_text(given, None, "bpe:100", tmp_path / "data", 64)
    assert text.other is not None
    assert b'The "assert" statement' in decoded(text, text.other)
    path = tmp_path / "other.txt"
    path.write_bytes(b"\xe7\xb2\xbe\xe5\xba\xa6\xe8\xb6\x8a\xe4\xbd\x8e" * 10000)
    other = prepare_text(given, str(path), "bpe:100", tmp_path / "data", 64)
    assert other.other is not None and decoded(other, other.other) == path.read_bytes()
    assert other.merges == text.merges


def test_a_python_without_documentation_has_no_other_text(
    tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_documentation", lambda: b"")
    assert prepare_text(given, None, "bytes", tmp_path / "data", 64).other is None


def tokens_file(path: Path, tokens: list[int]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(array("H", tokens).tobytes())
    return str(path)


def test_token_files_are_mapped_where_they_lie(tmp_path: Path) -> None:
    """Nothing is copied; the highest token ends the vocabulary. Nobody knows what they stand for."""
    data = tokens_file(tmp_path / "own" / "shakespeare.bin", list(range(1000)))
    text = prepare_text(data, None, "bytes", tmp_path / "data", 8)
    assert text.train == TokenSpan(data, 0, 900) and text.held_out == TokenSpan(data, 908, 1000)
    assert (text.vocabulary, text.tokens, text.other) == (1000, "given", None)
    assert text.identity.startswith("shakespeare:")
    assert not (tmp_path / "data").exists()


def test_a_held_out_token_file_beside_it_is_taken(tmp_path: Path) -> None:
    """As nanoGPT names them, from the folder or the file; both count for vocabulary and identity."""
    data = tokens_file(tmp_path / "own" / "train.bin", [1, 2, 3] * 100)
    beside = tokens_file(tmp_path / "own" / "val.bin", [4, 500] * 30)
    (tmp_path / "own" / "meta.pkl").write_bytes(b"never read")
    text = prepare_text(str(tmp_path / "own"), None, "bytes", tmp_path / "data", 8)
    assert text == prepare_text(data, None, "bytes", tmp_path / "data", 8)
    assert text.train == TokenSpan(data, 0, 300) and text.held_out == TokenSpan(beside, 0, 60)
    assert text.vocabulary == 501 and text.identity.startswith("own:")
    tokens_file(tmp_path / "own" / "val.bin", [4, 501] * 30)
    assert prepare_text(data, None, "bytes", tmp_path / "data", 8).identity != text.identity
    other = tokens_file(tmp_path / "other.bin", [7, 900] * 50)
    both = prepare_text(data, other, "bytes", tmp_path / "data", 8)
    assert both.other == TokenSpan(other, 0, 100) and both.vocabulary == 901


@for_each(
    ("name", "content", "tokens", "words"),
    [
        ("odd.bin", b"\0" * 999, "bytes", "no file of 16-bit tokens"),
        ("short.bin", b"\0" * 64, "bytes", "needs? .*longer text, or a shorter --sequence"),
        ("empty.bin", b"", "bytes", "has 0 tokens"),
        ("own.bin", b"\0" * 4000, "bpe", "has tokens already"),
        ("text.txt", TEXT[: 1 << 16], "bytes", "the held-out part has 4505 tokens, and 4 windows of 2048 need 8193"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(
    tmp_path: Path, name: str, content: bytes, tokens: str, words: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        prepare_text(str(path), None, tokens, tmp_path / "data", 2048)


def test_files_and_folders_that_are_nothing_are_refused(tmp_path: Path, given: str) -> None:
    """One that is not there, an empty folder, text of another kind that is no token file."""
    with pytest.raises(UsageError, match=r"--data .*nosuch.bin cannot be read"):
        prepare_text(str(tmp_path / "nosuch.bin"), None, "bytes", tmp_path / "data", 8)
    with pytest.raises(UsageError, match=r"folder without train.bin, and no saved dataset"):
        prepare_text(str(tmp_path), None, "bytes", tmp_path / "data", 8)
    data = tokens_file(tmp_path / "own.bin", list(range(1000)))
    with pytest.raises(UsageError, match=r"--other-data .*given.txt is no file of 16-bit tokens"):
        prepare_text(data, given, "bytes", tmp_path / "data", 8)
    with pytest.raises(UsageError, match=r"--other-data .*nosuch cannot be read"):
        prepare_text(given, str(tmp_path / "nosuch"), "bytes", tmp_path / "data", 8)


def saved(folder: Path, rows: list[dict[str, Any]], files: int = 2) -> None:
    """What save_to_disk writes, as far as it is read."""
    pa = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        share = -(-len(rows) // files)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(number * share, share), max_chunksize=100)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    """All files of it, in order, a line break after each document, whatever other columns there are."""
    saved(tmp_path / "set", [{"id": number, "text": line, "title": "x"} for number, line in enumerate(LINES)])
    text = prepare_text(str(tmp_path / "set"), None, "bytes", tmp_path / "data", 8)
    whole = TEXT + b"\n"
    assert decoded(text, text.train) == whole[: len(whole) - len(whole) // 10]
    assert text.identity.startswith("set:")


def test_a_saved_dataset_of_parts_has_its_own_held_out_one(tmp_path: Path) -> None:
    """Then nothing of the train part is held out, and there is no gap."""
    saved(tmp_path / "set" / "train", [{"sentence": line} for line in LINES])
    saved(tmp_path / "set" / "test", [{"sentence": "quite another line"}] * 100, files=1)
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    text = prepare_text(str(tmp_path / "set"), None, "bytes", tmp_path / "data", 8)
    assert decoded(text, text.train) == TEXT + b"\n"
    assert decoded(text, text.held_out) == b"quite another line\n" * 100


@pytest.mark.slow
def test_datasets_own_folders_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package itself writes: in several files, and in parts."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")

    def dataset(lines: list[str], name: str) -> Any:
        # A fingerprint of its own: some versions cannot pickle what they would make one of.
        table = datasets.table.InMemoryTable.from_pydict({"text": lines, "id": list(range(len(lines)))})
        return datasets.Dataset(table, fingerprint=name)

    dataset(LINES, "one").save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict(train=dataset(LINES, "two"), test=dataset(LINES[:99], "three")).save_to_disk(tmp_path / "two")
    one, two = (prepare_text(str(tmp_path / name), None, "bytes", tmp_path / "data", 8) for name in ("one", "two"))
    whole = TEXT + b"\n"
    assert decoded(one, one.train) == whole[: len(whole) - len(whole) // 10]
    assert decoded(two, two.train) == whole
    assert decoded(two, two.held_out) == "".join(f"{line}\n" for line in LINES[:99]).encode()


def test_saved_datasets_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """Two columns of text, a file that is cut off, notes that are no JSON."""
    saved(tmp_path / "two", [{"question": "a", "answer": "b"}])
    with pytest.raises(UsageError, match="has columns question, answer"):
        prepare_text(str(tmp_path / "two"), None, "bytes", tmp_path / "data", 8)
    saved(tmp_path / "torn", [{"text": line} for line in LINES])
    file = next((tmp_path / "torn").glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UsageError, match=r"\.arrow cannot be read .*Save the dataset again"):
        prepare_text(str(tmp_path / "torn"), None, "bytes", tmp_path / "data", 8)
    for notes in ("{}", "[]", '{"_data_files": [1]}', '{"_data_files": 7}'):
        (tmp_path / "torn" / "state.json").write_text(notes)
        with pytest.raises(UsageError, match=r"state\.json names no files"):
            prepare_text(str(tmp_path / "torn"), None, "bytes", tmp_path / "data", 8)
    (tmp_path / "torn" / "state.json").write_text("{")
    with pytest.raises(UsageError, match=r"state\.json cannot be read"):
        prepare_text(str(tmp_path / "torn"), None, "bytes", tmp_path / "data", 8)


def test_without_pyarrow_a_saved_dataset_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match="pip install pyarrow"):
        prepare_text(str(tmp_path), None, "bytes", tmp_path / "data", 8)
