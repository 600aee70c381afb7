"""A stretch of allocations and releases, made by hand: its highest point and what is held there."""

from __future__ import annotations

import random

from fp8bench.model import HeldBlock, MemoryRole
from fp8bench.profiler.allocations import Begun, Event, Live, Said, Sized, course
from tests.counts import for_each

START = Begun("unattributed")


def changes(*pairs: tuple[int, int] | None) -> list[Event]:
    """Changes by address and size; None begins the stretch."""
    return [START if pair is None else Sized(*pair) for pair in pairs]


@for_each(
    ("events", "peak"),
    [
        (changes(), None),
        (changes((1, 5), (1, -5)), None),
        (changes(None), 0),
        (changes((1, 5), None), 5),
        (changes((1, 5), (1, -5), None, (1, 3)), 3),
        (changes((1, 5), None, (1, -5), (2, 3)), 5),
        (changes((1, 5), None, (2, 7), (2, -7), (3, 3)), 12),
        (changes((1, 5), None, (9, -4), (2, 3)), 8),  # nobody knows that address: it is from before
        (changes((1, 5), None, (1, 6), (2, 1)), 7),  # the release of the first was told to another thread
        (changes(None, (1, 5), (2, 2), (1, -5), (1, 9)), 11),
    ],
)
def test_the_most_held_at_once_from_the_first_turn_on(events: list[Event], peak: int | None) -> None:
    found = course(events)
    assert (None if found is None else found.peak) == peak
    assert found is None or sum(one.size for one in found.held) == peak


def test_phases_have_their_own_highest_points() -> None:
    """What is there when a phase begins counts in it; a phase that comes again keeps the higher one."""
    found = course(
        [
            Sized(1, 10), START, Begun("cast"), Sized(2, 5), Begun("gemm"), Sized(3, 100), Sized(3, -100),
            Begun("cast"), Sized(2, -5), Sized(4, 2), Begun("unattributed"),
        ]
    )  # fmt: skip
    assert found is not None
    assert [(one.phase, one.allocated) for one in found.phases] == [("unattributed", 12), ("cast", 15), ("gemm", 115)]
    assert [one.reserved for one in found.phases] == [None] * 3


def test_what_is_held_when_backward_begins() -> None:
    """Of the stretch: a backward pass before it does not count, nor what comes or goes with the first node."""
    before = [Sized(7, 70), Sized(8, 80, 1), Sized(8, -80, 1)]
    forward = [START, Sized(1, 10), Sized(2, 20), Sized(2, -20), Sized(3, 30)]
    backward = [Sized(4, 40, 2), Sized(3, -30, 2), Sized(1, -10, 3), Sized(9, 900), Sized(9, -900)]
    found = course([*before, *forward, *backward])
    assert found is not None and {one.address: one.size for one in found.forward} == {7: 70, 1: 10, 3: 30}
    assert found.peak == 1010 and {one.address for one in found.held} == {7, 4, 9}
    none = course([*before, *forward])
    assert none is not None and none.forward == ()


def held(*events: Event) -> dict[int, HeldBlock]:
    """What is held at the highest point, by address; a large block at address 0 makes the point."""
    found = course(events)
    assert found is not None
    return {one.address: one for one in found.held if one.address}


def test_when_a_block_came_and_went() -> None:
    found = held(
        Sized(1, 1), Begun("elementwise"), Sized(2, 1), Sized(3, 1), Sized(4, 1), Begun("gemm"),
        Begun("elementwise"), Sized(5, 1), Sized(6, 1), Sized(0, 1000), Sized(0, -1000), Sized(3, -1), Sized(6, -1),
        Sized(7, 1, node=1), Sized(2, -1, node=1), Sized(7, -1, node=2), Sized(5, -1, node=2),
    )  # fmt: skip
    assert found == {
        1: HeldBlock(1, 1, lasting=True),
        2: HeldBlock(2, 1, "elementwise", awaited=True),
        3: HeldBlock(3, 1, "elementwise"),
        4: HeldBlock(4, 1, "elementwise", awaited=True, lasting=True),
        5: HeldBlock(5, 1, "elementwise", awaited=True),
        6: HeldBlock(6, 1, "elementwise", brief=True),
    }


def test_backward_has_nodes_where_forward_has_pieces() -> None:
    """What a node of autograd's graph gives on is not its own workspace; each backward pass is awaited anew."""
    found = held(
        Begun("elementwise"), Sized(1, 1), Sized(2, 1, node=1), Sized(3, 1, node=1), Sized(4, 1),
        Sized(0, 1000, node=2), Sized(0, -1000, node=2), Sized(2, -1, node=2), Sized(3, -1, node=1),
    )  # fmt: skip
    assert (found[2].backward, found[2].brief, found[2].awaited) == (True, False, False)
    assert (found[3].backward, found[3].brief) == (True, True)
    assert found[1].awaited and found[4].awaited and not found[4].backward


def test_what_the_allocator_no_longer_has_is_gone() -> None:
    events: list[Event] = [
        Sized(1, 100), Sized(2, 50), Live(frozenset({2, 9})), Begun("gemm"), Sized(1, 30),
    ]  # fmt: skip
    found = course(events)
    assert found is not None and found.peak == 80
    assert [(one.address, one.size) for one in found.held] == [(2, 50), (1, 30)]


def test_words_are_about_what_lies_there_when_they_are_said() -> None:
    low, weights = MemoryRole.LOW_WEIGHTS, MemoryRole.WEIGHTS
    found = held(
        Said((1,), weights), Sized(1, 1), START, Sized(2, 1), Said((1, 2, 9), low), Sized(2, -1), Sized(2, 1),
        Sized(3, 1), Said((3,), weights), Said((3,), low), Said((3,), weights), Sized(0, 1000),
    )  # fmt: skip
    assert found[1].said == (low,) and found[2].said == () and found[3].said == (weights, low)


def test_any_stream_comes_to_what_a_plain_count_says() -> None:
    draw = random.Random(7)
    events: list[Event] = [START]
    alive: dict[int, int] = {}
    most: dict[int, int] = {}
    for _ in range(10_000):
        address = draw.randrange(1, 200)
        if address in alive:
            events.append(Sized(address, -alive.pop(address), draw.choice((0, 0, 3))))
        else:
            alive[address] = draw.randrange(1, 1000)
            events.append(Sized(address, alive[address], draw.choice((0, 0, 4))))
        if draw.random() < 0.2:
            events.append(Begun(draw.choice(("gemm", "cast"))))
        if sum(alive.values()) > sum(most.values()):
            most = dict(alive)
    found = course(events)
    assert found is not None and found.peak == sum(most.values()) == max(one.allocated for one in found.phases)
    assert {one.address: one.size for one in found.held} == most
