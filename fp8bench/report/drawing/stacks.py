"""Stacks: what a whole is made of, a row each."""

from __future__ import annotations

from fp8bench import units
from fp8bench.report.drawing.figure import Sheet, nothing
from fp8bench.report.drawing.limits import ROWS, SERIES, described, left_out, part_drawable, stack_rows
from fp8bench.report.drawing.marks import worded
from fp8bench.report.drawing.rows import Row, arranged, foot, legend
from fp8bench.report.drawing.scale import Scale, shown
from fp8bench.report.elements import Stacks

_THICK = 18.0
_GAP = 8.0
# Parts of a smaller share carry no text.
_LEAST_SHARE = 0.03
# What no part accounts for is no part: it is hatched.
_RESTS = ("unattributed", "the rest")


def draw_stacks(chart: Stacks, narrow: bool) -> str:
    rows = stack_rows(chart)[:ROWS]
    missing = sum(not part_drawable(value) and value != 0 for _, values in chart.rows for value in values)
    description = described(chart, missing, left_out(chart))
    if not rows:
        return nothing(chart, description, narrow)
    sheet = Sheet(chart, narrow)
    keys = [("hatch" if chart.parts[n] in _RESTS else "box", _style(chart, n), chart.parts[n]) for n in chart.present]
    top = legend(sheet, keys, 0.0)
    sums = [sum(value for value in values if part_drawable(value)) for _, values in rows]
    places = arranged(sheet, [("", [label for label, _ in rows])], 26.0 if narrow else 30.0, top)
    unit = chart.axis.unit
    room = max(sheet.measure(_written(one, unit)) for one in sums) + _GAP
    scale = Scale(0.0, max(sums), places.left, sheet.width - room, unit=unit)
    end = foot(sheet, scale, chart.axis, places)
    for (label, values), place, whole in zip(rows, places.rows, sums, strict=True):
        _row(sheet, chart, label, values, place, scale)
        sheet.text(scale.at(whole) + _GAP, place.y, _written(whole, unit), "value")
    return sheet.svg(end, description)


def _written(whole: float, unit: str) -> str:
    """What the parts sum to; that shares sum to 100% is no news."""
    return "" if unit == "%" else shown(whole, unit)


def _style(chart: Stacks, number: int) -> str:
    """The class of a part, by its place among the parts."""
    return "rest" if chart.parts[number] in _RESTS else f"part s{number % SERIES + 1}"


def _row(sheet: Sheet, chart: Stacks, label: str, values: tuple[float, ...], place: Row, scale: Scale) -> None:
    """The parts of one whole, side by side, each with its share where it has room for it."""
    whole, before = sum(value for value in values if part_drawable(value)), 0.0
    top, unit = place.y - _THICK / 2, chart.axis.unit
    for number, (part, value) in enumerate(zip(chart.parts, values, strict=False)):
        if not part_drawable(value):
            continue
        x, end = scale.at(before), scale.at(before + value)
        before += value
        said = shown(value, unit)
        said += "" if unit == "%" else f" ({units.percent(value / whole)})"
        hint = worded(f"{label}, {part}", said)
        sheet.box(f"mark {_style(chart, number)}", x, top, end - x, _THICK, hint=hint)
        text = units.percent(value / whole, 0)
        if part in _RESTS:
            sheet.hatch("hatch", x, top, end - x, _THICK, layer=2)
        elif value / whole >= _LEAST_SHARE and sheet.measure(text, bold=True) + 6 <= end - x:
            sheet.text((x + end) / 2, place.y, text, "inside", anchor="middle")
