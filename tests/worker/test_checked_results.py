"""Answers of a workload's passes become plain values, or a message."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fp8bench.model import TensorStatistics
from fp8bench.worker.checked_results import check_error_figures, check_statistics
from tests.counts import for_each


class Text(str):
    """A text of a workload's own, which the parent does not know."""

    __slots__ = ()


def test_numbers_of_any_kind_become_plain_floats() -> None:
    given = {"a": torch.tensor(0.5), "b": np.float32(1), "c": 3, Text("d"): math.nan, "e": torch.ones(1, 1)}
    errors = check_error_figures(given)
    assert list(errors) == ["a", "b", "c", "d", "e"] and [*errors.values()][:3] == [0.5, 1.0, 3.0]
    assert {type(value) for value in errors.values()} == {float} and {type(name) for name in errors} == {str}


@for_each(
    ("given", "words"),
    [
        (None, "error() returned NoneType None; expected a mapping of names to numbers"),
        ([0.5], "error() returned list [0.5]; expected a mapping of names to numbers"),
        ({1: 0.5}, "a name that error() gives is int 1; expected a text"),
        ({"a": "0.5"}, "error()['a'] is str '0.5'; expected a number"),
        ({"a": True}, "error()['a'] is bool True; expected a number"),
        ({"a": None}, "error()['a'] is NoneType None; expected a number"),
        ({"a": 1j}, "error()['a'] is complex 1j; expected a number"),
        ({"a": 10**400}, "error()['a'] is int 1000"),
        ({"a": np.ones(3)}, "error()['a'] is ndarray array([1., 1., 1.]); expected a number"),
        ({"\ud800": 0.5}, r"a name that error() gives is '\ud800', which holds half a surrogate pair"),
    ],
)
def test_errors_that_are_none_are_refused(given: Any, words: str) -> None:
    with pytest.raises(TypeError) as caught:
        check_error_figures(given)
    assert words in str(caught.value)


def test_statistics_become_plain_values_of_their_own() -> None:
    row: Any = TensorStatistics(Text("k"), "input", torch.tensor(4), np.float64(2), [["fp8", np.float32(0.5), 0]])  # type: ignore[arg-type]
    (made,) = check_statistics(one for one in [row])
    assert made == TensorStatistics("k", "input", 4, 2.0, (("fp8", 0.5, 0.0),))
    assert [type(field) for field in (made.kind, made.count, made.amax, *made.outside[0])] == [
        str,
        int,
        float,
        str,
        float,
        float,
    ]


@for_each(
    ("given", "words"),
    [
        (None, "statistics() returned NoneType None; expected a tuple of TensorStatistics"),
        ("text", "statistics() returned str 'text'; expected a tuple"),
        ([1], "statistics() gave int 1; expected a TensorStatistics"),
        (("k", "r", 1.5, 1.0), "count is float 1.5; expected a whole number"),
        (("k", "r", math.inf, 1.0), "count is float inf; expected a whole number"),
        (("k", "r", math.nan, 1.0), "count is float nan; expected a whole number"),
        ((None, "r", 1, 1.0), "kind is NoneType None; expected a text"),
        (("k", "r", 1, "x"), "amax is str 'x'; expected a number"),
        (("k", "r", 1, 1.0, 5), "outside of TensorStatistics holds int 5; expected a tuple"),
        (
            ("k", "r", 1, 1.0, (("fp8", 1),)),
            "TensorStatistics.outside holds tuple ('fp8', 1); expected (format, ",
        ),
        (("k", "r", 1, 1.0, ((1, 1, 1),)), "a format in outside is int 1; expected a text"),
        (
            ("k", "r", 1, 1.0, (("fp8", "x", 1),)),
            "a share in TensorStatistics.outside of 'k' is str 'x'; expected",
        ),
    ],
)
def test_statistics_that_are_none_are_refused(given: Any, words: str) -> None:
    with pytest.raises(TypeError) as caught:
        check_statistics([TensorStatistics(*given)] if isinstance(given, tuple) else given)
    assert words in str(caught.value)
