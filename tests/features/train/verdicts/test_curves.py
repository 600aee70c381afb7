"""Verdicts on pairs of seeds: their intervals, their order, and how many more seeds one takes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as witness

from fp8bench.features.train.verdicts.curves import Learned, Pair, Why, gap_of, judge, outlier_of, rule, settled_by_more
from fp8bench.model import Interval
from tests.counts import for_each, sampled

SPREAD = (-0.002, -0.001, 0.0, 0.001, 0.002)


def pairs(gaps: Sequence[float], held_out: Sequence[float | None] | None = None) -> list[Pair]:
    """A seed each; held-out text says the same as training text unless it is said."""
    return [Pair(seed, *both) for seed, both in enumerate(zip(gaps, held_out or gaps, strict=True))]


def around(middle: float, scale: float = 1.0) -> list[float]:
    return [middle + scale * one for one in SPREAD]


def test_intervals_are_those_of_a_t_test() -> None:
    """scipy says the same, at both levels."""
    gaps = [0.011, 0.004, -0.003, 0.02, 0.009, 0.001]
    found = gap_of(gaps)
    assert found is not None and found.decides is not None and found.shown is not None
    for interval, level in ((found.decides, 0.99), (found.shown, 0.95)):
        said = witness.ttest_1samp(gaps, 0.0).confidence_interval(level)
        assert (interval.low, interval.high) == pytest.approx((said.low, said.high), rel=1e-9)
        assert (interval.point, interval.level) == (pytest.approx(statistics.fmean(gaps)), level)


def test_of_one_pair_there_is_a_point_and_of_none_nothing() -> None:
    one = gap_of([0.5])
    assert one is not None and (one.point, one.decides, one.shown) == (0.5, None, None)
    assert gap_of([]) is None


@for_each(
    ("low", "high", "learned"),
    [
        (0.001, 0.02, Learned.WORSE), (0.011, 0.02, Learned.WORSE), (-0.02, -0.001, Learned.BETTER),
        (0.001, 0.009, Learned.WITHIN_NOISE), (-0.01, 0.01, Learned.WITHIN_NOISE), (0.0, 0.0, Learned.WITHIN_NOISE),
        (0.0, 0.02, Learned.INCONCLUSIVE), (-0.02, 0.0, Learned.INCONCLUSIVE), (-0.02, 0.02, Learned.INCONCLUSIVE),
        (-0.001, 0.0101, Learned.INCONCLUSIVE), (-0.0101, 0.001, Learned.INCONCLUSIVE),
    ],
)  # fmt: skip
def test_where_an_interval_lies(low: float, high: float, learned: Learned) -> None:
    """At a margin of 1%; edges belong to what is within."""
    assert rule(Interval((low + high) / 2, low, high, 0.99), 0.01) is learned


@given(st.lists(st.floats(-0.2, 0.2), min_size=5, max_size=9), st.floats(0.001, 0.1))
def test_the_mirror_image_has_the_mirrored_verdict(gaps: list[float], margin: float) -> None:
    mirrored = {Learned.WORSE: Learned.BETTER, Learned.BETTER: Learned.WORSE}
    one, other = (judge(pairs([sign * gap for gap in gaps]), margin) for sign in (1, -1))
    assert other.learned is mirrored.get(one.learned, one.learned)
    assert other.more_seeds == one.more_seeds


def test_fewer_than_five_pairs_have_no_verdict() -> None:
    for count in range(5):
        found = judge(pairs([0.5 + 0.001 * one for one in range(count)]), 0.01)
        assert (found.learned, found.why, found.more_seeds) == (Learned.INCONCLUSIVE, Why.FEW_PAIRS, 5 - count)
    assert judge(pairs(around(0.5)), 0.01).learned is Learned.WORSE


def test_both_measures_must_agree() -> None:
    """By their sign where something is found; where nothing is, held-out text must not surely say something."""
    assert judge(pairs(around(0.02), around(0.001)), 0.01).learned is Learned.WORSE
    assert judge(pairs(around(0.02), around(-0.001)), 0.01).why is Why.DISAGREE
    assert judge(pairs(around(-0.02), around(0.001)), 0.01).why is Why.DISAGREE
    assert judge(pairs(around(0.0), around(0.008)), 0.01).learned is Learned.WITHIN_NOISE
    assert judge(pairs(around(0.0), around(0.05)), 0.01).why is Why.DISAGREE
    assert judge(pairs(around(0.02), [None, *around(0.02)[1:]]), 0.01).why is Why.NO_HELD_OUT


def test_equal_bits_and_tiny_spreads() -> None:
    """A spread of zero is no trouble, and a gap that is sure but small is within the margin."""
    assert judge(pairs([0.0] * 5), 0.01).learned is Learned.WITHIN_NOISE
    assert judge(pairs([0.02] * 5), 0.01).learned is Learned.WORSE
    assert judge(pairs(around(1e-6, 1e-6)), 0.01).learned is Learned.WITHIN_NOISE


def test_one_seed_that_stands_alone_is_no_verdict() -> None:
    """It is named: others may follow it, or it may be a mistake."""
    gaps = pairs([*SPREAD, 0.5])
    assert judge(gaps, 0.01).why is Why.TOO_WIDE
    assert outlier_of(gaps) == 5
    assert outlier_of(pairs(SPREAD)) is None
    assert outlier_of(pairs([0.0, 0.0, 0.0, 0.0, 0.5])) == 4
    assert outlier_of(pairs([0.0] * 5)) is None


def test_how_many_more_seeds() -> None:
    """None where the gap is so near the edge that a thousand would not do; fewer the wider the gap."""
    asked = [judge(pairs(around(gap, 10)), 0.01).more_seeds for gap in (0.0, 0.012, 0.02, 0.025)]
    assert all(one is not None and 0 < one < 100 for one in asked)
    assert asked == sorted(asked, key=lambda one: -(one or 0))
    assert judge(pairs(around(0.0, 1000)), 0.01).more_seeds is None


@pytest.mark.slow
@pytest.mark.parametrize("gap", sampled([0.005], [0.0, 0.005, 0.012, 0.02]))
def test_so_many_more_seeds_decide_in_four_of_five(gap: float) -> None:
    """Where gap and spread are what the first seeds said."""
    draw, spread = random.Random(0), 0.012
    said = judge(pairs([gap + spread / statistics.stdev(SPREAD) * one for one in SPREAD]), 0.01)
    assert said.more_seeds is not None
    studies = 2000
    decided = sum(
        judge(pairs([draw.gauss(gap, spread) for _ in range(5 + said.more_seeds)]), 0.01).learned
        is not Learned.INCONCLUSIVE
        for _ in range(studies)
    )  # fmt: skip
    assert decided / studies > 0.8


@for_each("seeds", [3, 5])
@for_each("tails", [None, 4.0])
@for_each("effect", [0.0, 0.002])
def test_so_many_more_seeds_settle_a_finer_bound_in_most_studies(
    effect: float, tails: float | None, seeds: int
) -> None:
    """Drawn with a spread of 0.2%, with heavy tails too: with the seeds that were named the bound decides."""
    draw, settled, named = np.random.default_rng(seeds), 0, 0
    for _ in range(300):
        noise = draw.normal(0, 1, 2000) if tails is None else draw.standard_t(tails, 2000) / 2**0.5
        gaps = list(effect + 0.002 * noise)
        first = gap_of(gaps[:seeds])
        assert first is not None and first.decides is not None
        more = settled_by_more(first, first.decides.high)
        if more is not None:
            finer, count = more
            assert 0.2 * first.decides.high <= finer <= first.decides.high / 2 and seeds + count >= 5
            later = gap_of(gaps[: seeds + count])
            assert later is not None and later.decides is not None
            settled, named = settled + (rule(later.decides, finer) is not Learned.INCONCLUSIVE), named + 1
    assert named > 250 and settled / named > 0.6


def test_no_number_of_seeds_is_named_where_none_is_known() -> None:
    """Of two seeds, of seeds with the same gap, and where nothing worse is left to exclude."""
    for gaps in ([0.001, 0.002], [0.001] * 5):
        gap = gap_of(gaps)
        assert gap is not None and settled_by_more(gap, 0.01) is None
    gap = gap_of([0.001, 0.002, 0.003])
    assert gap is not None and settled_by_more(gap, -0.01) is None
