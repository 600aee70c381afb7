"""Every fault that a store can have, planted one at a time into a sound one, is named, and nothing else is."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fp8bench.features.fleet.collect import collect
from fp8bench.model import DeviceFacts, Environment, Fault, Request, Resumption, Run
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
from tests.runs import CPU

NOW = FIRST + timedelta(days=30)
Spoil = Callable[[Path], Path]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of two commits, and their view."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    found = tmp_path / "store"
    history(found, 1.0, 1.1)
    rebuild(found)
    return found


def faults_of(store: Path, now: datetime = NOW) -> list[Fault]:
    """What verify finds; it changes nothing."""
    before = tree(store)
    found = verify(store, store, now).faults
    assert tree(store) == before
    return list(found)


def only(store: Path, path: Path, broken: bool, *words: str) -> Fault:
    """The one fault there is: where it is, of which kind, and words of it."""
    found = faults_of(store)
    assert [(fault.path, fault.broken) for fault in found] == [(str(path), broken)], found
    text = f"{found[0].what}. {found[0].remedy}."
    assert all(word in text for word in words), text
    return found[0]


def tear(path: Path, text: str) -> None:
    """Put something broken into a file, long ago: what was changed lately may be in the middle of being written."""
    path.write_text(text)
    os.utime(path, (1, 1))


def a_run(store: Path) -> Path:
    return min((store / "runs" / "box").glob("*.jsonl"))


def a_file(store: Path) -> Path:
    return min((results_of(store) / "box").glob("0*.json"))


def test_a_sound_store_has_no_faults(store: Path) -> None:
    """All of it is counted."""
    found = verify(store, store, NOW)
    assert not found.faults and found.sound == {"run files": (2, 2), "asv's files": (4, 4)}


def test_a_store_without_a_view_lacks_it_where_there_is_something_to_show(tmp_path: Path, store: Path) -> None:
    """A dirty run has nothing for it."""
    dirty = tmp_path / "dirty"
    keep(dirty, run_at(1, facts={"dirty": True}))
    assert not faults_of(dirty)
    shutil.rmtree(results_of(store))
    assert {fault.remedy for fault in faults_of(store)} == {"`fp8bench history rebuild` puts it there"}
    assert len(faults_of(store)) == 2


def test_a_view_that_was_deleted_is_one_sentence(store: Path) -> None:
    """A hundred commits would fill the screen otherwise; what is wrong is still said of each file."""
    for number in range(2, 6):
        keep(store, run_at(number))
    words = "4 files of it lack what the runs of their commits say: box/00000002-existing-py_venv_bin_python3.json, "
    fault = only(store, results_of(store), False, words, " and 1 more. `fp8bench history rebuild`")
    spoiled(lambda one: one["results"]["gemm.Gemm.track_time"][0].__setitem__(0, 5.0))(store)
    assert [one.broken for one in faults_of(store)] == [True, False] and fault in faults_of(store)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_broken_lines_of_a_run_that_is_not_whole(store: Path) -> None:
    """By their numbers, and how to measure what is missing."""
    path = a_run(store)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1], lines[2][:99], "{", "[]", '{"what":1}']) + "\n")
    found = [fault for fault in faults_of(store) if fault.path == str(path)]
    assert len(found) == 1 and found[0].broken
    assert "line 3 is broken" in found[0].what and "line 4" in found[0].what and "and 1 more" in found[0].what
    assert "--resume 00000064" in found[0].remedy


def test_broken_lines_of_a_run_that_is_whole_all_the_same(store: Path) -> None:
    """They stay for good, because nothing is rewritten; nobody need do anything about them."""
    path = a_run(store)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], '{"rec', lines[-1]]) + "\n")
    only(store, path, False, "line 4 is broken", "Nothing is missing")


def test_a_run_that_is_being_written_is_not_broken(store: Path) -> None:
    """Its last line may be half there."""
    run = run_at(5, finished=False)
    path = keep(store, run)
    rebuild(store)
    append(path, '{"rec')
    with path.open("a") as file:
        lock_run(file, path)
        assert not faults_of(store)
    assert [fault.broken for fault in faults_of(store)] == [True]


def test_a_run_without_a_header(store: Path) -> None:
    """What it was measured on is lost."""
    path = a_run(store)
    path.write_text("\n".join(path.read_text().splitlines()[1:]) + "\n")
    only(store, path, True, "the header is gone", "from a copy")


STRAY = "box/20260101T000000Z-00000009-ffffffff.jsonl"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["it is empty", "from a copy, or move it away"]),
        ("words\n", ["it is no run file"]),
        ('{"schema":99,"header":{}}\n', ["was written by a newer fp8bench", "Upgrade"]),
    ],
)
def test_files_that_are_no_runs(store: Path, content: str, words: list[str]) -> None:
    """An empty one, a foreign one, and one from the future."""
    path = store / "runs" / STRAY
    path.write_text(content)
    only(store, path, True, *words)


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
    """Nothing is broken by it; a folder that is called like a run is none."""
    path = store / "runs" / name
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if name == STRAY else path.write_text("{}")
    only(store, path, False, words)


def test_a_run_under_a_wrong_name(store: Path) -> None:
    """Its commit's figures are read from files that are named for it."""
    path = a_run(store)
    moved = path.with_name(path.name.replace("00000000", "0000000f"))
    path.rename(moved)
    only(store, moved, True, "its name is not that of the run in it", f"Rename it to {path.name}")


def test_a_run_that_is_there_twice(store: Path) -> None:
    """Whoever copied a folder has not measured twice."""
    path = a_run(store)
    copy = store / "runs" / "copied" / path.name
    copy.parent.mkdir()
    shutil.copy(path, copy)
    found = faults_of(store)
    assert len(found) == 1 and found[0].broken and "is the same run as" in found[0].what


def test_clocks_that_were_wrong(store: Path) -> None:
    """A run from before its commit, one that is yet to come, and one that was gone on with before it began."""
    early = keep(store, run_at(5, hours=4.5))
    late = keep(store, run_at(6, hours=24 * 40))
    back = Resumption(start(7.0), "", Environment({}))
    resumed = keep(store, run_at(7, hours=7.5))
    line = {"resumed": {"started": back.started, "command": "", "environment": {"facts": {}}}}
    append(as_older(resumed), json.dumps(line))
    rebuild(store)
    found = {fault.path: fault for fault in faults_of(store)}
    old = str(store / "runs")  # of the one that was changed here, which has no checksums
    assert set(found) == {str(early), str(late), str(resumed), old} and not any(one.broken for one in found.values())
    assert "before its commit was written (2026-01-05 17:00 UTC)" in found[str(early)].what
    assert "which is yet to come" in found[str(late)].what and "before it had been started" in found[str(resumed)].what


def test_clocks_may_differ_a_little(store: Path) -> None:
    """By less than a minute nobody can say who is wrong."""
    keep(store, run_at(5, hours=5 - 50 / 3600))
    rebuild(store)
    assert not faults_of(store)


def test_a_start_that_is_no_time(store: Path) -> None:
    """It can be put into no order."""
    path = keep(store, run_at(5, started="yesterday"))
    only(store, path, True, "'yesterday', is no time")


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
        spoiled(lambda one: one["params"].update(machine="else")), True, ["of machine 'else' and lies in box"],
    ),
    "a broken row": (spoiled(lambda one: one["results"].update(x="?")), True, ["the row 'x' was left out"]),
    "no definition": (
        spoiled(lambda one: one["results"].update({"harness.time_x": [[1.0], [], "1"]})), False,
        ["a benchmark with results is not in it", "harness.time_x"],
    ),
    "a row that is gone": (
        spoiled(lambda one: one["results"].pop("gemm.Gemm.track_time")), False,
        ["lacks what the runs of commit 00000000 say of gemm.Gemm.track_time.", "rebuild"],
    ),
    "a number that is gone": (
        spoiled(lambda one: one["results"]["gemm.Gemm.track_time"][0].__setitem__(0, math.nan)), False, ["it lacks"],
    ),
    "another number": (
        spoiled(lambda one: one["results"]["gemm.Gemm.track_time"][0].__setitem__(0, 5.0)), True, ["says otherwise"],
    ),
    "another version": (
        spoiled(lambda one: one["results"]["gemm.Gemm.track_time"].__setitem__(2, "9")), True, ["says otherwise"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", VIEW)
def test_faults_of_results(store: Path, what: str) -> None:
    """What asv would not show, and what it would show wrong."""
    spoil, broken, words = VIEW[what]
    path = spoil(store)
    where = results_of(store) / "benchmarks.json" if what == "no definition" else path
    only(store, where, broken, *words)


def test_a_failure_may_stand_where_a_number_was(store: Path) -> None:
    """`asv run` shows what failed now as failed; the runs before it have a number."""
    spoiled(lambda one: one["results"]["gemm.Gemm.track_time"][0].__setitem__(0, None))(store)
    assert not faults_of(store)


def test_rows_that_a_later_run_did_not_write_are_behind_and_not_wrong(store: Path) -> None:
    """`asv run --bench` of one metric, or one that was interrupted: what stands there was right when it was written."""
    keep(store, run_at(0, hours=9.0, records=tuple(records(1.5))))
    only(store, a_file(store), False, "lacks what the runs of commit 00000000 say of gemm.Gemm.track_time,", "rebuild")
    spoiled(lambda one: one["results"]["gemm.Gemm.track_time"][0].__setitem__(0, 5.0))(store)
    wrong, behind = faults_of(store)
    assert wrong.broken and wrong.what.endswith(
        "says otherwise than the runs of commit 00000000 of gemm.Gemm.track_time"
    )
    assert not behind.broken and "track_time_cast" in behind.what


def test_what_asv_measured_alone_is_no_fault(store: Path) -> None:
    """In files of its own, and in rows beside the runs'."""
    spoiled(lambda one: one["results"].update({"gemm.Gemm.track_other": [[1.0], [], "1"]}))(store)
    benchmarks = results_of(store) / "benchmarks.json"
    content = json.loads(benchmarks.read_text())
    content["gemm.Gemm.track_other"] = {"name": "gemm.Gemm.track_other", "params": [], "unit": "s", "version": "1"}
    benchmarks.write_text(json.dumps(content))
    assert not faults_of(store)


def test_results_that_cannot_be_read(store: Path) -> None:
    """Torn, of another version, and of another commit than their names say: rebuilding makes what runs know."""
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
    """It shows nothing without them."""
    machine = results_of(store) / "box" / "machine.json"
    kept = machine.read_text()
    machine.unlink()
    only(store, machine, True, "it is not there, and asv shows nothing of box", "rebuild")
    machine.write_text("{}")
    only(store, machine, True, "no 'version'")
    machine.write_text(kept.replace('"box"', '"else"'))
    only(store, machine, True, "it is of machine 'else'", "asv shows nothing of it", 'Write "machine": "box" into it')
    machine.write_text(kept)
    (results_of(store) / "benchmarks.json").unlink()
    only(store, results_of(store) / "benchmarks.json", True, "asv shows nothing at all")


def test_what_lies_among_the_results(store: Path) -> None:
    """Files that were set aside, and what a killed writer left."""
    aside = a_file(store).with_name("00000000-x.json.broken-1")
    aside.write_text("{")
    only(store, aside, False, "it was broken, and was set aside")
    aside.unlink()
    partial = results_of(store) / ".asv-12.partial"
    partial.write_text("{")
    only(store, partial, False, "a writer left that was killed")


@for_each("collected", [False, True])
def test_a_copy_of_a_machines_runs_under_another_name(tmp_path: Path, collected: bool) -> None:
    """With ids and starts of its own; the times tell, even in a fleet."""
    store = tmp_path / "store"
    for number, name in enumerate(("node1", "node2", "node3", "copy")):
        times = records(1.0 + (number % 3) / 8)
        facts = {"asv_machine": name, "machine": name}
        path = keep(store, run_at(number, facts=facts, cell="aa/0", records=tuple(times)))
    if collected:
        collect(None, [store], tmp_path / "all")
        store = tmp_path / "all"
        path = next(store.rglob(path.name))
    found = faults_of_machines(store)
    assert [(one.path, one.broken) for one in found] == [(str(path), True)]
    assert "that of run 00000064 of machine node1" in found[0].what


def faults_of_machines(store: Path) -> list[Fault]:
    """Those of names of machines."""
    return [one for one in faults_of(store) if "under another name" in one.what]


def test_a_machine_whose_gpu_is_now_this_and_now_that_is_named(store: Path) -> None:
    """CUDA_VISIBLE_DEVICES chooses. One model is fine, and so is a run without any."""
    gpu = DeviceFacts("cuda", 0, "NVIDIA H200", 140 << 30, "2.13.0")
    keep(store, run_at(2, devices=(CPU, gpu), records=()))
    assert not faults_of(store)
    keep(store, run_at(3, devices=(CPU, replace(gpu, name="NVIDIA A100")), records=()))
    only(store, store / "runs", False, "machine box was 'NVIDIA H200' and 'NVIDIA A100'", "a store of its own")


def test_suites_that_nobody_told_of(store: Path) -> None:
    """Their figures cannot be compared, which is said."""
    foreign = tuple(replace(one, case=replace(one.case, workload="mine")) for one in records())
    keep(store, run_at(5, records=foreign, request=Request("mine")))
    only(store, store / "runs", False, "the suite mine is not known here", "--import", "not compared")


def test_runs_that_may_not_be_read_are_not_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's folder, say: whoever reads all folders may read them all, so that the answer is planted."""
    monkeypatch.setattr(os, "access", lambda path, how: Path(path).name != "box")
    only(store, store / "runs" / "box", True, "it may not be read, and nothing is known", "chmod")


def test_a_machine_that_is_not_its_folders_can_be_deleted(store: Path) -> None:
    """As the sentence says: the runs know it."""
    (results_of(store) / "box" / "machine.json").unlink()
    rebuild(store)
    assert not faults_of(store)


def test_many_faults_at_once_are_all_named(store: Path) -> None:
    """One does not hide another."""
    tear(a_file(store), "{")
    a_run(store).write_text("")
    (store / "runs" / "notes.txt").write_text("")
    found = faults_of(store)
    assert len({fault.path for fault in found}) == 3
    assert verify(store, store, NOW).sound == {"run files": (1, 2), "asv's files": (3, 4)}


def test_rebuilding_mends_the_view(store: Path) -> None:
    """After it nothing is lacking; what was set aside is worth knowing."""
    tear(a_file(store), "{")
    (results_of(store) / "box" / "machine.json").unlink()
    tear(results_of(store) / "benchmarks.json", "?")
    rebuild(store)
    assert not any(fault.broken for fault in faults_of(store))


def test_the_newest_definition_holds(store: Path) -> None:
    """Whatever order commits are rebuilt in: asv hides rows of another version than the list's."""
    before = (results_of(store) / "benchmarks.json").read_bytes()
    rebuild(store, [commit(0)[:8]])
    assert (results_of(store) / "benchmarks.json").read_bytes() == before


def test_only_the_commits_that_are_wanted_are_made(store: Path) -> None:
    """Others stay as they are, or away."""
    shutil.rmtree(results_of(store))
    made = rebuild(store, [commit(1)[:8]])
    assert [path.name[:8] for path in made.files] == ["00000001"] and made.runs == 1
    assert load_results(made.files[0]).commit_hash == commit(1)


def test_the_first_run_names_the_machine_again(store: Path) -> None:
    """A kernel or an interpreter's second name that came later begins no new line, also when all is made anew."""
    keep(store, run_at(1, 9, facts={"asv_os": "Linux 7"}))
    rebuild(store)
    before = tree(results_of(store))
    shutil.rmtree(results_of(store))
    rebuild(store)
    assert tree(results_of(store)) == before
    assert load_results(a_file(store)).params["os"] == "Linux 6.1"


def test_a_time_without_a_zone_is_utc(store: Path) -> None:
    """Hand-made files may leave it out."""
    run: Run = run_at(5, hours=24 * 20)
    keep(store, replace(run, started=run.started.partition("+")[0]))
    rebuild(store)
    assert not [one for one in faults_of(store, datetime(2026, 1, 26, 12, tzinfo=UTC)) if "yet to come" in one.what]


def prepared(store: Path, old: bool) -> None:
    """asv's view and the index; with `old` the runs are as older versions wrote them."""
    for path in run_files(store) if old else ():
        as_older(path)
    rebuild(store)
    open_history(store, lambda done, runs: None)


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
    before = open_history(store, lambda done, runs: None)
    with_digit_changed(newest(store))
    after = open_history(store, lambda done, runs: None)
    assert not before.left and any("damaged" in why for why in after.left), after.left


def test_asvs_file_is_blamed_where_the_runs_have_checksums(store: Path) -> None:
    prepared(store, old=False)
    path = next((results_of(store) / "box").glob("0*.json"))
    path.write_text(re.sub(r"(\d\.\d{3})", lambda found: f"9{found[1][1:]}", path.read_text(), count=1))
    (fault,) = wrong(store)
    assert fault.path == str(path) and "rebuild" in fault.remedy, fault


def test_the_index_is_blamed_where_it_is_not_what_was_written(store: Path) -> None:
    prepared(store, old=False)
    path = points_file(store)
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
    """asv's file says otherwise, and is not called the wrong one."""
    prepared(store, old=True)
    with_digit_changed(newest(store))
    open_history(store, lambda done, runs: None)  # from now on the index says what the run says
    (fault,) = wrong(store)
    assert "nobody can tell which of them is wrong" in fault.what, fault


def test_older_runs_are_said_to_have_no_checksums(store: Path) -> None:
    prepared(store, old=True)
    said = verify(store, store, NOW).faults
    assert [fault.what for fault in said] == ["2 of 2 run files have no checksums: an older fp8bench wrote them"]
    assert not said[0].broken
