"""The text behind the transformer: its identity, its token file, and what is refused."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from fp8bench import pipeline
from fp8bench.errors import StoreError, UsageError, WorkerError
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Request
from fp8bench.model.raw import Settings
from fp8bench.plan import corpus
from fp8bench.plan.corpus import MIN_BYTES, Corpus, prepare_corpus, read_standard_library
from fp8bench.protocols import SilentObserver
from tests.counts import for_each

TEXT = b"".join(b"line %d of a text that is just long enough\n" % number for number in range(2000))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A user's text."""
    path = tmp_path / "given.txt"
    path.write_bytes(TEXT)
    return path


def tokens(made: Corpus) -> np.ndarray:
    return np.fromfile(made.path, dtype=np.uint16)


@pytest.mark.parametrize("odd", [0, 1])
def test_the_token_file_is_the_text_one_token_a_byte(tmp_path: Path, text: Path, odd: int) -> None:
    text.write_bytes(TEXT[: len(TEXT) - odd] + bytes([255]))
    made = prepare_corpus(str(text), tmp_path / "data")
    assert made.num_tokens == len(TEXT) - odd + 1
    assert tokens(made).tolist() == list(text.read_bytes())
    assert made.digest == hashlib.sha256(text.read_bytes()).hexdigest()


def test_the_default_is_pythons_own_library_and_always_the_same(tmp_path: Path) -> None:
    first = prepare_corpus(None, tmp_path / "a")
    second = prepare_corpus(None, tmp_path / "b")
    assert first.identity == second.identity
    assert first.name == f"python-{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    assert MIN_BYTES < first.num_tokens <= corpus.MAX_BYTES
    assert tokens(first)[:500].astype(np.uint8).tobytes() == read_standard_library()[:500]


def test_the_token_file_is_made_once(tmp_path: Path, text: Path) -> None:
    first = prepare_corpus(str(text), tmp_path / "data")
    before = Path(first.path).stat()
    second = prepare_corpus(str(text), tmp_path / "data")
    after = Path(second.path).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert {one.suffix for one in (tmp_path / "data").iterdir()} == {".tokens", ".sha256"}


def test_a_token_file_of_the_wrong_length_is_made_again(tmp_path: Path, text: Path) -> None:
    """A power failure while writing must not spoil later runs."""
    first = prepare_corpus(str(text), tmp_path / "data")
    Path(first.path).write_bytes(b"short")
    assert tokens(prepare_corpus(str(text), tmp_path / "data")).tolist() == list(TEXT)


def test_a_long_text_is_cut(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_BYTES", MIN_BYTES + 100)
    made = prepare_corpus(str(text), tmp_path / "data")
    assert made.num_tokens == MIN_BYTES + 100
    assert made.digest == hashlib.sha256(TEXT[: MIN_BYTES + 100]).hexdigest()


@for_each(
    ("content", "words"),
    [(b"", "has 0 bytes"), (b"tiny", "has 4 bytes"), (b"\0" * MIN_BYTES, "is not text"), (None, "cannot be read")],
    ids=["empty", "tiny", "binary", "missing"],
)
def test_what_cannot_be_trained_on_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "given"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=words) as caught:
        prepare_corpus(str(path), tmp_path / "data")
    assert str(caught.value).startswith(f"--data {path} ") and "Give a text" in str(caught.value)
    assert not (tmp_path / "data").exists()


@for_each(
    ("content", "words"),
    [
        (bytes(random.Random(1).choices(range(1, 256), k=100_000)), "of 100000 bytes are control characters"),
        (bytes(random.Random(2).choices(range(128, 256), k=100_000)), "of 100000 bytes are not valid UTF-8"),
        (zlib.compress(random.Random(3).randbytes(100_000)).replace(b"\0", b"\1"), "are control characters"),
    ],
    ids=["random bytes", "random high bytes", "compressed"],
)
def test_bytes_that_are_no_prose_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "given"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"--data .* is not text: .*{words}.*Give a text file"):
        prepare_corpus(str(path), tmp_path / "data")


def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path: Path, text: Path) -> None:
    """Below a file nothing can be written, not even by root."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="Choose --store DIR"):
        prepare_corpus(str(text), tmp_path / "file" / "data")


def test_a_store_that_begins_with_a_text_is_ignored_by_git_too(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(settings: Settings) -> LocalWorker:
        raise WorkerError("none is needed")

    monkeypatch.setattr(pipeline, "ProcessWorker", none)
    with pytest.raises(WorkerError):
        pipeline.execute(Request("data", data=str(text)), tmp_path / ".fp8bench", SilentObserver(), "a test")
    assert list(tmp_path.glob(".fp8bench/data/*.tokens"))
    assert (tmp_path / ".fp8bench" / ".gitignore").read_text() == "*\n"


def test_two_processes_may_make_it_at_once(tmp_path: Path, text: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom fp8bench.plan.corpus import prepare_corpus\n"
        "for turn in range(40):\n"
        "    path = Path(prepare_corpus(sys.argv[1], Path(sys.argv[2])).path)\n"
        "    try:\n"
        "        data = path.read_bytes()\n"
        "    except FileNotFoundError:  # the other process has just unlinked it, below\n"
        "        continue\n"
        "    assert Path(sys.argv[1]).read_bytes() in (data[::2], data[1::2])\n"
        "    path.unlink(missing_ok=True)\n"
    )
    command = [sys.executable, "-c", program, str(text), str(tmp_path / "data")]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert not list((tmp_path / "data").glob("*.partial"))
