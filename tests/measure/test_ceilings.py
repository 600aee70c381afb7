"""Whether a run measures what its devices can do at most, and which of that holds for a case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.errors import UsageError
from fp8bench.measure.ceilings import VARIABLE, ceiling_of, measures_ceilings
from fp8bench.model import Ceiling, Ceilings, Level, Limit, PlannedCase, Rate
from tests.counts import for_each
from tests.fakes import planned


def looked(copied: float | None = None, **products: float) -> Ceilings:
    """What a quick look found."""
    rates = [Rate(Limit.PRODUCT, name, (rate,)) for name, rate in products.items()]
    return Ceilings((*rates, *([Rate(Limit.CACHED, runs=(copied,))] if copied is not None else [])))


KNOWN = looked(7.0, fp32=100.0, bf16=400.0, fp16=20.0)


@for_each(
    ("quick", "variable", "measured"),
    [(False, "", True), (False, "measured", True), (True, "", False), (True, "measured", False), (False, "off", False)],
)
def test_when_it_is_measured(quick: bool, variable: str, measured: bool) -> None:
    """Unless somebody asked for less."""
    assert measures_ceilings(quick, {VARIABLE: variable} if variable else {}) is measured


def test_other_words_are_refused() -> None:
    with pytest.raises(UsageError, match=r"FP8BENCH_CEILINGS is 'no'\. Set it to off"):
        measures_ceilings(False, {VARIABLE: "no"})


@for_each(
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
    assert ceiling_of(planned("fp32"), looked(bf16=1.0)) == Ceiling(None, None)


def test_threads_that_never_wait_for_each_other() -> None:
    assert looked(2.0, fp32=3.0).times(4) == looked(8.0, fp32=12.0)
    assert Ceilings().times(4) == Ceilings()


def test_runs_that_differ_by_more_than_five_percent_bound_nothing() -> None:
    """They are told with the case all the same."""
    steady, wide = (100.0, 101.0, 102.0, 103.0, 104.0), (100.0, 101.0, 102.0, 103.0, 108.0)
    rates = Rate(Limit.PRODUCT, "fp32", steady), Rate(Limit.CACHED, runs=wide)
    assert rates[0].value == 102.0 and rates[0].spread == pytest.approx(4 / 102) and rates[0].steady
    assert not rates[1].steady and not Rate(Limit.COPY, why="no memory").steady
    assert ceiling_of(planned("fp32"), Ceilings(rates)) == Ceiling(102.0, None, rates)
