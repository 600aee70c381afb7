"""What an arm of a training came to: the figures of its row, wherever that is shown or sent."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8bench.analysis.energy import LEAST_WINDOWS, Range, energy_samples
from fp8bench.features.train.values import (
    BYTES_PER_PARAMETER,
    WIRE_BYTES,
    Arm,
    ArmCost,
    ArmRole,
    KeptTraining,
    StepFigure,
    StepRow,
    TrainingEvent,
)
from fp8bench.features.train.verdicts.curves import Curve, Gap, Key, curves_of
from fp8bench.features.train.verdicts.verdicts import ArmVerdict, TrainingVerdicts
from fp8bench.model import Capacity, EnergyUse, Interval


@dataclass(frozen=True)
class ArmSummary:
    """Losses are means over seeds: `loss` over the last tenth of the steps, `held_out` after the last one.

    `tokens_per_second` is by the median step, None for an emulated arm. `peak_memory` is that of the arm alone, and
    `device_peak_memory` what it would be where hardware keeps the formats; other seeds and the repeat of the reference
    take what it takes, and have neither `capacity` nor `energy`. `wire` is what a rank sends in a step, in bytes by
    operation and dtype, of several ranks. `events` is None
    for an arm without a step, `said` for the reference and its bands. `steps` are those of all seeds.
    """

    arm: Arm
    steps: int
    loss: float | None
    held_out: float | None
    tokens_per_second: float | None
    bytes_per_parameter: float | None
    peak_memory: int | None
    device_peak_memory: int | None
    wire: Mapping[str, float]
    capacity: Capacity | None
    energy: TrainedEnergy | None
    events: int | None
    said: ArmVerdict | None


def summaries_of(
    kept: KeptTraining, found: TrainingVerdicts, curves: Mapping[Key, Curve] | None = None
) -> tuple[ArmSummary, ...]:
    """Of every arm, in their order. `curves` are those of its lines, for who has them."""
    curves = curves_of(kept.lines, kept.training.request.steps) if curves is None else curves
    peaks = {line.arm: line.memory for line in kept.of(ArmCost) if line.memory is not None}
    capacities = {line.arm: line.capacity for line in kept.of(ArmCost) if line.capacity is not None}
    # What a user's own optimizer keeps is there after its first step alone.
    kept_bytes = {
        line.arm: sum(size for _, size in line.kept) / kept.training.parameters
        for line in kept.of(ArmCost) if line.kept and kept.training.request.settings.make
    }  # fmt: skip
    lead = next(arm.name for arm in kept.training.arms if arm.role is ArmRole.REFERENCE)
    energies = energies_of(kept, found)
    sent: dict[str, dict[tuple[int, int], dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    events, sizes, paces = Counter[str](), defaultdict[str, dict[int, float]](dict), defaultdict[str, list[float]](list)
    for line in kept.lines:
        if isinstance(line, StepRow):
            if line.seconds > 0:  # a watched step has no time of its own
                paces[line.arm].append(line.seconds / line.tokens)
        elif isinstance(line, TrainingEvent):
            events[line.arm] += 1
        elif isinstance(line, StepFigure) and line.name == BYTES_PER_PARAMETER:
            sizes[line.arm][line.seed] = sizes[line.arm].get(line.seed, 0.0) + line.value
        elif isinstance(line, StepFigure) and line.name == WIRE_BYTES:
            sent[line.arm][line.seed, line.step][line.layer] = line.value
    summaries = []
    for arm in kept.training.arms:
        own = [curve for (name, _), curve in curves.items() if name == arm.name]
        memory = peaks.get(lead if arm.is_band else arm.name)
        summary = ArmSummary(
            arm,
            steps=sum(len(curve.rows) for curve in own),
            loss=mean_of([curve.endpoint for curve in own if curve.whole]),
            held_out=mean_of([curve.held_out[curve.steps] for curve in own if curve.steps in curve.held_out]),
            tokens_per_second=1 / statistics.median(paces[arm.name]) if arm.native and paces[arm.name] else None,
            bytes_per_parameter=kept_bytes.get(arm.name, next(iter(sizes[arm.name].values()), None)),
            peak_memory=memory.peak if memory else None,
            device_peak_memory=memory.on_device if memory else None,
            wire=next(iter(sent[arm.name].values()), {}),
            capacity=capacities.get(arm.name),
            energy=energies.get(arm.name),
            events=events[arm.name] if own else None,
            said=found.of(arm.name),
        )
        summaries.append(summary)
    return tuple(summaries)


def mean_of(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def figures_of(summary: ArmSummary, found: TrainingVerdicts) -> dict[str, float | None]:
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
        "device_peak_memory": summary.device_peak_memory,
        "wire_bytes": math.fsum(summary.wire.values()) if summary.wire else None,
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


def _band(arm: Arm, found: TrainingVerdicts) -> dict[str, float | None]:
    if arm.role is ArmRole.OTHER_SEED and found.seed_band is not None:
        return {"seed_band": found.seed_band.deviation, "seed_band_largest": found.seed_band.largest}
    if arm.role is ArmRole.REPEAT and found.repeat_band is not None:
        return {"first_difference": found.repeat_band.first, "largest_difference": found.repeat_band.largest}
    return {}


@dataclass(frozen=True)
class TrainedEnergy:
    """`joules` are those of a step, by its windows. `to_loss` is the ratio to the reference's to the same loss, below 1
    is less; with `at_least` it is so much or more. `why` says why one of them is not known, '' where that needs no
    reason.
    """

    joules: Range | None
    to_loss: Interval | None = None
    at_least: bool = False
    why: str = ""


def energies_of(kept: KeptTraining, found: TrainingVerdicts) -> dict[str, TrainedEnergy]:
    uses = {cost.arm: cost.energy for cost in kept.of(ArmCost) if cost.energy is not None}
    return {arm: _energy(arm, uses, found) for arm in uses}


def _energy(arm: str, uses: Mapping[str, EnergyUse], found: TrainingVerdicts) -> TrainedEnergy:
    own, reference, said = uses[arm], uses.get(found.reference), found.of(arm)
    samples = energy_samples(own)
    if not samples:
        return TrainedEnergy(None, why=own.why or "no window was measured, and nothing says why")
    joules = Range(statistics.median(samples), min(samples), max(samples))
    if said is None or reference is None:
        return TrainedEnergy(joules, why=own.why)
    why = _why_not_to_loss(said, own, reference)
    if why or said.speed is None or said.speed.fewer_steps is None:
        return TrainedEnergy(joules, why="; ".join(filter(None, (own.why, why))))
    step, fewer = _ratio(own, reference), said.speed.fewer_steps
    low, high = step.low / fewer.high, (step.high / fewer.low if fewer.low > 0 else math.inf)
    point = Interval(step.point / fewer.point, low, high, fewer.level)
    return TrainedEnergy(joules, point, said.speed.bounded, own.why)


def _why_not_to_loss(said: ArmVerdict, own: EnergyUse, reference: EnergyUse) -> str:
    """Why nothing can be said of the energy to a loss, '' where it can, or where the speed says why not."""
    if not said.arm.native:
        return "emulated: joules of its steps are the cost of emulation"
    if own.source != reference.source:
        return f"its windows are by {own.source}, the reference's by {reference.source}"
    fewest = min(len(energy_samples(use)) for use in (own, reference))
    if fewest < LEAST_WINDOWS:
        return f"{LEAST_WINDOWS} windows are needed to compare, and there are {fewest}"
    if _uncertainty(own) is None or _uncertainty(reference) is None:
        return "it is unknown how far its power sensor can be off"
    return "" if said.speed is not None else "fewer than 5 pairs of seeds, or no verdict, say how many steps it takes"


def _uncertainty(use: EnergyUse) -> float | None:
    known = [window.uncertainty for window in use.windows if window.uncertainty is not None]
    return max(known) if known and len(known) == len(use.windows) else None


def _ratio(own: EnergyUse, reference: EnergyUse) -> Interval:
    """Joules of a step over the reference's, with what any pair of windows gives."""
    first, second = energy_samples(own), energy_samples(reference)
    wide = (1 + (_uncertainty(own) or 0.0)) * (1 + (_uncertainty(reference) or 0.0))
    point = statistics.median(first) / statistics.median(second)
    return Interval(point, min(first) / max(second) / wide, max(first) / min(second) * wide, 1.0)
