"""A store with millions of points in Parquet files, quickly made, and how fast it is read: for suites/harness.py.

Its commits are those of suites/long_history.py, one an hour. Their run files have no records here: what compacting
would read from them is made of what it reads from one, and the compaction writes it as it writes all.
`python -m suites.compacted_history FOLDER [COMMITS [PAIRS]]` makes such a store there and prints what it takes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fp8bench.store.commit_runs import moment_of
from fp8bench.store.compacted.compact import Compaction, Sampled, compact, read_commit
from fp8bench.store.index.figure_files import CommitFigures, Fingerprints, stamped
from fp8bench.store.index.tables import FigureTable
from suites.long_history import OPENED, PAIRS, Cost, cost_of, run_of, say_cost, write_module, write_store
from suites.trials import scratch

# With 1,001 points each that have a number, and as many rows that have none.
COMMITS = 3000
# So many come to 740,000 rows in one month.
MONTH = 370


class Made:
    """What the runs of commits come to, without their files: one real run, whose figures differ by 2% from commit to
    commit, and those of every tenth series by 5% from some commit on."""

    def __init__(self, pairs: int) -> None:
        with scratch() as folder:
            read = read_commit(folder, Fingerprints(), write_store(folder, 1, pairs))
        assert read is not None
        self._read = read
        ((self._table, self._samples, _),) = read.places
        steps = np.random.default_rng(0).integers(20, COMMITS, len(self._samples))
        self._steps = np.where(np.arange(len(steps)) % 10, COMMITS, steps)

    def read(self, store: Path, _: Fingerprints, paths: Sequence[Path]) -> CommitFigures[Sampled]:
        """In the place of read_commit."""
        (path,) = paths
        sources, number = [stamped(store, path)[0] for path in paths], int(path.stem.rpartition("-")[2], 16)
        assert sources is not None
        rows = self._table.rows.copy()
        factors = np.random.default_rng(number).normal(1, 0.02, len(rows)) * np.where(number < self._steps, 1, 1.05)
        for figure in ("value", "low", "high"):
            rows[figure] *= factors
        pairs = zip(self._samples, factors.tolist(), strict=True)
        samples = [[value * factor for value in values] for values, factor in pairs]
        run = run_of(number, ())
        facts, began = run.environment.facts, moment_of(run.started).timestamp() * 1000
        said = {"commit": facts["commit"], "date": facts["commit_date"], "began": began, "newest": run.started}
        table = FigureTable({**self._table.said, **said}, self._table.layout, rows)
        return self._read._replace(sources=tuple(sources), places=((table, samples, [run.id]),))


def write_compacted(store: Path, commits: int = COMMITS, pairs: int = PAIRS) -> Compaction:
    """A store whose Parquet files are as those of whole runs. The module of long_history is known."""
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
history = open_history(store, lambda done, runs: None)
"""
# Before the clock runs, and while it does.
_WORKS = {
    "first series": ("", f"{_FIRST}figures(0)"),
    "ten series": (f"{_FIRST}figures(0)", "for number in range(1, 11):\n    figures(number)"),
    "all medians": ("", f"{OPENED}assert len(history.endings(lambda name: True)) > 1"),
}
WORKS = tuple(_WORKS)


def measure(folder: Path, what: str, repeats: int = 5) -> Cost:
    """What one of WORKS takes in a store that was made in a folder: the least of a few times, the largest peak."""
    before, work = _WORKS[what]
    costs = [cost_of(work, folder, before) for _ in range(repeats)]
    return min(costs)._replace(peak=max(cost.peak for cost in costs))


def make(folder: Path, commits: int = COMMITS, pairs: int = PAIRS) -> Cost:
    """What it takes to make such a store in a folder, most of which is its compaction."""
    write_module(folder, pairs)
    return cost_of(_MAKING.format(commits=commits, pairs=pairs), folder)


if __name__ == "__main__":
    _folder = Path(sys.argv[1])
    _folder.mkdir(parents=True, exist_ok=True)
    say_cost("made", make(_folder, *map(int, sys.argv[2:])))
    for _what in WORKS:
        say_cost(_what, measure(_folder, _what))
