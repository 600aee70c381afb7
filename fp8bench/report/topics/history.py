"""What the same cases came to before, commit by commit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.model.specs import spec_of
from fp8bench.report.elements import Axis, Column, Element, Field, Lines, Mark, Table, Text, Tone
from fp8bench.report.material import Material, PastFigure, PastSeries
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import together
from fp8bench.report.words.naming import many

TIME = "time"
_ENERGY = "energy"
_COMMIT_LETTERS = 8
# More lines than this in one chart cannot be told apart.
_MOST_LINES = 6
# The step's time for some amount of work: it changes as the time does.
_PER_WORK = "seconds_per_"
NONE_YET = "No earlier runs of these cases are kept: the next one on another commit begins a line."


@sections.register("history")
class History(Section):
    """The series of the cases at hand, over commits; nothing where the runs are of no commit."""

    name = "history"
    title = "History"
    lead = (
        "The same cases on the same machine, commit by commit: the median over all rounds of a commit's runs. "
        "Intervals do not hold what differs from run to run, so that changes have no verdict."
    )
    rank = 110

    def elements(self, material: Material) -> Iterator[Element]:
        if not any(entry.run.environment.get("commit") for entry in material.entries):
            return
        known = [series for series in material.past if _values(series)]
        if not any(len(_values(series)) > 1 for series in known):
            yield Text(NONE_YET)
            return
        yield from _charts(known)
        yield _table(known)
        yield from _notes(known)


def _values(series: PastSeries) -> list[PastFigure]:
    """The figures that are numbers."""
    return [figure for figure in series.figures if math.isfinite(figure.value)]


def _charts(known: Sequence[PastSeries]) -> Iterator[Lines]:
    """Time by suite and machine; by case too, where one chart would have too many lines. Emulations have no speed."""
    timed = [series for series in known if series.metric == TIME and not series.emulated and len(_values(series)) > 1]
    machines = {series.machine for series in timed}
    for (suite, machine), members in together(((one.suite, one.machine), one) for one in timed).items():
        title = f"{suite} on {machine}" if len(machines) > 1 else suite
        by_place = together((one.place if len(members) > _MOST_LINES else "", one) for one in members)
        for place, lines in by_place.items():
            yield _lines(f"{title} {place}".strip(), suite, lines)


def _lines(title: str, suite: str, members: Sequence[PastSeries]) -> Lines:
    """Each series over its own oldest figure, so that series of any length compare; by date, what is unkept last."""
    figures = {_place(figure): figure for series in members for figure in _values(series)}
    places = tuple(sorted(figures, key=lambda place: (figures[place].unkept, figures[place].order)))
    alone = len({series.place for series in members}) == 1
    lines = tuple(
        (series.precision if alone else f"{series.place} {series.precision}".strip(), _marks(series, places))
        for series in members
    )
    last = [(name, [mark.value for mark in marks if mark is not None]) for name, marks in lines]
    said = [f"{name} is at {units.ratio(values[-1] if values else None)}" for name, values in last]
    description = f"Each line is over its own oldest figure: {', '.join(said[:4])}."
    axis = Axis("time over that of the oldest commit", "x")
    return Lines(f"history-{suite}", f"{title}: time, commit by commit", description, places, axis, lines)


def _place(figure: PastFigure) -> str:
    return figure.commit[:_COMMIT_LETTERS] + ("+" if figure.unkept else "")


def _marks(series: PastSeries, places: Sequence[str]) -> tuple[Mark | None, ...]:
    figures = _values(series)
    first = figures[0].value
    by_place = {_place(figure): _mark(series, figure, first) for figure in figures}
    return tuple(by_place.get(place) for place in places)


def _mark(series: PastSeries, figure: PastFigure, first: float) -> Mark | None:
    """A figure over the oldest; None where that is no length of time."""
    if first <= 0 or figure.value <= 0:
        return None
    low, high = ((end / first if end is not None else None) for end in (figure.low, figure.high))
    rough = "; a few rounds only" if figure.hasty else ""
    hint = f"{figure.when}: {_show(series, figure.value)}, {many(figure.samples, 'sample')}{rough}"
    return Mark(_place(figure), figure.value / first, low, high, Tone.DOUBT if _rough(figure) else Tone.PLAIN, hint)


def _rough(figure: PastFigure) -> bool:
    return figure.hasty or figure.unkept


def _show(series: PastSeries, value: float) -> str:
    return spec_of(series.metric).shown(value, series.unit or units.RATIO)


def _table(known: Sequence[PastSeries]) -> Table:
    """Where figures changed most stands first; emulations last."""
    columns = (
        Column("case"), Column("metric"), Column("previous", number=True), Column("last", number=True),
        Column("change", number=True, hint="of the figure itself, from previous to last; less is better"),
        Column("last commit"), Column("commits", number=True),
    )  # fmt: skip
    told = [series for series in known if not series.metric.startswith(_PER_WORK)]
    places = together((series.suite, series.place) for series in told)
    ordered = sorted(told, key=lambda series: (series.emulated, -abs(math.log(_last_two(series)[2] or 1.0))))
    rows = tuple(_row(series, series.place if len({*places[series.suite]}) > 1 else "") for series in ordered)
    return Table("history-of-all", "The last two figures of every series, the largest changes first", columns, rows)


def _last_two(series: PastSeries) -> tuple[PastFigure | None, PastFigure, float | None]:
    """The figure before the last one, the last one, and their ratio; None where there is none."""
    before, last = [None, *_values(series)][-2:]
    assert last is not None  # a series without a figure is not shown
    return before, last, last.value / before.value if before and before.value > 0 and last.value > 0 else None


def _row(series: PastSeries, place: str) -> tuple[Field, ...]:
    before, last, change = _last_two(series)
    rough = _rough(last) or (before is not None and _rough(before))
    words = " ".join(word for word in (series.suite, place, series.precision) if word)
    return (
        Field(f"{words} (emulated)" if series.emulated else words, tone=Tone.DOUBT if series.emulated else Tone.PLAIN),
        Field(series.metric, hint=f"{series.name} on {series.machine}"),
        Field(_show(series, before.value), before.value) if before is not None else Field(units.NONE),
        Field(_show(series, last.value), last.value),
        Field(units.change(change), change, Tone.DOUBT if rough and change else Tone.PLAIN),
        Field(_place(last), hint=last.when),
        Field(str(len(_values(series))), float(len(_values(series)))),
    )


def _notes(known: Sequence[PastSeries]) -> Iterator[Element]:
    lost = sum(series.incomparable for series in known)
    if lost:
        joules = any(series.incomparable and series.metric == _ENERGY for series in known)
        others = "other versions of a suite or the method" + (", or of another source of joules," if joules else "")
        yield Text(f"{many(lost, 'older figure')} of {others} do not compare.")
    figures = [figure for series in known for figure in _values(series)]
    if any(figure.hasty for figure in figures):
        yield Text("Grey figures are of --quick runs or of a few rounds: rough ones.", Tone.DOUBT)
    if any(figure.unkept for figure in figures):
        yield Text("+ after a commit: the files differed from it, so that these are not its numbers.", Tone.DOUBT)
    if any(series.emulated for series in known):
        yield Text("Emulated cases are in the table only: their time is a cost, which compares with itself.")
