"""Growth that goes on, told from all growth that ends."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

from fp8bench.worker.memory_pass import LONGEST_SECONDS, growth, leak_of
from tests.counts import for_each

KIB = 1024


def held(size_of: Callable[[int], int], count: int = 48) -> list[int]:
    """After each step, of what steps keep or give back."""
    return list(accumulate(size_of(number) for number in range(count)))


@for_each("count", [12, 24, 48])
@for_each("phase", range(3))
def test_what_every_third_step_keeps_is_found(phase: int, count: int) -> None:
    assert growth(held(lambda step: 3 * KIB * (step % 3 == phase), count)) == pytest.approx(KIB, rel=0.4)


GROWING: dict[str, tuple[Callable[[int], int], int]] = {
    "every step": (lambda step: KIB, KIB),
    "every 12th": (lambda step: 12 * KIB * (step % 12 == 7), KIB),
    "beside batches of many sizes": (lambda step: KIB + (-1) ** step * 5 * KIB, KIB),
    "beside a cache that is emptied": (lambda step: KIB + (8 * KIB if step % 9 else -64 * KIB), KIB),
}  # fmt: skip


ENDING: dict[str, Callable[[int], int]] = {
    "nothing": lambda step: 0,
    "once": lambda step: KIB * (step == 20),
    "a history of 16": lambda step: KIB * (step < 16),
    "a history of 40": lambda step: KIB * (step < 40),
    "emptied every 5 steps": lambda step: KIB if step % 5 else -4 * KIB,
    "emptied every 20 steps": lambda step: KIB if step % 20 else -19 * KIB,
    "slower and slower": lambda step: 1 << max(0, 24 - step),
    "a little": lambda step: 100,
    "given back": lambda step: -KIB,
}


@for_each("how", [*GROWING, *ENDING])
def test_growth_is_bytes_a_step_where_it_goes_on(how: str) -> None:
    size_of, wanted = GROWING[how] if how in GROWING else (ENDING[how], 0.0)
    assert growth(held(size_of)) == pytest.approx(wanted, rel=0.3)


def test_garbage_in_cycles_is_no_leak_and_steps_that_take_long_are_not_run_again() -> None:
    def step() -> None:
        cycle: list[object] = [torch.ones(KIB)]
        cycle.append(cycle)

    assert leak_of(step, "cpu", 0.001) == 0.0
    assert leak_of(lambda: pytest.fail("not to be run"), "cpu", LONGEST_SECONDS + 1) is None
