"""How much sooner an arm comes to the same loss."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fp8bench.features.train import words
from fp8bench.features.train.values import UNPAIRED
from fp8bench.features.train.verdicts.curves import Curve
from fp8bench.features.train.verdicts.speed import AdjustedSpeed, adjusted_speed, log_steps
from tests.learning_curves import rows

STEPS = 200
SEEDS = 5


def falling(pace: float = 1.0, steps: int = STEPS) -> list[float]:
    """A loss that falls ever more slowly, at so many times the usual pace."""
    return [1.8 + 3.7 * (1 + pace * step / 15) ** -0.7 for step in range(1, steps + 1)]


def of(losses: Sequence[float], seconds: float = 0.01, tokens: int = 100) -> Curve:
    return Curve(STEPS, tuple(rows("a", 0, losses, seconds, tokens)))


def speed(*arms: Curve, reference: Curve | None = None) -> AdjustedSpeed:
    """Of five seeds, each with the next of these arms."""
    found = adjusted_speed([(reference or of(falling()), arms[seed % len(arms)]) for seed in range(SEEDS)])
    assert found is not None
    return found


@pytest.mark.parametrize("pace", [0.5, 0.7, 0.95, 1.0, 1.05, 1.4])
def test_steps_to_the_same_loss(pace: float) -> None:
    """An arm that learns at nine tenths of the pace takes nine tenths as many times fewer steps, better ones too."""
    steps = log_steps([(of(falling()), of(falling(pace)))])
    assert steps is not None and math.exp(steps) == pytest.approx(pace, rel=0.02)
    found = speed(of(falling(pace), seconds=0.005))
    assert found.adjusted is not None and not found.bounded
    assert (found.raw.point, found.adjusted.point) == (pytest.approx(2), pytest.approx(2 * pace, rel=0.02))


def test_the_noise_of_batches_that_both_have_in_common_is_none() -> None:
    """Arms that differ by nothing are as fast, whatever single steps do."""
    draw = random.Random(0)
    noise = [draw.gauss(1, 0.06) for _ in range(STEPS)]
    losses = [loss * one for loss, one in zip(falling(), noise, strict=True)]
    assert log_steps([(of(losses), of(losses))]) == 0
    nudged = [loss * (1 + draw.gauss(0, 1e-4)) for loss in losses]
    steps = log_steps([(of(losses), of(nudged))])
    assert steps is not None and abs(steps) < 0.005


def test_times_are_those_of_the_reference_beside_it() -> None:
    """Where it was trained once more beside the arm, by these; without one beside it there is no speed."""
    arm = of(falling(), seconds=0.005)
    slow = replace(arm, beside=dict.fromkeys(range(STEPS), 0.02))
    assert speed(arm).raw.point == pytest.approx(2) and speed(slow).raw.point == pytest.approx(4)
    alone = replace(arm, events=frozenset({UNPAIRED}))
    assert adjusted_speed([(of(falling()), alone)] * SEEDS) is None


def test_fewer_steps_are_told_beside_the_speed() -> None:
    """As many times as the arm's pace, whatever its seconds; a bound where it is one."""
    found = speed(of(falling(1.4), seconds=0.005)).fewer_steps
    assert found is not None and found.point == pytest.approx(1.4, rel=0.02) and found.low <= found.point <= found.high
    stuck = speed(of([max(3.5, loss) for loss in falling()], 0.005))
    assert stuck.bounded and stuck.fewer_steps is not None and stuck.fewer_steps.point == pytest.approx(1 / 3)


def test_one_that_learns_far_less_is_a_bound() -> None:
    """It ends where the reference was before a third of its steps: at most so fast, and the words say so."""
    stuck = speed(of([max(3.5, loss) for loss in falling()], 0.005))
    assert stuck.bounded and stuck.adjusted is not None
    assert stuck.adjusted.point == pytest.approx(2 / 3)
    assert words.speed(stuck, True) == "at most 0.667x to the same loss (2.000x by steps)"


def test_a_loss_that_falls_no_more_says_nothing_of_steps() -> None:
    """Speed by steps is known all the same."""
    flat = [5.0] * 20 + [2.0] * (STEPS - 20)
    worse = of([loss * 1.01 for loss in flat], 0.005)
    found = speed(worse, reference=of(flat))
    assert found.adjusted is None
    assert words.speed(found, True) == (
        "not known to the same loss, which does not surely fall any more (2.000x by steps)"
    )


def test_speed_is_in_tokens_and_by_steps_that_were_timed() -> None:
    """A watched step has no time; a slow step now and then is no arm's."""
    assert speed(of(falling(), 0.02, tokens=300)).raw.point == pytest.approx(1.5)
    some = tuple(
        row if row.step % 10 else replace(row, seconds=0.0 if row.step % 20 else 9.0) for row in of(falling()).rows
    )
    assert speed(Curve(STEPS, some)).raw.point == pytest.approx(1.0)
    assert adjusted_speed([(of(falling()), of(falling(), 0.0))] * SEEDS) is None


def test_fewer_than_five_seeds_say_nothing() -> None:
    """As of verdicts."""
    assert adjusted_speed([(of(falling()), of(falling()))] * 4) is None
    assert words.speed(None, True) == "-"


def test_the_interval_is_over_seeds() -> None:
    """Seeds of different speeds are a wide interval about their geometric mean, and those that learn otherwise, too."""
    found = speed(of(falling(), 0.005), of(falling(), 0.01))
    assert found.raw.point == pytest.approx(2**0.6)
    assert found.raw.low < 1 and found.raw.high > 2
    other = speed(of(falling(0.8)), of(falling(0.9)))
    assert other.adjusted is not None and other.adjusted.low < 0.8 and other.adjusted.high > 0.88
