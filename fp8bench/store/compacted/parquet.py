"""Parquet files of one machine and month each, written and read by DuckDB, and checked bit by bit.

Column names are stated here, never taken from the files. An id in the footer tells writings of a file apart. Rows pass
through a database on the disk, so that memory stays bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8bench.errors import StoreError, UsageError
from fp8bench.files import PARTIAL, replacing
from fp8bench.model import Status
from fp8bench.store.compacted.manifest import ARCHIVE, MAKE_ROOM, LineKey, Partition, points_of
from fp8bench.store.index.figure_files import digest_of
from fp8bench.store.index.tables import ROW, Rows

Columns = Mapping[str, NDArray[Any]]
# The columns of numbers with DuckDB's types; these fields of a row have other names as columns.
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


class RowBatch(NamedTuple):
    """Rows with their samples, end to end, and how many samples each has."""

    columns: dict[str, NDArray[Any]]
    samples: NDArray[np.float64]
    counts: NDArray[np.int64]


def batch_of(place: int, lines: Sequence[int], rows: Rows, samples: Sequence[Sequence[float]]) -> RowBatch:
    counts = np.array([len(sample) for sample in samples], np.int64)
    flat = _one_nan(np.array([value for sample in samples for value in sample], np.float64))
    columns: dict[str, NDArray[Any]] = {
        "line": np.array(lines, np.uint32), "place": np.full(len(rows), place, np.uint32),
        **{column: _one_nan(np.ascontiguousarray(rows[name])) for column, name in _OF_ROW.items()},
        "samples_crc": crcs(flat, counts),
    }  # fmt: skip
    return RowBatch({**columns, CHECK: checks(columns)}, flat, counts)


def _one_nan(values: NDArray[Any]) -> NDArray[Any]:
    """Gives all NaN the same bits, which checksums are made of."""
    return np.where(np.isnan(values), np.nan, values) if values.dtype.kind == "f" else values


def crcs(samples: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.uint32]:
    raw = memoryview(np.ascontiguousarray(samples, "<f8").tobytes())
    ends = (8 * np.cumsum(counts)).tolist()
    begins = [0, *ends[:-1]]
    return np.array([zlib.crc32(raw[low:high]) for low, high in zip(begins, ends, strict=False)], np.uint32)


def checks(columns: Columns) -> NDArray[np.uint32]:
    """Returns a checksum of all numbers of each row, its line and place among them."""
    sums = np.zeros(len(columns["line"]), np.uint64)
    for name, kind in NUMBERS.items():
        column = np.ascontiguousarray(columns[name])
        sums ^= column.view(np.uint64) if kind == "DOUBLE" else column.astype(np.uint64)
        sums *= _FACTOR
        sums ^= sums >> _HALF
    return sums.astype(np.uint32)


ID = "fp8bench_id"
_MEMORY = "192MB"
_FROM = "read_parquet(?, hive_partitioning = false, union_by_name = false)"
# Values that are missing are NULL for other readers, and 0 here.
READ = ", ".join(f"coalesce({name}, 0) AS {name}" if kind == "DOUBLE" else name for name, kind in NUMBERS.items())
CHUNK_ROWS = 200_000  # that are read at a time, with their samples
_AGAIN = "`fp8bench store compact` makes it again; until then delete it"


def need_duckdb() -> Any:
    """Imports DuckDB. Raises UsageError where it is not installed."""
    try:
        import duckdb
    except ImportError:
        raise UsageError("Parquet files need DuckDB, which is not installed: pip install 'fp8bench[fleet]'.") from None
    return duckdb


def connected(database: str, spill: str) -> Any:
    """Opens a connection without network access, in limited memory, that reads footers once. Raises duckdb.Error."""
    settings = {
        "autoinstall_known_extensions": False, "autoload_known_extensions": False, "memory_limit": _MEMORY,
        "temp_directory": spill, "threads": 1,  # with more, what does not fit into memory loses its order
    }  # fmt: skip
    connection = need_duckdb().connect(database, config=settings)
    connection.execute("SET enable_progress_bar = false")  # it goes to stdout
    connection.execute("SET parquet_metadata_cache = true")
    return connection


@contextlib.contextmanager
def _reading(path: Path, connection: Any) -> Iterator[Any]:
    """Yields a function that asks for columns of a file. DuckDB's errors become StoreErrors."""
    duckdb = need_duckdb()
    try:
        yield lambda what, where="": connection.execute(f"SELECT {what} FROM {_FROM} {where}", [[str(path)]])
    except duckdb.Error as error:
        raise StoreError(f"{path} cannot be read ({first_line(error)}). {_AGAIN}.") from None


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:300]


def check_file(path: Path, connection: Any) -> tuple[int, int]:
    """Reads and checks every number and sample; returns how many rows there are, and the sum of their checks.

    Raises StoreError.
    """
    rows = total = 0
    with _reading(path, connection) as ask:
        counts = ask("line, count(*)", "GROUP BY line ORDER BY line").fetchall()
        for low, high in _ranges(counts):
            where = f"WHERE line BETWEEN {low} AND {high}"
            columns = ask(f"{READ}, {CHECK}, len(samples) AS many", where).fetchnumpy()
            samples = ask("unnest(samples) AS one", where).fetchnumpy()["one"]
            keys = columns["line"].astype(np.int64) << 32 | columns["place"]
            sorted_once = bool((np.diff(keys) > 0).all())
            are_sound = bool((checks(columns) == columns[CHECK]).all())
            many = columns["many"]
            complete = int(many.sum()) == len(samples) and not np.ma.is_masked(samples)
            complete = complete and bool((crcs(np.asarray(samples), many) == columns["samples_crc"]).all())
            if not sorted_once or not are_sound or not complete:
                raise StoreError(f"{path} does not hold what was written into it. {_AGAIN}.")
            rows += len(columns["line"])
            total += int(columns[CHECK].sum(dtype=np.int64))
    return rows, total


def _ranges(counts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields ranges of lines with not many more rows than are read at a time."""
    first, rows = None, 0
    for line, count in counts:
        first = line if first is None else first
        rows += count
        if rows >= CHUNK_ROWS:
            yield first, line
            first, rows = None, 0
    if first is not None:
        yield first, counts[-1][0]


# The number of a place, its texts, and the ids of its runs.
PlaceTexts = tuple[int, dict[str, Any], list[str]]
_NAME = ".spool-"
_GROUP_ROWS = 16384
_LATEST = 253_402_300_799_000  # the last ms of the year 9999
_OF_FLAGS = {"value": 1, "low": 2, "high": 2}
_STATUSES = ", ".join(f"'{status.value}'" for status in Status)
# Columns of texts, which are for other readers of the file.
_TEXTS = {
    "series": "l.series", "cell": "l.cell", "workload": "l.workload", "metric": "l.metric", "unit": "l.unit",
    "machine_name": "p.machine", "interpreter": "p.python", "commit": "p.commit",
    "commit_date": "make_timestamp(1000 * p.date)", "first_run_began": "make_timestamp(1000 * p.began)",
    "newest_run_began": "p.newest", "run_ids": "p.runs", "version": "v.text", "conditions": "u.text",
    "reason": "w.text", "status": f"[{_STATUSES}][1 + r.flags // 8]", "hasty": "(r.flags & 4) = 4",
}  # fmt: skip
_TABLES = {
    "places": "place UINTEGER, machine VARCHAR, python VARCHAR, commit VARCHAR, date BIGINT, began BIGINT, "
    "newest VARCHAR, runs VARCHAR[]",
    "lines": "line UINTEGER, series VARCHAR, cell VARCHAR, workload VARCHAR, metric VARCHAR, unit VARCHAR",
    **dict.fromkeys(("versions", "unders", "reasons"), "place UINTEGER, code USMALLINT, text VARCHAR"),
}
_WRITTEN = ", ".join(
    f"CASE WHEN (r.flags & {_OF_FLAGS[name]}) > 0 THEN r.{name} END AS {name}" if name in _OF_FLAGS else f"r.{name}"
    for name in NUMBERS
)
# DuckDB takes NaN in a frame for NULL, which no number of a row is.
_NAN = "coalesce({}, 'nan'::DOUBLE)"
_AS_NUMBERS = ", ".join([
    *(_NAN.format(name) if kind == "DOUBLE" else name for name, kind in NUMBERS.items()), CHECK,
    f"[{_NAN.format('one')} for one in samples]",
])  # fmt: skip
# Numbers are sorted before the texts are joined to them.
_SORT = """
CREATE OR REPLACE TABLE sorted AS SELECT * FROM rows SEMI JOIN places USING (place) ORDER BY line, place
"""
_COPY = f"""
COPY (
    SELECT {_WRITTEN}, r.{CHECK}, r.samples, {", ".join(f"{source} AS {name}" for name, source in _TEXTS.items())}
    FROM sorted r JOIN places p USING (place) JOIN lines l USING (line)
        JOIN versions v ON v.place = r.place AND v.code = r.version_code
        JOIN unders u ON u.place = r.place AND u.code = r.conditions_code
        JOIN reasons w ON w.place = r.place AND w.code = r.reason_code
) TO '{{path}}' (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {_GROUP_ROWS}, KV_METADATA {{{{{ID}: '{{id}}'}}}})
"""


@dataclass
class Spool:
    """An open database of rows. Faults of its disk become StoreErrors."""

    store: Path
    _connection: Any
    _errors: type[Exception]

    @classmethod
    @contextlib.contextmanager
    def opened(cls, store: Path) -> Iterator[Spool]:
        """Opens a new one, which is deleted at the end, and deletes what killed ones have left."""
        duckdb = need_duckdb()
        _sweep(store)
        folder = points_of(store) / f"{_NAME}{secrets.token_hex(4)}"
        numbers = ", ".join(f"{name} {kind}" for name, kind in NUMBERS.items())
        try:
            folder.mkdir(parents=True)
            with connected(str(folder / "rows"), str(folder / "spill")) as connection:
                # Joins keep their left side's order, which DuckDB would swap where there are fewer rows than texts.
                connection.execute("SET disabled_optimizers = 'join_order,build_side_probe_side'")
                spool = cls(store, connection, duckdb.Error)
                spool._run(f"CREATE TABLE rows({numbers}, {CHECK} UINTEGER, samples DOUBLE[])")
                yield spool
        except (OSError, duckdb.Error) as error:
            raise _full(store, error) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, batches: Sequence[RowBatch]) -> None:
        if not batches:
            return
        columns: dict[str, Any] = {
            name: np.concatenate([batch.columns[name] for batch in batches]) for name in (*NUMBERS, CHECK)
        }
        counts = np.concatenate([batch.counts for batch in batches])
        samples = np.empty(len(counts), object)
        flat, ends = np.concatenate([batch.samples for batch in batches]), np.cumsum(counts).tolist()
        samples[:] = [flat[low:high] for low, high in zip([0, *ends], ends, strict=False)]
        self._insert("rows", {**columns, "samples": samples}, _AS_NUMBERS)

    def keep(self, path: Path, places: Sequence[int]) -> None:
        self._run("CREATE OR REPLACE TABLE kept(place UINTEGER)")
        self._insert("kept", {"place": np.array(places, np.uint32)})
        self._run(
            f"INSERT INTO rows SELECT {READ}, {CHECK}, samples FROM read_parquet(?, hive_partitioning = false) "
            "SEMI JOIN kept USING (place)", [str(path)],
        )  # fmt: skip

    def write(self, path: Path, lines: Sequence[LineKey], said: Sequence[PlaceTexts]) -> Partition:
        """Replaces a file by the rows of some places, once it was read back and checked."""
        name = secrets.token_hex(8)
        try:
            with replacing(path) as partial:
                self._write_texts(lines, said)
                self._run(_SORT)
                self._run(_COPY.format(path=str(partial).replace("'", "''"), id=name))
                sums = f"SELECT count(*), coalesce(sum({CHECK}), 0)::BIGINT FROM sorted"
                rows, total = self._run(sums).fetchone()
                if check_file(partial, self._connection) != (rows, total):
                    why = "does not read as it was written, and the one before stands. Run it again."
                    raise StoreError(f"{path} {why}")
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
                return Partition(partial.stat().st_size, name, rows, digest_of(partial), total)
        except OSError as error:
            raise _full(self.store, error) from None

    def forget(self) -> None:
        self._run("TRUNCATE rows")
        self._run("DROP TABLE IF EXISTS sorted")

    def _write_texts(self, lines: Sequence[LineKey], said: Sequence[PlaceTexts]) -> None:
        """Fills the tables of texts, which are for other readers of the file."""
        self._texts("places", [
            (number, str(words["machine"]["machine"]), words["python"], words["commit"], _moment(words["date"]),
             _moment(words["began"]), words["newest"], runs) for number, words, runs in said
        ])  # fmt: skip
        self._texts("lines", [(number, *line) for number, line in enumerate(lines)])
        for name in ("versions", "unders", "reasons"):
            self._texts(name, [
                (number, code, text if isinstance(text, str) else json.dumps(dict(text)))
                for number, words, _ in said for code, text in enumerate(words[name])
            ])  # fmt: skip

    def _texts(self, table: str, rows: Sequence[Sequence[Any]]) -> None:
        self._run(f"CREATE OR REPLACE TABLE {table}({_TABLES[table]})")
        names = [column.split()[0] for column in _TABLES[table].split(", ")]
        if rows:
            columns = map(_encodable, zip(*rows, strict=True))
            self._insert(table, dict(zip(names, columns, strict=True)))

    def _insert(self, table: str, columns: Mapping[str, Any], chosen: str = "*") -> None:
        import pandas as pd

        try:
            self._connection.register("frame", pd.DataFrame(dict(columns), copy=False))
            try:
                self._connection.execute(f"INSERT INTO {table} SELECT {chosen} FROM frame")
            finally:
                self._connection.unregister("frame")
        except self._errors as error:
            raise _full(self.store, error) from None

    def _run(self, query: str, values: Sequence[Any] = ()) -> Any:
        try:
            return self._connection.execute(query, list(values))
        except self._errors as error:
            raise _full(self.store, error) from None


def leftovers(store: Path) -> list[Path]:
    """Returns the unfinished files of compactions that were killed, or of one that is at work."""
    folders = points_of(store), store / ARCHIVE
    left = {*folders[0].glob(f"{_NAME}*"), *(path for folder in folders for path in folder.rglob(f".*{PARTIAL}"))}
    return sorted(path for path in left if not path.parent.name.startswith(_NAME))


def _sweep(store: Path) -> None:
    for path in leftovers(store):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def _full(store: Path, error: Exception) -> StoreError:
    why = error.strerror if isinstance(error, OSError) else first_line(error)
    folder = points_of(store)
    return StoreError(f"{folder} cannot be written ({why}). {MAKE_ROOM}")


def _encodable(values: Sequence[Any]) -> Any:
    """Replaces what UTF-8 cannot encode."""
    column = np.empty(len(values), object)
    column[:] = [value.encode("utf-8", "replace").decode() if isinstance(value, str) else value for value in values]
    return column


def _moment(milliseconds: Any) -> int | None:
    fits = isinstance(milliseconds, int | float) and 0 <= milliseconds <= _LATEST
    return int(milliseconds) if fits else None
