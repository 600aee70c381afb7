"""Results for other programs: tables as CSV or frames, documents as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp8bench.report.elements import printable

if TYPE_CHECKING:
    import pandas as pd

# Columns and rows. A row that is a tuple has cells that are ready for CSV.
Row = Mapping[str, Any] | tuple[Any, ...]
Rows = tuple[Sequence[str], Iterable[Row]]
# Also the wide signs of East Asian keyboards.
_BEGIN_FORMULAS = frozenset("=+-@\uff1d\uff0b\uff0d\uff20")


def csv_text(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Rows under their column names (RFC 4180, with plain line ends); None is empty.

    Texts are one line. One that a spreadsheet would run as a formula gets an apostrophe in front.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(row if isinstance(row, tuple) else [cell(row.get(name)) for name in columns] for row in rows)
    return text.getvalue()


def results_frame(rows: Rows) -> pd.DataFrame:
    """Returns the frame that reading the rows' CSV gives."""
    import pandas as pd

    return pd.read_csv(io.StringIO(csv_text(*rows)), low_memory=False)


def cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text[1:] and text.lstrip()[:1] in _BEGIN_FORMULAS else text


def json_line(document: Any) -> str:
    """The document on one line, as strict JSON: NaN and infinities are refused."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"
