"""How much sooner an arm comes to the same loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from fp8bench.analysis.learning.adjusted_speed import AdjustedSpeed, adjusted_speed, log_steps
from fp8bench.analysis.learning.curves import Curve
from fp8bench.report.words import learning as words
from tests.learning_curves import curve, rows

STEPS = 200
FALLING = [5.0 - 0.02 * step for step in range(STEPS)]


def of(losses: Sequence[float], seconds: float = 0.01, tokens: int = 100) -> Curve:
    return Curve(STEPS, tuple(rows("a", 0, losses, seconds, tokens)))


def speed(arm: Curve, other: Curve | None = None) -> AdjustedSpeed:
    """Of two seeds, beside a reference whose loss falls along a straight line."""
    found = adjusted_speed([(of(FALLING), arm), (of(FALLING), other or arm)])
    assert found is not None
    return found


def test_steps_to_the_same_loss() -> None:
    """An arm whose loss falls by nine tenths a step needs ten ninths of the steps: exactly, between steps too.

    The first window is flat in both, so that all there is to compare is behind it.
    """
    flat = 20
    reference, slower = (
        [5.0 - slope * max(0, step - 2 * flat + 1) for step in range(STEPS)] for slope in (0.02, 0.018)
    )  # fmt: skip
    found = log_steps(reference, slower)
    assert found is not None and found[1]
    # Both smoothed lines begin to fall after 2 * flat steps; the mean of a window lags by half of it behind a line.
    lag = (flat + 1) / 2
    own = 0.75 * STEPS
    other = (own - 2 * flat + 1 - lag) / 0.9 + 2 * flat - 1 + lag
    assert math.exp(found[0]) == pytest.approx(own / other, rel=2e-2)
    assert log_steps(reference, reference) == (0.0, True)
    assert log_steps(reference, [math.nan, *reference[1:]]) is None


def test_one_that_never_gets_there_is_a_bound() -> None:
    """It is counted with all its steps, and the words say so."""
    stuck = speed(of([max(3.0, loss) for loss in FALLING], 0.005))
    assert (stuck.raw.point, stuck.never) == (pytest.approx(2), 2)
    assert stuck.adjusted.point == pytest.approx(2 * 150 / 200)
    assert words.speed(stuck, True) == "at most 1.500x to the same loss, which 2 seeds did not reach (2.000x by steps)"
    assert speed(of(FALLING), of([5.0] * STEPS)).never == 1


def test_speed_is_in_tokens_and_by_steps_that_were_timed() -> None:
    """A watched step has no time; a slow step now and then is no arm's."""
    assert speed(of(FALLING, 0.02, tokens=300)).raw.point == pytest.approx(1.5)
    some = tuple(
        row if row.step % 10 else type(row)(**{**vars(row), "seconds": 0.0 if row.step % 20 else 9.0})
        for row in of(FALLING).rows
    )
    assert speed(Curve(STEPS, some)).raw.point == pytest.approx(1.0)
    untimed = of(FALLING, 0.0)
    assert adjusted_speed([(of(FALLING), untimed)] * 5) is None


def test_one_seed_says_nothing() -> None:
    """There is no interval of one."""
    assert adjusted_speed([(of(FALLING), of(FALLING))]) is None
    assert adjusted_speed([]) is None
    assert words.speed(None, True) == "-"


def test_the_interval_is_over_seeds() -> None:
    """Two seeds of different speeds are a wide interval about their geometric mean."""
    found = speed(of(FALLING, 0.005), of(FALLING, 0.01))
    assert found.raw.point == pytest.approx(math.sqrt(2))
    assert found.raw.low < 0.1 and found.raw.high > 100


def test_a_real_curve_against_itself_shifted() -> None:
    """An arm a few steps behind is as many steps later."""
    reference = curve(STEPS, 2.0)
    behind = [5.5] * 10 + reference[:-10]
    found = log_steps(reference, behind)
    assert found is not None
    assert math.exp(found[0]) == pytest.approx(150 / 160, rel=1e-6)
