"""What a device does at most, in words: a line for each rate, with the spread of its runs and what was searched."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench import units
from fp8bench.model import Ceilings, Limit, Rate

UNITS = {**dict.fromkeys(Limit, "B/s"), Limit.PRODUCT: "FLOP/s", Limit.LAUNCH: "launches/s"}


def lines_of(found: Ceilings) -> Iterator[str]:
    """When and under which settings, then a line a rate."""
    settings = ", ".join(f"{name} {value}" for name, value in found.under if name not in ("device", "name"))
    yield f"measured {found.when}{f' ({settings})' if settings else ''}; other software or settings need their own"
    names = [f"{rate.limit.value} {rate.precision}".strip() for rate in found.rates]
    longest = max(map(len, names), default=0)
    yield from (f"{name:<{longest}}  {_said(rate)}" for name, rate in zip(names, found.rates, strict=True))


def spread_words(rate: Rate) -> str:
    """'spread 1.5% over 5 runs', and what that means where it is wide."""
    bound = "" if rate.steady else ": no bound"
    return f"spread {units.percent(rate.spread)} over {len(rate.runs)} runs{bound}"


def shape_words(rate: Rate) -> str:
    """What won, and of how many."""
    if rate.limit is Limit.LAUNCH:
        return "one element"
    size = "x".join(map(str, rate.shape)) if rate.limit is Limit.PRODUCT else f"arrays of {units.size(rate.shape[0])}"
    return f"{size}, the best of {rate.searched} searched"


def _said(rate: Rate) -> str:
    if rate.value is None:
        return f"not measured: {rate.why}"
    each = f", {units.seconds(1 / rate.value)} each" if rate.limit is Limit.LAUNCH else ""
    rated = units.count(rate.value, UNITS[rate.limit])
    return f"{rated}{each}; {spread_words(rate)}; {shape_words(rate)}"
