"""Measures the highest rates of FLOPs and bytes that a device reaches, and derives the highest rates that a case can
reach (its ceiling).
"""

from __future__ import annotations

import time
from dataclasses import replace

from fp8bench.errors import WorkerError
from fp8bench.measure.handle import Worker
from fp8bench.measure.limits import COMPILE_SECONDS
from fp8bench.model import Ceiling, Ceilings, DeviceFacts, Limit, PlannedCase
from fp8bench.registry import precisions

# The time limit in seconds for measuring all rates of a device. If allocating large arrays takes too long, memory rates
# are measured in fewer runs.
CEILING_SECONDS = 12.0
RUNS_PER_RATE, MIN_RUNS_PER_RATE = 5, 2
# The share of CEILING_SECONDS for finding the fastest shapes of products and sizes of arrays, before the measured runs.
_SEARCH_TIME_SHARE = 0.4


def derive_ceiling(planned: PlannedCase, ceilings: Ceilings | None) -> Ceiling | None:
    """Returns the highest FLOP/s and bytes/s that a case can reach; None if its device was not measured.

    A product may run faster in a wider dtype, for example fp16 on a processor. So the rates of wider dtypes count
    too. An emulated case may multiply in any dtype.
    """
    if ceilings is None:
        return None
    product_rates = [rate for rate in ceilings.rates if rate.limit is Limit.PRODUCT and rate.runs]
    if not planned.support.is_emulated:
        precision_names = (planned.case.precision, *(name for _, name in planned.case.precision_map))
        max_rank = max(precisions.get(name).rank for name in precision_names)
        product_rates = [rate for rate in product_rates if precisions.get(rate.precision).rank <= max_rank]
    max_flops = max((max(rate.runs) for rate in product_rates), default=None)
    return Ceiling(max_flops, ceilings.best(Limit.CACHED), ceilings.rates, ceilings.device)


def measure_ceilings(worker: Worker, device: DeviceFacts) -> Ceilings:
    """Searches the best shape for every rate, then measures all rates in several runs.

    A rate is measured in RUNS_PER_RATE runs. It gets fewer, but at least MIN_RUNS_PER_RATE, if it uses up its share of
    the time. All rates are measured once before any is measured again, so that differences between runs show how the
    machine changes. If the worker is lost, only the rate that it measured is lost.
    """
    remote_bench = worker.with_time_limit(COMPILE_SECONDS)
    # Run 0 only finds the shape with the highest rate, and has a separate share of the time.
    rates = list(remote_bench.ceiling_rates(device))
    spent_seconds_by_rate = [0.0] * len(rates)
    for run in range(1 + RUNS_PER_RATE):
        seconds_per_rate_run = (
            (_SEARCH_TIME_SHARE if run == 0 else (1 - _SEARCH_TIME_SHARE) / RUNS_PER_RATE)
            * CEILING_SECONDS
            / len(rates)
        )
        for index, rate in enumerate(rates):
            # If a rate has used its share of CEILING_SECONDS, stop its runs, so that the other rates get their time.
            is_rate_too_slow = run > MIN_RUNS_PER_RATE and spent_seconds_by_rate[index] > CEILING_SECONDS / len(rates)
            if rate.why or is_rate_too_slow:
                continue
            start = time.monotonic()
            try:
                rates[index] = remote_bench.ceiling(device, rate, seconds_per_rate_run)
            except WorkerError as error:
                # The fault is stored as the reason why this rate is missing. A new worker measures the other rates.
                rates[index] = replace(rate, runs=(), why=str(error)[:200])
                worker.restart()
            spent_seconds_by_rate[index] += time.monotonic() - start
    return Ceilings(tuple(rates), device=device.name)
