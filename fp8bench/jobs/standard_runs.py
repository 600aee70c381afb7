"""A standard case in fresh processes, before anything else was measured: how far apart runs lie on this machine."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8bench.analysis.findings import findings
from fp8bench.files import make_store
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.handle import ProcessWorker
from fp8bench.model import Request
from fp8bench.model.raw import Settings
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.pipeline import execute
from fp8bench.store.reruns import add_reruns
from fp8bench.units import percent

# More than the comparisons that give a spread, and few enough to wait for.
_RUNS = 6
_AXES = {"shape": "512x512x512", "product": "forward"}


def standard_runs(store: Path, observer: JobObserver) -> Iterator[str]:
    """Of every device that works; what they differ by is kept in the store, for the intervals of later runs."""
    make_store(store)
    with ProcessWorker(Settings()) as worker:
        keys = [one.key for one in worker.probe() if not one.unusable]
    for device in keys:
        axes = tuple((name, (value,)) for name, value in _AXES.items())
        request = Request("gemm", ("fp32", "bf16"), (device,), axes=axes, rounds=LEAST_ROUNDS, energy=False, tape=False)
        seen: list[float] = []
        with tempfile.TemporaryDirectory() as folder, observer.measuring() as watching:
            for number in range(_RUNS):
                told = f"a standard case, run {number + 1} of {_RUNS}"
                run = execute(request, Path(folder), watching, "fp8bench doctor --calibrate", note=told)
                if not run.finished:
                    break
                add_reruns(run.records, run, store)
                seen += [math.log(found.ratio.point) for found in findings(run).values() if found.ratio is not None]
        yield f"how far runs lie apart on {device}"
        yield f"  {_spread_words(seen)}"


def _spread_words(logs: Sequence[float]) -> str:
    if len(logs) < 2:
        return "not known: the standard case, a product of 512 in fp32 and bf16, gave no two ratios"
    apart, spread = math.exp(max(logs) - min(logs)) - 1, math.expm1(statistics.stdev(logs))
    return (
        f"a product of 512, bf16 over fp32, in {len(logs)} fresh processes: {percent(apart, 2)} at most, a standard "
        f"deviation of {percent(spread, 2)}; kept for the intervals of later runs, and each run adds to it"
    )
