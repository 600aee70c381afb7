"""Acknowledgements: the order of their lines means nothing, and a torn line acknowledges nothing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.errors import StoreError
from fp8bench.model import Ack, Direction
from fp8bench.store.acks import Acks, AckWithdrawal, append_acks, get_acks_path, load_acks, merge_acks
from tests.counts import for_each

ACK = Ack(
    "0a",
    "gemm.Gemm.track_time",
    ("bf16", "512", 3, 0.5, True),
    "box",
    "/bin/python3",
    "1.1",
    Direction.WORSE,
    "a" * 40,
    "b" * 40,
    1e-3,
    1.1e-3,
    "2026-01-05T12:00:00+00:00",
    "wanted",
)
UNDO = AckWithdrawal("0a", "2026-01-06T12:00:00+00:00")


def test_an_undo_counts_at_any_position(tmp_path: Path) -> None:
    assert load_acks(tmp_path) == Acks()
    other, again = replace(ACK, id="0b", because="größer ist hier besser"), replace(ACK, id="0c")
    append_acks(tmp_path, [ACK])
    append_acks(tmp_path, [other])
    assert load_acks(tmp_path) == Acks((ACK, other))
    append_acks(tmp_path, [UNDO, again])
    assert load_acks(tmp_path).acks == (other, again)


@for_each(
    ("line", "words"),
    [
        (b'{"version": 1, "ack": {"id": "0', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "was changed after it was written: expected an object"),
        (b'{"ack": {}}', "has version None"),
        (b'{"version": 2, "ack": {}}', "has version 2 (this fp8bench reads 1)"),
        (b'{"version": 1}', "is not a valid acknowledgement"),
        (b'{"version": 1, "ack": {"id": "0b"}}', "is not a valid acknowledgement"),
        (b'{"version": 1, "undo": {"id": 3, "when": ""}}', "is not a valid acknowledgement"),
        (b'{"version": 1, "ack": null}', "is not a valid acknowledgement"),
    ],
)
def test_a_torn_line_acknowledges_nothing(tmp_path: Path, line: bytes, words: str) -> None:
    append_acks(tmp_path, [ACK])
    with get_acks_path(tmp_path).open("ab") as file:
        file.write(line)
    after = replace(ACK, id="0b")
    append_acks(tmp_path, [after])
    acks = load_acks(tmp_path)
    assert acks.acks == (ACK, after)
    assert len(acks.troubles) == 1 and acks.troubles[0].startswith(f"line 2 {words}")


def test_a_file_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    get_acks_path(tmp_path).mkdir()
    assert load_acks(tmp_path).troubles[0].startswith("it cannot be read (")
    with pytest.raises(StoreError, match="cannot be written"):
        append_acks(tmp_path, [ACK])
    (tmp_path / "ours").mkdir()
    with pytest.raises(StoreError, match="cannot be read"):
        merge_acks(tmp_path / "ours", tmp_path)


def test_a_merge_adds_new_valid_lines(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    append_acks(ours, [ACK])
    append_acks(theirs, [ACK, replace(ACK, id="0b"), UNDO])
    with get_acks_path(theirs).open("ab") as file:
        file.write(b'{"version": 1, "ack"')
    before = get_acks_path(theirs).read_bytes()
    assert merge_acks(ours, theirs) == 2 and merge_acks(ours, theirs) == 0
    assert get_acks_path(theirs).read_bytes() == before
    assert load_acks(ours) == Acks((replace(ACK, id="0b"),))
    assert merge_acks(ours, tmp_path / "none") == 0


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: append_acks(tmp_path, [replace(ACK, id=f"{number:02x}")]), range(64)))
    assert len(load_acks(tmp_path).acks) == 64 and not load_acks(tmp_path).troubles
    assert all(json.loads(line) for line in get_acks_path(tmp_path).read_text().splitlines())
