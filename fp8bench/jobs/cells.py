"""A request cut into cells, and one of them measured: what is done is not done again."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fp8bench import __version__
from fp8bench.errors import StoreError, UsageError
from fp8bench.files import LOCK, locked
from fp8bench.model import DeviceFacts, Plan, Request, Run
from fp8bench.model.run import FleetPlan
from fp8bench.pipeline import execute, now, resume
from fp8bench.plan.cells import cells_of
from fp8bench.protocols import Observer
from fp8bench.store.fleet_plans import check_cell, folder_of, runs_of
from fp8bench.store.runs.run_file import load_run, missing_groups

ORIGIN = "fleet"


def cut(request: Request, plan: Plan, facts: Sequence[DeviceFacts], command: str) -> FleetPlan:
    cells = cells_of(plan, facts)
    if not cells:
        raise UsageError("nothing of this would be measured here, so that there is no cell. See --dry-run.")
    return FleetPlan(secrets.token_hex(4), now(), command, request, cells, __version__)


def measured(plan: FleetPlan, number: int, store: Path, observer: Observer, command: str) -> tuple[bool, Run]:
    """The run of a cell, and whether anything was measured for it now: one that is done is not done again.

    One that was cut off is resumed, where machine and software are the same, and else measured anew.
    """
    check_cell(plan, number)
    name = plan.name_of(number)
    with alone(folder_of(plan, number, store), f"cell {name} into {store}"):
        begun = [head for place, head in runs_of(plan, store) if place == number]
        whole = next((run for head in begun if (run := load_run(Path(head.path))).finished), None)
        if whole is not None and not missing_groups(whole):
            return False, whole
        for head in begun:
            try:
                return resume(Path(head.path), store, observer, command)
            except UsageError:
                continue  # it was begun elsewhere, or with other software
        return True, execute(plan.request, store, observer, command, ORIGIN, cell=(name, plan.cells[number]))


@contextmanager
def alone(folder: Path, what: str) -> Iterator[None]:
    """Nobody else has the folder's lock; UsageError where another process has it."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder, 0))
        except StoreError:
            if not os.access(folder / LOCK, os.W_OK):
                raise
            raise UsageError(f"another process is measuring {what}, which is left to it") from None
        yield
