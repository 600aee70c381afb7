"""The cache of figures: `<store>/figures.sqlite`, a table of values by kind and name.

The runs are the truth. A damaged cache is thrown away and written again from the runs; it may be deleted at any time.
If it cannot be read or written, commands read the runs.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from fp8bench.model.codec import SCHEMA

# Increase it when the same runs give other figures, or other values here.
VERSION = 2
_VERSION = 1000 * VERSION + SCHEMA
_LOCK_SECONDS = 20.0
_TABLE = "CREATE TABLE IF NOT EXISTS kept (kind, name, value, checksum, PRIMARY KEY (kind, name)) WITHOUT ROWID"


# All other errors of sqlite (locked, full, read-only) are temporary, and the file is left alone.
_DAMAGED = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class _Unfit(Exception):
    """The file has a different version, or a value has changed."""


def cache_of(store: Path) -> Path:
    return store / "figures.sqlite"


def read_values(store: Path, kind: str) -> dict[str, bytes]:
    """Returns the values of a kind by name; none if the cache cannot be read. Deletes an unfit cache."""
    path = cache_of(store)
    if not path.is_file():
        return {}
    try:
        with _open(path) as (connection, is_new):
            if is_new:
                return {}
            rows = connection.execute("SELECT name, value, checksum FROM kept WHERE kind = ?", (kind,)).fetchall()
        for name, value, checksum in rows:
            if checksum != _checksum(name, value):
                raise _Unfit
        return {name: value for name, value, _ in rows}
    except (sqlite3.Error, _Unfit, TypeError, AttributeError, UnicodeError) as error:
        _delete_unless_busy(store, error)
        return {}


Key = tuple[str, str]  # kind and name


def write_values(store: Path, values: Mapping[Key, bytes]) -> str:
    """Adds values. Returns why they could not be written; '' if they were."""
    rows = [(*key, value, _checksum(key[1], value)) for key, value in values.items()]
    try:
        with _open(cache_of(store)) as (connection, _):
            connection.execute("PRAGMA synchronous = OFF")  # after a loss of power it is made again
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_TABLE)
            connection.execute(f"PRAGMA user_version = {_VERSION}")
            connection.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?)", rows)
            connection.execute("COMMIT")
    except (sqlite3.Error, _Unfit) as error:
        _delete_unless_busy(store, error)
        return str(error)
    return ""


def _delete_unless_busy(store: Path, error: Exception) -> None:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    if code & 0xFF in _DAMAGED:
        delete_cache(store)


def delete_cache(store: Path) -> None:
    for suffix in ("", "-journal"):
        with contextlib.suppress(OSError):
            cache_of(store).with_name(f"{cache_of(store).name}{suffix}").unlink()


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[sqlite3.Connection, bool]]:
    """Yields a connection, and whether the file has no table yet. Raises sqlite3.Error and _Unfit."""
    with contextlib.closing(sqlite3.connect(path, _LOCK_SECONDS, isolation_level=None)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise _Unfit("it has another version")
        yield connection, version == 0


def _checksum(name: str, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(name.encode()))
