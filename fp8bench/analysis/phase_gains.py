"""Finds the phases that are faster or slower than the reference's, and explains a step's speed-up by them.

Phases are estimated like the step: from the fastest quarter of the rounds that the case, its reference and the
control share. So the gains of all phases sum to the gain of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from fp8bench.analysis import stats
from fp8bench.analysis.verdicts import (
    FINAL_LEVEL,
    are_cell_counts_uneven,
    cell_seconds,
    count_common_calls,
    fastest_step_cells,
)
from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Phase, PhaseGain, Timing

_UNATTRIBUTED_PHASE_INDEX = CELL_PHASES.index(UNATTRIBUTED)


@dataclass(frozen=True)
class _PhaseTimes:
    """The seconds of each phase of one case, with shape (phases,), and the same seconds in each bootstrap resample,
    with shape (phases, resamples).
    """

    seconds: stats.FloatArray
    resampled_values: stats.FloatArray


def find_phase_gains(
    timings: Sequence[Timing], rounds: Sequence[int], whole_steps: bool, is_reference_unmarked: bool = False
) -> tuple[PhaseGain, ...]:
    """Returns how many seconds each phase of the first timing saves compared with the other timings, in the order of
    the phases.

    The bounds hold for all phases together, at the level of a verdict. With `whole_steps`, the fastest steps are
    compared. If the reference has no phase marks (`is_reference_unmarked`), products count as unattributed time in
    both.
    """
    # 1. Estimate the phase times of each timing. The reference's times are the mean of its timing and its control's.
    common_call_count = count_common_calls(*timings)
    whole_steps = whole_steps or are_cell_counts_uneven(
        [cell_seconds(timing, common_call_count, rounds) for timing in timings]
    )
    case, *reference_estimates = [
        _estimate_phase_times(timing, common_call_count, rounds, whole_steps) for timing in timings
    ]
    reference_seconds = np.mean([estimate.seconds for estimate in reference_estimates], axis=0)
    resampled_gains = (
        np.mean([estimate.resampled_values for estimate in reference_estimates], axis=0) - case.resampled_values
    )
    control_seconds_difference = np.ptp([estimate.seconds for estimate in reference_estimates], axis=0)
    # 2. If the reference does not mark phases, move the case's phases that it lacks (except casts) to the case's
    # unattributed time.
    if is_reference_unmarked:
        unmarked_phase_indices = [
            phase_index
            for phase_index, name in enumerate(CELL_PHASES)
            if reference_seconds[phase_index] == 0 and name != Phase.CAST
        ]
        for values in (case.seconds, resampled_gains):
            values[_UNATTRIBUTED_PHASE_INDEX] += values[unmarked_phase_indices].sum(axis=0)
            values[unmarked_phase_indices] = 0
    # 3. Compute bounds that hold for all phases at once: divide the allowed error by the number of phases (Bonferroni).
    present_phase_indices = np.flatnonzero((case.seconds > 0) | (reference_seconds > 0))
    tail_probability = (1 - FINAL_LEVEL) / 2 / max(1, len(present_phase_indices))
    low, high = np.quantile(resampled_gains, [tail_probability, 1 - tail_probability], axis=1)
    phase_gains = []
    for index in present_phase_indices:
        values = (
            case.seconds[index],
            reference_seconds[index],
            low[index],
            high[index],
            control_seconds_difference[index],
        )
        phase_gains.append(PhaseGain(CELL_PHASES[index], *map(float, values)))
    return tuple(phase_gains)


def scale_gains_to_ratio(gains: Sequence[PhaseGain], ratio: float) -> tuple[PhaseGain, ...]:
    """Scales the seconds of a case so that its gains sum to the ratio that several sessions gave.

    Bounds are only widened, so a phase is clear only if it is clear before and after scaling.
    """
    seconds, reference_seconds = sum(gain.seconds for gain in gains), sum(gain.reference_seconds for gain in gains)
    time_scale_factor = ratio * reference_seconds / seconds if seconds > 0 else 1.0
    scaled_gains = []
    for gain in gains:
        saved_seconds = gain.seconds * (1 - time_scale_factor)
        low, high = min(gain.low, gain.low + saved_seconds), max(gain.high, gain.high + saved_seconds)
        scaled_gains.append(replace(gain, seconds=gain.seconds * time_scale_factor, low=low, high=high))
    return tuple(scaled_gains)


def _estimate_phase_times(timing: Timing, calls: int, rounds: Sequence[int], whole_steps: bool) -> _PhaseTimes:
    if whole_steps:
        steps = fastest_step_cells(timing, calls, rounds)
        segment_seconds, resampled_segments = stats.average_fastest_steps(steps), stats.resample_fastest_steps(steps)
    else:
        samples = cell_seconds(timing, calls, rounds)
        segment_seconds, resampled_segments = stats.find_best_by_segment(samples), stats.resample_segments(samples)
    phases = [CELL_PHASES.index(name) for name in timing.segments.phases]
    segment_phase_matrix = np.zeros((len(CELL_PHASES), len(phases)))
    segment_phase_matrix[phases, range(len(phases))] = 1
    return _PhaseTimes(segment_phase_matrix @ segment_seconds, segment_phase_matrix @ resampled_segments)


class PhaseGainCause(StrEnum):
    """How the times of phases explain that a precision is faster or not."""

    CANCEL = "gains and losses cancel"
    CASTS = "casts take the gain"
    SMALL_SHARE = "the faster phases are a small share of the step"
    ONE_PHASE = "all of the gain is in one phase"
    PHASES = "the largest differences"


@dataclass(frozen=True)
class PhaseGainReason:
    """The cause of a precision's gain or loss, and the phases that show it, the largest difference first."""

    cause: PhaseGainCause
    gains: tuple[PhaseGain, ...]
    step_seconds: float
    reference_seconds: float


# The cause is CANCEL if the seconds that some phases gain, and those that others lose, both exceed the step's gain or
# loss by this factor.
_CANCELLING_GAIN_RATIO = 4.0
# The cause is CASTS if casts add at least this share of the time that faster phases save.
_MIN_CASTS_LOSS_SHARE = 0.5
# The cause is SMALL_SHARE if the step's time changes by less than the first share of the reference's time, and its
# faster phases take less than the second.
_SMALL_GAIN_SHARE, _SMALL_PHASES_SHARE = 0.05, 0.25
# The cause is ONE_PHASE if one phase has at least this share of the gain.
_ONE_PHASE_SHARE = 0.9
# A phase is named as a cause only if its time differs from the reference's by at least this share of the step's
# difference or of the largest phase's difference, whichever is larger.
_MIN_SHARE_OF_GAIN = 0.02
_MAX_SHOWN_PHASES = 3


def find_explaining_phases(gains: Sequence[PhaseGain], unclear_phases: Collection[str] = ()) -> PhaseGainReason | None:
    """Returns which phases explain a step's speed-up. Returns None if no phase clearly differs, or if the step has only
    one phase.

    A phase in `unclear_phases` is never an explanation, however much it seems to gain.
    """
    seconds, reference_seconds = sum(gain.seconds for gain in gains), sum(gain.reference_seconds for gain in gains)
    net_gain_seconds = reference_seconds - seconds
    largest_phase_difference = max((abs(gain.saved_seconds) for gain in gains), default=0.0)
    min_phase_difference = _MIN_SHARE_OF_GAIN * max(abs(net_gain_seconds), largest_phase_difference)
    clear_phase_gains = [
        gain
        for gain in gains
        if gain.is_clear and gain.phase not in unclear_phases and abs(gain.saved_seconds) >= min_phase_difference
    ]
    if len(gains) < 2 or not clear_phase_gains:
        return None
    clear_phase_gains.sort(key=lambda gain: -abs(gain.saved_seconds))
    return PhaseGainReason(
        _find_gain_cause(clear_phase_gains, net_gain_seconds, reference_seconds),
        tuple(_choose_shown_gains(clear_phase_gains)),
        seconds,
        reference_seconds,
    )


def _choose_shown_gains(clear_gains: Sequence[PhaseGain]) -> list[PhaseGain]:
    """Returns the phases whose times differ most from the reference. If some phases gain and some lose, it returns
    both.
    """
    shown_gains = list(clear_gains[:_MAX_SHOWN_PHASES])
    for is_gain in (True, False):
        gains_of_same_sign = [gain for gain in clear_gains if (gain.saved_seconds > 0) is is_gain]
        if gains_of_same_sign and gains_of_same_sign[0] not in shown_gains:
            # Replace the smallest difference by the largest one of the missing sign.
            shown_gains[-1] = gains_of_same_sign[0]
    return shown_gains


def _find_gain_cause(clear_gains: Sequence[PhaseGain], net_gain: float, reference_seconds: float) -> PhaseGainCause:
    positive_phase_gains = [gain for gain in clear_gains if gain.saved_seconds > 0]
    total_saved_seconds = sum(gain.saved_seconds for gain in positive_phase_gains)
    total_loss_seconds = -sum(gain.saved_seconds for gain in clear_gains if gain.saved_seconds < 0)
    cast_loss_seconds = -sum(gain.saved_seconds for gain in clear_gains if gain.phase == Phase.CAST)
    # 1. Casts take much of what other phases save, and are at least half of all losses.
    if (
        total_saved_seconds > 0
        and cast_loss_seconds >= _MIN_CASTS_LOSS_SHARE * total_saved_seconds
        and cast_loss_seconds >= total_loss_seconds / 2
    ):
        return PhaseGainCause.CASTS
    # 2. Gains and losses are both much larger than their difference.
    if min(total_saved_seconds, total_loss_seconds) > _CANCELLING_GAIN_RATIO * abs(net_gain):
        return PhaseGainCause.CANCEL
    # 3. The step hardly changes, because its faster phases are a small part of it.
    faster_phase_seconds = sum(gain.reference_seconds for gain in positive_phase_gains)
    if (
        positive_phase_gains
        and abs(net_gain) < _SMALL_GAIN_SHARE * reference_seconds
        and faster_phase_seconds < _SMALL_PHASES_SHARE * reference_seconds
    ):
        return PhaseGainCause.SMALL_SHARE
    # 4. The phase with the largest difference gains about as much as the whole step, and the losses are small.
    if (
        net_gain > 0
        and abs(clear_gains[0].saved_seconds - net_gain) <= (1 - _ONE_PHASE_SHARE) * net_gain
        and total_loss_seconds <= (1 - _ONE_PHASE_SHARE) * net_gain
    ):
        return PhaseGainCause.ONE_PHASE
    return PhaseGainCause.PHASES
