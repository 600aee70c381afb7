"""What each phase takes of a step's joules: by windows in which it was done by itself, or by its share of the time.

Phases by themselves are held against the step: their joules and their time have to come to its own. Where they do not,
they were not what the step is made of, and no phase has a measured figure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fp8bench import units
from fp8bench.analysis.energy import EnergyFigures, Range, energy_figures, sound_windows
from fp8bench.analysis.verdicts import SAME
from fp8bench.model import Finding, PhaseEnergy, Provenance, Record
from fp8bench.model.specs import ENERGY_PER, MetricSpec

# Of joules of a phase, from the lowest window to the highest, as a share of the middle one.
MOST_APART = 0.10
# Of the time of the phases in a step: further away than that, what was done by itself is not what the step does.
MOST_OFF = 0.10


@dataclass(frozen=True)
class PhaseJoules:
    """Joules of one phase of a step. `found` is the range of its windows, each with its uncertainty, and `seconds` what
    it takes by itself, in windows that differ by `seconds_width`; None where it is an estimate: the step's joules by
    share of the time. `why` says why it is.
    """

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
    """All phases of a step. `residual` are its joules that no measured phase takes, in `residual_seconds` of it; None
    where none was measured, or where they are void: then `void` says why. `pace` is the time of the measured phases by
    themselves over that which they have in the step, `noise` how far it may be from 1 by chance.
    """

    phases: tuple[PhaseJoules, ...]
    residual: Range | None = None
    residual_seconds: float = 0.0
    void: str = ""
    pace: float | None = None
    noise: float = 0.0

    @property
    def off_pace(self) -> str:
        """That the two times disagree, in words; '' where they do not."""
        if self.pace is None or abs(self.pace - 1) <= self.noise:
            return ""
        return (
            f"by themselves its phases take {units.ratio(self.pace)} of their time in a step, where "
            f"+-{units.percent(self.noise)} is noise"
        )


def phase_energies(record: Record, finding: Finding | None) -> PhaseEnergies | None:
    """None where the case has no energy, or nobody knows its phases."""
    figures = energy_figures(record)
    if figures is None or record.energy is None:
        return None
    estimated = dict(_estimated(figures, finding))
    asked = {phase.phase: phase for phase in record.energy.phases}
    measured = {phase: found for phase, energy in asked.items() if (found := _measured(energy)) is not None}
    whys = {phase: _why_not(energy) for phase, energy in asked.items() if phase not in measured}
    held = _held_against_step(figures, measured, estimated, finding) if measured else PhaseEnergies(())
    if held.void:
        measured, whys = {}, dict.fromkeys(asked, held.void)
    rest = [PhaseJoules(phase, joules, why=whys.get(phase, "")) for phase, joules in estimated.items()]
    every = {phase.phase: phase for phase in rest} | measured
    return replace(held, phases=tuple(every.values())) if every else None


def _estimated(figures: EnergyFigures, finding: Finding | None) -> Iterator[tuple[str, float]]:
    """The joules of a step by the best case's shares of time, as if all phases took the same power."""
    if finding is None or not finding.best_seconds:
        return
    for phase, seconds in finding.phases:
        if 0 < seconds < math.inf:
            yield phase, figures.gross.middle * seconds / finding.best_seconds


def _measured(asked: PhaseEnergy) -> PhaseJoules | None:
    """What the windows of a phase say, where they agree."""
    windows = sound_windows(asked.windows)
    if not windows:
        return None
    joules = [window.joules / window.steps for window in windows]
    middle = statistics.median(joules)
    if max(joules) - min(joules) > MOST_APART * middle:
        return None
    unsure = [window.uncertainty or 0.0 for window in windows]
    ends = list(zip(joules, unsure, strict=True))
    found = Range(
        middle, min(value * (1 - share) for value, share in ends), max(one * (1 + share) for one, share in ends)
    )
    seconds = [window.seconds / window.steps for window in windows]
    return PhaseJoules(asked.phase, middle, found, statistics.median(seconds), max(seconds) - min(seconds))


def _why_not(asked: PhaseEnergy) -> str:
    joules = [window.joules / window.steps for window in sound_windows(asked.windows)]
    if not joules:
        return asked.why or "no window was measured, and nothing says why"
    return f"its windows are {units.percent((max(joules) - min(joules)) / statistics.median(joules))} apart"


def _held_against_step(
    figures: EnergyFigures, measured: Mapping[str, PhaseJoules], estimated: Mapping[str, float], finding: Finding | None
) -> PhaseEnergies:
    """The residual, which has to be what the device takes in the rest of the step's time: between idling and the most
    that it takes in any phase. Where times are too noisy for that, the rest is the time of unmeasured phases."""
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
    """Why no phase is measured, whatever its windows say; '' if they come to the step."""
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


def per_work(record: Record, found: PhaseJoules) -> Iterator[tuple[MetricSpec, float]]:
    """Joules of a phase for a token of the step and for 10^12 FLOPs of its own, as the tape has counted them."""
    own = record.tape.of(found.phase) if record.tape is not None else None
    counts = {"tokens": record.work.tokens, "flops": own.flops if own is not None and not own.unknown else 0}
    for name, count in counts.items():
        spec, many = ENERGY_PER[name]
        if count:
            yield spec, found.joules * many / count
