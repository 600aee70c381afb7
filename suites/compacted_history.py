"""A store with millions of points in Parquet files, quickly made, and how fast it is read: for suites/harness.py.

Its commits are those of suites/long_history.py, one an hour. Their run files have no records here: what compacting
would read from them is computed, and the compaction writes it as it writes all. As a script it makes such a store in
FOLDER and prints what it takes: `python -m suites.compacted_history FOLDER [COMMITS [PAIRS]]`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8bench.store.commit_runs import moment_of
from fp8bench.store.compacted.compact import Compaction, Sampled, compact, read_commit
from fp8bench.store.index.figure_files import CommitFigures, Fingerprints, stamps
from fp8bench.store.index.tables import FigureTable, read_layout
from suites.long_history import OPENED, PAIRS, REST, ROUNDS, Cost, Times, cost_of, run_of, write_module, write_store

# With 1,001 points each that have a number, and as many rows that have none.
COMMITS = 3000
# So many come to 740,000 rows in one month.
MONTH = 370
_ROOT = Path(__file__).resolve().parents[1]
_DIGITS = 6
Floats = NDArray[np.floating[Any]]


class Made:
    """What the runs of commits come to, without their files."""

    def __init__(self, pairs: int) -> None:
        """One run is read, for all that is the same in every commit."""
        with tempfile.TemporaryDirectory() as folder:
            (path,) = write_store(Path(folder), 1, pairs)
            read = read_commit(Path(folder), Fingerprints(), [path])
        assert read is not None
        self._read, self._pairs, self._times = read, pairs, Times(pairs)
        ((self._table, self._samples, _),) = read.places
        series, cells = read_layout(self._table.layout)
        self._rows = {(series[rank].metric, *cell): row for row, (rank, cell) in enumerate(cells)}

    def read(self, store: Path, _: Fingerprints, paths: Sequence[Path]) -> CommitFigures[Sampled]:
        """In the place of read_commit."""
        (path,) = paths
        sources, number = stamps(store, paths), int(path.stem.rpartition("-")[2], 16)
        rows, samples = self._table.rows.copy(), list(self._samples)
        for (metric, precision), figures in self._figures(number).items():
            places = [self._rows[metric, precision, size] for size in range(1, 1 + self._pairs)]
            middle = np.sort(figures, axis=1)
            half = figures.shape[1] // 2
            # As asv's quantile has it.
            rows["value"][places] = middle[:, half] if half == 0 else 0.5 * middle[:, half - 1] + 0.5 * middle[:, half]
            if half:
                rows["low"][places], rows["high"][places] = middle[:, 0], middle[:, -1]
            for place, values in zip(places, figures.tolist(), strict=True):
                samples[place] = values
        table = FigureTable({**self._table.said, **_said(number)}, self._table.layout, rows)
        return self._read._replace(sources=tuple(sources), places=((table, samples, [run_of(number, ()).id]),))

    def _figures(self, number: int) -> dict[tuple[str, str], Floats]:
        """Samples by metric and precision: a row for each pair."""
        times = np.fromiter(self._times.of_commit(number), np.int64).reshape(self._pairs, 3 * ROUNDS)
        plain, cast, gemm = times[:, :ROUNDS], times[:, ROUNDS::2], times[:, ROUNDS + 1 :: 2]
        rest = 1e-9 * REST
        phases = {"time_gemm": {"fp32": plain, "bf16": gemm}, "time_cast": {"bf16": cast}}
        found = {(name, own): 1e-9 * ns for name, by in phases.items() for own, ns in by.items()}
        means = {}
        for own, ns in (("fp32", plain), ("bf16", cast + gemm)):
            alone = found["time_gemm", own]
            found["time", own] = (found["time_cast", own] + alone if own == "bf16" else alone) + rest
            means[own] = (1e-9 * (ns + REST)).mean(axis=1)
            found["mean_time", own] = means[own][:, None]
        found["relative_time", "bf16"] = _rounded(found["time", "bf16"] / found["time", "fp32"])
        found["relative_mean_time", "bf16"] = _rounded(means["bf16"] / means["fp32"])[:, None]
        return found


def _rounded(ratios: Floats) -> Floats:
    """To the digits that the history has of ratios."""
    flat = [float(f"{ratio:.{_DIGITS}g}") for ratio in ratios.ravel().tolist()]
    return np.array(flat).reshape(ratios.shape)


def _said(number: int) -> dict[str, Any]:
    run = run_of(number, ())
    facts = run.environment.facts
    began = moment_of(run.started).timestamp() * 1000
    return {"commit": facts["commit"], "date": facts["commit_date"], "began": began, "newest": run.started}


def write_compacted(store: Path, commits: int = COMMITS, pairs: int = PAIRS) -> Compaction:
    """A store whose Parquet files are those of whole runs. The module of long_history is known."""
    write_store(store, commits, 0)
    return compact(store, lambda done, commits: None, Made(pairs).read)


_FIRST = f"""{OPENED}
def figures(number):
    name = history.names[number * len(history.names) // 11]
    assert len(history.trends(name.__eq__)[0].figures) > 1
"""
_MAKING = """
from suites.compacted_history import write_compacted
write_compacted(store, {commits}, {pairs})
history = open_history(store, lambda runs: None)
"""
# Before the clock runs, and while it does.
_WORKS = {
    "first series": ("", f"{_FIRST}figures(0)"),
    "ten series": (f"{_FIRST}figures(0)", "for number in range(1, 11):\n    figures(number)"),
    "all medians": ("", f"{OPENED}assert len(history.endings(lambda name: True)) > 1"),
}
WORKS = tuple(_WORKS)


def measure(folder: Path, what: str, environment: dict[str, str], repeats: int = 5) -> Cost:
    """What one of WORKS takes in a store that was made in a folder: the least of a few times, the largest peak."""
    before, work = _WORKS[what]
    costs = [cost_of(work, folder, environment, before) for _ in range(repeats)]
    return min(costs)._replace(peak=max(cost.peak for cost in costs))


def make(folder: Path, environment: dict[str, str], commits: int = COMMITS, pairs: int = PAIRS) -> Cost:
    """What it takes to make such a store in a folder, most of which is its compaction."""
    write_module(folder, pairs)
    own = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), str(_ROOT))))}
    return cost_of(_MAKING.format(commits=commits, pairs=pairs), folder, own)


if __name__ == "__main__":
    _folder = Path(sys.argv[1])
    _folder.mkdir(parents=True, exist_ok=True)
    _took = make(_folder, dict(os.environ), *map(int, sys.argv[2:]))
    for _what in ("", *WORKS):
        _took = measure(_folder, _what, dict(os.environ)) if _what else _took
        _words = f"{_took.cpu:7.3f} s CPU {_took.wall:7.3f} s {_took.peak >> 20:5} MiB"
        print(f"{_what or 'made':<20} {_words}", flush=True)  # noqa: T201
