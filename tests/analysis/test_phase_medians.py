"""What a phase takes in the middle of all calls."""

from __future__ import annotations

import pytest

from fp8bench.analysis.phase_medians import phase_medians
from fp8bench.model import Segments, Timing
from tests.fakes import timing


def test_the_cells_of_a_phase_count_together() -> None:
    """Call by call: the median of sums, not the sum of medians."""
    calls = [(1, 10, 8), (2, 10, 4), (9, 10, 3)]
    found = phase_medians(timing(*calls, phases=("cast", "gemm", "cast")))
    assert list(found) == ["cast", "gemm"]
    assert found["cast"] == pytest.approx((9e-9, 9 / 19))
    assert found["gemm"] == pytest.approx((10e-9, 10 / 19))


def test_a_call_of_no_time_has_no_share() -> None:
    assert phase_medians(timing((0,), (0,))) == {"gemm": (0.0, 0.0)}


def test_without_samples_nothing_is_said() -> None:
    assert phase_medians(Timing(Segments(("gemm",), (0,)), ())) == {}
