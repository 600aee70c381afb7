"""The header of a file of sealed lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8bench.errors import StoreError
from fp8bench.files import format_checksummed_line
from fp8bench.store.kept_lines import parse_file_lines, read_header
from tests.counts import for_each

HEADER = b'{"schema": 1, "plan": 7}\n'


def test_the_first_line_is_the_header() -> None:
    assert read_header(parse_file_lines(HEADER + b'{"more": 1}\n'), Path("x"), "plan", str) == "7"


@for_each(
    ("content", "why"),
    [(b"", "it is empty"), (b"?\n" + HEADER, "Expecting value"), (HEADER.replace(b"plan", b"duel"), "'plan'")],
)
def test_a_missing_header_has_a_reason(content: bytes, why: str) -> None:
    with pytest.raises(StoreError, match=rf"x is not a plan: its first line is not a header \(.*{why}"):
        read_header(parse_file_lines(content), Path("x"), "plan", str)


def test_lines_with_a_checksum_and_no_number_are_those_of_older_versions() -> None:
    content = "".join(f"{format_checksummed_line({'step': step})}\n" for step in (1, 2)).encode()
    lines = parse_file_lines(content)
    assert lines.lines == ((1, {"step": 1}), (2, {"step": 2}))
    assert (lines.broken, lines.troubles, lines.has_lost_line) == ((), (), False)
