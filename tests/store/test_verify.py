"""Every fault that a store can have, planted one at a time into a sound one, is named, and nothing else is."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from fp8bench.features.fleet.collect import collect
from fp8bench.model import Environment, Fault, Request, Resumption
from fp8bench.store.asv.files import load_results
from fp8bench.store.asv.view import results_of
from fp8bench.store.compacted.compact import compact
from fp8bench.store.index.history import open_history
from fp8bench.store.index.points_file import points_file
from fp8bench.store.merge_stores import rebuild
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import lock_run
from fp8bench.store.verify import verify
from tests.counts import for_each
from tests.histories import FIRST, commit, history, keep, records, run_at, start, tree
from tests.older import as_older

NOW = FIRST + timedelta(days=30)
Spoil = Callable[[Path], Path]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "store"
    history(folder, 1.0, 1.1)
    rebuild(folder)
    return folder


def faults_of(store: Path, now: datetime = NOW) -> list[Fault]:
    before = tree(store)
    faults = verify(store, store, now).faults
    assert tree(store) == before
    return list(faults)


def only(store: Path, path: Path, broken: bool, *words: str) -> Fault:
    """Returns the only fault, which is at this path, of this kind, and has these words."""
    faults = faults_of(store)
    assert [(fault.path, fault.broken) for fault in faults] == [(str(path), broken)], faults
    text = f"{faults[0].what}. {faults[0].remedy}."
    assert all(word in text for word in words), text
    return faults[0]


def tear(path: Path, text: str) -> None:
    """Breaks a file and dates it back: a file that was changed lately may be in the middle of being written."""
    path.write_text(text)
    os.utime(path, (1, 1))


def a_run(store: Path) -> Path:
    return min((store / "runs" / "box").glob("*.jsonl"))


def a_file(store: Path) -> Path:
    return min((results_of(store) / "box").glob("0*.json"))


def test_a_sound_store_and_one_without_a_view(store: Path, tmp_path: Path) -> None:
    found = verify(store, store, NOW)
    assert not found.faults and found.sound == {"run files": (2, 2), "asv's files": (4, 4)}
    dirty = tmp_path / "dirty"
    keep(dirty, run_at(1, facts={"dirty": True}))
    assert not faults_of(dirty)
    shutil.rmtree(results_of(store))
    assert {fault.remedy for fault in faults_of(store)} == {"`fp8bench history rebuild` puts it there"}
    assert len(faults_of(store)) == 2
    made = rebuild(store, [commit(1)[:8]])  # the commits that are wanted, and no others
    assert [load_results(path).commit_hash for path in made.files] == [commit(1)] and made.runs == 1


def test_a_view_that_was_deleted_is_one_sentence(store: Path) -> None:
    for number in range(2, 6):
        keep(store, run_at(number))
    words = "4 files of it lack what the runs of their commits say: box/00000002-existing-py_venv_bin_python3.json, "
    fault = only(store, results_of(store), False, words, " and 1 more. `fp8bench history rebuild`")
    spoiled(lambda content: content["results"]["gemm.Gemm.track_time"][0].__setitem__(0, 5.0))(store)
    assert [fault.broken for fault in faults_of(store)] == [True, False] and fault in faults_of(store)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_broken_lines_of_a_run_that_is_not_whole_and_of_one_that_is(store: Path) -> None:
    path = a_run(store)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], '{"rec', lines[-1]]) + "\n")
    only(store, path, False, "line 4 is broken", "Nothing is missing")
    path = a_run(store)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1], lines[2][:99], "{", "[]", '{"what":1}']) + "\n")
    faults = [fault for fault in faults_of(store) if fault.path == str(path)]
    assert len(faults) == 1 and faults[0].broken
    assert "line 3 is broken" in faults[0].what and "line 4" in faults[0].what and "and 1 more" in faults[0].what
    assert "--resume 00000064" in faults[0].remedy


def test_a_run_that_is_being_written_is_not_broken(store: Path) -> None:
    run = run_at(5, finished=False)
    path = keep(store, run)
    rebuild(store)
    append(path, '{"rec')
    with path.open("a") as file:
        lock_run(file, path)
        assert not faults_of(store)
    assert [fault.broken for fault in faults_of(store)] == [True]


STRAY = "box/20260101T000000Z-00000009-ffffffff.jsonl"


@for_each(
    ("content", "words"),
    [
        (lambda whole: "", "it is empty"),
        (lambda whole: "words\n", "it is no run file"),
        (lambda whole: '{"schema":99,"header":{}}\n', "was written by a newer fp8bench"),
        (lambda whole: whole.partition("\n")[2], "the header is gone"),
    ],
)
def test_files_that_are_no_runs(store: Path, content: Callable[[str], str], words: str) -> None:
    path = a_run(store)
    whole = path.read_text()
    path.write_text(content(whole))
    faults = [fault for fault in faults_of(store) if fault.path == str(path)]
    path.write_text(whole)
    assert len(faults) == 1 and faults[0].broken and words in faults[0].what, faults


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("box/x.partial", "left"),
        (".probe-1a2b", "looking whether the store can be written"),
        ("notes.txt", "nothing reads it"),
        ("stray.jsonl", "nothing reads it"),
        ("box/deep/er.jsonl", "nothing reads it"),
        (STRAY, "nothing reads it"),
    ],
)
def test_what_lies_among_the_runs(store: Path, name: str, words: str) -> None:
    path = store / "runs" / name
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if name == STRAY else path.write_text("{}")
    only(store, path, False, words)


def test_a_run_that_is_there_twice_or_under_a_wrong_name(store: Path) -> None:
    path = a_run(store)
    copy = store / "runs" / "copied" / path.name
    copy.parent.mkdir()
    shutil.copy(path, copy)
    faults = faults_of(store)
    assert len(faults) == 1 and faults[0].broken and "is the same run as" in faults[0].what
    copy.unlink()
    moved = path.rename(path.with_name(path.name.replace("00000000", "0000000f")))
    only(store, moved, True, f"Rename it to {path.name}")


def test_clocks_that_were_wrong(store: Path) -> None:
    early = keep(store, run_at(5, hours=4.5))
    late = keep(store, run_at(6, hours=24 * 40))
    back = Resumption(start(7.0), "", Environment({}))
    keep(store, run_at(8, hours=8 - 50 / 3600))  # by less than a minute nobody can say who is wrong
    no_zone = run_at(9)
    keep(store, replace(no_zone, started=no_zone.started.partition("+")[0]))
    never = keep(store, run_at(10, started="yesterday"))
    resumed = keep(store, run_at(7, hours=7.5))
    line = {"resumed": {"started": back.started, "command": "", "environment": {"facts": {}}}}
    append(as_older(resumed), json.dumps(line))
    rebuild(store)
    faults = {fault.path: fault for fault in faults_of(store)}
    old = str(store / "runs")  # of the one that was changed here, which has no checksums
    assert faults.pop(str(never)).broken
    assert set(faults) == {str(early), str(late), str(resumed), old} and not any(
        fault.broken for fault in faults.values()
    )
    assert "before its commit was written (2026-01-05 17:00 UTC)" in faults[str(early)].what
    assert (
        "which is yet to come" in faults[str(late)].what and "before it had been started" in faults[str(resumed)].what
    )


def spoiled(change: Callable[[dict], None]) -> Spoil:  # type: ignore[type-arg]
    def spoil(store: Path) -> Path:
        path = a_file(store)
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
        return path

    return spoil


VIEW: dict[str, tuple[Spoil, bool, list[str]]] = {
    "another machine's": (
        spoiled(lambda content: content["params"].update(machine="else")), True, ["of machine 'else' and lies in box"],
    ),
    "a broken row": (spoiled(lambda content: content["results"].update(x="?")), True, ["the row 'x' was left out"]),
    "no definition": (
        spoiled(lambda content: content["results"].update({"harness.time_x": [[1.0], [], "1"]})), False,
        ["a benchmark with results is not in it", "harness.time_x"],
    ),
    "a row that is gone": (
        spoiled(lambda content: content["results"].pop("gemm.Gemm.track_time")), False,
        ["lacks what the runs of commit 00000000 say of gemm.Gemm.track_time.", "rebuild"],
    ),
    "a number that is gone": (
        spoiled(lambda content: content["results"]["gemm.Gemm.track_time"][0].__setitem__(0, math.nan)), False,
        ["it lacks"],
    ),
    "another number": (
        spoiled(lambda content: content["results"]["gemm.Gemm.track_time"][0].__setitem__(0, 5.0)), True,
        ["says otherwise"],
    ),
    "another version": (
        spoiled(lambda content: content["results"]["gemm.Gemm.track_time"].__setitem__(2, "9")), True,
        ["says otherwise"],
    ),
}  # fmt: skip


@for_each("what", VIEW)
def test_faults_of_results(store: Path, what: str) -> None:
    spoil, broken, words = VIEW[what]
    whole = a_file(store).read_text()
    path = spoil(store)
    where = results_of(store) / "benchmarks.json" if what == "no definition" else path
    only(store, where, broken, *words)
    path.write_text(whole)


def test_rows_that_a_later_run_did_not_write_are_behind_and_not_wrong(store: Path) -> None:
    """`asv run --bench` of one metric, or one that was interrupted: what stands there was right when it was written."""
    keep(store, run_at(0, hours=9.0, records=tuple(records(1.5))))
    only(store, a_file(store), False, "lacks what the runs of commit 00000000 say of gemm.Gemm.track_time,", "rebuild")
    spoiled(lambda content: content["results"]["gemm.Gemm.track_time"][0].__setitem__(0, 5.0))(store)
    wrong, behind = faults_of(store)
    assert wrong.broken and wrong.what.endswith(
        "says otherwise than the runs of commit 00000000 of gemm.Gemm.track_time"
    )
    assert not behind.broken and "track_time_cast" in behind.what


def test_what_asv_measured_alone_or_saw_failing_is_no_fault(store: Path) -> None:
    spoiled(lambda content: content["results"]["gemm.Gemm.track_time"][0].__setitem__(0, None))(store)
    spoiled(lambda content: content["results"].update({"gemm.Gemm.track_other": [[1.0], [], "1"]}))(store)
    benchmarks = results_of(store) / "benchmarks.json"
    content = json.loads(benchmarks.read_text())
    content["gemm.Gemm.track_other"] = {"name": "gemm.Gemm.track_other", "params": [], "unit": "s", "version": "1"}
    benchmarks.write_text(json.dumps(content))
    assert not faults_of(store)


def test_results_that_cannot_be_read(store: Path) -> None:
    path = a_file(store)
    tear(path, "{")
    torn = faults_of(store)
    assert [fault.path for fault in torn] == [str(path), str(path)] and "breaks off" in torn[0].what
    path.write_text('{"version": 3}')
    assert "newer asv" in faults_of(store)[0].what and "leave it alone" in faults_of(store)[0].remedy
    path.unlink()
    rebuild(store)
    moved = path.with_name(path.name.replace("00000000", "0000000f"))
    shutil.copy(path, moved)
    only(store, moved, True, "does not begin with that of its commit")


def test_lists_that_asv_cannot_do_without(store: Path) -> None:
    machine = results_of(store) / "box" / "machine.json"
    kept = machine.read_text()
    machine.unlink()
    only(store, machine, True, "it is not there, and asv shows nothing of box", "rebuild")
    machine.write_text("{}")
    only(store, machine, True, "no 'version'")
    machine.write_text(kept.replace('"box"', '"else"'))
    only(store, machine, True, "it is of machine 'else'", "asv shows nothing of it", 'Write "machine": "box" into it')
    machine.unlink()
    rebuild(store)  # the runs know it
    assert not faults_of(store)
    (results_of(store) / "benchmarks.json").unlink()
    only(store, results_of(store) / "benchmarks.json", True, "asv shows nothing at all")


def test_what_lies_among_the_results(store: Path) -> None:
    aside = a_file(store).with_name("00000000-x.json.broken-1")
    aside.write_text("{")
    only(store, aside, False, "it was broken, and was set aside")
    aside.unlink()
    partial = results_of(store) / ".asv-12.partial"
    partial.write_text("{")
    only(store, partial, False, "a writer left that was killed")


@for_each("collected", [False, True])
def test_a_copy_of_a_machines_runs_under_another_name(tmp_path: Path, collected: bool) -> None:
    store = tmp_path / "store"
    for number, name in enumerate(("node1", "node2", "node3", "copy")):
        times = records(1.0 + (number % 3) / 8)
        facts = {"asv_machine": name, "machine": name}
        path = keep(store, run_at(number, facts=facts, cell="aa/0", records=tuple(times)))
    if collected:
        collect(None, [store], tmp_path / "all")
        store = tmp_path / "all"
        path = next(store.rglob(path.name))
    faults = [fault for fault in faults_of(store) if "under another name" in fault.what]
    assert [(fault.path, fault.broken) for fault in faults] == [(str(path), True)]
    assert "that of run 00000064 of machine node1" in faults[0].what


def test_suites_that_nobody_told_of(store: Path) -> None:
    foreign = tuple(replace(record, case=replace(record.case, workload="mine")) for record in records())
    keep(store, run_at(5, records=foreign, request=Request("mine")))
    only(store, store / "runs", False, "the suite mine is not known here", "--import", "not compared")


def test_runs_that_may_not_be_read_are_not_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is planted, because root may read every folder."""
    monkeypatch.setattr(os, "access", lambda path, how: Path(path).name != "box")
    only(store, store / "runs" / "box", True, "it may not be read, and nothing is known", "chmod")


def test_faults_at_once_are_all_named_and_rebuilding_mends_the_view(store: Path) -> None:
    tear(a_file(store), "{")
    (results_of(store) / "box" / "machine.json").unlink()
    rebuild(store)
    assert not any(fault.broken for fault in faults_of(store))
    tear(results_of(store) / "benchmarks.json", "?")
    rebuild(store)
    assert not any(fault.broken for fault in faults_of(store))
    before = (results_of(store) / "benchmarks.json").read_bytes()
    rebuild(store, [commit(0)[:8]])  # the newest definition holds, whatever order commits are rebuilt in
    assert (results_of(store) / "benchmarks.json").read_bytes() == before
    tear(a_file(store), "{")
    a_run(store).write_text("")
    (store / "runs" / "notes.txt").write_text("")
    assert {a_file(store), a_run(store), store / "runs" / "notes.txt"} <= {
        Path(fault.path) for fault in faults_of(store)
    }
    assert verify(store, store, NOW).sound == {"run files": (1, 2), "asv's files": (3, 4)}


def test_the_first_run_names_the_machine_again(store: Path) -> None:
    """A kernel or an interpreter's second name that came later begins no new line, also when all is made anew."""
    keep(store, run_at(1, 9, facts={"asv_os": "Linux 7"}))
    rebuild(store)
    before = tree(results_of(store))
    shutil.rmtree(results_of(store))
    rebuild(store)
    assert tree(results_of(store)) == before
    assert load_results(a_file(store)).params["os"] == "Linux 6.1"


def prepared(store: Path, old: bool) -> None:
    """Makes asv's view and the index; with `old` the runs are as older versions wrote them."""
    for path in run_files(store) if old else ():
        as_older(path)
    rebuild(store)
    open_history(store, lambda done, runs: None)


def with_digit_changed(path: Path) -> Path:
    """Changes the first digit of the first time."""
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


def test_the_file_is_blamed_that_is_wrong_where_runs_have_checksums(store: Path) -> None:
    """What was made of it, or it was made of, says so without being taken for broken."""
    prepared(store, old=False)
    index, view, run = points_file(store), a_file(store), newest(store)
    whole = {path: path.read_bytes() for path in (index, view, run)}
    index.write_bytes(whole[index][:-9] + bytes([whole[index][-9] ^ 1]) + whole[index][-8:])
    (of_index,) = wrong(store)
    index.write_bytes(whole[index])
    view.write_text(re.sub(r"(\d\.\d{3})", lambda digits: f"9{digits[1][1:]}", view.read_text(), count=1))
    (of_view,) = wrong(store)
    view.write_bytes(whole[view])
    before = open_history(store, lambda done, runs: None)
    with_digit_changed(run)
    (of_run,) = wrong(store)
    after = open_history(store, lambda done, runs: None)
    assert not before.left and any("damaged" in why for why in after.left), after.left
    assert [fault.path for fault in (of_index, of_view, of_run)] == [str(index), str(view), str(run)]
    assert "not what was written" in of_index.what and "rebuild" in of_view.remedy and "checksum" in of_run.what


def test_an_older_run_is_blamed_by_the_index(store: Path) -> None:
    prepared(store, old=True)
    (said,) = verify(store, store, NOW).faults
    assert "2 of 2 run files have no checksums" in said.what and not said.broken
    path = with_digit_changed(newest(store))
    (fault,) = wrong(store)
    assert fault.path == str(path) and "it is not what the index was made of" in fault.what, fault


def test_an_older_run_is_blamed_by_its_archive_which_has_it_whole(store: Path) -> None:
    pytest.importorskip("duckdb")
    prepared(store, old=True)
    compact(store, lambda done, commits: None)
    path = newest(store)
    whole = path.read_bytes()
    with_digit_changed(path)
    open_history(store, lambda done, runs: None)
    faults = wrong(store)
    assert [fault.path for fault in faults] == [str(path)], faults
    assert "it is not what was archived of it" in faults[0].what and "store restore" in faults[0].remedy
    assert path.read_bytes() != whole


def test_of_an_older_run_without_a_witness_nobody_can_tell(store: Path) -> None:
    prepared(store, old=True)
    with_digit_changed(newest(store))
    open_history(store, lambda done, runs: None)  # from now on the index says what the run says
    (fault,) = wrong(store)
    assert "nobody can tell which of them is wrong" in fault.what, fault
