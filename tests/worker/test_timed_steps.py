"""Timed slots held against counted ones, from scripts; and states that are as they were."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from fp8bench.worker import step_effect
from fp8bench.worker.step_effect import Left, as_they_were, slot_of, told_apart
from tests.counts import for_each

MS = 1e-3


def told(left: Callable[[int, bool], Left], seconds: Callable[[int, bool], float] = lambda n, timed: MS) -> str:
    """Of slots that leave this and take so long, the n-th from 0."""
    numbers = iter(range(8))

    def slot(timed: bool) -> step_effect.Slot:
        number = next(numbers)
        return slot_of([seconds(number, timed)] * 3, 1, left(number, timed))

    return told_apart(slot)


def sums(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_slots_that_agree_are_two() -> None:
    seen: list[bool] = []

    def slot(timed: bool) -> step_effect.Slot:
        seen.append(timed)
        return slot_of([MS], 1, [sums(1, 2), sums(3, 4)])

    assert told_apart(slot) == "" and seen == [True, False]
    assert told_apart(lambda timed: None) == ""
    assert told(lambda n, timed: [sums(timed)], lambda n, timed: 1.1) == "", "a step that long is not taken again"


@for_each("period", range(2, 9))
@for_each("run", [1, 2, 3, 4])
def test_turns_are_no_lie(period: int, run: int) -> None:
    """Whatever their period, each so many slots long, and wherever they begin; nor is what goes on."""
    for begin in range(period * run):
        assert told(lambda n, timed, begin=begin: [sums(1 + (n + begin) // run % period, 1)]) == ""  # type: ignore[misc]
    assert told(lambda n, timed: [sums(n, n)]) == "" == told(lambda n, timed: [sums(1, 1)] * n)


@for_each(
    ("timed", "counted", "lies"),
    [
        ([sums(1, 2)], [sums(1, 2.01)], False),  # other kernels
        ([sums(1, 2)], [sums(1, 2.5)], True),
        ([sums(1, 2), sums(1e-5, 0)], [sums(1, 2), sums(-1e-5, 0)], False),  # rounding
        ([sums(1, 2), sums(0, 0)], [sums(1, 2), sums(0.1, 0)], True),
        ([sums(1, 2)], [sums(1, 2), sums(1, 2)], True),
        ([], [], False),
    ],
)
def test_what_differs_each_time_is_a_difference(timed: Left, counted: Left, lies: bool) -> None:
    said = "timed, a step leaves other numbers than while its operators are counted" if lies else ""
    assert told(lambda n, is_timed: timed if is_timed else counted) == said


def test_noise_beside_it_hides_nothing() -> None:
    """A tensor that is drawn anew each time settles nothing; the others do."""
    assert told(lambda n, timed: [sums(n, -n), sums(1, 2 * timed)]).startswith("timed, a step leaves")


def test_time_that_only_counted_steps_take() -> None:
    assert told(lambda n, timed: [], lambda n, timed: MS if timed else 3 * MS) == (
        "timed, a step takes 1.00 ms, and its operators 2.97 ms or more while they are counted"
    )
    assert told(lambda n, timed: [], lambda n, timed: MS if timed else 1.5 * MS) == ""
    assert told(lambda n, timed: [], lambda n, timed: MS if timed or n == 4 else 3 * MS) == ""


def test_a_state_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    given, weights = torch.randn(8, 8), torch.randn(8, 8)
    state, before = SimpleNamespace(x=given, w=weights), (given.clone(), weights.clone())
    found = []
    with as_they_were(state, {given.untyped_storage().data_ptr()}) as beginning:
        for _ in range(2):
            beginning.again()
            assert not torch.equal(given, before[0]) and torch.equal(weights, before[1])
            weights.add_(given @ torch.rand(8, 8))
            found.append(beginning.left(given @ given))
    assert torch.equal(given, before[0]) and torch.equal(weights, before[1])
    assert all(map(torch.equal, *found)) and sorted(bool(one.any()) for one in found[0]) == [False, True, True]
    monkeypatch.setattr(step_effect, "MOST_BYTES", 100)
    with as_they_were(state, {given.untyped_storage().data_ptr()}) as beginning:
        assert torch.equal(given, before[0]) and beginning.left(given) == []
