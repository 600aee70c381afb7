"""Charts of rows that share an axis, with labels to their left: bars and stacks of parts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from fp8bench import units
from fp8bench.report.elements import Bars, Mark, Stacks
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


class Rows(NamedTuple):
    """Rows of one height, by their upper ends; their shapes begin at `left` and end at the sheet's right side."""

    tops: list[float]
    height: float
    left: float
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
    tops: list[float] = []
    y = top
    for number, (heading, group) in enumerate(groups):
        if headed:
            y += 10.0 if number else 0.0
            sheet.text(0, y + 10, cut_to_room(heading, sheet.width, sheet.size, bold=True), "heading")
            y += 26.0
        for _ in group:
            sheet.text(left - _LABEL_GAP, y + height / 2, texts[len(tops)], "label", anchor="end")
            tops.append(y)
            y += height
    return Rows(tops, height, left, y)


def draw_axis_below(sheet: Sheet, scale: Scale, title: str, top: float, bottom: float) -> float:
    """Draws the ticks and the title of an axis below a plot, and its grid behind it; returns the lower end."""
    places = [(scale.at(value), text) for value, text in scale.ticks(7)]
    if places:
        sheet.lines("grid", [[(x, top), (x, bottom)] for x, _ in places], layer=0)
    along(sheet, places, bottom + 13)
    text = cut_to_room(title, scale.end - scale.start, sheet.size)
    sheet.text((scale.start + scale.end) / 2, bottom + 34, text, "quiet", anchor="middle")
    return bottom + 46


def along(sheet: Sheet, places: Sequence[tuple[float, str]], y: float) -> None:
    """Writes texts along an axis, skipping those that would overlap the previous one."""
    end = -math.inf
    for x, text in sorted(places):
        half = sheet.measure(text) / 2
        if x - half >= end + _APART_TEXTS:
            sheet.text(min(max(x, half), sheet.width - half), y, text, "tick", anchor="middle")
            end = x + half


def legend(sheet: Sheet, entries: Sequence[tuple[str, str, str]], y: float) -> float:
    """Draws (shape or 'box', class, text) side by side, in as many lines as needed; returns the lower end."""
    x = 0.0
    most = sheet.width / 3
    for shape, style, label in entries:
        text = cut_to_room(label, most, sheet.size)
        wide = 18 + sheet.measure(text)
        # The next line of the legend.
        if x and x + wide > sheet.width:
            x = 0.0
            y = y + 20
        if shape == "box":
            sheet.box(style, x + 1, y + 3, 11, 11)
        else:
            sheet.dot(style, shape, x + 6.5, y + 8.5)
        sheet.text(x + 18, y + 8.5, text)
        x += wide + 18
    return y + 30 if entries else y


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
    num_hidden = 0
    for heading, marks_of_group in chart.groups:
        placed = [mark for mark in marks_of_group if drawable(mark.value, log=True)]
        drawn = placed[: BARS - len(marks)]
        num_hidden += len(marks_of_group) - len(drawn)
        if drawn:
            labels.append((heading, [mark.label for mark in drawn]))
            marks += drawn
    sheet.omit(num_hidden)
    if not marks:
        return 0.0
    # 2. Draw each in its row, and the line from which all begin.
    strokes = _STROKES * any(mark.samples for mark in marks)
    rows = arrange_rows(sheet, labels, strokes + 28.0)
    scale = _scale(chart, marks, sheet, rows.left)
    end = draw_axis_below(sheet, scale, chart.axis.title, 0.0, rows.bottom + 4)
    x = scale.at(1.0)
    for mark, top in zip(marks, rows.tops, strict=True):
        _bar(sheet, chart, mark, top, rows.height, scale)
    sheet.lines("axis", [[(x, top), (x, top + rows.height)] for top in rows.tops])
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


def _samples(mark: Mark) -> list[float]:
    return [value for value in mark.samples if drawable(value, log=True)]


def _bar(sheet: Sheet, chart: Bars, mark: Mark, top: float, height: float, scale: Scale) -> None:
    style = mark.tone.value
    sheet.box("mark band", 0, top, sheet.width, height, layer=1, hint=mark_hint(mark, chart.axis))
    y = top + height / 2
    places = [scale.at(value) for value in _samples(mark)]
    if places:
        # Centre bar and strokes together in the row.
        y -= _STROKES / 2
        start = y + _THICK / 2 + 2
        sheet.lines(f"samples {style}", [[(x, start), (x, start + _STROKES)] for x in places])
    origin = scale.at(1.0)
    end = scale.at(mark.value)
    is_below = mark.value < 1
    # Even a case that is exactly as fast as the reference must be visible.
    thick = max(_THINNEST, abs(end - origin))
    sheet.box(f"bar {style}", origin - thick if is_below else origin, y - _THICK / 2, thick, _THICK)
    reach = [origin, end, *(scale.at(value) for value in ends(mark, log=True))]
    if len(reach) == 4:
        low, high = reach[2:]
        caps = [[(x, y - _CAP), (x, y + _CAP)] for x in (low, high)]
        sheet.lines("whisker", [[(low, y), (high, y)], *caps])
    x = min(reach) - _GAP if is_below else max(reach) + _GAP
    sheet.text(x, y, write_value(mark.value, chart.axis), f"value {style}", anchor="end" if is_below else "start")


_STACKED = 18.0
# Smaller shares have no text.
_LEAST_SHARE = 0.03
# Parts drawn as what remains of the whole.
_RESTS = ("other", "the rest")


class _Stack(NamedTuple):
    """A row of parts: their numbers and values in sequence, and their sum."""

    label: str
    pieces: Sequence[tuple[int, float]]
    total: float


# Phases of products first: most charts have no others.
_PHASES = ("matmul", "cast", "attention", "optimizer", "elementwise", "accumulation", "data", "communication")


def draw_stacks(sheet: Sheet, chart: Stacks) -> float:
    # 1. Choose the rows that have something to draw.
    rows = []
    for number, (label, values) in enumerate(chart.rows):
        pieces = chart.pieces[number] if chart.pieces else enumerate(values)
        drawn = [(part, value) for part, value in pieces if drawable(value, log=True)]
        if drawn:
            rows.append(_Stack(label, drawn, sum(value for _, value in drawn)))
    rows = rows[:ROWS]
    sheet.omit(len(chart.rows) - len(rows))
    if not rows:
        return 0.0
    # 2. Write the legend and the labels.
    styles = _styles(chart)
    unit = chart.axis.unit
    entries = [("box", styles[part], chart.parts[part]) for part in chart.present]
    top = legend(sheet, entries, 0.0)
    places = arrange_rows(sheet, [("", [row.label for row in rows])], 30.0, top)
    # 3. Draw each row, with its sum unless a timeline or shares make that obvious.
    totals = ["" if chart.pieces or unit == "%" else show_number(row.total, unit) for row in rows]
    room = max(map(sheet.measure, totals)) + _GAP
    scale = Scale(0.0, max(row.total for row in rows), places.left, sheet.width - room, unit=unit)
    for row, row_top, text in zip(rows, places.tops, totals, strict=True):
        middle = row_top + places.height / 2
        _stack(sheet, chart, styles, row, middle, scale)
        sheet.text(scale.at(row.total) + _GAP, middle, text, "value")
    return draw_axis_below(sheet, scale, chart.axis.title, top, places.bottom + 4)


def _styles(chart: Stacks) -> list[str]:
    """Returns the class of each part: a phase has the same one in all charts, by its first word; other parts get the
    remaining ones in order."""
    phases = [part.partition(" ")[0] for part in chart.parts]
    unused = (number for number in count() if number >= len(_PHASES) or _PHASES[number] not in phases)
    styles = []
    for part, phase in zip(chart.parts, phases, strict=True):
        if part in _RESTS:
            styles.append("rest")
        else:
            number = _PHASES.index(phase) if phase in _PHASES else next(unused)
            styles.append(f"part s{number % SERIES + 1}")
    return styles


def _stack(sheet: Sheet, chart: Stacks, styles: Sequence[str], row: _Stack, middle: float, scale: Scale) -> None:
    """Draws each part of a row as one shape, which in a timeline has many pieces."""
    start = 0.0
    spans: dict[int, list[tuple[float, float]]] = {}
    sums = defaultdict[int, float](float)
    for part, value in row.pieces:
        spans.setdefault(part, []).append((scale.at(start), scale.at(start + value)))
        sums[part] += value
        start += value
    top = middle - _STACKED / 2
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
        is_wide = share >= _LEAST_SHARE and sheet.measure(text, bold=True) + 6 <= end - x
        if name not in _RESTS and is_wide:
            sheet.text((x + end) / 2, middle, text, "inside", anchor="middle")
