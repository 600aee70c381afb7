"""Charts beside their drawings: which are worth one, stacked bars of any unit, and each as the table of its numbers.

The table is for who cannot see the chart, for Markdown, and for who wants the numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import singledispatch

from fp8bench import units
from fp8bench.model import UNATTRIBUTED
from fp8bench.report.elements import (
    Axis,
    Bars,
    Chart,
    Column,
    Field,
    Heat,
    Lines,
    Mark,
    Scatter,
    Stacks,
    Strips,
    Table,
    Tone,
    Waterfall,
)
from fp8bench.report.panels import Result, together
from fp8bench.report.terminal.tables import phases_of
from fp8bench.report.words.naming import phase_order, phase_words

_NOTES = Column("notes")
# Fewer points than this are read faster as numbers.
_LEAST_POINTS = 3
# Where the largest whole is so many times the smallest, bars of one unit would hide the parts of the small ones.
_WIDE = 8.0


def worth_drawing(chart: Chart) -> bool:
    """Whether there is something to see that a table would not show: three points, in more than one column."""
    match chart:
        case Bars():
            points = sum(len(marks) for _, marks in chart.groups)
        case Scatter():
            points = len(chart.points)
        case Stacks():
            points = sum(value != 0 for _, values in chart.rows for value in values)
        case Heat():
            points = sum(value is not None for row in chart.values for value in row) if len(chart.columns) > 1 else 0
        case Lines():
            points = len(chart.places)
        case Strips():
            points = sum(len(samples) for _, samples, _ in chart.rows)
        case Waterfall():
            points = 1 + len(chart.changes)
        case _:
            raise TypeError(f"{type(chart).__name__} has no points; say in report/page/charts.py what they are")
    return points >= _LEAST_POINTS


def stacked(
    name: str, title: str, description: str, axis: Axis, share: str, parts: Mapping[str, str],
    rows: Sequence[tuple[str, float, Mapping[str, float]]], folded: bool = False,
) -> Stacks:  # fmt: skip
    """Bars of (label, whole, what it is made of); `parts` are all there may be, in order, with their words.

    Where wholes are far apart, bars are shares, with the whole in the label.
    """
    wholes, unit = [whole for _, whole, _ in rows], axis.unit
    far = max(wholes) > _WIDE * min(wholes)
    bars = tuple(
        (
            f"{label}, {units.shown(whole, unit)}" if far else label,
            tuple(100 * value / (whole or 1.0) if far else value for value in (own.get(part, 0.0) for part in parts)),
        )
        for label, whole, own in rows
    )
    chosen = Axis(share, "%") if far else axis
    return Stacks(name, title, description, chosen, tuple(parts.values()), bars, folded=folded)


def grouped(marks: Iterable[tuple[str, Mark]]) -> tuple[tuple[str, tuple[Mark, ...]], ...]:
    """Marks under their headings, in the order in which these are met."""
    return tuple((heading, tuple(members)) for heading, members in together(marks).items())


def lasting(result: Result) -> bool:
    """Whether its best case is a length of time."""
    return result.best is not None and 0 < result.best < math.inf


def phase_parts(results: Iterable[Result]) -> dict[str, str]:
    """The phases of any of these results, with words and in order: the same everywhere, so that each has one colour."""
    found = {name for one in results if lasting(one) for name, seconds in phases_of(one) if 0 < seconds < math.inf}
    return {name: phase_words(name) for name in sorted(found | {UNATTRIBUTED}, key=phase_order)}


def numbers_table(chart: Chart) -> Table:
    """Every number that the chart shows; of strips, which are many samples, what sums them up."""
    columns, rows = _content(chart)
    return Table(f"{chart.name}-numbers", f"{chart.title}: numbers", tuple(columns), tuple(rows))


_Content = tuple[Sequence[Column], Sequence[tuple[Field, ...]]]


@singledispatch
def _content(chart: Chart) -> _Content:
    raise TypeError(f"{type(chart).__name__} has no numbers; say in report/page/charts.py what they are")


@_content.register
def _(chart: Bars) -> _Content:
    named = any(title for title, _ in chart.groups)
    marks = [(title, mark) for title, marks in chart.groups for mark in marks]
    columns = [*([Column("group")] if named else []), Column("case"), *_mark_columns(chart.axis)]
    rows = [
        (*([Field(title)] if named else []), Field(mark.label, tone=mark.tone), *_mark_fields(mark, chart.axis))
        for title, mark in marks
    ]
    return _with_notes(columns, rows, [mark.hint for _, mark in marks])


@_content.register
def _(chart: Waterfall) -> _Content:
    wholes = [Mark(label, value) for label, value in (chart.before, chart.after)]
    marks = [wholes[0], *chart.changes, wholes[1]]
    rows = [(Field(mark.label, tone=mark.tone), _field(mark.value, chart.axis)) for mark in marks]
    return _with_notes([Column("step"), _column(chart.axis)], rows, [mark.hint for mark in marks])


@_content.register
def _(chart: Scatter) -> _Content:
    columns = [Column("series"), Column("case"), _column(chart.x), _column(chart.y)]
    rows = [
        (Field(point.series), Field(point.label, tone=point.tone), _field(point.x, chart.x), _field(point.y, chart.y))
        for point in chart.points
    ]
    return _with_notes(columns, rows, [point.hint for point in chart.points])


@_content.register
def _(chart: Stacks) -> _Content:
    present = chart.present
    columns = [Column("case"), *(Column(chart.parts[n], number=True, unit=chart.axis.unit) for n in present)]
    rows = [(label, [values[n] if n < len(values) else 0.0 for n in present]) for label, values in chart.rows]
    return columns, [(Field(label), *(_field(value, chart.axis) for value in values)) for label, values in rows]


@_content.register
def _(chart: Heat) -> _Content:
    """Hints of its fields stay with them: a column of notes would not say which field is meant."""
    columns = [Column(""), *(Column(name, number=True, unit=chart.axis.unit) for name in chart.columns)]
    hints = chart.hints or [[""] * len(chart.columns) for _ in chart.rows]
    rows = [
        (Field(name), *(_field(value, chart.axis, hint) for value, hint in zip(values, words, strict=True)))
        for name, values, words in zip(chart.rows, chart.values, hints, strict=True)
    ]
    return columns, rows


@_content.register
def _(chart: Lines) -> _Content:
    columns = [Column("at"), Column("series"), *_mark_columns(chart.axis)]
    marks = [
        (place, name, mark)
        for index, place in enumerate(chart.places)
        for name, marks in chart.series
        if (mark := marks[index]) is not None
    ]
    rows = [(Field(place), Field(name, tone=mark.tone), *_mark_fields(mark, chart.axis)) for place, name, mark in marks]
    return _with_notes(columns, rows, [mark.hint for _, _, mark in marks])


@_content.register
def _(chart: Strips) -> _Content:
    names = ("lowest", "lower quartile", "median", "upper quartile", "highest")
    columns = [Column("case"), Column("samples", number=True)]
    columns += [Column(name, number=True, unit=chart.axis.unit) for name in names]
    rows = []
    for label, samples, tone in chart.rows:
        many = Field(str(len(samples)), float(len(samples)))
        rows.append((Field(label, tone=tone), many, *(_field(value, chart.axis) for value in _summary(samples))))
    return columns, rows


def _summary(samples: Iterable[float]) -> Sequence[float | None]:
    """Ends, quartiles and the middle of what is finite."""
    finite = [one for one in samples if math.isfinite(one)]
    if len(finite) < 2:
        return [finite[0] if finite else None] * 5
    return [min(finite), *statistics.quantiles(finite, n=4, method="inclusive"), max(finite)]


def _column(axis: Axis) -> Column:
    return Column(axis.title, number=True, unit=axis.unit)


def _mark_columns(axis: Axis) -> list[Column]:
    return [_column(axis), Column("low", number=True, unit=axis.unit), Column("high", number=True, unit=axis.unit)]


def _mark_fields(mark: Mark, axis: Axis) -> list[Field]:
    return [_field(value, axis) for value in (mark.value, mark.low, mark.high)]


def _field(value: float | None, axis: Axis, hint: str = "") -> Field:
    if value is None:
        return Field(units.NONE, hint=hint)
    return Field(units.shown(value, axis.unit), value, Tone.PLAIN, hint)


def _with_notes(columns: Sequence[Column], rows: Sequence[tuple[Field, ...]], hints: Sequence[str]) -> _Content:
    """The words that show on hovering as a last column, if there are any."""
    if not any(hints):
        return columns, rows
    return [*columns, _NOTES], [(*row, Field(hint)) for row, hint in zip(rows, hints, strict=True)]
