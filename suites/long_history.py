"""A store with a long history, and how fast it is opened: `python -m suites.long_history`, for suites/harness.py.

300 commits of a suite with 1,001 series, ten samples each: figures that spread by 2% from commit to commit, and a step
of 5% in every tenth pair of cases.

Compacted, its points, millions by default, lie in Parquet files: commits one an hour, whose run files have no records
here. What compacting would read from them is made of what it reads from one, and the compaction writes it as it writes
all.
"""

from __future__ import annotations

import math
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fp8bench.model import (
    Case,
    DeviceFacts,
    Environment,
    Level,
    Measurement,
    Record,
    Request,
    Run,
    Scalar,
    Segments,
    SlotSample,
    Status,
    Support,
    Timing,
    Work,
)
from fp8bench.store.commit_runs import moment_of
from fp8bench.store.compacted.compact import Compaction, Sampled, compact, read_commit
from fp8bench.store.index.figure_files import CommitFigures, Fingerprints, stamped
from fp8bench.store.index.tables import FigureTable
from fp8bench.store.runs.run_file import plan_of, start_run
from suites.trials import ran, scratch

COMMITS = 300
# Pairs of cases, fp32 and bf16, with eleven series each.
PAIRS = 91
ROUNDS = 10
# Nanoseconds of every call that no phase has.
REST = 100
SUITE = "long_history"
_MACHINE = "long"
_FIRST = datetime(2026, 1, 5, tzinfo=UTC)
_CPU = DeviceFacts("cpu", 0, "a processor", 8 << 30, "2.13.0")
_NATIVE = Support(Level.NATIVE, "torch's own kernels")
_WORK = Work(flops=1e9)
_MODULE = '''"""A suite whose grid is as large as it is told to be; nobody measures it."""

from fp8bench.suites import Axis, Grid, Workload, whole_number, workloads

SIZES = tuple(str(size) for size in range(1, 1 + {pairs}))


@workloads.register("{suite}")
class LongHistory(Workload):
    name = "{suite}"
    summary = "a grid of many sizes"
    history = Grid({{"size": SIZES}}, {{"size": ("1000000",)}}, dtypes=("fp32", "bf16"), phases=("cast", "gemm"))

    def axes(self, facts):
        return (Axis("size", "how large", SIZES, whole_number(low=1)),)

    def work(self, params):
        raise NotImplementedError

    def prepare(self, setup):
        raise NotImplementedError

    def step(self, state, phase):
        raise NotImplementedError
'''


def write_module(folder: Path, pairs: int = PAIRS) -> Path:
    """Writes the suite of the runs, for --import."""
    path = folder / f"{SUITE}.py"
    path.write_text(_MODULE.format(pairs=pairs, suite=SUITE))
    return path


class Times:
    """What the cases of each commit take; the same for the same seed."""

    def __init__(self, pairs: int, seed: int = 0) -> None:
        chance = [random.Random(1000 * seed + pair) for pair in range(pairs)]
        self._seed = seed
        self._bases = [10 ** draw.uniform(5, 8) for draw in chance]
        self._steps = [draw.randrange(20, COMMITS) if pair % 10 == 0 else math.inf for pair, draw in enumerate(chance)]

    def of_commit(self, number: int) -> Iterator[int]:
        """Returns the nanoseconds of every cell of every slot but the last ones, in the order of the records."""
        own = random.Random(-1 - 1000 * self._seed - number)
        levels = [
            base * own.gauss(1, 0.02) * (1.05 if number >= step else 1)
            for base, step in zip(self._bases, self._steps, strict=True)
        ]
        for level in levels:
            for factor, cast in ((2.0, False), (1.0, True)):
                for _ in range(ROUNDS):
                    spread = own.uniform(0.99, 1.01)
                    if cast:
                        yield int(0.2 * level * spread)
                    yield int(factor * level * spread)


def write_store(store: Path, commits: int = COMMITS, pairs: int = PAIRS, seed: int = 0, first: int = 0) -> list[Path]:
    """Writes a run for each commit, from number `first` on; the same for the same seed."""
    times, paths = Times(pairs, seed), []
    for number in range(first, first + commits):
        nanoseconds = times.of_commit(number)
        run = run_of(number, tuple(record for size in range(1, 1 + pairs) for record in _records(size, nanoseconds)))
        writer = start_run(run, store)
        writer.append(run.records)
        writer.finish("finished")
        paths.append(writer.path)
    return paths


def make(folder: Path, commits: int = COMMITS, pairs: int = PAIRS) -> None:
    """Makes a folder with such a store, and the suite of its runs."""
    write_module(folder, pairs)
    write_store(folder / ".fp8bench", commits, pairs)


def run_of(number: int, records: tuple[Record, ...]) -> Run:
    when = _FIRST + timedelta(hours=number)
    commit = f"{number:08x}" * 5
    facts: dict[str, Scalar | None] = {
        "fp8bench": "0", "machine": _MACHINE, "commit": commit, "commit_date": int(when.timestamp() * 1000),
        "dirty": False, "torch": "2.13.0", "python": "3.11.7", "imports_sha256": "0" * 64, "asv_machine": _MACHINE,
        "asv_cpu": "a processor", "asv_os": "Linux", "asv_arch": "x86_64", "asv_num_cpu": "2", "asv_ram": "8589934592",
        "asv_python": "/opt/venv/bin/python3",
    }  # fmt: skip
    return Run(
        f"{number:08x}", (when + timedelta(minutes=5)).isoformat(timespec="milliseconds"), f"fp8bench suite {SUITE}",
        Request(SUITE), plan_of(records), Environment(facts), (_CPU,), records=records,
    )  # fmt: skip


def _records(size: int, nanoseconds: Iterator[int]) -> Iterator[Record]:
    """Makes a size in fp32, the reference, and in bf16, which take the next times."""
    for precision, phases in (("fp32", ("gemm",)), ("bf16", ("cast", "gemm"))):
        slots = tuple(
            SlotSample(number, ((*(next(nanoseconds) for _ in phases), REST),), 1e-3, 1e-3) for number in range(ROUNDS)
        )
        timing = Timing(Segments((*phases, "unattributed"), (0,) * (1 + len(phases))), slots)
        memory = Measurement("peak_memory", "B", (4096.0 * size,))
        case = Case(SUITE, (("size", size),), precision, "cpu")
        yield Record(case, _NATIVE, Status.OK, _WORK, precision == "fp32", timing=timing, measurements=(memory,))


class Cost(NamedTuple):
    """The seconds of processors and of the clock that a process and its forks took beyond its start. `peak` is in
    bytes, of the largest of them."""

    cpu: float
    wall: float
    peak: int


_MEASURED = """
import resource, sys, time
from pathlib import Path
from fp8bench.store.index.figure_files import StepMemory
from fp8bench.store.index.history import keep_figures, open_history
from fp8bench.registry import workloads
from fp8bench.user_code import import_user_modules
from fp8bench.analysis.steps.changes import changes_of
from fp8bench.jobs.history import stretches
store = Path(".fp8bench")
import_user_modules(("./long_history.py",))
for name in workloads.names():
    workloads.get(name)
def used():
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)
{before}
cpu, wall = used(), time.monotonic()
{work}
cpu, wall = used() - cpu, time.monotonic() - wall
if history.read and not {reading}:
    sys.exit(f"{{history.read}} runs were read")
# Not ru_maxrss of this process, which includes what its parent held.
own = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
print(cpu, wall, 1024 * max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
"""
OPENED = "history = open_history(store, lambda done, runs: None)\n"
_CHANGES = f"""{OPENED}
found = changes_of(stretches(history), StepMemory(store).steps_of_many)
if not found.changes:
    sys.exit("no change was found")
"""
WORKS = {
    "from the runs": _CHANGES,
    "first open": _CHANGES,
    "show": f"{OPENED}assert len(history.trends(history.names[0].__eq__)[0].figures) > 1",
    "list": f"{OPENED}assert len(history.endings(lambda name: True)) > 1",
    "after a run": _CHANGES,
    "after a run of all": _CHANGES,
}


def measure(folder: Path, what: str, pairs: int = PAIRS, repeats: int = 5) -> Cost:
    """Returns the least cost of one of WORKS over a few times, in the store of a folder, which it changes."""
    store = folder / ".fp8bench"
    index, kept = store / "figures" / "steps.json", folder / "kept.json"
    if what == "from the runs":
        shutil.rmtree(store / "points", ignore_errors=True)
        return cost_of(_CHANGES, folder, reading=True)
    cost_of(_CHANGES, folder, reading=True)  # which every run does at its end for its own commit
    if what.startswith("after"):
        shutil.copy(index, kept)
        runs = len(list(store.glob("runs/*/*.jsonl")))
        write_store(store, 1, pairs if what.endswith("all") else max(1, pairs // 10), first=runs)
        cost_of(_CHANGES, folder, reading=True)
    costs = []
    for _ in range(repeats):
        index.unlink(missing_ok=True)
        if what.startswith("after"):
            shutil.copy(kept, index)
        costs.append(cost_of(WORKS[what], folder))
    return min(costs)


def cost_of(work: str, folder: Path, before: str = "", reading: bool = False) -> Cost:
    """Returns the cost of lines of Python in a process of its own, which knows the suite in the folder.

    Lines `before` are not counted. It is an error if runs are read without `reading`.
    """
    script = _MEASURED.format(before=before, work=work, reading=reading)
    cpu, wall, peak = ran((sys.executable, "-c", script), folder).stdout.split()
    return Cost(float(cpu), float(wall), int(peak))


# Each has 1,001 points with a number, and as many rows without.
MANY_COMMITS = 3000
# So many commits have 740,000 rows in one month.
MONTH = 370


class Made:
    """The runs of commits without their files, from one real run; figures differ by 2% from commit to commit, and in
    every tenth series by 5% from some commit on."""

    def __init__(self, pairs: int) -> None:
        with scratch() as folder:
            read = read_commit(folder, Fingerprints(), write_store(folder, 1, pairs))
        assert read is not None
        self._read = read
        ((self._table, self._samples, _),) = read.places
        steps = np.random.default_rng(0).integers(20, MANY_COMMITS, len(self._samples))
        self._steps = np.where(np.arange(len(steps)) % 10, MANY_COMMITS, steps)

    def read(self, store: Path, _: Fingerprints, paths: Sequence[Path]) -> CommitFigures[Sampled]:
        """Replaces read_commit."""
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


def write_compacted(store: Path, commits: int = MANY_COMMITS, pairs: int = PAIRS) -> Compaction:
    """Writes a store with Parquet files like those of whole runs. The suite of its runs must be imported."""
    write_store(store, commits, 0)
    return compact(store, lambda done, commits: None, Made(pairs).read)


_FIGURES = f"""{OPENED}
def figures(number):
    name = history.names[number * len(history.names) // 11]
    assert len(history.trends(name.__eq__)[0].figures) > 1
"""
_MAKING = """
from suites.long_history import write_compacted
write_compacted(store, {commits}, {pairs})
history = open_history(store, lambda done, runs: None)
"""
# Before the clock runs, and while it does.
READS = {
    "first series": ("", f"{_FIGURES}figures(0)"),
    "ten series": (f"{_FIGURES}figures(0)", "for number in range(1, 11):\n    figures(number)"),
    "all medians": ("", f"{OPENED}assert len(history.endings(lambda name: True)) > 1"),
}


def measure_reading(folder: Path, what: str, repeats: int = 5) -> Cost:
    """Returns the cost of one of READS in the store of a folder: the least of a few times, the largest peak."""
    before, work = READS[what]
    costs = [cost_of(work, folder, before) for _ in range(repeats)]
    return min(costs)._replace(peak=max(cost.peak for cost in costs))


def make_compacted(folder: Path, commits: int = MANY_COMMITS, pairs: int = PAIRS) -> Cost:
    """Returns the cost of making such a store in a folder, most of which is its compaction."""
    write_module(folder, pairs)
    return cost_of(_MAKING.format(commits=commits, pairs=pairs), folder)


if __name__ == "__main__":
    from suites.harness import FIGURES, show

    show([name for name in FIGURES if name.startswith(("history", "compact"))])
