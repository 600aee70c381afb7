"""Charts of rows that share an axis, with labels left of them: bars and stacks of parts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

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
from fp8bench.report.panels import together

_LABELS_SHARE = 0.4
_LABEL_GAP = 14.0
# Between a shape and its value.
_GAP = 8.0
# Between texts along an axis.
_APART_TEXTS = 10.0


@dataclass(frozen=True)
class Row:
    """Where a row stands: the middle of its shapes, and its band."""

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
    """Draws the axis under the rows, and its lines behind them; returns where it ends."""
    places = [(scale.at(value), text) for value, text in scale.ticks(7)]
    bottom = rows.bottom + 4
    if places:
        sheet.lines("grid", [[(x, rows.top), (x, bottom)] for x, _ in places], layer=0)
    along(sheet, places, bottom + 12)
    title = cut_to_room(axis.title, sheet.width - rows.left, sheet.size)
    sheet.text((rows.left + sheet.width) / 2, bottom + 32, title, "quiet", anchor="middle")
    return bottom + 42


def along(sheet: Sheet, places: Sequence[tuple[float, str]], y: float) -> None:
    before, reach = -math.inf, 0.0
    for x, text in sorted(places):
        half = sheet.measure(text) / 2
        if x - before >= half + reach + _APART_TEXTS:
            sheet.text(min(max(x, half), sheet.width - half), y, text, "tick", anchor="middle")
            before, reach = x, half


def legend(sheet: Sheet, entries: Sequence[tuple[str, str, str]], y: float) -> float:
    """Draws (shape or 'box' or 'hatch', class, text) side by side, in as many lines as needed; returns the end."""
    x, most = 0.0, sheet.width / 3
    for shape, style, label in entries:
        text = cut_to_room(label, most, sheet.size)
        wide = 18 + sheet.measure(text)
        if x and x + wide > sheet.width:
            x, y = 0.0, y + 20
        if shape in ("box", "hatch"):
            sheet.box(style, x + 1, y + 3, 11, 11)
            if shape == "hatch":
                sheet.hatch(x + 1, y + 3, 11, 11)
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
    every: list[tuple[tuple[int, str], Mark]] = []
    for place, (heading, marks_of_group) in enumerate(chart.groups):
        every += [((place, heading), mark) for mark in marks_of_group]
    placed = [(group, mark) for group, mark in every if drawable(mark.value, log=True)]
    marks = [mark for _, mark in placed[:BARS]]
    sheet.omit(placeless(numbers_of(mark for _, mark in every), log=True), len(placed) - BARS)
    if not marks:
        return 0.0
    by_group = together((group, mark.label) for group, mark in placed[:BARS])
    labels = [(heading, names) for (_, heading), names in by_group.items()]
    strokes = _STROKES * any(mark.samples for mark in marks)
    rows = arrange_rows(sheet, labels, strokes + 28.0)
    scale = _scale(chart, marks, sheet, rows.left)
    end = foot(sheet, scale, chart.axis, rows)
    for mark, row in zip(marks, rows.rows, strict=True):
        _bar(sheet, chart, mark, row, scale)
    x = scale.at(1.0)
    sheet.lines("axis", [[(x, above), (x, below)] for above, below in _start_lines(rows)])
    return end


def _scale(chart: Bars, marks: list[Mark], sheet: Sheet, left: float) -> Scale:
    """Ratios stand on a logarithmic axis, so that 2x and 0.5x are equally far from 1x."""
    values = [1.0]
    for mark in marks:
        values += [mark.value, *ends(mark, log=True), *_samples(mark)]
    room = {True: 0.0, False: 0.0}
    for mark in marks:
        below = mark.value < 1
        room[below] = max(room[below], sheet.measure(write_value(mark.value, chart.axis)) + _GAP + 2)
    return fit_scale(values, left + room[True] + 2, sheet.width - room[False] - 2, log=True, unit=chart.axis.unit)


def _start_lines(rows: Rows) -> list[tuple[float, float]]:
    spans: list[tuple[float, float]] = []
    for row in rows.rows:
        together = bool(spans) and spans[-1][1] == row.top
        spans[-1 if together else len(spans) :] = [(spans[-1][0] if together else row.top, row.top + row.height)]
    return spans


def _samples(mark: Mark) -> list[float]:
    return [value for value in mark.samples if drawable(value, log=True)]


def _bar(sheet: Sheet, chart: Bars, mark: Mark, row: Row, scale: Scale) -> None:
    style = mark.tone.value
    sheet.box("mark band", 0, row.top, sheet.width, row.height, layer=1, hint=mark_hint(mark, chart.axis))
    places = [scale.at(value) for value in _samples(mark)]
    if places:
        row = replace(row, y=row.y - _STROKES / 2)
        top = row.y + _THICK / 2 + 2
        sheet.lines(f"samples {style}", [[(x, top), (x, top + _STROKES)] for x in places])
    origin, end = scale.at(1.0), scale.at(mark.value)
    is_below = mark.value < 1
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
# Smaller shares carry no text.
_LEAST_SHARE = 0.03
# Rests are hatched.
_RESTS = ("other", "the rest")
Pieces = Sequence[tuple[int, float]]
# Phases of products first: most charts have no others.
_PHASES = {
    word: place
    for place, word in enumerate(
        ("matmul", "cast", "attention", "optimizer", "elementwise", "accumulation", "data", "communication")
    )
}


def draw_stacks(sheet: Sheet, chart: Stacks) -> float:
    every: list[float] = []
    rows = []
    for number, (label, values) in enumerate(chart.rows):
        every += filter(None, values)
        pieces = chart.pieces[number] if chart.pieces else enumerate(values)
        drawn = [(part, value) for part, value in pieces if part_drawable(value)]
        if drawn:
            rows.append((label, drawn, sum(value for _, value in drawn)))
    sheet.omit(placeless(every, log=True), len(rows) - ROWS)
    rows = rows[:ROWS]
    if not rows:
        return 0.0
    styles, unit = _styles(chart), chart.axis.unit
    keys = [("hatch" if chart.parts[n] in _RESTS else "box", styles[n], chart.parts[n]) for n in chart.present]
    top = legend(sheet, keys, 0.0)
    places = arrange_rows(sheet, [("", [label for label, *_ in rows])], 30.0, top)
    totals = ["" if chart.pieces else _show_total(whole, unit) for *_, whole in rows]
    room = max(map(sheet.measure, totals)) + _GAP
    scale = Scale(0.0, max(whole for *_, whole in rows), places.left, sheet.width - room, unit=unit)
    end = foot(sheet, scale, chart.axis, places)
    for (label, drawn, whole), place, total in zip(rows, places.rows, totals, strict=True):
        _stack(sheet, chart, styles, (label, drawn), place, scale)
        sheet.text(scale.at(whole) + _GAP, place.y, total, "value")
    return end


def _show_total(whole: float, unit: str) -> str:
    return "" if unit == "%" else show_number(whole, unit)  # shares always sum to 100%


def _styles(chart: Stacks) -> list[str]:
    """A phase has the same class in all charts, by its first word; other parts take those that are left."""
    places = [_PHASES.get(part.partition(" ")[0]) for part in chart.parts]
    free = (place for place in count() if place not in places)
    return [
        "rest" if part in _RESTS else f"part s{(next(free) if place is None else place) % SERIES + 1}"
        for part, place in zip(chart.parts, places, strict=True)
    ]


def _stack(
    sheet: Sheet, chart: Stacks, styles: Sequence[str], row: tuple[str, Pieces], place: Row, scale: Scale
) -> None:
    """Draws each part of a row as one shape, which in a timeline has many pieces."""
    label, pieces = row
    whole, spans = 0.0, defaultdict[int, list[tuple[float, float]]](list)
    for part, value in pieces:
        spans[part].append((whole, value))
        whole += value
    top, unit = place.y - _STACKED / 2, chart.axis.unit
    bottom = top + _STACKED
    for part, of_part in spans.items():
        name, size = chart.parts[part], sum(value for _, value in of_part)
        words = show_number(size, unit)
        words += "" if unit == "%" else f" ({units.percent(size / whole)})"
        words += f" in {len(of_part)} pieces" if len(of_part) > 1 else ""
        ends = [(scale.at(start), scale.at(start + value)) for start, value in of_part]
        boxes = [[(x, top), (end, top), (end, bottom), (x, bottom)] for x, end in ends]
        style = f"mark {styles[part]}" + " piece" * bool(chart.pieces)
        sheet.lines(style, boxes, hint=make_hint(f"{label}, {name}", words), closed=True)
        if chart.pieces:
            continue
        x, end = ends[0]
        text = units.percent(size / whole, 0)
        if name in _RESTS:
            sheet.hatch(x, top, end - x, _STACKED, layer=2)
        elif size / whole >= _LEAST_SHARE and sheet.measure(text, bold=True) + 6 <= end - x:
            sheet.text((x + end) / 2, place.y, text, "inside", anchor="middle")
