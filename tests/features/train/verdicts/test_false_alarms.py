"""How often verdicts on learning are wrong: seeded, over the code that judges (`python -m suites.verdicts`).

Ten thousand studies of each kind are slow; a few hundred always run.
"""

from __future__ import annotations

import json

import pytest

from fp8bench.features.train.verdicts.curves import SHOWN
from suites.verdicts import TRAINED, after_advice, coverage, false_alarms, found, noises, seeds_for, speeds
from tests.counts import for_each, sampled

FEW, MANY = 200, 10_000
# A deviation of half the margin, where both ends of a verdict are in reach, and one that is far beyond it.
NEAR, FAR = 0.005, 0.05


@for_each("name", ["Gaussian", "heavy tails"])
def test_what_differs_by_nothing_is_seldom_called_and_what_was_planted_is_found(name: str) -> None:
    """Of 200, more than six are called in one of two hundred trials, if one of a hundred is; the seed is fixed. Planted
    is twice the margin, with noise of half of it, in five seeds."""
    assert false_alarms(noises()[name], FEW, FAR) <= 6 / FEW
    assert found(noises()[name], FEW, NEAR, 0.02) > 0.9 and found(noises()[name], FEW, NEAR, -0.02) == 0.0


def test_real_nudged_arms_were_never_called() -> None:
    """What the committed file says of twenty studies; none of their arms had the reference's bits."""
    kept = json.loads(TRAINED.read_text())
    nudged = {name: counts for name, counts in kept["verdicts"].items() if name.startswith(("ulp", "order"))}
    assert sum(sum(counts.values()) for counts in nudged.values()) >= 20
    assert {word for counts in nudged.values() for word in counts} <= {"within noise", "inconclusive"}
    assert all(any(gap) for gaps in kept["gaps"].values() for gap in gaps)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["Gaussian"], sorted(noises())))
def test_of_ten_thousand_at_most_one_in_a_hundred_is_called(name: str) -> None:
    """Up to a spread as large as the margin, which no null arm that was trained went far beyond; far beyond it no more
    often than the interval says, with the error of ten thousand studies: there the margin spares nothing any more."""
    for spread, most in ((NEAR, 0.01), (0.01, 0.01), (FAR, 0.013)):
        assert false_alarms(noises()[name], MANY, spread) <= most


@pytest.mark.nightly
def test_looking_again_after_more_seeds_is_a_second_chance_to_be_wrong() -> None:
    """At most twice one in a hundred."""
    assert all(after_advice(noise, MANY // 2, 0.01) <= 0.02 for noise in noises().values())


@pytest.mark.slow
def test_seeds_for_twice_the_margin() -> None:
    """Five do where seeds lie half a margin apart, and more where they lie further."""
    asked = [seeds_for(noises()["Gaussian"], 500, spread, 0.02) or 0 for spread in (NEAR, 0.01, 0.02)]
    assert asked[0] == 5 and asked == sorted(asked)


@pytest.mark.nightly
def test_intervals_of_a_mean_hold_the_truth() -> None:
    """Student's over five seeds as often as they say or more; a bootstrap of five does not, and is not used."""
    for noise in noises().values():
        shares = coverage(noise, 2000)
        assert shares["Student's t"] >= SHOWN - 0.02 and shares["bootstrap"] < 0.88


@pytest.mark.slow
@pytest.mark.parametrize("pace", sampled([1.2], [0.7, 1.0, 1.2]))
def test_speed_to_the_same_loss_holds_the_pace_that_was_planted(pace: float) -> None:
    """As often as it says or a little less, and without bias."""
    held, point = speeds(150, pace, 0.002)
    assert held > 0.88 and point == pytest.approx(pace, rel=0.02)
