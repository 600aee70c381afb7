"""How long calls take, and how fast nothing can be on this device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from fp8bench.audit.subjects import Shape
from fp8bench.model import Ceilings, Limit
from fp8bench.registry import precisions

_TIMES, _SECONDS = 7, 1.0
# What a call may be above a measured ceiling, as `above-ceiling` has it; above what torch does here and now, where no
# ceiling is known: what a narrower dtype, and a clock that rises, may make of it.
_ABOVE, _MARGIN = 2.5, 8.0
# Tens of milliseconds: whoever does not wait for a stream that is busy so long has read too early.
_BUSY_CYCLES = 100_000_000
# Of several runs on a device of its own: the search may have missed its best shape by so much.
_CLOSE = 1.25


class Bound(NamedTuple):
    """So many a second nothing does; `words` say whose figure it rests on."""

    rate: float
    words: str


def fastest(
    calls: Mapping[str, Callable[[], object]], device: str, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The fastest of a few calls of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + _SECONDS * len(calls)
    for _ in range(_TIMES):
        for name, call in calls.items():
            _wait(device)
            start = clock()
            call()
            _wait(device)
            found[name].append(clock() - start)
        if time.perf_counter() > end:
            break
    return {name: max(min(times), 1e-9) for name, times in found.items()}


def flops_bound(ceilings: Ceilings | None, precision: str, shape: Shape, device: str) -> Bound:
    """FLOPs a second: of the best product measured in this precision or a wider one, and of torch's own now."""
    here = max(_product(shape, device, dtype) for dtype in (torch.float32, torch.bfloat16))
    rank = precisions.get(precision).rank
    known = [one.precision for one in (ceilings.rates if ceilings else ()) if one.limit is Limit.PRODUCT]
    wide = [ceilings.bound(Limit.PRODUCT, one) for one in known if ceilings and precisions.get(one).rank <= rank]
    return _bound(max((one for one in wide if one is not None), default=None), here, ceilings, device, "product")


def bytes_bound(ceilings: Ceilings | None, size: int, device: str) -> Bound:
    """Bytes a second: of the best copy measured in any cache, and of a copy of so many bytes now."""
    source = torch.empty(max(size // 2, 1), dtype=torch.uint8, device=device)
    seconds = fastest({"": partial(torch.clone, source)}, device)[""]
    known = ceilings.bound(Limit.CACHED) if ceilings else None
    return _bound(known, 2 * source.numel() / seconds, ceilings, device, "copy")


def _bound(known: float | None, here: float, ceilings: Ceilings | None, device: str, what: str) -> Bound:
    if known is None or ceilings is None:
        return Bound(_MARGIN * here, f"{_MARGIN:g} times what torch's own {what} does here")
    margin = _CLOSE if ceilings.whole and not device.startswith("cpu") else _ABOVE
    return Bound(margin * max(known, here), f"{margin:g} times the fastest {what} that was measured here")


def _product(shape: Shape, device: str, dtype: torch.dtype) -> float:
    a, b = (torch.randn(rows, shape.k).to(device, dtype) for rows in (shape.m, shape.n))
    seconds = fastest({"": partial(torch.mm, a, b.t())}, device)[""]
    return 2 * shape.m * shape.n * shape.k / seconds


@contextmanager
def beside(device: str) -> Iterator[bool]:
    """The body's work goes to a stream of its own, which is busy at first; False where a device has none."""
    if not device.startswith("cuda"):
        yield False
        return
    torch.cuda.synchronize(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
        yield True
        side.synchronize()


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
