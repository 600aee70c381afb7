"""fp8bench's benchmarks of itself, for asv; `python -m suites.harness` prints them without asv.

Figures are CPU time or ratios of neighbouring runs where wall time on a shared machine would say little. Lower is
better in all. What is measured is the fp8bench that this process imports, in the processes that it starts, too.
"""

from __future__ import annotations

import atexit
import enum
import functools
import importlib.util
import itertools
import math
import os
import pickle
import resource
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

from fp8bench.measure.handle import ProcessWorker
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.measure.sensors.energy import Source, SourceKind
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import AbsentDevice
from fp8bench.model import Request
from fp8bench.model.raw import Settings
from fp8bench.model.readings import Unavailable
from fp8bench.pipeline import execute
from fp8bench.plan.corpus import prepare_corpus
from fp8bench.plan.make import make_plan
from fp8bench.protocols import SilentObserver
from fp8bench.store.runs.run_file import start_run
from suites import long_history
from suites.gate import Setting, false_alarms, found
from suites.long_history import COMMITS, PAIRS, Cost
from suites.quantisers import CASTS, OTHERS, cold_compile, linear_over_product, over_copy, over_torchao
from suites.trials import FP8BENCH, environment, ran, say, scratch

SUITES = Path(__file__).resolve().parent
# Commits and pairs of a compacted store that has all that a large one has.
_FEW = (40, 1)
_T = TypeVar("_T")
Benchmark = Callable[..., float]


class Size(enum.Enum):
    """How much a benchmark does: all that its figure needs, or as little as shows that it works."""

    FULL = enum.auto()
    SMALLEST = enum.auto()

    def of(self, full: _T, smallest: _T) -> _T:
        """The one that is this size's."""
        return full if self is Size.FULL else smallest

    @property
    def repeats(self) -> int:
        """Of what takes a second or so."""
        return self.of(5, 1)


# The states of the mission's command (two of bf16, one of fp8), stepped in a bare loop: what memory it takes anyway.
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
    for one in bench._prepared.values():
        one.workload.step(one.state, SilentPhases())
"""

# What the last of so many runs of a commit costs the view.
_VIEW = """
import sys, time
from pathlib import Path
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run
from fp8bench.store.asv.view import update_view
store = Path(sys.argv[1]) / "store"
runs = sorted(run_files(store))
if len(runs) != int(sys.argv[2]):
    sys.exit(f"{len(runs)} runs count, not {sys.argv[2]}")
run = load_run(runs[-1])
start = time.process_time()
words = update_view(run, store)
seconds = time.process_time() - start
if "6 cases" not in words:
    sys.exit(words)
print(seconds)
"""


def _cpu_seconds(size: Size, words: Sequence[str], folder: Path | None = None, end: int = 0) -> float:
    """The least CPU time of a few runs of a command as a process of its own, in an empty folder or in this one."""
    best = float("inf")
    with scratch() as empty:
        for _ in range(size.repeats):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            ran(words, folder or empty, (end,))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def _markers() -> tuple[float, float]:
    from fp8bench.registry import devices
    from fp8bench.worker.clock import calibrate

    cost = calibrate(devices.get("cpu"), 0)
    return cost.marker_on, cost.marker_off


def _harness_over_bare_loop(size: Size) -> float:
    with scratch() as folder:
        corpus = prepare_corpus(None, folder)
        settings = Settings(corpus=corpus.path)
        ratio = statistics.median(_harness_ratio(size, settings, corpus.identity) for _ in range(size.repeats))
    return float(f"{ratio:.6g}")  # asv prints all the digits of a ratio


def _harness_ratio(size: Size, settings: Settings, corpus: str) -> float:
    """The median of pairs in one process; processes differ by about 1% through luck with memory alone."""
    with ProcessWorker(settings) as worker:
        facts = worker.probe()
        group = make_plan(Request("transformer", ("bf16",), ("cpu",)), facts, corpus).groups[0]
        inside, outside = worker.ask(600.0, "bare_loop", group.cases[0].case, facts[0], 4, size.of(40, 1))
    return statistics.median(one / other for one, other in zip(inside, outside, strict=True))


_RANK_SHAPE = "1408"
# As many pairs as tell the ratio to 1% either way where pairs differ by 5%.
_RANK_PAIRS = 150
_RANK_SECONDS = 60.0


class RanksCost(NamedTuple):
    """What two ranks cost: the median of slots over bare loops, pair by pair, with the ends of its 95% interval; and
    the median of the seconds of a slot that are not its step."""

    ratio: float
    low: float
    high: float
    beside: float


@functools.cache
def _ranks(size: Size) -> RanksCost:
    """Of a step of about 50 ms: pairs of a slot of one call and a bare loop over the same step, both on the slowest of
    two ranks, which begin together. For a machine with two free cores.

    A median lies between the two values that hold it in 95% of samples, whatever they are distributed like.
    """
    pairs = size.of(_RANK_PAIRS, 1)
    with RanksWorker(Settings(), 2) as worker:
        facts = worker.probe()
        request = Request("gemm", ("fp32",), ("cpu",), axes=(("shape", (_RANK_SHAPE,)),), ranks=2)
        case = make_plan(request, facts).groups[0].cases[0].case
        worker.within(_RANK_SECONDS).prepare("a", case, facts[0])
        measured = [_pair(worker, turn % 2 == 0) for turn in range(pairs)]
    ratios, away = sorted(ratio for ratio, _ in measured), math.ceil(0.98 * math.sqrt(pairs))
    ends = max(0, pairs // 2 - away), min(pairs - 1, pairs // 2 + away)
    low, high = (ratios[end] for end in ends)
    return RanksCost(statistics.median(ratios), low, high, statistics.median(beside for _, beside in measured))


def _pair(worker: RanksWorker, bare_first: bool) -> tuple[float, float]:
    """A slot over a bare loop, and the seconds of the slot that are not its step."""
    bare = worker.within(_RANK_SECONDS).loop("a", 1) if bare_first else math.nan
    start = time.perf_counter()
    slot = worker.within(_RANK_SECONDS).slot("a", 1, 0)
    seconds = time.perf_counter() - start
    if not bare_first:
        bare = worker.within(_RANK_SECONDS).loop("a", 1)
    return seconds / bare, seconds - slot.steps[0].seconds


def _mission(size: Size, *words: str) -> tuple[str, ...]:
    few = size.of((), ("--rounds", "1"))
    return (*FP8BENCH, "suite", "transformer", "--dtypes", "fp8,bf16", *words, *few)


def _wall_seconds(words: tuple[str, ...]) -> float:
    with scratch() as folder:
        start = time.monotonic()
        ran(words, folder)
        return time.monotonic() - start


def _peak_bytes(words: tuple[str, ...]) -> int:
    """The largest sum of resident bytes of a process and its children, looked at every 20 ms."""
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
    """Resident bytes of a process and its direct children; 0 for one that has just ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(_resident(int(child)) for child in children)


def _update_view(size: Size) -> float:
    runs = size.of(20, 2)
    with scratch() as folder:
        _write_commit(folder, runs, size.of(24, 1))
        words = (sys.executable, "-c", _VIEW, str(folder), str(runs))
        return min(float(ran(words, folder).stdout) for _ in range(size.repeats))


def _write_commit(folder: Path, runs: int, rounds: int) -> None:
    """A commit with so many runs of gemm's grid, of one measurement. Runs of one start would be taken for copies."""
    git = ("git", "-c", "user.name=a", "-c", "user.email=a")
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "x")):
        ran((*git, *words), folder)
    run = execute(Request("gemm", rounds=rounds, grid=True), folder / "store", SilentObserver(), "", folder=folder)
    for number in range(1, runs):
        started = datetime.fromisoformat(run.started) + timedelta(minutes=number)
        again = replace(run, id=secrets.token_hex(4), started=started.isoformat(timespec="milliseconds"))
        writer = start_run(again, folder / "store")
        writer.append(run.records)
        writer.finish("finished")


def _sampler_share(size: Size) -> float:
    counter = Source(SourceKind.COUNTER, lambda: 30.0 * (time.perf_counter() // 0.1))
    meter = Meter((counter,), AbsentDevice("the harness has a counter only"))
    shares = []
    for _ in range(size.repeats):
        energy = meter.idle(1.5)
        if isinstance(energy, Unavailable):
            raise RuntimeError(energy.reason)
        shares.append(energy.sampler_seconds / energy.seconds)
    return min(shares)


def _asv_combination(size: Size) -> float:
    asv = importlib.util.find_spec("asv")
    if asv is None or asv.origin is None:
        raise RuntimeError("asv is not installed for this Python. Install fp8bench[dev].")
    with scratch() as folder:
        samples = {"gemm.Gemm.track_time": {("fp32", "512"): ("samples", [float(number) for number in range(24)])}}
        (folder / "cache.pickle").write_bytes(pickle.dumps(samples))
        script, result = Path(asv.origin).with_name("benchmark.py"), folder / "result.json"
        words = (sys.executable, str(script), "run", str(SUITES), "gemm.Gemm.track_time-0", "{}", "None", str(result))
        seconds = _cpu_seconds(size, words, folder)
        if '"samples"' not in result.read_text():
            raise RuntimeError(f"asv read {result.read_text():.200} instead of samples")
        return seconds


def _history(size: Size, what: str) -> Cost:
    """Of opening 300 commits of 1,000 series, beside the start of a process."""
    pairs = size.of(PAIRS, 1)
    with scratch() as folder:
        long_history.make(folder, COMMITS, pairs)
        return long_history.measure(folder, what, pairs, size.repeats)


def _compacted(size: Size, what: str) -> Cost:
    """Of reading 3,000,000 points out of Parquet files, beside the start of a process."""
    return long_history.measure_reading(_compacted_store(size), what, size.repeats)


@functools.cache
def _compacted_store(size: Size) -> Path:
    """A store that is read only, for all of this process. Making it takes a minute."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    long_history.make_compacted(folder, *size.of((long_history.MANY_COMMITS, PAIRS), _FEW))
    return folder


def _compaction_bytes(size: Size) -> int:
    with scratch() as folder:
        return long_history.make_compacted(folder, *size.of((long_history.MONTH, PAIRS), _FEW)).peak


class Figure(NamedTuple):
    """What is measured, in its unit: a figure of a size, and of each value of its parameter, where it has one."""

    unit: str
    what: str
    of: Callable[..., float]
    parameter: str = ""
    values: Sequence[str] = ()


FIGURES = {
    "help": Figure(
        "seconds", "CPU time of `fp8bench --help`", lambda size: _cpu_seconds(size, (*FP8BENCH, "--help"))),
    "list": Figure(
        "seconds", "CPU time of a bare `fp8bench list`", lambda size: _cpu_seconds(size, (*FP8BENCH, "list"))),
    "bad_usage": Figure(
        "seconds", "CPU time of a mistyped suite",
        lambda size: _cpu_seconds(size, (*FP8BENCH, "suite", "nosuch"), end=2)),
    "marker_on": Figure("seconds", "one `with phase.gemm` while timing", lambda size: _markers()[0]),
    "marker_off": Figure("seconds", "one `with phase.gemm` in an untimed pass", lambda size: _markers()[1]),
    "harness_over_bare_loop": Figure(
        "ratio", "CPU time of the nano transformer's step inside the harness over the same step in a bare loop",
        _harness_over_bare_loop),
    "ranks_over_bare_loop": Figure(
        "ratio", "wall time of two ranks' step, from the request to both answers, over a bare loop's: goal 1.02",
        lambda size: float(f"{_ranks(size).ratio:.6g}")),
    "ranks_over_bare_loop_upper": Figure(
        "ratio", "the upper end of that figure's 95% interval: what it can be said to be below",
        lambda size: float(f"{_ranks(size).high:.6g}")),
    "ranks_beside_step": Figure(
        "seconds", "from the request to both answers, less the slowest rank's step", lambda size: _ranks(size).beside),
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
    "update_view": Figure(
        "seconds", "CPU time to take the 20th run of gemm's grid, of one commit, into asv's view", _update_view),
    "sampler_share": Figure(
        "ratio", "CPU time of the thread that looks at an energy counter over the time of its window", _sampler_share),
    "asv_combination": Figure(
        "seconds", "CPU time of asv's process for one metric of one combination of parameters", _asv_combination),
    "quantiser_over_copy": Figure(
        "ratio", "CPU time of a fused quantiser over a copy's: goals 1.33 (e4m3, e5m2), 2 (MX), 2.9 (nvfp4 of fp32)",
        lambda size, name: over_copy(name, *size.of((4096, 15), (64, 1))), "quantiser", tuple(CASTS)),
    "quantiser_over_torchao": Figure(
        "ratio", "CPU time of a fused MX quantiser over torchao's: goal 0.02",
        lambda size, name: over_torchao(name, *size.of((4096, 3), (64, 1))), "quantiser", tuple(OTHERS)),
    "cold_compile": Figure(
        "seconds", "CPU time of a quantiser's first compile: goal 30",
        lambda size, name: cold_compile(name, size.of(4096, 64)),
        "quantiser", ("e4m3 fp32", "mxfp8 bf16", "nvfp4 fp32")),
    "emulated_linear_over_product": Figure(
        "ratio", "CPU time of an emulated mxfp8 linear layer of 1024^3 over its product's in fp32: goal 1.1",
        lambda size: linear_over_product(*size.of((1024, 40), (64, 1)))),
    "history": Figure(
        "seconds", "CPU time of opening it: goals 4 with all change points, 0.3 after one more run, 0.2 for a series",
        lambda size, what: _history(size, what).cpu, "what", long_history.WORKS),
    "history_peak_bytes": Figure(
        "bytes", "peak of a process that opens it and finds all change points: goal 400 MiB",
        lambda size: _history(size, "first open").peak),
    "compacted": Figure(
        "seconds", "CPU time of reading it: goals 0.05 for each of ten series, 3 for the medians of all",
        lambda size, what: _compacted(size, what).cpu, "what", long_history.READS),
    "compacted_peak_bytes": Figure(
        "bytes", "peak of a process that reads all of it: goal 400 MiB",
        lambda size: _compacted(size, "all medians").peak),
    "compaction_peak_bytes": Figure(
        "bytes", "peak of a process that compacts a month of 740,000 rows: goal 400 MiB", _compaction_bytes),
    "gate_false_alarms": Figure(
        "share", "builds of 100 cases that a gate fails for nothing: one run a side, 2% from run to run",
        lambda size: false_alarms(Setting(1, 1, 0.02), size.of(500, 1))),
    "gate_missed": Figure(
        "share", "builds in which one case of 100 that takes 30% longer does not fail, by the same runs",
        lambda size: 1 - found(Setting(1, 1, 0.02), 1.3, size.of(100, 1))),
}  # fmt: skip


def _benchmark(name: str, figure: Figure) -> Benchmark:
    """For asv, which by itself takes the hash of a function's text for its version: what it measures stands elsewhere.

    Raise the version with that.
    """

    def benchmark(*value: str, size: Size = Size.FULL) -> float:
        return figure.of(size, *value)

    benchmark.__name__, benchmark.__doc__ = f"track_{name}", figure.what
    names, values = ([figure.parameter], [list(figure.values)]) if figure.parameter else ([], [])
    vars(benchmark).update(unit=figure.unit, timeout=600, version="1", param_names=names, params=values)
    return benchmark


BENCHMARKS = [_benchmark(name, figure) for name, figure in FIGURES.items()]
# asv looks for functions by the names of a module.
globals().update({benchmark.__name__: benchmark for benchmark in BENCHMARKS})


def cases(benchmark: Benchmark) -> Iterator[tuple[str, ...]]:
    """The arguments of a benchmark: each value of its parameter, or none."""
    return itertools.product(*vars(benchmark)["params"])


def main() -> None:
    """A line for each benchmark and value of its parameter."""
    for benchmark in BENCHMARKS:
        for words in cases(benchmark):
            named = " ".join((benchmark.__name__.removeprefix("track_"), *words))
            say(f"{named:<34} {benchmark(*words):.6g} {vars(benchmark)['unit']}")


if __name__ == "__main__":
    main()
