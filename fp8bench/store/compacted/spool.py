"""Rows on their way into Parquet files, in a database of their own on the disk, so that memory stays bounded."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8bench.errors import StoreError
from fp8bench.files import PARTIAL
from fp8bench.model import Status
from fp8bench.store.compacted.manifest import ARCHIVE, Manifest, Partition, points_of
from fp8bench.store.compacted.parquet import ID, READ, check_file, connected, first_line, need_duckdb
from fp8bench.store.compacted.rows import CHECK, NUMBERS, Batch
from fp8bench.store.index.figure_files import digest_of

_NAME = ".spool-"
_GROUP_ROWS = 16384
# A moment that a calendar has, in ms since 1970.
_LATEST = 253_402_300_799_000
_OF_FLAGS = {"value": 1, "low": 2, "high": 2}
_STATUSES = ", ".join(f"'{status.value}'" for status in Status)
# What else stands in a file, for other readers of it.
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
# Before any text is joined, which would be sorted with the numbers.
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
    """An open one. What goes wrong with its disk is a StoreError."""

    store: Path
    _connection: Any
    _errors: type[Exception]

    @classmethod
    @contextlib.contextmanager
    def opened(cls, store: Path) -> Iterator[Spool]:
        """One that goes when it is closed; what killed ones have left goes, too."""
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

    def add(self, batches: Sequence[Batch]) -> None:
        """Take rows in."""
        if not batches:
            return
        columns: dict[str, Any] = {
            name: np.concatenate([batch.columns[name] for batch in batches]) for name in (*NUMBERS, CHECK)
        }
        counts = np.concatenate([batch.counts for batch in batches])
        samples = np.empty(len(counts), object)
        flat, ends = np.concatenate([batch.samples for batch in batches]), np.cumsum(counts).tolist()
        samples[:] = [flat[low:high] for low, high in zip([0, *ends], ends, strict=False)]
        self._insert("rows", {**columns, "samples": samples})

    def keep(self, path: Path, places: Sequence[int]) -> None:
        """Take the rows of some places in from a file that counts."""
        self._run("CREATE OR REPLACE TABLE kept(place UINTEGER)")
        self._insert("kept", {"place": np.array(places, np.uint32)})
        self._run(
            f"INSERT INTO rows SELECT {READ}, {CHECK}, samples FROM read_parquet(?, hive_partitioning = false) "
            "SEMI JOIN kept USING (place)", [str(path)],
        )  # fmt: skip

    def write(self, path: Path, manifest: Manifest, places: Sequence[int]) -> Partition:
        """Make a file of the rows of some places, which takes the place of the one before once it reads as meant."""
        name = secrets.token_hex(8)
        partial = path.with_name(f".{name}{PARTIAL}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._say(manifest, places)
            self._run(_SORT)
            self._run(_COPY.format(path=str(partial).replace("'", "''"), id=name))
            sums = f"SELECT count(*), coalesce(sum({CHECK}), 0)::BIGINT FROM sorted"
            rows, total = self._run(sums).fetchone()
            if check_file(partial, self._connection) != (rows, total):
                raise StoreError(f"{path} does not read as it was written, and the one before stands. Run it again.")
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            digest, size = digest_of(partial), partial.stat().st_size
            partial.replace(path)
        except OSError as error:
            raise _full(self.store, error) from None
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        return Partition(size, name, rows, digest, total)

    def forget(self) -> None:
        """Let go what was taken in."""
        self._run("TRUNCATE rows")
        self._run("DROP TABLE IF EXISTS sorted")

    def _say(self, manifest: Manifest, places: Sequence[int]) -> None:
        """The texts of some places, for other readers of their rows."""
        said = [(number, manifest.said(number)) for number in places]
        self._texts("places", [
            (number, str(one["machine"]["machine"]), one["python"], one["commit"], _moment(one["date"]),
             _moment(one["began"]), one["newest"], manifest.places[number].runs) for number, one in said
        ])  # fmt: skip
        self._texts("lines", [(number, *line) for number, line in enumerate(manifest.lines.values)])
        for name in ("versions", "unders", "reasons"):
            self._texts(name, [
                (number, code, text if isinstance(text, str) else json.dumps(dict(text)))
                for number, one in said for code, text in enumerate(one[name])
            ])  # fmt: skip

    def _texts(self, table: str, rows: Sequence[Sequence[Any]]) -> None:
        self._run(f"CREATE OR REPLACE TABLE {table}({_TABLES[table]})")
        names = [column.split()[0] for column in _TABLES[table].split(", ")]
        columns = [[_clean(value) for value in column] for column in zip(*rows, strict=True)]
        if rows:
            self._insert(table, {name: _objects(column) for name, column in zip(names, columns, strict=True)})

    def _insert(self, table: str, columns: Mapping[str, Any]) -> None:
        import pandas as pd

        try:
            self._connection.register("frame", pd.DataFrame(dict(columns), copy=False))
            try:
                self._connection.execute(f"INSERT INTO {table} SELECT * FROM frame")
            finally:
                self._connection.unregister("frame")
        except self._errors as error:
            raise _full(self.store, error) from None

    def _run(self, query: str, values: Sequence[Any] = ()) -> Any:
        try:
            return self._connection.execute(query, list(values))
        except self._errors as error:
            raise _full(self.store, error) from None


def _sweep(store: Path) -> None:
    """Remove what compactions that were killed have left half done."""
    folders = points_of(store), store / ARCHIVE
    left = [*folders[0].glob(f"{_NAME}*"), *(path for one in folders for path in one.rglob(f".*{PARTIAL}"))]
    for path in left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def _full(store: Path, error: Exception) -> StoreError:
    why = error.strerror if isinstance(error, OSError) else first_line(error)
    folder = points_of(store)
    return StoreError(f"{folder} cannot be written ({why}). Make room, and run it again; the runs are untouched.")


def _objects(values: Sequence[Any]) -> Any:
    column = np.empty(len(values), object)
    column[:] = values
    return column


def _clean(value: Any) -> Any:
    """A text that UTF-8 has; whatever else stays."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _moment(milliseconds: Any) -> int | None:
    fits = isinstance(milliseconds, int | float) and 0 <= milliseconds <= _LATEST
    return int(milliseconds) if fits else None
