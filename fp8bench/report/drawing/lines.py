"""Lines: how figures went from place to place, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence

from fp8bench.report.drawing.figure import SHAPES, Sheet, nothing
from fp8bench.report.drawing.labels import shortened
from fp8bench.report.drawing.limits import PLACES, POINTED, SERIES, described, drawable, left_out
from fp8bench.report.drawing.marks import ends, hint
from fp8bench.report.drawing.rows import apart, legend
from fp8bench.report.drawing.scale import Scale, limits, shown
from fp8bench.report.elements import Lines, Mark, Tone

_GAP = 8.0
# From so many places on a mark is seen when it is pointed at, and the line otherwise.
_FAINT_FROM = {False: 60, True: 25}

Marks = Sequence[Mark | None]


def draw_lines(chart: Lines, narrow: bool) -> str:
    first = max(0, len(chart.places) - PLACES)
    places = chart.places[first:]
    series = [(name, _drawn(marks[first : len(chart.places)], chart.axis.log)) for name, marks in chart.series[:SERIES]]
    values = [
        value for _, marks in series for mark in marks if mark for value in (mark.value, *ends(mark, chart.axis.log))
    ]
    description = described(chart, _missing(chart), left_out(chart))
    if not values:
        return nothing(chart, description, narrow)
    sheet = Sheet(chart, narrow)
    named = [(SHAPES[number], f"point s{number + 1}", name) for number, (name, _) in enumerate(series)]
    top = legend(sheet, named if len(series) > 1 else [], 0.0)
    if chart.axis.title:
        sheet.text(0, top + 8, shortened(chart.axis.title, sheet.width, sheet.size), "quiet")
        top += 24
    bottom = top + (190.0 if narrow else 260.0)
    log, unit = chart.axis.log, chart.axis.unit
    y = Scale(*limits(values, log, unit, pad=0.05), bottom, top, log, unit)
    x = _across(sheet, chart, series, y, len(places))
    _axes(sheet, places, x, y)
    for number, (_, marks) in enumerate(series):
        _series(sheet, chart, places, number, marks, x, y)
    _last_values(sheet, chart, series, x, y)
    return sheet.svg(bottom + 26, description)


def _drawn(marks: Marks, log: bool) -> list[Mark | None]:
    """The marks with a place on the axis, None in place of the others."""
    return [mark if mark is not None and drawable(mark.value, log) else None for mark in marks]


def _missing(chart: Lines) -> int:
    marks = [mark for _, marks in chart.series for mark in marks if mark is not None]
    values = [value for mark in marks for value in (mark.value, mark.low, mark.high) if value is not None]
    return sum(not drawable(value, chart.axis.log) for value in values)


def _across(sheet: Sheet, chart: Lines, series: Sequence[tuple[str, Marks]], y: Scale, places: int) -> Scale:
    """Where places stand: between the ticks on the left and the last values on the right."""
    left = max(sheet.measure(text) for _, text in y.ticks(6)) + 14
    last = [mark for _, marks in series if (mark := _last(marks))]
    room = max(sheet.measure(shown(mark.value, chart.axis.unit), bold=True) for mark in last) + _GAP + 4
    return Scale(-0.5 if places == 1 else 0.0, max(0.5, places - 1.0), left + 4, sheet.width - room)


def _last(marks: Marks) -> Mark | None:
    return next((mark for mark in reversed(marks) if mark is not None), None)


def _axes(sheet: Sheet, places: Sequence[str], x: Scale, y: Scale) -> None:
    for value, text in y.ticks(6):
        sheet.lines("grid", [[(x.start - 4, y.at(value)), (x.end + 4, y.at(value))]], layer=0)
        sheet.text(x.start - 12, y.at(value), text, "tick", anchor="end")
    sheet.lines("axis", [[(x.start - 4, y.start), (x.end + 4, y.start)]], layer=0)
    sheet.lines("ticks", [[(x.at(number), y.start), (x.at(number), y.start + 4)] for number in range(len(places))])
    most = 3 if sheet.narrow else 7
    room = (x.end - x.start) / most
    numbers = sorted({round(step * (len(places) - 1) / max(1, most - 1)) for step in range(most)})
    texts = [(x.at(number), shortened(places[number], room, sheet.size)) for number in numbers]
    for place, text in apart(sheet, texts):
        half = sheet.measure(text) / 2
        sheet.text(min(max(place, half), sheet.width - half), y.start + 14, text, "tick", anchor="middle")


def _series(sheet: Sheet, chart: Lines, places: Sequence[str], number: int, marks: Marks, x: Scale, y: Scale) -> None:
    """One series: band or whiskers, a line that breaks where there is no mark, the marks."""
    style, log = f"s{number + 1}", chart.axis.log
    runs = _runs(marks)
    for run in runs:
        spans = [(x.at(place), [y.at(end) for end in ends(mark, log)]) for place, mark in run]
        if len(run) > 1 and all(span for _, span in spans):
            upper = [(place, min(span)) for place, span in spans]
            sheet.shapes(f"haze {style}", [upper + [(place, max(span)) for place, span in reversed(spans)]])
        elif any(span for _, span in spans):
            sheet.lines("whisker", [[(place, span[0]), (place, span[1])] for place, span in spans if span])
    strokes = [[(x.at(place), y.at(mark.value)) for place, mark in run] for run in runs if len(run) > 1]
    if strokes:
        sheet.lines(f"line {style}", strokes)
    every = [(place, mark) for run in runs for place, mark in run]
    pointed = max(2, POINTED[sheet.narrow] // min(SERIES, len(chart.series)))
    many = len(marks) > _FAINT_FROM[sheet.narrow]
    for place, mark in _evenly(every, pointed):
        plain = mark.tone is Tone.PLAIN
        tone = (" faint" if many else "") if plain else f" {mark.tone.value}"
        words = hint(mark, chart.axis.unit, chart.series[number][0], places[place])
        sheet.dot(f"mark point {style}{tone}", SHAPES[number], x.at(place), y.at(mark.value), 8.0, words)


def _runs(marks: Marks) -> list[list[tuple[int, Mark]]]:
    """Marks without a gap between them, each with its place."""
    runs: list[list[tuple[int, Mark]]] = []
    for place, mark in enumerate(marks):
        if mark is None:
            continue
        if runs and runs[-1][-1][0] == place - 1:
            runs[-1].append((place, mark))
        else:
            runs.append([(place, mark)])
    return runs


def _evenly(marks: list[tuple[int, Mark]], most: int) -> list[tuple[int, Mark]]:
    """At most so many of the marks: those that are meant somehow, and others evenly between first and last."""
    if len(marks) <= most:
        return marks
    kept = {round(number * (len(marks) - 1) / max(1, most - 1)) for number in range(most)}
    return [one for number, one in enumerate(marks) if number in kept or one[1].tone.value != "plain"]


def _last_values(sheet: Sheet, chart: Lines, series: Sequence[tuple[str, Marks]], x: Scale, y: Scale) -> None:
    """What each line came to, at its end; texts that would overlap move apart."""
    found = [(y.at(mark.value), number, mark) for number, (_, marks) in enumerate(series) if (mark := _last(marks))]
    below = y.end - sheet.size
    for height, number, mark in sorted(found, key=lambda one: one[:2]):
        below = max(height, below + sheet.size)
        text = shown(mark.value, chart.axis.unit)
        sheet.text(x.end + _GAP + 2, below, text, f"last s{number + 1}")
