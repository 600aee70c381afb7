"""What a device's ceilings are measured by: one call each of a product, a copy, a triad, the least launch, a load.

No torch at the top: plans read the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from fp8bench.model import DeviceFacts, Limit
from fp8bench.protocols import Arithmetic, Role
from fp8bench.protocols.axes import CACHE_TIMES

Shape = tuple[int, ...]

# M, N and K, the least work first: a slow device does not come to the last ones.
_PRODUCTS: dict[str, tuple[Shape, ...]] = {
    "cpu": ((256,) * 3, (512,) * 3, (256, 2048, 512), (1024,) * 3, (512, 4096, 1024), (2048,) * 3),
    "": (
        (2048,) * 3, (4096, 4096, 2048), (4096,) * 3, (8192, 8192, 2048), (4096, 8192, 4096), (8192, 8192, 4096),
        (16384, 8192, 2048), (8192,) * 3, (16384, 8192, 8192),
    ),
}  # fmt: skip
# The smallest copies lie in the fastest cache that an operator of torch's can fill.
_CACHED = {"cpu": tuple(1 << bits for bits in range(14, 25, 2)), "": tuple(1 << bits for bits in range(20, 29, 2))}
_LOADED = tuple(1 << bits for bits in (22, 24, 26, 28))
# Of an array beyond the last cache, where nobody says how large that is; and the most that arrays take of the memory.
_UNKNOWN_CACHE = 128 << 20
_SHARE_OF_MEMORY = 16
_ARRAYS = {Limit.COPY: 2, Limit.TRIAD: 3, Limit.CACHED: 2, Limit.LOAD: 1}
_ELEMENT = 4


def shapes_of(limit: Limit, facts: DeviceFacts) -> tuple[Shape, ...]:
    """What is searched for the best rate; none where a device has no such thing: the host loads nothing to itself."""
    if limit is Limit.PRODUCT:
        return _PRODUCTS.get(facts.kind, _PRODUCTS[""])
    if limit is Limit.LAUNCH:
        return ((1,),)
    if limit is Limit.LOAD:
        return tuple((size,) for size in _LOADED) if facts.accelerated else ()
    if limit is Limit.CACHED:
        return tuple((size,) for size in _CACHED.get(facts.kind, _CACHED[""]))
    # Each array alone is larger than the cache.
    least = 1 << math.ceil(math.log2(CACHE_TIMES * (facts.cache_bytes or _UNKNOWN_CACHE)))
    sizes = [size for size in (least, 2 * least) if size <= facts.memory_bytes / _SHARE_OF_MEMORY]
    return tuple((size,) for size in sizes)


def count_of(limit: Limit, shape: Shape) -> float:
    """FLOPs, bytes read and written, or launches of one call."""
    if limit is Limit.PRODUCT:
        return 2.0 * math.prod(shape)
    return 1.0 if limit is Limit.LAUNCH else float(_ARRAYS[limit] * shape[0])


def call_of(limit: Limit, shape: Shape, facts: DeviceFacts, arithmetic: Arithmetic, seed: int) -> Callable[[], Any]:
    """One call, on tensors of its own. Operands of products are cast already."""
    import torch

    random = torch.Generator(facts.key).manual_seed(seed)
    if limit is Limit.PRODUCT:
        m, n, k = shape
        a, b = (torch.randn(rows, k, generator=random, device=facts.key).to(arithmetic.carrier) for rows in (m, n))
        cast = arithmetic.cast(a, Role.INPUT), arithmetic.cast(b, Role.WEIGHT)
        return partial(arithmetic.product, *cast, arithmetic.carrier)
    source = torch.rand(max(1, shape[0] // _ELEMENT), generator=random, device=facts.key)
    if limit is Limit.LAUNCH:
        return partial(source.add_, 1)
    target = torch.empty_like(source)
    if limit is Limit.TRIAD:
        return partial(torch.add, source, torch.rand_like(source), alpha=3.0, out=target)
    if limit is Limit.LOAD:
        return partial(target.copy_, torch.ones(source.shape).pin_memory(), non_blocking=True)
    return partial(target.copy_, source)
