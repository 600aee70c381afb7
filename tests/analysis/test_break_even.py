"""Where a precision begins to pay: planted curves, with and without noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fp8bench.analysis.break_even import BreakEven, SizedRatio, break_even
from fp8bench.model import Interval
from tests.counts import for_each, sampled

SIZES = tuple(1 << power for power in range(4, 15))
# The logarithm of the speed-up over the octaves of the size.
Curve = Callable[[float], float]


def saturating(octaves: float) -> float:
    """Slow while it is bound by its casts, and 30% faster in the end."""
    return 0.3 * math.tanh((octaves - 9.7) / 2) + 0.02


def hump(octaves: float) -> float:
    """It pays in the middle alone."""
    return 0.3 - 0.05 * (octaves - 9.3) ** 2


def sized(
    curve: Curve, sizes: Sequence[int] = SIZES, noise: float = 0.003, seed: int | None = None
) -> list[SizedRatio]:
    """Ratios of times with 99% intervals of that standard error; with a seed they are off by as much."""
    draws = np.zeros(len(sizes)) if seed is None else np.random.default_rng(seed).normal(0, noise, len(sizes))
    points = [-curve(math.log2(size)) + float(draw) for size, draw in zip(sizes, draws, strict=True)]
    ends = [[math.exp(point + side * 2.576 * noise) for side in (0, -1, 1)] for point in points]
    return [SizedRatio(size, Interval(*end, 0.99)) for size, end in zip(sizes, ends, strict=True)]


def found(points: Sequence[SizedRatio]) -> BreakEven:
    made = break_even(points)
    assert made is not None
    return made


def true_sizes(curve: Curve) -> list[float]:
    """Where a curve goes through 0."""
    octaves = np.linspace(4, 14, 20_001)
    values = np.array([curve(float(one)) for one in octaves])
    return [float(2 ** octaves[at]) for at in np.flatnonzero(np.diff(np.sign(values)))]


def test_one_crossing_is_found_between_two_sizes() -> None:
    """With its interval, in any order of the points; beside it all sizes can be told."""
    made = found(sized(saturating)[::-1])
    (crossing,) = made.crossings
    (truth,) = true_sizes(saturating)
    assert crossing.begins and crossing.low < truth < crossing.high
    assert crossing.size == pytest.approx(truth, rel=0.05) and crossing.high / crossing.low < 1.25
    assert [stretch.pays for stretch in made.stretches] == [False, None, True]
    assert (made.stretches[0].first, made.stretches[-1].last) == (16, 1 << 14)
    assert made.within_noise == () and made.level == 0.99


def test_it_may_pay_in_the_middle_alone() -> None:
    first, last = found(sized(hump)).crossings
    assert first.begins and not last.begins
    assert [one.low < truth < one.high for one, truth in zip((first, last), true_sizes(hump), strict=True)] == [
        True
    ] * 2


@for_each(("speed", "pays"), [(1.5, True), (0.7, False), (1.001, None)])
def test_everywhere_nowhere_and_not_to_be_told(speed: float, pays: bool | None) -> None:
    made = found(sized(lambda _: math.log(speed)))
    assert made.crossings == () and [one.pays for one in made.stretches] == [pays]
    assert made.within_noise == (SIZES if pays is None else ())


def test_a_dip_into_the_noise_is_no_crossing() -> None:
    """The middle even goes below 1 there: nobody can tell, and it is said where."""
    made = found(sized(lambda octaves: -0.004 if octaves == 9 else 0.2))
    assert made.crossings == () and made.within_noise == (512,)
    assert [one.pays for one in made.stretches] == [True, None, True]
    assert 256 <= made.stretches[1].first < 512 < made.stretches[1].last <= 1024


def test_the_ends_may_be_within_the_noise() -> None:
    """What lies beyond the last size is not known at all."""
    made = found(sized(lambda octaves: min(0.0, 0.1 * (octaves - 12))))
    assert [one.pays for one in made.stretches] == [False, None] and made.crossings == ()


def test_a_leap_may_be_anywhere_between_two_sizes() -> None:
    """A library that takes another kernel from some size on: a straight line knows nothing of that size."""
    (crossing,) = found(sized(lambda octaves: 0.3 if octaves > 9.1 else -0.1)).crossings
    assert (crossing.low, crossing.high) == (512, 1024)


@for_each(("noise", "curve"), [(0.001, saturating), (0.01, saturating), (0.03, saturating), (0.01, hump)])
def test_intervals_hold_the_truth(noise: float, curve: Curve) -> None:
    """Of 60 draws at most one leaves it out; more noise makes them wider."""
    truths = true_sizes(curve)
    drawn = [found(sized(curve, noise=noise, seed=seed)).crossings for seed in range(60)]
    held = [
        len(own) == len(truths) and all(one.low <= truth <= one.high for one, truth in zip(own, truths, strict=True))
        for own in drawn
    ]
    assert sum(held) >= 59


@pytest.mark.parametrize("curve", [saturating, pytest.param(hump, marks=pytest.mark.nightly)])
@pytest.mark.slow
@pytest.mark.parametrize("noise", sampled([0.01], [0.001, 0.003, 0.01, 0.03]))
def test_intervals_hold_the_truth_in_99_of_100(noise: float, curve: Curve) -> None:
    truths = true_sizes(curve)
    drawn = [found(sized(curve, noise=noise, seed=seed)).crossings for seed in range(1000)]
    held = [
        len(own) == len(truths) and all(one.low <= truth <= one.high for one, truth in zip(own, truths, strict=True))
        for own in drawn
    ]
    assert sum(held) >= 990


def test_fewer_than_three_sizes_are_no_curve() -> None:
    assert break_even(sized(saturating, SIZES[:2])) is None


def test_a_quick_look_has_no_confidence() -> None:
    """One range of rounds among intervals is enough."""
    points = sized(saturating)
    low = points[3]._replace(ratio=Interval(1.2, 1.1, 1.3, 0.0))
    assert found([*points[:3], low, *points[4:]]).level == 0.0
