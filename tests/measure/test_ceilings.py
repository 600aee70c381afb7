"""Whether a run measures what its devices can do at most, and which of that holds for a case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.errors import UsageError
from fp8bench.measure.ceilings import VARIABLE, ceiling_of, measures_ceilings
from fp8bench.model import Ceiling, Ceilings, Level, PlannedCase
from tests.fakes import planned

KNOWN = Ceilings((("fp32", 100.0), ("bf16", 400.0), ("fp16", 20.0)), 7.0)


@pytest.mark.parametrize(
    ("quick", "variable", "measured"),
    [(False, "", True), (False, "measured", True), (True, "", False), (True, "measured", False), (False, "off", False)],
)
def test_when_it_is_measured(quick: bool, variable: str, measured: bool) -> None:
    """Unless somebody asked for less."""
    assert measures_ceilings(quick, {VARIABLE: variable} if variable else {}) is measured


def test_other_words_are_refused() -> None:
    with pytest.raises(UsageError, match=r"FP8BENCH_CEILINGS is 'no'\. Set it to off"):
        measures_ceilings(False, {VARIABLE: "no"})


@pytest.mark.parametrize(
    ("one", "flops"),
    [
        (planned("fp32"), 100.0),
        (planned("fp16"), 100.0),  # a processor may compute it in fp32
        (planned("bf16"), 400.0),
        (planned("fp8", Level.EMULATED), 400.0),
        (planned("tf32", Level.EMULATED), 400.0),
    ],
    ids=lambda one: one.case.precision if isinstance(one, PlannedCase) else "",
)
def test_the_dtypes_that_a_case_may_multiply_in(one: PlannedCase, flops: float) -> None:
    """Its own and wider ones; emulated any."""
    assert ceiling_of(one, KNOWN) == Ceiling(flops, 7.0)


def test_a_map_lets_a_case_multiply_in_what_it_names() -> None:
    one = planned("fp32")
    mapped = replace(one, case=replace(one.case, precision_map=(("mlp", "bf16"),)))
    assert ceiling_of(mapped, KNOWN) == Ceiling(400.0, 7.0)


def test_nothing_is_known_of_what_was_not_measured() -> None:
    assert ceiling_of(planned("fp32"), None) is None
    assert ceiling_of(planned("fp32"), Ceilings((("bf16", 1.0),))) == Ceiling(None, None)


def test_threads_that_never_wait_for_each_other() -> None:
    assert Ceilings((("fp32", 3.0),), 2.0).times(4) == Ceilings((("fp32", 12.0),), 8.0)
    assert Ceilings().times(4) == Ceilings()
