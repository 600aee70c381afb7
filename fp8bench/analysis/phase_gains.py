"""Finds the phases that are faster or slower than the reference's, and what explains the result of the step.

Each phase is estimated like the verdict of the step: from the fastest quarter of the rounds that case, reference and
control share. So the gains of all phases sum to the gain of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from fp8bench.analysis import stats
from fp8bench.analysis.verdicts import FINAL_LEVEL, are_cut_unevenly, cells, fastest_step_cells, fewest_calls
from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Phase, PhaseGain, Timing

_REST = CELL_PHASES.index(UNATTRIBUTED)


@dataclass(frozen=True)
class _PhaseTimes:
    """Seconds of each phase of one arm, (phases,), and those of its resamples, (phases, resamples)."""

    seconds: stats.Floats
    resampled: stats.Floats


def find_phase_gains(
    timings: Sequence[Timing], rounds: Sequence[int], whole: bool, unmarked: bool = False
) -> tuple[PhaseGain, ...]:
    """Returns the gain of each phase of the first timing over the others, in the order of the phases.

    The bounds hold jointly for all phases at the level of a verdict. With `whole`, the fastest steps are compared. If
    the reference is `unmarked`, its products lie outside all phases, so the case's products count as unattributed too.
    """
    # 1. Estimate each arm; the reference by all of its entries.
    calls = fewest_calls(*timings)
    whole = whole or are_cut_unevenly([cells(timing, calls, rounds) for timing in timings])
    case, *entries = [_estimate_phases(timing, calls, rounds, whole) for timing in timings]
    reference = np.mean([entry.seconds for entry in entries], axis=0)
    saved = np.mean([entry.resampled for entry in entries], axis=0) - case.resampled
    control = np.ptp([entry.seconds for entry in entries], axis=0)
    # 2. Merge phases that an unmarked reference lacks.
    if unmarked:
        hidden = [at for at, name in enumerate(CELL_PHASES) if reference[at] == 0 and name != Phase.CAST]
        for values in (case.seconds, saved):
            values[_REST] += values[hidden].sum(axis=0)
            values[hidden] = 0
    # 3. Compute joint bounds for all present phases.
    present = np.flatnonzero((case.seconds > 0) | (reference > 0))
    tail = (1 - FINAL_LEVEL) / 2 / max(1, len(present))
    low, high = np.quantile(saved, [tail, 1 - tail], axis=1)
    gains = []
    for place in present:
        values = (case.seconds[place], reference[place], low[place], high[place], control[place])
        gains.append(PhaseGain(CELL_PHASES[place], *map(float, values)))
    return tuple(gains)


def scale_to_ratio(gains: Sequence[PhaseGain], ratio: float) -> tuple[PhaseGain, ...]:
    """Returns the gains with the case's seconds scaled, so that they sum to a ratio of several sessions.

    The bounds also include those of the single session: a phase is clear only if it is in both.
    """
    seconds, reference = sum(gain.seconds for gain in gains), sum(gain.reference_seconds for gain in gains)
    factor = ratio * reference / seconds if seconds > 0 else 1.0
    scaled = []
    for gain in gains:
        shift = gain.seconds * (1 - factor)
        low, high = min(gain.low, gain.low + shift), max(gain.high, gain.high + shift)
        scaled.append(replace(gain, seconds=gain.seconds * factor, low=low, high=high))
    return tuple(scaled)


def _estimate_phases(timing: Timing, calls: int, rounds: Sequence[int], whole: bool) -> _PhaseTimes:
    if whole:
        steps = fastest_step_cells(timing, calls, rounds)
        points, resampled = stats.best_steps(steps), stats.resample_fastest_steps(steps)
    else:
        samples = cells(timing, calls, rounds)
        points, resampled = stats.best_by_segment(samples), stats.resample_segments(samples)
    phases = [CELL_PHASES.index(name) for name in timing.segments.phases]
    members = np.zeros((len(CELL_PHASES), len(phases)))
    members[phases, range(len(phases))] = 1
    return _PhaseTimes(members @ points, members @ resampled)


class Cause(StrEnum):
    """Why a precision gains or not, as far as its phases show."""

    CANCEL = "gains and losses cancel"
    CASTS = "casts take the gain"
    SMALL_SHARE = "what gains is a small share of the step"
    ONE_PHASE = "all of the gain is in one phase"
    PHASES = "the largest differences"


@dataclass(frozen=True)
class Reason:
    """The cause, and the phases that show it, the largest difference first."""

    cause: Cause
    gains: tuple[PhaseGain, ...]
    step_seconds: float
    reference_seconds: float


# Gains and losses cancel if each is this many times as large as the net.
_CANCEL = 4.0
# Casts take the gain if they cost this share of it.
_CASTS_SHARE = 0.5
# A gain is small if the step gains less than the first share and its phases that gain make up less than the second.
_SMALL_GAIN, _SMALL_SHARE = 0.05, 0.25
# One phase accounts for the gain if it has at least this share of it.
_ALL = 0.9
# Smaller differences explain nothing.
_LEAST_PART = 0.02
_MOST_PHASES = 3


def find_reason(gains: Sequence[PhaseGain], unclear: Collection[str] = ()) -> Reason | None:
    """Returns the explanation by phases; None if no phase differs clearly, or the step has only one.

    `unclear` phases are never an explanation, whatever they seem to gain.
    """
    seconds, reference = sum(gain.seconds for gain in gains), sum(gain.reference_seconds for gain in gains)
    net = reference - seconds
    largest = max((abs(gain.saved_seconds) for gain in gains), default=0.0)
    least = _LEAST_PART * max(abs(net), largest)
    clear = [gain for gain in gains if gain.is_clear and gain.phase not in unclear and abs(gain.saved_seconds) >= least]
    if len(gains) < 2 or not clear:
        return None
    clear.sort(key=lambda gain: -abs(gain.saved_seconds))
    return Reason(_find_cause(clear, net, reference), tuple(_choose_shown(clear)), seconds, reference)


def _choose_shown(clear: Sequence[PhaseGain]) -> list[PhaseGain]:
    """Returns the largest differences, including a gain and a loss if both are clear."""
    shown = list(clear[:_MOST_PHASES])
    for gains in (True, False):
        side = [gain for gain in clear if (gain.saved_seconds > 0) is gains]
        if side and side[0] not in shown:
            shown[-1] = side[0]
    return shown


def _find_cause(clear: Sequence[PhaseGain], net: float, reference: float) -> Cause:
    faster = [gain for gain in clear if gain.saved_seconds > 0]
    gained = sum(gain.saved_seconds for gain in faster)
    lost = -sum(gain.saved_seconds for gain in clear if gain.saved_seconds < 0)
    casts = -sum(gain.saved_seconds for gain in clear if gain.phase == Phase.CAST)
    if gained > 0 and casts >= _CASTS_SHARE * gained and casts >= lost / 2:
        return Cause.CASTS
    if min(gained, lost) > _CANCEL * abs(net):
        return Cause.CANCEL
    in_faster = sum(gain.reference_seconds for gain in faster)
    if faster and abs(net) < _SMALL_GAIN * reference and in_faster < _SMALL_SHARE * reference:
        return Cause.SMALL_SHARE
    if net > 0 and abs(clear[0].saved_seconds - net) <= (1 - _ALL) * net and lost <= (1 - _ALL) * net:
        return Cause.ONE_PHASE
    return Cause.PHASES
