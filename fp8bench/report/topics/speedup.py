"""How many times as fast as the reference each case is, beside its error; and what it sustains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from fp8bench import units
from fp8bench.analysis.samples import Sustained, step_samples, sustained_figures, sustained_ratio
from fp8bench.model import Interval, Record
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.report.case_status import Standing, doubts, inverse, show_speed, speed_up, standing, tone_of
from fp8bench.report.columns import Col, case_cols, table, with_figures
from fp8bench.report.elements import Bars, ChartAxis, ChartPoint, Element, Mark, Scatter, Table
from fp8bench.report.page.section import Material, section, titled_panels
from fp8bench.report.panels import Panel, Result, ResultGroup, together, value_of
from fp8bench.report.topics.tensors import about_tensors, timed_panels
from fp8bench.report.words.naming import figure_words, join_words, many

_REFERENCE = Interval(1.0, 1.0, 1.0, 1.0)


def sustained_table(panel: Panel) -> Iterator[Table]:
    known = panel.known(lambda result: sustained_figures(result.record, result.finding))
    if not known:
        return

    def speed(row: tuple[ResultGroup, Result, Sustained]) -> str:
        ratio = sustained_ratio(row[1].record, row[0].lead.record if row[0].lead else None)
        return show_speed(inverse(ratio)) or ("reference" if row[1].record.is_reference else units.NONE)

    cols: list[Col[tuple[ResultGroup, Result, Sustained]]] = [
        *case_cols(),
        Col("sustained", lambda row: units.seconds(row[2].seconds), number=True),
        Col("sustained speed-up", speed),
        Col("vs slots", lambda row: units.change(row[2].change), number=True),
        Col("clock", lambda row: units.count(row[2].clock, "Hz"), number=True),
        Col("power", lambda row: units.count(row[2].watts, "W"), number=True),
        Col(
            "turns",
            lambda row: (
                f"{row[2].turns}, " + ("cannot be told" if row[2].settled is None else f"{row[2].settled} settled")
            ),
        ),
    ]
    yield with_figures(
        table(
            "sustained",
            "sustained: a step in turns of seconds, back to back; settled: clock and temperature stood still before",
            cols,
            known,
        ),
        (row[:2] for row in known),
    )


@dataclass(frozen=True)
class _Case:
    """A case with its run, title, setting and reference; `error` is NaN if there is none."""

    run: str
    title: str
    reference: str
    group: ResultGroup
    result: Result
    metric: str
    error: float

    @property
    def speed(self) -> Interval | None:
        return _REFERENCE if standing(self.result) is Standing.REFERENCE else speed_up(self.result)

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.title, self.group.place, self.result.mode) if part)


_LEAD = (
    "To the right of 1x is faster than the reference. Each stroke below a bar is one round, in a run of several "
    "sessions of the last one: the further a precision's strokes lie from its reference's, compared with how wide they "
    f"scatter, the surer is the difference. Whiskers are 99% intervals, of fewer than {LEAST_ROUNDS} rounds their "
    "range. Grey ones are in doubt, and emulated cases have no speed."
)


@section("speedup", "Speed-up", 40, lead=_LEAD, repeats=True)
def speedup_section(material: Material) -> Iterator[Element]:
    cases = list(_find_cases(material))
    yield from _draw_speeds(cases)
    yield from _scatters(cases)


def _find_cases(material: Material) -> Iterator[_Case]:
    for (entry, panel), (title, _) in zip(material.panels(), titled_panels(material), strict=True):
        metric = "" if about_tensors(panel) else panel.error
        for group, result in () if about_tensors(panel) else panel.members:
            error = value_of(result.record.measurement(metric)) if metric else None
            yield _Case(
                f"{entry.label} {panel.case.device}",
                title,
                panel.reference or "the reference",
                group,
                result,
                metric,
                math.nan if error is None else error,
            )


def _draw_speeds(cases: Sequence[_Case]) -> Iterator[Bars]:
    """Yields a chart for each reference: of every group with a speed the reference and the cases that have one."""
    timed = {id(case.group) for case in cases if speed_up(case.result) is not None}
    shown = [case for case in cases if id(case.group) in timed and case.speed is not None]
    by_reference = together((case.reference, case) for case in shown)
    for number, members in enumerate(by_reference.values(), 1):
        yield _draw_chart(f"speed-up-{number}" if len(by_reference) > 1 else "speed-up", members)


def _draw_chart(name: str, cases: Sequence[_Case]) -> Bars:
    suites = list(dict.fromkeys(case.title for case in cases))
    by_group: dict[tuple[str, str], list[Mark]] = {}
    for case in cases:
        suite = case.title if len(suites) > 1 else ""
        by_group.setdefault((suite, case.group.place), []).append(_mark(case))
    groups = tuple((" ".join(filter(None, heading)), tuple(marks)) for heading, marks in by_group.items())
    of_run = " of its run" if len({case.run for case in cases}) > 1 else ""
    title = f"Speed-up over {cases[0].reference}{of_run}: {join_words(suites, len(suites))}"
    axis = ChartAxis(f"speed-up over {cases[0].reference}", "x", show=units.speed_up)
    return Bars(name, title, "Grey ones are in doubt.", axis, groups)


def _mark(case: _Case) -> Mark:
    """Returns its speed-up with a sample for each round, over the middle round of the reference it was held against."""
    result, speed = case.result, case.speed or _REFERENCE
    record, lead = _record_of_verdict(result), case.group.lead
    against = record.paired_with or (lead.record.timing if lead is not None else None)
    seconds = step_samples(record.timing) if record.timing is not None else ()
    middle = statistics.median((against and step_samples(against)) or [math.nan])
    samples = tuple(middle / second for second in seconds if second > 0 and middle > 0)
    words = [f"{result.mode} {units.speed_up(speed.point)} as fast as {case.reference}"]
    if speed is _REFERENCE:
        words = [f"{result.mode}, the reference"]
    words += doubts(result)
    if samples:
        words.append(f"{many(len(seconds), 'round')}, {units.span(seconds, units.seconds)}")
    low, high = (
        bound if speed is not _REFERENCE and math.isfinite(bound) else None for bound in (speed.low, speed.high)
    )
    return Mark(result.mode, speed.point, low, high, tone_of(result), "; ".join(words), samples=samples)


def _record_of_verdict(result: Result) -> Record:
    """Returns the record with the rounds of its verdict: those after the choice where it was the fastest of several."""
    record, fresh = result.record, result.record.fresh
    return record if fresh is None else replace(record, timing=fresh.timing, paired_with=fresh.reference)


def _scatters(cases: Iterable[_Case]) -> Iterator[Scatter]:
    """A chart for each error metric and reference of a run, because neither errors nor speeds share an axis.

    None if only references and emulations were measured.
    """
    by_axes = together(
        ((case.metric, case.run, case.reference), case)
        for case in cases
        if 0 < case.error < math.inf and (case.speed is not None or standing(case.result) is Standing.EMULATED)
    )
    numbers = count(1)
    for (metric, *_), spots in by_axes.items():
        if any(speed_up(spot.result) is not None for spot in spots):
            yield _scatter(f"trade-off-{next(numbers)}", metric, spots)


def _scatter(name: str, metric: str, spots: Sequence[_Case]) -> Scatter:
    titles = list(dict.fromkeys(spot.title for spot in spots))
    by_mode = together((spot.result.mode, spot.error) for spot in spots)
    ranges = [f"{mode} {units.span(errors, units.relative_error)}" for mode, errors in by_mode.items()]
    error = figure_words(metric)
    return Scatter(
        name,
        f"Speed-up against {error}: {join_words(titles)}",
        f"{many(len(spots), 'case')}, further down is more exact. {error}: {join_words(ranges, 12)}.",
        ChartAxis(f"speed-up over {spots[0].reference}", "x"),
        ChartAxis(error, units.RATIO, log=True),
        tuple(_point(spot, len(titles) > 1) for spot in spots),
        "emulated: no speed" if any(spot.speed is None for spot in spots) else "",
    )


def _point(spot: _Case, titled: bool) -> ChartPoint:
    label = " ".join(part for part in (spot.title if titled else "", spot.group.place) if part) or spot.result.mode
    x = spot.speed.point if spot.speed is not None else None
    speed = f"{units.speed_up(x)}, " if x is not None else ""
    words = [f"{speed}error {units.relative_error(spot.error)}"]
    words += ["emulated: no speed"] if x is None else doubts(spot.result)
    low, high = (spot.speed.low, spot.speed.high) if spot.speed is not None else (None, None)
    return ChartPoint(
        spot.result.mode, label, x, spot.error, tone_of(spot.result), "; ".join(words), x_low=low, x_high=high
    )


@section("sustained", "Sustained", 96)
def sustained_section(material: Material) -> Iterator[Element]:
    """Each case ran for seconds at a time, in balanced orders, after it had run until clock and temperature stood still
    (or for half as long where the device tells neither). The speed-up is by rounds of turns.
    """
    for title, panel in timed_panels(material):
        for shown in sustained_table(panel):
            yield replace(shown, name=f"sustained-{panel.case.workload}", caption=title)
