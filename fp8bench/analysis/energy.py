"""Energy from a case's windows: joules of a step, gross and net, for its work, and compared with the reference.

A window's reading is measured; what is computed from several numbers is derived. The energy of a phase is that of
windows in which it ran by itself, or its share of the step by time. Phases by themselves are checked against the step:
if their joules and times do not fit it, no phase has a measured figure.
"""

from __future__ import annotations

import functools
import math
import operator
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fp8bench import units
from fp8bench.analysis.verdicts import SAME
from fp8bench.model import EnergyUse, EnergyWindow, Finding, Label, Level, PhaseEnergy, Provenance, Record
from fp8bench.model.consumed import CHOSEN, reasons_in
from fp8bench.model.specs import ENERGY_PER, MetricSpec
from fp8bench.model.words import UNATTRIBUTED

# Fewer windows on either side do not show how much windows of the same code differ.
LEAST_WINDOWS = 3
# With these labels a comparison of energy is not reliable: another step ran, or clocks were different.
_DOUBTS = frozenset({Label.ENERGY_UNRESOLVED, Label.THROTTLED, Label.CONTENDED, Label.AA_FAILED})


@dataclass(frozen=True)
class Range:
    """The median, the lowest and the highest value of some windows."""

    middle: float
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low

    def widen(self, share: float) -> Range:
        return Range(self.middle, self.low * (1 - share), self.high * (1 + share))


@dataclass(frozen=True)
class EnergyFigures:
    """Joules of a step of one case, and watts of its device.

    `gross` is all that the device took while steps ran, `net` what exceeded idling for as long; `net_why` is the reason
    for a missing `net`. `uncertainty` is the largest of any window's, None if unknown. `per` are gross joules for each
    count of the step's work. `seconds` are those of a step.
    """

    source: str
    windows: tuple[EnergyWindow, ...]
    gross: Range
    seconds: Range
    watts: float
    idle: float | None = None
    net: Range | None = None
    net_why: str = ""
    uncertainty: float | None = None
    sm_clock: float | None = None
    per: tuple[tuple[MetricSpec, float], ...] = ()


class Demand(StrEnum):
    """How a case's energy compares with the reference's."""

    LESS = "less"
    MORE = "more"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class EnergyRatio:
    """Gross joules of a step over the reference's; below 1 is less.

    `low` and `high` are the ends over all pairs of windows with the uncertainty of both, not a confidence interval.
    `why` is the reason for an unclear ratio.
    """

    point: float
    low: float
    high: float
    demand: Demand
    why: str = ""


def energy_samples(use: EnergyUse | None) -> tuple[float, ...]:
    """Returns gross joules per step, one value per window."""
    return tuple(window.joules / window.steps for window in _sound(use))


def energy_figures(record: Record) -> EnergyFigures | None:
    """Returns a case's energy figures; None without a window, and `why_no_energy` has the reason."""
    use, windows = record.energy, _sound(record.energy)
    if use is None or not windows:
        return None
    gross = _range(energy_samples(use))
    seconds = _range([window.seconds / window.steps for window in windows])
    uncertainty = _largest_uncertainty(windows)
    idle, net, reason = _net(use, windows, (uncertainty or 0.0) * gross.middle)
    clocks = [window.sm_clock for window in windows if window.sm_clock is not None]
    joules_per = []
    for count, (spec, unit_size) in ENERGY_PER.items():
        if work := getattr(record.work, count):
            joules_per.append((spec, gross.middle * unit_size / work))
    return EnergyFigures(
        use.source,
        windows,
        gross,
        seconds,
        statistics.median(window.joules / window.seconds for window in windows),
        idle,
        net,
        reason,
        uncertainty,
        statistics.median(clocks) if clocks else None,
        tuple(joules_per),
    )


def _largest_uncertainty(windows: Sequence[EnergyWindow]) -> float | None:
    """Returns the largest uncertainty; None if any window's is unknown."""
    largest = 0.0
    for window in windows:
        if window.uncertainty is None or not 0 <= window.uncertainty < 1:
            return None
        largest = max(largest, window.uncertainty)
    return largest


def _range(values: Sequence[float]) -> Range:
    return Range(statistics.median(values), min(values), max(values))


def other_pace(figures: EnergyFigures, finding: Finding) -> float | None:
    """Returns the time of a step in energy windows over that in timed slots; None if they agree within noise.

    Windows last seconds, so only they show a clock that falls under a longer load, or a queue that has filled up.
    """
    slots, windows = finding.median_seconds, figures.seconds
    if slots is None or not slots > 0:
        return None
    pace = windows.middle / slots
    noise = max(SAME, finding.spread or 0.0, windows.width / windows.middle)
    return pace if abs(pace - 1) > noise else None


def why_no_energy(record: Record) -> str:
    """Returns why a case whose energy was requested has no figure; '' if it has one, or none was requested."""
    if record.energy is None or _sound(record.energy):
        return ""
    return record.energy.why or "no window was measured, for an unknown reason"


def energy_ratio(record: Record, reference: Record | None, labels: Iterable[Label] = ()) -> EnergyRatio | None:
    """Returns a case's energy over its reference's; None for the reference and for emulations.

    It counts as less or more only if the two cases' windows, with their uncertainty, differ more than the windows of
    either case do: with three windows per side, noise alone does this in fewer than 1 in 100 pairs (docs/energy.md).
    """
    if reference is None or record.is_reference or {record.support.level, reference.support.level} != {Level.NATIVE}:
        return None
    figures, base = energy_figures(record), energy_figures(reference)
    if figures is None or base is None or figures.source != base.source:
        return None
    gross, base_gross = (side.gross.widen(side.uncertainty or 0.0) for side in (figures, base))
    low = gross.low / base_gross.high
    high = gross.high / base_gross.low if base_gross.low > 0 else math.inf
    point = figures.gross.middle / base.gross.middle
    reason = _why_unclear(record, figures, base, frozenset(labels))
    distance = max(base_gross.low - gross.high, gross.low - base_gross.high)
    if not reason and distance <= max(gross.width, base_gross.width):
        reason = "their windows lie too close together"
    if reason:
        return EnergyRatio(point, low, high, Demand.UNCLEAR, reason)
    return EnergyRatio(point, low, high, Demand.LESS if point < 1 else Demand.MORE)


def _why_unclear(record: Record, figures: EnergyFigures, base: EnergyFigures, labels: frozenset[Label]) -> str:
    """Returns why no comparison is reliable, regardless of the windows; '' if one may be."""
    if None in (figures.uncertainty, base.uncertainty):
        return "it is unknown how far its power sensor can be off"
    fewest = min(len(figures.windows), len(base.windows))
    if fewest < LEAST_WINDOWS:
        return "one window is too few to compare" if fewest == 1 else f"{fewest} windows are too few to compare"
    if not record.paired:
        return "it was measured at another time than the reference"
    return ", ".join(label for label in Label if label in labels & _DOUBTS)


def _sound(use: EnergyUse | None) -> tuple[EnergyWindow, ...]:
    return sound_windows(use.windows if use is not None else ())


def sound_windows(windows: Iterable[EnergyWindow]) -> tuple[EnergyWindow, ...]:
    """Drops windows with impossible numbers, which an edited file may contain."""
    return tuple(
        window
        for window in windows
        if window.steps > 0 and 1e-30 < window.seconds < 1e30 and 1e-30 < window.joules < 1e30
    )


def _net(use: EnergyUse, windows: Sequence[EnergyWindow], unsure: float) -> tuple[float | None, Range | None, str]:
    """Returns idle power and a step's energy beyond it, or why that is unknown; its ends use the two idle powers.

    It is unknown if its low end is within the joules by which a step is `unsure`: the difference of two nearly equal
    numbers is noise.
    """
    idles, missing = [], []
    for when, watts in (("before", use.idle_before), ("after", use.idle_after)):
        if watts is not None and 0 <= watts < math.inf:
            idles.append(watts)
        else:
            missing.append(when)
    if missing:
        return None, None, use.why or f"the idle power {' and '.join(missing)} its windows was not measured"
    idle = statistics.fmean(idles)
    low = min(_net_joules(windows, max(idles)))
    high = max(_net_joules(windows, min(idles)))
    net = Range(statistics.median(_net_joules(windows, idle)), low, high)
    if net.low <= unsure:
        return idle, None, f"what it takes beyond idling, {units.count(idle, 'W')}, is too little to tell"
    return idle, net, ""


def _net_joules(windows: Sequence[EnergyWindow], idle: float) -> list[float]:
    return [(window.joules - idle * window.seconds) / window.steps for window in windows]


NO_SOURCE = "none"
MOST_UNCERTAIN = 0.01
# The most by which joules per step may differ between windows, as a share of the median.
MOST_APART = 0.05


def why_unresolved(energy: EnergyUse | None) -> str:
    """Returns why an energy is not resolved; '' if it is, was not requested, or the device has no source.

    A power sensor is never resolved, because its error is unknown. A missing idle power does not concern the gross
    energy.
    """
    return "" if energy is None or energy.source == NO_SOURCE else "; ".join(_reasons(energy))


def _reasons(energy: EnergyUse) -> Iterator[str]:
    windows = energy.windows
    if not windows:
        yield energy.why or "no window was measured"
        return
    if energy.why and energy.idle_before is not None and energy.idle_after is not None:
        yield energy.why
    if any(window.uncertainty is None for window in windows):
        yield f"error unknown, source {energy.source}"
    worst = max(window.uncertainty or 0.0 for window in windows)
    if worst > MOST_UNCERTAIN:
        yield f"a window is sure to +-{units.percent(worst)} only"
    joules = [window.joules / window.steps for window in windows if window.steps > 0]
    if len(joules) < len(windows) or not all(0 < joule < math.inf for joule in joules):
        yield "a window has no energy"
    elif (distance := _relative_distance(joules)) > MOST_APART:
        yield f"its windows are {units.percent(distance)} apart"
    if names := forced_throttling(windows):
        yield f"clocks were held back in its windows: {', '.join(names)}"


def _relative_distance(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def forced_throttling(windows: Iterable[EnergyWindow]) -> list[str]:
    """Returns the reasons for throttled clocks in any window, without limits that the user set."""
    bits = functools.reduce(operator.or_, (window.throttle or 0 for window in windows), 0)
    return [name for name in reasons_in(bits) if name not in CHOSEN]


# The same limit for the joules of a phase.
MOST_PHASE_APART = 0.10
# Phases whose time alone differs from their time in the step by more than this share behaved differently there.
MOST_OFF = 0.10


@dataclass(frozen=True)
class PhaseJoules:
    """Joules of one phase of a step.

    `range` is that of its windows with their uncertainty, `seconds` its time when run alone, `seconds_width` how much
    windows differ in it. An estimate has none of these, and the reason in `why`: it is the step's joules times the
    phase's share of the time; unattributed time gets the joules that no other phase accounts for.
    """

    phase: str
    joules: float
    range: Range | None = None
    seconds: float | None = None
    seconds_width: float = 0.0
    why: str = ""

    @property
    def provenance(self) -> Provenance:
        return Provenance.ESTIMATED if self.range is None else Provenance.MEASURED

    @property
    def low(self) -> float | None:
        return None if self.range is None else self.range.low

    @property
    def high(self) -> float | None:
        return None if self.range is None else self.range.high


@dataclass(frozen=True)
class PhaseEnergies:
    """All phases of a step. `residual` is the step's joules outside measured phases, spent in `residual_seconds`.

    It is None if no phase was measured, or if the phases are void, for the reason `void`. `pace` is the time of the
    measured phases run alone over their time in the step, `noise` how far it may be from 1 by chance.
    """

    phases: tuple[PhaseJoules, ...]
    residual: Range | None = None
    residual_seconds: float = 0.0
    void: str = ""
    pace: float | None = None
    noise: float = 0.0

    @property
    def off_pace(self) -> str:
        """Describes the disagreement of the two times; '' if they agree."""
        if self.pace is None or abs(self.pace - 1) <= self.noise:
            return ""
        return (
            f"by themselves its phases take {units.ratio(self.pace)} of their time in a step, where "
            f"+-{units.percent(self.noise)} is noise"
        )


def phase_energies(record: Record, finding: Finding | None) -> PhaseEnergies | None:
    """Returns the energy of each phase; None if the case has no energy, or its phases are unknown."""
    figures = energy_figures(record)
    if figures is None or record.energy is None:
        return None
    estimates = _estimate_by_time(figures, finding)
    # 1. Collect phases with separate windows, and reasons why others have none.
    measured: dict[str, PhaseJoules] = {}
    reasons: dict[str, str] = {}
    for energy in record.energy.phases:
        joules = _measure_phase(energy)
        if isinstance(joules, str):
            reasons[energy.phase] = joules
        else:
            measured[energy.phase] = joules
    checked = _check_against_step(figures, measured, estimates, finding) if measured else PhaseEnergies(())
    if checked.void:
        measured = {}
        reasons = {energy.phase: checked.void for energy in record.energy.phases}
    # 2. Estimate the other phases; unattributed time gets the remainder.
    phases = {phase: PhaseJoules(phase, joules, why=reasons.get(phase, "")) for phase, joules in estimates.items()}
    phases |= measured
    if measured and checked.residual is not None:
        estimated = (joules for phase, joules in estimates.items() if phase not in {*measured, UNATTRIBUTED})
        phases[UNATTRIBUTED] = PhaseJoules(UNATTRIBUTED, max(0.0, checked.residual.middle - sum(estimated)))
    return replace(checked, phases=tuple(phases.values())) if phases else None


def _estimate_by_time(figures: EnergyFigures, finding: Finding | None) -> dict[str, float]:
    """Returns joules per phase, splitting those of a step by the best case's times, as if all phases drew the same
    power."""
    if finding is None or not finding.best_seconds:
        return {}
    joules, total = figures.gross.middle, finding.best_seconds
    return {phase: joules * seconds / total for phase, seconds in finding.phases if 0 < seconds < math.inf}


def _measure_phase(energy: PhaseEnergy) -> PhaseJoules | str:
    """Returns the energy in the windows of a phase, or the reason without one."""
    windows = sound_windows(energy.windows)
    if not windows:
        return energy.why or "no window was measured, for an unknown reason"
    joules = [window.joules / window.steps for window in windows]
    middle = statistics.median(joules)
    if max(joules) - min(joules) > MOST_PHASE_APART * middle:
        return f"its windows are {units.percent(_relative_distance(joules))} apart"
    low = min(window.joules / window.steps * (1 - (window.uncertainty or 0.0)) for window in windows)
    high = max(window.joules / window.steps * (1 + (window.uncertainty or 0.0)) for window in windows)
    seconds = _range([window.seconds / window.steps for window in windows])
    return PhaseJoules(energy.phase, middle, Range(middle, low, high), seconds.middle, seconds.width)


def _check_against_step(
    figures: EnergyFigures, measured: Mapping[str, PhaseJoules], estimates: Mapping[str, float], finding: Finding | None
) -> PhaseEnergies:
    """Computes the residual and checks whether the device can draw that in the rest of the step's time.

    Its power must be at least that of idling and at most the highest of any phase. If times are too noisy, the rest is
    the time of the unmeasured phases.
    """
    # 1. Compute the joules of the step outside measured phases.
    ranges = [phase.range for phase in measured.values() if phase.range is not None]
    gross = figures.gross.widen(figures.uncertainty or 0.0)
    residual = Range(
        gross.middle - sum(span.middle for span in ranges),
        gross.low - sum(span.high for span in ranges),
        gross.high - sum(span.low for span in ranges),
    )
    # 2. Divide the time of the phases run alone by their time in the step.
    step = figures.seconds.middle
    by_themselves = sum(phase.seconds or 0.0 for phase in measured.values())
    elsewhere = sum(joules for phase, joules in estimates.items() if phase not in measured)
    in_step = step * (1 - elsewhere / figures.gross.middle)
    pace = by_themselves / in_step if in_step > 0 else math.inf
    width = sum(phase.seconds_width for phase in measured.values())
    phase_noise = width / by_themselves if by_themselves else 0.0
    spread = finding.spread if finding is not None else None
    noise = max(SAME, spread or 0.0, figures.seconds.width / step, phase_noise)
    # 3. Bound what the device can draw in the rest of the time.
    powers = [phase.joules / phase.seconds for phase in measured.values() if phase.seconds]
    rest = step - by_themselves
    remaining = rest if abs(pace - 1) <= MOST_OFF else step - in_step
    ends = sorted((remaining * max([*powers, figures.watts]), remaining * (figures.idle or 0.0)))
    energies = PhaseEnergies((), residual, rest, "", pace, noise)
    return replace(energies, void=_why_void(energies, figures.gross.middle, by_themselves, ends))


def _why_void(energies: PhaseEnergies, gross: float, by_themselves: float, ends: Sequence[float]) -> str:
    """Returns why no phase counts as measured, regardless of its windows; '' if they fit the step."""
    residual, pace = energies.residual, energies.pace
    assert residual is not None and pace is not None
    if abs(pace - 1) > max(MOST_OFF, energies.noise):
        in_step = units.seconds(by_themselves / pace if pace else None)
        return (
            f"by themselves they take {units.seconds(by_themselves)} where a step has "
            f"{in_step} for them: that is not what the step does"
        )
    if residual.high < ends[0] or residual.low > ends[1]:
        return (
            f"they come to {units.joules(gross - residual.middle)} where a step takes {units.joules(gross)}, further "
            "apart than the error of both"
        )
    return ""
