"""How long a fleet of workers takes for a plan, beside the time of its cells.

`python -m suites.fleet --cells 40 --workers 2 --json PATH`: a plan of so many products is handed to the local executor
(`fleet submit --on local --wait`). Its makespan is held against the sum of the cells' times over the workers: at most
`LIMIT` times that. A cell's time is that of its process, from start to end, and has to be at least `LEAST_SECONDS`.
What a cell costs beside measuring is said too: what its process does before its first and behind its last group, and
what lies between two cells. The exit code is 1 where a limit is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from fp8bench import __version__
from fp8bench.errors import EXIT_FAILED, EXIT_OK
from fp8bench.model.run import CellStatus
from fp8bench.store.fleet_plans import read_plan, runs_of, states_of
from suites.kill import ROOT, commit

LIMIT = 1.3
LEAST_SECONDS = 5.0
# Rows of the first cell's product; each further cell has one more.
_ROWS = 768


@dataclass(frozen=True)
class Timed:
    """A cell: seconds of its process, and those of them in which its run was open."""

    seconds: float
    measuring: float


def fp8bench(words: Sequence[str], folder: Path) -> float:
    """Seconds of a command; raises SystemExit where it cannot be done. That a cell is not done is seen in the store."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    begun = time.monotonic()
    command = [sys.executable, "-m", "fp8bench", *words]
    done = subprocess.run(command, cwd=folder, env=environment, check=False, stdout=subprocess.DEVNULL)
    if done.returncode not in (EXIT_OK, EXIT_FAILED):
        raise SystemExit(f"`fp8bench {' '.join(words)}` ended with {done.returncode}")
    return time.monotonic() - begun


def fleet(cells: int, workers: int, rounds: int, folder: Path) -> tuple[float, list[Timed]]:
    """The makespan, and its cells. Raises SystemExit where one of them is not done in one attempt."""
    shapes = ",".join(f"{_ROWS + number}x1024x1024" for number in range(cells))
    plan, store = folder / "plan.json", folder / "store"
    words = ["--dtypes", "fp32,bf16", "--set", f"shape={shapes}", "--rounds", str(rounds), "--no-energy"]
    fp8bench(["suite", "gemm", *words, "--dry-run", "--write-plan", str(plan)], folder)
    handed = ["--on", "local", "--workers", str(workers), "--wait"]
    makespan = fp8bench(["fleet", "submit", str(plan), "--store", str(store), *handed], folder)
    read = read_plan(plan)
    open_for = {}
    for number, run in runs_of(read, store):
        open_for[number] = Path(run.path).stat().st_mtime - datetime.fromisoformat(run.started).timestamp()
    timed = []
    for state in states_of(read, store):
        if state.status is not CellStatus.DONE or len(state.attempts) != 1:
            raise SystemExit(f"cell {state.number} is {state.status} after {len(state.attempts)} attempts: {state.why}")
        timed.append(Timed(state.attempts[0].seconds, open_for[state.number]))
    return makespan, timed


def report(makespan: float, timed: Sequence[Timed], workers: int, load: Sequence[float]) -> dict[str, object]:
    """What came of it, with what it was made under; loads are those before and after."""
    total, measuring = sum(one.seconds for one in timed), sum(one.measuring for one in timed)
    return {
        "cells": len(timed), "workers": workers, "makespan_s": makespan, "sum_of_cells_s": total,
        "ratio": makespan * workers / total, "limit": LIMIT, "ratio_to_measuring_alone": makespan * workers / measuring,
        "overhead_a_cell_s": {
            "between_cells": (makespan * workers - total) / len(timed),
            "in_its_process": median(one.seconds - one.measuring for one in timed),
        },
        "shortest_cell_s": min(one.seconds for one in timed), "each": [asdict(one) for one in timed],
        "load_before_and_after": list(load), "cores": os.cpu_count(), "fp8bench": __version__, "commit": commit(),
        "python": platform.python_version(), "system": platform.platform(),
    }  # fmt: skip


def said(found: dict[str, object]) -> str:
    """In a few lines, without the single cells."""
    kept = {name: value for name, value in found.items() if name != "each"}
    return json.dumps(json.loads(json.dumps(kept), parse_float=lambda text: round(float(text), 3)), indent=1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m suites.fleet", description="how long a fleet takes for a plan")
    parser.add_argument("--cells", type=int, default=40, metavar="N")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    words = "of each cell: so many that it takes 5 s and more"
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help=words)
    parser.add_argument("--json", type=Path, metavar="PATH")
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="fp8bench-fleet-") as folder:
        makespan, timed = fleet(arguments.cells, arguments.workers, arguments.rounds, Path(folder))
    found = report(makespan, timed, arguments.workers, (before, os.getloadavg()[0]))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(said(found))
    short = [one for one in timed if one.seconds < LEAST_SECONDS]
    if short:
        print(f"{len(short)} cells took less than {LEAST_SECONDS:.0f} s: give more --rounds", file=sys.stderr)
    return 1 if short or makespan * arguments.workers > LIMIT * sum(one.seconds for one in timed) else 0


if __name__ == "__main__":
    sys.exit(main())
