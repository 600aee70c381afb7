"""How many times as fast as the reference each case is, with its error; and its sustained speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.samples import Sustained, step_samples, sustained_figures, sustained_ratio
from fp8bench.model import Interval
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.report.case_status import Standing, doubts, inverse, show_speed, speed_up, standing, tone_of
from fp8bench.report.columns import Col, Cols, case_cols, table, with_figures
from fp8bench.report.elements import Bars, ChartAxis, ChartPoint, Elements, Mark, Scatter, Tables, Text, Texts
from fp8bench.report.page.section import Material, section, titled_panels
from fp8bench.report.panels import CaseValue, NamedCase, Panel, Result, join_parts, together
from fp8bench.report.topics.tensors import about_tensors, timed_panels
from fp8bench.report.words.naming import figure_words, join_words, many

_SustainedRow = CaseValue[Sustained]
_REFERENCE = Interval(1.0, 1.0, 1.0, 1.0)


def sustained_table(panel: Panel) -> Tables:
    rows = panel.find_values(lambda result: sustained_figures(result.record, result.finding))
    if not rows:
        return

    def turns(row: _SustainedRow) -> str:
        figures = row.value
        if figures.by_energy_windows:
            return many(figures.turns, "energy window")
        settled = "unknown" if figures.settled is None else f"{figures.settled} settled"
        return f"{figures.turns}, {settled}"

    cols: Cols[_SustainedRow] = [
        *case_cols(),
        Col("sustained", "value.seconds", show=units.seconds),
        Col("sustained speed-up", _sustained_speed),
        Col("vs slots", "value.change", show=units.change),
        Col("clock", "value.clock", show=_hertz),
        Col("power", "value.watts", show=_watts),
    ]
    caption = "sustained: a step in turns of seconds, back to back; settled: clock and temperature stood still before"
    if all(row.value.by_energy_windows for row in rows):
        cols.append(Col("in slots", lambda row: show_speed(speed_up(row.case))))
        cols.append(Col("clock in slots", lambda row: _slots_clock(row.case), show=_hertz))
        caption = "sustained: a step in the seconds of its energy windows, at the clock and power that it then has"
    cols.append(Col("turns", turns))
    yield with_figures(table("sustained", caption, cols, rows), [row.case for row in rows])


def _sustained_ratio(case: NamedCase) -> Interval | None:
    return inverse(sustained_ratio(case.record, case.lead.record if case.lead else None))


def _sustained_speed(row: _SustainedRow) -> str:
    return show_speed(_sustained_ratio(row.case)) or ("reference" if row.case.is_reference else units.NONE)


def _slots_clock(result: Result) -> float | None:
    return result.record.timing.clock if result.record.timing is not None else None


def sustained_sentence(panel: Panel) -> Texts:
    """Yields the speed over seconds, and that of milliseconds: 'fp8 1.33x to 1.63x at 1.44 GHz and 690 W'."""
    rows = panel.find_values(lambda result: sustained_figures(result.record, result.finding))
    by_mode = together((row.case.mode, row) for row in rows if row.value.by_energy_windows)
    sustained = []
    brief = []
    for mode, members in by_mode.items():
        cases = [row.case for row in members]
        clocks = _span((row.value.clock for row in members), _hertz)
        where = join_words(filter(None, (clocks, _span((row.value.watts for row in members), _watts))))
        speed = _span_speeds(map(_sustained_ratio, cases))
        sustained.append(f"{mode} {speed or '(reference)'} at {where}")
        clocks = _span(map(_slots_clock, cases), _hertz)
        brief.append(f"{mode} {join_parts(_span_speeds(map(speed_up, cases)), clocks and f'at {clocks}', by=' ')}")
    has_reference = any(row.case.is_reference for row in chain.from_iterable(by_mode.values()))
    if has_reference and len(sustained) > 1:
        yield Text(f"Sustained over seconds: {'; '.join(sustained)}. In slots of milliseconds: {'; '.join(brief)}.")


def _span_speeds(speeds: Iterable[Interval | None]) -> str:
    return units.span([speed.point for speed in speeds if speed is not None], units.speed_up)


def _span(values: Iterable[float | None], show: Callable[[float], str]) -> str:
    return units.span([value for value in values if value is not None], show)


def _hertz(value: float) -> str:
    return units.count(value, "Hz")


def _watts(value: float) -> str:
    return units.count(value, "W")


class _Spot(NamedTuple):
    """A case with its run and the title of its panel."""

    run: str
    title: str
    case: NamedCase


_LEAD = (
    "Right of 1x is faster than the reference. Each stroke below a bar is one round (of the last session, if there "
    "were several): a difference is clear if the strokes of a precision lie apart from those of its reference. "
    f"Whiskers are 99% intervals, with fewer than {LEAST_ROUNDS} rounds their range. Grey bars are in doubt, and "
    "emulated cases have no speed."
)


@section("speedup", "Speed-up", 40, lead=_LEAD, repeats=True)
def speedup_section(material: Material) -> Elements:
    spots = list(_find_spots(material))
    yield from _draw_speeds(spots)
    yield from _scatters(spots)


def _find_spots(material: Material) -> Iterator[_Spot]:
    for (entry, panel), (title, _) in zip(material.panels(), titled_panels(material), strict=True):
        # Suites about tensors compare errors, not times.
        if not about_tensors(panel):
            for case in panel.members:
                yield _Spot(f"{entry.label} {panel.device}", title, case)


def _find_speed(case: NamedCase) -> Interval | None:
    return _REFERENCE if standing(case) is Standing.REFERENCE else speed_up(case)


def _name_reference(case: NamedCase) -> str:
    return case.group.reference or "the reference"


def _draw_speeds(spots: Sequence[_Spot]) -> Iterator[Bars]:
    """Yields a chart for each reference, with the groups that have a speed."""
    timed = {id(spot.case.group) for spot in spots if speed_up(spot.case) is not None}
    shown = [spot for spot in spots if id(spot.case.group) in timed and _find_speed(spot.case) is not None]
    by_reference = together((_name_reference(spot.case), spot) for spot in shown)
    for number, (reference, members) in enumerate(by_reference.items(), 1):
        yield _draw_chart(f"speed-up-{number}" if len(by_reference) > 1 else "speed-up", reference, members)


def _draw_chart(name: str, reference: str, spots: Sequence[_Spot]) -> Bars:
    suites = list(dict.fromkeys(spot.title for spot in spots))
    marks_by_group: dict[str, list[Mark]] = {}
    for spot in spots:
        heading = join_parts(spot.title if len(suites) > 1 else "", spot.case.place, by=" ")
        marks_by_group.setdefault(heading, []).append(_mark(spot.case))
    groups = tuple((heading, tuple(marks)) for heading, marks in marks_by_group.items())
    of_run = " of its run" if len({spot.run for spot in spots}) > 1 else ""
    title = f"Speed-up over {reference}{of_run}: {join_words(suites, len(suites))}"
    axis = ChartAxis(f"speed-up over {reference}", "x", show=units.speed_up)
    return Bars(name, title, "Grey bars are in doubt.", axis, groups)


def _mark(case: NamedCase) -> Mark:
    """Returns its speed-up with a sample for each round, over the middle round of the reference."""
    # 1. A sample for each round. A case chosen as the fastest of several is judged by rounds after the choice.
    fresh = case.record.fresh
    timing = fresh.timing if fresh is not None else case.record.timing
    paired_with = fresh.reference if fresh is not None else case.record.paired_with
    # A case measured apart from the group has a separate reference.
    if paired_with is None and case.lead is not None:
        paired_with = case.lead.record.timing
    seconds = step_samples(timing) if timing is not None else ()
    middle = statistics.median((paired_with and step_samples(paired_with)) or [math.nan])
    samples = tuple(middle / second for second in seconds if second > 0 and middle > 0)
    # 2. The words for hovering.
    speed = _find_speed(case) or _REFERENCE
    words = [f"{case.mode} {units.speed_up(speed.point)} as fast as {_name_reference(case)}"]
    low: float | None = None
    high: float | None = None
    if speed is _REFERENCE:
        words = [f"{case.mode}, the reference"]
    elif math.isfinite(speed.high):
        low = speed.low
        high = speed.high
    words += doubts(case)
    if samples:
        words.append(f"fastest calls of {many(len(seconds), 'round')}: {units.span(seconds, units.seconds)}")
    return Mark(case.mode, speed.point, low, high, tone_of(case), "; ".join(words), samples=samples)


def _scatters(spots: Iterable[_Spot]) -> Iterator[Scatter]:
    """Yields a chart for each error metric and reference of a run, because these cannot share an axis.

    Nothing if only references and emulations were measured.
    """
    by_axes: dict[tuple[str, str, str], list[_Spot]] = {}
    for spot in spots:
        case = spot.case
        # An emulated case has an error but no speed: it is drawn in the margin.
        has_place = _find_speed(case) is not None or standing(case) is Standing.EMULATED
        if has_place and case.error is not None and 0 < case.error < math.inf:
            by_axes.setdefault((case.group.error, spot.run, _name_reference(case)), []).append(spot)
    charts = [members for members in by_axes.values() if any(speed_up(spot.case) is not None for spot in members)]
    for number, members in enumerate(charts, 1):
        yield _scatter(f"trade-off-{number}", members)


def _scatter(name: str, spots: Sequence[_Spot]) -> Scatter:
    titles = list(dict.fromkeys(spot.title for spot in spots))
    points = tuple(_point(spot, len(titles) > 1) for spot in spots)
    errors_by_mode = together((point.series, point.y) for point in points)
    ranges = [f"{mode} {units.span(errors, units.relative_error)}" for mode, errors in errors_by_mode.items()]
    error = figure_words(spots[0].case.group.error)
    return Scatter(
        name,
        f"Speed-up against {error}: {join_words(titles)}",
        f"{many(len(spots), 'case')}; further down is more exact. The {error} of {join_words(ranges, 12)}.",
        ChartAxis(f"speed-up over {_name_reference(spots[0].case)}", "x"),
        ChartAxis(error, units.RATIO),
        points,
        "emulated: no speed" if any(point.x is None for point in points) else "",
    )


def _point(spot: _Spot, with_title: bool) -> ChartPoint:
    case = spot.case
    label = join_parts(spot.title if with_title else "", case.place, by=" ") or case.mode
    error = case.error or 0.0
    words = f"error {units.relative_error(error)}"
    speed = _find_speed(case)
    if speed is None:
        return ChartPoint(case.mode, label, None, error, tone_of(case), f"{words}; emulated: no speed")
    words = "; ".join([f"{units.speed_up(speed.point)}, {words}", *doubts(case)])
    return ChartPoint(case.mode, label, speed.point, error, tone_of(case), words, x_low=speed.low, x_high=speed.high)


@section("sustained", "Sustained", 96)
def sustained_section(material: Material) -> Elements:
    """Each case ran for seconds at a time, in balanced orders, after its clock and temperature had settled, or after
    half of that time if the device reports neither. The speed-up compares the turns of a round.
    """
    for title, panel in timed_panels(material):
        for shown in sustained_table(panel):
            yield replace(shown, name=f"sustained-{panel.suite}", caption=title)
