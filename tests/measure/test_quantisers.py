"""Whether a run compiles its quantisers, and what it says where it does not."""

from __future__ import annotations

import pytest

from fp8bench.errors import UsageError
from fp8bench.measure.arm import quantisers_for
from fp8bench.measure.environment import _VARIABLES
from fp8bench.model.raw import QUANTISERS_VARIABLE
from tests.counts import for_each


@for_each(
    ("quick", "variable", "why"),
    [
        (False, None, ""),
        (False, "", ""),
        (False, "compiled", ""),
        (True, None, "--quick compiles none"),
        (True, "compiled", "--quick compiles none"),
        (False, "eager", "FP8BENCH_QUANTISERS=eager compiles none"),
        (True, "eager", "FP8BENCH_QUANTISERS=eager compiles none"),
    ],
)
def test_what_is_compiled(quick: bool, variable: str | None, why: str) -> None:
    """Everything, unless somebody asked for less."""
    found = quantisers_for(quick, {} if variable is None else {QUANTISERS_VARIABLE: variable})
    assert found.why_eager == why


@for_each("word", ["off", "Eager", "1", "eager "])
def test_other_words_are_refused(word: str) -> None:
    """With those that there are."""
    with pytest.raises(UsageError, match=r"FP8BENCH_QUANTISERS is .*Set it to eager"):
        quantisers_for(False, {QUANTISERS_VARIABLE: word})


def test_a_run_notes_the_variable() -> None:
    """It explains a number."""
    assert QUANTISERS_VARIABLE in _VARIABLES
