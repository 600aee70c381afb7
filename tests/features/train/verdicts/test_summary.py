"""Energy of a step and to the same loss, of windows and losses made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.features.train import words
from fp8bench.features.train.values import ArmCost, KeptTraining
from fp8bench.features.train.verdicts.summary import TrainedEnergy, energies_of
from fp8bench.features.train.verdicts.verdicts import AdjustedSpeed, verdicts_of
from fp8bench.model import EnergyUse, Interval
from tests.counts import for_each
from tests.energies import TOO_FEW, use
from tests.learning_curves import lines, training

GAPS = {"fp8": [0.02, 0.03, 0.025, 0.02, 0.03]}
REFERENCE = use([2.0, 2.0, 2.0])


def interval(point: float, low: float, high: float) -> Interval:
    return Interval(point, low, high, 0.95)


def energy_of(
    own: EnergyUse, reference: EnergyUse = REFERENCE, native: bool = True, fewer: Interval | None = None,
    bounded: bool = False,
) -> TrainedEnergy:  # fmt: skip
    """What is said of fp8, which takes so many times fewer steps."""
    costs = ArmCost("bf16", 0, energy=reference), ArmCost("fp8", 0, energy=own)
    kept = KeptTraining(training(), (*lines(GAPS), *costs), True, "x/steps.jsonl")
    found = verdicts_of(kept.training, kept.lines)
    speed = AdjustedSpeed(interval(1, 1, 1), None, bounded, fewer) if fewer else None
    said = tuple(replace(one, arm=replace(one.arm, native=native), speed=speed) for one in found.arms)
    return energies_of(kept, replace(found, arms=said))["fp8"]


def test_it_is_joules_of_a_step_times_steps() -> None:
    """Half the joules and nine tenths as many times fewer steps; ends are those that windows and seeds allow."""
    found = energy_of(use([0.99, 1.0, 1.01]), fewer=interval(0.9, 0.8, 1.0))
    assert found.joules is not None and (found.joules.middle, found.joules.low, found.joules.high) == (1.0, 0.99, 1.01)
    assert found.to_loss is not None and found.to_loss.point == pytest.approx(0.5 / 0.9)
    assert found.to_loss.low == pytest.approx(0.495 / 1.004**2 / 1.0)
    assert found.to_loss.high == pytest.approx(0.505 * 1.004**2 / 0.8) and found.why == ""
    assert words.energy(found).startswith("1.00 J a step [990 mJ, 1.01 J]; 0.556x [0.491x, 0.636x] of the reference's")


def test_of_one_that_learns_far_less_it_is_at_least_so_much() -> None:
    found = energy_of(use([1.0] * 3), fewer=interval(1 / 3, 0.0, 1 / 3), bounded=True)
    assert found.at_least and found.to_loss is not None and found.to_loss.point == pytest.approx(1.5)
    assert "at least 1.500x of the reference's energy" in words.energy(found)


SURE = interval(0.9, 0.8, 1.0)
WHYS = {
    "emulated: joules of its steps are the cost": {"native": False},
    "3 windows are needed to compare, and there are 1": {"own": use([1.0])},
    "its windows are by instant, the reference's by counter": {"own": use([1.0] * 3, source="instant")},
    "it is unknown how far its power sensor can be off": {
        "own": use([1.0] * 3, source="instant"), "reference": use([2.0] * 3, source="instant"),
    },
    "fewer than 5 pairs of seeds": {"fewer": None},
}  # fmt: skip


@for_each("why", WHYS)
def test_nothing_is_said_without_a_reason(why: str) -> None:
    """Joules of a step stand all the same; an emulated arm has no energy to a loss."""
    given = {"own": use([1.0] * 3), "fewer": SURE, **WHYS[why]}
    found = energy_of(**given)  # type: ignore[arg-type]
    assert found.joules is not None and found.to_loss is None and found.why.startswith(why)


def test_no_window_is_never_nothing() -> None:
    found = energy_of(use([], why=TOO_FEW), fewer=SURE)
    assert found == TrainedEnergy(None, why=TOO_FEW) and words.energy(found) == f"no energy: {TOO_FEW}"
