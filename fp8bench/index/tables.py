"""What a commit has come to in one place as a table: a row of numbers a figure, texts once, the cells apart.

Commits that measured the same cells have the same layout, which is read once for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8bench.course import Placed
from fp8bench.model import Cell, Conditions, Figure, Series, Status

ROW = np.dtype(
    [
        ("value", "<f8"), ("low", "<f8"), ("high", "<f8"), ("runs", "<u4"), ("samples", "<u4"), ("version", "<u2"),
        ("under", "<u2"), ("reason", "<u2"), ("flags", "u1"),
    ]
)  # fmt: skip
_VALUE, _INTERVAL, _HASTY = 1, 2, 4
_STATUSES = tuple(Status)
_STATUS_FACTOR = 8
_FAILED = _STATUSES.index(Status.FAILED)

Rows = NDArray[np.void]
Flags = NDArray[np.uint8]


@dataclass(frozen=True)
class Texts:
    """What the numbers in a row stand for, but for the figures themselves."""

    commit: str
    date: int | None
    versions: tuple[str, ...]
    unders: tuple[Conditions, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A place's figures: what is said of it, its layout as text, and a row for each cell of the layout."""

    said: dict[str, Any]
    layout: bytes
    rows: Rows


def table_of(place: Placed) -> Table:
    """A place as a table."""
    versions: dict[str, int] = {}
    unders: dict[Conditions, int] = {}
    reasons: dict[str, int] = {}
    rows = [
        (
            *(0.0 if one is None else one for one in (figure.value, figure.low, figure.high)),
            figure.runs, figure.samples, versions.setdefault(figure.version, len(versions)),
            unders.setdefault(figure.under, len(unders)), reasons.setdefault(figure.reason, len(reasons)),
            _flags(figure),
        )
        for _, _, figure in place.figures
    ]  # fmt: skip
    said = {
        "commit": place.commit, "date": place.date, "began": place.began, "newest": place.newest,
        "machine": dict(place.machine), "python": place.python, "versions": list(versions), "unders": list(unders),
        "reasons": list(reasons),
    }  # fmt: skip
    return Table(said, _layout(place), np.array(rows, dtype=ROW))


def _flags(figure: Figure) -> int:
    known = _VALUE * (figure.value is not None) + _INTERVAL * (figure.low is not None) + _HASTY * figure.hasty
    return known + _STATUS_FACTOR * _STATUSES.index(figure.status)


def _layout(place: Placed) -> bytes:
    series = [
        [one.name, one.workload, one.metric, one.unit, one.param_names, one.params, one.version] for one in place.series
    ]
    return json.dumps([series, [[rank, cell] for rank, cell, _ in place.figures]], separators=(",", ":")).encode()


def read_layout(text: bytes) -> tuple[tuple[Series, ...], tuple[tuple[int, Cell], ...]]:
    """Series, and the cell that each row is of with the place of its series among them."""
    series, cells = json.loads(text)
    return (
        tuple(
            Series(name, workload, metric, unit, tuple(names), tuple(map(tuple, params)), version)
            for name, workload, metric, unit, names, params, version in series
        ),
        tuple((rank, tuple(cell)) for rank, cell in cells),
    )


def read_texts(said: dict[str, Any]) -> Texts:
    """The texts of a table's rows."""
    unders = tuple(tuple((name, value) for name, value in under) for under in said["unders"])
    return Texts(said["commit"], said["date"], tuple(said["versions"]), unders, tuple(said["reasons"]))


def figures_of(rows: Rows, texts: Sequence[Texts]) -> tuple[Figure, ...]:
    """The figures that rows stand for; each has texts of its own."""
    return tuple(map(_figure, rows.tolist(), texts))


def _figure(row: Sequence[Any], texts: Texts) -> Figure:
    value, low, high, runs, samples, version, under, reason, flags = row
    known = flags & _INTERVAL
    return Figure(
        texts.commit, texts.date, texts.versions[version], runs, samples, value if flags & _VALUE else None,
        low if known else None, high if known else None, bool(flags & _HASTY), _STATUSES[flags // _STATUS_FACTOR],
        texts.reasons[reason], texts.unders[under],
    )  # fmt: skip


def has_number(flags: Flags) -> NDArray[np.bool_]:
    """Which rows have a value."""
    found: NDArray[np.bool_] = (flags & _VALUE) != 0
    return found


def is_whole(flags: Flags) -> NDArray[np.bool_]:
    """Which rows have a value that is not a hasty one's."""
    found: NDArray[np.bool_] = has_number(flags) & ((flags & _HASTY) == 0)
    return found


def tells(flags: Flags) -> NDArray[np.bool_]:
    """Which rows have a value, or are of a case that failed."""
    found: NDArray[np.bool_] = has_number(flags) | (flags // _STATUS_FACTOR == _FAILED)
    return found
