"""Reads and writes the plan of a fleet: many machines that measure one request together. A cell is the part of a plan
that one process measures. This module also finds which cells of a plan are measured in a store.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from fp8bench.errors import RunNotFound, StoreError, UsageError
from fp8bench.files import (
    LOCK_FILE_NAME,
    DamagedFileError,
    add_checksum,
    is_locked,
    open_file,
    parse_json,
    read_file,
    remove_checksum,
    write_whole,
)
from fp8bench.model import Run, Status
from fp8bench.model.codec import MalformedValueError, decode, encode
from fp8bench.model.run import CellAttempt, CellState, CellStatus, FleetPlan
from fp8bench.store.kept_lines import Log
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import find_incomplete_groups, load_header, load_run_with_lines

_PLAN_SCHEMA = 1
_PLAN_ID_PATTERN = re.compile(r"[A-Za-z0-9]+")
# Cells in these states still have to be measured. Damaged cells do, because a new measurement repairs them.
_UNFINISHED_CELL_STATES = (CellStatus.WAITING, CellStatus.BEGUN, CellStatus.DAMAGED)
# Matches the name of a run's cell, even in a header that is not valid JSON.
_CELL_NAME_PATTERN = re.compile(rb'"cell": ?"([A-Za-z0-9]+/\d+)"')
_MAX_HEADER_BYTES = 1 << 20
# The file with the output of a cell's process. Its last bytes are searched for the reason of a failure.
OUTPUT_FILE = "output.txt"
_OUTPUT_TAIL_BYTES = 4000


def write_plan(plan: FleetPlan, path: Path) -> None:
    write_whole(path, json.dumps(add_checksum({"schema": _PLAN_SCHEMA, "fleet": encode(plan)}), indent=1) + "\n")


def read_fleet_plan(path: Path) -> FleetPlan:
    """Reads a plan. Raises UsageError if the file is not a plan."""
    # 1. Read the file.
    try:
        content = parse_json(read_file(path))
    except OSError as error:
        raise UsageError(f"the plan {path} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise _make_invalid_plan_error(path, f"it is not JSON ({error})") from None
    # 2. Check the version first, because other versions may have different fields.
    if not isinstance(content, dict) or not {"schema", "fleet"} <= content.keys():
        raise _make_invalid_plan_error(path, "it has no fields 'schema' and 'fleet'")
    if content["schema"] != _PLAN_SCHEMA:
        raise UsageError(
            f"{path} is a plan of schema {content['schema']!r:.40}; this fp8bench reads {_PLAN_SCHEMA}. Write it again "
            "with this version."
        )
    # 3. Decode the plan. A person may have edited it, so check its checksum and its values.
    try:
        fleet_plan = decode(FleetPlan, remove_checksum(content)["fleet"])
    except DamagedFileError as error:
        raise _make_invalid_plan_error(
            path, f"{error}; delete the line 'sum' if you changed the plan on purpose"
        ) from None
    except MalformedValueError as error:
        raise _make_invalid_plan_error(path, str(error)) from None
    plan_fault = _find_fleet_plan_fault(fleet_plan)
    if plan_fault:
        raise _make_invalid_plan_error(path, plan_fault)
    return fleet_plan


def _make_invalid_plan_error(path: Path, reason: str) -> UsageError:
    reason = reason.removesuffix(".")
    return UsageError(
        f"{path} is not a plan of a fleet: {reason}. `suite NAME --dry-run --write-plan FILE` writes one."
    )


def _find_fleet_plan_fault(plan: FleetPlan) -> str:
    """Returns what is wrong with the values of a plan, or '' if the plan is valid."""
    if not _PLAN_ID_PATTERN.fullmatch(plan.id):
        return f"its id {plan.id!r:.40} has characters other than letters and digits"
    try:
        has_time_zone = datetime.fromisoformat(plan.created).tzinfo is not None
    except ValueError:
        has_time_zone = False
    if not has_time_zone:
        return f"it was created at {plan.created!r:.40}, which is not a time with a time zone"
    invalid_gpus = next((cell.gpus for cell in plan.cells if cell.gpus < 0), 0)
    if invalid_gpus:
        return f"a cell needs {invalid_gpus} GPUs, expected 0 or more"
    # The setting of a cell is the name of its group. Neither a group nor a case may be in two cells.
    counts = Counter(name for cell in plan.cells for name in {cell.setting, *cell.cases})
    name_in_several_cells = next((name for name, count in counts.items() if count > 1), "")
    if name_in_several_cells:
        return f"it names {name_in_several_cells:.200} twice, so it would be measured twice and counted once"
    return "" if plan.cells else "it has no cells"


def check_cell(plan: FleetPlan, cell_number: int) -> None:
    """Raises UsageError if the plan has no cell with this number."""
    if not 0 <= cell_number < len(plan.cells):
        raise UsageError(f"cell {cell_number} is not among the cells 0 to {len(plan.cells) - 1} of the plan {plan.id}.")


def get_cell_folder(plan: FleetPlan, cell_number: int, store: Path) -> Path:
    """Returns the folder of a cell, with the lock of the cell and the output of its worker."""
    return store / "cells" / plan.name_of(cell_number).replace("/", "-")


def iterate_plan_runs(plan: FleetPlan, store: Path) -> Iterator[tuple[int, Run]]:
    """Yields (cell number, header) of each readable run of a plan, newest run first."""
    return (
        (cell_number, run_header_or_reason)
        for cell_number, run_header_or_reason in _iterate_plan_run_files(plan, store)
        if isinstance(run_header_or_reason, Run)
    )


def _iterate_plan_run_files(plan: FleetPlan, store: Path) -> Iterator[tuple[int, Run | str]]:
    """Yields (cell number, header) of each run of a plan, newest run first. For an unreadable run, the header is
    replaced by the reason.
    """
    for path in run_files(store):
        run_header_or_reason: Run | str
        try:
            run_header_or_reason = load_header(path)
        except (StoreError, RunNotFound) as error:
            run_header_or_reason = str(error)
        # If the header of a file is lost, its run has no start time, and no name of a cell either.
        if isinstance(run_header_or_reason, Run) and not run_header_or_reason.started:
            run_header_or_reason = f"{path}: {run_header_or_reason.troubles[0]}"
        cell_name = run_header_or_reason.cell if isinstance(run_header_or_reason, Run) else _search_cell_name(path)
        cell_number = find_cell_number(plan, cell_name)
        if cell_number is not None:
            yield cell_number, run_header_or_reason


def _search_cell_name(path: Path) -> str:
    try:
        with open_file(path) as file:
            match = _CELL_NAME_PATTERN.search(file.readline(_MAX_HEADER_BYTES))
    except OSError:
        return ""
    return match[1].decode() if match else ""


def find_cell_number(plan: FleetPlan, cell: str) -> int | None:
    """Returns the number of the cell with this name, or None if the plan does not have it."""
    name, _, cell_number = cell.rpartition("/")
    is_in_plan = name == plan.id and cell_number.isdecimal() and int(cell_number) < len(plan.cells)
    return int(cell_number) if is_in_plan else None


def store_plan(plan: FleetPlan, store: Path) -> None:
    """Writes a plan into the store of its runs. Raises OSError, or StoreError if a different plan has the same id."""
    path = store / "plans" / f"{plan.id}.json"
    if not path.exists():
        write_plan(plan, path)
    elif read_fleet_plan(path) != plan:
        raise StoreError(f"{path} is a different plan with the same id. Move one of them away.")


def load_plans(store: Path) -> tuple[FleetPlan, ...]:
    """Returns the plans of a store, oldest first. Raises UsageError for a broken plan."""
    fleet_plans = (read_fleet_plan(path) for path in sorted((store / "plans").glob("*.json")))
    return tuple(sorted(fleet_plans, key=lambda plan: plan.created))


def is_run_complete(run: Run) -> bool:
    return run.finished and not find_incomplete_groups(run)


def add_attempt(plan: FleetPlan, cell_number: int, store: Path, attempt: CellAttempt) -> None:
    _open_cell_attempt_log(get_cell_folder(plan, cell_number, store)).append([attempt])


def should_run_cell(state: CellState, retry: bool) -> bool:
    return state.status in _UNFINISHED_CELL_STATES or (retry and state.status is CellStatus.FAILED)


def compute_cell_states(plan: FleetPlan, store: Path, except_cells: Collection[int] = ()) -> tuple[CellState, ...]:
    """Returns the current state of the plan's cells in this store, without the cells whose numbers are in
    `except_cells`.
    """
    runs: dict[int, list[Run | str]] = {}
    for cell_number, run_header_or_reason in _iterate_plan_run_files(plan, store):
        runs.setdefault(cell_number, []).append(run_header_or_reason)
    included_cell_numbers = (cell_number for cell_number in range(len(plan.cells)) if cell_number not in except_cells)
    return tuple(
        _compute_cell_state(plan, cell_number, store, runs.get(cell_number, []))
        for cell_number in included_cell_numbers
    )


def _compute_cell_state(
    plan: FleetPlan, cell_number: int, store: Path, headers_or_reasons: list[Run | str]
) -> CellState:
    # 1. Find the newest run of the cell, or its newest complete run if it has one.
    folder = get_cell_folder(plan, cell_number, store)
    loaded_runs, damage_texts = _load_runs_with_damage(headers_or_reasons)
    newest_complete_run = next((run for run in loaded_runs if is_run_complete(run)), None)
    newest_run = newest_complete_run or (loaded_runs[0] if loaded_runs else None)
    attempts, damage_of_folder = _load_attempts(folder)
    damage_texts += damage_of_folder
    state = CellState(
        cell_number, plan.cells[cell_number], CellStatus.WAITING, attempts=attempts, damage=tuple(damage_texts)
    )
    if newest_run is not None:
        machine = str(newest_run.environment.get("machine") or "")
        cases = Counter(record.status.value for record in newest_run.records)
        state = replace(state, status=CellStatus.BEGUN, run=newest_run.id, machine=machine, cases=tuple(cases.items()))
    # A cell with a complete run is done, even if cases of the run failed. Then `why` names the modes of these cases.
    if newest_complete_run is not None:
        failed_modes = [record.case.mode for record in newest_complete_run.records if record.status is Status.FAILED]
        return replace(state, status=CellStatus.DONE, why=f"failed: {', '.join(failed_modes)}" if failed_modes else "")
    # 2. Without a complete run, the cell's status follows from its lock, its damaged files and its last attempt.
    with contextlib.suppress(OSError):
        if is_locked(folder / LOCK_FILE_NAME):
            return replace(state, status=CellStatus.RUNNING)
    if state.damage:
        return replace(state, status=CellStatus.DAMAGED)
    if attempts and attempts[-1].code:
        exit_code = attempts[-1].code
        exit_description = f"was ended by signal {-exit_code}" if exit_code < 0 else f"exited with status {exit_code}"
        reason = _read_last_message(folder) or exit_description
        return replace(state, status=CellStatus.FAILED, why=reason)
    return state


def _load_runs_with_damage(headers_or_reasons: Iterable[Run | str]) -> tuple[list[Run], list[str]]:
    """Returns the runs with these headers, including their records, and descriptions of damage in the run files. A
    last line that is cut off, because the process was killed, does not count as damage.
    """
    loaded_runs = []
    run_damage_texts = []
    for run_header_or_reason in headers_or_reasons:
        if isinstance(run_header_or_reason, str):
            run_damage_texts.append(run_header_or_reason)
            continue
        try:
            run, file_lines = load_run_with_lines(Path(run_header_or_reason.path))
        except (StoreError, RunNotFound) as error:
            run_damage_texts.append(str(error))
            continue
        loaded_runs.append(run)
        # `run.troubles` also describes broken lines, but a broken line alone may be a last line that is cut off.
        if file_lines.has_lost_line or file_lines.troubles:
            run_damage_texts += [f"{run_header_or_reason.path}: {trouble}" for trouble in run.troubles]
    return loaded_runs, run_damage_texts


def _load_attempts(folder: Path) -> tuple[tuple[CellAttempt, ...], list[str]]:
    """Returns the attempts to measure a cell, and descriptions of damage in its folder."""
    log = _open_cell_attempt_log(folder)
    if folder.exists() and not folder.is_dir():
        return (), [f"{folder} is not a folder"]
    folder_faults = [
        f"{path} is not a file" for name in (OUTPUT_FILE, LOCK_FILE_NAME) if (path := folder / name).is_dir()
    ]
    try:
        attempts, troubles = log.lines()
    except StoreError as error:
        return (), [*folder_faults, str(error).rstrip(".")]
    return tuple(attempts), [*folder_faults, *(f"{log.path}: {trouble}" for trouble in troubles)]


def _open_cell_attempt_log(folder: Path) -> Log[CellAttempt]:
    # With the kind '', each line of the log is an attempt itself.
    return Log(folder / "attempts.jsonl", {"": CellAttempt}, "attempt")


def _read_last_message(folder: Path) -> str:
    """Returns the last message of fp8bench in the output of a cell's process, or the last line of the output."""
    try:
        with open_file(folder / OUTPUT_FILE, most=None) as file:  # any size, because only the end is read
            file.seek(max(0, file.seek(0, os.SEEK_END) - _OUTPUT_TAIL_BYTES))
            text = file.read(_OUTPUT_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fp8bench_messages = [line for line in lines if line.startswith("fp8bench: ")]
    return (fp8bench_messages or lines or [""])[-1].removeprefix("fp8bench: ")[:200]
