"""Computes a case's energy: joules per step (with and without idle power), joules per unit of work, and the ratio to
the reference.

An energy window is a few seconds of steps with a meter reading before and after. A phase's energy comes from windows in
which only this phase ran. Without such windows, it is estimated from the phase's time. The joules and times of
separately measured phases must fit those of the step. Otherwise no phase has a measured figure.
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
from fp8bench.analysis.verdicts import SAME_BAND
from fp8bench.model import EnergyUse, EnergyWindow, Finding, Label, Level, PhaseEnergy, Provenance, Record
from fp8bench.model.consumed import HARMLESS_THROTTLE_REASONS, list_throttle_reasons
from fp8bench.model.specs import ENERGY_SPEC_BY_WORK_KIND, MetricSpec
from fp8bench.model.words import UNATTRIBUTED

# A case and its reference need this many energy windows each. Fewer do not show how much windows of the same code
# differ.
MIN_WINDOWS = 3
# Labels of a case that make a comparison of its energy with the reference's unreliable.
_UNRELIABLE_ENERGY_LABELS = frozenset({Label.ENERGY_UNRESOLVED, Label.THROTTLED, Label.CONTENDED, Label.AA_FAILED})


@dataclass(frozen=True)
class WindowRange:
    """The median, the lowest and the highest value of several windows."""

    middle: float
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low

    def widen(self, share: float) -> WindowRange:
        return WindowRange(self.middle, self.low * (1 - share), self.high * (1 + share))


@dataclass(frozen=True)
class EnergyFigures:
    """Joules per step of one case, and the power of its device.

    `gross_energy` is all energy that the device took while steps ran. `net_energy` is this energy without the energy of
    idling for the same time. If `net_energy` is None, `net_why` is the reason. `uncertainty` is the largest relative
    uncertainty of any window, or None if unknown. `per` lists gross joules per unit of work. `seconds` is the time of a
    step.
    """

    source: str
    windows: tuple[EnergyWindow, ...]
    gross_energy: WindowRange
    seconds: WindowRange
    watts: float
    idle: float | None = None
    net_energy: WindowRange | None = None
    net_why: str = ""
    uncertainty: float | None = None
    sm_clock: float | None = None
    per: tuple[tuple[MetricSpec, float], ...] = ()


class EnergyDemand(StrEnum):
    """Whether a case takes less or more energy than its reference, or whether this is unclear."""

    LESS = "less"
    MORE = "more"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class EnergyRatio:
    """Gross joules per step of a case divided by those of the reference. A ratio below 1 means less energy.

    `low` and `high` are the extremes over all pairs of windows, widened by their uncertainty. They are not a
    confidence interval. If the ratio is unclear, `why` is the reason.
    """

    point: float
    low: float
    high: float
    demand: EnergyDemand
    why: str = ""


def energy_samples(energy_use: EnergyUse | None) -> tuple[float, ...]:
    """Returns gross joules per step, one value per window."""
    return tuple(_list_joules_per_step(_list_valid_energy_windows(energy_use)))


def _list_joules_per_step(windows: Iterable[EnergyWindow]) -> list[float]:
    return [window.joules / window.steps for window in windows]


def energy_figures(record: Record) -> EnergyFigures | None:
    """Returns a case's energy figures, or None if it has no energy window. why_no_energy() returns the reason."""
    energy_use, windows = record.energy, _list_valid_energy_windows(record.energy)
    if energy_use is None or not windows:
        return None
    gross_joules = _summarize_range(energy_samples(energy_use))
    seconds = _summarize_range([window.seconds / window.steps for window in windows])
    uncertainty = _find_largest_uncertainty(windows)
    uncertain_joules = (uncertainty or 0.0) * gross_joules.middle
    idle_watts, net_joules, reason = _compute_net_energy(energy_use, windows, uncertain_joules)
    clocks = [window.sm_clock for window in windows if window.sm_clock is not None]
    joules_per_work_unit = []
    for work_kind, (spec, unit_size) in ENERGY_SPEC_BY_WORK_KIND.items():
        if work_amount := getattr(record.work, work_kind):
            joules_per_work_unit.append((spec, gross_joules.middle * unit_size / work_amount))
    return EnergyFigures(
        source=energy_use.source,
        windows=windows,
        gross_energy=gross_joules,
        seconds=seconds,
        watts=statistics.median(window.joules / window.seconds for window in windows),
        idle=idle_watts,
        net_energy=net_joules,
        net_why=reason,
        uncertainty=uncertainty,
        sm_clock=statistics.median(clocks) if clocks else None,
        per=tuple(joules_per_work_unit),
    )


def _find_largest_uncertainty(windows: Sequence[EnergyWindow]) -> float | None:
    """Returns the largest uncertainty of the windows, or None if any uncertainty is unknown."""
    largest_uncertainty = 0.0
    for window in windows:
        if window.uncertainty is None or not 0 <= window.uncertainty < 1:
            return None
        largest_uncertainty = max(largest_uncertainty, window.uncertainty)
    return largest_uncertainty


def _summarize_range(values: Sequence[float]) -> WindowRange:
    return WindowRange(statistics.median(values), min(values), max(values))


def compare_window_step_time(figures: EnergyFigures, finding: Finding) -> float | None:
    """Returns the time of a step in energy windows divided by its time in timed slots, or None if these times agree
    within noise.

    A window lasts seconds, a slot only milliseconds. So only windows show a clock that drops under sustained load, or
    a launch queue that fills up.
    """
    slot_seconds, window_seconds = finding.median_seconds, figures.seconds
    if slot_seconds is None or not slot_seconds > 0:
        return None
    pace_ratio = window_seconds.middle / slot_seconds
    # Times of a step count as equal if they differ by at most SAME_BAND (2%), even if windows and rounds differ less.
    noise = max(SAME_BAND, finding.spread or 0.0, window_seconds.width / window_seconds.middle)
    return pace_ratio if abs(pace_ratio - 1) > noise else None


def why_no_energy(record: Record) -> str:
    """Returns why a case has no energy figure although energy was requested. Returns '' if it has a figure, or if
    energy was not requested.
    """
    if record.energy is None or _list_valid_energy_windows(record.energy):
        return ""
    return record.energy.why or "no window was measured, for an unknown reason"


def energy_ratio(record: Record, reference: Record | None, labels: Iterable[Label] = ()) -> EnergyRatio | None:
    """Returns a case's energy divided by its reference's, or None for the reference and for emulated cases.

    The energies of two cases differ only if the gap between their ranges of windows is wider than either range. Ranges
    are first widened by the uncertainty of the windows. With three windows per case, noise alone causes such a
    difference in fewer than 1 in 100 pairs (docs/energy.md).
    """
    if reference is None or record.is_reference or {record.support.level, reference.support.level} != {Level.NATIVE}:
        return None
    figures, base_figures = energy_figures(record), energy_figures(reference)
    if figures is None or base_figures is None or figures.source != base_figures.source:
        return None
    # 1. Compute the ratio, with all values that the uncertain windows allow.
    gross_joules_range, base_gross_range = (
        side.gross_energy.widen(side.uncertainty or 0.0) for side in (figures, base_figures)
    )
    low = gross_joules_range.low / base_gross_range.high
    high = gross_joules_range.high / base_gross_range.low if base_gross_range.low > 0 else math.inf
    median_joules_ratio = figures.gross_energy.middle / base_figures.gross_energy.middle
    reason = _explain_unclear_energy_ratio(record, figures, base_figures, frozenset(labels))
    # 2. Require a reliable comparison, and a gap that is wider than either range.
    joules_range_gap = max(
        base_gross_range.low - gross_joules_range.high, gross_joules_range.low - base_gross_range.high
    )
    if not reason and joules_range_gap <= max(gross_joules_range.width, base_gross_range.width):
        reason = "their energy windows are too close together"
    demand = EnergyDemand.LESS if median_joules_ratio < 1 else EnergyDemand.MORE
    return EnergyRatio(median_joules_ratio, low, high, EnergyDemand.UNCLEAR if reason else demand, reason)


def _explain_unclear_energy_ratio(
    record: Record, figures: EnergyFigures, base: EnergyFigures, labels: frozenset[Label]
) -> str:
    """Returns why a comparison of two energies would be unreliable, however much they differ. Returns '' if it would be
    reliable.
    """
    if None in (figures.uncertainty, base.uncertainty):
        return "the error of its power sensor is unknown"
    min_window_count = min(len(figures.windows), len(base.windows))
    if min_window_count < MIN_WINDOWS:
        return (
            "one window is too few to compare"
            if min_window_count == 1
            else f"{min_window_count} windows are too few to compare"
        )
    if not record.paired:
        return "it was measured at a different time than the reference"
    return ", ".join(label for label in Label if label in labels & _UNRELIABLE_ENERGY_LABELS)


def _list_valid_energy_windows(energy_use: EnergyUse | None) -> tuple[EnergyWindow, ...]:
    return drop_invalid_energy_windows(energy_use.windows if energy_use is not None else ())


def drop_invalid_energy_windows(windows: Iterable[EnergyWindow]) -> tuple[EnergyWindow, ...]:
    """Drops windows with impossible numbers, which an edited file may contain."""
    return tuple(
        window
        for window in windows
        # These bounds keep quotients finite.
        if window.steps > 0 and 1e-30 < window.seconds < 1e30 and 1e-30 < window.joules < 1e30
    )


def _compute_net_energy(
    energy_use: EnergyUse, windows: Sequence[EnergyWindow], uncertain_joules: float
) -> tuple[float | None, WindowRange | None, str]:
    """Returns three values: the idle power, the energy of a step above idling, and the reason if this energy is
    unknown.

    The idle power was measured before and after the windows. Subtracting the higher idle power gives the lowest energy,
    and subtracting the lower one gives the highest. `uncertain_joules` is the uncertainty of a step's joules. If the
    lowest energy is not above it, the energy is unknown, because a difference of two nearly equal numbers is mostly
    noise.
    """
    idle_watts, missing_idle = [], []
    for moment, watts in (("before", energy_use.idle_before), ("after", energy_use.idle_after)):
        if watts is not None and 0 <= watts < math.inf:
            idle_watts.append(watts)
        else:
            missing_idle.append(moment)
    if missing_idle:
        return None, None, energy_use.why or f"the idle power {' and '.join(missing_idle)} its windows was not measured"
    mean_idle_watts = statistics.fmean(idle_watts)
    low = min(_subtract_idle_energy(windows, max(idle_watts)))
    high = max(_subtract_idle_energy(windows, min(idle_watts)))
    net_joules_range = WindowRange(statistics.median(_subtract_idle_energy(windows, mean_idle_watts)), low, high)
    if net_joules_range.low <= uncertain_joules:
        return (
            mean_idle_watts,
            None,
            f"its energy beyond idling at {units.count(mean_idle_watts, 'W')} is too small to measure",
        )
    return mean_idle_watts, net_joules_range, ""


def _subtract_idle_energy(windows: Sequence[EnergyWindow], idle_watts: float) -> list[float]:
    return [(window.joules - idle_watts * window.seconds) / window.steps for window in windows]


NO_SOURCE = "none"
MAX_UNCERTAINTY = 0.01
# The joules per step may differ between the windows of a case by this share of their median.
MAX_WINDOW_DIFFERENCE = 0.05


def explain_unresolved_energy(energy: EnergyUse | None) -> str:
    """Returns why a case's energy is too uncertain to be compared. Returns '' if it is certain enough, if no energy
    was requested, or if the device has no meter.

    Energy from a power sensor is always too uncertain, because the sensor's error is unknown.
    """
    return "" if energy is None or energy.source == NO_SOURCE else "; ".join(_list_energy_doubts(energy))


def _list_energy_doubts(energy: EnergyUse) -> Iterator[str]:
    windows = energy.windows
    if not windows:
        yield energy.why or "no window was measured"
        return
    # Ignore the reason for a missing idle power, which does not affect the gross energy.
    if energy.why and energy.idle_before is not None and energy.idle_after is not None:
        yield energy.why
    if any(window.uncertainty is None for window in windows):
        yield f"error unknown, source {energy.source}"
    largest_window_uncertainty = max(window.uncertainty or 0.0 for window in windows)
    if largest_window_uncertainty > MAX_UNCERTAINTY:
        yield f"a window's uncertainty is +-{units.percent(largest_window_uncertainty)}"
    joules_per_step = _list_joules_per_step(window for window in windows if window.steps > 0)
    if len(joules_per_step) < len(windows) or not all(0 < joules < math.inf for joules in joules_per_step):
        yield "a window has no energy"
    elif (relative_window_distance := _compute_relative_range(joules_per_step)) > MAX_WINDOW_DIFFERENCE:
        yield f"its windows are {units.percent(relative_window_distance)} apart"
    if names := list_forced_throttling(windows):
        yield f"clocks were throttled in its windows: {', '.join(names)}"


def _compute_relative_range(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def list_forced_throttling(windows: Iterable[EnergyWindow]) -> list[str]:
    """Returns the reasons why the clock was reduced in any window. Limits that the user set are left out."""
    throttle_reason_bits = functools.reduce(operator.or_, (window.throttle or 0 for window in windows), 0)
    return [name for name in list_throttle_reasons(throttle_reason_bits) if name not in HARMLESS_THROTTLE_REASONS]


# The joules of a phase may differ between its windows by this share of their median.
MAX_PHASE_WINDOW_DIFFERENCE = 0.10
# The total time of the phases, each run alone, may differ from their time in the step by this share. A larger
# difference means that the phases behave differently in the step.
MAX_PHASE_TIME_DIFFERENCE = 0.10


@dataclass(frozen=True)
class PhaseJoules:
    """Joules of one phase of a step, measured or estimated.

    If they were measured, `range` covers all windows of the phase with their uncertainty, `seconds` is the time of the
    phase when it runs alone, and `seconds_width` is how much that time differs between windows. If they were estimated,
    `range` is None and `why` is the reason, or '' if the phase was not to be measured. If other phases were measured,
    the unattributed phase (time outside all phases) gets the remaining joules.
    """

    phase: str
    joules: float
    range: WindowRange | None = None
    seconds: float | None = None
    seconds_width: float = 0.0
    why: str = ""

    @property
    def provenance(self) -> Provenance:
        return Provenance.ESTIMATED if self.range is None else Provenance.MEASURED


@dataclass(frozen=True)
class PhaseEnergies:
    """The energy of all phases of a step.

    `residual` is the step's energy outside measured phases, None if no phase was measured. `void_reason` is why the
    measurement of phases is not valid, or ''. `pace` is the time of the measured phases when each runs alone, divided
    by their time in the step. `noise` is how far `pace` may be from 1 by chance.
    """

    phases: tuple[PhaseJoules, ...]
    residual: WindowRange | None = None
    void_reason: str = ""
    pace: float | None = None
    noise: float = 0.0

    @property
    def pace_mismatch_text(self) -> str:
        """Describes how much longer or shorter the phases take when each runs alone than in the step. Returns '' if the
        times agree.
        """
        if self.pace is None or abs(self.pace - 1) <= self.noise:
            return ""
        return (
            f"run separately, its phases take {units.ratio(self.pace)} of their time in a step, where "
            f"+-{units.percent(self.noise)} is noise"
        )


def phase_energies(record: Record, finding: Finding | None) -> PhaseEnergies | None:
    """Returns the energy of each phase, or None if the case has no energy or no known phases."""
    figures = energy_figures(record)
    if figures is None or record.energy is None:
        return None
    estimated_joules_by_phase = _estimate_joules_by_time(figures, finding)
    # 1. Collect the phases that were measured in energy windows, and why the other phases were not.
    measured_phases: dict[str, PhaseJoules] = {}
    unmeasured_reasons: dict[str, str] = {}
    for energy in record.energy.phases:
        joules = _measure_phase_joules(energy)
        if isinstance(joules, str):
            unmeasured_reasons[energy.phase] = joules
        else:
            measured_phases[energy.phase] = joules
    # These energies have no `phases` yet: they follow in the last line, after the check has decided which to use.
    checked_energies = (
        _check_phase_energies(figures, measured_phases, estimated_joules_by_phase, finding)
        if measured_phases
        else PhaseEnergies(())
    )
    if checked_energies.void_reason:
        measured_phases = {}
        unmeasured_reasons = {energy.phase: checked_energies.void_reason for energy in record.energy.phases}
    # 2. Estimate the joules of phases without energy windows.
    phases = {
        phase: PhaseJoules(phase, joules, why=unmeasured_reasons.get(phase, ""))
        for phase, joules in estimated_joules_by_phase.items()
    }
    phases |= measured_phases
    if measured_phases and checked_energies.residual is not None:
        estimated_phase_joules = (
            joules
            for phase, joules in estimated_joules_by_phase.items()
            if phase not in {*measured_phases, UNATTRIBUTED}
        )
        phases[UNATTRIBUTED] = PhaseJoules(
            UNATTRIBUTED, max(0.0, checked_energies.residual.middle - sum(estimated_phase_joules))
        )
    return replace(checked_energies, phases=tuple(phases.values())) if phases else None


def _estimate_joules_by_time(figures: EnergyFigures, finding: Finding | None) -> dict[str, float]:
    """Returns joules per phase. They are the step's joules, split by the times of the phases in the best case, as if
    power were constant.
    """
    if finding is None or not finding.best_seconds:
        return {}
    joules, step_seconds = figures.gross_energy.middle, finding.best_seconds
    return {phase: joules * seconds / step_seconds for phase, seconds in finding.phases if 0 < seconds < math.inf}


def _measure_phase_joules(energy: PhaseEnergy) -> PhaseJoules | str:
    """Returns the energy of a phase from its windows, or the reason why it is unknown."""
    windows = drop_invalid_energy_windows(energy.windows)
    if not windows:
        return energy.why or "no window was measured, for an unknown reason"
    joules_per_step = _list_joules_per_step(windows)
    median_joules = statistics.median(joules_per_step)
    relative_range = _compute_relative_range(joules_per_step)
    if relative_range > MAX_PHASE_WINDOW_DIFFERENCE:
        return f"its windows are {units.percent(relative_range)} apart"
    low = min(window.joules / window.steps * (1 - (window.uncertainty or 0.0)) for window in windows)
    high = max(window.joules / window.steps * (1 + (window.uncertainty or 0.0)) for window in windows)
    seconds = _summarize_range([window.seconds / window.steps for window in windows])
    joules_range = WindowRange(median_joules, low, high)
    return PhaseJoules(energy.phase, median_joules, joules_range, seconds.middle, seconds.width)


def _check_phase_energies(
    figures: EnergyFigures, measured: Mapping[str, PhaseJoules], estimates: Mapping[str, float], finding: Finding | None
) -> PhaseEnergies:
    """Computes the energy that a step takes outside the measured phases, and checks that it is possible. Returns it
    without `phases`.

    Outside the measured phases, the device must take at least the idle power and at most the highest power of a phase
    or of the step. The time outside them is the step's time without the times of the phases, each run alone. If those
    differ by more than MAX_PHASE_TIME_DIFFERENCE from the phases' time in the step, the latter is subtracted instead.
    """
    # 1. Compute the joules that the step takes outside the measured phases.
    phase_energy_ranges = [phase.range for phase in measured.values() if phase.range is not None]
    gross_energy_range = figures.gross_energy.widen(figures.uncertainty or 0.0)
    measured_phase_joules = sum(phase_range.middle for phase_range in phase_energy_ranges)
    residual_range = WindowRange(
        gross_energy_range.middle - measured_phase_joules,
        gross_energy_range.low - sum(phase_range.high for phase_range in phase_energy_ranges),
        gross_energy_range.high - sum(phase_range.low for phase_range in phase_energy_ranges),
    )
    # 2. Divide the total time of the phases, each run alone, by their time in the step.
    step_seconds = figures.seconds.middle
    separate_phase_seconds = sum(phase.seconds or 0.0 for phase in measured.values())
    # The estimates split the step's joules in proportion to time, so a share of these joules is a share of the time.
    unmeasured_joules = sum(joules for phase, joules in estimates.items() if phase not in measured)
    unmeasured_time_share = unmeasured_joules / figures.gross_energy.middle
    phase_seconds_in_step = step_seconds * (1 - unmeasured_time_share)
    pace_ratio = separate_phase_seconds / phase_seconds_in_step if phase_seconds_in_step > 0 else math.inf
    phase_seconds_width = sum(phase.seconds_width for phase in measured.values())
    relative_phase_noise = phase_seconds_width / separate_phase_seconds if separate_phase_seconds else 0.0
    step_spread = finding.spread if finding is not None else None
    noise = max(SAME_BAND, step_spread or 0.0, figures.seconds.width / step_seconds, relative_phase_noise)
    # 3. Compute the least and the most energy that the device can use outside the measured phases.
    phase_watts = [phase.joules / phase.seconds for phase in measured.values() if phase.seconds]
    residual_seconds = step_seconds - separate_phase_seconds
    residual_or_unmeasured_seconds = (
        residual_seconds if abs(pace_ratio - 1) <= MAX_PHASE_TIME_DIFFERENCE else step_seconds - phase_seconds_in_step
    )
    # Sort the limits, because the remaining time may be negative.
    extreme_watts = (figures.idle or 0.0, max([*phase_watts, figures.watts]))
    joule_limits = sorted(residual_or_unmeasured_seconds * watts for watts in extreme_watts)
    # 4. Explain why the energies cannot be used if the times or the joules of the phases do not fit the step.
    reason = ""
    if abs(pace_ratio - 1) > max(MAX_PHASE_TIME_DIFFERENCE, noise):
        reason = (
            f"run separately, the phases take {units.seconds(separate_phase_seconds)}, while a step has "
            f"{units.seconds(max(0.0, phase_seconds_in_step))} for them: they behave differently in the step"
        )
    elif residual_range.high < joule_limits[0] or residual_range.low > joule_limits[1]:
        reason = (
            f"the phases sum to {units.joules(measured_phase_joules)} and the step takes "
            f"{units.joules(gross_energy_range.middle)}: they differ by more than their errors"
        )
    return PhaseEnergies((), residual_range, reason, pace_ratio, noise)
