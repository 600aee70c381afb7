"""Draws charts over two axes: lines from place to place, and scatter charts with a margin for points without x."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fp8bench.report.elements import ChartPoint, Lines, Mark, Scatter, Tone
from fp8bench.report.page.drawing.labels import Box, boxes_above_and_below, boxes_around, write_labels
from fp8bench.report.page.drawing.rows import draw_axis_below, draw_legend, write_along_axis
from fp8bench.report.page.drawing.scale import (
    MAX_HOVERABLE_MARKS,
    MAX_PLACES,
    MAX_POINTS,
    MAX_SERIES,
    Scale,
    cut_to_room,
    fit_scale,
    interval_ends,
    is_drawable,
    make_hint,
    mark_hint,
    show_number,
    x_ends,
)
from fp8bench.report.page.drawing.sheet import Sheet, choose_series_looks

# The gap between the end of a line and its value, in pixels.
_VALUE_GAP = 8.0
# The axis of places has at most this many labels.
_MAX_PLACE_LABELS = 7
# If there are more places than this, marks are visible only on hovering.
_MAX_VISIBLE_MARKS = 60

Marks = Sequence[Mark | None]
Series = Sequence[tuple[str, Marks]]
# marks of one series, each with the index of its place on the axis
IndexedMarks = list[tuple[int, Mark]]
Point = tuple[float, float]


@dataclass(frozen=True)
class _LinePlot:
    """A line chart on its sheet. Has the series to draw, the shape and CSS class of each series (`looks`), and the
    scales of both axes. A mark that cannot be drawn on the axis is None.
    """

    sheet: Sheet
    chart: Lines
    places: Sequence[str]
    series: Series
    looks: Mapping[str, tuple[str, str]]
    x: Scale
    y: Scale

    def is_on_axis(self, mark: Mark) -> bool:
        return self.y.low <= mark.value <= self.y.high

    def horizontal_line(self, value: float) -> list[Point]:
        height = self.y.to_pixels(value)
        return [(self.x.start - 4, height), (self.x.end + 4, height)]


def draw_lines(sheet: Sheet, chart: Lines) -> float:
    # 1. Limit the chart to the last places and the first series.
    places = chart.places[-MAX_PLACES:]
    series: list[tuple[str, Marks]] = []
    for name, marks in chart.series[:MAX_SERIES]:
        drawable_marks = [
            mark if mark is not None and is_drawable(mark.value) else None for mark in marks[-MAX_PLACES:]
        ]
        series.append((name, drawable_marks))
    sheet.note_missing_values(len(list(_iterate_marks(chart.series))) - len(list(_iterate_marks(series))))
    # 2. Fit the value axis to the settled places. If they have no marks, fit it to all places.
    first_settled = max(0, chart.settled - len(chart.places[:-MAX_PLACES]))
    settled_series = [(name, marks_of_series[first_settled:]) for name, marks_of_series in series]
    values = _values_and_ends(settled_series) or _values_and_ends(series)
    if not values:
        return 0.0
    # 3. Write the legend and the title, and draw the lines below. Each series has the same shape and colour in the
    # legend, on its line and at its last value.
    looks = choose_series_looks([name for name, _ in series])
    top = 0.0
    if len(series) > 1:
        top = draw_legend(sheet, [(shape, f"point {style}", name) for name, (shape, style) in looks.items()], top)
    sheet.add_text(0, top + 8, cut_to_room(chart.axis.title, sheet.width, sheet.font_size), "quiet")
    bottom = top + 284.0
    y = fit_scale(values, bottom, top + 24, unit=chart.axis.unit, margin_share=0.05)
    plot = _LinePlot(sheet, chart, places, series, looks, _scale_of_places(sheet, chart, series, y, len(places)), y)
    _draw_axes_of_lines(plot)
    for value, level_name in chart.levels:
        if y.low <= value <= y.high:
            sheet.add_lines("level-line", [plot.horizontal_line(value)], layer=0)
            sheet.add_text(plot.x.start, y.to_pixels(value) - 8, level_name, "quiet")
    for name, marks_of_series in series:
        _draw_line(plot, name, marks_of_series)
    _write_flags(plot)
    _write_last_values(plot)
    return bottom + 26


def _iterate_marks(series: Series) -> Iterator[Mark]:
    for _, marks in series:
        yield from (mark for mark in marks if mark is not None)


def _values_and_ends(series: Series) -> list[float]:
    values = []
    for mark in _iterate_marks(series):
        values.append(mark.value)
        values += interval_ends(mark)
    return values


def _write_flags(plot: _LinePlot) -> None:
    """Writes the events of marks next to them."""
    x = plot.x
    y = plot.y
    texts = []
    for name, marks in plot.series:
        style = f"flag {plot.looks[name][1]}"
        for place, mark in enumerate(marks):
            if mark is None or not mark.flag or not plot.is_on_axis(mark):
                continue
            texts += [(x.to_pixels(place), y.to_pixels(mark.value), flag, style) for flag in mark.flag.split(", ")]
    # Keep flags away from the ticks on the left and the last values on the right.
    frame = Box(x.start - 4, y.end - 4, x.end + 8, y.start)
    write_labels(plot.sheet, texts, [], [frame], boxes_above_and_below)


def _scale_of_places(sheet: Sheet, chart: Lines, series: Series, y: Scale, num_places: int) -> Scale:
    """Returns the x scale of a line chart. It leaves room for the ticks of the y axis on the left, and for the last
    values on the right.
    """
    tick_width = max(sheet.measure_text(text) for _, text in y.ticks(6)) + 14
    value_width = 0.0
    for _, marks in series:
        last_mark = _last_mark(marks)
        if last_mark is not None:
            text = show_number(last_mark.value, chart.axis.unit)
            value_width = max(value_width, sheet.measure_text(text, bold=True))
    low = -0.5 if num_places == 1 else 0.0
    return Scale(low, max(0.5, num_places - 1.0), tick_width + 4, sheet.width - value_width - _VALUE_GAP - 4)


def _last_mark(marks: Marks) -> Mark | None:
    return next((mark for mark in reversed(marks) if mark is not None), None)


def _draw_axes_of_lines(plot: _LinePlot) -> None:
    sheet = plot.sheet
    places = plot.places
    x = plot.x
    y = plot.y
    for value, text in y.ticks(6):
        sheet.add_lines("grid", [plot.horizontal_line(value)], layer=0)
        sheet.add_text(x.start - 12, y.to_pixels(value), text, "tick", anchor="end")
    sheet.add_lines("axis", [plot.horizontal_line(y.low)], layer=0)
    ticks = [[(x.to_pixels(place), y.start), (x.to_pixels(place), y.start + 4)] for place in range(len(places))]
    sheet.add_lines("ticks", ticks)
    # Choose the labels of places so that the last place has a label.
    max_label_width = (x.end - x.start) / _MAX_PLACE_LABELS
    stride = max(1, -(-(len(places) - 1) // (_MAX_PLACE_LABELS - 1)))
    labelled_places = range((len(places) - 1) % stride, len(places), stride)
    write_along_axis(
        sheet,
        [
            (x.to_pixels(place), cut_to_room(places[place], max_label_width, sheet.font_size))
            for place in labelled_places
        ],
        y.start + 14,
    )


def _draw_line(plot: _LinePlot, name: str, marks: Marks) -> None:
    """Draws one series: first its intervals, then a line through each stretch of marks, then the marks. Hovering over
    a mark shows its value.
    """
    sheet = plot.sheet
    x = plot.x
    y = plot.y
    shape, style = plot.looks[name]
    line_pieces: list[list[Point]] = []
    on_axis: IndexedMarks = []
    for stretch in _unbroken_stretches(marks):
        _draw_intervals(plot, style, stretch)
        line_pieces += _clip_line([(x.to_pixels(place), mark.value) for place, mark in stretch], y)
        on_axis += [(place, mark) for place, mark in stretch if plot.is_on_axis(mark)]
    if line_pieces:
        sheet.add_lines(f"line {style}", line_pieces)
    usual_tone = " faint" if len(marks) > _MAX_VISIBLE_MARKS else ""
    for place, mark in _thin_out(on_axis, MAX_HOVERABLE_MARKS // min(MAX_SERIES, len(plot.chart.series))):
        tone = usual_tone if mark.tone is Tone.PLAIN else f" {mark.tone.value}"
        hint = mark_hint(mark, plot.chart.axis, name, plot.places[place])
        sheet.add_dot(f"mark point {style}{tone}", shape, x.to_pixels(place), y.to_pixels(mark.value), 8.0, hint)


def _unbroken_stretches(marks: Marks) -> list[IndexedMarks]:
    """Splits a series wherever a place has no mark. Returns the marks of each stretch with the indices of their
    places.
    """
    stretches: list[IndexedMarks] = []
    previous: Mark | None = None
    for place, mark in enumerate(marks):
        if mark is not None:
            if previous is None:
                stretches.append([])
            stretches[-1].append((place, mark))
        previous = mark
    return stretches


def _draw_intervals(plot: _LinePlot, style: str, stretch: IndexedMarks) -> None:
    """Draws the intervals of a stretch of marks. If all marks have intervals, it draws a band. Otherwise it draws a
    whisker for each mark that has one.
    """
    upper_ends = []
    lower_ends = []
    for place, mark in stretch:
        if interval := interval_ends(mark):
            heights = [plot.y.to_pixels(end) for end in interval]
            upper_ends.append((plot.x.to_pixels(place), min(heights)))
            lower_ends.append((plot.x.to_pixels(place), max(heights)))
    if 1 < len(stretch) == len(upper_ends):
        plot.sheet.add_lines(f"haze {style}", [upper_ends + lower_ends[::-1]], closed=True)
    elif upper_ends:
        plot.sheet.add_lines("whisker", [list(pair) for pair in zip(lower_ends, upper_ends, strict=True)])


def _clip_line(points: Sequence[Point], y: Scale) -> list[list[Point]]:
    """Cuts a line at the ends of the value axis. Returns the pieces of it that lie within the axis."""
    pieces: list[list[Point]] = []
    for (left_x, left_value), (right_x, right_value) in pairwise(points):
        # Where the segment enters and leaves the axis, as fractions of its length.
        enter_fraction = 0.0
        leave_fraction = 1.0
        if left_value != right_value:
            crossings = sorted(
                ((y.low - left_value) / (right_value - left_value), (y.high - left_value) / (right_value - left_value))
            )
            enter_fraction = max(enter_fraction, crossings[0])
            leave_fraction = min(leave_fraction, crossings[1])
        elif not y.low <= left_value <= y.high:
            continue
        if enter_fraction >= leave_fraction:
            continue
        start = (
            left_x + (right_x - left_x) * enter_fraction,
            y.to_pixels(left_value + (right_value - left_value) * enter_fraction),
        )
        stop = (
            left_x + (right_x - left_x) * leave_fraction,
            y.to_pixels(left_value + (right_value - left_value) * leave_fraction),
        )
        if pieces and enter_fraction == 0 and pieces[-1][-1] == start:
            pieces[-1].append(stop)
        else:
            pieces.append([start, stop])
    return pieces


def _thin_out(marks: IndexedMarks, max_marks: int) -> IndexedMarks:
    """Returns at most `max_marks` evenly spaced marks. All marks that have a tone are added to these."""
    if len(marks) <= max_marks:
        return marks
    kept_indices = {round(index * (len(marks) - 1) / (max_marks - 1)) for index in range(max_marks)}
    return [mark for index, mark in enumerate(marks) if index in kept_indices or mark[1].tone is not Tone.PLAIN]


def _write_last_values(plot: _LinePlot) -> None:
    """Writes the last value of each series to the right of the lines. Values that would overlap are written one below
    another.
    """
    sheet = plot.sheet
    y = plot.y
    texts = []
    last_place = 0
    for name, marks in plot.series:
        last_mark = _last_mark(marks)
        if last_mark is not None:
            texts.append(
                (y.to_pixels(last_mark.value), plot.looks[name][1], show_number(last_mark.value, plot.chart.axis.unit))
            )
            last_place = max(last_place, *(place for place, mark in enumerate(marks) if mark is not None))
    # Sort by height, then by CSS class, so that the drawing is reproducible.
    texts.sort(key=lambda text: text[:2])
    heights: list[float] = []
    for height, _, _ in texts:
        # Move a text down if it would overlap the one above it.
        heights.append(max(height, heights[-1] + sheet.font_size if heights else height))
    for index, (_, style, text) in enumerate(texts):
        # Keep the text above the axis, because the labels of places are below the axis.
        max_height = y.start - (len(texts) - 1 - index) * sheet.font_size
        sheet.add_text(
            plot.x.to_pixels(last_place) + _VALUE_GAP + 2, min(heights[index], max_height), text, f"last {style}"
        )


# Points of a scatter chart have no line between them, so they are larger than marks on a line.
_DOT_SIZE = 9.5
_MAX_TICKS = 7
# The legend names at most this many series. With more, it would be longer than the chart.
_MAX_LEGEND_SERIES = 16


@dataclass(frozen=True)
class _Frame:
    """The box of the plot with the scales of both axes. If some points have no x, it also has the box of the margin."""

    plot: Box
    margin: Box | None
    x: Scale
    y: Scale


def draw_scatter(sheet: Sheet, chart: Scatter) -> float:
    # 1. Choose the points that both axes can show, evenly thinned out if there are too many.
    drawable_points = [
        point for point in chart.points if is_drawable(point.y, log=True) and (point.x is None or is_drawable(point.x))
    ]
    points = drawable_points[:: max(1, -(-len(drawable_points) // MAX_POINTS))]
    sheet.note_missing_values(len(chart.points) - len(points))
    if all(point.x is None for point in points):
        return 0.0
    # 2. Write the legend, and the titles of the y axis and the margin.
    names = list(dict.fromkeys(point.series for point in points))
    looks = {name: (shape, f"point {style}") for name, (shape, style) in choose_series_looks(names).items()}
    entries = [(*looks[name], name) for name in names[:_MAX_LEGEND_SERIES] if len(names) > 1 or name]
    top = draw_legend(sheet, entries, 0.0)
    margin_title = chart.margin if any(point.x is None for point in points) else ""
    margin_title = cut_to_room(margin_title, 0.45 * sheet.width, sheet.font_size)
    title = cut_to_room(chart.y.title, sheet.width - sheet.measure_text(margin_title) - 12, sheet.font_size)
    sheet.add_text(0, top + 8, title, "quiet")
    sheet.add_text(sheet.width, top + 8, margin_title, "quiet", anchor="end")
    # 3. Draw the axes, then whiskers, marks and labels, so that later layers cover earlier ones.
    frame = _fit_frame(chart, points, sheet, top + 24)
    lower_end = _draw_axes_of_scatter(sheet, chart, frame)
    positions = _find_positions(points, names, frame)
    whiskers: list[list[Point]] = []
    for point, (_, y) in zip(points, positions, strict=True):
        if interval := x_ends(point):
            whiskers.append([(frame.x.to_pixels(bound), y) for bound in interval])
    if whiskers:
        sheet.add_lines("whisker", whiskers)
    for point, (x, y) in zip(points, positions, strict=True):
        shape, style = looks[point.series]
        tone = f" {point.tone.value}" if point.tone is not Tone.PLAIN else ""
        sheet.add_dot(f"mark {style}{tone}", shape, x, y, _DOT_SIZE, _point_hint(chart, point))
    _label_points(sheet, points, positions, whiskers, frame)
    return lower_end


def _fit_frame(chart: Scatter, points: Sequence[ChartPoint], sheet: Sheet, top: float) -> _Frame:
    bottom = top + 380.0
    y = fit_scale([point.y for point in points], bottom, top, True, chart.y.unit, 0.05)
    left = max(sheet.measure_text(text) for _, text in y.ticks(_MAX_TICKS)) + 10
    right = sheet.width - 1
    margin = None
    x_values: list[float] = []
    for point in points:
        if point.x is not None:
            x_values += [point.x, *x_ends(point)]
        else:
            # Make the margin wide enough for its title and a few columns of points.
            margin = Box(right - 130.0, top, right, bottom)
    if margin:
        right = margin.left - 10
    x = fit_scale(x_values, left, right, unit=chart.x.unit, margin_share=0.05)
    return _Frame(Box(left, top, right, bottom), margin, x, y)


def _draw_axes_of_scatter(sheet: Sheet, chart: Scatter, frame: _Frame) -> float:
    plot = frame.plot
    margin = frame.margin
    heights = [(frame.y.to_pixels(value), text) for value, text in frame.y.ticks(_MAX_TICKS)]
    for box in filter(None, (plot, margin)):
        sheet.add_lines("grid", [[(box.left, y), (box.right, y)] for y, _ in heights], layer=0)
    for y, text in heights:
        sheet.add_text(plot.left - 8, y, text, "tick", anchor="end")
    if margin:
        sheet.add_box("margin", margin.left, plot.top, margin.right - margin.left, plot.bottom - plot.top, layer=-1)
    sheet.add_lines("axis", [[(plot.left, plot.bottom), (plot.right, plot.bottom)]])
    return draw_axis_below(sheet, frame.x, chart.x.title, plot.top, plot.bottom)


def _find_positions(points: Sequence[ChartPoint], names: Sequence[str], frame: _Frame) -> list[Point]:
    """Returns the position of each point in pixels. In the margin, each series has its own column."""
    series_in_margin = {point.series for point in points if point.x is None}
    margin_columns = [name for name in names if name in series_in_margin]
    positions = []
    for point in points:
        if point.x is not None:
            x = frame.x.to_pixels(point.x)
        else:
            assert frame.margin is not None
            column_share = (margin_columns.index(point.series) + 1) / (len(margin_columns) + 1)
            x = frame.margin.left + column_share * (frame.margin.right - frame.margin.left)
        positions.append((x, frame.y.to_pixels(point.y)))
    return positions


def _point_hint(chart: Scatter, point: ChartPoint) -> str:
    x_text = chart.margin
    if point.x is not None:
        x_text = f"{chart.x.title} {show_number(point.x, chart.x.unit)}".strip()
    y_text = f"{chart.y.title} {show_number(point.y, chart.y.unit)}".strip()
    name = point.label if point.series in point.label else f"{point.series} {point.label}".strip()
    return make_hint(name, ", ".join(filter(None, (x_text, y_text))), point.hint)


def _label_points(
    sheet: Sheet,
    points: Sequence[ChartPoint],
    positions: Sequence[Point],
    whiskers: Sequence[Sequence[Point]],
    frame: _Frame,
) -> None:
    """Labels the first point of each series, then the second point of each series and so on, as long as there is
    room.
    """
    # Keep labels off all points and whiskers.
    occupied = [Box(x - 6, y - 6, x + 6, y + 6) for x, y in positions]
    for (left_x, left_y), (right_x, right_y) in whiskers:
        occupied.append(Box(left_x, min(left_y, right_y) - 2, right_x, max(left_y, right_y) + 2))
    points_by_series = Counter[str]()
    label_order = []
    for index, point in enumerate(points):
        label_order.append((points_by_series[point.series], index))
        points_by_series[point.series] += 1
    texts = [(*positions[index], points[index].label, "label") for _, index in sorted(label_order)]
    frames = [box for box in (frame.plot, frame.margin) if box]
    write_labels(sheet, texts, occupied, frames, boxes_around)
