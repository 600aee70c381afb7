"""Where the time of each step goes, phase by phase, and where low precision gains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.findings import BELOW_FLOOR_MARKERS
from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Finding, Level, PhaseGain, Timing
from fp8bench.model.run import BENCH
from fp8bench.report.columns import Col, Cols, case_cols, table
from fp8bench.report.elements import ChartAxis, Elements, Field, Stacks, Table, Tables, Text, Texts, Tone
from fp8bench.report.page.charts import has_time, phase_parts, stack_parts
from fp8bench.report.page.section import Material, section, titled_panels
from fp8bench.report.panels import Cases, NamedCase, Panel, Result, phases_of, together
from fp8bench.report.topics.tensors import timed_panels
from fp8bench.report.words.legend import PHASE_TITLES
from fp8bench.report.words.naming import join_words, phase_order, phase_words

COMPILED = (
    "With compile=yes the forward and the backward pass are one graph each, in which casts and products are fused, so "
    "their time cannot be split and counts as other."
)


def phases_table(panel: Panel, brief: bool = False) -> Tables:
    """Yields the time of each case by phase; a `brief` table leaves out emulated cases, whose time means nothing."""
    cases = [case for case in panel.members if case.best and not (brief and case.is_emulated)]
    if not cases:
        return
    present: set[str] = set()
    if panel.suite != BENCH:  # callables have neither phases nor a declared amount of work
        for case in cases:
            present |= _shares(case).keys()
    # A suite's custom phases are last.
    names = sorted(present, key=lambda name: CELL_PHASES.index(name) if name in CELL_PHASES else len(CELL_PHASES))

    def seconds(case: NamedCase) -> str:
        # An emulation's time must not be read as a speed.
        return f"{Level.EMULATED} " * case.is_emulated + units.seconds(case.best)

    def share(case: NamedCase, name: str) -> str:
        is_below = case.finding is not None and name in case.finding.below_floor
        if is_below:
            return "<"
        return units.percent(_shares(case).get(name), 0)

    cols: Cols[NamedCase] = [Col("Time of a step", "mode")] if brief else [*case_cols(path="")]
    cols.append(Col("total", seconds, number=True))
    cols += [Col(PHASE_TITLES.get(name, name), partial(share, name=name), number=True) for name in names]
    yield table("phases", "" if brief else "time of a step", cols, cases)


def _shares(case: NamedCase) -> dict[str, float]:
    """Returns shares of the step by phase, without phases of no time, but with the unattributed rest."""
    best = case.best or math.inf
    return {name: seconds / best for name, seconds in phases_of(case) if seconds or name == UNATTRIBUTED}


@section("phases", "Where the time goes", 60)
def phases_section(material: Material) -> Elements:
    """Each bar is the best case of one step, cut into its phases. Other is the time under none of them."""
    panels = []
    results: list[Result] = []
    for title, panel in timed_panels(material):
        cases = [case for case in panel.members if has_time(case)]
        results += cases
        panels.append((title, cases))
    parts = phase_parts(results)
    for title, cases in panels:
        yield from _show_suite(title, cases, parts)


def _show_suite(title: str, cases: Cases, parts: Mapping[str, str]) -> Elements:
    native = [case for case in cases if not case.is_emulated]
    if native:
        yield _chart(f"{title}: a step by phase", native, parts)
    timelines: list[Stacks] = []
    for place, members in together((case.place, case) for case in native).items():
        timelines += _draw_timeline(f"{title} {place}".rstrip(), members, folded=bool(timelines))
    yield from timelines[:_MOST_TIMELINES]
    num_hidden = len(timelines) - _MOST_TIMELINES
    if num_hidden > 0:
        yield Text(f"{title}: timelines of {num_hidden} more settings are left out.")
    yield from _notes(title, cases)


def _phases(case: NamedCase) -> dict[str, float]:
    return {name: seconds if 0 < seconds < math.inf else 0.0 for name, seconds in phases_of(case)}


def _chart(title: str, cases: Cases, parts: Mapping[str, str]) -> Stacks:
    bars = [(case.name, case.best or 0.0, _phases(case)) for case in cases]
    name = f"phases-{cases[0].suite}"
    axis = ChartAxis("best case of a step", "s")
    words = "The best case of a step, cut into its phases."
    return stack_parts(name, title, words, axis, "share of the step", parts, bars)


def _notes(title: str, cases: Cases) -> Texts:
    below: dict[str, list[str]] = {}
    for case in cases:
        phases = case.finding.below_floor if case.finding else ()
        for phase in set(phases) - {UNATTRIBUTED}:
            below.setdefault(phase_words(phase), []).append(case.name)
    if below:
        words = "; ".join(f"{phase} in {join_words(names)}" for phase, names in below.items())
        floor = f"less than {BELOW_FLOOR_MARKERS} times the cost of marking it"
        yield Text(f"{title}: too short to measure ({floor}): {words}.", Tone.DOUBT)
    # Readers would look for phases that no compiled graph has.
    if any(("compile", "yes") in case.record.case.params for case in cases):
        yield Text(COMPILED)


# Phases with seconds, as they follow each other.
Steps = list[tuple[str, float]]
# The most timelines of a suite.
_MOST_TIMELINES = 2
# A step with fewer phases is an operation and its casts.
_LEAST_PHASES = 3


def _draw_timeline(title: str, cases: Cases, folded: bool) -> Iterator[Stacks]:
    """Yields one step of each case on one axis of time; nothing if a run has no samples of a step's phases."""
    # 1. Choose a step of each case, and collect their phases.
    steps = []
    timings = []
    present: set[str] = set()
    for case in cases:
        timing = case.record.timing
        step = _find_middle_step(timing) if timing is not None else []
        if timing is not None and step:
            timings.append(timing)
            steps.append((case.mode, step))
            present.update(phase for phase, _ in step)
    if len(present - {UNATTRIBUTED}) < _LEAST_PHASES:
        return
    # 2. Each as a row of pieces, with the sum of each phase.
    phases = sorted(present, key=phase_order)
    rows = []
    pieces = []
    for mode, step in steps:
        sums = dict.fromkeys(phases, 0.0)
        for phase, seconds in step:
            sums[phase] += seconds
        rows.append((f"{mode}, {units.seconds(sum(sums.values()))}", tuple(sums.values())))
        pieces.append(tuple((phases.index(phase), seconds) for phase, seconds in step))
    yield Stacks(
        f"timeline-{cases[0].suite}",
        f"{title}: one step in time",
        _describe_order(timings),
        ChartAxis("time since the step began", "s"),
        tuple(map(phase_words, phases)),
        tuple(rows),
        tuple(pieces),
        folded=folded,
    )


def _find_middle_step(timing: Timing) -> Steps:
    """Returns the phases of the timed step of median length, in the order in which they ran, in seconds.

    If steps differed in their phases, there is one sum for each phase, in the usual order.
    """
    calls = list(chain.from_iterable(slot.calls_ns for slot in timing.slots))
    if not calls:
        return []
    # A mean of several steps would mix their orders of phases, so one median step is drawn.
    step = sorted(calls, key=sum)[(len(calls) - 1) // 2]
    pieces: Steps = []
    for phase, nanoseconds in zip(timing.segments.phases, step, strict=True):
        if pieces and pieces[-1][0] == phase:
            pieces[-1] = phase, pieces[-1][1] + 1e-9 * nanoseconds
        elif nanoseconds > 0:
            pieces.append((phase, 1e-9 * nanoseconds))
    return pieces


def _describe_order(timings: Sequence[Timing]) -> str:
    words = "One timed step of each precision, the one of median length"
    if any(timing.varying for timing in timings):
        return f"{words}. Steps differed in their phases, so only sums were stored: this is not the order of a step."
    return f"{words}, with its phases in the order in which they ran."


_STEP = "step"
_MOST_TABLES = 12


class _Row(NamedTuple):
    """One phase, or the whole step, in a case and its reference. `gain` is None for the step."""

    phase: str
    seconds: float
    reference_seconds: float
    gain: PhaseGain | None = None

    @property
    def saving(self) -> float:
        return self.reference_seconds - self.seconds

    @property
    def speed(self) -> float | None:
        """The reference's time over the case's; None if either is zero or negative."""
        if self.seconds <= 0 or self.reference_seconds <= 0:
            return None
        ratio = self.reference_seconds / self.seconds
        if ratio < math.inf:
            return ratio
        return None

    @property
    def tone(self) -> Tone:
        if self.gain is None:
            return Tone.STRONG
        if self.gain.is_clear:
            return Tone.PLAIN
        return Tone.DOUBT

    @property
    def interval(self) -> str:
        if self.gain is None:
            return units.NONE
        return f"{_show_saving(self.gain.low)} to {_show_saving(self.gain.high)}"


@section("gains", "Where it gains", 70)
def gains_section(material: Material) -> Elements:
    """The time that each phase of a native precision saves (+) or costs (-) compared with the reference, from the same
    rounds as the verdict: the phases sum to the step. Grey phases do not differ clearly. Runs of few rounds have no
    intervals, and are left out.
    """
    tables: list[Table] = []
    for title, panel in titled_panels(material):
        for case, finding in panel.find_values(attrgetter("finding")):
            num_phases = sum(gain.phase != UNATTRIBUTED for gain in finding.gains)
            if num_phases >= _LEAST_PHASES:
                tables.append(_gains_table(title, panel, case, finding))
    yield from tables[:_MOST_TABLES]
    if len(tables) > _MOST_TABLES:
        yield Text(f"{len(tables) - _MOST_TABLES} more cases are left out; the run's CSV has all their phases.")


def _gains_table(title: str, panel: Panel, case: NamedCase, finding: Finding) -> Table:
    gains = sorted(finding.gains, key=lambda gain: phase_order(gain.phase))
    rows = [_Row(gain.phase, gain.seconds, gain.reference_seconds, gain) for gain in gains]
    rows.append(_Row(_STEP, sum(row.seconds for row in rows), sum(row.reference_seconds for row in rows)))
    speed = "the reference's time over this, above 1x is faster"
    cols: Cols[_Row] = [
        Col("phase", lambda row: Field(phase_words(row.phase), tone=row.tone)),
        Col(panel.reference, lambda row: row.reference_seconds or None, unit="s"),
        Col(case.mode, lambda row: row.seconds or None, unit="s"),
        Col("saved", "saving", show=_show_saving, unit="s", tone=attrgetter("tone")),
        Col("interval", "interval", hint="99% for all phases together", number=True),
        Col("speed-up", "speed", show=units.speed_up, unit="x", hint=speed),
    ]
    labels = f"; labelled {', '.join(finding.labels)}" if finding.doubtful else ""
    caption = f"{title} {case.name} against {panel.reference}{labels}"
    return table(f"gains-{case.suite}-{case.mode}", caption, cols, rows)


def _show_saving(seconds: float) -> str:
    """Formats '+3.00 ms', '-600 us' or '0 s'."""
    return f"{'+' if seconds > 0 else '-' if seconds < 0 else ''}{units.seconds(abs(seconds))}"
