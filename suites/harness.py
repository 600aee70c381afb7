"""fp8bench's benchmarks of itself, for asv; `python -m suites.harness` prints them without asv.

Figures are CPU time or ratios of neighbouring runs where wall time on a shared machine would say little. Lower is
better in all.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fp8bench.corpus import prepare_corpus
from fp8bench.measure.bench import Settings
from fp8bench.measure.handle import ProcessWorker
from fp8bench.model import Request
from fp8bench.plan import make_plan

ROOT = Path(__file__).resolve().parents[1]
_REPEATS = 5
_MISSION = ("suite", "transformer", "--dtypes", "fp8,bf16")

# The states of the mission's command (two of bf16, one of fp8), stepped in a bare loop: what memory it takes anyway.
_BARE = """
import sys
from pathlib import Path
from fp8bench.corpus import prepare_corpus
from fp8bench.measure.bench import Bench, Settings
from fp8bench.plan import make_plan
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


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def _run(words: tuple[str, ...], folder: str, expected: int = 0) -> None:
    """A command that ends otherwise than expected has not been measured."""
    done = subprocess.run(words, cwd=folder, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode != expected:
        raise RuntimeError(f"{words} ended with {done.returncode}, not {expected}: {done.stderr[-500:]}")


def _cpu_seconds(*words: str, expected: int = 0) -> float:
    """The least CPU time of a few runs of `fp8bench WORDS` as a process of its own."""
    best = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(_REPEATS):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            _run((sys.executable, "-m", "fp8bench", *words), folder, expected)
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
    from fp8bench.measure.calibration import calibrate
    from fp8bench.registry import devices

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
        return statistics.median(_harness_ratio(Settings(corpus=corpus.path), corpus.identity) for _ in range(5))


def _harness_ratio(settings: Settings, corpus: str) -> float:
    """The median of pairs in one process; processes differ by about 1% through luck with memory alone."""
    with ProcessWorker(settings) as worker:
        facts = worker.probe()
        group = make_plan(Request("transformer", ("bf16",), ("cpu",)), facts, corpus).groups[0]
        inside, outside = worker.ask(600.0, "bare_loop", group.cases[0].case, facts[0], 4, 40)
    return statistics.median(one / other for one, other in zip(inside, outside, strict=True))


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


_UNITS: dict[Callable[[], float], str] = {
    track_help: "seconds",
    track_list: "seconds",
    track_bad_usage: "seconds",
    track_marker_on: "seconds",
    track_marker_off: "seconds",
    track_harness_over_bare_loop: "ratio",
    track_mission_seconds: "seconds",
    track_mission_quick_seconds: "seconds",
    track_mission_peak_bytes: "bytes",
    track_memory_above_bare_loop: "bytes",
}
for _benchmark, _unit in _UNITS.items():
    _benchmark.unit = _unit  # type: ignore[attr-defined]
    _benchmark.timeout = 600  # type: ignore[attr-defined]


if __name__ == "__main__":
    for _benchmark, _unit in _UNITS.items():
        print(  # noqa: T201 - a script of its own, not part of the package
            f"{_benchmark.__name__.removeprefix('track_'):<28} {_benchmark():.6g} {_unit}", flush=True
        )
