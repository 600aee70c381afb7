"""A digit that changed in a run, in asv's file, in the index or in an archive: what is wrong is named, alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8bench.model import Fault
from fp8bench.store.asv.view import results_of
from fp8bench.store.compacted.compact import compact
from fp8bench.store.index.figure_files import figures_file
from fp8bench.store.index.history import open_history
from fp8bench.store.merge_stores import rebuild
from fp8bench.store.runs.listing import run_files
from fp8bench.store.verify import verify
from tests.histories import history
from tests.older import as_older
from tests.store.test_verify import NOW

pytest.importorskip("duckdb")
Spoil = Callable[[Path], Path]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three commits, a run each, with asv's view and the index."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    found = tmp_path / "store"
    history(found, 1.0, 1.1, 1.2)
    return found


def prepared(store: Path, old: bool) -> None:
    """asv's view and the index; with `old` the runs are as older versions wrote them."""
    for path in run_files(store) if old else ():
        as_older(path)
    rebuild(store)
    open_history(store, lambda count: None)


def with_digit_changed(path: Path) -> Path:
    """The first digit of the first time in it is another one; nothing else."""
    content = path.read_bytes()
    place = re.search(rb'"calls_ns": ?\[\[(\d)|"samples": ?\[(\d)|\[\[(\d)', content)
    assert place is not None
    at = next(place.start(group) for group in (1, 2, 3) if place.group(group))
    new = b"9" if content[at : at + 1] != b"9" else b"8"
    path.write_bytes(content[:at] + new + content[at + 1 :])
    return path


def wrong(store: Path) -> list[Fault]:
    return [fault for fault in verify(store, store, NOW).faults if fault.broken]


def newest(store: Path) -> Path:
    return next(run_files(store))


def test_a_run_is_blamed_by_its_checksum(store: Path) -> None:
    """Not asv's file, which is right; what was made of the run says so without being taken for broken."""
    prepared(store, old=False)
    path = with_digit_changed(newest(store))
    (fault,) = wrong(store)
    assert fault.path == str(path) and "its checksum is not that of what it says" in fault.what, fault


def test_a_history_without_a_damaged_line_says_so(store: Path) -> None:
    prepared(store, old=False)
    before = open_history(store, lambda count: None)
    with_digit_changed(newest(store))
    after = open_history(store, lambda count: None)
    assert not before.left and any("damaged" in why for why in after.left), after.left


def test_asvs_file_is_blamed_where_the_runs_have_checksums(store: Path) -> None:
    prepared(store, old=False)
    path = next((results_of(store) / "box").glob("0*.json"))
    path.write_text(re.sub(r"(\d\.\d{3})", lambda found: f"9{found[1][1:]}", path.read_text(), count=1))
    (fault,) = wrong(store)
    assert fault.path == str(path) and "rebuild" in fault.remedy, fault


def test_the_index_is_blamed_where_it_is_not_what_was_written(store: Path) -> None:
    prepared(store, old=False)
    path = next(path for path in figures_file(store, "").parent.glob("*.figures"))
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    (fault,) = wrong(store)
    assert fault.path == str(path) and "it is not what was written" in fault.what, fault


def test_an_older_run_is_blamed_by_the_index(store: Path) -> None:
    """Nothing is ever changed in a run file, and the index knows its digest."""
    prepared(store, old=True)
    path = with_digit_changed(newest(store))
    (fault,) = wrong(store)
    assert fault.path == str(path) and "it is not what the index was made of" in fault.what, fault


def test_an_older_run_is_blamed_by_its_archive_which_has_it_whole(store: Path) -> None:
    """Also where the index was made again from the wrong digit."""
    prepared(store, old=True)
    compact(store, lambda done, commits: None)
    path = newest(store)
    whole = path.read_bytes()
    with_digit_changed(path)
    open_history(store, lambda count: None)
    faults = wrong(store)
    assert [fault.path for fault in faults] == [str(path)], faults
    assert "it is not what was archived of it" in faults[0].what and "store restore" in faults[0].remedy
    assert path.read_bytes() != whole


def test_of_an_older_run_without_a_witness_nobody_can_tell(store: Path) -> None:
    """asv's file says otherwise, and is not called the wrong one."""
    prepared(store, old=True)
    with_digit_changed(newest(store))
    open_history(store, lambda count: None)  # from now on the index says what the run says
    (fault,) = wrong(store)
    assert "nobody can tell which of them is wrong" in fault.what, fault


def test_older_runs_are_said_to_have_no_checksums(store: Path) -> None:
    prepared(store, old=True)
    said = verify(store, store, NOW).faults
    assert [fault.what for fault in said] == ["3 of 3 run files have no checksums: an older fp8bench wrote them"]
    assert not said[0].broken
