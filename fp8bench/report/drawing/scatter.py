"""Scatter: points over two axes, and a margin for those that have no x."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8bench.report.drawing.figure import SHAPES, Sheet, nothing
from fp8bench.report.drawing.finish import Hint
from fp8bench.report.drawing.labels import shortened
from fp8bench.report.drawing.limits import LABELS, SERIES, described, points_drawn, points_placed
from fp8bench.report.drawing.marks import worded
from fp8bench.report.drawing.rows import apart, legend
from fp8bench.report.drawing.scale import Scale, limits, shown
from fp8bench.report.elements import Axis, Point, Scatter, Tone

_DOT = 9.5
_LABEL_ROOM = 190.0
# A legend that names more series than this is longer than the chart.
_NAMED = 16


@dataclass(frozen=True)
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


@dataclass(frozen=True)
class _Frame:
    """Where points stand: by both scales in the plot, in the margin by y alone. Either may be missing."""

    plot: _Box | None
    margin: _Box | None
    x: Scale | None
    y: Scale


def draw_scatter(chart: Scatter, narrow: bool) -> str:
    placed = points_placed(chart)
    points = points_drawn(placed)
    description = described(chart, len(chart.points) - len(placed), len(placed) - len(points))
    if not points:
        return nothing(chart, description, narrow)
    sheet = Sheet(chart, narrow)
    names = list(dict.fromkeys(point.series for point in points))
    looks = {name: _look(number) for number, name in enumerate(names)}
    top = legend(sheet, [(*looks[name], name) for name in names[:_NAMED] if len(names) > 1 or name], 0.0)
    aside = chart.margin if any(point.x is None for point in points) else ""
    if chart.y.title or aside:
        aside = shortened(aside, 0.45 * sheet.width, sheet.size)
        title = shortened(chart.y.title, sheet.width - sheet.measure(aside) - 12, sheet.size)
        sheet.text(0, top + 8, title, "quiet")
        sheet.text(sheet.width, top + 8, aside, "quiet", anchor="end")
        top += 24
    frame = _frame(chart, points, sheet, top)
    end = _axes(sheet, chart, frame)
    spots = _spots(points, names, frame)
    for point, (x, y) in zip(points, spots, strict=True):
        shape, style = looks[point.series]
        tone = f" {point.tone.value}" if point.tone.value != "plain" else ""
        sheet.dot(f"mark {style}{tone}", shape, x, y, _DOT, _hint(chart, point))
    _labels(sheet, points, spots, [box for box in (frame.plot, frame.margin) if box])
    return sheet.svg(end, description)


def _look(number: int) -> tuple[str, str]:
    """Shape and class of a series: no two of the first 64 look alike."""
    return SHAPES[(number + number // SERIES) % len(SHAPES)], f"point s{number % SERIES + 1}"


def _frame(chart: Scatter, points: list[Point], sheet: Sheet, top: float) -> _Frame:
    bottom = top + (280.0 if sheet.narrow else 380.0)
    y = Scale(
        *limits([one.y for one in points], chart.y.log, chart.y.unit, 0.05), bottom, top, chart.y.log, chart.y.unit
    )
    left = max(sheet.measure(text) for _, text in y.ticks(_most(sheet, down=True))) + 10
    placed = [point.x for point in points if point.x is not None]
    if not placed:
        return _Frame(None, _Box(left, top, sheet.width - 1, bottom), None, y)
    right, margin = sheet.width - 1, None
    if len(placed) < len(points):
        margin = _Box(right - (64.0 if sheet.narrow else 130.0), top, right, bottom)
        right = margin.left - 10
    x = Scale(*limits(placed, chart.x.log, chart.x.unit, 0.05), left, right, chart.x.log, chart.x.unit)
    return _Frame(_Box(left, top, right, bottom), margin, x, y)


def _most(sheet: Sheet, down: bool) -> int:
    """How many ticks an axis has room for."""
    if down:
        return 5 if sheet.narrow else 7
    return 4 if sheet.narrow else 7


def _axes(sheet: Sheet, chart: Scatter, frame: _Frame) -> float:
    """Lines, ticks and titles; returns where they end."""
    first = frame.plot or frame.margin
    assert first is not None
    heights = [(frame.y.at(value), text) for value, text in frame.y.ticks(_most(sheet, down=True))]
    for box in filter(None, (frame.plot, frame.margin)):
        sheet.lines("grid", [[(box.left, y), (box.right, y)] for y, _ in heights], layer=0)
    for y, text in heights:
        sheet.text(first.left - 8, y, text, "tick", anchor="end")
    if frame.margin:
        sheet.box("margin", frame.margin.left, first.top, frame.margin.right - frame.margin.left,
                  first.bottom - first.top, layer=-1)  # fmt: skip
    if frame.plot and frame.x:
        _below(sheet, chart.x, frame.x, frame.plot)
        sheet.lines("axis", [[(first.left, first.bottom), (first.right, first.bottom)]])
    return first.bottom + (46 if frame.plot and chart.x.title else 26)


def _below(sheet: Sheet, axis: Axis, scale: Scale, plot: _Box) -> None:
    places = [(scale.at(value), text) for value, text in scale.ticks(_most(sheet, down=False))]
    if places:
        sheet.lines("grid", [[(x, plot.top), (x, plot.bottom)] for x, _ in places], layer=0)
    for x, text in apart(sheet, places):
        half = sheet.measure(text) / 2
        sheet.text(min(max(x, half), sheet.width - half), plot.bottom + 13, text, "tick", anchor="middle")
    title = shortened(axis.title, plot.right - plot.left, sheet.size)
    sheet.text((plot.left + plot.right) / 2, plot.bottom + 34, title, "quiet", anchor="middle")


def _spots(points: Sequence[Point], names: Sequence[str], frame: _Frame) -> list[tuple[float, float]]:
    """Where each point stands; in the margin each series has a column of its own."""
    aside = [name for name in names if any(point.series == name for point in points if point.x is None)]
    columns = {name: (number + 1) / (len(aside) + 1) for number, name in enumerate(aside)}
    spots = []
    for point in points:
        if point.x is not None and frame.x:
            x = frame.x.at(point.x)
        else:
            assert frame.margin is not None
            x = frame.margin.left + columns[point.series] * (frame.margin.right - frame.margin.left)
        spots.append((x, frame.y.at(point.y)))
    return spots


def _hint(chart: Scatter, point: Point) -> Hint:
    where = chart.margin if point.x is None else f"{chart.x.title} {shown(point.x, chart.x.unit)}".strip()
    said = ", ".join(filter(None, (where, f"{chart.y.title} {shown(point.y, chart.y.unit)}".strip())))
    name = point.label if point.series in point.label else f"{point.series} {point.label}".strip()
    return worded(name, said, point.hint)


def _labels(
    sheet: Sheet, points: Sequence[Point], spots: Sequence[tuple[float, float]], frames: Sequence[_Box]
) -> None:
    """Names points that have room for a name beside them."""
    taken = [_Box(x - 6, y - 6, x + 6, y + 6) for x, y in spots]
    order = _by_importance(points)
    written = 0
    for number in order:
        if written == LABELS:
            return
        x, y = spots[number]
        text = shortened(points[number].label, _LABEL_ROOM * (0.65 if sheet.narrow else 1), sheet.size)
        for box, anchor, place in _around(x, y, sheet.measure(text), sheet.size) if text else ():
            inside = any(one.left <= box.left and box.right <= one.right and one.top <= box.top
                         and box.bottom <= one.bottom for one in frames)  # fmt: skip
            if inside and not any(box.meets(other) for other in taken):
                taken.append(box)
                sheet.text(place, (box.top + box.bottom) / 2, text, "label", anchor=anchor)
                written += 1
                break


def _by_importance(points: Sequence[Point]) -> list[int]:
    """The strong ones, then the first of each series, then the second of each."""
    turns: Counter[str] = Counter()
    order = []
    for number, point in enumerate(points):
        order.append((point.tone is not Tone.STRONG, turns[point.series], number))
        turns[point.series] += 1
    return [number for _, _, number in sorted(order)]


def _around(x: float, y: float, wide: float, size: float) -> Iterable[tuple[_Box, str, float]]:
    """Places for a label beside a point: right, left, above, below."""
    half = size * 0.6
    yield _Box(x + 9, y - half, x + 9 + wide, y + half), "start", x + 9
    yield _Box(x - 9 - wide, y - half, x - 9, y + half), "end", x - 9
    for middle in (y - 15, y + 15):
        yield _Box(x - wide / 2, middle - half, x + wide / 2, middle + half), "middle", x
