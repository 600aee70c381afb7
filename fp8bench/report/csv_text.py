"""Runs as CSV: their rows under a line of column names (RFC 4180, but lines end as everywhere else)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from fp8bench.model import Finding, Run
from fp8bench.report.tidy import columns_of, rows
from fp8bench.report.wide import widened

Pair = tuple[Run, Mapping[str, Finding]]


def render(run: Run, findings: Mapping[str, Finding], wide: bool = False) -> str:
    """The whole table; numbers with all their digits, nothing for what is not known."""
    return render_all([(run, findings)], wide)


def render_all(pairs: Sequence[Pair], wide: bool = False) -> str:
    """The rows of several runs below each other: tidy ones, or one a case if they are to be wide."""
    tidy = [row for run, findings in pairs for row in rows(run, findings)]
    columns: tuple[str, ...] = _together([columns_of(run) for run, _ in pairs])
    if wide:
        columns, tidy = widened(tidy)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(tidy)
    return text.getvalue()


def _together(columns: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The columns of all; parameters stand in the middle, whichever run they are of."""
    if not columns:
        return ()
    shared = [name for name in columns[0] if not name.startswith("param_")]
    place = next((number for number, name in enumerate(columns[0]) if name.startswith("param_")), None)
    if place is None:
        place = shared.index("params") + 1
    names = dict.fromkeys(name for one in columns for name in one if name.startswith("param_"))
    return (*shared[:place], *names, *shared[place:])
