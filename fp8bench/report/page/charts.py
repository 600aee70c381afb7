"""Charts beside their drawings: which are worth one, stacked bars of any unit, and each as the table of its numbers.

The table is for who cannot see the chart, for Markdown, and for who wants the numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fp8bench import units
from fp8bench.model import UNATTRIBUTED
from fp8bench.report.elements import (
    AnyChart,
    Bars,
    ChartAxis,
    ChartPoint,
    Column,
    Field,
    Heat,
    Lines,
    Mark,
    Scatter,
    Sparks,
    Stacks,
    Strips,
    Table,
    Waterfall,
)
from fp8bench.report.panels import Result, phases_of, together
from fp8bench.report.words.naming import phase_order, phase_words

_SUMMARY = ("lowest", "lower quartile", "median", "upper quartile", "highest")
# Fewer points than this are read faster as numbers.
_LEAST_POINTS = 3
# Where the largest whole is so many times the smallest, bars of one unit would hide the parts of the small ones.
_WIDE = 8.0


def worth_drawing(chart: AnyChart) -> bool:
    """Whether there is something to see that a table would not show: three points, in more than one column."""
    return _points(chart) >= _LEAST_POINTS


def _points(chart: AnyChart) -> int:
    match chart:
        case Bars():
            return sum(len(marks) for _, marks in chart.groups)
        case Scatter():
            return len(chart.points)
        case Stacks():
            return sum(value != 0 for _, values in chart.rows for value in values)
        case Heat():
            values = [value for row in chart.values for value in row if value is not None]
            return len(values) if len(chart.columns) > 1 else 0
        case Lines() | Sparks():
            return len(chart.places)
        case Strips():
            return sum(len(samples) for _, samples, _ in chart.rows)
        case Waterfall():
            return 1 + len(chart.changes)


def stacked(
    name: str, title: str, description: str, axis: ChartAxis, share: str, parts: Mapping[str, str],
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
    chosen = ChartAxis(share, "%") if far else axis
    return Stacks(name, title, description, chosen, tuple(parts.values()), bars, folded=folded)


def grouped(marks: Iterable[tuple[str, Mark]]) -> tuple[tuple[str, tuple[Mark, ...]], ...]:
    return tuple((heading, tuple(members)) for heading, members in together(marks).items())


def against(reference: str, marks: Sequence[tuple[str, Mark]]) -> tuple[tuple[str, tuple[Mark, ...]], ...]:
    """The same of marks that are called after their precisions; where each has one of one, a heading for all."""
    groups, modes = grouped(marks), {mark.label for _, mark in marks}
    if len(modes) > 1 or len(groups) == 1:
        return groups
    return ((f"{modes.pop()} over {reference}", tuple(replace(mark, label=heading) for heading, mark in marks)),)


def lasting(result: Result) -> bool:
    return result.best is not None and 0 < result.best < math.inf


def phase_parts(results: Iterable[Result]) -> dict[str, str]:
    """The phases of any of these results, with words and in order: the same everywhere, so that each has one colour."""
    found = {
        name for result in results if lasting(result) for name, seconds in phases_of(result) if 0 < seconds < math.inf
    }
    return {name: phase_words(name) for name in sorted(found | {UNATTRIBUTED}, key=phase_order)}


def numbers_table(chart: AnyChart) -> Table:
    """Every number that the chart shows; of strips, which are many samples, what sums them up."""
    heads, numbers, rows = _content(chart)
    columns = [*heads, *(Column(title, number=True, unit=unit) for title, unit in numbers)]
    fields = [
        (
            *words,
            *(
                Field(units.NONE) if value is None else Field(units.shown(value, unit), value)
                for value, (_, unit) in zip(values, numbers, strict=True)
            ),
        )
        for words, values, _ in rows
    ]
    if any(hint for _, _, hint in rows):  # the words that show on hovering
        columns.append(Column("notes"))
        fields = [(*row, Field(hint)) for row, (_, _, hint) in zip(fields, rows, strict=True)]
    if isinstance(chart, Heat):  # whose hints stay with their fields: notes would not say which field is meant
        fields = [
            (name, *(replace(field, hint=hint) for field, hint in zip(own, hints, strict=True)))
            for (name, *own), hints in zip(fields, chart.hints, strict=True)
        ]
    return Table(f"{chart.name}-numbers", f"{chart.title}: numbers", tuple(columns), tuple(fields))


_Numbers = Sequence[tuple[str, str]]
_Rows = Sequence[tuple[Sequence[Field], Sequence[float | None], str]]


def _content(chart: AnyChart) -> tuple[Sequence[Column], _Numbers, _Rows]:
    match chart:
        case Bars():
            named = any(title for title, _ in chart.groups)
            marks = [([Field(title)] if named else [], mark) for title, own in chart.groups for mark in own]
            heads = [*([Column("group")] if named else []), Column("case")]
            return heads, _ends(chart.axis), [_marked([*head, _name(mark)], mark) for head, mark in marks]
        case Lines():
            found = [
                (place, name, mark)
                for index, place in enumerate(chart.places)
                for name, marks in chart.series
                if (mark := marks[index]) is not None
            ]
            rows = [_marked([Field(place), Field(name, tone=mark.tone)], mark) for place, name, mark in found]
            return [Column("at"), Column("series")], _ends(chart.axis), rows
        case Waterfall():
            first, last = (Mark(label, value) for label, value in (chart.before, chart.after))
            steps = [([_name(mark)], [mark.value], mark.hint) for mark in (first, *chart.changes, last)]
            return [Column("step")], [(chart.axis.title, chart.axis.unit)], steps
        case Scatter():
            numbers = [(axis.title, axis.unit) for axis in (chart.x, chart.y)]
            points = [([Field(point.series), _name(point)], [point.x, point.y], point.hint) for point in chart.points]
            return [Column("series"), Column("case")], numbers, points
        case Stacks():
            numbers = [(chart.parts[part], chart.axis.unit) for part in chart.present]
            parts = [([Field(label)], [values[n] for n in chart.present], "") for label, values in chart.rows]
            return [Column("case")], numbers, parts
        case Heat():
            cells = [([Field(name)], values, "") for name, values in zip(chart.rows, chart.values, strict=True)]
            return [Column("")], [(name, chart.axis.unit) for name in chart.columns], cells
        case Sparks():
            heads = [Column("of"), Column("what"), Column("line")]
            sparks = [
                ([Field(name), Field(column), Field(line)], values, "")
                for name, cells in chart.rows for column, lines in zip(chart.columns, cells, strict=True)
                for line, values in zip(chart.series, lines, strict=False)
            ]  # fmt: skip
            return heads, [(place, "") for place in chart.places], sparks
        case Strips():
            numbers = [(name, chart.axis.unit) for name in _SUMMARY]
            strips = [
                ([Field(label, tone=tone), Field(str(len(samples)), len(samples))], _summary(samples), "")
                for label, samples, tone in chart.rows
            ]
            return [Column("case"), Column("samples", number=True)], numbers, strips


def _name(mark: Mark | ChartPoint) -> Field:
    return Field(mark.label, tone=mark.tone)


def _ends(axis: ChartAxis) -> _Numbers:
    return [(name, axis.unit) for name in (axis.title, "low", "high")]


def _marked(words: Sequence[Field], mark: Mark) -> tuple[Sequence[Field], Sequence[float | None], str]:
    return words, [mark.value, mark.low, mark.high], mark.hint


def _summary(samples: Iterable[float]) -> Sequence[float | None]:
    finite = [sample for sample in samples if math.isfinite(sample)]
    if len(finite) < 2:
        return [finite[0] if finite else None] * 5
    return [min(finite), *statistics.quantiles(finite, n=4, method="inclusive"), max(finite)]
