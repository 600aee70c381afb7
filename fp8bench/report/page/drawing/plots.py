"""Charts over two axes: lines from place to place, and scatters with a margin for points without x."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, groupby, pairwise

from fp8bench import units
from fp8bench.report.elements import ChartAxis, ChartPoint, Lines, Mark, Scatter, Tone
from fp8bench.report.page.drawing.rows import along, legend
from fp8bench.report.page.drawing.scale import (
    LABELS,
    PLACES,
    POINTED,
    POINTS,
    SERIES,
    Hint,
    Scale,
    cut_to_room,
    drawable,
    ends,
    fit_scale,
    make_hint,
    mark_hint,
    numbers_of,
    placeless,
    show_number,
    x_ends,
)
from fp8bench.report.page.drawing.sheet import Sheet, looks_of
from fp8bench.report.panels import together

_GAP = 8.0
# The most labels along the axis of places.
_MOST_PLACES = 7
# With more places, marks are only seen when they are pointed at.
_FAINT_FROM = 60

Marks = Sequence[Mark | None]


def draw_lines(sheet: Sheet, chart: Lines) -> float:
    places, unit = chart.places[-PLACES:], chart.axis.unit
    # Marks without a place on the axis are None.
    series = [
        (name, [mark if mark is not None and drawable(mark.value) else None for mark in marks[-PLACES:]])
        for name, marks in chart.series[:SERIES]
    ]
    every = [mark for _, own in chart.series for mark in own if mark is not None]
    drawn = sum(mark is not None for _, marks in series for mark in marks)
    sheet.omit(placeless(numbers_of(every)), sum(drawable(mark.value) for mark in every) - drawn)
    first = max(0, chart.settled - len(chart.places[:-PLACES]))
    values = _spans([(name, marks[first:]) for name, marks in series]) or _spans(series)
    if not values:
        return 0.0
    looks = looks_of([name for name, _ in series])
    named = [(shape, f"point {style}", name) for name, (shape, style) in looks.items()]
    top = legend(sheet, named if len(series) > 1 else [], 0.0)
    sheet.text(0, top + 8, cut_to_room(chart.axis.title, sheet.width, sheet.size), "quiet")
    top += 24
    bottom = top + 260.0
    y = fit_scale(values, bottom, top, unit=unit, pad=0.05)
    x = _across(sheet, chart, series, y, len(places))
    _line_axes(sheet, places, x, y)
    _levels(sheet, chart, x, y)
    _draw_series(sheet, chart, places, series, x, y)
    _last_values(sheet, chart, series, x, y)
    return bottom + 26


def _levels(sheet: Sheet, chart: Lines, x: Scale, y: Scale) -> None:
    for value, words in chart.levels:
        if y.low <= value <= y.high:
            sheet.lines("level-line", [[(x.start - 4, y.at(value)), (x.end + 4, y.at(value))]], layer=0)
            sheet.text(x.start, y.at(value) - 8, words, "quiet")


def _spans(series: Sequence[tuple[str, Marks]]) -> list[float]:
    return [value for _, marks in series for mark in marks if mark for value in (mark.value, *ends(mark))]


def _draw_series(
    sheet: Sheet, chart: Lines, places: Sequence[str], series: Sequence[tuple[str, Marks]], x: Scale, y: Scale
) -> None:
    """Draws series with their flags."""
    looks = looks_of([name for name, _ in series])
    for name, marks in series:
        _series(sheet, chart, places, (name, *looks[name]), marks, x, y)
    flagged = [
        (x.at(place), y.at(mark.value), flag, f"flag {looks[name][1]}")
        for name, marks in series
        for place, mark in enumerate(marks)
        if mark is not None and _is_on(mark, y)
        for flag in filter(None, mark.flag.split(", "))
    ]
    _write_beside(sheet, flagged, [], [_Box(x.start - 4, y.end - 4, x.end + 8, y.start)], _over)


def _is_on(mark: Mark, y: Scale) -> bool:
    return y.low <= mark.value <= y.high


def _across(sheet: Sheet, chart: Lines, series: Sequence[tuple[str, Marks]], y: Scale, places: int) -> Scale:
    left = max(sheet.measure(text) for _, text in y.ticks(6)) + 14
    last = [mark for _, marks in series if (mark := _last(marks))]
    room = max(sheet.measure(show_number(mark.value, chart.axis.unit), bold=True) for mark in last) + _GAP + 4
    return Scale(-0.5 if places == 1 else 0.0, max(0.5, places - 1.0), left + 4, sheet.width - room)


def _last(marks: Marks) -> Mark | None:
    return next((mark for mark in reversed(marks) if mark is not None), None)


def _line_axes(sheet: Sheet, places: Sequence[str], x: Scale, y: Scale) -> None:
    for value, text in y.ticks(6):
        sheet.lines("grid", [[(x.start - 4, y.at(value)), (x.end + 4, y.at(value))]], layer=0)
        sheet.text(x.start - 12, y.at(value), text, "tick", anchor="end")
    sheet.lines("axis", [[(x.start - 4, y.start), (x.end + 4, y.start)]], layer=0)
    sheet.lines("ticks", [[(x.at(number), y.start), (x.at(number), y.start + 4)] for number in range(len(places))])
    room = (x.end - x.start) / _MOST_PLACES
    stride = max(1, -(-(len(places) - 1) // (_MOST_PLACES - 1)))
    labelled = range((len(places) - 1) % stride, len(places), stride)
    texts = [(x.at(place), cut_to_room(places[place], room, sheet.size)) for place in labelled]
    along(sheet, texts, y.start + 14)


def _series(
    sheet: Sheet, chart: Lines, places: Sequence[str], named: tuple[str, str, str], marks: Marks, x: Scale, y: Scale
) -> None:
    name, shape, style = named
    known = groupby(enumerate(marks), key=lambda pair: pair[1] is not None)
    runs = [[(place, mark) for place, mark in run if mark is not None] for there, run in known if there]
    for run in runs:
        spans = [(x.at(place), [y.at(end) for end in ends(mark)]) for place, mark in run]
        if len(run) > 1 and all(span for _, span in spans):
            upper = [(place, min(span)) for place, span in spans]
            lower = [(place, max(span)) for place, span in reversed(spans)]
            sheet.lines(f"haze {style}", [upper + lower], closed=True)
        elif any(span for _, span in spans):
            sheet.lines("whisker", [[(place, span[0]), (place, span[1])] for place, span in spans if span])
    if strokes := [
        piece for run in runs for piece in _clip_line([(x.at(place), mark.value) for place, mark in run], y)
    ]:
        sheet.lines(f"line {style}", strokes)
    every = [(place, mark) for run in runs for place, mark in run if _is_on(mark, y)]
    many = len(marks) > _FAINT_FROM
    for place, mark in _evenly(every, POINTED // min(SERIES, len(chart.series))):
        tone = f" {mark.tone.value}" if mark.tone is not Tone.PLAIN else " faint" if many else ""
        words = mark_hint(mark, chart.axis, name, places[place])
        sheet.dot(f"mark point {style}{tone}", shape, x.at(place), y.at(mark.value), 8.0, words)


def _clip_line(points: Sequence[tuple[float, float]], y: Scale) -> list[list[tuple[float, float]]]:
    """The pieces of a line that lie on the axis."""
    pieces: list[list[tuple[float, float]]] = []
    for (left, first), (right, last) in pairwise(points):
        ends_at = sorted((end - first) / (last - first) for end in (y.low, y.high)) if first != last else [0.0, 1.0]
        begin, end = max(0.0, ends_at[0]), min(1.0, ends_at[1])
        if begin < end and (first != last or y.low <= first <= y.high):
            here, there = ((left + (right - left) * at, y.at(first + (last - first) * at)) for at in (begin, end))
            if pieces and begin == 0 and pieces[-1][-1] == here:
                pieces[-1].append(there)
            else:
                pieces.append([here, there])
    return pieces


def _evenly(marks: list[tuple[int, Mark]], most: int) -> list[tuple[int, Mark]]:
    if len(marks) <= most:
        return marks
    kept = {round(number * (len(marks) - 1) / (most - 1)) for number in range(most)}
    return [mark for number, mark in enumerate(marks) if number in kept or mark[1].tone is not Tone.PLAIN]


def _last_values(sheet: Sheet, chart: Lines, series: Sequence[tuple[str, Marks]], x: Scale, y: Scale) -> None:
    looks = looks_of([name for name, _ in series])
    lasts = [(y.at(mark.value), looks[name][1], mark) for name, marks in series if (mark := _last(marks))]
    lasts.sort(key=lambda last: last[:2])
    right = x.at(max(place for _, marks in series for place, mark in enumerate(marks) if mark is not None))
    heights: list[float] = []
    for height, _, _ in lasts:
        heights.append(max(height, heights[-1] + sheet.size if heights else height))
    for place, (height, (_, style, mark)) in enumerate(zip(heights, lasts, strict=True), 1):
        lowest = y.start - (len(lasts) - place) * sheet.size  # below the axis stand other texts
        sheet.text(right + _GAP + 2, min(height, lowest), show_number(mark.value, chart.axis.unit), f"last {style}")


_DOT = 9.5
_LABEL_ROOM = 190.0
# The most ticks of the left axis.
_TICKS = 7
# A legend of more series would be longer than the chart.
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


# A text's box, its anchor, and the anchor's place.
_Spot = tuple[_Box, str, float]


@dataclass(frozen=True)
class _Frame:
    """Where points stand: in the plot by both scales, in the margin by y alone. Either may be missing."""

    plot: _Box | None
    margin: _Box | None
    x: Scale | None
    y: Scale


def draw_scatter(sheet: Sheet, chart: Scatter) -> float:
    placed = [
        point
        for point in chart.points
        if drawable(point.y, chart.y.log) and (point.x is None or drawable(point.x, chart.x.log))
    ]
    points = placed[:: max(1, -(-len(placed) // POINTS))]
    sheet.omit(len(chart.points) - len(placed), len(placed) - len(points))
    if not points:
        return 0.0
    names = list(dict.fromkeys(point.series for point in points))
    looks = {name: (shape, f"point {style}") for name, (shape, style) in looks_of(names).items()}
    top = legend(sheet, [(*looks[name], name) for name in names[:_NAMED] if len(names) > 1 or name], 0.0)
    aside = chart.margin if any(point.x is None for point in points) else ""
    aside = cut_to_room(aside, 0.45 * sheet.width, sheet.size)
    title = cut_to_room(chart.y.title, sheet.width - sheet.measure(aside) - 12, sheet.size)
    sheet.text(0, top + 8, title, "quiet")
    sheet.text(sheet.width, top + 8, aside, "quiet", anchor="end")
    frame = _frame(chart, points, sheet, top + 24)
    end = _axes(sheet, chart, frame)
    spots = _spots(points, names, frame)
    for name in chart.joined:
        strands = together(
            (point.strand, spot) for point, spot in zip(points, spots, strict=True) if point.series == name
        )
        if lines := [sorted(strand) for strand in strands.values() if len(strand) > 1]:
            sheet.lines(looks[name][1].replace("point", "line"), lines)
    whiskers = []
    for point, (x, y) in zip(points, spots, strict=True):
        if span := [frame.y.at(end) for end in ends(point, chart.y.log)]:
            whiskers.append([(x, span[0]), (x, span[1])])
        if frame.x and (span := [frame.x.at(end) for end in x_ends(point, chart.x.log)]):
            whiskers.append([(span[0], y), (span[1], y)])
    if whiskers:
        sheet.lines("whisker", whiskers)
    for point, (x, y) in zip(points, spots, strict=True):
        shape, style = looks[point.series]
        tone = f" {point.tone.value}" if point.tone is not Tone.PLAIN else ""
        sheet.dot(f"mark {style}{tone}", shape, x, y, _DOT, _hint(chart, point))
    _labels(sheet, points, spots, [box for box in (frame.plot, frame.margin) if box])
    return end


def _frame(chart: Scatter, points: list[ChartPoint], sheet: Sheet, top: float) -> _Frame:
    bottom = top + 380.0
    heights = [height for point in points for height in (point.y, *ends(point, chart.y.log))]
    y = fit_scale(heights, bottom, top, chart.y.log, chart.y.unit, 0.05)
    left = max(sheet.measure(text) for _, text in y.ticks(_TICKS)) + 10
    placed = [point.x for point in points if point.x is not None]
    if not placed:
        return _Frame(None, _Box(left, top, sheet.width - 1, bottom), None, y)
    right, margin = sheet.width - 1, None
    if len(placed) < len(points):
        margin = _Box(right - 130.0, top, right, bottom)
        right = margin.left - 10
    widths = [*placed, *(end for point in points for end in x_ends(point, chart.x.log))]
    x = fit_scale(widths, left, right, chart.x.log, chart.x.unit, 0.05)
    return _Frame(_Box(left, top, right, bottom), margin, x, y)


def _axes(sheet: Sheet, chart: Scatter, frame: _Frame) -> float:
    first = frame.plot or frame.margin
    assert first is not None
    heights = [(frame.y.at(value), text) for value, text in frame.y.ticks(_TICKS)]
    for box in filter(None, (frame.plot, frame.margin)):
        sheet.lines("grid", [[(box.left, y), (box.right, y)] for y, _ in heights], layer=0)
    for y, text in heights:
        sheet.text(first.left - 8, y, text, "tick", anchor="end")
    if frame.margin:
        sheet.box(
            "margin",
            frame.margin.left,
            first.top,
            frame.margin.right - frame.margin.left,
            first.bottom - first.top,
            layer=-1,
        )
    if frame.plot and frame.x:
        _below(sheet, chart.x, frame.x, frame.plot)
        sheet.lines("axis", [[(first.left, first.bottom), (first.right, first.bottom)]])
    return first.bottom + (46 if frame.plot and chart.x.title else 26)


def _below(sheet: Sheet, axis: ChartAxis, scale: Scale, plot: _Box) -> None:
    places = [(scale.at(value), text) for value, text in scale.ticks(7)]
    if places:
        sheet.lines("grid", [[(x, plot.top), (x, plot.bottom)] for x, _ in places], layer=0)
    along(sheet, places, plot.bottom + 13)
    title = cut_to_room(axis.title, plot.right - plot.left, sheet.size)
    sheet.text((plot.left + plot.right) / 2, plot.bottom + 34, title, "quiet", anchor="middle")


def _spots(points: Sequence[ChartPoint], names: Sequence[str], frame: _Frame) -> list[tuple[float, float]]:
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


def _hint(chart: Scatter, point: ChartPoint) -> Hint:
    where = chart.margin if point.x is None else f"{chart.x.title} {show_number(point.x, chart.x.unit)}".strip()
    within = (
        f" ({units.span(interval, lambda end: show_number(end, chart.y.unit))})" if (interval := ends(point)) else ""
    )
    said = ", ".join(filter(None, (where, f"{chart.y.title} {show_number(point.y, chart.y.unit)}{within}".strip())))
    name = point.label if point.series in point.label else f"{point.series} {point.label}".strip()
    return make_hint(name, said, point.hint)


def _labels(
    sheet: Sheet, points: Sequence[ChartPoint], spots: Sequence[tuple[float, float]], frames: Sequence[_Box]
) -> None:
    """Labels points: strong ones, then each series' first, then second ones; joined strands need none."""
    taken = [_Box(x - 6, y - 6, x + 6, y + 6) for x, y in spots]
    turns: dict[str, count[int]] = defaultdict(count)
    order = [
        (point.tone is not Tone.STRONG, next(turns[point.series]), number)
        for number, point in enumerate(points)
        if not point.strand
    ]
    wanted = [(*spots[number], points[number].label, "label") for _, _, number in sorted(order)]
    _write_beside(sheet, wanted, taken, frames, _around)


def _write_beside(
    sheet: Sheet,
    wanted: Iterable[tuple[float, float, str, str]],
    taken: list[_Box],
    frames: Sequence[_Box],
    around: Callable[[float, float, float, float], Iterable[_Spot]],
) -> None:
    """Writes texts beside their places, as many as find room."""
    written = 0
    for x, y, label, style in wanted:
        if written == LABELS:
            return
        text = cut_to_room(label, _LABEL_ROOM, sheet.size)
        for box, anchor, place in around(x, y, sheet.measure(text), sheet.size) if text else ():
            inside = any(
                frame.left <= box.left
                and box.right <= frame.right
                and frame.top <= box.top
                and box.bottom <= frame.bottom
                for frame in frames
            )
            if inside and not any(box.meets(other) for other in taken):
                taken.append(box)
                sheet.text(place, (box.top + box.bottom) / 2, text, style, anchor=anchor)
                written += 1
                break


def _over(x: float, y: float, wide: float, size: float) -> Iterable[_Spot]:
    """Boxes above a mark, higher, and below it, for texts over lines."""
    half = size * 0.6
    for middle in (y + way * size * 1.25 for way in (-1, -2, -3, -4, 1, 2, 3)):
        for left, anchor, place in ((x - wide / 2, "middle", x), (x, "start", x), (x - wide, "end", x)):
            yield _Box(left, middle - half, left + wide, middle + half), anchor, place


def _around(x: float, y: float, wide: float, size: float) -> Iterable[_Spot]:
    half = size * 0.6
    yield _Box(x + 9, y - half, x + 9 + wide, y + half), "start", x + 9
    yield _Box(x - 9 - wide, y - half, x - 9, y + half), "end", x - 9
    for middle in (y - 15, y + 15):
        yield _Box(x - wide / 2, middle - half, x + wide / 2, middle + half), "middle", x
