"""What an arm of a training came to: the figures of its row, wherever that is shown or sent."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fp8bench.features.train.values import (
    BYTES_PER_PARAMETER,
    Arm,
    ArmCost,
    ArmRole,
    KeptTraining,
    StepFigure,
    StepRow,
    TrainingEvent,
)
from fp8bench.features.train.verdicts.curves import Curve, Key, curves_of
from fp8bench.features.train.verdicts.energy import TrainedEnergy, energies_of
from fp8bench.features.train.verdicts.judging import Gap
from fp8bench.features.train.verdicts.verdicts import ArmVerdict, Verdicts
from fp8bench.model import Capacity, Interval


@dataclass(frozen=True)
class ArmSummary:
    """Losses are means over seeds: `loss` over the last tenth of the steps, `held_out` after the last one.

    `tokens_per_second` is by the median step, None for an emulated arm. `peak_memory` is that of the arm alone; other
    seeds and the repeat of the reference take what it takes, and have neither `capacity` nor `energy`. `events` is None
    for an arm without a step, `said` for the reference and its bands. `steps` are those of all seeds.
    """

    arm: Arm
    steps: int
    loss: float | None
    held_out: float | None
    tokens_per_second: float | None
    bytes_per_parameter: float | None
    peak_memory: int | None
    capacity: Capacity | None
    energy: TrainedEnergy | None
    events: int | None
    said: ArmVerdict | None


def summaries_of(
    kept: KeptTraining, found: Verdicts, curves: Mapping[Key, Curve] | None = None
) -> tuple[ArmSummary, ...]:
    """Of every arm, in their order. `curves` are those of its lines, for who has them."""
    curves = curves_of(kept.lines, kept.training.request.steps) if curves is None else curves
    peaks = {line.arm: line.memory.peak for line in kept.of(ArmCost) if line.memory is not None}
    capacities = {line.arm: line.capacity for line in kept.of(ArmCost) if line.capacity is not None}
    lead = next(arm.name for arm in kept.training.arms if arm.role is ArmRole.REFERENCE)
    energies = energies_of(kept, found)
    events, sizes, paces = Counter[str](), defaultdict[str, dict[int, float]](dict), defaultdict[str, list[float]](list)
    for line in kept.lines:
        if isinstance(line, StepRow):
            if line.seconds > 0:  # a watched step has no time of its own
                paces[line.arm].append(line.seconds / line.tokens)
        elif isinstance(line, TrainingEvent):
            events[line.arm] += 1
        elif isinstance(line, StepFigure) and line.name == BYTES_PER_PARAMETER:
            sizes[line.arm][line.seed] = sizes[line.arm].get(line.seed, 0.0) + line.value
    alike = {arm.name: arm.name if arm.role is ArmRole.CANDIDATE else lead for arm in kept.training.arms}
    return tuple(
        _summary(
            arm,
            curves,
            found,
            paces[arm.name],
            sizes[arm.name],
            peaks.get(alike[arm.name]),
            capacities.get(arm.name),
            energies.get(arm.name),
            events[arm.name],
        )
        for arm in kept.training.arms
    )


def _summary(
    arm: Arm, curves: Mapping[Key, Curve], found: Verdicts, paces: Sequence[float], sizes: Mapping[int, float],
    peak: int | None, capacity: Capacity | None, energy: TrainedEnergy | None, events: int,
) -> ArmSummary:  # fmt: skip
    own = [curve for (name, _), curve in curves.items() if name == arm.name]
    return ArmSummary(
        arm,
        sum(len(curve.rows) for curve in own),
        _mean([curve.endpoint for curve in own if curve.whole]),
        _mean([curve.held_out[curve.steps] for curve in own if curve.steps in curve.held_out]),
        1 / median(paces) if arm.native and paces else None,
        next(iter(sizes.values()), None),
        peak,
        capacity,
        energy,
        events if own else None,
        found.of(arm.name),
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def figures_of(summary: ArmSummary, found: Verdicts) -> dict[str, float | None]:
    """All numbers by their names. Gaps are shares, each with its interval of 95%, 'gap_deciding' with that of 99%.

    A band stands with the arm that makes it.
    """
    said = summary.said
    energy = summary.energy
    speed = said.speed.adjusted if said and said.speed else None
    return {
        "loss": summary.loss, "held_out": summary.held_out, **_gap("gap", said.judged.gap if said else None),
        **_gap("held_out_gap", said.judged.held_out if said else None),
        "tokens_per_second": summary.tokens_per_second, **_interval("speed_to_same_loss", speed),
        "bytes_per_parameter": summary.bytes_per_parameter, "peak_memory": summary.peak_memory,
        "largest_batch": summary.capacity.batch if summary.capacity else None,
        "joules_per_step": energy.joules.middle if energy and energy.joules else None,
        **_interval("energy_to_same_loss", energy.to_loss if energy else None),
        "events": summary.events, **_band(summary.arm, found),
    }  # fmt: skip


def _gap(name: str, found: Gap | None) -> dict[str, float | None]:
    if found is None:
        return {**_interval(name, None), **_interval(f"{name}_deciding", None), f"{name}_pairs": None}
    ends = {**_interval(name, found.shown), **_interval(f"{name}_deciding", found.decides)}
    return {**ends, name: found.point, f"{name}_pairs": found.pairs}


def _interval(name: str, found: Interval | None) -> dict[str, float | None]:
    point, low, high = (found.point, found.low, found.high) if found else (None, None, None)
    return {name: point, f"{name}_low": low, f"{name}_high": high}


def _band(arm: Arm, found: Verdicts) -> dict[str, float | None]:
    if arm.role is ArmRole.OTHER_SEED and found.seed_band is not None:
        return {"seed_band": found.seed_band.deviation, "seed_band_largest": found.seed_band.largest}
    if arm.role is ArmRole.REPEAT and found.repeat_band is not None:
        return {"first_difference": found.repeat_band.first, "largest_difference": found.repeat_band.largest}
    return {}
