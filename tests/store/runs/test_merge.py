"""Stores taken in: runs by their bytes, and asv's files row by row."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench.errors import StoreError
from fp8bench.store.asv.files import ResultsFile, load_results, save_benchmarks, save_machine, save_results
from fp8bench.store.asv.rows import AsvRow
from fp8bench.store.asv.view import Taken, merge_files, merge_folders, merge_rows
from fp8bench.store.merge_stores import find_store, merge_runs
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_head, load_run, lock_run
from tests.counts import for_each
from tests.histories import MACHINE, PYTHON, commit, history, keep, run_at, tree

HASH = commit(1)
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
    return path, merge_runs(ours, theirs).copied[0]


def test_runs_that_are_new_are_copied_to_the_byte(ours: Path, theirs: Path) -> None:
    history(theirs, 1.0, 1.1)
    keep(ours, run_at(7))
    before = tree(theirs)
    merged = merge_runs(ours, theirs)
    assert len(merged.copied) == 2 and not merged.failed and tree(theirs) == before
    assert before.items() <= tree(ours).items() and len(tree(ours)) == 3
    again = merge_runs(ours, theirs)
    assert (again.copied, again.extended, again.same, again.failed) == ([], [], 2, [])


def test_a_run_that_went_on_there_is_continued(ours: Path, theirs: Path, copies: tuple[Path, Path]) -> None:
    path, copy = copies
    path.write_bytes(path.read_bytes() + NOTE)
    assert merge_runs(ours, theirs).extended == [copy] and copy.read_bytes() == path.read_bytes()
    copy.write_bytes(copy.read_bytes() + NOTE)
    merged = merge_runs(ours, theirs)
    assert merged.same == 1 and copy.read_bytes() == path.read_bytes() + NOTE
    # What went on in both is not mixed, and two writers of one file are never there at once.
    path.write_bytes(path.read_bytes() + b'{"note":"there"}\n')
    before = tree(ours)
    merged = merge_runs(ours, theirs)
    assert len(merged.failed) == 1 and str(path) in merged.failed[0] and "resumed alone" in merged.failed[0]
    path.write_bytes(copy.read_bytes() + NOTE)
    with copy.open("ab") as file:
        lock_run(file, copy)
        assert "another process is writing" in merge_runs(ours, theirs).failed[0] and tree(ours) == before
    path.write_bytes(copy.read_bytes())
    copy.parent.rename(copy.parent.with_name("renamed"))
    assert merge_runs(ours, theirs).same == 1 and len(list(run_files(ours))) == 1 and path.exists()


def test_a_run_that_is_still_measured_is_taken_as_far_as_it_is_whole(ours: Path, theirs: Path) -> None:
    path = history(theirs, 1.0)[0]
    whole = path.read_bytes()
    with path.open("ab") as file:
        lock_run(file, path)
        file.write(NOTE[:9])
        file.flush()
        merged = merge_runs(ours, theirs)
        assert merged.copied[0].read_bytes() == whole and "still being measured there" in merged.notes[0]
        file.write(NOTE[9:])
    merged = merge_runs(ours, theirs)
    assert merged.extended[0].read_bytes() == whole + NOTE and not merged.notes


def test_what_is_no_run_is_not_taken(ours: Path, theirs: Path) -> None:
    folder = history(theirs, 1.0)[0].parent
    (folder / "20260101T000000Z-00000001-a.jsonl").write_text("words\n")
    (folder / "20260101T000000Z-00000001-b.jsonl").write_text('{"schema":99,"header":{}}\n')
    merged = merge_runs(ours, theirs)
    assert len(merged.copied) == 1 and len(merged.failed) == 2
    assert "is no run file" in merged.failed[0] and "newer fp8bench" in merged.failed[1]


def test_a_full_disk_leaves_no_half_a_run(ours: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history(theirs, 1.0)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    merged = merge_runs(ours, theirs)
    assert "No space left on device" in merged.failed[0] and not merged.copied
    assert not tree(ours)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_beginnings_always_merge(tmp_path_factory: pytest.TempPathFactory, here: int, there: int) -> None:
    """Wherever two copies of one run were cut off behind the header, the longer one stands in the end."""
    place = tmp_path_factory.mktemp("stores")
    path = history(place / "theirs", 1.0)[0]
    copy = merge_runs(place / "ours", place / "theirs").copied[0]
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    lengths = [first + one % (len(content) - first + 1) for one in (here, there)]
    copy.write_bytes(content[: lengths[0]])
    path.write_bytes(content[: lengths[1]])
    assert not merge_runs(place / "ours", place / "theirs").failed
    assert copy.read_bytes() == content[: max(lengths)]


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
        with pytest.raises(StoreError, match="is this store, or lies in it"):
            find_store(own, ours)
    with pytest.raises(StoreError, match="has neither runs nor"):
        find_store(tmp_path, ours)
    with pytest.raises(StoreError, match="is no directory"):
        find_store(tmp_path / "nothing", ours)


def row(values: tuple[float | None, ...], params: tuple[tuple[str, ...], ...] = (("'a'", "'b'"),)) -> AsvRow:
    nothing = (None,) * len(values)
    return AsvRow(params, "1", values, nothing, nothing, 5)


def test_rows_take_what_they_lack() -> None:
    ours = row((1.0, math.nan, None), (("'a'", "'b'", "'c'"),))
    theirs = row((9.0, 2.0, 3.0, 4.0), (("'a'", "'b'", "'c'", "'d'"),))
    merged = merge_rows(ours, theirs)
    assert merged.params == (("'a'", "'b'", "'c'", "'d'"),) and merged.values == (1.0, 2.0, None, 4.0)
    assert merged.started_at == 5
    merged = merge_rows(row((1.0,), (("'a'",), ("1",))), row((2.0,), (("'b'",), ("2",))))
    assert merged.params == (("'a'", "'b'"), ("1", "2"))
    assert merged.values[0] == 1.0 and merged.values[3] == 2.0 and all(map(math.isnan, merged.values[1:3]))  # type: ignore[arg-type]


@for_each(
    ("ours", "theirs"),
    [
        (row((1.0, math.nan)), row((3.0, math.nan))),  # so that no file is written for it, NaN or not
        (row((1.0, math.nan)), replace(row((9.0, 9.0)), version="2")),
        (row((1.0, math.nan)), row((9.0, 9.0), (("'a'", "'b'"), ("1",)))),
        (
            row((1.0,) * 300, (tuple(map(str, range(300))), ("x",))),
            row((1.0,) * 400, (("y",), tuple(map(str, range(400))))),
        ),
    ],
    ids=["nothing new", "version", "parameters", "too many"],
)
def test_rows_that_do_not_fit_are_left_out(ours: AsvRow, theirs: AsvRow) -> None:
    assert merge_rows(ours, theirs) == ours


def results(folder: Path, rows: dict[str, AsvRow], python: str = PYTHON, number: int = 1, **params: object) -> Path:
    name = f"existing-py{python}".replace("/", "_")
    path = folder / "box" / f"{commit(number)[:8]}-{name}.json"
    save_machine(folder / "box" / "machine.json", {**MACHINE, **params})
    file = ResultsFile(commit(number), name, 7, {**MACHINE, "python": python, **params}, python, {}, {}, rows)  # type: ignore[arg-type]
    save_results(path, file)
    return path


def test_folders_of_results(ours: Path, theirs: Path) -> None:
    path = results(ours, {"x": row((1.0, math.nan))})
    results(theirs, {"x": row((9.0, 2.0)), "y": row((3.0, 4.0))})
    other = results(theirs, {"z": row((5.0, 6.0))}, number=2)
    save_benchmarks(ours / "benchmarks.json", {"x": {"name": "x", "params": [], "unit": "ours"}})
    save_benchmarks(theirs / "benchmarks.json", {one: {"name": one, "params": [], "unit": "theirs"} for one in "xyz"})
    before = tree(theirs)
    taken = merge_folders(ours, theirs, Taken())
    assert not taken.failed and not taken.notes and tree(theirs) == before
    assert load_results(path).rows["x"].values == (1.0, 2.0) and load_results(path).rows["y"].values == (3.0, 4.0)
    assert load_results(ours / "box" / other.name).rows["z"].values == (5.0, 6.0)
    known = json.loads((ours / "benchmarks.json").read_text())
    assert {name: known[name]["unit"] for name in "xyz"} == {"x": "ours", "y": "theirs", "z": "theirs"}
    after = tree(ours)
    assert not merge_folders(ours, theirs, Taken()).files and tree(ours) == after


def test_one_machine_is_one_line_after_merging(ours: Path, theirs: Path) -> None:
    """asv tells series apart by what is said of the machine: ours holds. Other hardware is worth a word."""
    results(ours, {"x": row((1.0, 2.0))})
    path = results(theirs, {"x": row((1.0, 2.0))}, number=2, os="Linux 7", cpu="another", gpu="H200")
    taken = merge_folders(ours, theirs, Taken())
    assert load_results(ours / "box" / path.name).params["os"] == MACHINE["os"]
    assert load_results(ours / "box" / path.name).params["gpu"] == "H200"
    assert len(taken.notes) == 1 and "the cpu 'another' there and 'AMD EPYC' here" in taken.notes[0]


def test_broken_files_there_are_named_and_left(ours: Path, theirs: Path) -> None:
    broken = results(theirs, {"x": row((1.0, 2.0))})
    broken.write_text("{")
    os.utime(broken, (1, 1))  # nobody is writing it
    half = results(theirs, {"x": row((1.0, 2.0))}, number=2)
    content = json.loads(half.read_text())
    content["results"]["y"] = "?"
    half.write_text(json.dumps(content))
    misplaced = theirs / "elsewhere" / half.name
    misplaced.parent.mkdir()
    misplaced.write_text(half.read_text())
    mine = results(ours, {"x": row((1.0, 2.0))}, number=2)
    mine.write_text("[]")
    taken = merge_folders(ours, theirs, Taken())
    assert (
        len(taken.failed) == 2 and str(broken) in "".join(taken.failed) and "another machine" in "".join(taken.failed)
    )
    assert any("the row 'y' was left out" in note for note in taken.notes)
    assert load_results(mine).rows["x"].values == (1.0, 2.0) and mine.with_name(f"{mine.name}.broken-1").exists()


def test_files_keep_what_only_one_knows() -> None:
    ours = ResultsFile(HASH, "e", 1, MACHINE, "p", {}, {}, {}, {"a": 1.0}, others={"k": 1}, broken={"y": "?"})
    theirs = ResultsFile(
        HASH, "e", 1, MACHINE, "p", {}, {}, {"y": row((1.0, 2.0))}, {"a": 9.0, "b": 2.0}, others={"l": 2}
    )
    merged = merge_files(ours, theirs)
    assert merged.durations == {"a": 1.0, "b": 2.0} and merged.others == {"k": 1, "l": 2}
    assert merged.rows["y"].values == (1.0, 2.0) and merged.broken == {"y": "?"}


def test_a_run_reads_the_same_by_its_head(tmp_path: Path) -> None:
    path = history(tmp_path, 1.0)[0]
    head, run = load_head(path), load_run(path)
    assert head == replace(run, records=(), finished=False)
    path.write_bytes(b"broken\n" + path.read_bytes())
    assert load_head(path).environment == run.environment
