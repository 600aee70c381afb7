"""Whether a run records tapes."""

from __future__ import annotations

import pytest

from fp8bench.errors import UsageError
from fp8bench.measure.passes import TAPE_VARIABLE, records_tapes, tapes_apart
from fp8bench.model import Request
from tests.counts import for_each


@for_each(
    ("quick", "asked", "variable", "recorded"),
    [
        (False, False, "", True), (True, False, "", True), (True, True, "", True), (False, False, "off", False),
        (False, True, "off", True), (True, False, "recorded", True), (True, False, "off", False),
    ],
)  # fmt: skip
def test_when_they_are_recorded(quick: bool, asked: bool, variable: str, recorded: bool) -> None:
    request = Request("gemm", quick=quick, tape=asked)
    assert records_tapes(request, {TAPE_VARIABLE: variable} if variable else {}) is recorded
    assert tapes_apart(request) is (asked or not quick)


def test_other_words_are_refused() -> None:
    with pytest.raises(UsageError, match=r"FP8BENCH_TAPE is 'no'\. Set it to off to record no tapes, or to recorded"):
        records_tapes(Request("gemm"), {TAPE_VARIABLE: "no"})
