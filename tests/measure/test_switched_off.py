"""What a run does unasked, and the variable that switches it off: quantisers, ceilings, tapes, warming up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fp8bench.errors import UsageError
from fp8bench.measure.arm import quantisers_for
from fp8bench.measure.ceilings import VARIABLE as CEILINGS
from fp8bench.measure.ceilings import measures_ceilings
from fp8bench.measure.device_watch import warm_up_limit
from fp8bench.measure.passes import TAPE_VARIABLE as TAPE
from fp8bench.measure.passes import records_tapes, tapes_apart
from fp8bench.model import Request
from fp8bench.model.raw import QUANTISERS_VARIABLE as QUANTISERS
from tests.counts import for_each

EAGER = f"{QUANTISERS}=eager compiles none"
Asked = Callable[[Mapping[str, str]], Any]


def quantisers(quick: bool = False) -> Asked:
    return lambda environment: quantisers_for(quick, environment).why_eager


def ceilings(quick: bool = False) -> Asked:
    return lambda environment: measures_ceilings(quick, environment)


def tapes(quick: bool = False, tape: bool = False) -> Asked:
    return lambda environment: records_tapes(Request("gemm", quick=quick, tape=tape), environment)


def warm_up(quick: bool = False, budget: float | None = None) -> Asked:
    return lambda environment: warm_up_limit(quick, budget, environment)


@for_each(
    ("asked", "environment", "answer"),
    [
        (quantisers(), {}, ""),
        (quantisers(), {QUANTISERS: ""}, ""),
        (quantisers(), {QUANTISERS: "compiled"}, ""),
        (quantisers(quick=True), {}, "--quick compiles none"),
        (quantisers(quick=True), {QUANTISERS: "compiled"}, "--quick compiles none"),
        (quantisers(), {QUANTISERS: "eager"}, EAGER),
        (quantisers(quick=True), {QUANTISERS: "eager"}, EAGER),
        (ceilings(), {}, True),
        (ceilings(), {CEILINGS: "measured"}, True),
        (ceilings(), {CEILINGS: "off"}, False),
        (ceilings(quick=True), {}, False),
        (ceilings(quick=True), {CEILINGS: "measured"}, False),
        (tapes(), {}, True),
        (tapes(), {TAPE: "off"}, False),
        (tapes(quick=True), {}, True),
        (tapes(quick=True), {TAPE: "recorded"}, True),
        (tapes(quick=True), {TAPE: "off"}, False),
        (tapes(tape=True), {TAPE: "off"}, True),
        (warm_up(), {}, 30),
        (warm_up(), {"FP8BENCH_WARM_UP": "off"}, 0.0),
        (warm_up(quick=True), {}, 5),
        (warm_up(budget=9.0), {}, 5),
        (warm_up(budget=9.0), {"FP8BENCH_WARM_UP": "off"}, 0.0),
    ],
)
def test_all_is_done_unless_somebody_asked_for_less(asked: Asked, environment: dict[str, str], answer: Any) -> None:
    assert asked(environment) == answer


@for_each(
    ("asked", "variable", "usual", "word"),
    [
        *((quantisers(), QUANTISERS, "eager", word) for word in ("off", "Eager", "1", "eager ")),
        (ceilings(), CEILINGS, "off", "no"),
        (tapes(), TAPE, "off", "no"),
        (warm_up(), "FP8BENCH_WARM_UP", "off", "no"),
    ],
)
def test_other_words_are_refused_with_those_that_there_are(asked: Asked, variable: str, usual: str, word: str) -> None:
    with pytest.raises(UsageError, match=rf"{variable} is '{word}'\. Set it to {usual}"):
        asked({variable: word})


@for_each(("quick", "tape", "apart"), [(False, False, True), (True, False, False), (True, True, True)])
def test_a_quick_look_records_tapes_in_the_worker_that_has_timed(quick: bool, tape: bool, apart: bool) -> None:
    assert tapes_apart(Request("gemm", quick=quick, tape=tape)) is apart
