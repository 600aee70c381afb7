"""A suite measured several times, each time by fresh processes and some time later: what a sitting says of another."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

from fp8bench.analysis.findings import findings
from fp8bench.errors import UsageError
from fp8bench.model import Interval, Request, Run
from fp8bench.pipeline import execute
from fp8bench.protocols import Observer
from fp8bench.units import clock

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
