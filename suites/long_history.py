"""Makes a store with a long history, and measures how fast it opens: `python -m suites.long_history`.

The store has 300 commits of a suite with 1,001 series of ten samples. Figures vary by 2% between commits, and every
tenth pair of cases has a step of 5%. suites/harness.py uses this module.
"""

import math
import random
import shutil
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from fp8bench import model
from fp8bench.store.figures.cache import get_figure_cache_path
from fp8bench.store.runs.run_file import infer_plan, start_run
from suites.trials import run_command

COMMITS = 300
# The number of pairs of cases, fp32 and bf16, with eleven series each.
PAIRS = 91
ROUNDS = 10
# The nanoseconds of every call that belong to no phase.
REST = 100
SUITE = "long_history"
_MACHINE = "long"
_FIRST = datetime(2026, 1, 5, tzinfo=UTC)
_CPU = model.DeviceFacts("cpu", 0, "a processor", 8 << 30, "2.13.0")
_NATIVE = model.Support(model.Level.NATIVE, "torch's own kernels")
_WORK = model.Work(flops=1e9)
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
    """Writes the suite of the runs to a file for --import."""
    path = folder / f"{SUITE}.py"
    path.write_text(_MODULE.format(pairs=pairs, suite=SUITE))
    return path


def draw_times(pairs: int, number: int) -> Iterator[int]:
    """Yields the nanoseconds of the phases of each slot of a commit, in the order of the records. The same number
    gives the same times.
    """
    draw = random.Random(-1 - number)
    levels = []
    for pair in range(pairs):
        chance = random.Random(pair)
        level = 10 ** chance.uniform(5, 8) * draw.gauss(1, 0.02)
        step = chance.randrange(20, COMMITS) if pair % 10 == 0 else math.inf
        levels.append(level * 1.05 if number >= step else level)
    for level in levels:
        for factor, has_cast in ((2.0, False), (1.0, True)):
            for _ in range(ROUNDS):
                spread = draw.uniform(0.99, 1.01)
                if has_cast:
                    yield int(0.2 * level * spread)
                yield int(factor * level * spread)


def write_store(store: Path, commits: int = COMMITS, pairs: int = PAIRS, first: int = 0) -> None:
    """Writes a run for each commit, from number `first` on. The same numbers give the same runs."""
    for number in range(first, first + commits):
        nanoseconds = draw_times(pairs, number)
        run = run_of(number, tuple(record for size in range(1, 1 + pairs) for record in _records(size, nanoseconds)))
        writer = start_run(run, store)
        writer.append(run.records)
        writer.finish("finished")


def make(folder: Path, commits: int = COMMITS, pairs: int = PAIRS) -> None:
    """Makes a folder with a store and the suite of its runs."""
    write_module(folder, pairs)
    write_store(folder / ".fp8bench", commits, pairs)


def run_of(number: int, records: tuple[model.Record, ...]) -> model.Run:
    when = _FIRST + timedelta(hours=number)
    facts: dict[str, model.Scalar | None] = {
        "fp8bench": "0",
        "machine": _MACHINE,
        "commit": f"{number:08x}" * 5,
        "commit_date": int(when.timestamp() * 1000),
        "dirty": False,
        "torch": "2.13.0",
        "python": "3.11.7",
        "imports_sha256": "0" * 64,
        "asv_machine": _MACHINE,
        "asv_cpu": "a processor",
        "asv_os": "Linux",
        "asv_arch": "x86_64",
        "asv_num_cpu": "2",
        "asv_ram": "8589934592",
        "asv_python": "/opt/venv/bin/python3",
    }
    return model.Run(
        f"{number:08x}",
        (when + timedelta(minutes=5)).isoformat(timespec="milliseconds"),
        f"fp8bench suite {SUITE}",
        model.Request(SUITE),
        infer_plan(records),
        model.Environment(facts),
        (_CPU,),
        records=records,
    )


def _records(size: int, nanoseconds: Iterator[int]) -> Iterator[model.Record]:
    """Yields the records of a size in fp32, the reference, and in bf16. They use the next of `nanoseconds`."""
    for precision, phases in (("fp32", ("gemm",)), ("bf16", ("cast", "gemm"))):
        slots = []
        for number in range(ROUNDS):
            call = (*(next(nanoseconds) for _ in phases), REST)
            slots.append(model.SlotSample(number, (call,), 1e-3, 1e-3))
        timing = model.Timing(model.Segments((*phases, "unattributed"), (0,) * (1 + len(phases))), tuple(slots))
        memory = model.Measurement("peak_memory", "B", (4096.0 * size,))
        case = model.Case(SUITE, (("size", size),), precision, "cpu")
        yield model.Record(
            case, _NATIVE, model.Status.OK, _WORK, precision == "fp32", timing=timing, measurements=(memory,)
        )


class Cost(NamedTuple):
    """The CPU seconds of a process and its forks after their start, and the peak bytes of the largest one."""

    cpu: float
    peak: int


_MEASURED = """
import resource, sys
from pathlib import Path
from fp8bench.store.figures.history import open_store_history
from fp8bench.analysis.steps.change_points import find_level_steps
from fp8bench.registry import workloads
from fp8bench.user_code import import_user_modules
from fp8bench.analysis.steps.changes import find_changes_in_stretches
from fp8bench.jobs.history import list_trend_stretches
store = Path(".fp8bench")
import_user_modules(("./long_history.py",))
for name in workloads.names():
    workloads.get(name)
def used():
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)
cpu = used()
{work}
cpu = used() - cpu
if history.read and not {reading}:
    sys.exit(f"{{history.read}} runs were read")
# Not ru_maxrss of this process, which includes what its parent held.
own = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
print(cpu, 1024 * max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
"""
OPENED = "history = open_store_history(store, lambda done, runs: None)\n"
_CHANGES = f"""{OPENED}
found = find_changes_in_stretches(list_trend_stretches(history), find_level_steps)
if not found.changes:
    sys.exit("no change was found")
"""
WORKS = {
    "from the runs": _CHANGES,
    "first open": _CHANGES,
    "show": f"{OPENED}assert len(history.trends(history.names[0].__eq__)[0].figures) > 1",
    "list": f"{OPENED}assert len(history.list_trend_endings(lambda name: True)) > 1",
    "after a run": _CHANGES,
    "after a run of all": _CHANGES,
}


def measure(folder: Path, what: str, pairs: int = PAIRS, repeats: int = 5) -> Cost:
    """Returns the smallest cost of one of WORKS over several repetitions. It changes the store of the folder."""
    store = folder / ".fp8bench"
    cache, copy = get_figure_cache_path(store), folder / "copy.sqlite"
    if what == "from the runs":
        cache.unlink(missing_ok=True)
        return cost_of(_CHANGES, folder, reading=True)
    # Every run caches the figures of its commit; the search caches change points.
    cost_of(_CHANGES if what.startswith("after") else OPENED, folder, reading=True)
    if what.startswith("after"):
        runs = len(list(store.glob("runs/*/*.jsonl")))
        write_store(store, 1, pairs if what.endswith("all") else max(1, pairs // 10), first=runs)
        cost_of(OPENED, folder, reading=True)
    shutil.copy(cache, copy)
    costs = []
    for _ in range(repeats):
        shutil.copy(copy, cache)
        costs.append(cost_of(WORKS[what], folder))
    return min(costs)


def cost_of(work: str, folder: Path, reading: bool = False) -> Cost:
    """Returns the cost of some lines of Python in a new process that imports the suite in the folder.

    If `reading` is false, reading a run is an error.
    """
    script = _MEASURED.format(work=work, reading=reading)
    cpu, peak = run_command((sys.executable, "-c", script), folder).stdout.split()
    return Cost(float(cpu), int(peak))


if __name__ == "__main__":
    from suites.harness import FIGURES, show

    show([name for name in FIGURES if name.startswith("history")])
