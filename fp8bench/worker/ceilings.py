"""How much a device does at most: products of every dtype that it multiplies, and copies. Measured once a machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from fp8bench.model import Ceilings, DeviceFacts, Level
from fp8bench.protocols import Device, Precision, Role
from fp8bench.registry import precisions

# The precisions that stand for a dtype of products, where a device has it: recipes of FP8 share their kernel.
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
# Sides of square products, and bytes that are copied, smallest first: a slow device does not come to the large ones.
# The smallest copies lie in the fastest cache that an operator of torch's can fill.
_SIDES = {"cpu": (256, 512, 1024, 2048), "": (2048, 4096, 8192)}
_COPIED = {"cpu": tuple(1 << bits for bits in range(14, 25, 2)), "": tuple(1 << bits for bits in range(20, 29, 2))}
# Calls are timed by stretches so long: the clock and the wait for a device count little.
_STRETCH_SECONDS = 0.5e-3
# Which of a size's stretches counts, from the fastest: a clock that jumped must not be what a machine can do.
_PLACE = 2


def measured(device: Device, facts: DeviceFacts, seconds: float) -> Ceilings:
    """The best of a few sizes each, with the threads that this process computes with.

    The seconds are shared by the dtypes and the copies.
    """
    known = [(name, precisions.get(name)) for name in DTYPES]
    native = [(name, one) for name, one in known if one.support(facts).level is Level.NATIVE]
    share = seconds / (len(native) + 1)
    wait = partial(device.synchronise, facts.index)
    flops = [(name, _products(one, facts, wait, share)) for name, one in native]
    copied = _copies(facts, wait, share)
    device.empty_cache()
    return Ceilings(tuple((name, rate) for name, rate in flops if rate), copied or None)


def _products(precision: Precision, facts: DeviceFacts, wait: Callable[[], None], seconds: float) -> float:
    """FLOPs a second of products whose operands are cast already."""
    import torch

    arithmetic = precision.arithmetic(facts)

    def prepared(side: int) -> Callable[[], Any]:
        random = torch.Generator(facts.key).manual_seed(0)
        a, b = (torch.randn(side, side, generator=random, device=facts.key).to(arithmetic.carrier) for _ in range(2))
        cast = arithmetic.cast(a, Role.INPUT), arithmetic.cast(b, Role.WEIGHT)
        return partial(arithmetic.product, *cast, arithmetic.carrier)

    with precision.scope():
        return _best({side: 2.0 * side**3 for side in _sizes(_SIDES, facts)}, prepared, wait, seconds)


def _copies(facts: DeviceFacts, wait: Callable[[], None], seconds: float) -> float:
    """Bytes a second that copies read and write."""
    import torch

    def prepared(size: int) -> Callable[[], Any]:
        source = torch.ones(size // 4, device=facts.key)
        return partial(torch.empty_like(source).copy_, source)

    return _best({size: 2.0 * size for size in _sizes(_COPIED, facts)}, prepared, wait, seconds)


def _sizes(sizes: dict[str, tuple[int, ...]], facts: DeviceFacts) -> tuple[int, ...]:
    return sizes.get(facts.kind, sizes[""])


def _best(
    counts: dict[int, float], prepared: Callable[[int], Callable[[], Any]], wait: Callable[[], None], seconds: float
) -> float:
    """The highest rate over sizes, of the fastest stretch of calls of each; 0 where none could be had.

    Every size has an equal share of the time. One whose first call would take more, by the rate of those before it, is
    left out, and so are all larger ones.
    """
    best, share = 0.0, seconds / len(counts)
    for size, count in counts.items():
        if best and count / best > share:
            break
        end = time.perf_counter() + share
        call = prepared(size)
        call()
        once = _stretch(call, 1, wait)
        calls = max(1, int(_STRETCH_SECONDS / once))
        stretches = [once]
        while time.perf_counter() < end:
            stretches.append(_stretch(call, calls, wait))
        best = max(best, count / sorted(stretches)[: _PLACE + 1][-1])
    return best


def _stretch(call: Callable[[], Any], calls: int, wait: Callable[[], None]) -> float:
    """Seconds of one of so many calls, one after the other."""
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return max((time.perf_counter() - start) / calls, 1e-9)
