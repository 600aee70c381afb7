"""What a record must hold beyond its types."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fp8bench.history.soundness import unsound
from fp8bench.model import OperatorTime
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
