"""Measures the highest rates of a device. For each limit, the best of several shapes is measured in several runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fp8bench.model import DeviceFacts, Limit, Rate
from fp8bench.protocols import Arithmetic, Device, Role
from fp8bench.protocols.axes import CACHE_FLUSH_FACTOR
from fp8bench.registry import precisions

Shape = tuple[int, ...]

# M, N and K of products, smaller products first. On a slow device, the time limit ends the search before the last ones.
_PRODUCT_SHAPES: dict[str, tuple[Shape, ...]] = {
    "cpu": ((256,) * 3, (512,) * 3, (256, 2048, 512), (1024,) * 3, (512, 4096, 1024), (2048,) * 3),
    "": (
        (2048,) * 3, (4096, 4096, 2048), (4096,) * 3, (8192, 8192, 2048), (4096, 8192, 4096), (8192, 8192, 4096),
        (16384, 8192, 2048), (8192,) * 3, (16384, 8192, 8192),
    ),
}  # fmt: skip
# The bytes of an array. The smallest copies fit into the fastest cache that an operator of torch can fill.
_CACHED_ARRAY_BYTES = {
    "cpu": tuple(1 << bits for bits in range(14, 25, 2)),
    "": tuple(1 << bits for bits in range(20, 29, 2)),
}
_LOADED_ARRAY_BYTES = tuple(1 << bits for bits in (22, 24, 26, 28))
# The assumed size of the last-level cache in bytes, if a device does not report it. An array takes at most
# 1/_MEMORY_TO_ARRAY_RATIO of the memory.
_ASSUMED_CACHE_BYTES = 128 << 20
_MEMORY_TO_ARRAY_RATIO = 16
_ARRAY_COUNT_BY_LIMIT = {Limit.COPY: 2, Limit.TRIAD: 3, Limit.CACHED: 2, Limit.LOAD: 1}
_ELEMENT_BYTES = 4
_RANDOM_BLOCK_ELEMENTS = 1 << 20


def list_shapes(limit: Limit, facts: DeviceFacts) -> tuple[Shape, ...]:
    """Returns the shapes of products, or the sizes of arrays, among which the fastest is searched; () if the device has
    no such limit.
    """
    if limit is Limit.PRODUCT:
        return _PRODUCT_SHAPES.get(facts.kind, _PRODUCT_SHAPES[""])
    if limit is Limit.LAUNCH:
        return ((1,),)
    if limit is Limit.LOAD:
        sizes: Sequence[int] = _LOADED_ARRAY_BYTES if facts.accelerated else ()
    elif limit is Limit.CACHED:
        sizes = _CACHED_ARRAY_BYTES.get(facts.kind, _CACHED_ARRAY_BYTES[""])
    else:
        # Each array is larger than the cache. On a CPU only one size is tried, because new memory is mapped slowly,
        # page by page.
        min_array_bytes = 1 << math.ceil(math.log2(CACHE_FLUSH_FACTOR * (facts.cache_bytes or _ASSUMED_CACHE_BYTES)))
        max_array_bytes = facts.memory_bytes / _MEMORY_TO_ARRAY_RATIO
        sizes = [
            size for size in (min_array_bytes, 2 * min_array_bytes)[: 1 + facts.accelerated] if size <= max_array_bytes
        ]
    return tuple((size,) for size in sizes)


def count_call_work(limit: Limit, shape: Shape) -> float:
    """Returns the FLOPs, bytes or launches of one timed call, by the kind of limit. For a limit on array bandwidth,
    `shape` is the size of an array in bytes.
    """
    if limit is Limit.PRODUCT:
        return 2.0 * math.prod(shape)
    return 1.0 if limit is Limit.LAUNCH else float(_ARRAY_COUNT_BY_LIMIT[limit] * shape[0])


def make_call(limit: Limit, shape: Shape, facts: DeviceFacts, arithmetic: Arithmetic, seed: int) -> Callable[[], Any]:
    """Returns a function whose time is measured: it computes one product, or one operation on arrays. Its tensors are
    newly allocated, and operands of products are cast in advance.
    """
    import torch

    generator = torch.Generator(facts.key).manual_seed(seed)
    # Cast before the call, because the ceiling is that of the product alone.
    if limit is Limit.PRODUCT:
        m, n, k = shape
        a, b = (torch.randn(rows, k, generator=generator, device=facts.key).to(arithmetic.carrier) for rows in (m, n))
        operands = arithmetic.cast(a, Role.INPUT), arithmetic.cast(b, Role.WEIGHT)
        return partial(arithmetic.product, *operands, arithmetic.carrier)

    def random_array() -> torch.Tensor:
        """Returns an array that repeats a block of random numbers. Drawing a billion different numbers would take
        longer than timing the calls.
        """
        random_block = torch.rand(min(element_count, _RANDOM_BLOCK_ELEMENTS), generator=generator, device=facts.key)
        return random_block.repeat(math.ceil(element_count / len(random_block)))[:element_count]

    # The remaining limits need a source array. Some need a target array, and Limit.TRIAD needs a second source.
    element_count = max(1, shape[0] // _ELEMENT_BYTES)
    source_array = random_array()
    if limit is Limit.LAUNCH:
        return partial(source_array.add_, 1)
    target_array = torch.empty_like(source_array)
    if limit is Limit.TRIAD:
        return partial(torch.add, source_array, random_array(), alpha=3.0, out=target_array)
    if limit is Limit.LOAD:
        # Only pinned memory is copied at the speed of the bus.
        return partial(target_array.copy_, torch.ones(source_array.shape).pin_memory(), non_blocking=True)
    return partial(target_array.copy_, source_array)


# One precision for each kind of matrix product that a device may support.
PRECISION_NAMES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")
# Calls are timed in batches of this duration, so that reading the clock and waiting for the device take only a small
# part of it.
_CALL_BATCH_SECONDS = 0.5e-3
# The third fastest batch gives the rate of a shape, so that a jump of the clock does not count as a peak.
_RATED_BATCH_INDEX = 2


def list_rates(facts: DeviceFacts) -> list[Rate]:
    native_precisions = [name for name in PRECISION_NAMES if precisions.get(name).support(facts).is_native]
    product_rates = [Rate(Limit.PRODUCT, name) for name in native_precisions]
    return product_rates + [Rate(limit) for limit in Limit if limit is not Limit.PRODUCT and list_shapes(limit, facts)]


def measure_next_run(device: Device, facts: DeviceFacts, rate: Rate, seconds: float) -> Rate:
    """Adds one run to the measurement of a device's highest rate (FLOPs, bytes or launches per second). The first call
    only searches the fastest shape.
    """
    wait_for_device = partial(device.synchronise, facts.index)
    try:
        if not rate.shape:
            searched_ceiling_rate = _time_shapes(
                rate, list_shapes(rate.limit, facts), facts, wait_for_device, seconds, 0
            )
            return replace(searched_ceiling_rate, runs=())
        run_number = len(rate.runs) + 1
        (value,) = _time_shapes(rate, (rate.shape,), facts, wait_for_device, seconds, run_number).runs
        return replace(rate, runs=(*rate.runs, value))
    except Exception as error:  # noqa: BLE001 - whatever a missing kernel raises ends this rate alone
        return replace(rate, runs=(), why=f"{type(error).__name__}: {error}"[:200])
    finally:
        device.empty_cache()


def _time_shapes(
    rate: Rate, shapes: Sequence[Shape], facts: DeviceFacts, wait: Callable[[], None], seconds: float, seed: int
) -> Rate:
    precision = precisions.get(rate.precision or PRECISION_NAMES[0])
    arithmetic = precision.arithmetic(facts)
    with precision.scope():
        work_amount_by_shape = {shape: count_call_work(rate.limit, shape) for shape in shapes}
        shape, best_rate, tried_shape_count = _find_best_shape(
            work_amount_by_shape, lambda shape: make_call(rate.limit, shape, facts, arithmetic, seed), wait, seconds
        )
    return replace(rate, runs=(best_rate,), searched=tried_shape_count, shape=shape)


def _find_best_shape(
    work_by_shape: dict[Shape, float],
    make_shape_call: Callable[[Shape], Callable[[], Any]],
    wait: Callable[[], None],
    seconds: float,
) -> tuple[Shape, float, int]:
    """Returns the shape with the highest rate, that rate, and the number of shapes that were tried.

    All shapes get an equal share of the time. A shape is skipped if even its first call would take longer than
    this share at the best rate of the smaller shapes. All larger shapes are skipped as well.
    """
    best_rate = 0.0
    best_shape = next(iter(work_by_shape))
    tried_shape_count = 0
    seconds_per_shape = seconds / len(work_by_shape)
    for shape, work_amount in work_by_shape.items():
        # All further shapes are larger and would take even longer, so the search ends.
        if best_rate and work_amount / best_rate > seconds_per_shape:
            break
        tried_shape_count += 1
        deadline = time.perf_counter() + seconds_per_shape
        call = make_shape_call(shape)
        call()
        # The first call was a warm-up. The time of the second call determines how many calls a batch needs.
        single_call_seconds = _time_call_batch(call, 1, wait)
        calls_per_batch = max(1, int(_CALL_BATCH_SECONDS / single_call_seconds))
        call_batch_seconds = [single_call_seconds]
        while time.perf_counter() < deadline:
            call_batch_seconds.append(_time_call_batch(call, calls_per_batch, wait))
        rate = work_amount / sorted(call_batch_seconds)[: _RATED_BATCH_INDEX + 1][-1]
        best_rate, best_shape = max((best_rate, best_shape), (rate, shape))
    return best_shape, best_rate, tried_shape_count


def _time_call_batch(call: Callable[[], Any], calls: int, wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return max((time.perf_counter() - start) / calls, 1e-9)  # not 0, because work is divided by it
