"""How much a device does at most: the best of several shapes each, which is then measured again, in several runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fp8bench.model import Ceilings, DeviceFacts, Level, Limit, Rate
from fp8bench.nn.limits import Shape, call_of, count_of, shapes_of
from fp8bench.protocols import Device, one_thread
from fp8bench.registry import precisions

# The precisions that stand for a kind of products, where a device has it.
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")
# What a quick look finds: all that it takes to say what is impossible.
_QUICK = (Limit.PRODUCT, Limit.CACHED)
# Calls are timed by stretches so long: the clock and the wait for a device count little.
_STRETCH_SECONDS = 0.5e-3
# Which of a shape's stretches counts, from the fastest: a clock that jumped must not be what a machine can do.
_PLACE = 2


def quick(device: Device, facts: DeviceFacts, seconds: float) -> Ceilings:
    """The best shape of products and of copies where they are fastest: the search itself is the one run. A processor
    has one thread: several would wait for each other if it is busy."""
    wanted = wanted_rates(facts, _QUICK)
    try:
        with one_thread():
            found = tuple(_tried(one, partial(_searched, device, facts, one, seconds / len(wanted))) for one in wanted)
    finally:
        device.empty_cache()
    return Ceilings(found, device=facts.name)


def wanted_rates(facts: DeviceFacts, limits: Sequence[Limit] = tuple(Limit)) -> list[Rate]:
    """What there is to measure, of all that a device does natively."""
    native = [name for name in DTYPES if precisions.get(name).support(facts).level is Level.NATIVE]
    products = [Rate(Limit.PRODUCT, name) for name in native if Limit.PRODUCT in limits]
    return products + [Rate(limit) for limit in limits if limit is not Limit.PRODUCT and shapes_of(limit, facts)]


def one_more(device: Device, facts: DeviceFacts, rate: Rate, seconds: float) -> Rate:
    """A rate with what comes next of it: the shape that wins the search, then one run more, on tensors of its own."""

    def measured() -> Rate:
        if not rate.shape:
            return replace(_searched(device, facts, rate, seconds), runs=())
        run = len(rate.runs) + 1
        (value,) = _timed(rate, (rate.shape,), facts, partial(device.synchronise, facts.index), seconds, run).runs
        return replace(rate, runs=(*rate.runs, value))

    found = _tried(rate, measured)
    device.empty_cache()
    return found


def _searched(device: Device, facts: DeviceFacts, rate: Rate, seconds: float) -> Rate:
    return _timed(rate, shapes_of(rate.limit, facts), facts, partial(device.synchronise, facts.index), seconds, 0)


def _tried(rate: Rate, measured: Callable[[], Rate]) -> Rate:
    """What a device refuses ends this rate, and no other."""
    try:
        return measured()
    except Exception as error:  # noqa: BLE001 - whatever a kernel that is missing raises
        return replace(rate, runs=(), why=f"{type(error).__name__}: {error}"[:200])


def _timed(
    rate: Rate, shapes: Sequence[Shape], facts: DeviceFacts, wait: Callable[[], None], seconds: float, seed: int
) -> Rate:
    precision = precisions.get(rate.precision or DTYPES[0])
    arithmetic = precision.arithmetic(facts)
    with precision.scope():
        counts = {shape: count_of(rate.limit, shape) for shape in shapes}
        shape, best, tried = _best(
            counts, lambda shape: call_of(rate.limit, shape, facts, arithmetic, seed), wait, seconds
        )
    return replace(rate, runs=(best,), searched=tried, shape=shape)


def _best(
    counts: dict[Shape, float], prepared: Callable[[Shape], Callable[[], Any]], wait: Callable[[], None], seconds: float
) -> tuple[Shape, float, int]:
    """The shape with the highest rate, by the fastest stretches of calls of each; that rate, and how many were tried.

    Every shape has an equal share of the time. One whose first call would take more, by the rate of those before it, is
    left out, and so are all that do more work.
    """
    best, winner, tried, share = 0.0, next(iter(counts)), 0, seconds / len(counts)
    for shape, count in counts.items():
        if best and count / best > share:
            break
        tried += 1
        end = time.perf_counter() + share
        call = prepared(shape)
        call()
        once = _stretch(call, 1, wait)
        calls = max(1, int(_STRETCH_SECONDS / once))
        stretches = [once]
        while time.perf_counter() < end:
            stretches.append(_stretch(call, calls, wait))
        rate = count / sorted(stretches)[: _PLACE + 1][-1]
        best, winner = max((best, winner), (rate, shape))
    return winner, best, tried


def _stretch(call: Callable[[], Any], calls: int, wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return max((time.perf_counter() - start) / calls, 1e-9)
