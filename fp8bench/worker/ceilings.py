"""Measures the peaks of a device: the best of several shapes for each limit, measured in several runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fp8bench.model import DeviceFacts, Limit, Rate
from fp8bench.protocols import Arithmetic, Device, Role
from fp8bench.protocols.axes import CACHE_TIMES
from fp8bench.registry import precisions

Shape = tuple[int, ...]

# M, N and K, the least work first, because a slow device does not reach the last ones.
_PRODUCTS: dict[str, tuple[Shape, ...]] = {
    "cpu": ((256,) * 3, (512,) * 3, (256, 2048, 512), (1024,) * 3, (512, 4096, 1024), (2048,) * 3),
    "": (
        (2048,) * 3, (4096, 4096, 2048), (4096,) * 3, (8192, 8192, 2048), (4096, 8192, 4096), (8192, 8192, 4096),
        (16384, 8192, 2048), (8192,) * 3, (16384, 8192, 8192),
    ),
}  # fmt: skip
# Bytes of an array. The smallest copies are in the fastest cache that an operator of torch can fill.
_CACHED = {"cpu": tuple(1 << bits for bits in range(14, 25, 2)), "": tuple(1 << bits for bits in range(20, 29, 2))}
_LOADED = tuple(1 << bits for bits in (22, 24, 26, 28))
# The assumed size of a last-level cache that the device does not report; and an array takes at most 1/16 of the memory.
_UNKNOWN_CACHE = 128 << 20
_SHARE_OF_MEMORY = 16
_ARRAYS = {Limit.COPY: 2, Limit.TRIAD: 3, Limit.CACHED: 2, Limit.LOAD: 1}
_ELEMENT = 4
_DRAWN = 1 << 20


def shapes_of(limit: Limit, facts: DeviceFacts) -> tuple[Shape, ...]:
    """Returns the sizes to search for the best rate; none if a device has no such limit: a host loads nothing."""
    if limit is Limit.PRODUCT:
        return _PRODUCTS.get(facts.kind, _PRODUCTS[""])
    if limit is Limit.LAUNCH:
        return ((1,),)
    if limit is Limit.LOAD:
        return tuple((size,) for size in _LOADED) if facts.accelerated else ()
    if limit is Limit.CACHED:
        return tuple((size,) for size in _CACHED.get(facts.kind, _CACHED[""]))
    # Each array alone exceeds the cache.
    least = 1 << math.ceil(math.log2(CACHE_TIMES * (facts.cache_bytes or _UNKNOWN_CACHE)))
    # A CPU's system provides memory slowly, page by page, so one size must suffice.
    sizes = (least, 2 * least) if facts.accelerated else (least,)
    return tuple((size,) for size in sizes if size <= facts.memory_bytes / _SHARE_OF_MEMORY)


def count_of(limit: Limit, shape: Shape) -> float:
    """Returns the FLOPs, bytes or launches of one call; sizes of arrays are bytes."""
    if limit is Limit.PRODUCT:
        return 2.0 * math.prod(shape)
    return 1.0 if limit is Limit.LAUNCH else float(_ARRAYS[limit] * shape[0])


def call_of(limit: Limit, shape: Shape, facts: DeviceFacts, arithmetic: Arithmetic, seed: int) -> Callable[[], Any]:
    """Makes one call on separate tensors. Operands of products are already cast."""
    import torch

    random = torch.Generator(facts.key).manual_seed(seed)
    # Cast here, once, because a ceiling is of the product alone.
    if limit is Limit.PRODUCT:
        m, n, k = shape
        a, b = (torch.randn(rows, k, generator=random, device=facts.key).to(arithmetic.carrier) for rows in (m, n))
        cast = arithmetic.cast(a, Role.INPUT), arithmetic.cast(b, Role.WEIGHT)
        return partial(arithmetic.product, *cast, arithmetic.carrier)

    def random_array() -> torch.Tensor:
        """Returns an array of repeating random numbers: drawing a billion takes longer than everything timed."""
        block = torch.rand(min(count, _DRAWN), generator=random, device=facts.key)
        return block.repeat(math.ceil(count / len(block)))[:count]

    # The other limits move memory: one array, or two and a target.
    count = max(1, shape[0] // _ELEMENT)
    source = random_array()
    if limit is Limit.LAUNCH:
        return partial(source.add_, 1)
    target = torch.empty_like(source)
    if limit is Limit.TRIAD:
        return partial(torch.add, source, random_array(), alpha=3.0, out=target)
    if limit is Limit.LOAD:
        # Only pinned memory is copied at the speed of the bus.
        return partial(target.copy_, torch.ones(source.shape).pin_memory(), non_blocking=True)
    return partial(target.copy_, source)


# One precision for each kind of product that a device may have.
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")
# Calls are timed in batches of this duration, so that reading the clock and waiting for a device count little.
_STRETCH_SECONDS = 0.5e-3
# A shape counts by its third fastest batch, so that a jump of the clock is not mistaken for a peak.
_PLACE = 2


def wanted_rates(facts: DeviceFacts) -> list[Rate]:
    native = [name for name in DTYPES if precisions.get(name).support(facts).is_native]
    products = [Rate(Limit.PRODUCT, name) for name in native]
    return products + [Rate(limit) for limit in Limit if limit is not Limit.PRODUCT and shapes_of(limit, facts)]


def one_more(device: Device, facts: DeviceFacts, rate: Rate, seconds: float) -> Rate:
    """Adds the next missing part to a rate: the search for the best shape, or another run on separate tensors."""

    wait = partial(device.synchronise, facts.index)
    try:
        if not rate.shape:
            best = _time_shapes(rate, shapes_of(rate.limit, facts), facts, wait, seconds, 0)
            return replace(best, runs=())
        run = len(rate.runs) + 1
        (value,) = _time_shapes(rate, (rate.shape,), facts, wait, seconds, run).runs
        return replace(rate, runs=(*rate.runs, value))
    except Exception as error:  # noqa: BLE001 - whatever a missing kernel raises ends this rate alone
        return replace(rate, runs=(), why=f"{type(error).__name__}: {error}"[:200])
    finally:
        device.empty_cache()


def _time_shapes(
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
    counts: dict[Shape, float],
    prepared: Callable[[Shape], Callable[[], Any]],
    wait: Callable[[], None],
    seconds: float,
) -> tuple[Shape, float, int]:
    """Returns the shape with the highest rate, that rate, and how many shapes were tried. Every shape has an equal
    share of the time, and its rate is that of its fastest batches. A shape whose first call would exceed its share at
    the best rate so far is skipped, and so is every larger one."""
    best, winner, tried, share = 0.0, next(iter(counts)), 0, seconds / len(counts)
    for shape, count in counts.items():
        # Larger shapes take even longer, so none of them could finish in its share.
        if best and count / best > share:
            break
        tried += 1
        end = time.perf_counter() + share
        call = prepared(shape)
        call()
        # The call above was a warm-up; this one shows how many calls fill a batch.
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
