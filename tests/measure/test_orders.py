"""Who comes when in a round: everybody everywhere as often, and still nobody knows what comes next."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

from fp8bench.measure.rounds import Orders
from tests.counts import for_each


def drawn(arms: int, rounds: int, seed: int = 0) -> list[list[int]]:
    orders: Orders[int] = Orders(random.Random(seed))
    return [orders.next(range(arms)) for _ in range(rounds)]


@for_each("arms", range(1, 9))
@for_each("seed", range(3))
def test_everybody_is_in_every_place_once_a_block(arms: int, seed: int) -> None:
    """Exactly, in each block of as many rounds as there are arms; rounds in between are off by one at most."""
    rounds = drawn(arms, 5 * arms, seed)
    assert all(sorted(row) == list(range(arms)) for row in rounds)
    for block in range(5):
        places = Counter((arm, place) for row in rounds[block * arms :][:arms] for place, arm in enumerate(row))
        assert set(places.values()) == {1} and len(places) == arms * arms


@for_each("arms", range(2, 9))
def test_everybody_follows_everybody_as_often(arms: int) -> None:
    rounds = 2 * arms if arms % 2 else arms
    after = Counter(pair for row in drawn(arms, rounds) for pair in pairwise(row))
    assert len(after) == arms * (arms - 1) and set(after.values()) == {rounds // arms}


@for_each("stay", range(1, 7))
@for_each("before", [3, 16, 17])
def test_arms_that_leave_put_nobody_out_of_balance(stay: int, before: int) -> None:
    """Those who stay begin a block of their own; what was cut off of the old one is one round a place at most."""
    orders: Orders[int] = Orders(random.Random(stay))
    first = [orders.next(range(7)) for _ in range(before)]
    rest = [orders.next(range(stay)) for _ in range(3 * stay)]
    cut = Counter((arm, place) for row in first for place, arm in enumerate(row))
    assert max(cut.values()) - min((cut[arm, place] for arm in range(7) for place in range(7)), default=0) <= 1
    assert set(Counter((arm, place) for row in rest for place, arm in enumerate(row)).values()) == {3}


def test_orders_are_drawn() -> None:
    orders: Orders[int] = Orders(random.Random(0))
    assert orders.next([]) == [] and sorted(orders.next([3, 4])) == [3, 4] and orders.next([]) == []
    assert drawn(4, 40, 1) == drawn(4, 40, 1) != drawn(4, 40, 2)
    blocks = {tuple(map(tuple, drawn(4, 400)[4 * block :][:4])) for block in range(100)}
    assert len(blocks) > 60
    firsts = Counter(drawn(2, 1, seed)[0][0] for seed in range(200))
    assert min(firsts.values()) > 60
