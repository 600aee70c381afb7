"""Caches figures in `<store>/figures.sqlite`, a table of values by kind and name.

All figures are computed from the runs. So the cache may be deleted at any time, and a damaged cache is deleted and
rebuilt from the runs. If the cache cannot be read or written, commands read the runs.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from fp8bench.model.codec import SCHEMA

# Increase this version when the same runs give different figures or different cached values.
VERSION = 3
_FILE_VERSION = 1000 * VERSION + SCHEMA
_LOCK_SECONDS = 20.0
_CREATE_TABLE_STATEMENT = (
    "CREATE TABLE IF NOT EXISTS kept (kind, name, value, checksum, PRIMARY KEY (kind, name)) WITHOUT ROWID"
)


# Only these errors mean that the file is damaged. All other errors of sqlite (locked, full, read-only) are temporary,
# so the file is kept.
_DAMAGED_FILE_ERROR_CODES = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class _UnusableCache(Exception):
    """The cache cannot be used, because it has a different version or a changed value."""


def get_figure_cache_path(store: Path) -> Path:
    return store / "figures.sqlite"


def read_cached_values(store: Path, kind: str) -> dict[str, bytes]:
    """Returns the cached values of a kind, by name. Returns {} if the cache cannot be read, and deletes a damaged or
    outdated cache.
    """
    path = get_figure_cache_path(store)
    if not path.is_file():
        return {}
    try:
        with _open_cache(path) as (connection, is_new):
            if is_new:
                return {}
            rows = connection.execute("SELECT name, value, checksum FROM kept WHERE kind = ?", (kind,)).fetchall()
        for name, value, checksum in rows:
            if checksum != _checksum(name, value):
                raise _UnusableCache
        return {name: value for name, value, _ in rows}
    except (sqlite3.Error, _UnusableCache, TypeError, AttributeError, UnicodeError) as error:
        _delete_damaged_cache(store, error)
        return {}


Key = tuple[str, str]  # the kind and the name of a cached value


def write_values(store: Path, values: Mapping[Key, bytes]) -> str:
    """Adds values to the cache. Returns why they could not be written, or '' if they were."""
    rows = [(*key, value, _checksum(key[1], value)) for key, value in values.items()]
    try:
        with _open_cache(get_figure_cache_path(store)) as (connection, _):
            # Without syncing, a power failure may damage the cache. Then it is rebuilt.
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_CREATE_TABLE_STATEMENT)
            connection.execute(f"PRAGMA user_version = {_FILE_VERSION}")
            connection.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?)", rows)
            connection.execute("COMMIT")
    except (sqlite3.Error, _UnusableCache) as error:
        _delete_damaged_cache(store, error)
        return str(error)
    return ""


def _delete_damaged_cache(store: Path, error: Exception) -> None:
    # An error that does not come from sqlite has no code, and means that the cache is useless.
    sqlite_error_code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    # The low byte of an extended error code is the primary code.
    if sqlite_error_code & 0xFF in _DAMAGED_FILE_ERROR_CODES:
        delete_cache(store)


def delete_cache(store: Path) -> None:
    # Delete the journal too: sqlite would apply the journal of the deleted file to the next one.
    for suffix in ("", "-journal"):
        with contextlib.suppress(OSError):
            get_figure_cache_path(store).with_name(f"{get_figure_cache_path(store).name}{suffix}").unlink()


@contextlib.contextmanager
def _open_cache(path: Path) -> Iterator[tuple[sqlite3.Connection, bool]]:
    """Yields a connection to the cache, and whether the cache is new and has no table yet. Raises sqlite3.Error and
    _UnusableCache.
    """
    # isolation_level=None: transactions begin and end only by explicit statements.
    with contextlib.closing(sqlite3.connect(path, _LOCK_SECONDS, isolation_level=None)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, _FILE_VERSION):
            raise _UnusableCache("it has a different version")
        # sqlite gives a new file the version 0.
        yield connection, version == 0


def _checksum(name: str, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(name.encode()))
