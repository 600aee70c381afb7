"""Compares outputs of hand-made runs with stored documents in tests/golden/texts/made.txt.

Such a test yields claims with their output: elements, lines, or nothing. After a deliberate change `FP8BENCH_TOLD=write
pytest -n 0 FILE` rewrites its document: read the diff.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8bench.report.elements import Chart, Code, Field, NameValuePairs, Part, Scatter, Table, Text, TextList, Tone
from fp8bench.report.page.charts import numbers_table
from fp8bench.report.terminal.run import render
from tests.golden.documents import load, save
from tests.runs import Made

MADE = Path(__file__).resolve().parent / "golden" / "texts" / "made.txt"
# A claim, and a part, an element, a text, a row of values, several of them, or None.
Told = Iterator[tuple[str, Any]]


def as_before(claims: Callable[..., Told]) -> Callable[..., None]:
    name = claims.__name__.removeprefix("test_")

    @functools.wraps(claims)
    def test(**fixtures: Any) -> None:
        now = "".join(f"== {claim}\n{as_text(told)}\n" for claim, told in claims(**fixtures))
        assert now, "a test that claims nothing cannot fail"
        now = re.sub(r"acknowledged \d{4}-\d\d-\d\d", "acknowledged TODAY", now)  # while the test runs
        if os.environ.get("FP8BENCH_TOLD") == "write":
            save(MADE, dict(sorted((load(MADE) | {name: now}).items())))
            return
        before = documents_before().get(name, "")
        if now != before:
            diff = difflib.unified_diff(before.splitlines(), now.splitlines(), "before", "now", lineterm="", n=2)
            pytest.fail("\n".join([f"{name} differs; read how. FP8BENCH_TOLD=write writes it", *diff]), False)

    return test


def find_made_tests() -> list[str]:
    """As `FILE::TEST`."""
    tests = []
    for path in sorted(Path(__file__).resolve().parent.rglob("test_*.py")):
        names = re.findall(r"^@as_before\ndef (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        tests += [f"{path}::{name}" for name in names]
    return tests


@functools.cache
def documents_before() -> dict[str, str]:
    return load(MADE)


def as_text(told: Any) -> str:
    return "".join(f"{line.rstrip()}\n" for line in lines(told))


def lines(told: Any) -> Iterator[str]:
    """Whatever is told, with its tones: '0.5x <doubt>'."""
    match told:
        case None:
            yield "(nothing)"
        case str():
            yield from told.splitlines() or ["(no words)"]
        case Part():
            yield from [f"lead: {told.lead}"] if told.lead else []
            yield from lines(told.elements)
        case Text() | Field():
            yield shown(told)
        case TextList():
            yield from (f"- {shown(item)}" for item in told.items)
        case NameValuePairs():
            yield from (f"{name}: {what}" for name, what in told.pairs)
        case Code():
            yield from (f"$ {line}" for line in told.text.splitlines())
        case Table() | Chart():
            yield from rows_of(told)
        case tuple() if told and any(isinstance(value, str | int | float | None) for value in told):
            yield " | ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in told)
        case _:
            for part in told:
                yield from lines(part)


def rows_of(element: Table | Chart) -> Iterator[str]:
    kind, folded = type(element).__name__, " (folded)" * element.folded
    if isinstance(element, Chart):
        yield f"{kind} {element.name}{folded}: {element.title}: {element.description}"
        if isinstance(element, Scatter):
            yield f"  margin {element.margin!r}"
        element = numbers_table(element)  # type: ignore[arg-type]
    else:
        yield f"{kind} {element.name}{folded}: {element.caption}"
    yield "  " + " | ".join(column.title for column in element.columns)
    yield from ("  " + " | ".join(map(shown, row)) for row in element.rows)


def shown(words: Text | Field) -> str:
    return words.text + (f" <{words.tone}>" if words.tone is not Tone.PLAIN else "")


def on_terminal(made: Made, *words: str, width: int = 200) -> str:
    """The paragraphs of a run's terminal output that contain a word, without the legend."""
    parts = render(*made, width, with_details=True).rstrip("\n").split("\n\n")
    sought = re.compile("|".join(map(re.escape, words)))
    return "\n\n".join(part for part in parts if part[:11] != "how to read" and sought.search(part))
