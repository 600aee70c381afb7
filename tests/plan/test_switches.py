"""What a run does unasked, and the variable that switches it off: quantisers, ceilings, tapes, warming up, a
second worker."""

from __future__ import annotations

from typing import Any

import pytest

from fp8bench.errors import UsageError
from fp8bench.model.raw import QUANTISERS_VARIABLE as QUANTISERS
from fp8bench.plan.resolve import CEILINGS_VARIABLE as CEILINGS
from fp8bench.plan.resolve import SECOND_VARIABLE as SECOND
from fp8bench.plan.resolve import TAPE_VARIABLE as TAPE
from fp8bench.plan.resolve import WARM_UP_VARIABLE as WARM_UP
from fp8bench.plan.resolve import read_switches
from tests.counts import for_each

EAGER, QUICK = f"{QUANTISERS}=eager compiles none", "--quick compiles none"


@for_each(
    ("switch", "asked", "environ", "answer"),
    [
        ("why_eager", {}, {}, ""),
        ("why_eager", {"quick": True}, {QUANTISERS: "compiled"}, QUICK),
        ("why_eager", {"quick": True}, {QUANTISERS: "eager"}, EAGER),
        ("ceilings", {}, {}, True),
        ("ceilings", {}, {CEILINGS: "off"}, False),
        ("ceilings", {"quick": True}, {CEILINGS: "measured"}, False),
        ("tapes", {}, {}, True),
        ("tapes", {}, {TAPE: "off"}, False),
        ("tapes", {"tape": True}, {TAPE: "off"}, True),
        ("tapes_apart", {"quick": True}, {}, False),
        ("tapes_apart", {"quick": True, "tape": True}, {}, True),
        ("warm_up_seconds", {}, {}, 30.0),
        ("warm_up_seconds", {}, {WARM_UP: "off"}, 0.0),
        ("warm_up_seconds", {"quick": True}, {}, 5.0),
        ("warm_up_seconds", {"has_budget": True}, {}, 5.0),
        ("second", {}, {}, True),
        ("second", {}, {SECOND: "off"}, False),
    ],
)
def test_every_extra_runs_unless_switched_off(
    switch: str, asked: dict[str, bool], environ: dict[str, str], answer: Any
) -> None:
    assert getattr(read_switches(environ, **asked), switch) == answer


@for_each(
    ("variable", "usual", "word"),
    [
        *((QUANTISERS, "eager", word) for word in ("off", "Eager", "1", "eager ")),
        (CEILINGS, "off", "no"),
        (TAPE, "off", "no"),
        (WARM_UP, "off", "no"),
        (SECOND, "off", "no"),
    ],
)
def test_unknown_values_are_refused_with_the_valid_ones(variable: str, usual: str, word: str) -> None:
    with pytest.raises(UsageError, match=rf"{variable} is '{word}'\. Set it to {usual}"):
        read_switches({variable: word}, tape=True)
