"""The header of a file of sealed lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8bench.errors import StoreError
from fp8bench.store.kept_lines import read_header, sheet_of
from tests.counts import for_each

HEADER = b'{"schema": 1, "plan": 7}\n'


def test_the_first_line_is_the_header() -> None:
    assert read_header(sheet_of(HEADER + b'{"more": 1}\n'), Path("x"), "plan", str) == "7"


@for_each(
    ("content", "why"),
    [(b"", "it is empty"), (b"?\n" + HEADER, "Expecting value"), (HEADER.replace(b"plan", b"duel"), "'plan'")],
)
def test_without_a_header_it_is_said_why(content: bytes, why: str) -> None:
    with pytest.raises(StoreError, match=rf"x is not a plan: its first line is not a header \(.*{why}"):
        read_header(sheet_of(content), Path("x"), "plan", str)
