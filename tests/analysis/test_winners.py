"""A figure that was chosen for being the best is too good, and one from fresh samples is not."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from fp8bench.analysis.verdicts import best_ratio, common_rounds, fastest
from fp8bench.model import Timing
from tests.fakes import MS, steady, timing

TEN = steady(10 * MS, 24)


def test_the_smallest_ratio_is_the_fastest() -> None:
    """If it is below 1; rounds that not all were in do not count."""
    nine, eight = steady(9 * MS, 24), steady(8 * MS, 24)
    assert fastest([nine, eight, TEN], TEN, TEN) == 1
    assert fastest([TEN, steady(11 * MS, 24)], TEN, None) is None
    assert fastest([nine, steady(5 * MS, 24, start=100)], TEN, TEN) == 0
    assert fastest([], TEN, TEN) is None


def drawn(draw: np.random.Generator, rounds: int = 24) -> Timing:
    """Steps of 10 ms with noise that mostly adds, as a shared machine has it."""
    return timing(*[(round(10 * MS * (1 + one)),) for one in draw.exponential(0.05, rounds)])


def speed_up(case: Timing, reference: Timing, control: Timing) -> float:
    entries = [case, reference, control]
    return 1 / best_ratio(entries, common_rounds(entries)).point


@pytest.mark.slow
def test_of_equal_candidates_the_first_figure_is_too_good_and_the_fresh_one_is_not() -> None:
    """Eight of them, 200 groups: the chosen one's first speed-up lies above 1 by seven standard errors and more, its
    fresh one within three."""
    draw = np.random.default_rng(17)
    first, fresh = [], []
    for _ in range(200):
        reference, control, *candidates = (drawn(draw) for _ in range(10))
        chosen = fastest(candidates, reference, control)
        if chosen is None:  # none was faster: nobody is named
            continue
        first.append(speed_up(candidates[chosen], reference, control))
        fresh.append(speed_up(*(drawn(draw) for _ in range(3))))
    error = float(np.std(fresh)) / len(fresh) ** 0.5
    print(f"first {fmean(first):.4f}, fresh {fmean(fresh):.4f} +- {error:.4f}, named in {len(first)} of 200")
    assert fmean(first) > 1 + 7 * error and abs(fmean(fresh) - 1) < 3 * error
