"""Where low precision gains, and where it does not: phase against phase."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fp8bench import units
from fp8bench.analysis.findings import BELOW_FLOOR_MARKERS
from fp8bench.analysis.verdicts import SAME
from fp8bench.model import UNATTRIBUTED, Finding
from fp8bench.report.case_status import Standing, emulated, speed_up, standing
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Axis, Element, Field, Mark, Text, Tone, Waterfall
from fp8bench.report.material import Material, titled_panels
from fp8bench.report.page.charts import lasting
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import Panel, Result
from fp8bench.report.words.naming import listed, named_cases, phase_order, phase_words

# A step of fewer phases is an operation and its casts: its time as a whole says it all.
_LEAST_PHASES = 3
_MOST_TABLES = 12
_MOST_CHARTS = 4
# Of the step before: a smaller change is neither good nor bad, and a smaller rest is not worth a row.
_LEAST_CHANGE = 0.005
_AMDAHL = "how many times as fast the whole step would be (Amdahl's law): no faster product can give more"


@dataclass(frozen=True)
class _Pair:
    """A case beside its reference; `times` are seconds of each phase in the reference and in the case."""

    title: str
    result: Result
    finding: Finding
    reference: Finding
    times: Mapping[str, tuple[float, float]]

    def clear(self, phase: str) -> bool:
        """Whether both are long enough to be told from the cost of marking them."""
        return phase not in self.finding.below_floor and phase not in self.reference.below_floor

    def share(self, phase: str) -> float:
        return self.times[phase][1] / self.steps[1]

    @property
    def steps(self) -> tuple[float, float]:
        return self.reference.best_seconds or 0.0, self.finding.best_seconds or 0.0


@sections.register("gains")
class Gains(Section):
    """From the reference's step to each native precision's, phase by phase; then the phases beside each other."""

    name = "gains"
    title = "Where it gains"
    lead = (
        "From the reference's step to that of each native precision: what each phase takes away, and what it adds. "
        "Best cases, without a verdict, as a phase has no interval."
    )
    rank = 70

    def elements(self, material: Material) -> Iterator[Element]:
        pairs = [pair for title, panel in titled_panels(material) for pair in _pairs(title, panel)]
        for place, pair in enumerate(pairs[:_MOST_TABLES]):
            yield from _pair(pair, place < _MOST_CHARTS)
        if len(pairs) > _MOST_TABLES:
            yield Text(f"{len(pairs) - _MOST_TABLES} more cases are not told here; the run's CSV has all their phases.")


def _pairs(title: str, panel: Panel) -> Iterator[_Pair]:
    for case in named_cases(panel):
        lead, finding = case.group.lead, _timed(case.result)
        reference = _timed(lead) if lead and standing(lead) is Standing.REFERENCE else None
        if finding is None or reference is None or case.result.record.is_reference or emulated(case.result):
            continue
        present = {name for one in (finding, reference) for name, seconds in one.phases if seconds > 0}
        if len(present - {UNATTRIBUTED}) < _LEAST_PHASES:
            continue
        words = f"{title} {case.name} against {panel.reference}"
        before, after = dict(reference.phases), dict(finding.phases)
        # A phase that a step does not have takes none.
        times = {
            phase: (max(0.0, before.get(phase, 0.0)), max(0.0, after.get(phase, 0.0)))
            for phase in sorted(present, key=phase_order)
        }
        yield _Pair(words, case.result, finding, reference, times)


def _timed(result: Result) -> Finding | None:
    """What was found of a case, if its step and its phases are lengths of time."""
    finding = result.finding if lasting(result) else None
    return finding if finding and all(math.isfinite(seconds) for _, seconds in finding.phases) else None


def _pair(pair: _Pair, drawn: bool) -> Iterator[Element]:
    mode, reference = pair.result.mode, pair.reference.case.mode
    name = f"{pair.result.record.case.workload}-{mode}"
    if drawn:
        axis, (before, after) = Axis("best case of a step", "s"), pair.steps
        changes = tuple(_changes(pair))
        yield Waterfall(f"gains-{name}", pair.title, _lead(pair), axis, (reference, before), changes, (mode, after))
    else:
        yield Text(f"{pair.title}: {_lead(pair)}", Tone.DOUBT if pair.finding.doubtful else Tone.PLAIN)
    cols: list[Col[str]] = [
        Col("phase", lambda phase: _phase(pair, phase)),
        Col(reference, lambda phase: _time(pair.times[phase][0]), number=True, unit="s",
            hint="best-case seconds in the reference"),
        Col(mode, lambda phase: _time(pair.times[phase][1]), number=True, unit="s",
            hint=f"best-case seconds in {mode}"),
        Col("speed-up", lambda phase: _ratio(*reversed(pair.times[phase])) if pair.clear(phase) else None, number=True,
            unit="x", hint="the reference's time over this, above 1x is faster; no verdict"),
        Col("share of step", pair.share, number=True, show=units.share,
            hint=f"of the step in {mode}"),
        Col("if it cost nothing", lambda phase: _ratio(1 - pair.share(phase), 1.0) if pair.clear(phase) else None,
            number=True, unit="x", hint=_AMDAHL),
    ]  # fmt: skip
    phases = table(f"phases-of-{name}", f"{pair.title}: phase beside phase", cols, pair.times, folded=True)
    yield replace(phases, rows=(*phases.rows, _step_row(pair)))


def _changes(pair: _Pair) -> Iterator[Mark]:
    """What each phase adds or takes; what cannot be told from the cost of marking it is one row with the rest."""
    before, after = pair.steps
    rest, short = after - before, [phase for phase in pair.times if not pair.clear(phase)]
    for phase, (own, other) in pair.times.items():
        if pair.clear(phase) and own != other:
            rest -= other - own
            hint = f"{units.seconds(own)} in {pair.reference.case.mode}, {units.seconds(other)} in {pair.result.mode}"
            yield Mark(phase_words(phase), other - own, tone=_tone(pair, other - own), hint=hint)
    if short or abs(rest) > _LEAST_CHANGE * before:
        hint = f"{listed([*map(phase_words, short)])}: too short to tell" if short else ""
        yield Mark("the rest", rest, tone=Tone.DOUBT, hint=hint)


def _tone(pair: _Pair, change: float) -> Tone:
    if abs(change) < _LEAST_CHANGE * pair.steps[0]:
        return Tone.PLAIN
    if pair.finding.doubtful:
        return Tone.DOUBT
    return Tone.GOOD if change < 0 else Tone.BAD


def _phase(pair: _Pair, phase: str) -> Field:
    if pair.clear(phase):
        return Field(phase_words(phase))
    hint = f"shorter than {BELOW_FLOOR_MARKERS} times the cost of marking it: no ratio says anything"
    return Field(phase_words(phase), tone=Tone.DOUBT, hint=hint)


def _step_row(pair: _Pair) -> tuple[Field, ...]:
    before, after = pair.steps
    paired = speed_up(pair.result)
    hint = f"plain; over the rounds that both were in it is {units.speed_up(paired.point)}" if paired else "plain"
    return (
        Field("step", tone=Tone.STRONG), _time(before, Tone.STRONG), _time(after, Tone.STRONG),
        Field(units.speed_up(before / after), before / after, Tone.STRONG, hint),
        Field(units.percent(1.0), 1.0, Tone.STRONG), Field(units.NONE),
    )  # fmt: skip


def _time(seconds: float, tone: Tone = Tone.PLAIN) -> Field:
    return Field(units.seconds(seconds), seconds, tone) if seconds > 0 else Field(units.NONE, 0.0, tone)


def _ratio(below: float, above: float) -> Field:
    """What stands above over what stands below; nothing where either is none."""
    if below <= 0 or above <= 0 or not math.isfinite(above / below):
        return Field(units.NONE)
    return Field(units.speed_up(above / below), above / below)


def _lead(pair: _Pair) -> str:
    before, after = pair.steps
    times = {phase: both for phase, both in pair.times.items() if pair.clear(phase)}
    saved = {phase: old - new for phase, (old, new) in times.items()}
    gains = sorted((phase for phase in saved if saved[phase] > 0), key=lambda phase: -saved[phase])
    losses = sorted((phase for phase in saved if saved[phase] < 0), key=lambda phase: saved[phase])
    words = f"The step takes {units.seconds(after)} instead of {units.seconds(before)}."
    words += f" It saves most in {_most(gains, saved)}" if gains else " It saves in no phase"
    words += f" and adds most in {_most(losses, saved)}." if losses else "."
    kept = [phase for phase, (old, new) in times.items() if new > 0 and new >= old * (1 - SAME)]
    if kept and gains:
        share = sum(times[phase][1] for phase in kept) / after
        words += (
            f" {units.percent(share, 0)} of the step is no shorter than before ({listed([*map(phase_words, kept)])})."
        )
    if pair.finding.doubtful:
        words += f" Labelled {', '.join(pair.finding.labels)}."
    return words


def _most(phases: list[str], saved: dict[str, float]) -> str:
    return f"{phase_words(phases[0])} ({units.seconds(abs(saved[phases[0]]))})"
