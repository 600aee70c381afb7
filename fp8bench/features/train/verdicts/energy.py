"""What an arm of a training takes of energy: joules of a step by its windows, and to the loss of the reference.

To a loss it is the ratio of joules of a step over the ratio of steps. The ends of the first are those of any pair of
windows, with the uncertainty of both, and of the second the interval over seeds: no confidence is claimed for both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from fp8bench.analysis.energy import LEAST_WINDOWS, Range, energy_samples
from fp8bench.features.train.values import ArmCost, KeptTraining
from fp8bench.features.train.verdicts.verdicts import ArmVerdict, Verdicts
from fp8bench.model import EnergyUse, Interval


@dataclass(frozen=True)
class TrainedEnergy:
    """`joules` are those of a step. `to_loss` is the ratio to the reference's to the same loss, below 1 is less; with
    `at_least` it is so much or more. `why` says why one of them is not known, '' where that needs no reason."""

    joules: Range | None
    to_loss: Interval | None = None
    at_least: bool = False
    why: str = ""


def energies_of(kept: KeptTraining, found: Verdicts) -> dict[str, TrainedEnergy]:
    """Of the arms that were asked."""
    uses = {cost.arm: cost.energy for cost in kept.of(ArmCost) if cost.energy is not None}
    return {arm: _energy(arm, uses, found) for arm in uses}


def _energy(arm: str, uses: Mapping[str, EnergyUse], found: Verdicts) -> TrainedEnergy:
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
    fewest = min(len(energy_samples(one)) for one in (own, reference))
    if fewest < LEAST_WINDOWS:
        return f"{LEAST_WINDOWS} windows are needed to compare, and there are {fewest}"
    if _uncertainty(own) is None or _uncertainty(reference) is None:
        return "it is unknown how far its power sensor can be off"
    return "" if said.speed is not None else "fewer than 5 pairs of seeds, or no verdict, say how many steps it takes"


def _uncertainty(use: EnergyUse) -> float | None:
    known = [one.uncertainty for one in use.windows if one.uncertainty is not None]
    return max(known) if known and len(known) == len(use.windows) else None


def _ratio(own: EnergyUse, reference: EnergyUse) -> Interval:
    """Joules of a step over the reference's, with what any pair of windows gives."""
    first, second = energy_samples(own), energy_samples(reference)
    wide = (1 + (_uncertainty(own) or 0.0)) * (1 + (_uncertainty(reference) or 0.0))
    point = statistics.median(first) / statistics.median(second)
    return Interval(point, min(first) / max(second) / wide, max(first) / min(second) * wide, 1.0)
