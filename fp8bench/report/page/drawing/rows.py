"""Draws charts whose rows share an axis and have labels on their left: bars, and stacked parts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, count
from typing import NamedTuple

from fp8bench import units
from fp8bench.report.elements import Bars, ChartMark, Stacks
from fp8bench.report.page.drawing.scale import (
    MAX_BARS,
    MAX_ROWS,
    MAX_SERIES,
    AxisScale,
    fit_axis_scale,
    interval_ends,
    is_drawable,
    make_hint,
    make_hover_text,
    show_axis_value,
    show_number,
)
from fp8bench.report.page.drawing.sheet import ChartSheet

_MAX_LABEL_SHARE = 0.4
_LABEL_SHAPE_GAP = 14.0
# The gap between a shape and the value next to it, in pixels.
_SHAPE_TO_VALUE_GAP = 8.0
# The smallest gap between texts along an axis, in pixels.
_MIN_AXIS_TEXT_GAP = 10.0


class RowPositions(NamedTuple):
    """The vertical positions of a chart's rows in pixels: the upper end of each row, the height of every row, and the
    lower end of the last row (`bottom`). `left` is where the shapes of a row begin.
    """

    row_top_positions: list[float]
    height: float
    left: float
    bottom: float


def arrange_chart_rows(
    sheet: ChartSheet, groups: Sequence[tuple[str, Sequence[str]]], height: float, top: float = 0.0
) -> RowPositions:
    """Writes the headings and labels of rows, and returns the positions of the rows. Each row has the given height."""
    has_group_headings = any(heading for heading, _ in groups)
    # Cut longer labels, because they would leave no room for bars.
    max_label_width = _MAX_LABEL_SHARE * sheet.width
    row_labels = chain.from_iterable(labels for _, labels in groups)
    texts = [sheet.cut_to_width(label, max_label_width) for label in row_labels]
    label_width = max(map(sheet.measure_text_width, texts), default=0.0)
    left_edge_of_shapes = label_width + _LABEL_SHAPE_GAP
    row_top_positions: list[float] = []
    y = top
    for index, (heading, group) in enumerate(groups):
        if has_group_headings:
            y += 10.0 if index else 0.0
            sheet.add_text(0, y + 10, sheet.cut_to_width(heading, sheet.width, bold=True), "heading")
            y += 26.0
        for _ in group:
            sheet.add_text(
                left_edge_of_shapes - _LABEL_SHAPE_GAP,
                y + height / 2,
                texts[len(row_top_positions)],
                "label",
                anchor="end",
            )
            row_top_positions.append(y)
            y += height
    return RowPositions(row_top_positions, height, left_edge_of_shapes, y)


def draw_bottom_axis(sheet: ChartSheet, scale: AxisScale, title: str, top: float, bottom: float) -> float:
    """Draws the grid behind a plot, and the ticks and title of its axis below it. Returns the lower end in pixels."""
    tick_texts = [(scale.to_pixels(value), text) for value, text in scale.ticks(7)]
    if tick_texts:
        sheet.add_lines("grid", [[(x, top), (x, bottom)] for x, _ in tick_texts], layer=0)
    write_along_axis(sheet, tick_texts, bottom + 13)
    text = sheet.cut_to_width(title, scale.end - scale.start)
    sheet.add_text((scale.start + scale.end) / 2, bottom + 34, text, "quiet", anchor="middle")
    return bottom + 46


def write_along_axis(sheet: ChartSheet, texts: Sequence[tuple[float, str]], y: float) -> None:
    """Writes texts along an axis, and skips a text that would overlap the previous one."""
    previous_text_end_x = -math.inf
    for x, text in sorted(texts):
        half_width = sheet.measure_text_width(text) / 2
        if x - half_width >= previous_text_end_x + _MIN_AXIS_TEXT_GAP:
            # Keep the first and the last text within the sheet.
            sheet.add_text(min(max(x, half_width), sheet.width - half_width), y, text, "tick", anchor="middle")
            previous_text_end_x = x + half_width


def draw_legend(sheet: ChartSheet, entries: Sequence[tuple[str, str, str]], y: float) -> float:
    """Draws entries of (shape or 'box', CSS class, text) in as many lines as needed. Returns the lower end."""
    x = 0.0
    max_legend_text_width = sheet.width / 3
    for shape, style, label in entries:
        text = sheet.cut_to_width(label, max_legend_text_width)
        legend_entry_width = 18 + sheet.measure_text_width(text)
        if x and x + legend_entry_width > sheet.width:
            x = 0.0
            y = y + 20
        if shape == "box":
            sheet.add_box(style, x + 1, y + 3, 11, 11)
        else:
            sheet.add_dot(style, shape, x + 6.5, y + 8.5)
        sheet.add_text(x + 18, y + 8.5, text)
        x += legend_entry_width + 18
    return y + 30 if entries else y


_BAR_HEIGHT = 14.0
# The height of the stroke that shows a single sample below a bar.
_SAMPLE_STROKE_HEIGHT = 10.0
_WHISKER_CAP_HEIGHT = 3.5
# The least width of a bar, so that a bar whose value is 1 is visible.
_MIN_BAR_WIDTH = 2.0


def draw_bars(sheet: ChartSheet, chart: Bars) -> float:
    # 1. Choose the bars to draw, by group.
    chart_marks: list[ChartMark] = []
    labels = []
    num_undrawn_marks = 0
    for heading, marks_of_group in chart.groups:
        drawable_marks = [mark for mark in marks_of_group if is_drawable(mark.value, log=True)]
        drawn_marks = drawable_marks[: MAX_BARS - len(chart_marks)]
        num_undrawn_marks += len(marks_of_group) - len(drawn_marks)
        if drawn_marks:
            labels.append((heading, [mark.label for mark in drawn_marks]))
            chart_marks += drawn_marks
    sheet.note_missing_values(num_undrawn_marks)
    if not chart_marks:
        return 0.0
    # 2. Draw each bar in its row, and the line at 1x, where all bars begin.
    sample_stroke_height = _SAMPLE_STROKE_HEIGHT * any(mark.samples for mark in chart_marks)
    rows = arrange_chart_rows(sheet, labels, sample_stroke_height + 28.0)
    scale = _make_bar_axis_scale(chart, chart_marks, sheet, rows.left)
    axis_lower_end = draw_bottom_axis(sheet, scale, chart.axis.title, 0.0, rows.bottom + 4)
    x = scale.to_pixels(1.0)
    for mark, top in zip(chart_marks, rows.row_top_positions, strict=True):
        _draw_bar(sheet, chart, mark, top, rows.height, scale)
    sheet.add_lines("axis", [[(x, top), (x, top + rows.height)] for top in rows.row_top_positions])
    return axis_lower_end


def _make_bar_axis_scale(chart: Bars, marks: list[ChartMark], sheet: ChartSheet, left: float) -> AxisScale:
    """Returns a logarithmic scale of ratios, on which 2x and 0.5x are equally far from 1x."""
    values = [1.0]
    left_value_room = right_value_room = 0.0  # room for the values that are written next to bars
    for mark in marks:
        values += [mark.value, *interval_ends(mark, log=True), *_drawable_samples(mark)]
        value_width = sheet.measure_text_width(show_axis_value(mark.value, chart.axis)) + _SHAPE_TO_VALUE_GAP
        if mark.value < 1:
            left_value_room = max(left_value_room, value_width + 2)
        else:
            right_value_room = max(right_value_room, value_width + 2)
    return fit_axis_scale(
        values, left + left_value_room + 2, sheet.width - right_value_room - 2, log=True, unit=chart.axis.unit
    )


def _drawable_samples(mark: ChartMark) -> list[float]:
    return [value for value in mark.samples if is_drawable(value, log=True)]


def _draw_bar(sheet: ChartSheet, chart: Bars, mark: ChartMark, top: float, height: float, scale: AxisScale) -> None:
    tone_class = mark.tone.value
    sheet.add_box("mark band", 0, top, sheet.width, height, layer=1, hint=make_hover_text(mark, chart.axis))
    y = top + height / 2
    sample_x_positions = [scale.to_pixels(value) for value in _drawable_samples(mark)]
    if sample_x_positions:
        # Centre the bar and its strokes together in the row.
        y -= _SAMPLE_STROKE_HEIGHT / 2
        sample_stroke_top = y + _BAR_HEIGHT / 2 + 2
        sheet.add_lines(
            f"samples {tone_class}",
            [[(x, sample_stroke_top), (x, sample_stroke_top + _SAMPLE_STROKE_HEIGHT)] for x in sample_x_positions],
        )
    bar_start_x = scale.to_pixels(1.0)
    bar_end_x = scale.to_pixels(mark.value)
    is_slower_than_reference = mark.value < 1
    # The bar of a case that is exactly as fast as the reference must also be visible.
    bar_width = max(_MIN_BAR_WIDTH, abs(bar_end_x - bar_start_x))
    sheet.add_box(
        f"bar {tone_class}",
        bar_start_x - bar_width if is_slower_than_reference else bar_start_x,
        y - _BAR_HEIGHT / 2,
        bar_width,
        _BAR_HEIGHT,
    )
    bar_and_whisker_x = [bar_start_x, bar_end_x, *(scale.to_pixels(value) for value in interval_ends(mark, log=True))]
    # Without an interval, the list has only the two ends of the bar.
    if len(bar_and_whisker_x) == 4:
        low, high = bar_and_whisker_x[2:]
        whisker_end_lines = [[(x, y - _WHISKER_CAP_HEIGHT), (x, y + _WHISKER_CAP_HEIGHT)] for x in (low, high)]
        sheet.add_lines("whisker", [[(low, y), (high, y)], *whisker_end_lines])
    x = (
        min(bar_and_whisker_x) - _SHAPE_TO_VALUE_GAP
        if is_slower_than_reference
        else max(bar_and_whisker_x) + _SHAPE_TO_VALUE_GAP
    )
    sheet.add_text(
        x,
        y,
        show_axis_value(mark.value, chart.axis),
        f"value {tone_class}",
        anchor="end" if is_slower_than_reference else "start",
    )


_STACK_HEIGHT = 18.0
# A part of a bar with a smaller share than this is drawn without text.
_MIN_SHARE_WITH_TEXT = 0.03
# Parts with these names hold the rest of a bar's total, and are drawn in grey.
_REMAINDER_PART_NAMES = ("other", "the rest")


class _StackedRow(NamedTuple):
    """A row of stacked parts: the index and value of each part in sequence, and the sum of the values."""

    label: str
    pieces: Sequence[tuple[int, float]]
    total: float


# Each of these phases has its own colour. Phases of matrix products come first, because most charts only have those.
_PHASES_WITH_COLOR = (
    "matmul",
    "cast",
    "attention",
    "optimizer",
    "elementwise",
    "accumulation",
    "data",
    "communication",
)


def draw_stacks(sheet: ChartSheet, chart: Stacks) -> float:
    # 1. Choose the rows that have a value to draw.
    rows = []
    for index, (label, values) in enumerate(chart.rows):
        pieces = chart.pieces[index] if chart.pieces else enumerate(values)
        drawn_bar_pieces = [(part, value) for part, value in pieces if is_drawable(value, log=True)]
        if drawn_bar_pieces:
            rows.append(_StackedRow(label, drawn_bar_pieces, sum(value for _, value in drawn_bar_pieces)))
    rows = rows[:MAX_ROWS]
    sheet.note_missing_values(len(chart.rows) - len(rows))
    if not rows:
        return 0.0
    # 2. Write the legend and the labels of rows.
    part_css_classes = _part_css_classes(chart)
    unit = chart.axis.unit
    entries = [("box", part_css_classes[part], chart.parts[part]) for part in chart.nonzero_part_indices]
    top = draw_legend(sheet, entries, 0.0)
    row_positions = arrange_chart_rows(sheet, [("", [row.label for row in rows])], 30.0, top)
    # 3. Draw each row, and write the sum of its parts next to it. Timelines and rows of shares get no sum.
    row_total_texts = ["" if chart.pieces or unit == "%" else show_number(row.total, unit) for row in rows]
    row_totals_width = max(map(sheet.measure_text_width, row_total_texts)) + _SHAPE_TO_VALUE_GAP
    scale = AxisScale(
        0.0, max(row.total for row in rows), row_positions.left, sheet.width - row_totals_width, unit=unit
    )
    for row, row_top, text in zip(rows, row_positions.row_top_positions, row_total_texts, strict=True):
        middle_y = row_top + row_positions.height / 2
        _draw_stacked_bar(sheet, chart, part_css_classes, row, middle_y, scale)
        sheet.add_text(scale.to_pixels(row.total) + _SHAPE_TO_VALUE_GAP, middle_y, text, "value")
    return draw_bottom_axis(sheet, scale, chart.axis.title, top, row_positions.bottom + 4)


def _part_css_classes(chart: Stacks) -> list[str]:
    """Returns the CSS class of each part of the chart's bars. The class determines the colour of the part.

    The first word of a part may be the name of a phase. A phase has the same colour in all charts. Other parts get
    the remaining colours in order.
    """
    phases = [part.partition(" ")[0] for part in chart.parts]
    unused_colors = (
        color_number
        for color_number in count()
        if color_number >= len(_PHASES_WITH_COLOR) or _PHASES_WITH_COLOR[color_number] not in phases
    )

    def part_class(part: str, phase: str) -> str:
        if part in _REMAINDER_PART_NAMES:
            return "rest"
        color_number = _PHASES_WITH_COLOR.index(phase) if phase in _PHASES_WITH_COLOR else next(unused_colors)
        return f"part s{color_number % MAX_SERIES + 1}"

    return list(map(part_class, chart.parts, phases))


def _draw_stacked_bar(
    sheet: ChartSheet, chart: Stacks, styles: Sequence[str], row: _StackedRow, middle: float, scale: AxisScale
) -> None:
    """Draws one bar. Each of its parts, such as a phase, is one shape. In a timeline, a part that occurs several times
    has several rectangles.
    """
    cumulative_value = 0.0
    piece_edges_by_part: dict[int, list[tuple[float, float]]] = {}
    value_sum_by_part = defaultdict[int, float](float)
    for part, value in row.pieces:
        piece_edges_by_part.setdefault(part, []).append(
            (scale.to_pixels(cumulative_value), scale.to_pixels(cumulative_value + value))
        )
        value_sum_by_part[part] += value
        cumulative_value += value
    bar_top = middle - _STACK_HEIGHT / 2
    unit = chart.axis.unit
    bar_bottom = bar_top + _STACK_HEIGHT
    for part, piece_edges in piece_edges_by_part.items():
        name = chart.parts[part]
        part_share = value_sum_by_part[part] / cumulative_value
        value_text = show_number(value_sum_by_part[part], unit)
        value_text += "" if unit == "%" else f" ({units.percent(part_share)})"
        value_text += f" in {len(piece_edges)} pieces" if len(piece_edges) > 1 else ""
        # Draw all pieces of a part of the bar as one shape with one hint, so that the tab key stops there only once.
        piece_outlines = [[(x, bar_top), (end, bar_top), (end, bar_bottom), (x, bar_bottom)] for x, end in piece_edges]
        part_style = f"mark {styles[part]}" + " piece" * bool(chart.pieces)
        sheet.add_lines(part_style, piece_outlines, hint=make_hint(f"{row.label}, {name}", value_text), closed=True)
        # A part of a timeline may have several pieces, so no single piece gets the text of its share.
        if chart.pieces:
            continue
        x, end = piece_edges[0]
        text = units.percent(part_share, 0)
        does_text_fit_in_part = (
            part_share >= _MIN_SHARE_WITH_TEXT and sheet.measure_text_width(text, bold=True) + 6 <= end - x
        )
        if name not in _REMAINDER_PART_NAMES and does_text_fit_in_part:
            sheet.add_text((x + end) / 2, middle, text, "inside", anchor="middle")
