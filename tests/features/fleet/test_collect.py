"""Runs of several stores in one: byte for byte, as often as one likes, and nothing silently left out."""

from __future__ import annotations

import fcntl
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from fp8bench.errors import StoreError
from fp8bench.features.fleet.collect import Collected, collect
from fp8bench.model import Request
from fp8bench.model.run import Cell, FleetPlan
from fp8bench.store.fleet_plans import plans_of, states_of, write_plan
from fp8bench.store.runs.listing import all_files, find_run, listing, store_of
from fp8bench.store.verify import verify
from tests.commands import Say
from tests.histories import FIRST, keep, run_at
from tests.older import without_sums

PLAN = FleetPlan("8f3a2c1d", "2026-01-05T11:00:00.000+00:00", "", Request("gemm"), (Cell("a"), Cell("b")), "0.1.0")


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Path, Path]:
    """Two machines' stores: two cells of the plan on the first, one on the other, and a run that is of none."""
    for name, cells in (("a", (0, 1)), ("b", (0,))):
        for cell in cells:
            run = run_at(1, 24.0 * cell + ord(name), id=f"{name}{cell}00000", cell=f"{PLAN.id}/{cell}")
            facts = {**run.environment.facts, "machine": f"node {name}"}
            keep(tmp_path / name, replace(run, environment=replace(run.environment, facts=facts)))
    keep(tmp_path / "b", run_at(2, 900.0, id="c0000000"))
    return tmp_path / "a", tmp_path / "b"


def names(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store / "runs")): path.read_bytes() for path in all_files(store)}


def test_byte_equal_copies_by_machine_and_month(stores: tuple[Path, Path], tmp_path: Path, fp8bench: Say) -> None:
    """Every reader of a store has them: find, list, show, verify, the history; the plan lies beside them."""
    out = tmp_path / "out"
    made = collect(PLAN, stores, out)
    assert made.taken == {"node-a": 2, "node-b": 1} and +made.left == {"of no cell of the plan": 1} and not made.failed
    found = names(out)
    folders = {name.rpartition("/")[0] for name in found}
    assert folders == {"machine=node-a/month=2026-01", "machine=node-b/month=2026-01"}
    assert {Path(name).name: content for name, content in found.items()}.items() <= {
        path.name: path.read_bytes() for store in stores for path in all_files(store)
    }.items()
    before = {path: path.stat().st_mtime_ns for path in all_files(out)}
    again = collect(PLAN, (*stores, stores[0]), out)
    assert (again.same, again.taken, again.failed) == (3, {}, [])
    assert before == {path: path.stat().st_mtime_ns for path in all_files(out)} and names(out) == found
    assert plans_of(out) == (PLAN,) and [one.status for one in states_of(PLAN, out)] == ["done", "done"]
    path = find_run("a000000", out)
    assert store_of(path) == out and "node-a" in str(path)
    code, shown, _ = fp8bench("show", "a000000", "--store", str(out))
    assert code == 0 and "gemm" in shown
    assert len(listing(out).files) == 3


def test_all_runs_without_a_plan(stores: tuple[Path, Path], tmp_path: Path) -> None:
    assert sum(collect(None, stores, tmp_path / "out").taken.values()) == 4


def test_one_that_was_gone_on_with_replaces_its_beginning(stores: tuple[Path, Path], tmp_path: Path) -> None:
    """In one step; a beginning that comes later changes nothing."""
    path = find_run("b000000", stores[1])
    whole = path.read_bytes()
    beginning = whole[: whole.rindex(b'{"end"')]
    path.write_bytes(beginning)
    made = collect(PLAN, stores, tmp_path / "out")
    assert made.taken.total() == 3 and "was cut off: its end is missing" in made.doubts[0]
    path.write_bytes(whole)
    assert collect(PLAN, stores, tmp_path / "out").longer == 1
    copy = find_run("b000000", tmp_path / "out")
    assert copy.read_bytes() == whole
    path.write_bytes(beginning)
    assert collect(PLAN, stores, tmp_path / "out").longer == 0 and copy.read_bytes() == whole


def broken(stores: tuple[Path, Path], what: str) -> str:
    """Do it to the run b000000, or beside it; the sentence that says so."""
    path = find_run("b000000", stores[1])
    lines = path.read_bytes().splitlines(keepends=True)
    if what == "foreign":
        (path.parent / "notes.txt").write_text("mine")
        return "notes.txt is no run file, or lies where none does. It was not taken."
    if what == "empty":
        path.write_bytes(b"")
        return "is no run file: it is empty"
    if what == "binary":
        path.write_bytes(bytes(range(256)) * 9)
        return "is no run file"
    if what == "headless":
        path.write_bytes(b"".join(lines[1:]))
        return "was not taken: the header is gone"
    if what == "newer":
        path.write_bytes(lines[0].replace(b'{"schema":', b'{"schema":9', 1) + b"".join(lines[1:]))
        return "newer"
    if what == "no store":
        shutil.rmtree(stores[1])
        return "is no store: it is no directory"
    shutil.rmtree(stores[1] / "runs")
    (stores[1] / "runs").mkdir()
    return "has no runs: nothing came of the machine that it belongs to"


@pytest.mark.parametrize("what", ["foreign", "empty", "binary", "headless", "newer", "no store", "nothing"])
def test_what_is_wrong_is_named_and_costs_nobody_the_rest(stores: tuple[Path, Path], tmp_path: Path, what: str) -> None:
    said = broken(stores, what)
    made = collect(PLAN, stores, tmp_path / "out")
    assert made.taken["node-a"] == 2 and any(said in one for one in made.failed), made.failed
    assert made.taken["node-b"] == (1 if what == "foreign" else 0)


def test_a_torn_file_is_taken_as_it_is_and_named(stores: tuple[Path, Path], tmp_path: Path) -> None:
    path = find_run("b000000", stores[1])
    path.write_bytes(path.read_bytes()[:-5])
    made = collect(PLAN, stores, tmp_path / "out")
    assert made.taken["node-b"] == 1 and "is torn: line" in made.doubts[0], made
    assert find_run("b000000", tmp_path / "out").read_bytes() == path.read_bytes()


def test_the_same_id_with_other_bytes_is_named_and_the_first_stays(stores: tuple[Path, Path], tmp_path: Path) -> None:
    collect(PLAN, stores, tmp_path / "out")
    copy = find_run("b000000", tmp_path / "out")
    before = copy.read_bytes()
    path = find_run("b000000", stores[1])
    path.write_bytes(without_sums(before).replace(b'"node b"', b'"node b "', 1))
    made: Collected = collect(PLAN, stores, tmp_path / "out")
    assert "has other bytes" in made.failed[0] and copy.read_bytes() == before


def test_what_is_being_measured_waits(stores: tuple[Path, Path], tmp_path: Path) -> None:
    path = find_run("b000000", stores[1])
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        made = collect(PLAN, stores, tmp_path / "out")
    assert made.taken["node-b"] == 0 and any("still being measured" in why for why in +made.left)


def test_a_store_into_itself_or_another_plan_of_the_id(stores: tuple[Path, Path], tmp_path: Path) -> None:
    assert "is this store" in collect(PLAN, [stores[0]], stores[0]).failed[0]
    out = tmp_path / "out"
    write_plan(replace(PLAN, command="another"), out / "plans" / f"{PLAN.id}.json")
    with pytest.raises(StoreError, match="another plan of the same id"):
        collect(PLAN, stores, out)


def test_on_the_command_line(stores: tuple[Path, Path], tmp_path: Path, fp8bench: Say) -> None:
    file = tmp_path / "plan.json"
    write_plan(PLAN, file)
    words = ("fleet", "collect", "--store", str(tmp_path / "out"), str(file), *map(str, stores))
    code, out, _ = fp8bench(*words)
    assert code == 0 and "taken: 2 of node-a, 1 of node-b" in out and "left out: 1 of no cell of the plan" in out
    code, out, err = fp8bench(*words, str(tmp_path / "nowhere"))
    assert code == 3 and "here before: 3" in out and "refused: 1" in out and "is no store" in " ".join(err.split())
    code, _, err = fp8bench("fleet", "collect", str(tmp_path / "x.json"), str(stores[0]))
    assert code == 2 and "cannot be read" in " ".join(err.split())


def test_verify_knows_the_folders(stores: tuple[Path, Path], tmp_path: Path) -> None:
    collect(PLAN, stores, tmp_path / "out")
    found = verify(tmp_path / "out", tmp_path, FIRST + timedelta(days=9))
    assert found.sound["run files"][1] == 3, found
    assert not any("is no run file" in fault.what for fault in found.faults)
