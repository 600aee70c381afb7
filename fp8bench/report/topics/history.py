"""The same cases in other runs, commit by commit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from fp8bench import units
from fp8bench.model import Figure
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import ChartAxis, Element, Field, Lines, Mark, Table, Text, Tone
from fp8bench.report.page.section import Material, PastSeries, section
from fp8bench.report.panels import together
from fp8bench.report.terminal.history import value as shown
from fp8bench.report.words.naming import figure_words, listed, many

TIME = "time"
_ENERGY = "energy"
_COMMIT_LETTERS = 8
# More lines in one chart cannot be told apart.
_MOST_LINES = 6
# Metrics that change as the step's time does.
_PER_WORK = "seconds_per_"
# A figure, and its value, which is a number.
_Told = tuple[Figure, float]
NONE_YET = "No earlier commits of these cases are kept: the next run on another commit begins a line."


@section("history", "History", 110)
def history_section(material: Material) -> Iterator[Element]:
    """The same cases on the same machine, commit by commit: the median over all rounds of a commit's runs. Intervals
    leave out how much runs differ from each other, so changes have no verdict.
    """
    if not any(entry.run.environment.get("commit") for entry in material.entries):
        return
    known = [series for series in material.past if _values(series)]
    if not any(len(_values(series)) > 1 for series in known):
        yield Text(NONE_YET)
        return
    yield from _charts(known)
    yield _table(known)
    yield from _notes(known)


def _values(series: PastSeries) -> list[_Told]:
    return [(figure, figure.value) for figure in series.figures if figure.value is not None]


def _charts(known: Sequence[PastSeries]) -> Iterator[Lines]:
    """Times by suite and machine, and by case if one chart would have too many lines; emulations have none."""
    timed = [
        series
        for series in known
        if series.trend.series.metric == TIME and not series.emulated and len(_values(series)) > 1
    ]
    machines = {series.machine for series in timed}
    by_suite = together(((series.trend.series.workload, series.machine), series) for series in timed)
    for (suite, machine), members in by_suite.items():
        title = f"{suite} on {machine}" if len(machines) > 1 else suite
        by_place = together((member.place if len(members) > _MOST_LINES else "", member) for member in members)
        for place, lines in by_place.items():
            yield _lines(f"{title} {place}".strip(), suite, lines)


def _lines(title: str, suite: str, members: Sequence[PastSeries]) -> Lines:
    """Each series over its own oldest figure, so that lengths may differ; by date, unkept figures last."""
    order: dict[str, tuple[bool, int]] = {}
    for series in members:
        date = 0
        for figure, _ in _values(series):
            date = date if figure.date is None else figure.date  # without a date it stands with the one before it
            order[_place(series, figure)] = figure in series.unkept, date
    places = tuple(sorted(order, key=order.__getitem__))
    alone = len({series.place for series in members}) == 1
    lines = tuple(
        (series.precision if alone else f"{series.place} {series.precision}".strip(), _marks(series, places))
        for series in members
    )
    last = []
    for name, marks in lines:
        values = [mark.value for mark in marks if mark is not None]
        last.append(f"{name} is at {units.ratio(values[-1] if values else None)}")
    description = f"Each line is over its own oldest figure: {listed(last)}."
    axis = ChartAxis("time over that of the oldest commit", "x")
    return Lines(f"history-{suite}", f"{title}: time, commit by commit", description, places, axis, lines)


def _place(series: PastSeries, figure: Figure) -> str:
    return figure.commit[:_COMMIT_LETTERS] + "+" * (figure in series.unkept)


def _when(series: PastSeries, figure: Figure) -> str:
    return units.moment(figure.date) + ", with uncommitted changes" * (figure in series.unkept)


def _tone(series: PastSeries, *figures: Figure) -> Tone:
    rough = any(figure.hasty or figure in series.unkept for figure in figures)
    return Tone.DOUBT if rough else Tone.PLAIN


def _marks(series: PastSeries, places: Sequence[str]) -> tuple[Mark | None, ...]:
    figures = _values(series)
    first, by_place = figures[0][1], dict[str, Mark]()
    for figure, value in figures:
        if 0 < first < math.inf and 0 < value < math.inf:
            low, high = ((end / first if end is not None else None) for end in (figure.low, figure.high))
            rough = "; a few rounds only" if figure.hasty else ""
            hint = f"{_when(series, figure)}: {shown(series.trend, value)}, {many(figure.samples, 'sample')}{rough}"
            place = _place(series, figure)
            by_place[place] = Mark(place, value / first, low, high, _tone(series, figure), hint)
    return tuple(map(by_place.get, places))


_Row = tuple[PastSeries, _Told | None, _Told, float | None]


def _table(known: Sequence[PastSeries]) -> Table:
    """The largest changes first, emulations last."""
    told: list[_Row] = []
    for series in known:
        before, last = [None, *_values(series)][-2:]
        assert last is not None  # a series without a figure is not shown
        pair = (before[1], last[1]) if before is not None else ()
        ratio = last[1] / pair[0] if pair and all(0 < value < math.inf for value in pair) else None
        told += [] if series.trend.series.metric.startswith(_PER_WORK) else [(series, before, last, ratio)]
    places = together((series.trend.series.workload, series.place) for series, *_ in told)

    def case(row: _Row) -> str:
        series, suite = row[0], row[0].trend.series.workload
        place = series.place if len({*places[suite]}) > 1 else ""
        return " ".join(filter(None, (suite, place, series.precision, "(emulated)" * series.emulated)))

    def cell(series: PastSeries, told: _Told | None) -> Field | None:
        return Field(shown(series.trend, told[1]), told[1]) if told is not None else None

    cols: list[Col[_Row]] = [
        Col("case", case, tone=lambda row: Tone.DOUBT if row[0].emulated else Tone.PLAIN),
        Col("metric", lambda row: Field(
            figure_words(row[0].trend.series.metric), hint=f"{row[0].trend.name} on {row[0].machine}")),
        Col("previous", lambda row: cell(row[0], row[1]), number=True),
        Col("last", lambda row: cell(row[0], row[2]), number=True),
        Col("change", lambda row: row[3], number=True, show=units.change,
            tone=lambda row: _tone(row[0], *(told[0] for told in row[1:3] if told)) if row[3] else Tone.PLAIN,
            hint="of the figure itself, from previous to last; less is better"),
        Col("last commit", lambda row: Field(_place(row[0], row[2][0]), hint=_when(row[0], row[2][0]))),
        Col("commits", lambda row: len(_values(row[0])), number=True, show=str),
    ]  # fmt: skip
    ordered = sorted(told, key=lambda row: (row[0].emulated, -abs(math.log(row[3] or 1.0))))
    return table("history-of-all", "The last two figures of every series, the largest changes first", cols, ordered)


def _notes(known: Sequence[PastSeries]) -> Iterator[Element]:
    lost = sum(series.incomparable for series in known)
    if lost:
        joules = any(series.incomparable and series.trend.series.metric == _ENERGY for series in known)
        others = "other versions of a suite or the method" + (", or of another source of joules," if joules else "")
        yield Text(f"{many(lost, 'older figure')} of {others} do not compare.")
    figures = list(chain.from_iterable(map(_values, known)))
    if any(figure.hasty for figure, _ in figures):
        yield Text("Grey figures are of --quick runs or of a few rounds: rough ones.", Tone.DOUBT)
    if any(figure.value is not None for figure in chain.from_iterable(series.unkept for series in known)):
        yield Text("+ after a commit: the files differed from it, so that these are not its numbers.", Tone.DOUBT)
    if any(series.emulated for series in known):
        yield Text("Emulated cases are in the table only: their time is a cost, which compares with itself.")
