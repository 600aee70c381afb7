"""Reports where the time of a step goes, phase by phase, and in which phases a low precision gains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.findings import BELOW_FLOOR_MARKERS
from fp8bench.model import UNATTRIBUTED, Level, Timing
from fp8bench.model.run import BENCH
from fp8bench.report.columns import Col, ColumnList, case_columns, table
from fp8bench.report.elements import ChartAxis, Elements, Stacks, Table, Tables, Text, Texts, Tone
from fp8bench.report.page.charts import make_stack_chart
from fp8bench.report.page.section import Material, iterate_titled_panels, section, timed_panels
from fp8bench.report.panels import Cases, NamedCase, Panel, together
from fp8bench.report.words.legend import PHASE_TITLES
from fp8bench.report.words.naming import join_words, name_work_outside_phases, phase_sort_key, phase_words

COMPILED_REMARK = (
    "In compiled steps the forward and the backward pass are fused graphs of casts and products, so their time cannot "
    "be split and counts as other."
)


def phases_table(panel: Panel, native_only: bool = False) -> Tables:
    """Yields a table with the time of each case in each phase. `native_only` leaves out emulated cases."""
    cases = [case for case in panel.named_cases if case.best_seconds and not (native_only and case.is_emulated)]
    if not cases:
        return
    used_phases: set[str] = set()
    # The suite BENCH times plain callables, which have no phases.
    if panel.suite != BENCH:
        for case in cases:
            used_phases |= {name for name, seconds in case.finding.phases if seconds or name == UNATTRIBUTED}

    def show_share(case: NamedCase, name: str) -> str:
        if name in case.finding.below_floor:  # the phase is too short to measure
            return "<"
        seconds = dict(case.finding.phases).get(name)
        # A step without this phase shows a dash. Unattributed time may be 0%.
        if seconds or (name == UNATTRIBUTED and seconds is not None):
            return units.percent(seconds / (case.best_seconds or math.inf), 0)
        return units.NONE

    cols: ColumnList[NamedCase] = [Col("Time of a step", "mode")] if native_only else [*case_columns(case_path="")]
    cols.append(Col("total", show_step_time, number=True))
    for name in sorted(used_phases, key=phase_sort_key):
        cols.append(Col(PHASE_TITLES.get(name, name), partial(show_share, name=name), number=True))
    yield table("phases", "" if native_only else "time of a step", cols, cases)


def show_step_time(case: NamedCase) -> str:
    """Returns the time of a step. The time of an emulation is marked, because it must not be read as a speed."""
    return f"{Level.EMULATED} " * case.is_emulated + units.seconds(case.best_seconds)


@section("phases", "Where the time goes", 60)
def phases_section(material: Material) -> Elements:
    """Each bar is the best case of one step, divided into its phases. Other is time outside of all phases."""
    panels = []
    used_phases = {UNATTRIBUTED}
    for title, panel in timed_panels(material):
        cases = [case for case in panel.named_cases if 0 < (case.best_seconds or 0.0) < math.inf]
        panels.append((title, cases))
        for case in cases:
            used_phases |= {name for name, seconds in case.finding.phases if seconds}
    # All charts of the page have the same parts, so that each phase has one colour.
    parts = {name: phase_words(name) for name in sorted(used_phases, key=phase_sort_key)}
    for title, cases in panels:
        yield from _make_suite_phase_elements(title, cases, parts)


def _make_suite_phase_elements(title: str, cases: Cases, parts: Mapping[str, str]) -> Elements:
    native_cases = [case for case in cases if not case.is_emulated]
    if native_cases:
        yield _make_phases_chart(f"{title}: a step by phase", native_cases, parts)
    timelines: list[Stacks] = []
    cases_by_setting = together((case.setting_name, case) for case in native_cases)
    for setting, cases_of_setting in cases_by_setting.items():
        timelines += _make_phase_timelines(f"{title} {setting}".rstrip(), cases_of_setting, folded=bool(timelines))
    yield from timelines[:_MAX_TIMELINES]
    num_hidden_timelines = len(timelines) - _MAX_TIMELINES
    if num_hidden_timelines > 0:
        yield Text(f"{title}: timelines of {num_hidden_timelines} more settings are left out.")
    yield from _phase_notes(title, cases)


def _make_phases_chart(title: str, cases: Cases, parts: Mapping[str, str]) -> Stacks:
    stack_rows = [(case.name, case.best_seconds or 0.0, dict(case.finding.phases)) for case in cases]
    name = f"phases-{cases[0].suite}"
    axis = ChartAxis("best case of a step", "s")
    description = "The best case of a step, cut into its phases."
    return make_stack_chart(name, title, description, axis, "share of the step", parts, stack_rows)


def _phase_notes(title: str, cases: Cases) -> Texts:
    case_names_by_phase: dict[str, list[str]] = {}
    for case in cases:
        for phase in case.finding.below_floor:
            if phase != UNATTRIBUTED:
                case_names_by_phase.setdefault(phase_words(phase), []).append(case.name)
    if case_names_by_phase:
        phases_text = "; ".join(f"{phase} in {join_words(names)}" for phase, names in case_names_by_phase.items())
        min_phase_length_text = f"less than {BELOW_FLOOR_MARKERS} times the cost of marking it"
        yield Text(f"{title}: too short to measure ({min_phase_length_text}): {phases_text}.", Tone.DOUBT)
    # Readers would look for the phases of a compiled graph, so explain why it has none.
    if any(dict(case.record.case.params).get("compile", "no") != "no" for case in cases):
        yield Text(COMPILED_REMARK)


# The phases of one step in the order in which they ran, with their seconds.
StepPhases = list[tuple[str, float]]
# The page has at most this many timelines of a suite.
_MAX_TIMELINES = 2
# A step with fewer phases than this gets no timeline, because it is a single operation with its casts.
_MIN_PHASES = 3
_SINGLE_STEP_DESCRIPTION = (
    "One timed step of each precision, the one of median length, with its phases in the order in which they ran."
)
_VARYING_STEPS_DESCRIPTION = (
    "One timed step of each precision, the one of median length. Steps differed in their phases, so only sums were "
    "stored: this is not the order of a step."
)


def _make_phase_timelines(title: str, cases: Cases, folded: bool) -> Iterator[Stacks]:
    """Yields a timeline with one step of each case. If the run has no samples of phases, yields nothing."""
    # 1. Choose one step of each case, and collect the phases that occur.
    steps = []
    description = _SINGLE_STEP_DESCRIPTION
    used_phases: set[str] = set()
    for case in cases:
        timing = case.record.timing
        median_step_phases = _find_median_step(timing) if timing is not None else []
        if timing is not None and median_step_phases:
            steps.append((case.mode, median_step_phases))
            used_phases.update(phase for phase, _ in median_step_phases)
            if timing.varying:
                description = _VARYING_STEPS_DESCRIPTION
    if len(used_phases - {UNATTRIBUTED}) < _MIN_PHASES:
        return
    # 2. Collect each step's phases in order, and the total time of each phase in the step.
    phases = sorted(used_phases, key=phase_sort_key)
    rows = []
    phase_pieces = []
    for mode, median_step_phases in steps:
        seconds_by_phase = dict.fromkeys(phases, 0.0)
        for phase, seconds in median_step_phases:
            seconds_by_phase[phase] += seconds
        rows.append((f"{mode}, {units.seconds(sum(seconds_by_phase.values()))}", tuple(seconds_by_phase.values())))
        phase_pieces.append(tuple((phases.index(phase), seconds) for phase, seconds in median_step_phases))
    yield Stacks(
        f"timeline-{cases[0].suite}",
        f"{title}: one step in time",
        description,
        ChartAxis("time since the step began", "s"),
        tuple(map(phase_words, phases)),
        tuple(rows),
        tuple(phase_pieces),
        folded=folded,
    )


def _find_median_step(timing: Timing) -> StepPhases:
    """Returns the phases of the timed step with the median duration as (phase, seconds), in the order in which they
    ran.

    If steps had different phases, the run has only the sum of each phase, and phases are in their usual order.
    """
    calls_of_slots = list(chain.from_iterable(slot.calls_ns for slot in timing.slots))
    if not calls_of_slots:
        return []
    # Take a single step, because a mean over steps would mix different orders of phases.
    median_call_nanoseconds = sorted(calls_of_slots, key=sum)[(len(calls_of_slots) - 1) // 2]
    phases_in_order: StepPhases = []
    for phase, nanoseconds in zip(timing.segments.phases, median_call_nanoseconds, strict=True):
        if phases_in_order and phases_in_order[-1][0] == phase:
            phases_in_order[-1] = phase, phases_in_order[-1][1] + 1e-9 * nanoseconds
        elif nanoseconds > 0:
            phases_in_order.append((phase, 1e-9 * nanoseconds))
    return phases_in_order


_MAX_GAINS_TABLES = 12


class _GainRow(NamedTuple):
    """The time of one phase, or of the whole step, in a case and in its reference. `interval` is shown only for a
    phase.
    """

    name: str
    seconds: float
    reference_seconds: float
    tone: Tone = Tone.STRONG
    interval: str = units.NONE

    @property
    def saved_seconds(self) -> float:
        return self.reference_seconds - self.seconds

    @property
    def speed(self) -> float | None:
        """The reference's time divided by the time of the case, or None if one of these is not positive."""
        if self.seconds > 0 and self.reference_seconds > 0:
            return self.reference_seconds / self.seconds
        return None


@section("gains", "Where it gains", 70)
def gains_section(material: Material) -> Elements:
    """Each table shows the time that each phase of a native precision saves (+) or costs (-) compared with the
    reference. The times are from the same rounds as the verdict, and the phases sum to the step. Other tables scale
    the phases of a case to its speed-up, so their times differ a little. Grey phases do not differ clearly. Runs of
    few rounds have no intervals, and are left out.
    """
    table_elements = []
    for title, panel in iterate_titled_panels(material):
        cases = [case for case in panel.named_cases if _has_enough_phase_gains(case)]
        table_elements += [_make_phase_gains_table(title, panel, case) for case in cases]
    yield from table_elements[:_MAX_GAINS_TABLES]
    if len(table_elements) > _MAX_GAINS_TABLES:
        yield Text(
            f"{len(table_elements) - _MAX_GAINS_TABLES} more cases are left out; the run's CSV has all their phases."
        )


def _has_enough_phase_gains(case: NamedCase) -> bool:
    return sum(gain.phase != UNATTRIBUTED for gain in case.finding.gains) >= _MIN_PHASES


def _make_phase_gains_table(title: str, panel: Panel, case: NamedCase) -> Table:
    finding = case.finding
    rows = []
    for gain in sorted(finding.gains, key=lambda gain: phase_sort_key(gain.phase)):
        # In a model of the user, the time outside of phases is that of the passes. The row is named after them.
        work_outside_phases = name_work_outside_phases(case) if gain.phase == UNATTRIBUTED else ""
        tone = Tone.PLAIN if gain.is_clear else Tone.DOUBT
        interval = f"{_format_saved_seconds(gain.low)} to {_format_saved_seconds(gain.high)}"
        name = work_outside_phases or phase_words(gain.phase)
        rows.append(_GainRow(name, gain.seconds, gain.reference_seconds, tone, interval))
    rows.append(_GainRow("step", sum(row.seconds for row in rows), sum(row.reference_seconds for row in rows)))
    speed_column_hint = "the reference's time over this, above 1x is faster"
    cols: ColumnList[_GainRow] = [
        Col("phase", "name", tone=attrgetter("tone")),
        Col(panel.reference, lambda row: row.reference_seconds or None, unit="s"),
        Col(case.mode, lambda row: row.seconds or None, unit="s"),
        Col("saved", "saved_seconds", show=_format_saved_seconds, unit="s", tone=attrgetter("tone")),
        Col("interval", "interval", hint="99% for all phases together", number=True),
        Col("speed-up", "speed", show=units.speed_up, unit="x", hint=speed_column_hint),
    ]
    labels_text = f"; labelled {', '.join(finding.labels)}" if finding.doubtful else ""
    caption = f"{title} {case.name} against {panel.reference}{labels_text}"
    return table(f"gains-{case.suite}-{case.mode}", caption, cols, rows)


def _format_saved_seconds(seconds: float) -> str:
    """Formats saved seconds with a sign, as '+3.00 ms', '-600 us' or '0 s'."""
    return f"{'+' if seconds > 0 else '-' if seconds < 0 else ''}{units.seconds(abs(seconds))}"
