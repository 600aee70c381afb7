"""The most that a device can do: how it is measured, and the ceiling of a case."""

from __future__ import annotations

import time
from dataclasses import replace

from fp8bench.errors import WorkerError
from fp8bench.measure.handle import Worker
from fp8bench.measure.limits import COMPILE_SECONDS
from fp8bench.model import Ceiling, Ceilings, DeviceFacts, Limit, PlannedCase
from fp8bench.registry import precisions

# For all rates of a device, once a week. Making large arrays takes longer: rates of memory then have fewer runs.
SECONDS = 12.0
RUNS, LEAST_RUNS = 5, 2
# The share of the time that the search before the runs takes.
_SEARCH = 0.4


def ceiling_of(planned: PlannedCase, ceilings: Ceilings | None) -> Ceiling | None:
    """The most that a case can do; None where its device is unknown.

    Products of a narrow dtype may be computed in a wider one where that is faster (fp16's on a processor, say). An
    emulated case may multiply in any dtype.
    """
    if ceilings is None:
        return None
    products = [rate for rate in ceilings.rates if rate.limit is Limit.PRODUCT and rate.runs]
    if not planned.support.is_emulated:
        names = (planned.case.precision, *(name for _, name in planned.case.precision_map))
        rank = max(precisions.get(name).rank for name in names)
        products = [rate for rate in products if precisions.get(rate.precision).rank <= rank]
    flops = max((max(rate.runs) for rate in products), default=None)
    return Ceiling(flops, ceilings.best(Limit.CACHED), ceilings.rates, ceilings.device)


def measure_ceilings(worker: Worker, device: DeviceFacts) -> Ceilings:
    """Searches the best shape of every rate, then measures all rates in several runs.

    A rate has RUNS runs, or LEAST_RUNS where it takes more than its part of the time. A run of all rates ends before
    the next one begins, so that runs also show how the machine changes. A lost worker ends one rate only.
    """
    bench = worker.within(COMPILE_SECONDS)
    # The first run searches shapes, so it gets a separate share of the time.
    rates = list(bench.ceiling_rates(device))
    spent = [0.0] * len(rates)
    for run in range(1 + RUNS):
        share = (_SEARCH if run == 0 else (1 - _SEARCH) / RUNS) * SECONDS / len(rates)
        for place, rate in enumerate(rates):
            # A slow rate stops early, or it would take the time of the rates after it.
            too_slow = run > LEAST_RUNS and spent[place] > SECONDS / len(rates)
            if rate.why or too_slow:
                continue
            start = time.monotonic()
            try:
                rates[place] = bench.ceiling(device, rate, share)
            except WorkerError as error:
                # The fault is kept as the rate's reason; a new worker measures the others.
                rates[place] = replace(rate, runs=(), why=str(error)[:200])
                worker.restart()
            spent[place] += time.monotonic() - start
    return Ceilings(tuple(rates), device=device.name)
