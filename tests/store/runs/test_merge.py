"""Stores taken in: runs by their bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.errors import StoreError
from fp8bench.store.merge_stores import find_store, merge_runs
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_header, load_run, lock_run
from tests.histories import history, keep, run_at, tree

NOTE = b'{"note":"a line more"}\n'


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return tmp_path / "ours"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return tmp_path / "theirs"


@pytest.fixture
def copies(ours: Path, theirs: Path) -> tuple[Path, Path]:
    path = history(theirs, 1.0)[0]
    return path, merge_runs(ours, theirs).copied_files[0]


def test_runs_that_are_new_are_copied_to_the_byte(ours: Path, theirs: Path) -> None:
    history(theirs, 1.0, 1.1)
    keep(ours, run_at(7))
    before = tree(theirs)
    merged = merge_runs(ours, theirs)
    assert len(merged.copied_files) == 2 and not merged.failed and tree(theirs) == before
    assert before.items() <= tree(ours).items() and len(tree(ours)) == 3
    again = merge_runs(ours, theirs)
    assert (again.copied_files, again.extended_paths, again.same, again.failed) == ([], [], 2, [])


def test_a_run_that_went_on_there_is_continued(ours: Path, theirs: Path, copies: tuple[Path, Path]) -> None:
    path, copy = copies
    path.write_bytes(path.read_bytes() + NOTE)
    assert merge_runs(ours, theirs).extended_paths == [copy] and copy.read_bytes() == path.read_bytes()
    copy.write_bytes(copy.read_bytes() + NOTE)
    merged = merge_runs(ours, theirs)
    assert merged.same == 1 and copy.read_bytes() == path.read_bytes() + NOTE
    # Different continuations are not mixed, and a file has one writer at a time.
    path.write_bytes(path.read_bytes() + b'{"note":"there"}\n')
    before = tree(ours)
    merged = merge_runs(ours, theirs)
    assert len(merged.failed) == 1 and str(path) in merged.failed[0] and "resumed separately" in merged.failed[0]
    path.write_bytes(copy.read_bytes() + NOTE)
    with copy.open("ab") as file:
        lock_run(file, copy)
        assert "another process is writing" in merge_runs(ours, theirs).failed[0] and tree(ours) == before
    path.write_bytes(copy.read_bytes())
    copy.parent.rename(copy.parent.with_name("renamed"))
    assert merge_runs(ours, theirs).same == 1 and len(list(run_files(ours))) == 1 and path.exists()


def test_a_running_run_is_copied_up_to_its_last_whole_line(ours: Path, theirs: Path) -> None:
    path = history(theirs, 1.0)[0]
    whole = path.read_bytes()
    with path.open("ab") as file:
        lock_run(file, path)
        file.write(NOTE[:9])
        file.flush()
        merged = merge_runs(ours, theirs)
        assert merged.copied_files[0].read_bytes() == whole and "still being measured" in merged.notes[0]
        file.write(NOTE[9:])
    merged = merge_runs(ours, theirs)
    assert merged.extended_paths[0].read_bytes() == whole + NOTE and not merged.notes


def test_files_that_are_not_runs_are_not_copied(ours: Path, theirs: Path) -> None:
    folder = history(theirs, 1.0)[0].parent
    (folder / "20260101T000000Z-00000001-a.jsonl").write_text("words\n")
    (folder / "20260101T000000Z-00000001-b.jsonl").write_text('{"schema":99,"header":{}}\n')
    merged = merge_runs(ours, theirs)
    assert len(merged.copied_files) == 1 and len(merged.failed) == 2
    assert "is not a run file" in merged.failed[0] and "newer fp8bench" in merged.failed[1]


def test_a_full_disk_leaves_no_half_a_run(ours: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history(theirs, 1.0)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    merged = merge_runs(ours, theirs)
    assert "No space left on device" in merged.failed[0] and not merged.copied_files
    assert not tree(ours)


def test_stores_are_found_and_our_own_is_refused(tmp_path: Path) -> None:
    ours = tmp_path / "here" / ".fp8bench"
    history(ours, 1.0)
    history(tmp_path / "there" / ".fp8bench", 1.0)
    assert find_store(tmp_path / "there", ours) == tmp_path / "there" / ".fp8bench"
    assert find_store(tmp_path / "there" / ".fp8bench", ours) == tmp_path / "there" / ".fp8bench"
    (tmp_path / "link").symlink_to(ours)
    inside = ours / "data" / "store"
    history(inside, 1.0)
    for own in (ours, ours.parent, tmp_path / "link", inside):
        with pytest.raises(StoreError, match="is this store, or inside it"):
            find_store(own, ours)
    with pytest.raises(StoreError, match="has neither runs nor"):
        find_store(tmp_path, ours)
    with pytest.raises(StoreError, match="is no directory"):
        find_store(tmp_path / "nothing", ours)


def test_a_header_alone_reads_like_the_run(tmp_path: Path) -> None:
    path = history(tmp_path, 1.0)[0]
    head, run = load_header(path), load_run(path)
    assert head == replace(run, records=(), finished=False)
    path.write_bytes(b"broken\n" + path.read_bytes())
    assert load_header(path).environment == run.environment
