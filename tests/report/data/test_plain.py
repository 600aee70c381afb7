"""Tables and documents for other programs."""

from __future__ import annotations

from fp8bench.report.data.plain import csv_text
from tests.counts import for_each


@for_each(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"), ("+cmd", "'+cmd"), ("-2+3", "'-2+3"), ("@x", "'@x"), ("-", "-"), ("a=1", "a=1"),
        (-1.5, "-1.5"), (None, ""), ("", ""),
    ],
)  # fmt: skip
def test_no_text_is_a_formula(value: object, cell: str) -> None:
    assert csv_text(("a", "b"), [{"a": value, "b": 1}]) == f"a,b\n{cell},1\n"
