"""Where the time of each step goes, phase by phase, and where low precision gains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.findings import BELOW_FLOOR_MARKERS
from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Level, PhaseGain
from fp8bench.report.case_status import emulated
from fp8bench.report.columns import Col, case_cols, table
from fp8bench.report.elements import ChartAxis, Element, Field, Stacks, Table, Text, Tone
from fp8bench.report.page.charts import has_time, phase_parts, stacked
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
from fp8bench.report.words.naming import listed, phase_order, phase_words

# If one phase takes more of a step, a sentence says so, and the chart is folded.
_NEARLY_ALL = 0.9
COMPILED = (
    "With compile=yes the forward and the backward pass are one graph each, in which casts and products are fused: no "
    "split of their time would be true, so that it counts as other."
)


def phases_table(panel: Panel, brief: bool = False) -> Iterator[Table]:
    """Yields the time of each case by phase; a `brief` table leaves out emulated cases, whose time is no speed."""
    measured = [(group, result) for group, result in panel.members if result.best]
    if brief:
        measured = [row for row in measured if not emulated(row[1])]
    if not measured:
        return
    present = {name for _, result in measured for name, seconds in phases_of(result) if seconds or name == UNATTRIBUTED}
    names = sorted(present, key=lambda name: CELL_PHASES.index(name) if name in CELL_PHASES else len(CELL_PHASES))
    cols: list[Col[tuple[ResultGroup, Result]]] = [
        *((Col("Time of a step", lambda row: row[1].mode),) if brief else case_cols()),
        # An emulation's time must not be read as a speed.
        Col("total", lambda row: f"{Level.EMULATED} " * emulated(row[1]) + units.seconds(row[1].best), number=True),
        *(Col(PHASE_TITLES.get(name, name), partial(_share, name=name), number=True) for name in names),
    ]  # fmt: skip
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
    panels = [
        (title, [case for case in panel.members if has_time(case.result)]) for title, panel in timed_panels(material)
    ]
    parts = phase_parts(case.result for _, cases in panels for case in cases)
    for title, cases in panels:
        yield from _suite(title, cases, parts)


def _suite(title: str, cases: Sequence[NamedCase], parts: Mapping[str, str]) -> Iterator[Element]:
    native = [case for case in cases if not emulated(case.result)]
    cost = [case for case in cases if emulated(case.result)]
    if native:
        plain = all(
            max(_phases(case).values(), default=0.0) > _NEARLY_ALL * (case.result.best or 0.0) for case in native
        )
        yield from [Text(f"{title}: {_description(native)}")] if plain else []
        yield _chart("phases", f"{title}: a step by phase", native, parts, folded=plain)
    if cost:
        yield _chart("emulation", f"{title}: what emulating costs, by phase (no speed)", cost, parts, folded=True)
    yield from _notes(title, cases)


def _phases(case: NamedCase) -> dict[str, float]:
    return {name: seconds if 0 < seconds < math.inf else 0.0 for name, seconds in phases_of(case.result)}


def _chart(kind: str, title: str, cases: Sequence[NamedCase], parts: Mapping[str, str], folded: bool) -> Stacks:
    rows = [(case.name, case.result.best or 0.0, _phases(case)) for case in cases]
    name, axis = f"{kind}-{cases[0].result.record.case.workload}", ChartAxis("best case of a step", "s")
    return stacked(name, title, _description(cases), axis, "share of the step", parts, rows, folded)


def _description(cases: Sequence[NamedCase]) -> str:
    most = ((case, max(_phases(case).items(), key=lambda pair: pair[1])) for case in cases)
    by_phase = together((phase, (case, seconds / (case.result.best or math.inf))) for case, (phase, seconds) in most)
    said = []
    for phase, cases_of_phase in by_phase.items():
        shares = units.span((share for _, share in cases_of_phase), partial(units.percent, decimals=0))
        where = "of every step" if len(by_phase) == 1 else f"in {listed([case.name for case, _ in cases_of_phase], 3)}"
        said.append(f"{phase_words(phase)} takes most {where}, {shares}")
    return f"{'; '.join(said)}."


def _notes(title: str, cases: Sequence[NamedCase]) -> Iterator[Text]:
    judged = [(case.name, case.result.finding) for case in cases if case.result.finding]
    below = together((phase_words(phase), name) for name, finding in judged for phase in finding.below_floor)
    if below:
        told = "; ".join(f"{phase} in {listed(names)}" for phase, names in below.items())
        floor = f"less than {BELOW_FLOOR_MARKERS} times that"
        yield Text(f"{title}, too short to be told from the cost of marking it ({floor}): {told}.", Tone.DOUBT)
    if any(("compile", "yes") in case.result.record.case.params for case in cases):
        yield Text(COMPILED)


# A step with fewer phases is an operation and its casts.
_LEAST_PHASES = 3
_STEP = "step"
_MOST_TABLES = 12
_AMDAHL = "how many times as fast the whole step would be (Amdahl's law): no faster product can give more"


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
        return f"{_signed(self.gain.low)} to {_signed(self.gain.high)}"


@section("gains", "Where it gains", 70)
def gains_section(material: Material) -> Iterator[Element]:
    """The time that each phase of a native precision's step saves against the reference (+) or costs (-), from the same
    rounds as the verdict: the phases sum to the step. Grey phases do not differ clearly. Runs of few rounds have no
    intervals, and are left out.
    """
    cases = [(title, panel, case) for title, panel in titled_panels(material) for case in panel.members]
    tables = [_gains_table(*words) for words in cases if len(_marked(words[2])) >= _LEAST_PHASES]
    yield from tables[:_MOST_TABLES]
    if len(tables) > _MOST_TABLES:
        yield Text(f"{len(tables) - _MOST_TABLES} more cases are not told here; the run's CSV has all their phases.")


def _marked(case: NamedCase) -> list[PhaseGain]:
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
        Col("saved", lambda row: row.saved, number=True, show=_signed, unit="s", tone=lambda row: row.tone),
        Col("interval", lambda row: row.show_interval(), hint="99% for all phases together", number=True),
        Col("speed-up", lambda row: ratio(row.reference_seconds, row.seconds), number=True, show=units.speed_up,
            unit="x", hint="the reference's time over this, above 1x is faster"),
        Col("share of step", lambda row: row.seconds / whole, number=True, show=units.share,
            hint=f"of the step in {mode}"),
        Col("if it cost nothing", lambda row: ratio(1.0, 1 - row.seconds / whole), number=True, show=units.speed_up,
            unit="x", hint=_AMDAHL),
    ]  # fmt: skip
    labels = f"; labelled {', '.join(finding.labels)}" if finding.doubtful else ""
    name = f"gains-{case.result.record.case.workload}-{mode}"
    return table(name, f"{title} {case.name} against {panel.reference}{labels}", cols, rows)


def _signed(seconds: float) -> str:
    """'+3.00 ms', '-600 us'; '0 s'."""
    return f"{'+' if seconds > 0 else '-' if seconds < 0 else ''}{units.seconds(abs(seconds))}"
