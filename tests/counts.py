"""How much a test tries: a sample each time, all of it where slow tests are asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

# The `params` of a fixture whose every test is slow.
SLOW = [pytest.param(None, marks=pytest.mark.slow, id="slow")]


def counts(sample: int, whole: int, *nightly: int) -> pytest.MarkDecorator:
    """Gives a test its `count`; what it asserts of it must hold for each."""
    rows = [pytest.param(whole, marks=pytest.mark.slow)]
    rows += [pytest.param(count, marks=pytest.mark.nightly) for count in nightly]
    return pytest.mark.parametrize("count", [sample, *rows])


def sampled(sample: Collection[Any], rows: Iterable[Any]) -> list[ParameterSet]:
    """Rows for parametrize, values or tuples: slow, but for those that begin with one of the sample."""
    every = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*row, marks=() if row[0] in sample else pytest.mark.slow) for row in every]
