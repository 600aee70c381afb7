"""A worker of a fleet: takes the cells that wait, one after the other, each in a process of its own."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.jobs.fleet.cells import alone
from fp8bench.jobs.fleet.tied import ended, tied
from fp8bench.model.fleet import Attempt, CellState, FleetPlan
from fp8bench.pipeline import now
from fp8bench.store.fleet_plans import OUTPUT, folder_of, note, states_of, wanted

# A claim is a lock beside the one that the process of a cell takes.
_CLAIM = "claim"


def work(
    plan: FleetPlan,
    file: Path,
    store: Path,
    retry: bool,
    began: Callable[[CellState], None],
    only: int | None = None,
) -> tuple[tuple[int, int], ...]:
    """The cells that this worker had measured, and how each ended. It ends where none waits that it has not tried.

    Failed ones are tried again where `retry` says so. `began` is told of each as it begins. `only` that cell is taken.
    """
    tried: dict[int, int] = {}
    while (state := _next(plan, store, retry, tried, only)) is not None:
        try:
            with alone(folder_of(plan, state.number, store) / _CLAIM, f"cell {plan.name_of(state.number)}"):
                began(state)
                tried[state.number] = _measure(plan, file, state.number, store)
        except UsageError:
            tried[state.number] = -1  # another worker was faster
    return tuple((number, code) for number, code in tried.items() if code != -1)


def _next(plan: FleetPlan, store: Path, retry: bool, tried: Collection[int], only: int | None) -> CellState | None:
    waiting = (one for one in states_of(plan, store) if wanted(one, retry) and one.number not in tried)
    return next((one for one in waiting if only is None or one.number == only), None)


def _measure(plan: FleetPlan, file: Path, number: int, store: Path) -> int:
    """Its exit code. An interrupt of this worker is one of the cell, which keeps what it has."""
    folder, started = folder_of(plan, number, store), now()
    words = [sys.executable, "-m", "fp8bench", "suite", "--plan", str(file), "--cell", str(number)]
    words += ["--store", str(store), "--no-report"]
    begin = time.monotonic()
    with (folder / OUTPUT).open("ab") as output:
        code = ended(tied(words, output))
    note(plan, number, store, Attempt(socket.gethostname(), os.getpid(), started, time.monotonic() - begin, code))
    return code
