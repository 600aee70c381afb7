"""What a device does at most, in words: a line for each rate, with the spread of its runs and what was searched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.ceiling_history import Pace, Since, alike, since
from fp8bench.model import Ceilings, Limit, Rate

UNITS = {**dict.fromkeys(Limit, "B/s"), Limit.PRODUCT: "FLOP/s", Limit.LAUNCH: "launches/s"}


def lines_of(found: Ceilings, history: Sequence[Ceilings] = ()) -> Iterator[str]:
    """When and under which settings, then a line a rate, with what it was before under the same ones."""
    settings = settings_words(found)
    yield f"measured {found.when}{f' ({settings})' if settings else ''}; other software or settings need their own"
    earlier, names = alike(found, history), list(map(rate_words, found.rates))
    longest = max(map(len, names), default=0)
    for name, rate in zip(names, found.rates, strict=True):
        one = since(rate, earlier)
        yield f"{name:<{longest}}  {_said(rate)}{f'; {since_words(one)}' if one is not None else ''}"


def settings_words(found: Ceilings) -> str:
    """'machine box, torch 2.13.0, threads 1'."""
    return ", ".join(f"{name} {value}" for name, value in found.under if name not in ("device", "name"))


def rate_words(rate: Rate) -> str:
    """'product bf16'."""
    return f"{rate.limit.value} {rate.precision}".strip()


def since_words(one: Since) -> str:
    """'slower than before: -12.0% against 425 GFLOP/s, the middle of 3'."""
    words = {Pace.SLOWER: "slower than before", Pace.FASTER: "faster than before"}.get(one.pace, one.pace.value)
    assert one.rate.value is not None
    count = f", the middle of {len(one.before)}" if len(one.before) > 1 else ""
    middle = units.count(one.middle, UNITS[one.rate.limit])
    return f"{words}: {units.change(one.rate.value / one.middle)} against {middle}{count}"


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
