"""Verdicts on pairs of seeds: intervals, bounds of one seed, best rates, and how often verdicts are wrong."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import scipy

from fp8bench.features.train import words
from fp8bench.features.train.values import Arm, ArmRole, StreamLine
from fp8bench.features.train.verdicts.curves import (
    DifferenceImportance,
    InconclusiveReason,
    LearningVerdict,
    LossCurve,
    SeedComparison,
    average_gaps,
    bound_single_gap,
    classify_importance,
    classify_loss_gap,
    compute_detectable_gap,
    judge_seed_pairs,
    make_seed_pair,
)
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts, judge_training
from fp8bench.model import Interval
from suites.verdicts import false_alarms, found, noises, same_at_every_end
from tests.counts import for_each
from tests.learning_curves import CANDIDATE, REFERENCE, curve, held_out, lines, rows, training

SPREAD = (-0.002, -0.001, 0.0, 0.001, 0.002)


def pairs(gaps: Sequence[float], held_out: Sequence[float | None] | None = None) -> list[SeedComparison]:
    return [SeedComparison(seed, *both) for seed, both in enumerate(zip(gaps, held_out or gaps, strict=True))]


def around(middle: float, scale: float = 1.0) -> list[float]:
    return [middle + scale * gap for gap in SPREAD]


def test_intervals_are_those_of_a_t_test() -> None:
    """The oracle is scipy, at both levels."""
    gaps = [0.011, 0.004, -0.003, 0.02, 0.009, 0.001]
    gap = average_gaps(gaps)
    assert gap is not None and gap.decides is not None and gap.shown is not None
    for interval, level in ((gap.decides, 0.99), (gap.shown, 0.95)):
        known = scipy.stats.ttest_1samp(gaps, 0.0).confidence_interval(level)
        assert (interval.low, interval.high) == pytest.approx((known.low, known.high), rel=1e-9)
        assert (interval.point, interval.level) == (pytest.approx(statistics.fmean(gaps)), level)
    single = average_gaps([0.5])
    assert single is not None and (single.point, single.decides, single.shown) == (
        0.5,
        None,
        None,
    )
    assert average_gaps([]) is None


@for_each(
    ("low", "high", "learned", "matters"),
    [
        (0.001, 0.02, LearningVerdict.WORSE, DifferenceImportance.OPEN),
        (0.011, 0.02, LearningVerdict.WORSE, DifferenceImportance.YES),
        (0.001, 0.01, LearningVerdict.WORSE, DifferenceImportance.NO),
        (-0.02, -0.001, LearningVerdict.BETTER, DifferenceImportance.OPEN),
        (-0.02, -0.011, LearningVerdict.BETTER, DifferenceImportance.YES),
        (-0.01, -0.001, LearningVerdict.BETTER, DifferenceImportance.NO),
        (-0.01, 0.01, LearningVerdict.WITHIN_NOISE, DifferenceImportance.NO),
        (0.0, 0.0, LearningVerdict.WITHIN_NOISE, DifferenceImportance.NO),
        (0.0, 0.02, LearningVerdict.INCONCLUSIVE, DifferenceImportance.OPEN),
        (-0.02, 0.0, LearningVerdict.INCONCLUSIVE, DifferenceImportance.OPEN),
        (-0.001, 0.0101, LearningVerdict.INCONCLUSIVE, DifferenceImportance.OPEN),
        (-0.0101, 0.001, LearningVerdict.INCONCLUSIVE, DifferenceImportance.OPEN),
    ],
)
def test_where_an_interval_lies(
    low: float, high: float, learned: LearningVerdict, matters: DifferenceImportance
) -> None:
    """Compared with 0 for whether there is a difference, and with the margin of 1% for whether it matters."""
    interval = Interval((low + high) / 2, low, high, 0.99)
    assert (classify_loss_gap(interval, 0.01), classify_importance(interval, 0.01)) == (learned, matters)


@for_each(
    ("gaps", "said"),
    [
        *((pairs([0.5 + 0.001 * seed for seed in range(count)]), InconclusiveReason.FEW_PAIRS) for count in range(5)),
        (pairs(around(0.5)), LearningVerdict.WORSE),
        # Both measures agree: the same sign if a difference is found; otherwise the held-out text must not show one.
        (pairs(around(0.02), around(0.001)), LearningVerdict.WORSE),
        (pairs(around(0.02), around(-0.001)), InconclusiveReason.DISAGREE),
        (pairs(around(-0.02), around(0.001)), InconclusiveReason.DISAGREE),
        (pairs(around(0.0), around(0.008)), LearningVerdict.WITHIN_NOISE),
        (pairs(around(0.0), around(0.05)), InconclusiveReason.DISAGREE),
        (pairs(around(0.02), [None, *around(0.02)[1:]]), InconclusiveReason.NO_HELD_OUT),
        # Inside the margin the held-out text need not show a difference, but must not show the opposite or a larger
        # one.
        *((pairs(around(0.005), around(other)), LearningVerdict.WORSE) for other in (0.0, -0.001, 0.008)),
        *((pairs(around(0.005), around(other)), InconclusiveReason.DISAGREE) for other in (-0.005, 0.05)),
        (pairs(around(-0.005), around(0.005)), InconclusiveReason.DISAGREE),
        (pairs(around(-0.005), around(0.001)), LearningVerdict.BETTER),
        # A spread of zero is allowed, and a certain difference is one, however small.
        (pairs([0.0] * 5), LearningVerdict.WITHIN_NOISE),
        (pairs([0.02] * 5), LearningVerdict.WORSE),
        (pairs(around(1e-6, 1e-2)), LearningVerdict.WITHIN_NOISE),
        (pairs(around(1e-6, 1e-6)), LearningVerdict.WORSE),
        (pairs([*SPREAD, 0.5]), InconclusiveReason.TOO_WIDE),
    ],
)
def test_what_pairs_say(gaps: list[SeedComparison], said: LearningVerdict | InconclusiveReason) -> None:
    judged = judge_seed_pairs(gaps, 0.01)
    assert (judged.why or judged.learned) is said
    assert (judged.learned is LearningVerdict.INCONCLUSIVE) == (judged.why is not None)
    assert said is not InconclusiveReason.FEW_PAIRS or judged.more_seeds == 5 - len(gaps)


def test_how_many_more_seeds() -> None:
    """None if the gap is so near the edge that a thousand seeds would not suffice."""
    asked = [judge_seed_pairs(pairs(around(gap, 10)), 0.01).more_seeds or 0 for gap in (0.0, 0.012, 0.02, 0.025)]
    assert all(0 < seeds < 100 for seeds in asked) and asked == sorted(asked, reverse=True)
    assert judge_seed_pairs(pairs(around(0.0, 1000)), 0.01).more_seeds is None


CHAOS = Arm("bf16 one ulp", "bf16", ArmRole.CHAOS)
RATES = (5e-4, 2e-3)
OTHERS = tuple(Arm(f"bf16 rate={rate}", "bf16", ArmRole.OTHER_RATE, (("rate", rate),)) for rate in RATES)
SWEPT = (CANDIDATE, *(Arm(f"fp8 rate={rate}", "fp8", settings=(("rate", rate),), native=False) for rate in RATES))
NOISE = [0.0, 0.001, -0.001, 0.002, -0.002]


def verdicts_of_ends(*arms: Arm, **ends: Sequence[float]) -> tuple[TrainingVerdicts, dict[str, LearningVerdict]]:
    lines: list[StreamLine] = []
    for name, own in ends.items():
        for seed, loss in enumerate(own):
            lines += [*rows(name, seed, curve(100, loss)), held_out(name, seed, 99, loss + 0.1)]
    verdicts = judge_training(training(*arms), lines)
    return verdicts, {said.arm.name: said.judged.learned for said in verdicts.arms}


def test_an_arm_is_not_better_than_a_reference_at_a_worse_rate() -> None:
    """Better by 1.7% than bf16 at its only rate; at twice the rate bf16 is as good."""
    ends = {"bf16": 2.034, "fp8": 2.0, "fp8 rate=0.0005": 2.05, "fp8 rate=0.002": 2.01}
    planted = {
        name: [end + noise * (1 + place) / 4 for noise in NOISE] for place, (name, end) in enumerate(ends.items())
    }
    _, learned = verdicts_of_ends(CANDIDATE, **planted)
    assert learned == {"fp8": LearningVerdict.BETTER}
    planted |= {"bf16 rate=0.0005": [2.05] * 5, "bf16 rate=0.002": [2.0 - noise for noise in NOISE]}
    tuned, learned = verdicts_of_ends(*OTHERS, *SWEPT, **planted)
    assert (tuned.reference, tuned.rate_count, learned["fp8"]) == (
        "bf16 rate=0.002",
        3,
        LearningVerdict.WITHIN_NOISE,
    )
    others = {said.arm.name for said in tuned.arms if said.judged.why is InconclusiveReason.OTHER_RATE}
    assert others == {"fp8 rate=0.0005", "fp8 rate=0.002"}


def test_an_arm_that_is_better_at_its_best_is_called_so() -> None:
    planted = {
        "bf16": [2.03 + noise for noise in NOISE],
        "bf16 rate=0.002": [2.0 + noise / 2 for noise in NOISE],
        "fp8": [1.95 + noise for noise in NOISE],
        "fp8 rate=0.0005": [2.0] * 5,
        "fp8 rate=0.002": [6.0] * 5,
    }
    _, learned = verdicts_of_ends(OTHERS[1], *SWEPT, **planted)
    assert learned == {
        "fp8": LearningVerdict.BETTER,
        "fp8 rate=0.0005": LearningVerdict.INCONCLUSIVE,
        "fp8 rate=0.002": LearningVerdict.DIVERGED,
    }
    plain = judge_training(training(), lines({"fp8": [0.0] * 5}))
    assert (plain.reference, plain.rate_count) == (REFERENCE.name, 1)


@for_each(
    ("arms", "gaps", "bound"),
    [
        (
            (CHAOS, CANDIDATE),
            {"fp8": [0.002], "bf16 one ulp": [0.0005]},
            "at most 0.84% worse in seed 0 (95%, by what one ulp does there); 1 seed counts",
        ),
        ((CHAOS, CANDIDATE), {"fp8": [0.002], "bf16 one ulp": [0.0]}, "cannot tell: 1 seed counts"),
        ((CANDIDATE,), {"fp8": [0.002]}, "1 seed counts"),
        ((CHAOS, CANDIDATE), {"fp8": [0.002, 0.001], "bf16 one ulp": [0.0005]}, "worse (95%); 2 seeds count"),
    ],
)
def test_one_seed_is_bounded_by_what_one_ulp_does_in_it(
    arms: tuple[Arm, ...], gaps: Mapping[str, list[float]], bound: str
) -> None:
    verdicts = judge_training(training(*arms, seeds=len(gaps["fp8"])), lines(gaps))
    assert (verdicts.chaos is not None) == (CHAOS in arms)
    assert verdicts.chaos is None or verdicts.chaos.gap == pytest.approx(gaps[CHAOS.name][0])
    assert bound in words.describe_verdict(verdicts.arms[0], verdicts)


def test_the_bound_of_one_seed_holds_as_often_as_it_says() -> None:
    """With equal noise in reference, arm and ulp it holds in at least 95 of 100, whatever the effect."""
    draw = np.random.default_rng(3)
    for effect in (0.0, 0.01):
        reference, arm, ulp = draw.normal(0, 0.003, (3, 40_000))
        bounds = [bound_single_gap(effect + a - r, u - r) for r, a, u in zip(reference, arm, ulp, strict=True)]
        holds = np.mean([bound is not None and bound.low <= effect <= bound.high for bound in bounds])
        assert 0.95 <= holds <= 0.965


FEW = 200
# A deviation of half the margin, where both ends of a verdict are possible, and one far beyond it.
NEAR = 0.005
FAR = 0.05


@for_each("name", ["Gaussian", "heavy tails"])
def test_what_differs_by_nothing_is_seldom_called_and_what_was_planted_is_found(name: str) -> None:
    """More than six false calls in 200 happen in one of two hundred trials.

    The planted effect is twice the margin, the noise half the margin.
    """
    assert false_alarms(noises()[name], FEW, FAR) <= 6 / FEW
    assert found(noises()[name], FEW, NEAR, 0.02) > 0.9 and found(noises()[name], FEW, NEAR, -0.02) == 0.0


@pytest.mark.parametrize(
    ("name", "studies"),
    [
        ("spikes", 10),
        pytest.param("heavy tails", 100, marks=pytest.mark.slow),
        *(pytest.param(name, 200, marks=pytest.mark.nightly) for name in noises() if name != "heavy tails"),
    ],
)
def test_no_verdict_turns_on_the_last_step(name: str, studies: int) -> None:
    """Fixed studies that end at any of their last ten steps: at least 96 of 100 have one verdict.

    With means over the last tenth only 82 to 86 had.
    """
    assert same_at_every_end(noises()[name], studies) >= 0.95


def test_the_smallest_effect_is_found_in_three_of_four_trainings() -> None:
    """A gap of that size, drawn with the same deviation; half that size is mostly missed."""
    numbers = np.random.default_rng(0).normal(0.0, 0.004, (2000, 5))
    sizes = [compute_detectable_gap(gap) for row in numbers if (gap := average_gaps(list(row))) is not None]
    effect = statistics.median(sizes)

    def share_found(size: float) -> float:
        gaps = [average_gaps(list(row + size)) for row in numbers]
        return sum(gap is not None and gap.decides is not None and gap.decides.low > 0 for gap in gaps) / len(gaps)

    assert 0.65 < share_found(effect) < 0.85 and share_found(effect / 2) < 0.5


@for_each(("first", "whole"), [(0, True), (1, True), (2, False)])
def test_a_script_is_watched_from_its_second_step_on(first: int, whole: bool) -> None:
    seen = tuple(rows("a", 0, [5.0, 4.0, 3.0, 2.0, 1.0]))[first:]
    assert LossCurve(5, seen).is_complete is whole
    assert not LossCurve(6, seen).is_complete


def test_streams_of_scripts_have_the_gap_of_their_steps() -> None:
    """Their last step counts, though they have one row less than steps."""
    old, new = ([scale * loss for loss in range(40, 10, -1)] for scale in (1.0, 1.1))
    whole, watched = ([LossCurve(30, tuple(rows("a", 0, losses))[first:]) for losses in (old, new)] for first in (0, 1))
    pair = make_seed_pair(*watched, 0)
    assert isinstance(pair, SeedComparison) and pair.gap == pytest.approx(0.1) and pair == make_seed_pair(*whole, 0)
    assert isinstance(make_seed_pair(whole[0], watched[1], 0), SeedComparison)
