"""Formats results for other programs: tables as CSV or pandas frames, documents as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fp8bench.report.elements import printable

if TYPE_CHECKING:
    import pandas as pd

# A row is a mapping from column names to values, or a tuple in the order of the columns.
Row = Mapping[str, Any] | tuple[Any, ...]
PlainRows = tuple[Sequence[str], Iterable[Row]]
# A spreadsheet reads a cell that begins with one of these signs as a formula. The full-width signs are those that
# East Asian keyboards type.
_FORMULA_START_SIGNS = frozenset("=+-@\uff1d\uff0b\uff0d\uff20")


def csv_text(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Formats columns and rows as CSV (RFC 4180, but lines end with '\n' only). None becomes an empty cell.

    Each text is put on one line. A text that a spreadsheet would run as a formula gets a leading apostrophe.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_spreadsheet_safe_cells(columns))
    writer.writerows(_spreadsheet_safe_cells(row if isinstance(row, tuple) else map(row.get, columns)) for row in rows)
    return text.getvalue()


def results_frame(rows: PlainRows) -> pd.DataFrame:
    """Returns the rows as a pandas frame, equal to the frame that pandas would read from their CSV."""
    import pandas as pd

    # With low_memory, pandas could choose different dtypes for parts of a column.
    return pd.read_csv(io.StringIO(csv_text(*rows)), low_memory=False)


def _spreadsheet_safe_cells(values: Iterable[Any]) -> list[Any]:
    return [_escape_formula(value) if isinstance(value, str) else value for value in values]


@lru_cache  # cached, because a training may have millions of rows with the same few texts
def _escape_formula(text: str) -> str:
    line = printable(text)
    # A sign alone, such as the dash for a missing value, is not a formula.
    if line[1:] and line.lstrip()[:1] in _FORMULA_START_SIGNS:
        return f"'{line}"
    return line


def json_line(document: Any) -> str:
    """Formats a document as strict JSON on one line. Raises ValueError for NaN and infinities."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"
