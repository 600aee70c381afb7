"""fp8bench's benchmarks of itself, for asv; `python -m suites.harness` prints them without asv.

Figures are CPU time or ratios of neighbouring runs where wall time on a shared machine would say little. Lower is
better in all. What is measured is the fp8bench that this process imports, in the processes that it starts, too.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import pickle
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import fp8bench
from fp8bench.measure.handle import ProcessWorker
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import AbsentDevice
from fp8bench.measure.sensors.sampler_thread import Source, SourceKind
from fp8bench.model import Request
from fp8bench.model.raw import Settings
from fp8bench.model.readings import Unavailable
from fp8bench.plan.corpus import prepare_corpus
from fp8bench.plan.make import make_plan
from suites import compacted_history, ranks
from suites.gate import Setting, false_alarms, found
from suites.long_history import WORKS, Cost, measure, write_module, write_store
from suites.quantisers import CASTS, OTHERS, cold_compile, linear_over_product, over_copy, over_torchao

SUITES = Path(__file__).resolve().parent
PACKAGES = Path(fp8bench.__file__).resolve().parents[1]
_REPEATS = 5
_RUNS_OF_A_COMMIT = 20
_MISSION = ("suite", "transformer", "--dtypes", "fp8,bf16")

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

# A commit with as many runs of gemm's grid as its argument says, of one measurement; then, in a process of its own,
# what the last of them costs the view.
_RUNS = """
import secrets, subprocess, sys
from dataclasses import replace
from pathlib import Path
from fp8bench.store.runs.write import start_run
from fp8bench.model import Request
from fp8bench.pipeline import execute
from fp8bench.protocols import SilentObserver
folder = Path(sys.argv[1])
git = ("git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a")
for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "x")):
    subprocess.run((*git, *words), check=True)
run = execute(Request("gemm", rounds=24, grid=True), folder / "store", SilentObserver(), "", folder=folder)
for number in range(1, int(sys.argv[2])):
    writer = start_run(replace(run, id=secrets.token_hex(4)), folder / "store")
    writer.append(run.records)
    writer.finish("finished")
"""
_VIEW = """
import sys, time
from pathlib import Path
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.read import load_run
from fp8bench.store.asv.view import update_view
store = Path(sys.argv[1]) / "store"
run = load_run(sorted(run_files(store))[-1])
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


def _cpu_seconds(*words: str, expected: int = 0) -> float:
    """The least CPU time of a few runs of `fp8bench WORDS` as a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return _least_cpu_seconds((sys.executable, "-m", "fp8bench", *words), folder, expected)


def _least_cpu_seconds(words: tuple[str, ...], folder: str, expected: int = 0) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _run(words, folder, expected)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def track_help() -> float:
    """CPU time of `fp8bench --help`."""
    return _cpu_seconds("--help")


def track_list() -> float:
    """CPU time of a bare `fp8bench list`."""
    return _cpu_seconds("list")


def track_bad_usage() -> float:
    """CPU time of a mistyped suite."""
    return _cpu_seconds("suite", "nosuch", expected=2)


def _overheads() -> tuple[float, float]:
    from fp8bench.registry import devices
    from fp8bench.worker.clock import calibrate

    cost = calibrate(devices.get("cpu"), 0)
    return cost.marker_on, cost.marker_off


def track_marker_on() -> float:
    """Seconds of one `with phase.gemm` while timing."""
    return _overheads()[0]


def track_marker_off() -> float:
    """Seconds of one `with phase.gemm` in an untimed pass."""
    return _overheads()[1]


def track_harness_over_bare_loop() -> float:
    """The nano transformer's step inside the harness over the same step in a bare loop: CPU time, five processes."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare_corpus(None, Path(folder))
        ratio = statistics.median(_harness_ratio(Settings(corpus=corpus.path), corpus.identity) for _ in range(5))
    return float(f"{ratio:.6g}")  # asv prints all the digits of a ratio


def _harness_ratio(settings: Settings, corpus: str) -> float:
    """The median of pairs in one process; processes differ by about 1% through luck with memory alone."""
    with ProcessWorker(settings) as worker:
        facts = worker.probe()
        group = make_plan(Request("transformer", ("bf16",), ("cpu",)), facts, corpus).groups[0]
        inside, outside = worker.ask(600.0, "bare_loop", group.cases[0].case, facts[0], 4, 40)
    return statistics.median(one / other for one, other in zip(inside, outside, strict=True))


def track_ranks_over_bare_loop() -> float:
    """A step of about 50 ms that two ranks take, from the request to both answers, over the same step in a bare loop.

    Wall time of the slowest rank, all of which begin together in either. Goal 1.02, on a machine with two free cores.
    """
    return float(f"{ranks.cost().ratio:.6g}")


def track_ranks_over_bare_loop_upper() -> float:
    """The upper end of that figure's 95% interval: what it can be said to be below."""
    return float(f"{ranks.cost().high:.6g}")


def track_ranks_beside_step() -> float:
    """Seconds from the request to both answers that are not the slowest rank's step."""
    return ranks.cost().beside


def _wall_seconds(*words: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        _run((sys.executable, "-m", "fp8bench", *words), folder)
        return time.monotonic() - start


def track_mission_seconds() -> float:
    """Wall time of `fp8bench suite transformer --dtypes fp8,bf16`."""
    return _wall_seconds(*_MISSION)


def track_mission_quick_seconds() -> float:
    """Wall time of the same with --quick."""
    return _wall_seconds(*_MISSION, "--quick")


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


def track_mission_peak_bytes() -> int:
    """Peak resident bytes of parent and worker together, under the mission's command."""
    return _peak_bytes((sys.executable, "-m", "fp8bench", *_MISSION))


def track_memory_above_bare_loop() -> int:
    """The same less the peak of a bare loop over the same states."""
    return track_mission_peak_bytes() - _peak_bytes((sys.executable, "-c", _BARE, "FOLDER"))


def track_update_view() -> float:
    """CPU time to bring asv's view up to date with a run of gemm's grid, the twentieth of its commit."""
    with tempfile.TemporaryDirectory() as folder:
        _run((sys.executable, "-c", _RUNS, folder, str(_RUNS_OF_A_COMMIT)), folder)
        return min(float(_run((sys.executable, "-c", _VIEW, folder), folder)) for _ in range(_REPEATS))


def track_sampler_share() -> float:
    """What the thread that looks at an energy counter takes of a processor: CPU time over the time of its window."""
    counter = Source(SourceKind.COUNTER, lambda: 30.0 * (time.perf_counter() // 0.1))
    meter = Meter((counter,), AbsentDevice("the harness has a counter only"))
    shares = []
    for _ in range(_REPEATS):
        energy = meter.idle(1.5)
        if isinstance(energy, Unavailable):
            raise RuntimeError(energy.reason)
        shares.append(energy.sampler_seconds / energy.seconds)
    return min(shares)


def track_asv_combination() -> float:
    """CPU time of the process that asv starts for one metric of one combination of a suite's parameters."""
    asv = importlib.util.find_spec("asv")
    if asv is None or asv.origin is None:
        raise RuntimeError("asv is not installed for this Python. Install fp8bench[dev].")
    with tempfile.TemporaryDirectory() as folder:
        measured = {"gemm.Gemm.track_time": {("fp32", "512"): ("samples", [float(number) for number in range(24)])}}
        (Path(folder) / "cache.pickle").write_bytes(pickle.dumps(measured))
        script, result = Path(asv.origin).with_name("benchmark.py"), Path(folder) / "result.json"
        words = (sys.executable, str(script), "run", str(SUITES), "gemm.Gemm.track_time-0", "{}", "None", str(result))
        seconds = _least_cpu_seconds(words, folder)
        if '"samples"' not in result.read_text():
            raise RuntimeError(f"asv read {result.read_text():.200} instead of samples")
        return seconds


def track_quantiser_over_copy(name: str) -> float:
    """A fused quantiser over a copy of as many bytes: goals 1.33 for e4m3 and e5m2, 2 for MX, 2.9 for nvfp4 of fp32."""
    return over_copy(name)


def track_quantiser_over_torchao(name: str) -> float:
    """A fused MX quantiser over torchao's on a CPU: goal 0.02."""
    return over_torchao(name)


def track_cold_compile(name: str) -> float:
    """CPU seconds of a quantiser's first compile: goal 30."""
    return cold_compile(name)


def track_emulated_linear_over_product() -> float:
    """An emulated mxfp8 linear layer of 1024^3 over its product in fp32: goal 1.1."""
    return linear_over_product()


def track_history(what: str) -> float:
    """CPU seconds of opening 300 commits of 1,000 series, beside the start of a process.

    Goals: 4 with all change points, 0.3 after one more run, 0.2 to show one series.
    """
    return _opening_history(what).cpu


def track_history_peak_bytes() -> int:
    """Peak resident bytes of a process that opens them and finds all change points: goal 400 MiB."""
    return _opening_history("first open").peak


def _opening_history(what: str) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        write_module(Path(folder))
        write_store(Path(folder) / ".fp8bench")
        return measure(Path(folder), what, _environment())


def track_compacted(what: str) -> float:
    """CPU seconds of reading 3,000,000 points out of Parquet files, beside the start of a process.

    Goals: 0.05 for each of ten series, 3 for the medians of all commits and series.
    """
    return compacted_history.measure(_compacted(), what, _environment()).cpu


def track_compacted_peak_bytes() -> int:
    """Peak resident bytes of a process that reads all of them: goal 400 MiB."""
    return compacted_history.measure(_compacted(), "all medians", _environment()).peak


def track_compaction_peak_bytes() -> int:
    """Peak resident bytes of a process that compacts a month of 740,000 rows: goal 400 MiB."""
    with tempfile.TemporaryDirectory() as folder:
        return compacted_history.make(Path(folder), _environment(), compacted_history.MONTH).peak


@functools.cache
def _compacted() -> Path:
    """A store that is read only, for all of this process. Making it takes a minute."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    compacted_history.make(folder, _environment())
    return folder


def track_gate_false_alarms() -> float:
    """The share of builds of 100 cases that a gate fails for nothing: one run a side, 2% from run to run."""
    return false_alarms(Setting(1, 1, 0.02), 500)


def track_gate_missed() -> float:
    """The share in which one case of 100 that takes 30% longer does not fail, by the same runs."""
    return 1 - found(Setting(1, 1, 0.02), 1.3, 100)


_UNITS: dict[Callable[..., float], str] = {
    track_help: "seconds",
    track_list: "seconds",
    track_bad_usage: "seconds",
    track_marker_on: "seconds",
    track_marker_off: "seconds",
    track_harness_over_bare_loop: "ratio",
    track_ranks_over_bare_loop: "ratio",
    track_ranks_over_bare_loop_upper: "ratio",
    track_ranks_beside_step: "seconds",
    track_mission_seconds: "seconds",
    track_mission_quick_seconds: "seconds",
    track_mission_peak_bytes: "bytes",
    track_memory_above_bare_loop: "bytes",
    track_sampler_share: "ratio",
    track_update_view: "seconds",
    track_asv_combination: "seconds",
    track_quantiser_over_copy: "ratio",
    track_quantiser_over_torchao: "ratio",
    track_cold_compile: "seconds",
    track_emulated_linear_over_product: "ratio",
    track_gate_false_alarms: "share",
    track_gate_missed: "share",
    track_history: "seconds",
    track_history_peak_bytes: "bytes",
    track_compacted: "seconds",
    track_compacted_peak_bytes: "bytes",
    track_compaction_peak_bytes: "bytes",
}
# By name; every one of them has one parameter.
_PARAMETERS: dict[Callable[..., float], tuple[str, tuple[str, ...]]] = {
    track_quantiser_over_copy: ("quantiser", tuple(CASTS)),
    track_quantiser_over_torchao: ("quantiser", tuple(OTHERS)),
    track_cold_compile: ("quantiser", ("e4m3 fp32", "mxfp8 bf16", "nvfp4 fp32")),
    track_history: ("what", WORKS),
    track_compacted: ("what", compacted_history.WORKS),
}
for _benchmark, _unit in _UNITS.items():
    _benchmark.unit = _unit  # type: ignore[attr-defined]
    _benchmark.timeout = 600  # type: ignore[attr-defined]
    # By itself asv takes the hash of a function's text: what it measures stands elsewhere. Raise it with that.
    _benchmark.version = "1"  # type: ignore[attr-defined]


for _benchmark, (_name, _values) in _PARAMETERS.items():
    _benchmark.params, _benchmark.param_names = list(_values), [_name]  # type: ignore[attr-defined]


if __name__ == "__main__":
    for _benchmark, _unit in _UNITS.items():
        for _given in _PARAMETERS.get(_benchmark, ("", ("",)))[1]:
            _words = f"{_benchmark.__name__.removeprefix('track_')} {_given}"
            _figure = _benchmark(*filter(None, (_given,)))
            print(f"{_words:<34} {_figure:.6g} {_unit}", flush=True)  # noqa: T201 - a script of its own
