"""The most that a device can do: whether a run measures it, whole ceilings piece by piece, and the ceiling of a
case."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from fp8bench.errors import WorkerError
from fp8bench.measure.handle import Worker
from fp8bench.measure.limits import COMPILE_SECONDS
from fp8bench.model import Ceiling, Ceilings, DeviceFacts, Level, Limit, PlannedCase, Rate
from fp8bench.registry import precisions

# For the quick look at a device, once a machine; and for whole ceilings.
SECONDS = 2.0
WHOLE_SECONDS = 30.0
RUNS = 5
# The shortest piece: a stretch of calls has to fit in.
_LEAST_SECONDS = 0.02
# The share of the time of whole ceilings that the search before the runs takes.
_SEARCH = 0.4


def ceiling_of(planned: PlannedCase, known: Ceilings | None) -> Ceiling | None:
    """The most that a case can do; None where nothing is known of its device.

    Products of a narrow dtype may be computed in a wider one where that is faster (fp16's on a processor, say). An
    emulated case may multiply in any dtype.
    """
    if known is None:
        return None
    products = [rate for rate in known.rates if rate.limit is Limit.PRODUCT and rate.runs]
    if planned.support.level is not Level.EMULATED:
        names = (planned.case.precision, *(name for _, name in planned.case.precision_map))
        rank = max(precisions.get(name).rank for name in names)
        products = [rate for rate in products if precisions.get(rate.precision).rank <= rank]
    # Where the fastest dtype's runs differ too much, a slower one's bound nothing.
    fastest = max(products, key=lambda rate: max(rate.runs), default=None)
    flops = fastest.value if fastest is not None and fastest.steady else None
    return Ceiling(flops, known.bound(Limit.CACHED), known.rates if known.whole else (), known.device)


def whole_ceilings(
    worker: Worker, device: DeviceFacts, seconds: float, begun: Ceilings | None, keep: Callable[[Ceilings], None]
) -> Ceilings:
    """Searches every rate, then measures all rates in several runs.

    Each piece is handed to `keep` before the next one, and pieces in `begun` (of an interrupted measurement) are not
    measured again. A lost worker ends one rate only. A piece gets its share of the time that is left, so after a slow
    one all that follow are shorter.
    """
    bench, end = worker.within(COMPILE_SECONDS), time.monotonic() + seconds
    rates = list(begun.rates if begun is not None else bench.ceiling_rates(device))
    for run in range(RUNS + 1):
        left = [place for place, rate in enumerate(rates) if not (len(rate.runs) >= run if run else rate.shape)]
        for number, place in enumerate(left):
            rate, weight = rates[place], _SEARCH if run == 0 else (1 - _SEARCH) / RUNS
            after = (1 - _SEARCH) * (RUNS - run) / RUNS
            share = max(end - time.monotonic(), 0.0) * weight / (weight * (len(left) - number) + after * len(rates))
            share = max(share, _LEAST_SECONDS)
            if rate.why:
                continue
            try:
                rates[place] = bench.ceiling(device, rate, share)
            except WorkerError as error:
                rates[place] = replace(rate, runs=(), why=str(error)[:200])
                worker.restart()
            keep(Ceilings(tuple(rates), device=device.name))
    return Ceilings(tuple(rates), device=device.name)


def pieces_of(ceilings: Ceilings) -> tuple[int, int]:
    """How many pieces of whole ceilings are measured, and of how many; failed rates have none."""
    wanted: list[Rate] = [rate for rate in ceilings.rates if not rate.why]
    return sum(bool(rate.shape) + len(rate.runs) for rate in wanted), (RUNS + 1) * len(wanted)
