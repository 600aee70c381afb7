"""Whether two arms ran at the same clock, by readings that are few, coarse and noisy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fp8bench.analysis.clocks import LEAST_LOOKS, clock_offset
from fp8bench.model import Label, Timing
from tests.counts import for_each, sampled
from tests.fakes import MS, steady

STEP = 15e6


def clocked(clocks: Sequence[float | None]) -> Timing:
    """A slot of a second for each of these clocks."""
    plain = steady(10 * MS, len(clocks))
    slots = zip(plain.slots, clocks, strict=True)
    return replace(plain, slots=tuple(replace(slot, wall_seconds=1.0, clock=clock) for slot, clock in slots))


def told(case: Sequence[float | None], *entries: Sequence[float | None]) -> list[str]:
    """The reasons of the labels, all of which are hard."""
    found = list(clock_offset(clocked(case), [clocked(one) for one in entries], "fp32"))
    assert all(one.label is Label.CLOCK_OFFSET and one.hard for one in found)
    return [one.reason for one in found]


@for_each(
    ("case", "entries", "void"),
    [
        ([1.71e9] * 8, ([1.76e9] * 8,), True),
        ([1.76e9] * 8, ([1.71e9] * 8, [1.71e9] * 8), True),
        ([1.75e9] * 8, ([1.76e9] * 8,), False),
        ([1.71e9] * 8, ([1.76e9] * 8, [1.68e9] * 8), False),  # the entries of the reference count alike
        ([1.71e9, 1.82e9] * 8, ([1.76e9] * 16,), False),
        ([1.71e9] * (LEAST_LOOKS - 1), ([1.76e9] * (LEAST_LOOKS - 1),), False),
        ([1.71e9] * 8, (), False),
        ([None] * 8, ([1.76e9] * 8,), False),
        ([1.71e9, None] * 4, ([None, 1.76e9] * 4,), False),  # no round has both
    ],
)
def test_a_pair_is_void_above_one_percent(
    case: list[float | None], entries: tuple[list[float | None], ...], void: bool
) -> None:
    """By rounds that have all clocks; who has none says nothing."""
    assert bool(told(case, *entries)) == void


def test_both_clocks_are_named() -> None:
    assert told([1.71e9] * 8, [1.76e9] * 8) == ["SM clock 1.71 GHz against fp32's 1.76 GHz, -2.8%"]


def test_a_clock_that_falls_for_all_is_no_offset() -> None:
    """Rounds are paired: a device that becomes a tenth slower meanwhile runs both arms so."""
    falling = [1.98e9 * (1 - 0.1 * number / 23) for number in range(24)]
    assert not told(falling, [clock * 1.005 for clock in falling])
    assert told(falling, [clock * 1.03 for clock in falling])


def readings(draw: np.random.Generator, clock: float, noise: float, rounds: int) -> list[float | None]:
    """As a driver tells them: in steps of 15 MHz."""
    return [STEP * round(one / STEP) for one in draw.normal(clock, noise * clock, rounds)]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", sampled([12], [4, 12, 48]))
@pytest.mark.parametrize("noise", sampled([0.003], [0.0, 0.003, 0.01]))
def test_how_often_it_is_right(rounds: int, noise: float) -> None:
    """Of 1,000 pairs each. Equal clocks, and 0.5% apart: at most 1 in 100 is void. 3% apart: found where readings tell.

    12 rounds are what a plain command's first look at the samples has in half of its rounds.
    """
    draw = np.random.default_rng(17)

    def share(apart: float) -> float:
        pairs = ((readings(draw, 1.755e9 * (1 - apart), noise, rounds), readings(draw, 1.755e9, noise, rounds))
                 for _ in range(1000))  # fmt: skip
        return sum(bool(told(*pair)) for pair in pairs) / 1000

    assert share(0.0) <= 0.01 and share(0.005) <= 0.01
    assert share(0.03) >= (0.95 if rounds >= 12 or noise == 0 else 0.0)
