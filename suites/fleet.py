"""How long a fleet's workers take for a plan, beside the time of its cells: `python -m suites.fleet --json PATH`.

A plan of so many products is handed to the local executor (`fleet submit --on local --wait`). Its makespan may be at
most `LIMIT` times the sum of the cells' times over the number of workers. A cell's time is that of its process, and has
to be at least `LEAST_SECONDS`. What a cell costs beside measuring is reported as well: in its process before the first
and after the last group, and between two cells. The exit code is 1 where a limit is exceeded.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from fp8bench.errors import EXIT_FAILED, EXIT_OK
from fp8bench.model.run import CellStatus
from fp8bench.store.fleet_plans import read_plan, runs_of, states_of
from suites.trials import FP8BENCH, Row, conditions, options, ran, say, scratch, tell

LIMIT = 1.3
LEAST_SECONDS = 5.0
# Rows of the first cell's product; each further cell has one row more.
_ROWS = 768


@dataclass(frozen=True)
class Timed:
    """Seconds of a cell's process, and those in which its run was open."""

    seconds: float
    measuring: float


def fleet(cells: int, workers: int, rounds: int, folder: Path) -> tuple[float, list[Timed]]:
    """Returns the makespan and the cells. Raises SystemExit if a cell is not done in one attempt."""
    shapes = ",".join(f"{_ROWS + number}x1024x1024" for number in range(cells))
    plan, store = folder / "plan.json", folder / "store"
    words = ["--dtypes", "fp32,bf16", "--set", f"shape={shapes}", "--rounds", str(rounds), "--no-energy"]
    ran([*FP8BENCH, "suite", "gemm", *words, "--dry-run", "--write-plan", str(plan)], folder)
    handed = ["--store", str(store), "--on", "local", "--workers", str(workers), "--wait"]
    begun = time.monotonic()
    # Whether all cells are done is read from the store below.
    ran([*FP8BENCH, "fleet", "submit", str(plan), *handed], folder, (EXIT_OK, EXIT_FAILED))
    makespan = time.monotonic() - begun
    read = read_plan(plan)
    open_for = {
        number: Path(run.path).stat().st_mtime - datetime.fromisoformat(run.started).timestamp()
        for number, run in runs_of(read, store)
    }
    timed = []
    for state in states_of(read, store):
        if state.status is not CellStatus.DONE or len(state.attempts) != 1:
            raise SystemExit(f"cell {state.number} is {state.status} after {len(state.attempts)} attempts: {state.why}")
        timed.append(Timed(state.attempts[0].seconds, open_for[state.number]))
    return makespan, timed


def report(makespan: float, timed: Sequence[Timed], workers: int) -> Row:
    total, measuring = sum(cell.seconds for cell in timed), sum(cell.measuring for cell in timed)
    return {
        "cells": len(timed), "workers": workers, "makespan_s": makespan, "sum_of_cells_s": total,
        "ratio": makespan * workers / total, "limit": LIMIT, "ratio_to_measuring_alone": makespan * workers / measuring,
        "overhead_a_cell_s": {
            "between_cells": (makespan * workers - total) / len(timed),
            "in_its_process": median(cell.seconds - cell.measuring for cell in timed),
        },
        "shortest_cell_s": min(cell.seconds for cell in timed),
    }  # fmt: skip


def main() -> int:
    asked = options(
        __doc__, cells=(40, "of the plan"), workers=(2, "at the same time"),
        rounds=(40, "of each cell: so many that it takes 5 s and more"), json=(Path, "write all of it there"),
    )  # fmt: skip
    before = os.getloadavg()[0]
    with scratch() as folder:
        makespan, timed = fleet(asked.cells, asked.workers, asked.rounds, folder)
    each = {"each": [asdict(cell) for cell in timed]}
    result = {**report(makespan, timed, asked.workers), "load_before": before, **conditions(), **each}
    tell(result, asked.json)
    if result["shortest_cell_s"] < LEAST_SECONDS:
        say(f"a cell took less than {LEAST_SECONDS:.0f} s: give more --rounds")
    return int(result["shortest_cell_s"] < LEAST_SECONDS or result["ratio"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
