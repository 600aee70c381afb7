"""How much a test tries: a sample each time, all of it every night."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from _pytest.mark import ParameterSet

# `params` of a fixture whose tests are all slow or nightly.
SLOW = [pytest.param(None, marks=pytest.mark.slow, id="slow")]
NIGHTLY = [pytest.param(None, marks=pytest.mark.nightly, id="nightly")]


def counts(sample: int, *whole: int) -> pytest.MarkDecorator:
    """Parametrizes a test by `count`: a sample by default, more at night; the assertion must hold for each."""
    return pytest.mark.parametrize("count", sampled([sample], [sample, *whole]))


def sampled(sample: Collection[Any], rows: Iterable[Any]) -> list[ParameterSet]:
    """Rows for parametrize (values or tuples): nightly, except those that start with a value of the sample."""
    every = [row if type(row) is tuple else (row,) for row in rows]
    return [pytest.param(*row, marks=() if row[0] in sample else pytest.mark.nightly) for row in every]


def paired(first: Sequence[Any], second: Sequence[Any], *always: tuple[Any, Any]) -> list[ParameterSet]:
    """The product of two lists: nightly, except pairs that cover each value once, and the named pairs."""
    longest = range(max(len(first), len(second)))
    pairs = {(first[place % len(first)], second[place % len(second)]) for place in longest} | {*always}
    rows = itertools.product(first, second)
    return [pytest.param(*row, marks=() if row in pairs else pytest.mark.nightly) for row in rows]


def for_each(names: str | Sequence[str], rows: Iterable[Any], ids: Any = None) -> Callable[[Callable[..., None]], Any]:
    """Like parametrize but in one test, for tables whose rows share fixtures.

    Each row has its own `tmp_path` and `monkeypatch`, and all rows run. Failures are raised with a note that names the
    row; a skipped row skips the test at its end.
    """
    words = [word.strip() for word in names.split(",")] if isinstance(names, str) else list(names)
    table = [_row(words, row) for row in rows]
    assert table, "a table without rows asserts nothing"
    labels = [list(map(ids, row.values())) for row in table] if callable(ids) else ids or table

    def of(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def whole(**made: Any) -> None:
            failed: list[BaseException] = []
            skipped: list[BaseException] = []
            for place, (row, label) in enumerate(zip(table, labels, strict=True)):
                try:
                    with _own(made, place) as own:
                        test(**own, **row)
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except (Exception, pytest.fail.Exception) as failure:  # raised after all rows ran
                    failure.add_note(f"in the row {label!r}")
                    if str(failure).startswith("Timeout "):  # pytest-timeout limits no row after this one
                        raise
                    failed.append(failure)
            if len(failed) > 1:
                raise BaseExceptionGroup(f"{len(failed)} of {len(table)} rows", failed)
            if failed or skipped:
                raise (failed or skipped)[0]

        asked = inspect.signature(test)
        whole.__signature__ = asked.replace(  # type: ignore[attr-defined]
            parameters=[parameter for name, parameter in asked.parameters.items() if name not in words]
        )
        return whole

    return of


@contextmanager
def _own(made: dict[str, Any], place: int) -> Iterator[dict[str, Any]]:
    """Copies of fixtures for one row."""
    own = dict(made)
    if "tmp_path" in made:
        own["tmp_path"] = made["tmp_path"] / f"row-{place}"
        own["tmp_path"].mkdir()
    with ExitStack() as stack:
        if "monkeypatch" in made:
            own["monkeypatch"] = stack.enter_context(made["monkeypatch"].context())
        yield own


def _row(words: list[str], row: Any) -> dict[str, Any]:
    if isinstance(row, ParameterSet):
        assert not row.marks, "rows with marks are tests of their own: use parametrize"
        row = row.values
    elif len(words) == 1:
        row = (row,)
    return dict(zip(words, row, strict=True))
