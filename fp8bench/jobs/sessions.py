"""A suite measured several times, each time by fresh processes and some time later: what a sitting says of another.

And a standard case in fresh processes, before anything else was measured: how far apart runs lie on this machine.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench.analysis.findings import findings
from fp8bench.errors import UsageError
from fp8bench.files import make_store
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.handle import ProcessWorker
from fp8bench.model import Interval, Request, Run
from fp8bench.model.raw import Settings
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.pipeline import execute
from fp8bench.protocols import Observer
from fp8bench.store.reruns import add_reruns
from fp8bench.units import clock, percent

_TOLD_EVERY = 1.0


def check_sessions(sessions: object, apart: object) -> None:
    """Raise UsageError for what are no sessions, and for a wait between them where there is only one."""
    if isinstance(sessions, bool) or not isinstance(sessions, int) or sessions < 1:
        raise UsageError(f"sessions: expected a whole number from 1 on, got {sessions!r}.")
    if not isinstance(apart, int | float) or not 0 <= apart < math.inf:
        raise UsageError(f"apart: expected seconds from 0 on, got {apart!r}.")
    if apart and sessions == 1:
        raise UsageError("there is one session, and apart is the time between them. Ask for more sessions, 3 say.")


def execute_sessions(
    request: Request, store: Path, observer: Observer, command: str, sessions: int, apart: float
) -> Run:
    """The last of so many runs, whose intervals are the hull of what all of them said; each is kept as a run.

    `apart` are seconds from the end of one to the begin of the next. An interrupt gives the last one that there is.
    """
    known: dict[str, tuple[Interval, ...]] = {}
    for number in range(sessions):
        note = f"session {number + 1} of {sessions}"
        run = execute(request, store, observer, command, note=note, sessions=known)
        if not run.finished or number + 1 == sessions or not _waited(run, apart, observer, number + 2, sessions):
            break
        alone = replace(run, records=tuple(replace(record, sessions=(), reruns=None) for record in run.records))
        ratios = ((case, found.ratio) for case, found in findings(alone).items())
        known = known | {
            case: (*known.get(case, ()), ratio) for case, ratio in ratios if ratio is not None and ratio.level
        }
    return run


def _waited(run: Run, apart: float, observer: Observer, number: int, sessions: int) -> bool:
    until, case = time.monotonic() + apart, run.plan.groups[0].cases[0].case
    try:
        while (left := until - time.monotonic()) > 0:
            observer.working(case, f"session {number} of {sessions} begins in {clock(left)}", 1 - left / apart)
            time.sleep(min(_TOLD_EVERY, left))
    except KeyboardInterrupt:
        return False
    return True


# More than the comparisons that give a spread, and few enough to wait for.
_RUNS = 6
_AXES = {"shape": "512x512x512", "product": "forward"}


def standard_runs(store: Path, observer: JobObserver) -> Iterator[str]:
    """Of every device that works; what they differ by is kept in the store, for the intervals of later runs."""
    make_store(store)
    with ProcessWorker(Settings()) as worker:
        keys = [device_facts.key for device_facts in worker.probe() if not device_facts.unusable]
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
