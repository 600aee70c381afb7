"""How comparisons are written, wherever they are: values by their units, ratios with intervals, directions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fp8bench import units
from fp8bench.model import Comparison, Direction, Interval, Label
from fp8bench.report.layout import Row, SectionRow, Tone
from fp8bench.report.legend import LABELS

TONES = {Direction.BETTER: Tone.GOOD, Direction.WORSE: Tone.BAD, Direction.UNSURE: Tone.DOUBT}
TIMES = frozenset({"time", "relative_time"})
_TIME_RATIO = "x"
_ERROR = "_error"
_VANISHED = "_vanished"


def value(one: Comparison, number: float | None) -> str:
    """A figure of one side, by what it is."""
    if number is None:
        return units.NONE
    if one.unit == _TIME_RATIO:
        return units.ratio(number)
    if one.metric.endswith(_VANISHED):
        return units.share(number) if number else "0%"
    if one.metric.endswith(_ERROR) or one.unit == units.RATIO:
        return units.relative_error(number)
    return units.measured(number, one.unit)


def ratio(interval: Interval | None) -> str:
    """'1.043x [1.021, 1.066]'; without the interval where it is a point."""
    if interval is None:
        return units.NONE
    if interval.low == interval.high:
        return units.ratio(interval.point)
    return f"{units.ratio(interval.point)} [{_end(interval.low)}, {_end(interval.high)}]"


def _end(number: float) -> str:
    if not 1e-3 < number < 1e3:
        return "0" if number <= 1e-3 else "..." if math.isinf(number) or number > 1e6 else f"{number:.0f}"
    return f"{number:.3f}" if number < 10 else units.significant(number, 4)


def direction(one: Comparison) -> str:
    """'worse', 'failed', '-'."""
    if one.failed:
        return "FAILED"
    return units.NONE if one.direction is Direction.NONE else one.direction.value


def setting_of(case: str) -> tuple[str, str]:
    """What a case shares with its neighbours, and its own part: 'gemm[m=512]@cpu' and 'bf16'."""
    setting, _, mode = case.rpartition("/")
    return setting, mode


def told(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Those worth a line: memory and errors are, where they are not the same."""
    return [one for one in comparisons if one.metric in TIMES or one.direction is not Direction.SAME]


def shared_labels(comparisons: Iterable[Comparison]) -> tuple[str, ...]:
    """The labels that all times have: said once, they need no column."""
    labels = [one.labels for one in comparisons if one.metric in TIMES and one.ratio is not None]
    return tuple(label for label in (labels[0] if labels else ()) if all(label in one for one in labels))


def own_labels(comparisons: Iterable[Comparison], shared: Iterable[str]) -> bool:
    """Whether any has a label beside those that all have."""
    return any(set(one.labels) - set(shared) for one in comparisons)


def rows(comparisons: Sequence[Comparison]) -> Iterator[Row | SectionRow]:
    """A row for each, under a line for each setting. What has no numbers says why on lines of its own.

    The last cell is for labels that not all have; it is not there if there are none.
    """
    shared = shared_labels(comparisons)
    labelled = own_labels(comparisons, shared)
    before = ""
    for one in comparisons:
        setting, mode = setting_of(one.case)
        if setting != before:
            yield SectionRow(f"  {setting}")
            before = setting
        cells = (
            f"{mode} {one.metric}", value(one, one.before), value(one, one.after), ratio(one.ratio), direction(one),
            *([", ".join(label for label in one.labels if label not in shared) or units.NONE] if labelled else []),
        )  # fmt: skip
        tone = Tone.BAD if one.failed else TONES.get(one.direction)
        below = (one.why,) if one.direction is Direction.NONE and one.why else ()
        yield Row(cells, {} if tone is None else {"verdict": tone}, below)


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
