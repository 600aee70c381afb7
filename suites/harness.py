"""Benchmarks of fp8bench itself for asv. `python -m suites.harness` prints them without asv, in 10 to 15 minutes.

Lower is better for all figures. Where a shared machine makes wall time unreliable, figures are CPU time, or ratios of
runs that follow each other. All processes measure the fp8bench that this process imports.
"""

import enum
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fp8bench.measure.handle import ProcessWorker
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.model import Request
from fp8bench.model.raw import Settings
from fp8bench.plan.corpus import prepare_corpus
from fp8bench.plan.make import make_plan
from suites import long_history
from suites.long_history import COMMITS, PAIRS, Cost
from suites.quantisers import CASTS, linear_over_product, over_copy
from suites.trials import FP8BENCH, cpu_seconds, environment, options, run_command, say, scratch

SUITES = Path(__file__).resolve().parent
Benchmark = Callable[..., float]


class Size(enum.Enum):
    """How much a benchmark does: all that its figure needs, or just enough to show that it works."""

    FULL = enum.auto()
    SMALLEST = enum.auto()

    def choose(self, full: Any, smallest: Any) -> Any:
        return full if self is Size.FULL else smallest

    @property
    def repeats(self) -> int:
        """How often a measurement of about a second is repeated."""
        return self.choose(5, 1)


# Runs the states of the command in `_mission` (two of bf16, one of fp8) in a bare loop, to measure the memory that
# they need.
_BARE = """
import sys
from pathlib import Path
from fp8bench.plan.corpus import prepare_corpus
from fp8bench.worker.bench import Bench
from fp8bench.model.raw import Settings
from fp8bench.plan.make import make_plan
from fp8bench.model import Request
from fp8bench.protocols import SilentPhases
corpus = prepare_corpus(None, Path(sys.argv[1]))
bench = Bench(Settings(corpus=corpus.path))
facts = bench.probe()
group = make_plan(Request("transformer", ("fp8", "bf16"), ("cpu",)), facts, corpus.identity).groups[0]
for key, planned in zip("abc", (group.cases[0], group.cases[0], group.cases[1]), strict=True):
    bench.prepare(key, planned.case, facts[0])
for _ in range(10):
    for prepared in bench._prepared.values():
        prepared.workload.step(prepared.state, SilentPhases())
"""


def _cpu_seconds(size: Size, *words: str, end: int = 0) -> float:
    """Returns the smallest CPU time of a few runs of a command, in an empty folder."""
    with scratch() as folder:
        return min(cpu_seconds((*FP8BENCH, *words), folder, (end,)) for _ in range(size.repeats))


def _markers() -> tuple[float, float]:
    from fp8bench.registry import devices
    from fp8bench.worker.clock import measure_overheads

    cost = measure_overheads(devices.get("cpu"), 0)
    return cost.marker_on, cost.marker_off


def _harness_over_bare_loop(size: Size) -> float:
    with scratch() as folder:
        corpus = prepare_corpus(None, folder)
        settings = Settings(corpus=corpus.path)
        ratio = statistics.median(_harness_ratio(size, settings, corpus.identity) for _ in range(size.repeats))
    return float(f"{ratio:.6g}")  # asv prints all digits


def _harness_ratio(size: Size, settings: Settings, corpus: str) -> float:
    """Returns the median ratio over pairs in one process. Processes differ by about 1%, by the memory that they
    happen to get.
    """
    with ProcessWorker(settings) as worker:
        facts = worker.probe()
        group = make_plan(Request("transformer", ("bf16",), ("cpu",)), facts, corpus).groups[0]
        inside, outside = worker.ask(600.0, "bare_loop", group.cases[0].case, facts[0], 4, size.choose(40, 1))
    return statistics.median(slot / loop for slot, loop in zip(inside, outside, strict=True))


_RANK_SHAPE, _RANK_PAIRS, _RANK_SECONDS = "1408", 150, 60.0


def _ranks_over_bare_loop(size: Size) -> float:
    """Returns the median ratio of a slot of one call to a bare loop over the same step of about 50 ms.

    Both times are those of the slowest of two ranks, which start together; the machine needs two free cores. Even if
    ratios vary by 5%, the median of this many is accurate to 1%.
    """
    ratios = []
    with RanksWorker(Settings(), 2) as worker:
        facts = worker.probe()
        request = Request("gemm", ("fp32",), ("cpu",), axes=(("shape", (_RANK_SHAPE,)),), ranks=2)
        worker.with_time_limit(_RANK_SECONDS).prepare("a", make_plan(request, facts).groups[0].cases[0].case, facts[0])
        for turn in range(size.choose(_RANK_PAIRS, 1)):
            first_loop = worker.with_time_limit(_RANK_SECONDS).loop("a", 1)
            start = time.perf_counter()
            worker.with_time_limit(_RANK_SECONDS).slot("a", 1, 0)
            slot = time.perf_counter() - start
            loop = first_loop if turn % 2 else worker.with_time_limit(_RANK_SECONDS).loop("a", 1)
            ratios.append(slot / loop)
    return float(f"{statistics.median(ratios):.6g}")


def _mission(size: Size, *words: str) -> tuple[str, ...]:
    few = size.choose((), ("--rounds", "1"))
    return (*FP8BENCH, "suite", "transformer", "--dtypes", "fp8,bf16", *words, *few)


def _wall_seconds(words: tuple[str, ...]) -> float:
    with scratch() as folder:
        start = time.monotonic()
        run_command(words, folder)
        return time.monotonic() - start


def _peak_bytes(words: tuple[str, ...]) -> int:
    """Returns the largest sum of resident bytes of a process and its children, which is read every 20 ms."""
    peak, nowhere = 0, subprocess.DEVNULL
    with scratch() as folder:
        words = tuple(str(folder) if word == "FOLDER" else word for word in words)
        with subprocess.Popen(words, cwd=folder, env=environment(), stdout=nowhere, stderr=nowhere) as process:
            while process.poll() is None:
                peak = max(peak, _resident(process.pid))
                time.sleep(0.02)
            if process.returncode:
                raise RuntimeError(f"{words} ended with {process.returncode}")
    return peak


def _resident(pid: int) -> int:
    """Returns the resident bytes of a process and its descendants; 0 if the process has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(_resident(int(child)) for child in children)


def _history(size: Size, what: str) -> Cost:
    """Measures opening a store of 300 commits and 1,000 series, without the start of the process."""
    pairs = size.choose(PAIRS, 1)
    with scratch() as folder:
        long_history.make(folder, COMMITS, pairs)
        return long_history.measure(folder, what, pairs, size.repeats)


class Figure(NamedTuple):
    """A benchmark's figure. `measure` takes a size and, if the figure has a `parameter`, one of its values."""

    unit: str
    what: str
    measure: Callable[..., float]
    parameter: str = ""
    values: Iterable[str] = ()


FIGURES: dict[str, Figure] = {
    "help": Figure(
        "seconds", "CPU time of `fp8bench --help`", lambda size: _cpu_seconds(size, "--help")),
    "list": Figure(
        "seconds", "CPU time of a bare `fp8bench list`", lambda size: _cpu_seconds(size, "list")),
    "bad_usage": Figure(
        "seconds", "CPU time of a mistyped suite",
        lambda size: _cpu_seconds(size, "suite", "nosuch", end=2)),
    "marker_on": Figure("seconds", "one `with phase.gemm` while timing", lambda size: _markers()[0]),
    "marker_off": Figure("seconds", "one `with phase.gemm` in an untimed pass", lambda size: _markers()[1]),
    "harness_over_bare_loop": Figure(
        "ratio", "CPU time of the nano transformer's step inside the harness over the same step in a bare loop",
        _harness_over_bare_loop),
    "ranks_over_bare_loop": Figure(
        "ratio", "wall time of two ranks' step, from the request to both answers, over a bare loop's: goal 1.02",
        _ranks_over_bare_loop),
    "mission_seconds": Figure(
        "seconds", "wall time of `fp8bench suite transformer --dtypes fp8,bf16`",
        lambda size: _wall_seconds(_mission(size))),
    "mission_quick_seconds": Figure(
        "seconds", "wall time of the same with --quick", lambda size: _wall_seconds(_mission(size, "--quick"))),
    "mission_peak_bytes": Figure(
        "bytes", "peak of its parent's and worker's resident bytes together", lambda size: _peak_bytes(_mission(size))),
    "memory_above_bare_loop": Figure(
        "bytes", "the same less the peak of a bare loop over the same states",
        lambda size: _peak_bytes(_mission(size)) - _peak_bytes((sys.executable, "-c", _BARE, "FOLDER"))),
    "quantiser_over_copy": Figure(
        "ratio", "CPU time of a fused quantiser over a copy's: goals 1.33 (e4m3, e5m2), 2 (MX), 2.9 (nvfp4 of fp32)",
        lambda size, name: over_copy(name, *size.choose((4096, 15), (64, 1))), "quantiser", CASTS),
    "emulated_linear_over_product": Figure(
        "ratio", "CPU time of an emulated mxfp8 linear layer of 1024^3 over its product's in fp32: goal 1.1",
        lambda size: linear_over_product(*size.choose((1024, 40), (64, 1)))),
    "history": Figure(
        "seconds", "CPU time of opening it: goals 4 with all change points, 0.3 after one more run, 0.2 for a series",
        lambda size, what: _history(size, what).cpu, "what", long_history.WORKS),
    "history_peak_bytes": Figure(
        "bytes", "peak of a process that opens it and finds all change points: goal 400 MiB",
        lambda size: _history(size, "first open").peak),
}  # fmt: skip


def _benchmark(name: str, figure: Figure) -> Benchmark:
    """Makes a function for asv. If what it measures changes, increase its version, because its source does not show
    that.
    """

    def benchmark(*value: str, size: Size = Size.FULL) -> float:
        return figure.measure(size, *value)

    benchmark.__name__, benchmark.__doc__ = f"track_{name}", figure.what
    names, values = ([figure.parameter], [list(figure.values)]) if figure.parameter else ([], [])
    vars(benchmark).update(unit=figure.unit, timeout=600, version="1", param_names=names, params=values)
    return benchmark


BENCHMARKS = [_benchmark(name, figure) for name, figure in FIGURES.items()]
# asv finds functions by their names in a module.
globals().update({benchmark.__name__: benchmark for benchmark in BENCHMARKS})


def cases(benchmark: Benchmark) -> Iterator[tuple[str, ...]]:
    """Yields the arguments of a benchmark: one tuple for each value of its parameter, or one empty tuple."""
    return itertools.product(*vars(benchmark)["params"])


def show(names: Collection[str]) -> None:
    """Measures these figures, and prints each as soon as it is measured."""
    for name in names:
        benchmark = BENCHMARKS[[*FIGURES].index(name)]
        for words in cases(benchmark):
            say(f"{' '.join((name, *words)):<34} {benchmark(*words):.6g} {FIGURES[name].unit}")


def main() -> None:
    only = options(__doc__, only=("", f"figures to measure, of {', '.join(FIGURES)}; all without this option")).only
    names = only.split(",") if only else [*FIGURES]
    if unknown := set(names) - FIGURES.keys():
        sys.exit(f"--only {min(unknown)}: no such figure. There are {', '.join(FIGURES)}.")
    show(names)


if __name__ == "__main__":
    main()
