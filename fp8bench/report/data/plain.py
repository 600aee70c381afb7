"""Results for other programs: tables as CSV or frames, documents as JSON."""

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

# Columns and rows; a tuple has its cells in the order of the columns.
Row = Mapping[str, Any] | tuple[Any, ...]
Rows = tuple[Sequence[str], Iterable[Row]]
# Includes the full-width signs of East Asian keyboards.
_BEGIN_FORMULAS = frozenset("=+-@\uff1d\uff0b\uff0d\uff20")


def csv_text(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Formats rows under their column names (RFC 4180, with plain line ends); None is empty.

    Texts, including column names, are put on one line. One that a spreadsheet would run as a formula gets a leading
    apostrophe.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_cells(columns))
    writer.writerows(_cells(row if isinstance(row, tuple) else map(row.get, columns)) for row in rows)
    return text.getvalue()


def results_frame(rows: Rows) -> pd.DataFrame:
    """Returns the frame that reading the rows' CSV would give."""
    import pandas as pd

    return pd.read_csv(io.StringIO(csv_text(*rows)), low_memory=False)


def _cells(values: Iterable[Any]) -> list[Any]:
    return [_inert(value) if isinstance(value, str) else value for value in values]


@lru_cache  # the same few texts fill the rows of a training, of which there may be millions
def _inert(text: str) -> str:
    line = printable(text)
    if line[1:] and line.lstrip()[:1] in _BEGIN_FORMULAS:
        return f"'{line}"
    return line


def json_line(document: Any) -> str:
    """Formats the document on one line as strict JSON, which has no NaN or infinities."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"
