"""Draws charts with two axes: line charts over places, such as runs or steps, and scatter charts. A scatter chart has
a margin for points without x.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from fp8bench.report.elements import ChartMark, ChartPoint, Lines, Scatter, Tone
from fp8bench.report.page.drawing.labels import (
    PixelRectangle,
    iterate_point_label_boxes,
    iterate_vertical_label_boxes,
    write_labels,
)
from fp8bench.report.page.drawing.rows import draw_bottom_axis, draw_legend, write_along_axis
from fp8bench.report.page.drawing.scale import (
    MAX_CHART_POINTS,
    MAX_HOVERABLE_MARKS,
    MAX_PLACES,
    MAX_SERIES,
    AxisScale,
    fit_axis_scale,
    interval_ends,
    is_drawable,
    make_hint,
    make_hover_text,
    show_number,
    x_bounds,
)
from fp8bench.report.page.drawing.sheet import ChartSheet, choose_series_styles

# The gap between the end of a line and its value, in pixels.
_LINE_END_VALUE_GAP = 8.0
# The x axis of a line chart has at most this many labels.
_MAX_POSITION_LABELS = 7
# If the x axis has more places than this, marks are visible only on hovering.
_MAX_VISIBLE_MARKS = 60

# The marks of a series, each with the index of its place on the x axis.
IndexedMarks = list[tuple[int, ChartMark]]
Series = Sequence[tuple[str, IndexedMarks]]
Point = tuple[float, float]


@dataclass(frozen=True)
class _LinePlot:
    """A line chart that is being drawn: its sheet, its series, the shape and CSS class of each series (`looks`), and
    the scales of both axes.
    """

    sheet: ChartSheet
    chart: Lines
    places: Sequence[str]
    series: Series
    looks: Mapping[str, tuple[str, str]]
    x: AxisScale
    y: AxisScale

    def is_on_value_axis(self, mark: ChartMark) -> bool:
        return self.y.low <= mark.value <= self.y.high

    def position(self, place: int, mark: ChartMark) -> Point:
        return self.x.to_pixels(place), self.y.to_pixels(mark.value)

    def make_horizontal_line(self, value: float) -> list[Point]:
        height = self.y.to_pixels(value)
        return [(self.x.start - 4, height), (self.x.end + 4, height)]


def draw_lines(sheet: ChartSheet, chart: Lines) -> float:
    # 1. Limit the chart to the last places and the first series.
    shown_places = chart.places[-MAX_PLACES:]
    drawn_series = [(name, _find_drawable_marks(marks[-MAX_PLACES:])) for name, marks in chart.series[:MAX_SERIES]]
    num_marks = sum(len(marks) - marks.count(None) for _, marks in chart.series)
    sheet.note_missing_values(num_marks - sum(len(marks) for _, marks in drawn_series))
    # 2. Fit the value axis to the marks from the index `chart.settled` on, or to all marks if none are there.
    # `chart.settled` counts all places, including those that were cut off.
    first_settled_index = chart.settled - len(chart.places[:-MAX_PLACES])
    values = _list_values_and_intervals(drawn_series, first_settled_index) or _list_values_and_intervals(
        drawn_series, 0
    )
    if not values:
        return 0.0
    # 3. Write the legend and the title, and draw the lines below. Each series has the same shape and colour in the
    # legend, on its line and at its last value.
    looks = choose_series_styles([name for name, _ in drawn_series])
    top = 0.0
    if len(drawn_series) > 1:
        top = draw_legend(sheet, [(shape, f"point {style}", name) for name, (shape, style) in looks.items()], top)
    sheet.add_text(0, top + 8, sheet.cut_to_width(chart.axis.title, sheet.width), "quiet")
    plot_bottom = top + 284.0
    y = fit_axis_scale(values, plot_bottom, top + 24, unit=chart.axis.unit, margin_share=0.05)
    line_plot = _LinePlot(
        sheet, chart, shown_places, drawn_series, looks, _place_axis_scale(sheet, drawn_series, y, len(shown_places)), y
    )
    _draw_axes_of_lines(line_plot)
    for value, level_name in chart.levels:
        if y.low <= value <= y.high:
            sheet.add_lines("level-line", [line_plot.make_horizontal_line(value)], layer=0)
            sheet.add_text(line_plot.x.start, y.to_pixels(value) - 8, level_name, "quiet")
    for name, marks in drawn_series:
        _draw_line(line_plot, name, marks)
    _write_event_names(line_plot)
    _write_last_values(line_plot)
    return plot_bottom + 26


def _find_drawable_marks(marks: Sequence[ChartMark | None]) -> IndexedMarks:
    return [(place, mark) for place, mark in enumerate(marks) if mark is not None and is_drawable(mark.value)]


def _list_values_and_intervals(series: Series, first_place: int) -> list[float]:
    values = []
    for _, marks in series:
        for place, mark in marks:
            if place >= first_place:
                values += [mark.value, *interval_ends(mark)]
    return values


def _write_event_names(plot: _LinePlot) -> None:
    """Writes the name of each mark's event next to the mark."""
    x, y = plot.x, plot.y
    texts = []
    for name, marks in plot.series:
        for place, mark in marks:
            if mark.flag and plot.is_on_value_axis(mark):
                position, style = plot.position(place, mark), f"flag {plot.looks[name][1]}"
                texts += [(*position, event_name, style) for event_name in mark.flag.split(", ")]
    # Keep the marks' labels away from the ticks on the left, and from the last values on the right.
    label_frame = PixelRectangle(x.start - 4, y.end - 4, x.end + 8, y.start)
    write_labels(plot.sheet, texts, [], [label_frame], iterate_vertical_label_boxes)


def _place_axis_scale(sheet: ChartSheet, series: Series, y: AxisScale, num_places: int) -> AxisScale:
    """Returns the scale of a line chart's x axis. Its values are the indices of places, such as runs. The scale leaves
    room for the ticks of the y axis on the left, and for the last values on the right.
    """
    tick_width = max(sheet.measure_text_width(text) for _, text in y.ticks(6)) + 14
    last_value_texts = [show_number(marks[-1][1].value, y.unit) for _, marks in series if marks]
    max_value_text_width = max(sheet.measure_text_width(text, bold=True) for text in last_value_texts)
    # A single place is in the middle of the axis.
    low = -0.5 if num_places == 1 else 0.0
    return AxisScale(
        low, max(0.5, num_places - 1.0), tick_width + 4, sheet.width - max_value_text_width - _LINE_END_VALUE_GAP - 4
    )


def _draw_axes_of_lines(plot: _LinePlot) -> None:
    sheet, places, y = plot.sheet, plot.places, plot.y
    for value, text in y.ticks(6):
        sheet.add_lines("grid", [plot.make_horizontal_line(value)], layer=0)
        sheet.add_text(plot.x.start - 12, y.to_pixels(value), text, "tick", anchor="end")
    sheet.add_lines("axis", [plot.make_horizontal_line(y.low)], layer=0)
    positions = [plot.x.to_pixels(place) for place in range(len(places))]
    sheet.add_lines("ticks", [[(x, y.start), (x, y.start + 4)] for x in positions])
    # Label every n-th place, counted from the last one, so that the last place has a label.
    max_place_label_width = (plot.x.end - plot.x.start) / _MAX_POSITION_LABELS
    stride = max(1, -(-(len(places) - 1) // (_MAX_POSITION_LABELS - 1)))
    labels = [(x, sheet.cut_to_width(place, max_place_label_width)) for x, place in zip(positions, places, strict=True)]
    write_along_axis(sheet, labels[(len(places) - 1) % stride :: stride], y.start + 14)


def _draw_line(plot: _LinePlot, name: str, marks: IndexedMarks) -> None:
    """Draws one series: first its intervals, then a line through each stretch of marks, then the marks. Hovering over
    a mark shows its value.
    """
    sheet = plot.sheet
    shape, style = plot.looks[name]
    line_segments: list[list[Point]] = []
    for marks_without_gap in _split_at_missing_marks(marks):
        _draw_intervals(plot, style, marks_without_gap)
        line_segments += _clip_line(
            [(plot.x.to_pixels(place), mark.value) for place, mark in marks_without_gap], plot.y
        )
    if line_segments:
        sheet.add_lines(f"line {style}", line_segments)
    plain_tone_mark_style = " faint" if len(plot.places) > _MAX_VISIBLE_MARKS else ""
    marks_on_axis = [(place, mark) for place, mark in marks if plot.is_on_value_axis(mark)]
    # Together, all series may have MAX_HOVERABLE_MARKS marks.
    for place, mark in _thin_out_marks(marks_on_axis, MAX_HOVERABLE_MARKS // min(MAX_SERIES, len(plot.chart.series))):
        tone = plain_tone_mark_style if mark.tone is Tone.PLAIN else f" {mark.tone.value}"
        hint = make_hover_text(mark, plot.chart.axis, name, plot.places[place])
        sheet.add_dot(f"mark point {style}{tone}", shape, *plot.position(place, mark), hint=hint)


def _split_at_missing_marks(marks: IndexedMarks) -> list[IndexedMarks]:
    """Splits a series wherever a place has no mark."""
    mark_stretches: list[IndexedMarks] = []
    for place, mark in marks:
        if not mark_stretches or mark_stretches[-1][-1][0] != place - 1:
            mark_stretches.append([])
        mark_stretches[-1].append((place, mark))
    return mark_stretches


def _draw_intervals(plot: _LinePlot, style: str, stretch: IndexedMarks) -> None:
    """Draws the intervals of consecutive marks: a band if all marks have intervals, otherwise a whisker for each mark
    that has an interval.
    """
    whiskers = []
    for place, mark in stretch:
        if interval := interval_ends(mark):
            # Pixels count downwards, so the lower end has the larger number.
            whiskers.append([(plot.x.to_pixels(place), plot.y.to_pixels(end)) for end in interval])
    if 1 < len(stretch) == len(whiskers):
        lower_ends, upper_ends = zip(*whiskers, strict=True)
        plot.sheet.add_lines(f"haze {style}", [[*upper_ends, *lower_ends[::-1]]], closed=True)
    elif whiskers:
        plot.sheet.add_lines("whisker", whiskers)


def _clip_line(points: Sequence[Point], y: AxisScale) -> list[list[Point]]:
    """Cuts a line at the ends of the value axis. Returns the pieces of it that lie within the axis."""
    line_segments: list[list[Point]] = []
    for (left_x, left_y), (right_x, right_y) in pairwise(points):
        # The part of the line inside the range of the y axis: its start and end as fractions of the line's length.
        # A horizontal piece is on the axis as a whole or not at all.
        entry_fraction, exit_fraction = 0.0, float(y.low <= left_y <= y.high)
        if left_y != right_y:
            entry_fraction, exit_fraction = sorted((end - left_y) / (right_y - left_y) for end in (y.low, y.high))
        entry_fraction, exit_fraction = max(entry_fraction, 0.0), min(exit_fraction, 1.0)
        if entry_fraction >= exit_fraction:
            continue
        start_point, stop_point = (
            (left_x + (right_x - left_x) * fraction, y.to_pixels(left_y + (right_y - left_y) * fraction))
            for fraction in (entry_fraction, exit_fraction)
        )
        if line_segments and entry_fraction == 0 and line_segments[-1][-1] == start_point:
            line_segments[-1].append(stop_point)
        else:
            line_segments.append([start_point, stop_point])
    return line_segments


def _thin_out_marks(marks: IndexedMarks, max_marks: int) -> IndexedMarks:
    """Returns at most `max_marks` evenly spaced marks, plus every mark with a tone such as good or bad."""
    if len(marks) <= max_marks:
        return marks
    shown_mark_indices = {round(index * (len(marks) - 1) / (max_marks - 1)) for index in range(max_marks)}
    return [mark for index, mark in enumerate(marks) if index in shown_mark_indices or mark[1].tone is not Tone.PLAIN]


def _write_last_values(plot: _LinePlot) -> None:
    """Writes the last value of each series to the right of the lines. Values that would overlap are written one below
    another.
    """
    last_series_marks = [(*marks[-1], plot.looks[name][1]) for name, marks in plot.series if marks]
    x = plot.x.to_pixels(max(place for place, _, _ in last_series_marks)) + _LINE_END_VALUE_GAP + 2
    # Sort by height, then by CSS class, so that the drawing is reproducible.
    texts = sorted(
        (plot.y.to_pixels(mark.value), style, show_number(mark.value, plot.y.unit))
        for _, mark, style in last_series_marks
    )
    height = -math.inf
    for index, (own_height, style, text) in enumerate(texts):
        # Move a text down if it would overlap the one above it. Keep it above the axis, because the labels of places
        # are below the axis.
        height = max(own_height, height + plot.sheet.font_size)
        max_height = plot.y.start - (len(texts) - 1 - index) * plot.sheet.font_size
        plot.sheet.add_text(x, min(height, max_height), text, f"last {style}")


# Points of a scatter chart have no line between them, so they are larger than marks on a line.
_SCATTER_DOT_SIZE = 9.5
_MAX_AXIS_TICKS = 7
# The legend names at most this many series. With more, it would be longer than the chart.
_MAX_LEGEND_SERIES = 16


@dataclass(frozen=True)
class _PlotFrame:
    """The box of the plot with the scales of both axes. If some points have no x, it also has the box of the margin."""

    plot: PixelRectangle
    margin: PixelRectangle | None
    x: AxisScale
    y: AxisScale


def draw_scatter(sheet: ChartSheet, chart: Scatter) -> float:
    # 1. Choose the points that both axes can show, evenly thinned out if there are too many.
    drawable_points = [
        point for point in chart.points if is_drawable(point.y, log=True) and (point.x is None or is_drawable(point.x))
    ]
    points = drawable_points[:: max(1, -(-len(drawable_points) // MAX_CHART_POINTS))]
    sheet.note_missing_values(len(chart.points) - len(points))
    # If all points were in the margin, the x axis would be empty.
    if all(point.x is None for point in points):
        return 0.0
    # 2. Write the legend, and the titles of the y axis and the margin.
    names = list(dict.fromkeys(point.series for point in points))
    looks = {name: (shape, f"point {style}") for name, (shape, style) in choose_series_styles(names).items()}
    entries = [(*looks[name], name) for name in names[:_MAX_LEGEND_SERIES] if len(names) > 1 or name]
    top = draw_legend(sheet, entries, 0.0)
    chart_margin_title = chart.margin if any(point.x is None for point in points) else ""
    chart_margin_title = sheet.cut_to_width(chart_margin_title, 0.45 * sheet.width)
    title = sheet.cut_to_width(chart.y.title, sheet.width - sheet.measure_text_width(chart_margin_title) - 12)
    sheet.add_text(0, top + 8, title, "quiet")
    sheet.add_text(sheet.width, top + 8, chart_margin_title, "quiet", anchor="end")
    # 3. Draw the axes, then whiskers, marks and labels, so that later layers cover earlier ones.
    scatter_frame = _fit_scatter_frame(chart, points, sheet, top + 24)
    plot_bottom = _draw_axes_of_scatter(sheet, chart, scatter_frame)
    points_with_positions = list(zip(points, _find_point_positions(points, names, scatter_frame), strict=True))
    whiskers = []
    for point, (_, y) in points_with_positions:
        if interval := x_bounds(point):
            whiskers.append([(scatter_frame.x.to_pixels(bound), y) for bound in interval])
    if whiskers:
        sheet.add_lines("whisker", whiskers)
    for point, position in points_with_positions:
        shape, style = looks[point.series]
        tone = f" {point.tone.value}" if point.tone is not Tone.PLAIN else ""
        sheet.add_dot(f"mark {style}{tone}", shape, *position, _SCATTER_DOT_SIZE, _point_hint(chart, point))
    _write_point_labels(sheet, points_with_positions, whiskers, scatter_frame)
    return plot_bottom


def _fit_scatter_frame(chart: Scatter, points: Sequence[ChartPoint], sheet: ChartSheet, top: float) -> _PlotFrame:
    plot_bottom = top + 380.0
    y = fit_axis_scale([point.y for point in points], plot_bottom, top, True, chart.y.unit, 0.05)
    plot_left = max(sheet.measure_text_width(text) for _, text in y.ticks(_MAX_AXIS_TICKS)) + 10
    plot_right = sheet.width - 1
    margin = None
    x_values_and_bounds: list[float] = []
    for point in points:
        if point.x is not None:
            x_values_and_bounds += [point.x, *x_bounds(point)]
        else:
            # Make the margin wide enough for its title and a few columns of points.
            margin = PixelRectangle(plot_right - 130.0, top, plot_right, plot_bottom)
    if margin:
        plot_right = margin.left - 10
    x = fit_axis_scale(x_values_and_bounds, plot_left, plot_right, unit=chart.x.unit, margin_share=0.05)
    return _PlotFrame(PixelRectangle(plot_left, top, plot_right, plot_bottom), margin, x, y)


def _draw_axes_of_scatter(sheet: ChartSheet, chart: Scatter, frame: _PlotFrame) -> float:
    plot = frame.plot
    margin = frame.margin
    tick_positions = [(frame.y.to_pixels(value), text) for value, text in frame.y.ticks(_MAX_AXIS_TICKS)]
    for box in filter(None, (plot, margin)):
        sheet.add_lines("grid", [[(box.left, y), (box.right, y)] for y, _ in tick_positions], layer=0)
    for y, text in tick_positions:
        sheet.add_text(plot.left - 8, y, text, "tick", anchor="end")
    if margin:
        # Layer -1 is behind the grid.
        sheet.add_box("margin", margin.left, plot.top, margin.right - margin.left, plot.bottom - plot.top, layer=-1)
    sheet.add_lines("axis", [[(plot.left, plot.bottom), (plot.right, plot.bottom)]])
    return draw_bottom_axis(sheet, frame.x, chart.x.title, plot.top, plot.bottom)


def _find_point_positions(points: Sequence[ChartPoint], names: Sequence[str], frame: _PlotFrame) -> list[Point]:
    """Returns the position of each point in pixels. In the margin, each series has its own column."""
    series_in_margin = {point.series for point in points if point.x is None}
    margin_series_names = [name for name in names if name in series_in_margin]
    point_positions = []
    for point in points:
        if point.x is not None:
            x = frame.x.to_pixels(point.x)
        else:
            assert frame.margin is not None
            column_position = (margin_series_names.index(point.series) + 1) / (len(margin_series_names) + 1)
            x = frame.margin.left + column_position * (frame.margin.right - frame.margin.left)
        point_positions.append((x, frame.y.to_pixels(point.y)))
    return point_positions


def _point_hint(chart: Scatter, point: ChartPoint) -> str:
    x_label = chart.margin
    if point.x is not None:
        x_label = f"{chart.x.title} {show_number(point.x, chart.x.unit)}".strip()
    y_value_text = f"{chart.y.title} {show_number(point.y, chart.y.unit)}".strip()
    name = point.label if point.series in point.label else f"{point.series} {point.label}".strip()
    return make_hint(name, ", ".join(filter(None, (x_label, y_value_text))), point.hint)


def _write_point_labels(
    sheet: ChartSheet,
    placed_points: Sequence[tuple[ChartPoint, Point]],
    whiskers: Sequence[Sequence[Point]],
    frame: _PlotFrame,
) -> None:
    """Labels the first point of each series, then the second point of each series and so on, as long as there is
    room.
    """
    # Keep labels off all points and whiskers.
    occupied_label_boxes = [PixelRectangle(x - 6, y - 6, x + 6, y + 6) for _, (x, y) in placed_points]
    occupied_label_boxes += [PixelRectangle(left_x, y - 2, right_x, y + 2) for (left_x, y), (right_x, _) in whiskers]
    num_points_by_series = Counter[str]()
    texts = []
    for point, position in placed_points:
        texts.append((num_points_by_series[point.series], (*position, point.label, "label")))
        num_points_by_series[point.series] += 1
    texts.sort(key=itemgetter(0))
    allowed_label_boxes = [box for box in (frame.plot, frame.margin) if box]
    write_labels(
        sheet, [text for _, text in texts], occupied_label_boxes, allowed_label_boxes, iterate_point_label_boxes
    )
