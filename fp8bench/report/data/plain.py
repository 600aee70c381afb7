"""Text for other programs: a table as CSV, a document as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows under their column names (RFC 4180, but lines end as everywhere else); nothing for what is not known.

    A text that a spreadsheet would run as a formula gets an apostrophe in front, as one types it there.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _no_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[1:] and value[0] in "=+-@" else value


def json_line(document: Any) -> str:
    """The document on one line. Strict JSON: numbers that it has no word for are refused."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"
