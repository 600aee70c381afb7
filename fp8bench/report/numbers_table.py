"""A chart as the table of its numbers: for who cannot see it, for Markdown, and for who wants them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import singledispatch

from fp8bench import units
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
)

_SHOWN_AS: dict[str, Callable[[float], str]] = {
    "s": units.seconds,
    "B": units.size,
    "J": units.joules,
    "x": units.ratio,
    "": units.significant,
}
_NOTES = Column("notes")


def numbers_table(chart: Chart) -> Table:
    """Every number that the chart shows; of strips, which are many samples, what sums them up."""
    columns, rows = _content(chart)
    return Table(f"{chart.name}-numbers", f"{chart.title}: numbers", tuple(columns), tuple(rows))


_Content = tuple[Sequence[Column], Sequence[tuple[Field, ...]]]


@singledispatch
def _content(chart: Chart) -> _Content:
    raise TypeError(f"{type(chart).__name__} has no numbers; say in report/numbers_table.py what they are")


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
    show = _SHOWN_AS.get(axis.unit)
    return Field(show(value) if show else units.count(value, axis.unit), value, Tone.PLAIN, hint)


def _with_notes(columns: Sequence[Column], rows: Sequence[tuple[Field, ...]], hints: Sequence[str]) -> _Content:
    """The words that show on hovering as a last column, if there are any."""
    if not any(hints):
        return columns, rows
    return [*columns, _NOTES], [(*row, Field(hint)) for row, hint in zip(rows, hints, strict=True)]
