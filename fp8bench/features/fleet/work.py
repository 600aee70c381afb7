"""A worker of a fleet: takes the cells that wait, one after the other, each in a process of its own."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

from fp8bench.errors import StoreError, UsageError
from fp8bench.features.fleet.engines import ended, tied
from fp8bench.files import keeping
from fp8bench.jobs.cells import alone
from fp8bench.model.run import Attempt, CellState, CellStatus, FleetPlan
from fp8bench.pipeline import now
from fp8bench.store.fleet_plans import OUTPUT, folder_of, note, states_of, wanted
from fp8bench.store.runs.run_file import check_store

# A claim is a lock beside the one that the process of a cell takes.
_CLAIM = "claim"


def work(
    plan: FleetPlan,
    file: Path,
    store: Path,
    retry: bool,
    began: Callable[[CellState], None],
    only: int | None = None,
) -> tuple[dict[int, int], dict[int, str]]:
    """The cells that this worker had measured with their exit codes, and those that it could not take, with the reason.

    It ends where none waits that it has not tried. Failed ones are tried again where `retry` says so. `began` is told
    of each as it begins. `only` that cell is taken. Raises StoreError where nothing can be kept in the store.
    """
    check_store(store)
    done: dict[int, int] = {}
    left: dict[int, str] = {}
    whole: set[int] = set()
    while (state := _next(plan, store, retry, {*done, *left}, only, whole)) is not None:
        try:
            with alone(folder_of(plan, state.number, store) / _CLAIM, f"cell {plan.name_of(state.number)}"):
                began(state)
                done[state.number] = _measure(plan, file, state.number, store)
        except (UsageError, StoreError) as error:
            left[state.number] = str(error)  # another worker was faster, as a rule; else its folder takes nothing
    return done, left


def _next(
    plan: FleetPlan, store: Path, retry: bool, tried: Collection[int], only: int | None, whole: set[int]
) -> CellState | None:
    """`whole` are cells that were seen to be done, which stay so: reading all their runs for each cell takes long."""
    states = states_of(plan, store, whole)
    whole.update(state.number for state in states if state.status is CellStatus.DONE)
    waiting = (state for state in states if wanted(state, retry) and state.number not in tried)
    return next((state for state in waiting if only is None or state.number == only), None)


def _measure(plan: FleetPlan, file: Path, number: int, store: Path) -> int:
    """Its exit code. An interrupt of this worker is one of the cell, which keeps what it has."""
    folder, started = folder_of(plan, number, store), now()
    words = ["suite", "--plan", str(file), "--cell", str(number), "--store", str(store), "--no-report"]
    begin = time.monotonic()
    # Sentences of a terminal's width would be cut where they are quoted.
    unfolded = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with keeping(folder / OUTPUT, "Move it away."), (folder / OUTPUT).open("ab") as output:
        code = ended(tied(words, output, unfolded))
    note(plan, number, store, Attempt(socket.gethostname(), os.getpid(), started, time.monotonic() - begin, code))
    return code
