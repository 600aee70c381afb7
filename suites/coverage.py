"""Counts how many intervals contain the long-run value: `python -m suites.coverage --minutes 60 --out FOLDER`.

Cases are measured again and again by a plain command in a fresh process, while 0 to 8 busy loops run. The true value
of a case is the median of all its other runs. The file rows.jsonl in the folder stores the runs, which must all come
from one processor.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

from fp8bench.analysis.findings import findings
from fp8bench.model import Run
from fp8bench.store.reruns import add_rerun_spreads, store_ratios
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run
from fp8bench.units import percent
from suites.trials import FP8BENCH, Row, options, run_command, say, scratch

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
_PROPERTIES: dict[str, Callable[[Row], str]] = {
    "load": lambda row: str(row["load"]),
    "case": lambda row: str(row["case"]),
    "of": lambda row: "reruns" if row["known"] else "these rounds",
    "all": lambda row: "",
}


def load_rows(folder: Path) -> list[Row]:
    path = folder / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


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


def run_case(case: str, load: int, store: Path) -> list[Row]:
    """Runs a case, and returns a row for each ratio: from the rounds of the run alone, and as printed."""
    earlier_files = set(run_files(store))
    facts = {"case": case, "load": load, "began": time.time(), "loadavg": os.getloadavg()[0]}
    suite, dtypes, *axes = CASES[case]
    with busy_loops(load):
        command = [*FP8BENCH, "suite", suite, "--dtypes", dtypes, "--store", str(store)]
        run_command([*command, *(f"--set={axis}" for axis in axes)], more=QUICKER)
    (path,) = set(run_files(store)) - earlier_files
    return rows_of(load_run(path), facts)


def rows_of(run: Run, facts: Row) -> list[Row]:
    printed = findings(run)
    alone = findings(replace(run, records=tuple(replace(record, reruns=None) for record in run.records)))
    rows = []
    for record in run.records:
        finding, rounds = printed[record.case.id], alone[record.case.id]
        if finding.ratio is not None and rounds.ratio is not None:
            row = {
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
            rows.append(facts | row)
    return rows


def measure(folder: Path, minutes: float) -> None:
    """Measures what is missing, all cases at each load in turn, until the minutes have passed."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    counts = Counter((row["case"], row["load"]) for row in load_rows(folder))
    for turn, load, case in product(range(RUNS), LOADS, CASES):
        if counts[case, load] <= turn and time.monotonic() <= end:
            for row in run_case(case, load, folder / "store"):
                with (folder / "rows.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                say(str(row))
                counts[case, load] += 1


def judge_again(folder: Path) -> list[Row]:
    """Judges the stored samples with this version of the code, in the order in which they were measured."""
    names = ("case", "load", "began", "loadavg")
    facts = {row["run"]: {name: row[name] for name in names} for row in load_rows(folder)}
    runs = sorted((load_run(path) for path in run_files(folder / "store")), key=lambda run: run.started)
    rows = []
    with scratch() as learned:
        for run in runs:
            if run.id in facts:
                records = add_rerun_spreads(run.records, run, learned)
                rows += rows_of(replace(run, records=records), facts[run.id])
                store_ratios(run.records, run, learned)
    return rows


def add_truth(rows: Sequence[Row]) -> list[Row]:
    """Adds the true ratio to each row: the median of the other runs of the case. Rows without two others are left
    out.
    """
    points: dict[str, list[float]] = {}
    for row in rows:
        points.setdefault(row["of"], []).append(row["point"])
    complete = []
    for row in rows:
        others = sorted(points[row["of"]])
        others.remove(row["point"])
        if len(others) > 1:
            complete.append({**row, "truth": statistics.median(others)})
    return complete


def table_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of a table: the share of intervals that contain the median of other runs, and the number of
    wrong verdicts.
    """
    heads = ("runs", "rounds alone", "as printed", "half-width", "no interval", "wrong")
    yield f"{'':20}" + "".join(f"{head:>14}" for head in heads)
    for name, value_of in _PROPERTIES.items():
        for value in dict.fromkeys(map(value_of, rows)):
            group = [row for row in rows if value_of(row) == value]
            judged = [row for row in group if row["level"]]
            if judged:
                alone = statistics.fmean(row["rounds_low"] <= row["truth"] <= row["rounds_high"] for row in judged)
                printed = statistics.fmean(row["low"] <= row["truth"] <= row["high"] for row in judged)
                width = statistics.median(math.log(row["high"] / row["low"]) / 2 for row in judged)
                wrong = sum(map(is_wrong, judged))
                cells = (len(judged), percent(alone), percent(printed), percent(width), len(group) - len(judged), wrong)
                yield f"{f'{name} {value}':20}" + "".join(f"{cell:>14}" for cell in cells)


def is_wrong(row: Row) -> bool:
    """Whether a verdict has the wrong sign, or is 'same' although the long-run value differs by more than _SEEN."""
    wrong = {"same": abs(row["truth"] - 1) > _SEEN, "faster": row["truth"] > 1, "slower": row["truth"] < 1}
    return wrong.get(row["verdict"], False)


def main() -> int:
    asked = options(
        __doc__,
        minutes=(0.0, "how long to measure; 0 shows the stored rows"),
        out=(Path(tempfile.gettempdir(), "fp8bench-coverage"), "the folder"),
        again=(False, "judge the stored samples again, by this version of the code"),
    )
    measure(asked.out, asked.minutes)
    for line in table_lines(add_truth(judge_again(asked.out) if asked.again else load_rows(asked.out))):
        say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
