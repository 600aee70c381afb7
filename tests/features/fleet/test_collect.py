"""Runs of several stores in one: byte for byte, as often as one likes, and nothing silently left out."""

from __future__ import annotations

import fcntl
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.errors import StoreError
from fp8bench.features.fleet.collect import CollectionCounts, collect_runs
from fp8bench.model import Request
from fp8bench.model.run import Cell, FleetPlan
from fp8bench.store.fleet_plans import compute_cell_states, load_plans, write_plan
from fp8bench.store.runs.listing import find_run, find_store_of_run, list_all_files, listing
from fp8bench.store.verify import verify_store
from tests.commands import Say
from tests.counts import for_each
from tests.histories import keep, run_at

PLAN = FleetPlan("8f3a2c1d", "2026-01-05T11:00:00.000+00:00", "", Request("gemm"), (Cell("a"), Cell("b")), "0.1.0")
OTHER = "b000000"


def stores(folder: Path) -> tuple[Path, Path]:
    """Two machines' stores: two cells of the plan on the first, one on the other with a run outside the plan."""
    for name, cells in (("a", (0, 1)), ("b", (0,))):
        for cell in cells:
            run = run_at(1, 24.0 * cell + ord(name), id=f"{name}{cell}00000", cell=f"{PLAN.id}/{cell}")
            facts = {**run.environment.facts, "machine": f"node {name}"}
            keep(folder / name, replace(run, environment=replace(run.environment, facts=facts)))
    keep(folder / "b", run_at(2, 900.0, id="c0000000"))
    return folder / "a", folder / "b"


def collected(folder: Path) -> CollectionCounts:
    return collect_runs(PLAN, (folder / "a", folder / "b"), folder / "out")


def test_runs_are_copied_byte_by_byte_into_folders_by_machine_and_month(tmp_path: Path, fp8bench: Say) -> None:
    two, out = stores(tmp_path), tmp_path / "out"
    collection = collected(tmp_path)
    assert (
        collection.taken_count_by_machine == {"node-a": 2, "node-b": 1}
        and +collection.excluded_count_by_reason == {"not of any cell of the plan": 1}
        and not collection.failures
    )
    copies = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in list_all_files(out)}
    assert {str(path.parent.relative_to(out / "runs")) for path in copies} == {
        "machine=node-a/month=2026-01",
        "machine=node-b/month=2026-01",
    }
    sources = {path.name: path.read_bytes() for path in [*list_all_files(two[0]), *list_all_files(two[1])]}
    for path, (content, _) in copies.items():
        assert sources[path.name] == content
    again = collect_runs(PLAN, (*two, two[0]), out)
    assert (again.unchanged_file_count, again.taken_count_by_machine, again.failures) == (3, {}, [])
    assert copies == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in list_all_files(out)}
    assert load_plans(out) == (PLAN,) and [state.status for state in compute_cell_states(PLAN, out)] == ["done", "done"]
    path = find_run("a000000", out)
    assert find_store_of_run(path) == out and "node-a" in str(path) and len(listing(out).files) == 3
    code, shown, _ = fp8bench("show", "a000000", "--store", str(out))
    assert code == 0 and "gemm" in shown
    checked = verify_store(out)
    assert checked.files == 3 and not any("is not a run file" in fault.what for fault in checked.faults)
    assert sum(collect_runs(None, two, tmp_path / "every").taken_count_by_machine.values()) == 4


def test_a_resumed_run_replaces_its_beginning(tmp_path: Path) -> None:
    path = find_run(OTHER, stores(tmp_path)[1])
    whole = path.read_bytes()
    beginning = whole[: whole.rindex(b'{"end"')]
    path.write_bytes(beginning)
    assert collected(tmp_path).taken_count_by_machine.total() == 3
    for content, longer in ((whole, 1), (beginning, 0)):
        path.write_bytes(content)
        assert (
            collected(tmp_path).taken_count_by_machine.total() == longer
            and find_run(OTHER, tmp_path / "out").read_bytes() == whole
        )


@for_each(
    ("what", "message"),
    [
        ("foreign", "is not a run file, or is in a wrong folder"),
        ("empty", "it is empty"),
        ("binary", "is not a run file"),
        ("headless", "the header is missing"),
        ("newer", "newer"),
        ("no store", "it is no directory"),
        ("nothing", "nothing was copied from its machine"),
    ],
)
def test_faulty_files_are_named_and_the_others_collected(tmp_path: Path, what: str, message: str) -> None:
    store = stores(tmp_path)[1]
    path = find_run(OTHER, store)
    lines = path.read_bytes().splitlines(keepends=True)
    contents = {
        "empty": b"",
        "binary": bytes(range(256)) * 9,
        "headless": b"".join(lines[1:]),
        "newer": lines[0].replace(b'{"schema":', b'{"schema":9', 1) + b"".join(lines[1:]),
    }
    if what == "foreign":
        (path.parent / "notes.txt").write_text("mine")
    elif what in contents:
        path.write_bytes(contents[what])
    else:
        shutil.rmtree(store if what == "no store" else store / "runs")
        if what == "nothing":
            (store / "runs").mkdir()
    collection = collected(tmp_path)
    assert any(message in sentence for sentence in collection.failures), collection.failures
    assert collection.taken_count_by_machine["node-a"] == 2
    assert collection.taken_count_by_machine["node-b"] == (what == "foreign")


def test_a_run_in_progress_is_not_collected(tmp_path: Path) -> None:
    with find_run(OTHER, stores(tmp_path)[1]).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        collection = collected(tmp_path)
    assert collection.taken_count_by_machine["node-b"] == 0 and any(
        "still being measured" in reason for reason in +collection.excluded_count_by_reason
    )


def test_a_store_is_not_collected_into_itself_or_over_another_plan(tmp_path: Path) -> None:
    first, _ = stores(tmp_path)
    assert "is this store" in collect_runs(PLAN, [first], first).failures[0]
    write_plan(replace(PLAN, command="another"), tmp_path / "out" / "plans" / f"{PLAN.id}.json")
    with pytest.raises(StoreError, match="a different plan with the same id"):
        collected(tmp_path)


def test_the_command_collects_stores(tmp_path: Path, fp8bench: Say) -> None:
    two, file = stores(tmp_path), tmp_path / "plan.json"
    write_plan(PLAN, file)
    words = ("fleet", "collect", "--store", str(tmp_path / "out"), str(file), *map(str, two))
    code, out, _ = fp8bench(*words)
    assert code == 0 and "taken: 2 of node-a, 1 of node-b" in out and "left out: 1" in out
    code, out, err = fp8bench(*words, str(tmp_path / "nowhere"))
    assert code == 3 and "copied before: 3" in out and "refused: 1" in out and "is not a store" in " ".join(err.split())
    assert fp8bench("fleet", "collect", str(tmp_path / "x.json"), str(two[0]))[0] == 2
