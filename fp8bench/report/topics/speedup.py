"""Draws how many times as fast as its reference each case is. One chart has bars, another shows speed against error.
Also reports sustained speeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.samples import Sustained, compute_sustained_figures, list_step_samples, sustained_ratio
from fp8bench.model import Interval
from fp8bench.model.run import BENCH
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.report.case_status import (
    CaseStatus,
    describe_case_doubts,
    find_case_status,
    invert_ratio,
    show_speed,
    speed_up,
    status_tone,
)
from fp8bench.report.columns import Col, ColumnList, add_figure_columns, case_columns, table
from fp8bench.report.elements import (
    Bars,
    ChartAxis,
    ChartMark,
    ChartPoint,
    Elements,
    Scatter,
    Tables,
    Text,
    Texts,
)
from fp8bench.report.page.section import Material, iterate_titled_panels, section, timed_panels
from fp8bench.report.panels import CaseValue, NamedCase, Panel, Result, join_parts, together
from fp8bench.report.words.naming import join_words, make_figure_heading, many

_SustainedCase = CaseValue[Sustained]
_REFERENCE_SPEED = Interval(1.0, 1.0, 1.0, 1.0)


def sustained_table(panel: Panel) -> Tables:
    rows = panel.find_case_values(lambda result: compute_sustained_figures(result.record, result.finding))
    if not rows:
        return

    def describe_turns(row: _SustainedCase) -> str:
        figures = row.value
        if figures.is_from_energy_windows:
            return many(figures.turns, "energy window")
        settled_turn_count_text = (
            "unknown" if figures.settled_turn_count is None else f"{figures.settled_turn_count} settled"
        )
        return f"{figures.turns}, {settled_turn_count_text}"

    cols: ColumnList[_SustainedCase] = [
        *case_columns(),
        Col("sustained", "value.seconds", show=units.seconds),
        Col("sustained speed-up", _format_sustained_speed),
        Col("vs slots", "value.ratio_to_slots", show=units.change),
        Col("clock", "value.clock", show=_show_hertz),
        Col("power", "value.watts", show=_show_watts),
    ]
    caption = "sustained: a step in turns of seconds, back to back; settled: clock and temperature were steady before"
    # The case also ran in timing slots, so show their speed and clock next to those of the energy windows.
    if all(row.value.is_from_energy_windows for row in rows):
        cols.append(Col("in slots", lambda row: show_speed(speed_up(row.case))))
        cols.append(Col("clock in slots", lambda row: _slot_clock_rate(row.case), show=_show_hertz))
        caption = "sustained: a step in its energy windows, which last for seconds, at their clock and power"
    cols.append(Col("turns", describe_turns))
    yield add_figure_columns(table("sustained", caption, cols, rows), [row.case for row in rows])


def _get_sustained_speed_ratio(case: NamedCase) -> Interval | None:
    return invert_ratio(sustained_ratio(case.record, case.reference_result.record if case.reference_result else None))


def _format_sustained_speed(row: _SustainedCase) -> str:
    return show_speed(_get_sustained_speed_ratio(row.case)) or ("reference" if row.case.is_reference else units.NONE)


def _slot_clock_rate(result: Result) -> float | None:
    return result.record.timing.clock if result.record.timing is not None else None


def describe_sustained_speed(panel: Panel) -> Texts:
    """Yields a sentence that compares the speeds of steps that ran for seconds with those of timed slots, which last
    milliseconds.

    The sentence lists each precision as 'fp8 1.33x to 1.63x at 1.44 GHz and 690 W'.
    """
    # 1. Describe each precision, sustained and in timing slots.
    rows = panel.find_case_values(lambda result: compute_sustained_figures(result.record, result.finding))
    rows_by_mode = together((row.case.mode, row) for row in rows if row.value.is_from_energy_windows)
    sustained_speed_phrases = []
    timed_slot_phrases = []
    for mode, rows_of_mode in rows_by_mode.items():
        cases = [row.case for row in rows_of_mode]
        clock_range = _show_range((row.value.clock for row in rows_of_mode), _show_hertz)
        conditions = join_words(
            filter(None, (clock_range, _show_range((row.value.watts for row in rows_of_mode), _show_watts)))
        )
        speed = _show_speed_range(map(_get_sustained_speed_ratio, cases))
        sustained_speed_phrases.append(f"{mode} {speed or '(reference)'} at {conditions}")
        clock_range = _show_range(map(_slot_clock_rate, cases), _show_hertz)
        timed_slot_phrases.append(
            f"{mode} "
            f"{join_parts(_show_speed_range(map(speed_up, cases)), clock_range and f'at {clock_range}', separator=' ')}"
        )
    # 2. Compare. Without a reference and another precision there is nothing to compare.
    has_reference = any(row.case.is_reference for row in chain.from_iterable(rows_by_mode.values()))
    if has_reference and len(sustained_speed_phrases) > 1:
        yield Text(
            f"Sustained over seconds: {'; '.join(sustained_speed_phrases)}. "
            f"In slots of milliseconds: {'; '.join(timed_slot_phrases)}."
        )


def _show_speed_range(speeds: Iterable[Interval | None]) -> str:
    return units.span([speed.point for speed in speeds if speed is not None], units.speed_up)


def _show_range(values: Iterable[float | None], show: Callable[[float], str]) -> str:
    return units.span([value for value in values if value is not None], show)


_show_hertz = partial(units.count, unit="Hz")
_show_watts = partial(units.count, unit="W")


class _CaseWithTitle(NamedTuple):
    """A case with the title of its panel. `run` names the run and the device that the case was measured in."""

    run: str
    title: str
    case: NamedCase


_SPEEDUP_LEAD_PARAGRAPH = (
    "Right of 1x is faster than the reference. Each stroke below a bar is one round (of the last session, if there "
    "were several): a difference is clear if the strokes of a precision lie apart from those of its reference. "
    f"Whiskers are 99% intervals, with fewer than {LEAST_ROUNDS} rounds their range. The "
    "speed of emulated cases is unknown."
)


@section("speedup", "Speed-up", 40, lead=_SPEEDUP_LEAD_PARAGRAPH, repeats=True)
def speedup_section(material: Material) -> Elements:
    timed_cases = list(_timed_cases(material))
    yield from _speed_charts(timed_cases)
    yield from _error_charts(timed_cases)


def _timed_cases(material: Material) -> Iterator[_CaseWithTitle]:
    for (entry, panel), (title, _) in zip(material.panels(), iterate_titled_panels(material), strict=True):
        if panel.is_timed:
            for case in panel.named_cases:
                yield _CaseWithTitle(f"{entry.label} {panel.device}", title, case)


def _find_speedup_interval(case: NamedCase) -> Interval | None:
    return _REFERENCE_SPEED if find_case_status(case) is CaseStatus.REFERENCE else speed_up(case)


def _name_reference(case: NamedCase) -> str:
    return case.group.reference or "the reference"


def _speed_charts(cases: Sequence[_CaseWithTitle]) -> Iterator[Bars]:
    """Yields a bar chart of speeds for each reference. Groups without a speed are left out."""
    timed_group_ids = {id(row.case.group) for row in cases if speed_up(row.case) is not None}
    charted_cases = [
        row for row in cases if id(row.case.group) in timed_group_ids and _find_speedup_interval(row.case) is not None
    ]
    rows_by_reference = together((_name_reference(row.case), row) for row in charted_cases)
    for chart_number, (reference, rows_of_chart) in enumerate(rows_by_reference.items(), 1):
        yield _speed_chart(
            f"speed-up-{chart_number}" if len(rows_by_reference) > 1 else "speed-up", reference, rows_of_chart
        )


def _speed_chart(name: str, reference: str, cases: Sequence[_CaseWithTitle]) -> Bars:
    suites = list(dict.fromkeys(row.title for row in cases))
    marks_by_group_heading: dict[str, list[ChartMark]] = {}
    for row in cases:
        group_heading = join_parts(row.title if len(suites) > 1 else "", row.case.setting_name, separator=" ")
        marks_by_group_heading.setdefault(group_heading, []).append(_make_case_speed_mark(row.case))
    groups = tuple((group_heading, tuple(marks)) for group_heading, marks in marks_by_group_heading.items())
    run_suffix = " of its run" if len({row.run for row in cases}) > 1 else ""
    title = f"Speed-up over {reference}{run_suffix}: {join_words(suites, len(suites))}"
    axis = ChartAxis(f"speed-up over {reference}", "x", show=units.speed_up)
    return Bars(name, title, "Grey bars are in doubt.", axis, groups)


def _make_case_speed_mark(case: NamedCase) -> ChartMark:
    """Returns the bar of a case. Its value is the case's speed. Its samples are the reference's median time divided
    by the case's time in each round.
    """
    # 1. Take a sample from each round, but for a case that was chosen as the fastest only from rounds after the choice.
    fresh_rounds_timing = case.record.fresh
    timing = fresh_rounds_timing.timing if fresh_rounds_timing is not None else case.record.timing
    reference_timing = fresh_rounds_timing.reference if fresh_rounds_timing is not None else case.record.paired_with
    # A case that was timed later than its group has separate samples of the reference (`paired_with`). All other cases
    # use those in the reference's record.
    if reference_timing is None and case.reference_result is not None:
        reference_timing = case.reference_result.record.timing
    seconds = list_step_samples(timing) if timing is not None else ()
    reference_seconds = statistics.median((reference_timing and list_step_samples(reference_timing)) or [math.nan])
    samples = tuple(
        reference_seconds / seconds_of_round
        for seconds_of_round in seconds
        if seconds_of_round > 0 and reference_seconds > 0
    )
    # 2. Describe the bar for hovering.
    speed = _find_speedup_interval(case) or _REFERENCE_SPEED
    hover_texts = [f"{case.mode} {units.speed_up(speed.point)} as fast as {_name_reference(case)}"]
    if speed is _REFERENCE_SPEED:
        hover_texts = [f"{case.mode}, the reference"]
    hover_texts += describe_case_doubts(case)
    if samples:
        hover_texts.append(f"fastest calls of {many(len(seconds), 'round')}: {units.span(seconds, units.seconds)}")
    has_interval = speed is not _REFERENCE_SPEED and math.isfinite(speed.high)
    low, high = (speed.low, speed.high) if has_interval else (None, None)
    return ChartMark(case.mode, speed.point, low, high, status_tone(case), "; ".join(hover_texts), samples=samples)


def _error_charts(cases: Iterable[_CaseWithTitle]) -> Iterator[Scatter]:
    """Yields scatter charts of speed against error, one for each combination of run, error metric and reference.

    A chart is left out if it would show only references and emulated cases.
    """
    rows_by_axes: dict[tuple[str, str, str], list[_CaseWithTitle]] = {}
    for row in cases:
        case = row.case
        # An emulated case has an error but no speed, so it is drawn in the margin.
        is_drawable = _find_speedup_interval(case) is not None or find_case_status(case) is CaseStatus.EMULATED
        # The axis of errors is logarithmic, so it cannot show an error of 0.
        if is_drawable and case.error_value is not None and 0 < case.error_value < math.inf:
            rows_by_axes.setdefault((case.group.error_metric, row.run, _name_reference(case)), []).append(row)
    rows_by_chart = [
        rows_of_chart
        for rows_of_chart in rows_by_axes.values()
        if any(speed_up(row.case) is not None for row in rows_of_chart)
    ]
    for chart_number, rows_of_chart in enumerate(rows_by_chart, 1):
        yield _make_error_chart(f"trade-off-{chart_number}", rows_of_chart)


def _make_error_chart(name: str, cases: Sequence[_CaseWithTitle]) -> Scatter:
    titles = list(dict.fromkeys(row.title for row in cases))
    points = tuple(_error_point(row, len(titles) > 1) for row in cases)
    errors_by_mode = together((point.series, point.y) for point in points)
    error_range_texts = [
        f"{mode} {units.span(errors, units.relative_error)}" for mode, errors in errors_by_mode.items()
    ]
    error_title = make_figure_heading(cases[0].case.group.error_metric)
    points_text = "of each function" if cases[0].case.suite == BENCH else "by precision"
    return Scatter(
        name,
        f"Speed-up against {error_title}: {join_words(titles)}",
        f"{many(len(cases), 'case')}. Lower points are more exact. The {error_title} {points_text}: "
        f"{join_words(error_range_texts, 12)}.",
        ChartAxis(f"speed-up over {_name_reference(cases[0].case)}", "x"),
        ChartAxis(error_title, units.RATIO),
        points,
        "speed unknown" if any(point.x is None for point in points) else "",
    )


def _error_point(row: _CaseWithTitle, with_title: bool) -> ChartPoint:
    case = row.case
    label = join_parts(row.title if with_title else "", case.setting_name, separator=" ") or case.mode
    error = case.error_value or 0.0
    hint = f"error {units.relative_error(error)}"
    speed = _find_speedup_interval(case)
    if speed is None:
        return ChartPoint(case.mode, label, None, error, status_tone(case), f"{hint}; speed unknown")
    hint = "; ".join([f"{units.speed_up(speed.point)}, {hint}", *describe_case_doubts(case)])
    return ChartPoint(case.mode, label, speed.point, error, status_tone(case), hint, x_low=speed.low, x_high=speed.high)


@section("sustained", "Sustained", 96)
def sustained_section(material: Material) -> Elements:
    """Each case ran for seconds at a time, called a turn, in balanced orders. Before that it ran until its clock and
    temperature had settled, or for half a turn on a device that reports neither. The speed-up compares the turns of a
    round.
    """
    for title, panel in timed_panels(material):
        for speed_table in sustained_table(panel):
            yield replace(speed_table, name=f"sustained-{panel.suite}", caption=title)
