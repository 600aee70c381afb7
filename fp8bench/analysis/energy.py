"""Energy from a case's windows: joules of a step, gross and net, for its work, and against the reference.

What a window reads is measured; what is computed of several numbers is derived. The energy of a phase is that of
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

# Fewer windows on either side do not show how far windows of the same code differ.
LEAST_WINDOWS = 3
# With these labels a comparison of energy is no fact: another step ran, or at other clocks.
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

    def widened(self, share: float) -> Range:
        return Range(self.middle, self.low * (1 - share), self.high * (1 + share))


@dataclass(frozen=True)
class EnergyFigures:
    """Joules of a step of one case, and watts of its device.

    `gross` is all that the device took while steps ran, `net` what exceeded idling for as long; `net_why` says why
    there is none. `uncertainty` is the largest of any window's, None if unknown. `per` are gross joules for each count
    of the step's work. `seconds` are those of a step.
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

    `low` and `high` are the ends over all pairs of windows with the uncertainty of both, and no interval of any
    confidence. `why` says why it is not clear.
    """

    point: float
    low: float
    high: float
    demand: Demand
    why: str = ""


def energy_samples(use: EnergyUse | None) -> tuple[float, ...]:
    """Returns gross joules of a step, one value a window."""
    return tuple(window.joules / window.steps for window in _sound(use))


def energy_figures(record: Record) -> EnergyFigures | None:
    """Returns None without a window; `why_no_energy` says why."""
    use, windows = record.energy, _sound(record.energy)
    if use is None or not windows:
        return None
    joules = energy_samples(use)
    gross, seconds = _range(joules), _range([window.seconds / window.steps for window in windows])
    known = [window.uncertainty for window in windows if window.uncertainty is not None and 0 <= window.uncertainty < 1]
    uncertainty = max(known) if len(known) == len(windows) else None
    idle, net, why = _net(use, windows, (uncertainty or 0.0) * gross.middle)
    clocks = [window.sm_clock for window in windows if window.sm_clock is not None]
    return EnergyFigures(
        use.source,
        windows,
        gross,
        seconds,
        statistics.median(window.joules / window.seconds for window in windows),
        idle,
        net,
        why,
        uncertainty,
        statistics.median(clocks) if clocks else None,
        tuple(
            (spec, gross.middle * many / known)
            for count, (spec, many) in ENERGY_PER.items()
            if (known := getattr(record.work, count))
        ),
    )


def _range(values: Sequence[float]) -> Range:
    return Range(statistics.median(values), min(values), max(values))


def other_pace(figures: EnergyFigures, finding: Finding) -> float | None:
    """Returns the time of a step in windows over that in slots; None where it is within the noise of either.

    Windows last seconds, so only they show a clock that falls under a longer load, or a queue that is full by then.
    """
    slots, windows = finding.median_seconds, figures.seconds
    if slots is None or not slots > 0:
        return None
    pace = windows.middle / slots
    noise = max(SAME, finding.spread or 0.0, windows.width / windows.middle)
    return pace if abs(pace - 1) > noise else None


def why_no_energy(record: Record) -> str:
    """Returns why a case that was asked for its energy has no figure; '' if it has one, or none was asked for."""
    if record.energy is None or _sound(record.energy):
        return ""
    return record.energy.why or "no window was measured, and nothing says why"


def energy_ratio(record: Record, reference: Record | None, labels: Iterable[Label] = ()) -> EnergyRatio | None:
    """Returns a case's energy over its reference's; None for the reference and for emulations.

    It is less, or more, where the windows of the two lie further apart than those of either do, all with their
    uncertainty: of three windows a side that are noise alone, fewer than 1 in 100 pairs do (docs/energy.md).
    """
    if reference is None or record.is_reference or {record.support.level, reference.support.level} != {Level.NATIVE}:
        return None
    own, base = energy_figures(record), energy_figures(reference)
    if own is None or base is None or own.source != base.source:
        return None
    first, second = (figures.gross.widened(figures.uncertainty or 0.0) for figures in (own, base))
    low, high = first.low / second.high, first.high / second.low if second.low > 0 else math.inf
    point = own.gross.middle / base.gross.middle
    why = _why_unclear(record, own, base, frozenset(labels))
    apart = max(second.low - first.high, first.low - second.high)
    if not why and apart <= max(first.width, second.width):
        why = "their windows lie too close together"
    demand = Demand.UNCLEAR if why else Demand.LESS if point < 1 else Demand.MORE
    return EnergyRatio(point, low, high, demand, why)


def _why_unclear(record: Record, own: EnergyFigures, base: EnergyFigures, labels: frozenset[Label]) -> str:
    """Returns why no comparison is a fact, whatever the windows are; '' if it may be."""
    if None in (own.uncertainty, base.uncertainty):
        return "it is unknown how far its power sensor can be off"
    fewest = min(len(own.windows), len(base.windows))
    if fewest < LEAST_WINDOWS:
        return "one window is too few to compare" if fewest == 1 else f"{fewest} windows are too few to compare"
    if not record.paired:
        return "it was measured at another time than the reference"
    return ", ".join(label for label in Label if label in labels & _DOUBTS)


def _sound(use: EnergyUse | None) -> tuple[EnergyWindow, ...]:
    return sound_windows(use.windows if use is not None else ())


def sound_windows(windows: Iterable[EnergyWindow]) -> tuple[EnergyWindow, ...]:
    return tuple(
        window
        for window in windows
        if window.steps > 0 and all(1e-30 < number < 1e30 for number in (window.seconds, window.joules))
    )


def _net(use: EnergyUse, windows: Sequence[EnergyWindow], unsure: float) -> tuple[float | None, Range | None, str]:
    """Returns idle power, what a step takes beyond it, or why that is unknown; its ends are by the two idle powers.

    There is none where its low end is within the joules that a step is `unsure` by: the difference of two numbers that
    are nearly the same is noise.
    """
    ends = (("before", use.idle_before), ("after", use.idle_after))
    idles = [watts for _, watts in ends if watts is not None and 0 <= watts < math.inf]
    if len(idles) < len(ends):
        missing = " and ".join(when for when, watts in ends if watts not in idles)
        return None, None, use.why or f"the idle power {missing} its windows was not measured"
    idle = statistics.fmean(idles)
    low, middle, high = (
        [(window.joules - watts * window.seconds) / window.steps for window in windows]
        for watts in (max(idles), idle, min(idles))
    )
    net = Range(statistics.median(middle), min(low), max(high))
    if net.low <= unsure:
        return idle, None, f"what it takes beyond idling, {units.count(idle, 'W')}, is too little to tell"
    return idle, net, ""


NO_SOURCE = "none"
MOST_UNCERTAIN = 0.01
# The most that windows may differ by in joules a step, as a share of the median.
MOST_APART = 0.05


def why_unresolved(energy: EnergyUse | None) -> str:
    """Returns why an energy is not resolved; '' if it is, was not asked for, or the device has no source.

    A power sensor is never resolved, because its error is unknown. A missing idle power leaves the gross energy as good
    as it is.
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
    elif (apart := (max(joules) - min(joules)) / statistics.median(joules)) > MOST_APART:
        yield f"its windows are {units.percent(apart)} apart"
    seen = functools.reduce(operator.or_, (window.throttle or 0 for window in windows))
    if held := [name for name in reasons_in(seen) if name not in CHOSEN]:
        yield f"clocks were held back in its windows: {', '.join(held)}"


# The same for joules of a phase.
MOST_PHASE_APART = 0.10
# If phases take more or less than their time in the step by this share, they did not do what the step does.
MOST_OFF = 0.10


@dataclass(frozen=True)
class PhaseJoules:
    """Joules of one phase of a step. `found` is the range of its windows with their uncertainty, `seconds` its time
    by itself, `seconds_width` how much windows differ in it. All None for an estimate: the step's joules by share of
    the time, or for unattributed time what measured phases and other estimates leave of them; `why` says why it is
    one."""

    phase: str
    joules: float
    found: Range | None = None
    seconds: float | None = None
    seconds_width: float = 0.0
    why: str = ""

    @property
    def provenance(self) -> Provenance:
        return Provenance.ESTIMATED if self.found is None else Provenance.MEASURED

    @property
    def low(self) -> float | None:
        return None if self.found is None else self.found.low

    @property
    def high(self) -> float | None:
        return None if self.found is None else self.found.high


@dataclass(frozen=True)
class PhaseEnergies:
    """All phases of a step. `residual` are its joules that no measured phase takes, in `residual_seconds`.

    It is None where no phase was measured, or where the phases are void, for the reason `void`. `pace` is the time of
    the measured phases by themselves over their time in the step, `noise` how far it may be from 1 by chance.
    """

    phases: tuple[PhaseJoules, ...]
    residual: Range | None = None
    residual_seconds: float = 0.0
    void: str = ""
    pace: float | None = None
    noise: float = 0.0

    @property
    def off_pace(self) -> str:
        """Words on two times that disagree; '' where they do not."""
        if self.pace is None or abs(self.pace - 1) <= self.noise:
            return ""
        return (
            f"by themselves its phases take {units.ratio(self.pace)} of their time in a step, where "
            f"+-{units.percent(self.noise)} is noise"
        )


def phase_energies(record: Record, finding: Finding | None) -> PhaseEnergies | None:
    """Returns None where the case has no energy, or its phases are not known."""
    figures = energy_figures(record)
    if figures is None or record.energy is None:
        return None
    estimated = dict(_estimated(figures, finding))
    asked = {phase.phase: phase for phase in record.energy.phases}
    told = {phase: _measured(energy) for phase, energy in asked.items()}
    measured = {phase: joules for phase, joules in told.items() if isinstance(joules, PhaseJoules)}
    whys = {phase: why for phase, why in told.items() if isinstance(why, str)}
    held = _checked_against_step(figures, measured, estimated, finding) if measured else PhaseEnergies(())
    if held.void:
        measured, whys = {}, dict.fromkeys(asked, held.void)
    rest = [PhaseJoules(phase, joules, why=whys.get(phase, "")) for phase, joules in estimated.items()]
    every = {phase.phase: phase for phase in rest} | measured
    if measured and held.residual is not None:
        others = (phase.joules for phase in rest if phase.phase not in {*measured, UNATTRIBUTED})
        every[UNATTRIBUTED] = PhaseJoules(UNATTRIBUTED, max(0.0, held.residual.middle - sum(others)))
    return replace(held, phases=tuple(every.values())) if every else None


def _estimated(figures: EnergyFigures, finding: Finding | None) -> Iterator[tuple[str, float]]:
    """Yields the joules of a step by the best case's shares of time, as if all phases took the same power."""
    if finding is None or not finding.best_seconds:
        return
    for phase, seconds in finding.phases:
        if 0 < seconds < math.inf:
            yield phase, figures.gross.middle * seconds / finding.best_seconds


def _measured(asked: PhaseEnergy) -> PhaseJoules | str:
    """Returns the energy in the windows of a phase, or why there is none."""
    windows = sound_windows(asked.windows)
    if not windows:
        return asked.why or "no window was measured, and nothing says why"
    joules = [window.joules / window.steps for window in windows]
    middle = statistics.median(joules)
    if (apart := max(joules) - min(joules)) > MOST_PHASE_APART * middle:
        return f"its windows are {units.percent(apart / middle)} apart"
    unsure = [window.uncertainty or 0.0 for window in windows]
    ends = list(zip(joules, unsure, strict=True))
    span = Range(
        middle, min(value * (1 - share) for value, share in ends), max(value * (1 + share) for value, share in ends)
    )
    seconds = [window.seconds / window.steps for window in windows]
    return PhaseJoules(asked.phase, middle, span, statistics.median(seconds), max(seconds) - min(seconds))


def _checked_against_step(
    figures: EnergyFigures, measured: Mapping[str, PhaseJoules], estimated: Mapping[str, float], finding: Finding | None
) -> PhaseEnergies:
    """Computes the residual and checks it against what the device can take in the rest of the step's time.

    That is between idling and the most that it takes in any phase. Where times are too noisy, the rest is the time of
    unmeasured phases.
    """
    ranges = [phase.found for phase in measured.values() if phase.found is not None]
    by_themselves = sum(phase.seconds or 0.0 for phase in measured.values())
    step, gross = figures.seconds.middle, figures.gross.widened(figures.uncertainty or 0.0)
    rest = step - by_themselves
    residual = Range(
        gross.middle - sum(span.middle for span in ranges),
        gross.low - sum(span.high for span in ranges),
        gross.high - sum(span.low for span in ranges),
    )
    elsewhere = sum(joules for phase, joules in estimated.items() if phase not in measured)
    in_step = step * (1 - elsewhere / figures.gross.middle)
    pace = by_themselves / in_step if in_step > 0 else math.inf
    own = sum(phase.seconds_width for phase in measured.values()) / by_themselves if by_themselves else 0.0
    noise = max(SAME, (finding.spread if finding else None) or 0.0, figures.seconds.width / step, own)
    powers = [phase.joules / phase.seconds for phase in measured.values() if phase.seconds]
    left = rest if abs(pace - 1) <= MOST_OFF else step - in_step
    ends = sorted((left * max([*powers, figures.watts]), left * (figures.idle or 0.0)))
    held = PhaseEnergies((), residual, rest, "", pace, noise)
    return replace(held, void=_void(held, figures.gross.middle, by_themselves, ends))


def _void(held: PhaseEnergies, gross: float, by_themselves: float, ends: Sequence[float]) -> str:
    """Returns why no phase counts as measured, whatever its windows say; '' if they fit the step."""
    residual, pace = held.residual, held.pace
    assert residual is not None and pace is not None
    if abs(pace - 1) > max(MOST_OFF, held.noise):
        return (
            f"by themselves they take {units.seconds(by_themselves)} where a step has "
            f"{units.seconds(by_themselves / pace if pace else None)} for them: that is not what the step does"
        )
    if residual.high < ends[0] or residual.low > ends[1]:
        return (
            f"they come to {units.joules(gross - residual.middle)} where a step takes {units.joules(gross)}, further "
            "apart than the error of both"
        )
    return ""
