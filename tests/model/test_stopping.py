"""When it is time to look, and when to stop."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from fp8bench.model.stopping import BUDGET_SECONDS, CEILING_SECONDS, LEAST_ROUNDS, QUICK_ROUNDS, StoppingRule, rule_for


def test_looks_come_every_eight_rounds_and_then_more_rarely() -> None:
    """Each look is another chance to err, so their number grows with the logarithm."""
    looks = [rounds for rounds in range(1, 300) if StoppingRule().looks(rounds)]
    assert looks[:8] == [24, 32, 40, 48, 56, 64, 72, 80]
    assert [look for look in looks if look >= 112] == [112, 120, 128, 144, 160, 176, 192, 208, 224, 240, 256, 288]


def test_looks_are_few_even_in_the_longest_group() -> None:
    """Eight a doubling from 64 rounds on; the next is never more than half as much again."""
    looks = [rounds for rounds in range(1, 4097) if StoppingRule().looks(rounds)]
    assert len(looks) == 6 + 6 * 8
    assert all(later / earlier <= 1.5 for earlier, later in pairwise(looks))


def test_nobody_looks_at_fixed_rounds_or_before_the_least() -> None:
    """The number of fixed rounds must not depend on what they show."""
    assert not any(StoppingRule(fixed=64).looks(rounds) for rounds in range(100))
    assert not any(StoppingRule().looks(rounds) for rounds in range(LEAST_ROUNDS))
    assert StoppingRule(least=8).looks(8)


FIXED = StoppingRule(fixed=10, budget=1.0)


@pytest.mark.parametrize(
    ("rule", "rounds", "seconds", "why"),
    [
        (StoppingRule(), 15, 11.0, ""),
        (StoppingRule(), 24, 9.99, ""),
        (StoppingRule(), 24, 10.0, "time was up after 24 rounds"),
        (StoppingRule(), 100, 10.0, "time was up after 100 rounds"),
        (StoppingRule(), 3, 119.9, ""),
        (StoppingRule(), 3, 120.0, "time was up after 3 rounds"),
        (StoppingRule(), 0, 500.0, ""),
        (StoppingRule(), 4095, 0.0, ""),
        (StoppingRule(), 4096, 0.0, "4096 rounds, the most a group gets"),
        (FIXED, 9, 60.0, ""),
        (FIXED, 10, 0.0, "10 rounds, a fixed number"),
        (FIXED, 9, 120.0, "time was up after 9 rounds"),
        (FIXED, 0, 120.0, ""),
    ],
)
def test_caps(rule: StoppingRule, rounds: int, seconds: float, why: str) -> None:
    """The budget waits for the least rounds and is no matter to a fixed number, the ceiling waits for one round."""
    assert rule.ended(rounds, seconds) == why


def test_preparing_counts_only_against_a_whole_budget() -> None:
    """Never below nothing."""
    assert StoppingRule().after(100.0) == StoppingRule()
    whole = StoppingRule(budget=10.0, ceiling=12.0, whole=True)
    assert whole.after(4.0) == StoppingRule(budget=6.0, ceiling=8.0, whole=True)
    assert whole.after(11.0) == StoppingRule(budget=0.0, ceiling=1.0, whole=True)
    assert whole.after(99.0) == StoppingRule(budget=0.0, ceiling=0.0, whole=True)


@pytest.mark.parametrize(
    ("quick", "rounds", "budget", "expected"),
    [
        (False, None, None, StoppingRule(budget=BUDGET_SECONDS, ceiling=CEILING_SECONDS)),
        (False, None, 3.0, StoppingRule(budget=3.0, ceiling=3.0, whole=True)),
        (True, None, None, StoppingRule(fixed=QUICK_ROUNDS)),
        (True, None, 3.0, StoppingRule(fixed=QUICK_ROUNDS, ceiling=3.0, whole=True)),
        (False, 7, None, StoppingRule(fixed=7, ceiling=math.inf)),
        (False, 7, 3.0, StoppingRule(fixed=7, ceiling=3.0, whole=True)),
        (True, 7, None, StoppingRule(fixed=7, ceiling=math.inf)),
    ],
)
def test_rule_for(quick: bool, rounds: int | None, budget: float | None, expected: StoppingRule) -> None:
    """A number of rounds asked for has no ceiling but the user's budget, and goes before --quick."""
    assert rule_for(quick, rounds, budget) == expected


def test_a_budget_of_nothing_still_gives_one_round() -> None:
    """So that every group has a number."""
    rule = rule_for(False, None, 0.0)
    assert rule.ended(0, 0.0) == ""
    assert rule.ended(1, 0.0) == "time was up after 1 rounds"
