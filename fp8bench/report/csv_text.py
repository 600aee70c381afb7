"""A run as CSV: its tidy rows under a line of column names (RFC 4180, but lines end as everywhere else)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from fp8bench.model import Finding, Run
from fp8bench.report.tidy import columns_of, rows


def render(run: Run, findings: Mapping[str, Finding]) -> str:
    """The whole table; numbers with all their digits, nothing for what is not known."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns_of(run), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(run, findings))
    return text.getvalue()
