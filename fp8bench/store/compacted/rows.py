"""Rows as they stand in Parquet files: a table's row with the numbers of its line and place, and checks of its bits."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8bench.store.index.tables import ROW, Rows

Columns = Mapping[str, NDArray[Any]]
# The numbers of a row, by the names that columns have, with DuckDB's types; the row's own fields keep their names but
# for these.
_RENAMED = {"samples": "sample_count", "version": "version_code", "under": "conditions_code", "reason": "reason_code"}
_TYPES = {"<f8": "DOUBLE", "<u4": "UINTEGER", "<u2": "USMALLINT", "|u1": "UTINYINT"}
_OF_ROW = {_RENAMED.get(name, name): name for name in ROW.names or ()}
NUMBERS: dict[str, str] = {
    "line": "UINTEGER", "place": "UINTEGER",
    **{column: _TYPES[ROW[name].str] for column, name in _OF_ROW.items()}, "samples_crc": "UINTEGER",
}  # fmt: skip
CHECK = "row_check"
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


class Batch(NamedTuple):
    """Rows with the samples behind each of them, end to end, and how many each has."""

    columns: dict[str, NDArray[Any]]
    samples: NDArray[np.float64]
    counts: NDArray[np.int64]


def batch_of(place: int, lines: Sequence[int], rows: Rows, samples: Sequence[Sequence[float]]) -> Batch:
    """A table's rows, with the numbers of their lines."""
    counts = np.array([len(one) for one in samples], np.int64)
    flat = np.array([value for one in samples for value in one], np.float64)
    columns: dict[str, NDArray[Any]] = {
        "line": np.array(lines, np.uint32), "place": np.full(len(rows), place, np.uint32),
        **{column: np.ascontiguousarray(rows[name]) for column, name in _OF_ROW.items()},
        "samples_crc": crcs(flat, counts),
    }  # fmt: skip
    return Batch({**columns, CHECK: checks(columns)}, flat, counts)


def crcs(samples: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.uint32]:
    """A check of the samples of each row."""
    raw = memoryview(np.ascontiguousarray(samples, "<f8").tobytes())
    ends = (8 * np.cumsum(counts)).tolist()
    begins = [0, *ends[:-1]]
    return np.array([zlib.crc32(raw[low:high]) for low, high in zip(begins, ends, strict=False)], np.uint32)


def checks(columns: Columns) -> NDArray[np.uint32]:
    """A check of all numbers of each row, bit by bit, the line and the place among them."""
    found = np.zeros(len(columns["line"]), np.uint64)
    for name, kind in NUMBERS.items():
        column = np.ascontiguousarray(columns[name])
        found ^= column.view(np.uint64) if kind == "DOUBLE" else column.astype(np.uint64)
        found *= _FACTOR
        found ^= found >> _HALF
    return found.astype(np.uint32)


def are_sound(columns: Columns) -> bool:
    """Whether every row is as it was written."""
    return bool((checks(columns) == columns[CHECK]).all())


def rows_of(columns: Columns) -> Rows:
    """The rows as tables have them."""
    found = np.empty(len(columns["line"]), ROW)
    for column, name in _OF_ROW.items():
        found[name] = columns[column]
    return found
