"""How comparisons are written, wherever they are: values by their units, changes with intervals, directions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from fp8bench import units
from fp8bench.model import Comparison, Direction, Interval, Label
from fp8bench.model.specs import spec_of
from fp8bench.report.elements import Tone
from fp8bench.report.words.legend import LABELS

TONES = {Direction.BETTER: Tone.GOOD, Direction.WORSE: Tone.BAD, Direction.UNSURE: Tone.DOUBT}
TIMES = frozenset({"time", "relative_time"})


def value(one: Comparison, number: float | None) -> str:
    """A figure of one side, by what it is."""
    return spec_of(one.metric).shown(number, one.unit)


def signed(interval: Interval | None) -> str:
    """'+4.3% [+2.1%, +6.6%]', of the figure itself; without the interval where it is a point."""
    if interval is None:
        return units.NONE
    if interval.low == interval.high:
        return units.change(interval.point)
    if math.isinf(interval.high):
        return f"{units.change(interval.point)} [no interval]"
    return f"{units.change(interval.point)} [{units.change(interval.low)}, {units.change(interval.high)}]"


def direction(one: Comparison) -> str:
    """'worse', 'failed', '-'."""
    if one.failed:
        return "FAILED"
    return units.NONE if one.direction is Direction.NONE else one.direction.value


def setting_of(case: str) -> tuple[str, str]:
    """What a case shares with its neighbours, and its own part: 'gemm[m=512]@cpu' and 'bf16'."""
    setting, _, mode = case.rpartition("/")
    return setting, mode


def counted(comparisons: Iterable[Comparison]) -> str:
    """'12 figures: 1 worse, 2 better, 9 same'."""
    counts = Counter(direction(one) for one in comparisons)
    words = {"FAILED": "failed", units.NONE: "without a ratio"}
    order = ["FAILED", *(one.value for one in Direction if one is not Direction.NONE), units.NONE]
    parts = [f"{counts[name]} {words.get(name, name)}" for name in order if counts[name]]
    total = sum(counts.values())
    return f"{total} figure{'s' * (total != 1)}: {', '.join(parts)}" if total else "no figures"


def reasons(comparisons: Iterable[Comparison]) -> dict[str, int]:
    """Why figures are in doubt, and how many are for each reason."""
    return dict(Counter(one.why for one in comparisons if one.direction is Direction.UNSURE and one.why))


def label_legend(comparisons: Iterable[Comparison]) -> list[str]:
    """A sentence for every label that occurs."""
    used = {label for one in comparisons for label in one.labels}
    return [f"{label.value}: {LABELS[label]}" for label in Label if label.value in used]
