"""Rows under each other with a label each, and the axis that they share: what bars, stacks and strips have in common.

In a window labels stand left of the rows; on a telephone each stands above its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8bench.report.drawing.figure import Sheet
from fp8bench.report.drawing.labels import shortened
from fp8bench.report.drawing.scale import Scale
from fp8bench.report.elements import Axis

_LABELS_SHARE = 0.4
_GAP = 14.0
# On a telephone a label stands closer to its own row than to the one above.
_LABEL_LINE = 22.0
_BELOW = 3.0


@dataclass(frozen=True)
class Row:
    """Where a row stands: the middle of what is drawn in it, and the band that is all its own."""

    y: float
    top: float
    height: float


@dataclass(frozen=True)
class Rows:
    """Rows from the top down; what is drawn in them begins at `left` and ends at the sheet's right side."""

    rows: tuple[Row, ...]
    left: float
    top: float
    bottom: float


def arranged(sheet: Sheet, groups: Sequence[tuple[str, Sequence[str]]], height: float, top: float = 0.0) -> Rows:
    """Writes headings and labels, and says where the rows are; `height` is what a row needs without its label."""
    labels = [label for _, group in groups for label in group]
    headed = any(heading for heading, _ in groups)
    room = sheet.width if sheet.narrow else _LABELS_SHARE * sheet.width
    texts = [shortened(label, room, sheet.size) for label in labels]
    left = 0.0 if sheet.narrow else max((sheet.measure(text) for text in texts), default=0.0) + _GAP
    rows: list[Row] = []
    y = top
    for number, (heading, group) in enumerate(groups):
        if headed:
            y += 10.0 if number else 0.0
            sheet.text(0, y + 10, shortened(heading, sheet.width, sheet.size, bold=True), "heading")
            y += 26.0
        for _ in group:
            label = texts[len(rows)]
            if sheet.narrow:
                sheet.text(0, y + _LABEL_LINE - 8, label, "label")
                rows.append(Row(y + _LABEL_LINE + height / 2 - _BELOW, y, _LABEL_LINE + height - _BELOW))
            else:
                sheet.text(left - _GAP, y + height / 2, label, "label", anchor="end")
                rows.append(Row(y + height / 2, y, height))
            y += rows[-1].height
    return Rows(tuple(rows), left, top, y)


def foot(sheet: Sheet, scale: Scale, axis: Axis, rows: Rows) -> float:
    """Draws the axis under the rows, and its lines behind them; returns where it ends."""
    ticks = scale.ticks(4 if sheet.narrow else 7)
    places = [(scale.at(value), text) for value, text in ticks]
    bottom = rows.bottom + 4
    if places:
        sheet.lines("grid", [[(x, rows.top), (x, bottom)] for x, _ in places], layer=0)
    for x, text in apart(sheet, places):
        half = sheet.measure(text) / 2
        sheet.text(min(max(x, half), sheet.width - half), bottom + 12, text, "tick", anchor="middle")
    if not axis.title:
        return bottom + 22
    title = shortened(axis.title, sheet.width - rows.left, sheet.size)
    sheet.text((rows.left + sheet.width) / 2, bottom + 32, title, "quiet", anchor="middle")
    return bottom + 42


def apart(sheet: Sheet, places: Sequence[tuple[float, str]], gap: float = 10.0) -> list[tuple[float, str]]:
    """The texts along a line that do not run into one before them."""
    kept: list[tuple[float, str]] = []
    for x, text in sorted(places):
        if not kept or x - kept[-1][0] >= (sheet.measure(text) + sheet.measure(kept[-1][1])) / 2 + gap:
            kept.append((x, text))
    return kept


def legend(sheet: Sheet, entries: Sequence[tuple[str, str, str]], y: float) -> float:
    """Draws (shape or 'box' or 'hatch', class, text) side by side, in as many lines as it takes; returns the end."""
    x, most = 0.0, sheet.width / 2 if sheet.narrow else sheet.width / 3
    for shape, style, label in entries:
        text = shortened(label, most, sheet.size)
        wide = 18 + sheet.measure(text)
        if x and x + wide > sheet.width:
            x, y = 0.0, y + 20
        if shape in ("box", "hatch"):
            sheet.box(style, x + 1, y + 3, 11, 11)
            if shape == "hatch":
                sheet.hatch("hatch", x + 1, y + 3, 11, 11)
        else:
            sheet.dot(style, shape, x + 6.5, y + 8.5)
        sheet.text(x + 18, y + 8.5, text)
        x += wide + 18
    return y + 30 if entries else y
