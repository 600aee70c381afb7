"""What chance does to one seed, what so many seeds could tell, and the best rate held against the best one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from fp8bench.features.train import words
from fp8bench.features.train.request import TrainingRequest
from fp8bench.features.train.values import Arm, ArmRole, StreamLine
from fp8bench.features.train.verdicts.curves import Learned, Why, bound_of_one, judge, least_seen, paired
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts, verdicts_of
from tests.counts import for_each
from tests.learning_curves import CANDIDATE, REFERENCE, curve, held_out, lines, rows, training

CHAOS = Arm("bf16 one ulp", "bf16", ArmRole.CHAOS, (("nudge", "ulp"),))
RATES = (5e-4, 2e-3)
OTHERS = tuple(Arm(f"bf16 rate={rate}", "bf16", ArmRole.OTHER_RATE, (("rate", rate),)) for rate in RATES)
SWEPT = (CANDIDATE, *(Arm(f"fp8 rate={rate}", "fp8", settings=(("rate", rate),), native=False) for rate in RATES))


def ending(losses: Mapping[str, Sequence[float]]) -> tuple[StreamLine, ...]:
    """Arms that end with these losses, seed by seed, on training and held-out text."""
    return tuple(
        line for name, own in losses.items() for seed, loss in enumerate(own)
        for line in (*rows(name, seed, curve(100, loss)), held_out(name, seed, 99, loss + 0.1))
    )  # fmt: skip


def learned(found: TrainingVerdicts) -> dict[str, Learned]:
    return {said.arm.name: said.judged.learned for said in found.arms}


def test_an_arm_is_not_better_than_a_reference_at_a_worse_rate() -> None:
    """Better by 1.7% than bf16 at the one rate that both had; bf16 at twice the rate is as good, and then it is not."""
    noise = [0.0, 0.001, -0.001, 0.002, -0.002]
    ends = {"bf16": 2.034, "fp8": 2.0, "fp8 rate=0.0005": 2.05, "fp8 rate=0.002": 2.01}
    planted = {name: [end + one * (1 + place) / 4 for one in noise] for place, (name, end) in enumerate(ends.items())}
    alone = verdicts_of(training(CANDIDATE), ending(planted))
    assert learned(alone) == {"fp8": Learned.BETTER} and "tune bf16 first" in words.answer(alone.arms[0], alone)
    planted |= {"bf16 rate=0.0005": [2.05] * 5, "bf16 rate=0.002": [2.0 - one for one in noise]}
    tuned = verdicts_of(training(*OTHERS, *SWEPT), ending(planted))
    assert tuned.reference == "bf16 rate=0.002" and tuned.rates == 3
    assert learned(tuned)["fp8"] is Learned.WITHIN_NOISE
    assert {said.arm.name for said in tuned.arms if said.judged.why is Why.OTHER_RATE} == {
        "fp8 rate=0.0005", "fp8 rate=0.002",
    }  # fmt: skip
    assert words.answer(tuned.arms[0], tuned).startswith("fp8 learns as bf16 rate=0.002 does")


def test_an_arm_that_is_better_at_its_best_is_called_so() -> None:
    """And one that diverges at another rate is called that."""
    noise = [0.0, 0.001, -0.001, 0.002, -0.002]
    planted = {
        "bf16": [2.03 + one for one in noise], "bf16 rate=0.002": [2.0 + one / 2 for one in noise],
        "fp8": [1.95 + one for one in noise], "fp8 rate=0.0005": [2.0] * 5, "fp8 rate=0.002": [6.0] * 5,
    }  # fmt: skip
    found = verdicts_of(training(OTHERS[1], *SWEPT), ending(planted))
    assert learned(found) == {
        "fp8": Learned.BETTER, "fp8 rate=0.0005": Learned.INCONCLUSIVE, "fp8 rate=0.002": Learned.DIVERGED,
    }  # fmt: skip
    assert words.answer(found.arms[0], found).endswith("(5 seeds); both at the best of 2 rates")


@pytest.mark.parametrize("apart", [0.0, 0.002, 0.02])
def test_best_against_best_is_seldom_wrong_where_nothing_differs(apart: float) -> None:
    """Three rates of each, alike in both, as near each other as chance or far apart: a difference that is none is told
    in at most two of a hundred, which is what choosing on the same losses costs at most."""
    draw, wrong, studies = random.Random(7), 0, 1000
    for _ in range(studies):
        ends = [[2 + place * apart * 2 + draw.gauss(0, 0.01) for _ in range(5)] for place in range(3) for _ in range(2)]
        arms = [min(ends[which::2], key=sum) for which in (0, 1)]
        gaps = [
            pair for seed in range(5)
            if not isinstance(pair := paired(*(_flat(own[seed]) for own in arms), seed), str)
        ]  # fmt: skip
        wrong += judge(gaps, 1e-9, looks=False).learned in (Learned.WORSE, Learned.BETTER)
    assert wrong <= 0.02 * studies


def _flat(end: float):  # type: ignore[no-untyped-def]
    from fp8bench.features.train.verdicts.curves import Curve

    return Curve(10, tuple(rows("a", 0, [5.0, *([end] * 9)])))


def test_one_seed_is_bounded_by_what_one_ulp_does_in_it() -> None:
    """A bound of that seed; none where the ulp did nothing, or where nobody looked."""
    planted = {"fp8": [0.002], "bf16 one ulp": [0.0005]}
    found = verdicts_of(training(CHAOS, CANDIDATE, seeds=1), lines(planted))
    assert found.chaos is not None and found.chaos.gap == pytest.approx(0.0005)
    told = words.answer(found.arms[0], found)
    assert "a loss more than 0.84% worse is excluded in seed 0 (95%, by what one ulp does there; of other seeds" in told
    still = verdicts_of(training(CHAOS, CANDIDATE, seeds=1), lines({**planted, "bf16 one ulp": [0.0]}))
    assert "one ulp changed no loss of seed 0, which bounds nothing" in words.answer(still.arms[0], still)
    none = verdicts_of(training(CANDIDATE, seeds=1), lines({"fp8": [0.002]}))
    assert none.chaos is None and "excluded" not in words.answer(none.arms[0], none)
    two = verdicts_of(training(CHAOS, CANDIDATE, seeds=2), lines({"fp8": [0.002, 0.001], "bf16 one ulp": [0.0005]}))
    assert "worse is excluded (95%); 2 seeds count" in words.answer(two.arms[0], two)


def test_the_bound_of_one_seed_holds_as_often_as_it_says() -> None:
    """Over what chance does to reference, arm and ulp alike: in at least 95 of 100, whatever the true effect."""
    draw = np.random.default_rng(3)
    for effect in (0.0, 0.01):
        reference, arm, ulp = draw.normal(0, 0.003, (3, 40_000))
        bounds = [bound_of_one(effect + a - r, u - r) for r, a, u in zip(reference, arm, ulp, strict=True)]
        holds = np.mean([bound is not None and bound.low <= effect <= bound.high for bound in bounds])
        assert 0.95 <= holds <= 0.965


@for_each("seeds", [5, 10])
def test_what_could_be_detected_is_detected_in_four_of_five(seeds: int) -> None:
    """Drawn: a true difference of that size is told from none in 80 of 100 cases or more."""
    seen, reach = least_seen(0.01, seeds)
    assert reach < seen
    draw, told, studies = np.random.default_rng(seeds), 0, 2000
    for own in draw.normal(seen, 0.01, (studies, seeds)):
        half = reach * own.std(ddof=1) / 0.01
        told += own.mean() - half > 0
    assert 0.78 <= told / studies <= 0.95


def test_a_plan_says_what_could_be_detected() -> None:
    request = TrainingRequest(seeds=5)
    assert "a difference of 2.63% in four of five cases; more than 2.06% could be excluded" in words.detectable(
        request, 0.01
    )
    assert "not known before" in words.detectable(request, None)
    assert "by what one ulp does in it, and no verdict: 5 seeds give one" in words.detectable(
        TrainingRequest(seeds=1), 0.01
    )


def test_the_reference_of_a_training_without_a_sweep_is_its_own() -> None:
    found = verdicts_of(training(), lines({"fp8": [0.0] * 5}))
    assert (found.reference, found.rates) == (REFERENCE.name, 1)
