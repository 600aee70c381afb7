"""What a decision costs: time, energy and money to the same loss, of runs and trainings made by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from fp8bench.features.advise.basis import Trained
from fp8bench.features.advise.decision import costs_of
from fp8bench.features.advise.rule import harm_of
from fp8bench.features.advise.values import AdviceKind, Cost, Met
from fp8bench.features.train.values import KeptTraining, Line
from fp8bench.features.train.verdicts.verdicts import verdicts_of
from fp8bench.model import Level
from tests.advised import FP8, answer, basis, group, only, said
from tests.energies import use
from tests.learning_curves import curve, held_out, lines, rows, training

STEPS = 200


def falling(pace: float) -> list[float]:
    """A loss that falls at so many times the usual pace."""
    return [1.8 + 3.7 * (1 + pace * step / 15) ** -0.7 for step in range(1, STEPS + 1)]


def trained(*paces: float, spread: float = 0.0, steps: int = STEPS) -> Trained:
    """fp8 at these paces, a seed each; losses of a seed differ by the spread."""
    draw = random.Random(0)
    found: list[Line] = []
    for seed, pace in enumerate(paces):
        shift = 1 + draw.gauss(0, spread)
        own = 1 + 1e-4 * seed  # seeds whose references have the same losses are one
        found += rows("bf16", seed, [loss * own for loss in falling(1.0)])
        found += rows("fp8", seed, [loss * own * shift for loss in falling(pace)])
    made = training(steps=steps, seeds=len(paces))
    kept = KeptTraining(made, tuple(found), True, "x/steps.jsonl")
    return Trained(kept, verdicts_of(made, kept.lines))


def cost(learned: Trained | None = None, level: Level = Level.NATIVE, joules: float = 1.0) -> Cost:
    lead, case = group(fp8=FP8, level=level)
    records = [replace(lead, energy=use([2.0, 2.02, 1.98])), replace(case, energy=use([joules] * 3))]
    (found,) = costs_of(basis(records, training=learned))
    return found


def test_time_to_the_same_loss_is_that_of_a_step_times_steps() -> None:
    """A step of 7.6 ms instead of 10, and nine tenths of the pace: 0.76 / 0.9; half the joules, over 0.9."""
    found = cost(trained(*[0.9] * 5))
    assert found.speed is not None and found.speed.point == pytest.approx(10 / 7.6, rel=0.01)
    assert found.time is not None and found.time.point == pytest.approx(0.76 / 0.9, rel=0.02)
    assert found.joules is not None and found.joules.point == pytest.approx(0.5)
    assert found.energy is not None and found.energy.point == pytest.approx(0.5 / 0.9, rel=0.02)
    assert found.energy.low < found.energy.point < found.energy.high
    assert found.hours is not None and found.hours == pytest.approx(STEPS * 0.01 / 3600, rel=0.05)
    assert found.energy_used == pytest.approx(400) and found.why == ""
    money = found.money(2.5)
    assert money is not None and money.point == pytest.approx(2.5 * found.hours * found.time.point)


def test_the_interval_holds_seeds_and_rounds() -> None:
    """Seeds that differ make it wider, on both sides of what they are in the mean."""
    alike, differing = cost(trained(*[0.9] * 5)), cost(trained(*[0.9] * 5, spread=0.004))
    assert alike.time is not None and differing.time is not None
    assert differing.time.half_width > 3 * alike.time.half_width > 0
    assert differing.time.low < 0.76 / 0.9 < differing.time.high and differing.time.level == 0.95


@pytest.mark.parametrize(
    ("learned", "why"),
    [
        (None, "no training was named (--training)"),
        (trained(*[0.9] * 4), "5 seeds are needed, and there are 4"),
        (trained(*[0.1] * 5), "too far from its reference's"),
    ],
)
def test_without_a_training_nothing_is_said_of_a_loss(learned: Trained | None, why: str) -> None:
    found = cost(learned)
    assert found.time is None and found.energy is None and why in found.why and found.money(1.0) is None


def test_an_emulated_precision_has_a_loss_and_no_time() -> None:
    found = cost(trained(*[0.9] * 5), Level.EMULATED)
    assert (found.speed, found.time, found.joules, found.hours) == (None, None, None, None)
    assert found.gap is not None and "emulated: its time is no speed" in found.why


@pytest.mark.slow
def test_intervals_hold_the_truth() -> None:
    """Of 40 trainings whose seeds differ by 0.4% of the loss: 95% of the intervals of five seeds, within its noise."""
    held = 0
    for trial in range(40):
        draw, found = random.Random(trial), list[Line]()
        for seed in range(5):
            own, shift = 1 + 1e-4 * seed, 1 + draw.gauss(0, 0.004)
            found += rows("bf16", seed, [loss * own for loss in falling(1.0)])
            found += rows("fp8", seed, [loss * own * shift for loss in falling(1.0)])
        made = training(steps=STEPS, seeds=5)
        one = cost(Trained(KeptTraining(made, tuple(found), True, "x"), verdicts_of(made, found)))
        held += one.time is not None and one.time.low <= 0.76 <= one.time.high
    assert held >= 34


def late(gap: float, begins: int, steps: int = 200) -> Trained:
    """fp8 whose loss lies above bf16's from that step on, in five seeds; before it by noise of either sign."""
    found: list[Line] = []
    for seed in range(5):
        base = curve(steps, 2.0 + 0.01 * seed)
        noise = 1 + 0.001 * (-1) ** seed
        found += rows("bf16", seed, base)
        found += rows("fp8", seed, [one * ((1 + gap) if step >= begins else noise) for step, one in enumerate(base)])
        found += [held_out("bf16", seed, steps, 2.1), held_out("fp8", seed, steps, 2.1 * (1 + gap + 1e-4 * seed))]
    made = training(steps=steps)
    kept = KeptTraining(made, tuple(found), True, "x")
    return Trained(kept, verdicts_of(made, kept.lines))


def test_a_precision_that_does_harm_late_is_left_before() -> None:
    """From 60% of the steps on: so many steps of its speed are predicted, and no adoption."""
    harmful = late(0.05, 120)
    found = said(group(fp8=FP8), training=harmful)
    one = only(found, AdviceKind.SCHEDULE)
    assert "take fp8 for the first 60% of the steps (120 of 200) and bf16 for the rest" in one.sentence
    assert one.gain is not None and one.gain.point == pytest.approx(1 / (0.6 * 0.76 + 0.4), rel=0.01)
    assert answer(found, "learns").met is Met.NO
    assert "it does not learn as well" in only(found, AdviceKind.NOTHING).sentence


def test_one_that_does_none_needs_no_schedule() -> None:
    """Nor is there one where it does harm from the first step on, or too few steps were trained to tell."""
    assert harm_of(late(0.0, 100), "fp8") is None
    assert harm_of(late(0.05, 0), "fp8") is None
    assert harm_of(late(0.05, 20, steps=40), "fp8") is None
    kept = KeptTraining(training(), lines({"fp8": [0.0001, -0.0001, 0.0002, -0.0002, 0.0]}), True, "x")
    adopted = said(group(fp8=FP8), training=Trained(kept, verdicts_of(kept.training, kept.lines)))
    assert "it learns as well (within noise" in only(adopted, AdviceKind.ADOPT).sentence
    assert not math.isnan(cost(Trained(kept, verdicts_of(kept.training, kept.lines))).hours or 0.0)
