"""What a record must hold beyond its types."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fp8bench.model import Capacity, MemoryUse, OperatorTime, PhaseMemory
from fp8bench.store.runs.read import unsound
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


def test_memory_that_sums_is_sound() -> None:
    """With roles, without, and with one that only a later version knows."""
    told = (
        MemoryUse(0), MemoryUse(3, (("of another time", 3),)),
        MemoryUse(9, (("weights", 4), ("data", 5)), (PhaseMemory("gemm", 9, 512),), 512, 1 << 40, 1 << 30),
    )  # fmt: skip
    assert {unsound(replace(RECORD, memory=one)) for one in told} == {""}


@pytest.mark.parametrize(
    "wrong",
    [
        MemoryUse(-1), MemoryUse(10**400), MemoryUse(9, (("weights", 4),)), MemoryUse(4, (("data", 2), ("data", 2))),
        MemoryUse(4, (("weights", 5), ("data", -1))), MemoryUse(4, phases=(PhaseMemory("gemm", -4),)),
        MemoryUse(4, phases=(PhaseMemory("gemm", 4, -1),)), MemoryUse(4, reserved=-1), MemoryUse(4, process=1 << 63),
        MemoryUse(4, resident=-5),
    ],
)  # fmt: skip
def test_memory_that_is_no_count_is_not(wrong: MemoryUse) -> None:
    """A report would draw it as parts of a whole."""
    assert unsound(replace(RECORD, memory=wrong)) == "its memory is no count, or what it is for does not sum to it"
