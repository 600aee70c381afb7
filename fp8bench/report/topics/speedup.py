"""How many times as fast as the reference each case is, with its error; and its sustained speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fp8bench import units
from fp8bench.analysis.samples import Sustained, step_samples, sustained_figures, sustained_ratio
from fp8bench.model import Interval, Record
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.report.case_status import Standing, doubts, inverse, show_speed, speed_up, standing, tone_of
from fp8bench.report.columns import Col, case_cols, table, with_figures
from fp8bench.report.elements import Bars, ChartAxis, ChartPoint, Elements, Mark, Scatter, Tables, Text, Texts
from fp8bench.report.page.section import Material, section, titled_panels
from fp8bench.report.panels import Panel, Result, ResultGroup, join_parts, together
from fp8bench.report.topics.tensors import about_tensors, timed_panels
from fp8bench.report.words.naming import figure_words, join_words, many

_SustainedRow = tuple[ResultGroup, Result, Sustained]
_REFERENCE = Interval(1.0, 1.0, 1.0, 1.0)


def sustained_table(panel: Panel) -> Tables:
    rows = panel.known(lambda result: sustained_figures(result.record, result.finding))
    if not rows:
        return

    def speed(row: _SustainedRow) -> str:
        group, result, _ = row
        ratio = sustained_ratio(result.record, group.lead.record if group.lead else None)
        return show_speed(inverse(ratio)) or ("reference" if result.is_reference else units.NONE)

    def turns(row: _SustainedRow) -> str:
        figures = row[2]
        if figures.by_energy_windows:
            return many(figures.turns, "energy window")
        settled = "cannot be told" if figures.settled is None else f"{figures.settled} settled"
        return f"{figures.turns}, {settled}"

    cols: list[Col[_SustainedRow]] = [
        *case_cols(),
        Col("sustained", lambda row: units.seconds(row[2].seconds), number=True),
        Col("sustained speed-up", speed),
        Col("vs slots", lambda row: units.change(row[2].change), number=True),
        Col("clock", lambda row: units.count(row[2].clock, "Hz"), number=True),
        Col("power", lambda row: units.count(row[2].watts, "W"), number=True),
        Col("turns", turns),
    ]
    caption = "sustained: a step in turns of seconds, back to back; settled: clock and temperature stood still before"
    if all(figures.by_energy_windows for _, _, figures in rows):
        in_slots: list[Col[_SustainedRow]] = [
            Col("in slots", lambda row: show_speed(speed_up(row[1]))),
            Col("clock in slots", lambda row: units.count(_slots_clock(row[1]), "Hz"), number=True),
        ]
        cols = [*cols[:-1], *in_slots, cols[-1]]
        caption = "sustained: a step in the seconds of its energy windows, at the clock and power that it then has"
    yield with_figures(table("sustained", caption, cols, rows), (row[:2] for row in rows))


def _slots_clock(result: Result) -> float | None:
    return result.record.timing.clock if result.record.timing is not None else None


def sustained_sentence(panel: Panel) -> Texts:
    """Yields what lasts, and beside it what milliseconds showed: 'fp8 1.33x to 1.63x at 1.44 GHz and 690 W'."""
    cases = [
        (group, result, figures)
        for group, result, figures in panel.known(lambda result: sustained_figures(result.record, result.finding))
        if figures.by_energy_windows
    ]
    lasting, brief = [], []
    for mode in dict.fromkeys(result.mode for _, result, _ in cases):
        of_mode = [case for case in cases if case[1].mode == mode]
        where = join_words(
            filter(
                None,
                (
                    units.span(_numbers(figures.clock for _, _, figures in of_mode), _hertz),
                    units.span(_numbers(figures.watts for _, _, figures in of_mode), _watts),
                ),
            )
        )
        ratios = [
            sustained_ratio(result.record, group.lead.record if group.lead else None) for group, result, _ in of_mode
        ]
        speeds = [speed.point for ratio in ratios if (speed := inverse(ratio)) is not None]
        lasting.append(f"{mode} {units.span(speeds, units.speed_up) or '(reference)'} at {where}")
        in_slots = [speed.point for _, result, _ in of_mode if (speed := speed_up(result)) is not None]
        clocks = units.span(_numbers(_slots_clock(result) for _, result, _ in of_mode), _hertz)
        brief.append(f"{mode} {join_parts(units.span(in_slots, units.speed_up), clocks and f'at {clocks}', by=' ')}")
    if any(result.is_reference for _, result, _ in cases) and len(lasting) > 1:
        yield Text(f"Sustained over seconds: {'; '.join(lasting)}. In slots of milliseconds: {'; '.join(brief)}.")


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _hertz(value: float) -> str:
    return units.count(value, "Hz")


def _watts(value: float) -> str:
    return units.count(value, "W")


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
        if standing(self.result) is Standing.REFERENCE:
            return _REFERENCE
        return speed_up(self.result)

    @property
    def name(self) -> str:
        return join_parts(self.title, self.group.place, self.result.mode, by=" ")


_LEAD = (
    "To the right of 1x is faster than the reference. Each stroke below a bar is one round, in a run of several "
    "sessions of the last one: the further a precision's strokes lie from its reference's, compared with how wide they "
    f"scatter, the surer is the difference. Whiskers are 99% intervals, of fewer than {LEAST_ROUNDS} rounds their "
    "range. Grey ones are in doubt, and emulated cases have no speed."
)


@section("speedup", "Speed-up", 40, lead=_LEAD, repeats=True)
def speedup_section(material: Material) -> Elements:
    cases = list(_find_cases(material))
    yield from _draw_speeds(cases)
    yield from _scatters(cases)


def _find_cases(material: Material) -> Iterator[_Case]:
    for (entry, panel), (title, _) in zip(material.panels(), titled_panels(material), strict=True):
        # Their times are no question of theirs.
        if about_tensors(panel):
            continue
        run = f"{entry.label} {panel.device}"
        reference = panel.reference or "the reference"
        for case in panel.members:
            error = math.nan if case.error is None else case.error
            yield _Case(run, title, reference, *case, panel.error, error)


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
    result = case.result
    speed = case.speed or _REFERENCE
    is_reference = speed is _REFERENCE
    # 1. A sample for each round.
    record = _record_of_verdict(result)
    reference = case.group.lead
    # A case measured apart from the group has its own reference.
    paired_with = record.paired_with or (reference.record.timing if reference is not None else None)
    seconds = step_samples(record.timing) if record.timing is not None else ()
    middle = statistics.median((paired_with and step_samples(paired_with)) or [math.nan])
    samples = tuple(middle / second for second in seconds if second > 0 and middle > 0)
    # 2. The words for hovering.
    words = [f"{result.mode} {units.speed_up(speed.point)} as fast as {case.reference}"]
    if is_reference:
        words = [f"{result.mode}, the reference"]
    words += doubts(result)
    if samples:
        words.append(f"{many(len(seconds), 'round')}, {units.span(seconds, units.seconds)}")
    low = speed.low if math.isfinite(speed.low) and not is_reference else None
    high = speed.high if math.isfinite(speed.high) and not is_reference else None
    return Mark(result.mode, speed.point, low, high, tone_of(result), "; ".join(words), samples=samples)


def _record_of_verdict(result: Result) -> Record:
    """Returns the record with the rounds of its verdict: those after the choice where it was the fastest of several."""
    record = result.record
    fresh = result.record.fresh
    if fresh is None:
        return record
    return replace(record, timing=fresh.timing, paired_with=fresh.reference)


def _scatters(cases: Iterable[_Case]) -> Iterator[Scatter]:
    """A chart for each error metric and reference of a run, because neither errors nor speeds share an axis.

    None if only references and emulations were measured.
    """
    by_axes: dict[tuple[str, str, str], list[_Case]] = {}
    for case in cases:
        # An emulated case stands in the margin by its error alone.
        has_place = case.speed is not None or standing(case.result) is Standing.EMULATED
        if has_place and 0 < case.error < math.inf:
            by_axes.setdefault((case.metric, case.run, case.reference), []).append(case)
    number = 0
    for (metric, *_), spots in by_axes.items():
        if any(speed_up(spot.result) is not None for spot in spots):
            number += 1
            yield _scatter(f"trade-off-{number}", metric, spots)


def _scatter(name: str, metric: str, spots: Sequence[_Case]) -> Scatter:
    titles = list(dict.fromkeys(spot.title for spot in spots))
    by_mode = together((spot.result.mode, spot.error) for spot in spots)
    ranges = [f"{mode} {units.span(errors, units.relative_error)}" for mode, errors in by_mode.items()]
    error = figure_words(metric)
    return Scatter(
        name,
        f"Speed-up against {error}: {join_words(titles)}",
        f"{many(len(spots), 'case')}; further down is more exact. The {error} of {join_words(ranges, 12)}.",
        ChartAxis(f"speed-up over {spots[0].reference}", "x"),
        ChartAxis(error, units.RATIO, log=True),
        tuple(_point(spot, len(titles) > 1) for spot in spots),
        "emulated: no speed" if any(spot.speed is None for spot in spots) else "",
    )


def _point(spot: _Case, with_title: bool) -> ChartPoint:
    result = spot.result
    speed = spot.speed
    label = join_parts(spot.title if with_title else "", spot.group.place, by=" ") or result.mode
    error = f"error {units.relative_error(spot.error)}"
    if speed is None:
        return ChartPoint(result.mode, label, None, spot.error, tone_of(result), f"{error}; emulated: no speed")
    hint = "; ".join([f"{units.speed_up(speed.point)}, {error}", *doubts(result)])
    return ChartPoint(
        result.mode, label, speed.point, spot.error, tone_of(result), hint, x_low=speed.low, x_high=speed.high
    )


@section("sustained", "Sustained", 96)
def sustained_section(material: Material) -> Elements:
    """Each case ran for seconds at a time, in balanced orders, after it had run until clock and temperature stood still
    (or for half as long where the device tells neither). The speed-up is by rounds of turns.
    """
    for title, panel in timed_panels(material):
        for shown in sustained_table(panel):
            yield replace(shown, name=f"sustained-{panel.suite}", caption=title)
