"""Text for other programs: a table as CSV, a document as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8bench.report.elements import printable

# As they are typed anywhere, and with the wide signs of East Asian keyboards.
_BEGIN_FORMULAS = frozenset("=+-@\uff1d\uff0b\uff0d\uff20")


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows under their column names (RFC 4180, but lines end as everywhere else); nothing for what is not known.

    A text is one line, and one that a spreadsheet would run as a formula gets an apostrophe in front, as one types it
    there.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def more_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Further rows, of cells in the order of the columns: of half a million, names would take most of the time."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text[1:] and text.lstrip()[:1] in _BEGIN_FORMULAS else text


def json_line(document: Any) -> str:
    """The document on one line. Strict JSON: numbers that it has no word for are refused."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"
