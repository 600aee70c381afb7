"""The plan of a fleet as a file, and how far a store has measured its cells."""

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
from fp8bench.files import LOCK as LOCK_FILE
from fp8bench.files import Damaged, is_locked, open_file, read_file, seal, unseal, write_whole
from fp8bench.model import Run, Status
from fp8bench.model.codec import Malformed, decode, encode
from fp8bench.model.run import Attempt, CellState, CellStatus, FleetPlan
from fp8bench.store.kept_lines import Log
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_head, load_sheet, missing_groups

_SCHEMA = 1
_ID = re.compile(r"[A-Za-z0-9]+")
# A damaged cell is measured again, which repairs it.
_OPEN = (CellStatus.WAITING, CellStatus.BEGUN, CellStatus.DAMAGED)
# Finds the cell of a run whose header is not valid JSON.
_SAYS_CELL = re.compile(rb'"cell": ?"([A-Za-z0-9]+/\d+)"')
_HEADER_BYTES = 1 << 20
# The output of a cell's process; this many bytes of its end are searched for the reason of a failure.
OUTPUT = "output.txt"
_TAIL = 4000


def write_plan(plan: FleetPlan, path: Path) -> None:
    write_whole(path, json.dumps(seal({"schema": _SCHEMA, "fleet": encode(plan)}), indent=1) + "\n")


def read_plan(path: Path) -> FleetPlan:
    """Reads a plan. Raises UsageError if the file is not one."""
    try:
        content = json.loads(read_file(path))
    except OSError as error:
        raise UsageError(f"the plan {path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise _no_plan(path, f"it is not JSON ({error})") from None
    if not isinstance(content, dict) or not {"schema", "fleet"} <= content.keys():
        raise _no_plan(path, "it has no fields 'schema' and 'fleet'")
    if content["schema"] != _SCHEMA:
        raise UsageError(
            f"{path} is a plan of schema {content['schema']!r:.40}; this fp8bench reads {_SCHEMA}. Write it again with "
            "this version."
        )
    try:
        plan = decode(FleetPlan, unseal(content)["fleet"])
    except Damaged as error:
        raise _no_plan(path, f"{error}; a plan that was changed on purpose has no line 'sum'") from None
    except Malformed as error:
        raise _no_plan(path, str(error)) from None
    wrong = _what_is_wrong(plan)
    if wrong:
        raise _no_plan(path, wrong)
    return plan


def _no_plan(path: Path, reason: str) -> UsageError:
    reason = reason.removesuffix(".")
    return UsageError(f"{path} is no plan of a fleet: {reason}. `suite NAME --dry-run --write-plan FILE` writes one.")


def _what_is_wrong(plan: FleetPlan) -> str:
    """Returns what is wrong with a plan that somebody may have edited; '' if nothing is."""
    if not _ID.fullmatch(plan.id):
        return f"its id {plan.id!r:.40} is not of letters and digits"
    try:
        aware = datetime.fromisoformat(plan.created).tzinfo is not None
    except ValueError:
        aware = False
    if not aware:
        return f"it was created at {plan.created!r:.40}, which is no moment with a time zone"
    few = next((cell.gpus for cell in plan.cells if cell.gpus < 0), 0)
    if few:
        return f"a cell needs {few} GPUs, expected 0 or more"
    counts = Counter(name for cell in plan.cells for name in {cell.setting, *cell.cases})
    twice = next((name for name, count in counts.items() if count > 1), "")
    if twice:
        return f"it names {twice:.200} twice, which would be measured twice and counted once"
    return "" if plan.cells else "it has no cells"


def check_cell(plan: FleetPlan, number: int) -> None:
    """Raises UsageError where the plan has no such cell."""
    if not 0 <= number < len(plan.cells):
        raise UsageError(f"cell {number} is not one of 0 to {len(plan.cells) - 1} of the plan {plan.id}.")


def folder_of(plan: FleetPlan, number: int, store: Path) -> Path:
    """Returns the folder of a cell's lock and of its worker's output."""
    return store / "cells" / plan.name_of(number).replace("/", "-")


def runs_of(plan: FleetPlan, store: Path) -> Iterator[tuple[int, Run]]:
    """Yields the headers of the runs of the plan's cells, newest first, with the cell's number."""
    return ((number, head) for number, head in _files_of(plan, store) if isinstance(head, Run))


def _files_of(plan: FleetPlan, store: Path) -> Iterator[tuple[int, Run | str]]:
    """Like runs_of, and for each file whose run was of a cell and cannot be read, the reason."""
    for path in run_files(store):
        head: Run | str
        try:
            head = load_head(path)
            if not head.started:
                raise StoreError(f"{path}: {head.troubles[0]}")
            number = number_of(plan, head.cell)
        except (StoreError, RunNotFound) as error:
            head, number = str(error), number_of(plan, _cell_in_header(path))
        if number is not None:
            yield number, head


def _cell_in_header(path: Path) -> str:
    try:
        with open_file(path) as file:
            match = _SAYS_CELL.search(file.readline(_HEADER_BYTES))
    except OSError:
        return ""
    return match[1].decode() if match else ""


def number_of(plan: FleetPlan, cell: str) -> int | None:
    """Returns the number of a cell by its name; None if this plan does not have it."""
    name, _, number = cell.rpartition("/")
    is_here = name == plan.id and number.isdecimal() and int(number) < len(plan.cells)
    return int(number) if is_here else None


def keep_plan(plan: FleetPlan, store: Path) -> None:
    """Writes a plan into the store of its runs. Raises OSError, and StoreError if a different plan has its id."""
    path = store / "plans" / f"{plan.id}.json"
    if not path.exists():
        write_plan(plan, path)
    elif read_plan(path) != plan:
        raise StoreError(f"{path} is another plan of the same id. Move one of them away.")


def plans_of(store: Path) -> tuple[FleetPlan, ...]:
    """Returns the plans of a store, oldest first. Raises UsageError for a broken one."""
    plans = (read_plan(path) for path in sorted((store / "plans").glob("*.json")))
    return tuple(sorted(plans, key=lambda plan: plan.created))


def is_whole(run: Run) -> bool:
    return run.finished and not missing_groups(run)


def add_attempt(plan: FleetPlan, number: int, store: Path, attempt: Attempt) -> None:
    _attempts(folder_of(plan, number, store)).append([attempt])


def should_run(state: CellState, retry: bool) -> bool:
    return state.status in _OPEN or (retry and state.status is CellStatus.FAILED)


def states_of(plan: FleetPlan, store: Path, but: Collection[int] = ()) -> tuple[CellState, ...]:
    """Returns the state of every cell, as the store has it now, except for those in `but`."""
    runs: dict[int, list[Run | str]] = {}
    for number, head in _files_of(plan, store):
        runs.setdefault(number, []).append(head)
    numbers = (number for number in range(len(plan.cells)) if number not in but)
    return tuple(_state(plan, number, store, runs.get(number, [])) for number in numbers)


def _state(plan: FleetPlan, number: int, store: Path, heads: list[Run | str]) -> CellState:
    # 1. The newest run of the cell, a complete one if there is any.
    folder = folder_of(plan, number, store)
    loaded, damage = _load_runs(heads)
    complete = next((run for run in loaded if is_whole(run)), None)
    newest = complete or (loaded[0] if loaded else None)
    attempts, damage_of_folder = _attempts_of(folder)
    state = CellState(
        number,
        plan.cells[number],
        CellStatus.BEGUN if newest is not None else CellStatus.WAITING,
        newest.id if newest else "",
        str(newest.environment.get("machine") or "") if newest else "",
        "",
        attempts,
        tuple(Counter(record.status.value for record in newest.records).items()) if newest else (),
        (*damage, *damage_of_folder),
    )
    if complete is not None:
        failed = [record.case.mode for record in complete.records if record.status is Status.FAILED]
        return replace(state, status=CellStatus.DONE, why=f"failed: {', '.join(failed)}" if failed else "")
    # 2. Without a complete run, the lock, damage and the last attempt decide.
    with contextlib.suppress(OSError):
        if is_locked(folder / LOCK_FILE):
            return replace(state, status=CellStatus.RUNNING)
    if state.damage:
        return replace(state, status=CellStatus.DAMAGED)
    if attempts and attempts[-1].code:
        code = attempts[-1].code
        how = f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"
        reason = _last_words(folder) or how
        return replace(state, status=CellStatus.FAILED, why=reason)
    return state


def _load_runs(heads: Iterable[Run | str]) -> tuple[list[Run], list[str]]:
    """Returns runs, newest first, and what is damaged in their files; a line cut short by a kill does not count."""
    loaded = []
    damage = []
    for head in heads:
        if isinstance(head, str):
            damage.append(head)
            continue
        try:
            run, sheet = load_sheet(Path(head.path))
        except (StoreError, RunNotFound) as error:
            damage.append(str(error))
            continue
        loaded.append(run)
        if sheet.lost or sheet.troubles:
            damage += [f"{head.path}: {trouble}" for trouble in run.troubles]
    return loaded, damage


def _attempts_of(folder: Path) -> tuple[tuple[Attempt, ...], list[str]]:
    """Returns the attempts at a cell, and what is damaged in its folder."""
    log = _attempts(folder)
    if folder.exists() and not folder.is_dir():
        return (), [f"{folder} is no folder"]
    wrong = [f"{path} is no file" for name in (OUTPUT, LOCK_FILE) if (path := folder / name).is_dir()]
    try:
        attempts, troubles = log.lines()
    except StoreError as error:
        return (), [*wrong, str(error).rstrip(".")]
    return tuple(attempts), [*wrong, *(f"{log.path}: {trouble}" for trouble in troubles)]


def _attempts(folder: Path) -> Log[Attempt]:
    return Log(folder / "attempts.jsonl", {"": Attempt}, "attempt")


def _last_words(folder: Path) -> str:
    """Returns the last message of fp8bench in what the process printed, else its last line."""
    try:
        with open_file(folder / OUTPUT, most=None) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            text = file.read(_TAIL).decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("fp8bench: ")]
    return (ours or lines or [""])[-1].removeprefix("fp8bench: ")[:200]
