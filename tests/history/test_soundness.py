"""What a record must hold beyond its types."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fp8bench.history.soundness import unsound
from fp8bench.model import Capacity, OperatorTime
from tests.runs import transformer

RECORD = transformer()[0].records[0]


def test_operators_with_times_are_sound() -> None:
    told = (OperatorTime("gemm", "aten::mm", 54.0, 0.04), OperatorTime("unattributed", "", 0.0, 0.0))
    assert unsound(replace(RECORD, operators=told)) == ""


@pytest.mark.parametrize(
    "wrong",
    [
        OperatorTime("gemm", "mm", 1.0, math.nan), OperatorTime("gemm", "mm", 1.0, math.inf),
        OperatorTime("gemm", "mm", -1.0, 0.1), OperatorTime("gemms", "mm", 1.0, 0.1),
    ],
)  # fmt: skip
def test_operators_without_are_not(wrong: OperatorTime) -> None:
    """A report would show them as shares."""
    assert unsound(replace(RECORD, operators=(wrong,))) == "its operators have no times"


def test_a_largest_batch_is_a_count_or_unknown() -> None:
    told = (Capacity("batch", 1 << 30, 376, 1, 72192, 1 << 29, 377, "why", 5), Capacity("batch", why="it crashed"))
    assert {unsound(replace(RECORD, capacity=one)) for one in told} == {""}


@pytest.mark.parametrize(
    "wrong",
    [
        Capacity("batch", batch=-1), Capacity("batch", batch=10**400), Capacity("batch", tokens=-3),
        Capacity("batch", peak=-1), Capacity("batch", limit=1 << 63), Capacity("batch", grain=0),
        Capacity("batch", beyond=-7), Capacity("batch", attempts=-1),
    ],
)  # fmt: skip
def test_what_is_none_is_not(wrong: Capacity) -> None:
    """A report would divide one by another."""
    assert unsound(replace(RECORD, capacity=wrong)) == "its largest batch is no count"
