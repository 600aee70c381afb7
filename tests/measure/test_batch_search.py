"""Looking for the largest number that fits: against trying them all, and how few attempts it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench.measure.capacity import BatchAttempt, Search
from tests.counts import for_each

Takes = Callable[[int], int]


def run(
    takes: Takes, room: int, start: int, top: int, known: int | None = -1, counted_up_to: float = float("inf")
) -> Search:
    """A search among numbers that take so much; what takes more than `counted_up_to` fails uncounted."""

    def attempt(number: int) -> BatchAttempt:
        assert 1 <= number <= top, "out of bounds"
        taken = takes(number)
        return BatchAttempt(number, taken <= room, taken if taken <= counted_up_to else None)

    search = Search(start, top, room if known == -1 else known)
    search.run(attempt)
    tried = [attempt.number for attempt in search.attempts]
    assert len(tried) == len(set(tried)), "one was tried twice"
    return search


def largest(takes: Takes, room: int, top: int) -> int:
    """By trying them all."""
    return max((number for number in range(1, top + 1) if takes(number) <= room), default=0)


def answer(search: Search) -> int:
    """Its answer, once both sides of it have been tried."""
    best = search.fitting.number if search.fitting else 0
    failing = search.failing
    assert (failing.number == best + 1) if failing is not None else (best == search.top)
    return best


@settings(max_examples=400, deadline=None)
@given(
    steps=st.lists(st.integers(0, 50), min_size=1, max_size=120),
    least=st.integers(1, 400),
    room=st.integers(1, 3000),
    start=st.integers(1, 200),
    counted=st.floats(0, 4000),
    known=st.sampled_from([-1, None, 1, 10**9]),
)
def test_it_finds_what_trying_all_finds(
    steps: list[int], least: int, room: int, start: int, counted: float, known: int | None
) -> None:
    needs = [least]
    for step in steps:
        needs.append(needs[-1] + step)
    top = len(needs)

    def takes(number: int) -> int:
        return needs[number - 1]

    search = run(takes, room, min(start, top), top, known, counted)
    assert answer(search) == largest(takes, room, top)
    assert len(search.attempts) <= 2 * top.bit_length() + 12


@for_each("room", [10_000, 123_456, 10**6, 987_654_321])
@for_each("slope", [1, 7, 1000])
@for_each("start", [1, 2, 8])
def test_a_line_takes_at_most_six_attempts(room: int, slope: int, start: int) -> None:
    search = run(lambda number: 5000 + slope * number, room, start, 1 << 20)
    assert answer(search) == min(max((room - 5000) // slope, 0), 1 << 20)
    assert len(search.attempts) <= 6


def test_nothing_is_tried_that_takes_far_more_than_there_is() -> None:
    """What a line through small numbers promises is not followed far: a third of the way comes first."""
    room = 10**6
    search = run(lambda number: 1000 + 100 * number + max(0, number - 50) * 900, room, 2, 1 << 20)
    assert answer(search) == 1044
    assert max(attempt.taken or 0 for attempt in search.attempts) < 4 * room


@for_each(
    ("search", "best", "first"),
    [
        (run(lambda number: 100 * number, 1000, 512, 1 << 20), 10, [512, 256]),
        (run(lambda number: 10**9, 1000, 6, 1 << 20), 0, [6]),
        (run(lambda number: 7, 1000, 2, 37), 37, [2]),
        # A GPU whose allocator counts nothing: its own end alone says what fits.
        (run(lambda number: number, 300, 4, 1 << 20, None, counted_up_to=0), 300, [4, 8, 16, 32, 64, 128, 256, 512]),
    ],
)
def test_what_it_tries_first_and_last(search: Search, best: int, first: list[int]) -> None:
    """Where not even one fits the smallest was tried; where the top fits nothing has failed."""
    assert answer(search) == best and [attempt.number for attempt in search.attempts][: len(first)] == first


def test_what_goes_wrong_ends_the_search_with_what_was_tried() -> None:
    tried: list[BatchAttempt] = []

    def attempt(number: int) -> BatchAttempt:
        if number > 8:
            raise ValueError("another matter")
        return BatchAttempt(number, True, number)

    with pytest.raises(ValueError, match="another matter"):
        Search(4, 100, None, tried).run(attempt)
    assert [attempt.number for attempt in tried] == [4, 8]
