"""Counts how many intervals contain the long-run value: `python -m suites.coverage --minutes 60 --out FOLDER`.

Cases are measured again and again by a plain command in a fresh process, while 0 to 8 busy loops run. The true value
of a case is the median of all its other runs. The file rows.jsonl in the folder stores the runs, which must all come
from one processor.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8bench.analysis.findings import findings
from fp8bench.model import Run
from fp8bench.store.reruns import add_rerun_spreads, store_ratios
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run
from fp8bench.units import percent
from suites.trials import FP8BENCH, Row, options, ran, say, scratch

LOADS = (0, 2, 4, 8)
RUNS = 6  # runs of each case at each load
CASES: dict[str, tuple[str, ...]] = {
    "product of 128": ("gemm", "fp32,bf16", "shape=128x128x128", "product=forward"),
    "product of 512": ("gemm", "fp32,bf16", "shape=512x512x512", "product=forward"),
    "cast": ("cast", "bf16,fp16", "shape=512", "scaling=off", "direction=to"),
    "mlp": ("mlp", "fp32,bf16", "tokens=64", "hidden=512", "gated=no"),
    "attention": ("attention", "fp32,bf16", "sequence=128", "part=core"),
    "norm": ("norm_act", "fp32,bf16", "operation=layer_norm"),
    "softmax": ("norm_act", "fp32,bf16", "operation=softmax"),
    "sum": ("accumulate", "fp32,bf16", "micro_batches=4"),
    "optimizer": ("optimizer", "fp32,bf16", "width=256", "fused=yes"),
    "transformer": ("transformer", "fp32,bf16", "size=nano"),
}
# Switches off what takes longer than the times and does not change them.
QUICKER = {"FP8BENCH_TAPE": "off", "FP8BENCH_CEILINGS": "off"}
_SEEN = 0.02
# The code of a busy loop that ends when its parent process ends.
_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
# The table has a line for each value of these properties of rows.
_BY: dict[str, Callable[[Row], str]] = {
    "load": lambda row: str(row["load"]),
    "case": lambda row: str(row["case"]),
    "of": lambda row: "reruns" if row["known"] else "these rounds",
    "all": lambda row: "",
}


class Rows:
    """The rows in a file of a folder, with which an interrupted trial continues."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "rows.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self.all: list[Row] = [json.loads(line) for line in lines]

    def add(self, **row: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.all.append(row)
        say(str(row))

    def of(self, **fields: Any) -> list[Row]:
        """Returns the rows with these values."""
        return [row for row in self.all if all(row.get(name) == value for name, value in fields.items())]


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keeps `count` processes busy during the block."""
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        time.sleep(3 if count else 0)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measured(case: str, load: int, store: Path) -> list[Row]:
    """Runs a case, and returns a row for each ratio: from the rounds of the run alone, and as printed."""
    earlier_files = set(run_files(store))
    began, at_start = time.time(), os.getloadavg()[0]
    suite, dtypes, *axes = CASES[case]
    with busy_loops(load):
        command = [*FP8BENCH, "suite", suite, "--dtypes", dtypes, "--store", str(store)]
        ran([*command, *(word for axis in axes for word in ("--set", axis))], more=QUICKER)
    (path,) = set(run_files(store)) - earlier_files
    return rows_of(load_run(path), {"case": case, "load": load, "began": began, "loadavg": at_start})


def rows_of(run: Run, facts: Row) -> list[Row]:
    alone = findings(replace(run, records=tuple(replace(record, reruns=None) for record in run.records)))
    rows = []
    for record in run.records:
        finding, rounds = findings(run)[record.case.id], alone[record.case.id]
        if finding.ratio is not None and rounds.ratio is not None:
            rows.append(
                facts
                | {
                    "run": run.id,
                    "of": record.case.id,
                    "verdict": finding.verdict.value,
                    "rounds_verdict": rounds.verdict.value,
                    "level": finding.ratio.level,
                    "point": finding.ratio.point,
                    "low": finding.ratio.low,
                    "high": finding.ratio.high,
                    "rounds_low": rounds.ratio.low,
                    "rounds_high": rounds.ratio.high,
                    "known": record.reruns.runs if record.reruns is not None else 0,
                }
            )
    return rows


def measure(folder: Path, minutes: float) -> None:
    """Measures what is missing, all cases at each load in turn, until the minutes have passed."""
    rows, until = Rows(folder), time.monotonic() + 60 * minutes
    for turn in range(RUNS):
        for load in LOADS:
            for case in CASES:
                if len(rows.of(case=case, load=load)) <= turn and time.monotonic() <= until:
                    for row in measured(case, load, folder / "store"):
                        rows.add(**row)


def judged_again(folder: Path) -> list[Row]:
    """Judges the stored samples with this version of the code, in the order in which they were measured."""
    names = ("case", "load", "began", "loadavg")
    facts = {row["run"]: {name: row[name] for name in names} for row in Rows(folder).all}
    runs = sorted((load_run(path) for path in run_files(folder / "store")), key=lambda run: run.started)
    rows = []
    with scratch() as learned:
        for run in runs:
            if run.id in facts:
                records = add_rerun_spreads(run.records, run, learned)
                rows += rows_of(replace(run, records=records), facts[run.id])
                store_ratios(run.records, run, learned)
    return rows


def table_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of a table: the share of intervals that contain the median of other runs, and the number of
    wrong verdicts.
    """
    heads = ("runs", "rounds alone", "as printed", "half-width", "no interval", "wrong")
    yield f"{'':20}" + "".join(f"{head:>14}" for head in heads)
    for name, of in _BY.items():
        for value in dict.fromkeys(map(of, rows)):
            some = [row for row in rows if of(row) == value]
            judged = [row for row in some if row["level"]]
            if judged:
                alone = statistics.fmean(_holds(row, rows, "rounds_") for row in judged)
                printed = statistics.fmean(_holds(row, rows, "") for row in judged)
                width = statistics.median(math.log(row["high"] / row["low"]) / 2 for row in judged)
                wrong = sum(_wrong(row, rows) for row in judged)
                shown = (len(judged), percent(alone), percent(printed), percent(width), len(some) - len(judged), wrong)
                yield f"{f'{name} {value}':20}" + "".join(f"{cell:>14}" for cell in shown)


def _truth(row: Row, rows: Sequence[Row]) -> float:
    return statistics.median(
        other_row["point"] for other_row in rows if other_row["of"] == row["of"] and other_row is not row
    )


def _holds(row: Row, rows: Sequence[Row], which: str) -> bool:
    return bool(row[f"{which}low"] <= _truth(row, rows) <= row[f"{which}high"])


def _wrong(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a verdict has the wrong sign, or is 'same' although the long-run value differs by more than _SEEN."""
    truth = _truth(row, rows)
    same = row["verdict"] == "same" and not 1 - _SEEN <= truth <= 1 + _SEEN
    return same or (row["verdict"] == "faster" and truth > 1) or (row["verdict"] == "slower" and truth < 1)


def main() -> int:
    asked = options(
        __doc__,
        minutes=(0.0, "how long to measure; 0 shows what is there"),
        out=(Path(tempfile.gettempdir(), "fp8bench-coverage"), "the folder"),
        again=(False, "judge the kept samples anew, by this code"),
    )
    measure(asked.out, asked.minutes)
    rows = judged_again(asked.out) if asked.again else Rows(asked.out).all
    for line in table_lines([row for row in rows if sum(other_row["of"] == row["of"] for other_row in rows) > 2]):
        say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
