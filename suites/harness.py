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
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

import fp8bench
from fp8bench.measure.handle import ProcessWorker
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import AbsentDevice
from fp8bench.measure.sensors.sampler_thread import Source, SourceKind
from fp8bench.model import Request
from fp8bench.model.raw import Settings
from fp8bench.model.readings import Unavailable
from fp8bench.pipeline import execute
from fp8bench.plan.corpus import prepare_corpus
from fp8bench.plan.make import make_plan
from fp8bench.protocols import SilentObserver
from fp8bench.store.runs.run_file import start_run
from suites import compacted_history, ranks
from suites.gate import Setting, false_alarms, found
from suites.long_history import COMMITS, PAIRS, WORKS, Cost, measure, write_module, write_store
from suites.quantisers import CASTS, OTHERS, cold_compile, linear_over_product, over_copy, over_torchao

SUITES = Path(__file__).resolve().parent
PACKAGES = Path(fp8bench.__file__).resolve().parents[1]
# Commits and pairs of a compacted store that has all that a large one has.
_FEW = (40, 1)
_T = TypeVar("_T")
Benchmark = Callable[..., float]
BENCHMARKS: list[Benchmark] = []


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


def _benchmark(unit: str, **parameter: tuple[str, ...]) -> Callable[[Benchmark], Benchmark]:
    """Tell asv of a benchmark, which has one parameter or none, and list it.

    By itself asv takes the hash of a function's text for its version: what it measures stands elsewhere. Raise the
    version with that.
    """

    def listed(benchmark: Benchmark) -> Benchmark:
        vars(benchmark).update(unit=unit, timeout=600, version="1")
        vars(benchmark).update(param_names=list(parameter), params=[list(values) for values in parameter.values()])
        BENCHMARKS.append(benchmark)
        return benchmark

    return listed


def cases(benchmark: Benchmark) -> Iterator[tuple[str, ...]]:
    """The arguments of a benchmark: each value of its parameter, or none."""
    return itertools.product(*vars(benchmark)["params"])


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


def _environment() -> dict[str, str]:
    """asv takes PYTHONPATH away from its processes, and gives them ASV_PYTHONPATH instead."""
    others = [word for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]
    path = os.pathsep.join([str(PACKAGES), *others])
    return {**os.environ, "PYTHONPATH": path, "ASV_PYTHONPATH": path}


def _run(words: tuple[str, ...], folder: str, expected: int = 0) -> str:
    """What a command prints; one that ends otherwise than expected has not been measured."""
    done = subprocess.run(words, cwd=folder, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode != expected:
        raise RuntimeError(f"{words} ended with {done.returncode}, not {expected}: {done.stderr[-500:]}")
    return done.stdout


def _cpu_seconds(size: Size, *words: str, expected: int = 0) -> float:
    """The least CPU time of a few runs of `fp8bench WORDS` as a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return _least_cpu_seconds(size, (sys.executable, "-m", "fp8bench", *words), folder, expected)


def _least_cpu_seconds(size: Size, words: tuple[str, ...], folder: str, expected: int = 0) -> float:
    best = float("inf")
    for _ in range(size.repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _run(words, folder, expected)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


@_benchmark("seconds")
def track_help(size: Size = Size.FULL) -> float:
    """CPU time of `fp8bench --help`."""
    return _cpu_seconds(size, "--help")


@_benchmark("seconds")
def track_list(size: Size = Size.FULL) -> float:
    """CPU time of a bare `fp8bench list`."""
    return _cpu_seconds(size, "list")


@_benchmark("seconds")
def track_bad_usage(size: Size = Size.FULL) -> float:
    """CPU time of a mistyped suite."""
    return _cpu_seconds(size, "suite", "nosuch", expected=2)


def _overheads() -> tuple[float, float]:
    from fp8bench.registry import devices
    from fp8bench.worker.clock import calibrate

    cost = calibrate(devices.get("cpu"), 0)
    return cost.marker_on, cost.marker_off


@_benchmark("seconds")
def track_marker_on(size: Size = Size.FULL) -> float:
    """Seconds of one `with phase.gemm` while timing."""
    return _overheads()[0]


@_benchmark("seconds")
def track_marker_off(size: Size = Size.FULL) -> float:
    """Seconds of one `with phase.gemm` in an untimed pass."""
    return _overheads()[1]


@_benchmark("ratio")
def track_harness_over_bare_loop(size: Size = Size.FULL) -> float:
    """The nano transformer's step inside the harness over the same step in a bare loop: CPU time, five processes."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare_corpus(None, Path(folder))
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


@_benchmark("ratio")
def track_ranks_over_bare_loop(size: Size = Size.FULL) -> float:
    """A step of about 50 ms that two ranks take, from the request to both answers, over the same step in a bare loop.

    Wall time of the slowest rank, all of which begin together in either. Goal 1.02, on a machine with two free cores.
    """
    return float(f"{ranks.cost(size.of(ranks.PAIRS, 1)).ratio:.6g}")


@_benchmark("ratio")
def track_ranks_over_bare_loop_upper(size: Size = Size.FULL) -> float:
    """The upper end of that figure's 95% interval: what it can be said to be below."""
    return float(f"{ranks.cost(size.of(ranks.PAIRS, 1)).high:.6g}")


@_benchmark("seconds")
def track_ranks_beside_step(size: Size = Size.FULL) -> float:
    """Seconds from the request to both answers that are not the slowest rank's step."""
    return ranks.cost(size.of(ranks.PAIRS, 1)).beside


def _mission(size: Size, *words: str) -> tuple[str, ...]:
    few = size.of((), ("--rounds", "1"))
    return (sys.executable, "-m", "fp8bench", "suite", "transformer", "--dtypes", "fp8,bf16", *words, *few)


def _wall_seconds(words: tuple[str, ...]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        _run(words, folder)
        return time.monotonic() - start


@_benchmark("seconds")
def track_mission_seconds(size: Size = Size.FULL) -> float:
    """Wall time of `fp8bench suite transformer --dtypes fp8,bf16`."""
    return _wall_seconds(_mission(size))


@_benchmark("seconds")
def track_mission_quick_seconds(size: Size = Size.FULL) -> float:
    """Wall time of the same with --quick."""
    return _wall_seconds(_mission(size, "--quick"))


def _peak_bytes(words: tuple[str, ...]) -> int:
    """The largest sum of resident bytes of a process and its children, looked at every 20 ms."""
    peak = 0
    with tempfile.TemporaryDirectory() as folder:
        words = tuple(folder if word == "FOLDER" else word for word in words)
        with subprocess.Popen(
            words, cwd=folder, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
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


@_benchmark("bytes")
def track_mission_peak_bytes(size: Size = Size.FULL) -> int:
    """Peak resident bytes of parent and worker together, under the mission's command."""
    return _peak_bytes(_mission(size))


@_benchmark("bytes")
def track_memory_above_bare_loop(size: Size = Size.FULL) -> int:
    """The same less the peak of a bare loop over the same states."""
    return _peak_bytes(_mission(size)) - _peak_bytes((sys.executable, "-c", _BARE, "FOLDER"))


@_benchmark("seconds")
def track_update_view(size: Size = Size.FULL) -> float:
    """CPU time to bring asv's view up to date with a run of gemm's grid, the twentieth of its commit."""
    runs = size.of(20, 2)
    with tempfile.TemporaryDirectory() as folder:
        _write_commit(Path(folder), runs)
        words = (sys.executable, "-c", _VIEW, folder, str(runs))
        return min(float(_run(words, folder)) for _ in range(size.repeats))


def _write_commit(folder: Path, runs: int) -> None:
    """A commit with so many runs of gemm's grid, of one measurement. Runs of one start would be taken for copies."""
    git = ("git", "-c", "user.name=a", "-c", "user.email=a")
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "x")):
        _run((*git, *words), str(folder))
    run = execute(Request("gemm", rounds=24, grid=True), folder / "store", SilentObserver(), "", folder=folder)
    for number in range(1, runs):
        started = datetime.fromisoformat(run.started) + timedelta(minutes=number)
        again = replace(run, id=secrets.token_hex(4), started=started.isoformat(timespec="milliseconds"))
        writer = start_run(again, folder / "store")
        writer.append(run.records)
        writer.finish("finished")


@_benchmark("ratio")
def track_sampler_share(size: Size = Size.FULL) -> float:
    """What the thread that looks at an energy counter takes of a processor: CPU time over the time of its window."""
    counter = Source(SourceKind.COUNTER, lambda: 30.0 * (time.perf_counter() // 0.1))
    meter = Meter((counter,), AbsentDevice("the harness has a counter only"))
    shares = []
    for _ in range(size.repeats):
        energy = meter.idle(1.5)
        if isinstance(energy, Unavailable):
            raise RuntimeError(energy.reason)
        shares.append(energy.sampler_seconds / energy.seconds)
    return min(shares)


@_benchmark("seconds")
def track_asv_combination(size: Size = Size.FULL) -> float:
    """CPU time of the process that asv starts for one metric of one combination of a suite's parameters."""
    asv = importlib.util.find_spec("asv")
    if asv is None or asv.origin is None:
        raise RuntimeError("asv is not installed for this Python. Install fp8bench[dev].")
    with tempfile.TemporaryDirectory() as folder:
        measured = {"gemm.Gemm.track_time": {("fp32", "512"): ("samples", [float(number) for number in range(24)])}}
        (Path(folder) / "cache.pickle").write_bytes(pickle.dumps(measured))
        script, result = Path(asv.origin).with_name("benchmark.py"), Path(folder) / "result.json"
        words = (sys.executable, str(script), "run", str(SUITES), "gemm.Gemm.track_time-0", "{}", "None", str(result))
        seconds = _least_cpu_seconds(size, words, folder)
        if '"samples"' not in result.read_text():
            raise RuntimeError(f"asv read {result.read_text():.200} instead of samples")
        return seconds


@_benchmark("ratio", quantiser=tuple(CASTS))
def track_quantiser_over_copy(name: str, size: Size = Size.FULL) -> float:
    """A fused quantiser over a copy of as many bytes: goals 1.33 for e4m3 and e5m2, 2 for MX, 2.9 for nvfp4 of fp32."""
    return over_copy(name, *size.of((4096, 15), (64, 1)))


@_benchmark("ratio", quantiser=tuple(OTHERS))
def track_quantiser_over_torchao(name: str, size: Size = Size.FULL) -> float:
    """A fused MX quantiser over torchao's on a CPU: goal 0.02."""
    return over_torchao(name, *size.of((4096, 3), (64, 1)))


@_benchmark("seconds", quantiser=("e4m3 fp32", "mxfp8 bf16", "nvfp4 fp32"))
def track_cold_compile(name: str, size: Size = Size.FULL) -> float:
    """CPU seconds of a quantiser's first compile: goal 30."""
    return cold_compile(name, size.of(4096, 64))


@_benchmark("ratio")
def track_emulated_linear_over_product(size: Size = Size.FULL) -> float:
    """An emulated mxfp8 linear layer of 1024^3 over its product in fp32: goal 1.1."""
    return linear_over_product(*size.of((1024, 40), (64, 1)))


@_benchmark("seconds", what=WORKS)
def track_history(what: str, size: Size = Size.FULL) -> float:
    """CPU seconds of opening 300 commits of 1,000 series, beside the start of a process.

    Goals: 4 with all change points, 0.3 after one more run, 0.2 to show one series.
    """
    return _opening_history(size, what).cpu


@_benchmark("bytes")
def track_history_peak_bytes(size: Size = Size.FULL) -> int:
    """Peak resident bytes of a process that opens them and finds all change points: goal 400 MiB."""
    return _opening_history(size, "first open").peak


def _opening_history(size: Size, what: str) -> Cost:
    pairs = size.of(PAIRS, 1)
    with tempfile.TemporaryDirectory() as folder:
        write_module(Path(folder), pairs)
        write_store(Path(folder) / ".fp8bench", COMMITS, pairs)
        return measure(Path(folder), what, _environment(), pairs, size.repeats)


@_benchmark("seconds", what=compacted_history.WORKS)
def track_compacted(what: str, size: Size = Size.FULL) -> float:
    """CPU seconds of reading 3,000,000 points out of Parquet files, beside the start of a process.

    Goals: 0.05 for each of ten series, 3 for the medians of all commits and series.
    """
    return compacted_history.measure(_compacted(size), what, _environment(), size.repeats).cpu


@_benchmark("bytes")
def track_compacted_peak_bytes(size: Size = Size.FULL) -> int:
    """Peak resident bytes of a process that reads all of them: goal 400 MiB."""
    return compacted_history.measure(_compacted(size), "all medians", _environment(), size.repeats).peak


@_benchmark("bytes")
def track_compaction_peak_bytes(size: Size = Size.FULL) -> int:
    """Peak resident bytes of a process that compacts a month of 740,000 rows: goal 400 MiB."""
    with tempfile.TemporaryDirectory() as folder:
        counts = size.of((compacted_history.MONTH, PAIRS), _FEW)
        return compacted_history.make(Path(folder), _environment(), *counts).peak


@functools.cache
def _compacted(size: Size) -> Path:
    """A store that is read only, for all of this process. Making it takes a minute."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    compacted_history.make(folder, _environment(), *size.of((compacted_history.COMMITS, PAIRS), _FEW))
    return folder


@_benchmark("share")
def track_gate_false_alarms(size: Size = Size.FULL) -> float:
    """The share of builds of 100 cases that a gate fails for nothing: one run a side, 2% from run to run."""
    return false_alarms(Setting(1, 1, 0.02), size.of(500, 1))


@_benchmark("share")
def track_gate_missed(size: Size = Size.FULL) -> float:
    """The share in which one case of 100 that takes 30% longer does not fail, by the same runs."""
    return 1 - found(Setting(1, 1, 0.02), 1.3, size.of(100, 1))


def main() -> None:
    """A line for each benchmark and value of its parameter."""
    for benchmark in BENCHMARKS:
        for words in cases(benchmark):
            named = " ".join((benchmark.__name__.removeprefix("track_"), *words))
            sys.stdout.write(f"{named:<34} {benchmark(*words):.6g} {vars(benchmark)['unit']}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
