"""Charts over two axes: lines from place to place, and scatters with a margin for points without x."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fp8bench.report.elements import ChartPoint, Lines, Mark, Scatter, Tone
from fp8bench.report.page.drawing.labels import Box, boxes_around, boxes_over, write_beside
from fp8bench.report.page.drawing.rows import along, draw_axis_below, legend
from fp8bench.report.page.drawing.scale import (
    PLACES,
    POINTED,
    POINTS,
    SERIES,
    Scale,
    cut_to_room,
    drawable,
    ends,
    fit_scale,
    make_hint,
    mark_hint,
    show_number,
    x_ends,
)
from fp8bench.report.page.drawing.sheet import Sheet, looks_of

# Pixels between the end of a line and its value.
_GAP = 8.0
# The most labels along the axis of places.
_MOST_PLACES = 7
# With more places, marks are only visible on hovering.
_FAINT_FROM = 60

Marks = Sequence[Mark | None]
Series = Sequence[tuple[str, Marks]]
# Marks with their places.
Placed = list[tuple[int, Mark]]
Point = tuple[float, float]


@dataclass(frozen=True)
class _LinePlot:
    """A chart of lines on its sheet: the drawn series, with the shape and class of each, and both scales.

    A mark without a place on the axis is None.
    """

    sheet: Sheet
    chart: Lines
    places: Sequence[str]
    series: Series
    looks: Mapping[str, tuple[str, str]]
    x: Scale
    y: Scale

    def has_on_axis(self, mark: Mark) -> bool:
        return self.y.low <= mark.value <= self.y.high

    def line_across(self, value: float) -> list[Point]:
        height = self.y.at(value)
        return [(self.x.start - 4, height), (self.x.end + 4, height)]


def draw_lines(sheet: Sheet, chart: Lines) -> float:
    # 1. Choose what is drawn: the last places of the first series.
    places = chart.places[-PLACES:]
    series: list[tuple[str, Marks]] = []
    for name, marks in chart.series[:SERIES]:
        drawn = [mark if mark is not None and drawable(mark.value) else None for mark in marks[-PLACES:]]
        series.append((name, drawn))
    sheet.omit(len(list(_present(chart.series))) - len(list(_present(series))))
    # 2. Fit the axis of values to the settled places, or to all if nothing is drawn there.
    first = max(0, chart.settled - len(chart.places[:-PLACES]))
    settled = [(name, marks_of_series[first:]) for name, marks_of_series in series]
    values = _values_and_ends(settled) or _values_and_ends(series)
    if not values:
        return 0.0
    # 3. Write legend and title, and draw below them. All use the same looks, so that a series is
    # recognised in the legend, on its line and at its last value.
    looks = looks_of([name for name, _ in series])
    top = 0.0
    if len(series) > 1:
        top = legend(sheet, [(shape, f"point {style}", name) for name, (shape, style) in looks.items()], top)
    sheet.text(0, top + 8, cut_to_room(chart.axis.title, sheet.width, sheet.size), "quiet")
    bottom = top + 284.0
    y = fit_scale(values, bottom, top + 24, unit=chart.axis.unit, pad=0.05)
    plot = _LinePlot(sheet, chart, places, series, looks, _place_scale(sheet, chart, series, y, len(places)), y)
    _draw_axes_of_lines(plot)
    for value, words in chart.levels:
        if y.low <= value <= y.high:
            sheet.lines("level-line", [plot.line_across(value)], layer=0)
            sheet.text(plot.x.start, y.at(value) - 8, words, "quiet")
    for name, marks_of_series in series:
        _draw_line(plot, name, marks_of_series)
    _write_flags(plot)
    _write_last_values(plot)
    return bottom + 26


def _present(series: Series) -> Iterator[Mark]:
    for _, marks in series:
        yield from (mark for mark in marks if mark is not None)


def _values_and_ends(series: Series) -> list[float]:
    values = []
    for mark in _present(series):
        values.append(mark.value)
        values += ends(mark)
    return values


def _write_flags(plot: _LinePlot) -> None:
    """Writes events next to their marks."""
    x = plot.x
    y = plot.y
    texts = []
    for name, marks in plot.series:
        style = f"flag {plot.looks[name][1]}"
        for place, mark in enumerate(marks):
            if mark is None or not mark.flag or not plot.has_on_axis(mark):
                continue
            texts += [(x.at(place), y.at(mark.value), flag, style) for flag in mark.flag.split(", ")]
    # Flags avoid the ticks on the left and the last values on the right.
    frame = Box(x.start - 4, y.end - 4, x.end + 8, y.start)
    write_beside(plot.sheet, texts, [], [frame], boxes_over)


def _place_scale(sheet: Sheet, chart: Lines, series: Series, y: Scale, num_places: int) -> Scale:
    """A scale of places, with room for ticks on the left and for the last values on the right."""
    left = max(sheet.measure(text) for _, text in y.ticks(6)) + 14
    room = 0.0
    for _, marks in series:
        last = _last(marks)
        if last is not None:
            text = show_number(last.value, chart.axis.unit)
            room = max(room, sheet.measure(text, bold=True))
    low = -0.5 if num_places == 1 else 0.0
    return Scale(low, max(0.5, num_places - 1.0), left + 4, sheet.width - room - _GAP - 4)


def _last(marks: Marks) -> Mark | None:
    return next((mark for mark in reversed(marks) if mark is not None), None)


def _draw_axes_of_lines(plot: _LinePlot) -> None:
    sheet = plot.sheet
    places = plot.places
    x = plot.x
    y = plot.y
    for value, text in y.ticks(6):
        sheet.lines("grid", [plot.line_across(value)], layer=0)
        sheet.text(x.start - 12, y.at(value), text, "tick", anchor="end")
    sheet.lines("axis", [plot.line_across(y.low)], layer=0)
    ticks = [[(x.at(place), y.start), (x.at(place), y.start + 4)] for place in range(len(places))]
    sheet.lines("ticks", ticks)
    # The last place always has a label.
    room = (x.end - x.start) / _MOST_PLACES
    stride = max(1, -(-(len(places) - 1) // (_MOST_PLACES - 1)))
    labelled = range((len(places) - 1) % stride, len(places), stride)
    along(sheet, [(x.at(place), cut_to_room(places[place], room, sheet.size)) for place in labelled], y.start + 14)


def _draw_line(plot: _LinePlot, name: str, marks: Marks) -> None:
    """Draws a series: intervals behind it, a line through each unbroken stretch, and marks to point at."""
    sheet = plot.sheet
    x = plot.x
    y = plot.y
    shape, style = plot.looks[name]
    strokes: list[list[Point]] = []
    on_axis: Placed = []
    for stretch in _unbroken(marks):
        _draw_intervals(plot, style, stretch)
        strokes += _clip_line([(x.at(place), mark.value) for place, mark in stretch], y)
        on_axis += [(place, mark) for place, mark in stretch if plot.has_on_axis(mark)]
    if strokes:
        sheet.lines(f"line {style}", strokes)
    usual_tone = " faint" if len(marks) > _FAINT_FROM else ""
    for place, mark in _thin_out(on_axis, POINTED // min(SERIES, len(plot.chart.series))):
        tone = usual_tone if mark.tone is Tone.PLAIN else f" {mark.tone.value}"
        words = mark_hint(mark, plot.chart.axis, name, plot.places[place])
        sheet.dot(f"mark point {style}{tone}", shape, x.at(place), y.at(mark.value), 8.0, words)


def _unbroken(marks: Marks) -> list[Placed]:
    """Returns runs of neighbouring marks with their places; a place without a mark ends a run."""
    stretches: list[Placed] = []
    previous: Mark | None = None
    for place, mark in enumerate(marks):
        if mark is not None:
            if previous is None:
                stretches.append([])
            stretches[-1].append((place, mark))
        previous = mark
    return stretches


def _draw_intervals(plot: _LinePlot, style: str, stretch: Placed) -> None:
    """Draws a band if all marks have intervals, or else a whisker for each that has one."""
    upper = []
    lower = []
    for place, mark in stretch:
        if interval := ends(mark):
            heights = [plot.y.at(end) for end in interval]
            upper.append((plot.x.at(place), min(heights)))
            lower.append((plot.x.at(place), max(heights)))
    if 1 < len(stretch) == len(upper):
        plot.sheet.lines(f"haze {style}", [upper + lower[::-1]], closed=True)
    elif upper:
        plot.sheet.lines("whisker", [list(pair) for pair in zip(lower, upper, strict=True)])


def _clip_line(points: Sequence[Point], y: Scale) -> list[list[Point]]:
    """Returns the pieces of a line that are within the axis."""
    pieces: list[list[Point]] = []
    for (left, first), (right, last) in pairwise(points):
        # The fractions of this segment at which it enters and leaves the axis.
        begin = 0.0
        end = 1.0
        if first != last:
            crossings = sorted(((y.low - first) / (last - first), (y.high - first) / (last - first)))
            begin = max(begin, crossings[0])
            end = min(end, crossings[1])
        elif not y.low <= first <= y.high:
            continue
        if begin >= end:
            continue
        start = (left + (right - left) * begin, y.at(first + (last - first) * begin))
        stop = (left + (right - left) * end, y.at(first + (last - first) * end))
        if pieces and begin == 0 and pieces[-1][-1] == start:
            pieces[-1].append(stop)
        else:
            pieces.append([start, stop])
    return pieces


def _thin_out(marks: Placed, most: int) -> Placed:
    """Returns at most `most` marks at even distances, and all that have a tone."""
    if len(marks) <= most:
        return marks
    chosen = {round(number * (len(marks) - 1) / (most - 1)) for number in range(most)}
    return [mark for number, mark in enumerate(marks) if number in chosen or mark[1].tone is not Tone.PLAIN]


def _write_last_values(plot: _LinePlot) -> None:
    """Writes each series' last value to the right of the lines, stacked if they would overlap."""
    sheet = plot.sheet
    y = plot.y
    texts = []
    last_place = 0
    for name, marks in plot.series:
        last = _last(marks)
        if last is not None:
            texts.append((y.at(last.value), plot.looks[name][1], show_number(last.value, plot.chart.axis.unit)))
            last_place = max(last_place, *(place for place, mark in enumerate(marks) if mark is not None))
    # Sort by height, then class, so that the drawing is deterministic.
    texts.sort(key=lambda text: text[:2])
    heights: list[float] = []
    for height, _, _ in texts:
        # Pushed down by the text above.
        heights.append(max(height, heights[-1] + sheet.size if heights else height))
    for number, (_, style, text) in enumerate(texts):
        lowest = y.start - (len(texts) - 1 - number) * sheet.size  # below the axis there are other texts
        sheet.text(plot.x.at(last_place) + _GAP + 2, min(heights[number], lowest), text, f"last {style}")


# Points of a scatter are isolated, so they are larger than marks on lines.
_DOT = 9.5
_TICKS = 7
# A legend with more series would be longer than the chart.
_NAMED = 16


@dataclass(frozen=True)
class _Frame:
    """The plot with both scales, and the margin for points without x, if there are any."""

    plot: Box
    margin: Box | None
    x: Scale
    y: Scale


def draw_scatter(sheet: Sheet, chart: Scatter) -> float:
    # 1. Choose the points: those with a place on both axes, thinned out evenly if they are too many.
    placed = [point for point in chart.points if drawable(point.y, log=True) and (point.x is None or drawable(point.x))]
    points = placed[:: max(1, -(-len(placed) // POINTS))]
    sheet.omit(len(chart.points) - len(points))
    if all(point.x is None for point in points):
        return 0.0
    # 2. Write the legend, and the titles of the axis and the margin.
    names = list(dict.fromkeys(point.series for point in points))
    looks = {name: (shape, f"point {style}") for name, (shape, style) in looks_of(names).items()}
    entries = [(*looks[name], name) for name in names[:_NAMED] if len(names) > 1 or name]
    top = legend(sheet, entries, 0.0)
    margin_title = chart.margin if any(point.x is None for point in points) else ""
    margin_title = cut_to_room(margin_title, 0.45 * sheet.width, sheet.size)
    title = cut_to_room(chart.y.title, sheet.width - sheet.measure(margin_title) - 12, sheet.size)
    sheet.text(0, top + 8, title, "quiet")
    sheet.text(sheet.width, top + 8, margin_title, "quiet", anchor="end")
    # 3. Draw axes, then whiskers, marks and labels, so that each layer stays visible.
    frame = _fit_frame(chart, points, sheet, top + 24)
    end = _draw_axes_of_scatter(sheet, chart, frame)
    spots = _find_spots(points, names, frame)
    whiskers: list[list[Point]] = []
    for point, (_, y) in zip(points, spots, strict=True):
        if interval := x_ends(point):
            whiskers.append([(frame.x.at(end), y) for end in interval])
    if whiskers:
        sheet.lines("whisker", whiskers)
    for point, (x, y) in zip(points, spots, strict=True):
        shape, style = looks[point.series]
        tone = f" {point.tone.value}" if point.tone is not Tone.PLAIN else ""
        sheet.dot(f"mark {style}{tone}", shape, x, y, _DOT, _hint(chart, point))
    _write_labels(sheet, points, spots, whiskers, frame)
    return end


def _fit_frame(chart: Scatter, points: Sequence[ChartPoint], sheet: Sheet, top: float) -> _Frame:
    bottom = top + 380.0
    y = fit_scale([point.y for point in points], bottom, top, True, chart.y.unit, 0.05)
    left = max(sheet.measure(text) for _, text in y.ticks(_TICKS)) + 10
    right = sheet.width - 1
    margin = None
    widths: list[float] = []
    for point in points:
        if point.x is not None:
            widths += [point.x, *x_ends(point)]
        else:
            # Wide enough for a few columns and its title.
            margin = Box(right - 130.0, top, right, bottom)
    if margin:
        right = margin.left - 10
    x = fit_scale(widths, left, right, unit=chart.x.unit, pad=0.05)
    return _Frame(Box(left, top, right, bottom), margin, x, y)


def _draw_axes_of_scatter(sheet: Sheet, chart: Scatter, frame: _Frame) -> float:
    plot = frame.plot
    margin = frame.margin
    heights = [(frame.y.at(value), text) for value, text in frame.y.ticks(_TICKS)]
    for box in filter(None, (plot, margin)):
        sheet.lines("grid", [[(box.left, y), (box.right, y)] for y, _ in heights], layer=0)
    for y, text in heights:
        sheet.text(plot.left - 8, y, text, "tick", anchor="end")
    if margin:
        sheet.box("margin", margin.left, plot.top, margin.right - margin.left, plot.bottom - plot.top, layer=-1)
    sheet.lines("axis", [[(plot.left, plot.bottom), (plot.right, plot.bottom)]])
    return draw_axis_below(sheet, frame.x, chart.x.title, plot.top, plot.bottom)


def _find_spots(points: Sequence[ChartPoint], names: Sequence[str], frame: _Frame) -> list[Point]:
    """Returns the position of each point. In the margin each series has a separate column."""
    in_margin = {point.series for point in points if point.x is None}
    columns = [name for name in names if name in in_margin]
    spots = []
    for point in points:
        if point.x is not None:
            x = frame.x.at(point.x)
        else:
            assert frame.margin is not None
            share = (columns.index(point.series) + 1) / (len(columns) + 1)
            x = frame.margin.left + share * (frame.margin.right - frame.margin.left)
        spots.append((x, frame.y.at(point.y)))
    return spots


def _hint(chart: Scatter, point: ChartPoint) -> str:
    position = chart.margin
    if point.x is not None:
        position = f"{chart.x.title} {show_number(point.x, chart.x.unit)}".strip()
    height = f"{chart.y.title} {show_number(point.y, chart.y.unit)}".strip()
    name = point.label if point.series in point.label else f"{point.series} {point.label}".strip()
    return make_hint(name, ", ".join(filter(None, (position, height))), point.hint)


def _write_labels(
    sheet: Sheet,
    points: Sequence[ChartPoint],
    spots: Sequence[Point],
    whiskers: Sequence[Sequence[Point]],
    frame: _Frame,
) -> None:
    """Labels the first point of each series, then the second ones, and so on."""
    # Labels must not cover points or whiskers.
    taken = [Box(x - 6, y - 6, x + 6, y + 6) for x, y in spots]
    for (left, first), (right, last) in whiskers:
        taken.append(Box(left, min(first, last) - 2, right, max(first, last) + 2))
    numbers = Counter[str]()
    order = []
    for number, point in enumerate(points):
        order.append((numbers[point.series], number))
        numbers[point.series] += 1
    texts = [(*spots[number], points[number].label, "label") for _, number in sorted(order)]
    frames = [box for box in (frame.plot, frame.margin) if box]
    write_beside(sheet, texts, taken, frames, boxes_around)
