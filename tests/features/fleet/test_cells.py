"""Cells measured in this process: once each, resumed where they were cut off, never by two at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from fp8bench import pipeline
from fp8bench.errors import UsageError
from fp8bench.features.fleet.engines import measure_waiting_cells
from fp8bench.files import lock_folder
from fp8bench.jobs.several_runs import make_fleet_plan, measure_cell
from fp8bench.model import Request, Run
from fp8bench.model.codec import encode
from fp8bench.model.run import CellAttempt, CellStatus, FleetPlan
from fp8bench.protocols import SilentObserver
from fp8bench.store.fleet_plans import (
    OUTPUT_FILE,
    add_attempt,
    compute_cell_states,
    get_cell_folder,
    read_fleet_plan,
    write_plan,
)
from fp8bench.store.kept_lines import FileLines
from fp8bench.store.runs.run_file import load_run, load_run_with_lines
from tests.counts import for_each
from tests.older import changed_document, without_sums

pytestmark = pytest.mark.usefixtures("short_slots")


@pytest.fixture(scope="module")
def plan() -> FleetPlan:
    """Two cells that take no time."""
    axes = (("shape", ("16", "32")),)
    request = Request("gemm", ("fp32",), quick=True, rounds=2, energy=False, isolation=False, axes=axes)
    return make_fleet_plan(request, *pipeline.plan_only(request, Path()), "")


def measure(plan: FleetPlan, number: int, store: Path) -> tuple[bool, Run]:
    return measure_cell(plan, number, store, SilentObserver(), "")


def attempt(plan: FleetPlan, number: int, store: Path, code: int) -> int:
    add_attempt(plan, number, store, CellAttempt("host", 1, "2026-01-05T12:00:00+00:00", 3.0, code))
    return code


def of(plan: FleetPlan, store: Path) -> list[str]:
    return [state.status.value for state in compute_cell_states(plan, store)]


def test_a_cell_is_measured_once(plan: FleetPlan, tmp_path: Path) -> None:
    now, run = measure(plan, 1, tmp_path)
    assert now and run.finished and run.cell == f"{plan.id}/1" and run.origin == "fleet"
    assert {record.case.setting for record in run.records} == {plan.cells[1].setting}
    before = Path(run.path).read_bytes()
    now, again = measure(plan, 1, tmp_path)
    assert not now and again.id == run.id and Path(run.path).read_bytes() == before
    assert of(plan, tmp_path) == ["waiting", "done"] and compute_cell_states(plan, tmp_path)[1].run == run.id
    assert [state.number for state in compute_cell_states(plan, tmp_path, except_cells={1})] == [0]


def test_a_worker_reads_a_run_that_is_whole_once(
    plan: FleetPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each cell would take longer than the previous one."""
    run, read = measure(plan, 1, tmp_path)[1], list[Path]()

    def reads(path: Path) -> tuple[Run, FileLines]:
        read.append(path)
        return load_run_with_lines(path)

    monkeypatch.setattr("fp8bench.store.fleet_plans.load_run_with_lines", reads)
    fails = lambda plan, file, number, store: attempt(plan, number, store, 2)  # noqa: E731
    monkeypatch.setattr("fp8bench.features.fleet.engines._measure_cell", fails)
    assert measure_waiting_cells(plan, tmp_path / "p.json", tmp_path, False, lambda state: None) == ({0: 2}, {})
    assert read == [Path(run.path)]


def test_an_interrupted_cell_is_resumed(plan: FleetPlan, tmp_path: Path) -> None:
    _, run = measure(plan, 0, tmp_path)
    path = Path(run.path)
    head = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(head)
    assert of(plan, tmp_path)[0] == "begun"
    now, resumed = measure(plan, 0, tmp_path)
    assert now and resumed.id == run.id and resumed.finished and len(resumed.resumptions) == 1
    other = json.loads(without_sums(head))
    other["header"]["environment"]["facts"]["machine"] = "elsewhere"
    path.write_text(json.dumps(other) + "\n")
    now, anew = measure(plan, 0, tmp_path)
    assert now and anew.id != resumed.id and anew.finished and not load_run(path).finished
    assert of(plan, tmp_path)[0] == "done"


def test_a_cell_has_one_worker_at_a_time(plan: FleetPlan, tmp_path: Path) -> None:
    with lock_folder(get_cell_folder(plan, 0, tmp_path), 0):
        assert of(plan, tmp_path) == ["running", "waiting"]
        with pytest.raises(UsageError, match=f"another process is already measuring cell {plan.id}/0"):
            measure(plan, 0, tmp_path)
    assert of(plan, tmp_path) == ["waiting", "waiting"]
    with pytest.raises(UsageError, match="cell 2 is not among the cells 0 to 1"):
        measure(plan, 2, tmp_path)


def test_what_failed_says_why_and_waits_for_retry(
    plan: FleetPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def ends(plan: FleetPlan, file: Path, number: int, store: Path) -> int:
        (get_cell_folder(plan, number, store) / OUTPUT_FILE).write_text(
            "" if number else "\nfp8bench: no such device.\n"
        )
        return attempt(plan, number, store, 0 if number else 2)

    def worked(retry: bool) -> tuple[dict[int, int], dict[int, str]]:
        return measure_waiting_cells(
            plan, tmp_path / "p.json", tmp_path, retry, lambda state: begun.append(state.number)
        )

    monkeypatch.setattr("fp8bench.features.fleet.engines._measure_cell", ends)
    assert worked(False) == ({0: 2, 1: 0}, {}) and begun == [0, 1]
    failed, waiting = compute_cell_states(plan, tmp_path)
    assert failed.status is CellStatus.FAILED and failed.why == "no such device." and len(failed.attempts) == 1
    assert waiting.status is CellStatus.WAITING  # it exited with 0, without a run
    assert worked(True)[0][0] == 2 and len(begun) == 4
    with (
        lock_folder(get_cell_folder(plan, 0, tmp_path) / "claim", 0),
        lock_folder(get_cell_folder(plan, 1, tmp_path) / "claim", 0),
    ):
        done, refused = worked(True)
        assert not done and set(refused) == {0, 1} and "another process is already measuring" in refused[0]
    with (get_cell_folder(plan, 0, tmp_path) / "attempts.jsonl").open("a") as file:
        file.write('{"host": "cut o')
    assert len(compute_cell_states(plan, tmp_path)[0].attempts) == 2


def garbled(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b'{"host": "box", "proc\xff\x00ess": 1}\n')


def flipped(store: Path, line: int) -> None:
    """Changes a digit in a line of the only stored run."""
    (path,) = store.rglob("*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"gemm', b'"gemn', 1)
    path.write_bytes(b"".join(lines))


DAMAGES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "garbled attempts": (
        lambda folder, store: garbled(folder / "attempts.jsonl"),
        "attempts.jsonl: line 1 is not JSON",
    ),
    "attempts are a folder": (lambda folder, store: (folder / "attempts.jsonl").mkdir(parents=True), "Is a directory"),
    "output is a folder": (
        lambda folder, store: (folder / OUTPUT_FILE).mkdir(parents=True),
        f"{OUTPUT_FILE} is not a file",
    ),
    "a file": (lambda folder, store: (folder.parent.mkdir(parents=True), folder.touch())[1], "is not a folder"),
    "a header": (lambda folder, store: flipped(store, 0), "line 1, the header, is broken"),
    "a record": (lambda folder, store: flipped(store, 1), "line 2 is broken and was left out"),
}


@pytest.mark.slow
@for_each(("break_", "words"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_a_state_of_its_cell(
    plan: FleetPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_: Callable[[Path, Path], None], words: str
) -> None:
    if words.startswith("line"):
        measure(plan, 0, tmp_path)
    break_(get_cell_folder(plan, 0, tmp_path), tmp_path)
    damaged, waiting = compute_cell_states(plan, tmp_path)
    assert damaged.status is CellStatus.DAMAGED and words in "; ".join(damaged.damage)
    assert waiting.status is CellStatus.WAITING and not waiting.damage

    def ends(words: Sequence[str], output: IO[bytes], environment: Mapping[str, str]) -> int:
        measure(plan, int(words[words.index("--cell") + 1]), tmp_path)
        return 0

    monkeypatch.setattr("fp8bench.features.fleet.engines.start_fp8bench", lambda *arguments: arguments)
    monkeypatch.setattr("fp8bench.features.fleet.engines.wait_for_all", lambda arguments: ends(*arguments))
    done, refused = measure_waiting_cells(plan, tmp_path / "p.json", tmp_path, False, lambda state: None)
    mended, other = compute_cell_states(plan, tmp_path)
    assert other.status is CellStatus.DONE and 1 in done
    kept_out = words in (f"{OUTPUT_FILE} is not a file", "is not a folder")
    assert mended.status is (CellStatus.DAMAGED if kept_out else CellStatus.DONE) and mended.damage
    assert kept_out == (0 in refused and 0 not in done) or words == "Is a directory"


def test_a_plan_is_read_back_and_nonsense_is_none(plan: FleetPlan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_plan(plan, file)
    assert read_fleet_plan(file) == plan
    document = json.dumps(changed_document(file), indent=1) + "\n"
    fleet = json.loads(document)["fleet"]
    for text, words in (
        (file.read_text().replace('"rounds": 2', '"rounds": 3'), "its checksum does not match its content"),
        ("", "is not a plan of a fleet"),
        ("[1]", "is not a plan of a fleet"),
        ("[" * 50_000, "is not a plan of a fleet"),
        (document.replace('"schema": 1', '"schema": 9'), "schema 9"),
        (document.replace('"rounds": 2', '"rounds": -2'), "rounds must be a whole number"),
        (document[: len(document) // 2], "is not a plan of a fleet"),
        (document.replace(plan.id, "../../outside"), "other than letters and digits"),
        (document.replace(plan.created, "yesterday"), "not a time with a time zone"),
        (document.replace(plan.created, plan.created[:19]), "not a time with a time zone"),
        (json.dumps({"schema": 1, "fleet": {**fleet, "cells": []}}), "it has no cells"),
        (json.dumps({"schema": 1, "fleet": {**fleet, "cells": 2 * encode(plan.cells)}}), "twice"),
        (document.replace('"gpus": 0', '"gpus": -4'), "needs -4 GPUs"),
        (document.replace('"rounds": 2', '"rounds": "many"'), "found 'many'"),
        (document.replace('"request": {', '"asked": {'), "the field 'request' is missing"),
        (document.replace('"fleet": {', '"plan": {'), "it has no fields"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=words):
            read_fleet_plan(file)
    with pytest.raises(UsageError, match="cannot be read"):
        read_fleet_plan(tmp_path / "nowhere")
