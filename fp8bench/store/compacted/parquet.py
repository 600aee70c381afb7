"""Parquet files of one machine and month each, read by DuckDB column by column, and checked bit by bit.

Their columns are named here and never guessed from the files. A footer has an id, so that one writing of a file can be
told from another.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp8bench.errors import StoreError, UsageError
from fp8bench.store.compacted.manifest import Partition
from fp8bench.store.compacted.rows import CHECK, NUMBERS, Columns, are_sound, crcs

ID = "fp8bench_id"
_FOOTER_END = 8
_MEMORY = "192MB"
_FROM = "read_parquet(?, hive_partitioning = false, union_by_name = false)"
# What stands as NULL for other readers.
READ = ", ".join(f"coalesce({name}, 0) AS {name}" if kind == "DOUBLE" else name for name, kind in NUMBERS.items())
# So many rows are read at a time, with their samples.
CHUNK_ROWS = 200_000
_AGAIN = "`fp8bench store compact` makes it again; until then delete it, and the runs are read instead"


def duckdb_here() -> Any:
    """DuckDB; None where it is not installed."""
    try:
        import duckdb
    except ImportError:
        return None
    return duckdb


def need_duckdb() -> Any:
    """DuckDB. Raises UsageError where it is not installed."""
    duckdb = duckdb_here()
    if duckdb is None:
        raise UsageError("Parquet files need DuckDB, which is not installed: pip install 'fp8bench[fleet]'.")
    return duckdb


def connected(database: str = ":memory:", spill: str = "") -> Any:
    """A connection that asks for no network, takes no more memory than it needs, and reads the footers of files once.

    Raises duckdb.Error.
    """
    settings = {
        "autoinstall_known_extensions": False, "autoload_known_extensions": False, "memory_limit": _MEMORY,
        "temp_directory": spill, "threads": 1,  # with more, what does not fit into memory loses its order
    }  # fmt: skip
    connection = need_duckdb().connect(database, config=settings)
    connection.execute("SET enable_progress_bar = false")  # it goes to stdout
    connection.execute("SET parquet_metadata_cache = true")
    return connection


@contextlib.contextmanager
def _reading(paths: Sequence[Path], connection: Any) -> Iterator[Any]:
    """How to ask for columns of files. DuckDB's errors become StoreErrors."""
    duckdb = need_duckdb()
    names = [[str(path) for path in paths]]
    try:
        yield lambda what, where="": connection.execute(f"SELECT {what} FROM {_FROM} {where}", names)
    except duckdb.Error as error:
        raise StoreError(f"{_named(paths)} cannot be read ({first_line(error)}). {_AGAIN}.") from None


def first_line(error: Exception) -> str:
    """What DuckDB says, in one line."""
    return str(error).strip().split("\n", 1)[0][:300]


def _named(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"one of {len(paths)} files like {paths[0]}"


def read_columns(paths: Sequence[Path], lines: Sequence[int] | None, connection: Any) -> Columns:
    """The numbers of all rows of some lines, or of all, in the order of files and rows. Raises StoreError."""
    where = "" if lines is None else f"WHERE line IN ({', '.join(map(str, lines))})"
    with _reading(paths, connection) as ask:
        columns: Columns = ask(f"{READ}, {CHECK}", where).fetchnumpy()
    if not are_sound(columns):
        raise StoreError(f"{_named(paths)} does not hold what was written into it. {_AGAIN}.")
    return columns


def check_file(path: Path, connection: Any) -> tuple[int, int]:
    """How many rows a file has, and the sum of their checks, once every number and sample was read and is sound.

    Raises StoreError.
    """
    rows = total = 0
    with _reading([path], connection) as ask:
        counts = ask("line, count(*)", "GROUP BY line ORDER BY line").fetchall()
        for low, high in _ranges(counts):
            where = f"WHERE line BETWEEN {low} AND {high}"
            columns = ask(f"{READ}, {CHECK}, len(samples) AS many", where).fetchnumpy()
            samples = ask("unnest(samples) AS one", where).fetchnumpy()["one"]
            keys = columns["line"].astype(np.int64) << 32 | columns["place"]
            sorted_once = bool((np.diff(keys) > 0).all())
            if not sorted_once or not are_sound(columns) or not _has_samples(columns, samples):
                raise StoreError(f"{path} does not hold what was written into it. {_AGAIN}.")
            rows += len(columns["line"])
            total += int(columns[CHECK].sum(dtype=np.int64))
    return rows, total


def _has_samples(columns: Columns, samples: Any) -> bool:
    many = columns["many"]
    found = int(many.sum()) == len(samples) and not np.ma.is_masked(samples)
    return found and bool((crcs(np.asarray(samples), many) == columns["samples_crc"]).all())


def _ranges(counts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges of lines with not many more rows than are read at a time."""
    first, rows = None, 0
    for line, count in counts:
        first = line if first is None else first
        rows += count
        if rows >= CHUNK_ROWS:
            yield first, line
            first, rows = None, 0
    if first is not None:
        yield first, counts[-1][0]


def counts_as(path: Path, partition: Partition) -> bool:
    """Whether a file is the writing that is meant, by its size and its footer."""
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != partition.size:
                return False
            file.seek(-_FOOTER_END, os.SEEK_END)
            length = int.from_bytes(file.read(4), "little")
            if length > partition.size - _FOOTER_END:
                return False
            file.seek(-_FOOTER_END - length, os.SEEK_END)
            return f"{ID}\x18".encode() in (footer := file.read(length)) and partition.id.encode() in footer
    except OSError:
        return False
