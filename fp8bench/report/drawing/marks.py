"""What a mark is beside its place: its interval's ends, and its words."""

from __future__ import annotations

import math

from fp8bench.report.drawing.finish import Hint
from fp8bench.report.drawing.limits import drawable
from fp8bench.report.drawing.scale import interval, shown
from fp8bench.report.elements import Mark


def ends(mark: Mark, log: bool) -> list[float]:
    """The ends of the interval if both can be drawn, else none."""
    found = [value for value in (mark.low, mark.high) if value is not None and drawable(value, log)]
    return sorted(found) if len(found) == 2 else []


def hint(mark: Mark, unit: str, *names: str) -> Hint:
    """'name, label: 0.512x [0.508x, 0.515x]', then the mark's own words on a line of their own."""
    known = [value for value in (mark.low, mark.high) if value is not None and math.isfinite(value)]
    text = interval(mark.value, mark.low, mark.high, unit) if len(known) == 2 else shown(mark.value, unit)
    return worded(", ".join(dict.fromkeys(name for name in (*names, mark.label) if name)), text, mark.hint)


def worded(name: str, said: str, words: str = "", stop: bool = True) -> Hint:
    """'name: said', and on hovering the words below it, unless they say the same."""
    short = f"{name}: {said}" if name else said
    return Hint(short, short if words in ("", short) else f"{short}\n{words}", stop)
