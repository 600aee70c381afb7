"""Charts of rows that share an axis, with labels to their left: bars and stacks of parts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from fp8bench import units
from fp8bench.report.elements import Bars, ChartAxis, Mark, Stacks
from fp8bench.report.page.drawing.scale import (
    BARS,
    ROWS,
    SERIES,
    Scale,
    cut_to_room,
    drawable,
    ends,
    fit_scale,
    make_hint,
    mark_hint,
    numbers_of,
    part_drawable,
    placeless,
    show_number,
    write_value,
)
from fp8bench.report.page.drawing.sheet import Sheet

_LABELS_SHARE = 0.4
_LABEL_GAP = 14.0
# Between a shape and its value.
_GAP = 8.0
# Between texts along an axis.
_APART_TEXTS = 10.0


@dataclass(frozen=True)
class Row:
    """The position of a row: the middle of its shapes, and its band."""

    y: float
    top: float
    height: float


@dataclass(frozen=True)
class Rows:
    """Rows from the top down; their shapes begin at `left` and end at the sheet's right side."""

    rows: tuple[Row, ...]
    left: float
    top: float
    bottom: float


def arrange_rows(sheet: Sheet, groups: Sequence[tuple[str, Sequence[str]]], height: float, top: float = 0.0) -> Rows:
    """Writes headings and labels, and returns where the rows are, each of that `height`."""
    headed = any(heading for heading, _ in groups)
    # Longer labels would leave no room for the bars.
    room = _LABELS_SHARE * sheet.width
    texts: list[str] = []
    for _, labels in groups:
        texts += [cut_to_room(label, room, sheet.size) for label in labels]
    widest = max(map(sheet.measure, texts), default=0.0)
    left = widest + _LABEL_GAP
    rows: list[Row] = []
    y = top
    for number, (heading, group) in enumerate(groups):
        if headed:
            y += 10.0 if number else 0.0
            sheet.text(0, y + 10, cut_to_room(heading, sheet.width, sheet.size, bold=True), "heading")
            y += 26.0
        for _ in group:
            sheet.text(left - _LABEL_GAP, y + height / 2, texts[len(rows)], "label", anchor="end")
            rows.append(Row(y + height / 2, y, height))
            y += height
    return Rows(tuple(rows), left, top, y)


def foot(sheet: Sheet, scale: Scale, axis: ChartAxis, rows: Rows) -> float:
    """Draws the axis under the rows, and its lines behind them; returns its lower end."""
    places = [(scale.at(value), text) for value, text in scale.ticks(7)]
    bottom = rows.bottom + 4
    if places:
        sheet.lines("grid", [[(x, rows.top), (x, bottom)] for x, _ in places], layer=0)
    along(sheet, places, bottom + 12)
    title = cut_to_room(axis.title, sheet.width - rows.left, sheet.size)
    sheet.text((rows.left + sheet.width) / 2, bottom + 32, title, "quiet", anchor="middle")
    return bottom + 42


def along(sheet: Sheet, places: Sequence[tuple[float, str]], y: float) -> None:
    """Writes texts along an axis, skipping those that would overlap the previous one."""
    end = -math.inf
    for x, text in sorted(places):
        half = sheet.measure(text) / 2
        if x - half >= end + _APART_TEXTS:
            sheet.text(min(max(x, half), sheet.width - half), y, text, "tick", anchor="middle")
            end = x + half


def legend(sheet: Sheet, entries: Sequence[tuple[str, str, str]], y: float) -> float:
    """Draws (shape or 'box' or 'hatch', class, text) side by side, in as many lines as needed; returns the lower
    end."""
    x = 0.0
    most = sheet.width / 3
    for shape, style, label in entries:
        text = cut_to_room(label, most, sheet.size)
        wide = 18 + sheet.measure(text)
        # The next line of the legend.
        if x and x + wide > sheet.width:
            x = 0.0
            y = y + 20
        if shape in ("box", "hatch"):
            sheet.box(style, x + 1, y + 3, 11, 11)
            if shape == "hatch":
                sheet.hatch(x + 1, y + 3, 11, 11)
        else:
            sheet.dot(style, shape, x + 6.5, y + 8.5)
        sheet.text(x + 18, y + 8.5, text)
        x += wide + 18
    if entries:
        return y + 30
    return y


_THICK = 14.0
# The height of a stroke for a single value below a bar.
_STROKES = 10.0
_CAP = 3.5
# The width of a bar that ends where it starts.
_THINNEST = 2.0


def draw_bars(sheet: Sheet, chart: Bars) -> float:
    # 1. Choose the bars, and name them by group.
    marks: list[Mark] = []
    labels = []
    num_placed = 0
    numbers = []
    for heading, marks_of_group in chart.groups:
        numbers += numbers_of(marks_of_group)
        placed = [mark for mark in marks_of_group if drawable(mark.value, log=True)]
        num_placed += len(placed)
        drawn = placed[: BARS - len(marks)]
        if drawn:
            labels.append((heading, [mark.label for mark in drawn]))
            marks += drawn
    sheet.omit(placeless(numbers, log=True), num_placed - BARS)
    if not marks:
        return 0.0
    # 2. Draw each in its row, and the line from which all begin.
    strokes = _STROKES * any(mark.samples for mark in marks)
    rows = arrange_rows(sheet, labels, strokes + 28.0)
    scale = _scale(chart, marks, sheet, rows.left)
    end = foot(sheet, scale, chart.axis, rows)
    for mark, row in zip(marks, rows.rows, strict=True):
        _bar(sheet, chart, mark, row, scale)
    x = scale.at(1.0)
    sheet.lines("axis", [[(x, top), (x, bottom)] for top, bottom in _start_lines(rows)])
    return end


def _scale(chart: Bars, marks: list[Mark], sheet: Sheet, left: float) -> Scale:
    """Returns a logarithmic scale for ratios, so that 2x and 0.5x are equally far from 1x."""
    values = [1.0]
    room_below = room_above = 0.0  # for the values left and right of bars
    for mark in marks:
        values += [mark.value, *ends(mark, log=True), *_samples(mark)]
        room = sheet.measure(write_value(mark.value, chart.axis)) + _GAP
        if mark.value < 1:
            room_below = max(room_below, room + 2)
        else:
            room_above = max(room_above, room + 2)
    return fit_scale(values, left + room_below + 2, sheet.width - room_above - 2, log=True, unit=chart.axis.unit)


def _start_lines(rows: Rows) -> list[tuple[float, float]]:
    """Returns where rows begin and end; rows without a heading between them share a line."""
    spans: list[tuple[float, float]] = []
    for row in rows.rows:
        top = row.top
        bottom = row.top + row.height
        if spans and spans[-1][1] == top:
            top, _ = spans.pop()
        spans.append((top, bottom))
    return spans


def _samples(mark: Mark) -> list[float]:
    return [value for value in mark.samples if drawable(value, log=True)]


def _bar(sheet: Sheet, chart: Bars, mark: Mark, row: Row, scale: Scale) -> None:
    style = mark.tone.value
    sheet.box("mark band", 0, row.top, sheet.width, row.height, layer=1, hint=mark_hint(mark, chart.axis))
    places = [scale.at(value) for value in _samples(mark)]
    if places:
        # Centre bar and strokes together in the row.
        row = replace(row, y=row.y - _STROKES / 2)
        top = row.y + _THICK / 2 + 2
        sheet.lines(f"samples {style}", [[(x, top), (x, top + _STROKES)] for x in places])
    origin = scale.at(1.0)
    end = scale.at(mark.value)
    is_below = mark.value < 1
    # Even a case that is exactly as fast as the reference must be visible.
    thick = max(_THINNEST, abs(end - origin))
    sheet.box(f"bar {style}", origin - thick if is_below else origin, row.y - _THICK / 2, thick, _THICK)
    reach = [origin, end, *(scale.at(value) for value in ends(mark, log=True))]
    if len(reach) == 4:
        low, high = reach[2:]
        caps = [[(x, row.y - _CAP), (x, row.y + _CAP)] for x in (low, high)]
        sheet.lines("whisker", [[(low, row.y), (high, row.y)], *caps])
    x = min(reach) - _GAP if is_below else max(reach) + _GAP
    sheet.text(x, row.y, write_value(mark.value, chart.axis), f"value {style}", anchor="end" if is_below else "start")


_STACKED = 18.0
# Smaller shares have no text.
_LEAST_SHARE = 0.03
# Remainders are hatched.
_RESTS = ("other", "the rest")


class _Stack(NamedTuple):
    """A row of parts: their numbers and values in sequence, and their sum."""

    label: str
    pieces: Sequence[tuple[int, float]]
    total: float


# Phases of products first: most charts have no others.
_PHASES = {
    word: place
    for place, word in enumerate(
        ("matmul", "cast", "attention", "optimizer", "elementwise", "accumulation", "data", "communication")
    )
}


def draw_stacks(sheet: Sheet, chart: Stacks) -> float:
    # 1. Choose the rows that have something to draw.
    numbers: list[float] = []
    rows = []
    for number, (label, values) in enumerate(chart.rows):
        numbers += filter(None, values)
        pieces = chart.pieces[number] if chart.pieces else enumerate(values)
        drawn = [(part, value) for part, value in pieces if part_drawable(value)]
        if drawn:
            rows.append(_Stack(label, drawn, sum(value for _, value in drawn)))
    sheet.omit(placeless(numbers, log=True), len(rows) - ROWS)
    rows = rows[:ROWS]
    if not rows:
        return 0.0
    # 2. Write the legend and the labels.
    styles = _styles(chart)
    unit = chart.axis.unit
    entries = []
    for part in chart.present:
        name = chart.parts[part]
        entries.append(("hatch" if name in _RESTS else "box", styles[part], name))
    places = arrange_rows(sheet, [("", [row.label for row in rows])], 30.0, legend(sheet, entries, 0.0))
    # 3. Draw each row, with its sum unless a timeline or shares make that obvious.
    totals = ["" if chart.pieces or unit == "%" else show_number(row.total, unit) for row in rows]
    room = max(map(sheet.measure, totals)) + _GAP
    scale = Scale(0.0, max(row.total for row in rows), places.left, sheet.width - room, unit=unit)
    end = foot(sheet, scale, chart.axis, places)
    for row, place, text in zip(rows, places.rows, totals, strict=True):
        _stack(sheet, chart, styles, row, place, scale)
        sheet.text(scale.at(row.total) + _GAP, place.y, text, "value")
    return end


def _styles(chart: Stacks) -> list[str]:
    """Returns the class of each part: a phase has the same one in all charts, by its first word; other parts get the
    remaining ones in order."""
    places = [_PHASES.get(part.partition(" ")[0]) for part in chart.parts]
    unused = (place for place in count() if place not in places)
    styles = []
    for part, place in zip(chart.parts, places, strict=True):
        if part in _RESTS:
            styles.append("rest")
        else:
            number = next(unused) if place is None else place
            styles.append(f"part s{number % SERIES + 1}")
    return styles


def _stack(sheet: Sheet, chart: Stacks, styles: Sequence[str], row: _Stack, place: Row, scale: Scale) -> None:
    """Draws each part of a row as one shape, which in a timeline has many pieces."""
    start = 0.0
    spans: dict[int, list[tuple[float, float]]] = {}
    sums = defaultdict[int, float](float)
    for part, value in row.pieces:
        spans.setdefault(part, []).append((scale.at(start), scale.at(start + value)))
        sums[part] += value
        start += value
    top = place.y - _STACKED / 2
    unit = chart.axis.unit
    bottom = top + _STACKED
    for part, sides in spans.items():
        name = chart.parts[part]
        share = sums[part] / start
        words = show_number(sums[part], unit)
        words += "" if unit == "%" else f" ({units.percent(share)})"
        words += f" in {len(sides)} pieces" if len(sides) > 1 else ""
        # All pieces of a part are one shape with one hint, so that keyboard users reach it once.
        boxes = [[(x, top), (end, top), (end, bottom), (x, bottom)] for x, end in sides]
        style = f"mark {styles[part]}" + " piece" * bool(chart.pieces)
        sheet.lines(style, boxes, hint=make_hint(f"{row.label}, {name}", words), closed=True)
        if chart.pieces:
            continue
        x, end = sides[0]
        text = units.percent(share, 0)
        if name in _RESTS:
            sheet.hatch(x, top, end - x, _STACKED, layer=2)
        elif share >= _LEAST_SHARE and sheet.measure(text, bold=True) + 6 <= end - x:
            sheet.text((x + end) / 2, place.y, text, "inside", anchor="middle")
