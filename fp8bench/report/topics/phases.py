"""Where the time of each step goes, phase by phase, and where low precision gains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.findings import BELOW_FLOOR_MARKERS
from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Level, PhaseGain, Timing
from fp8bench.model.run import BENCH
from fp8bench.report.case_status import is_emulated
from fp8bench.report.columns import Col, case_cols, table
from fp8bench.report.elements import ChartAxis, Element, Field, Stacks, Table, Text, Tone
from fp8bench.report.page.charts import has_time, phase_parts, stack_parts
from fp8bench.report.page.section import Material, section, titled_panels
from fp8bench.report.panels import (
    NamedCase,
    Panel,
    Result,
    ResultGroup,
    phases_of,
    together,
)
from fp8bench.report.topics.tensors import timed_panels
from fp8bench.report.words.legend import PHASE_TITLES
from fp8bench.report.words.naming import join_words, phase_order, phase_words

COMPILED = (
    "With compile=yes the forward and the backward pass are one graph each, in which casts and products are fused: no "
    "split of their time would be true, so that it counts as other."
)


def phases_table(panel: Panel, brief: bool = False) -> Iterator[Table]:
    """Yields the time of each case by phase; a `brief` table leaves out emulated cases, whose time is no speed."""
    measured = [(group, result) for group, result in panel.members if result.best]
    if brief:
        measured = [row for row in measured if not is_emulated(row[1])]
    if not measured:
        return
    present: set[str] = set()
    for _, result in measured:
        present |= {name for name, seconds in phases_of(result) if seconds or name == UNATTRIBUTED}
    names = sorted(present, key=lambda name: CELL_PHASES.index(name) if name in CELL_PHASES else len(CELL_PHASES))
    if panel.case.workload == BENCH:  # callables have neither phases nor a declared amount of work
        names = []
    cols: list[Col[tuple[ResultGroup, Result]]] = [
        *((Col("Time of a step", lambda row: row[1].mode),) if brief else case_cols()),
        # An emulation's time must not be read as a speed.
        Col("total", lambda row: f"{Level.EMULATED} " * is_emulated(row[1]) + units.seconds(row[1].best), number=True),
        *(Col(PHASE_TITLES.get(name, name), partial(_share, name=name), number=True) for name in names),
    ]
    yield table("phases", "" if brief else "time of a step", cols, measured)


def _share(row: tuple[ResultGroup, Result], name: str) -> str:
    """A share of the step; '<' below the clock's floor, '-' without such a phase."""
    finding, best = row[1].finding, row[1].best
    assert finding is not None and best
    seconds = dict(phases_of(row[1])).get(name)
    share = seconds / best if seconds is not None and (seconds or name == UNATTRIBUTED) else None
    return "<" if name in finding.below_floor else units.percent(share, 0)


@section("phases", "Where the time goes", 60)
def phases_section(material: Material) -> Iterator[Element]:
    """Each bar is the best case of one step, cut into its phases. Other is the time under none of them."""
    panels = []
    for title, panel in timed_panels(material):
        panels.append((title, [case for case in panel.members if has_time(case.result)]))
    every = chain.from_iterable(cases for _, cases in panels)
    parts = phase_parts(case.result for case in every)
    for title, cases in panels:
        yield from _show_suite(title, cases, parts)


def _show_suite(title: str, cases: Sequence[NamedCase], parts: Mapping[str, str]) -> Iterator[Element]:
    native = [case for case in cases if not is_emulated(case.result)]
    if native:
        yield _chart(f"{title}: a step by phase", native, parts)
    by_place = together((case.place, case) for case in native)
    timelines: list[Stacks] = []
    for place, alike in by_place.items():
        timelines += _draw_timeline(f"{title} {place}".rstrip(), alike, folded=bool(timelines))
    yield from timelines[:_MOST_TIMELINES]
    if len(timelines) > _MOST_TIMELINES:
        yield Text(
            f"{title}: {len(timelines) - _MOST_TIMELINES} more settings have no timeline here, for want of room."
        )
    yield from _notes(title, cases)


def _phases(case: NamedCase) -> dict[str, float]:
    return {name: seconds if 0 < seconds < math.inf else 0.0 for name, seconds in phases_of(case.result)}


def _chart(title: str, cases: Sequence[NamedCase], parts: Mapping[str, str]) -> Stacks:
    rows = [(case.name, case.result.best or 0.0, _phases(case)) for case in cases]
    name, axis = f"phases-{cases[0].result.record.case.workload}", ChartAxis("best case of a step", "s")
    return stack_parts(
        name, title, "The best case of a step, cut into its phases.", axis, "share of the step", parts, rows
    )


def _notes(title: str, cases: Sequence[NamedCase]) -> Iterator[Text]:
    below: dict[str, list[str]] = {}
    for case in cases:
        for phase in case.result.finding.below_floor if case.result.finding else ():
            below.setdefault(phase_words(phase), []).append(case.name)
    if below:
        words = "; ".join(f"{phase} in {join_words(names)}" for phase, names in below.items())
        floor = f"less than {BELOW_FLOOR_MARKERS} times that"
        yield Text(f"{title}, too short to be told from the cost of marking it ({floor}): {words}.", Tone.DOUBT)
    if any(("compile", "yes") in case.result.record.case.params for case in cases):
        yield Text(COMPILED)


# The most timelines of a suite.
_MOST_TIMELINES = 2
# A step with fewer phases is an operation and its casts.
_LEAST_PHASES = 3


def _draw_timeline(title: str, cases: Sequence[NamedCase], folded: bool) -> Iterator[Stacks]:
    """Yields one step of each case on one axis of time; nothing for runs that kept no samples of a step's parts."""
    steps = []
    for case in cases:
        timing = case.result.record.timing
        step = _find_middle_step(timing) if timing is not None else ()
        if timing is not None and step:
            steps.append((case, timing, step))
    phases = {phase for phase, _ in chain.from_iterable(step for *_, step in steps)}
    if len(phases - {UNATTRIBUTED}) < _LEAST_PHASES:
        return
    ordered = sorted(phases, key=phase_order)
    rows, pieces = [], []
    for case, _, step in steps:
        sums = dict.fromkeys(ordered, 0.0)
        for phase, seconds in step:
            sums[phase] += seconds
        rows.append((f"{case.result.mode}, {units.seconds(sum(sums.values()))}", tuple(sums.values())))
        pieces.append(tuple((ordered.index(phase), seconds) for phase, seconds in step))
    name = f"timeline-{cases[0].result.record.case.workload}"
    words, axis = _describe_order([timing for _, timing, _ in steps]), ChartAxis("time since the step began", "s")
    parts = tuple(map(phase_words, ordered))
    yield Stacks(name, f"{title}: one step in time", words, axis, parts, tuple(rows), tuple(pieces), folded=folded)


def _find_middle_step(timing: Timing) -> list[tuple[str, float]]:
    """Returns the phases of the timed step of middle length, as they followed each other, in seconds.

    A step that varied has one sum for each phase, in our order of phases.
    """
    calls = list(chain.from_iterable(slot.calls_ns for slot in timing.slots))
    if not calls:
        return []
    step = sorted(calls, key=sum)[(len(calls) - 1) // 2]
    pieces: list[tuple[str, float]] = []
    for phase, nanoseconds in zip(timing.segments.phases, step, strict=True):
        if pieces and pieces[-1][0] == phase:
            pieces[-1] = phase, pieces[-1][1] + 1e-9 * nanoseconds
        elif nanoseconds > 0:
            pieces.append((phase, 1e-9 * nanoseconds))
    return pieces


def _describe_order(timings: Sequence[Timing]) -> str:
    words = "One timed step of each precision, the one of middle length. "
    if any(timing.varying for timing in timings):
        return f"{words}Steps differed in their phases, so only sums were kept: this is not the order of a step."
    stretches = [len({*timing.segments.blocks}) for timing in timings]
    return (
        f"{words}Phases follow each other as they ran. The step is cut into {units.span(stretches, str)} stretches: a "
        "phase that comes twice within one is drawn once."
    )


_STEP = "step"
_MOST_TABLES = 12


class _Row(NamedTuple):
    """One phase, or the whole step, in a case and its reference. `gain` is None for the step."""

    phase: str
    seconds: float
    reference_seconds: float
    gain: PhaseGain | None = None

    @property
    def saved(self) -> float:
        return self.reference_seconds - self.seconds

    @property
    def tone(self) -> Tone:
        if self.gain is None:
            return Tone.STRONG
        return Tone.PLAIN if self.gain.is_clear else Tone.DOUBT

    def show_interval(self) -> str:
        if self.gain is None:
            return units.NONE
        return f"{_show_saving(self.gain.low)} to {_show_saving(self.gain.high)}"


@section("gains", "Where it gains", 70)
def gains_section(material: Material) -> Iterator[Element]:
    """The time that each phase of a native precision's step saves against the reference (+) or costs (-), from the same
    rounds as the verdict: the phases sum to the step. Grey phases do not differ clearly. Runs of few rounds have no
    intervals, and are left out.
    """
    tables: list[Table] = []
    for title, panel in titled_panels(material):
        cases = [case for case in panel.members if len(_marked_gains(case)) >= _LEAST_PHASES]
        tables += [_gains_table(title, panel, case) for case in cases]
    yield from tables[:_MOST_TABLES]
    if len(tables) > _MOST_TABLES:
        yield Text(f"{len(tables) - _MOST_TABLES} more cases are not told here; the run's CSV has all their phases.")


def _marked_gains(case: NamedCase) -> list[PhaseGain]:
    finding = case.result.finding
    return [gain for gain in finding.gains if gain.phase != UNATTRIBUTED] if finding is not None else []


def _gains_table(title: str, panel: Panel, case: NamedCase) -> Table:
    finding, mode = case.result.finding, case.result.mode
    assert finding is not None
    gains = sorted(finding.gains, key=lambda gain: phase_order(gain.phase))
    rows = [_Row(gain.phase, gain.seconds, gain.reference_seconds, gain) for gain in gains]
    whole = sum(row.seconds for row in rows)
    rows.append(_Row(_STEP, whole, sum(row.reference_seconds for row in rows)))

    def ratio(above: float, below: float) -> float | None:
        return above / below if above > 0 and below > 0 and math.isfinite(above / below) else None

    cols: list[Col[_Row]] = [
        Col("phase", lambda row: Field(phase_words(row.phase), tone=row.tone)),
        Col(panel.reference, lambda row: row.reference_seconds or None, number=True, unit="s"),
        Col(mode, lambda row: row.seconds or None, number=True, unit="s"),
        Col("saved", lambda row: row.saved, number=True, show=_show_saving, unit="s", tone=lambda row: row.tone),
        Col("interval", lambda row: row.show_interval(), hint="99% for all phases together", number=True),
        Col(
            "speed-up",
            lambda row: ratio(row.reference_seconds, row.seconds),
            number=True,
            show=units.speed_up,
            unit="x",
            hint="the reference's time over this, above 1x is faster",
        ),
    ]
    labels = f"; labelled {', '.join(finding.labels)}" if finding.doubtful else ""
    name = f"gains-{case.result.record.case.workload}-{mode}"
    return table(name, f"{title} {case.name} against {panel.reference}{labels}", cols, rows)


def _show_saving(seconds: float) -> str:
    """'+3.00 ms', '-600 us'; '0 s'."""
    return f"{'+' if seconds > 0 else '-' if seconds < 0 else ''}{units.seconds(abs(seconds))}"
