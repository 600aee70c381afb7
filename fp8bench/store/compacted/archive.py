"""A store's own files in Parquet files: the runs of each machine and month, and in one more what lies beside runs.

What reads of figures (reading.py) never touches them. A file is a few rows, each a piece of its bytes, so that neither
writing nor reading holds more than one file and one group of rows. Its digest is held against what was read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fp8bench.errors import StoreError
from fp8bench.files import PARTIAL
from fp8bench.store.compacted.manifest import ARCHIVE, Archive, Manifest, parquet_of
from fp8bench.store.compacted.parquet import connected, first_line, need_duckdb
from fp8bench.store.compacted.spool import insert, objects, scratch
from fp8bench.store.index.figure_files import digest_of
from fp8bench.store.runs.listing import all_files, machine_folder, safe_folder

# What commands ask of a store beside its runs. Left out is what is made again (figures, reports, prepared texts), what
# is of use on its machine alone (checkpoints of trainings, locks), and what nobody knows.
_BESIDE = (
    "acks.jsonl", "advice.jsonl", "environments.json", "asv/results/*.json", "asv/results/*/*.json",
    "ceilings/*.json", "ceilings/history.jsonl", "cells/*/attempts.jsonl", "cells/*/output.txt", "duels/*.jsonl",
    "plans/*.json", "sensitivity/*.json", "trainings/*/steps.jsonl",
)  # fmt: skip
_RUNS = ("runs/*/*.jsonl", "runs/machine=*/month=*/*.jsonl")
_MONTH = re.compile(r"(\d{4})(\d{2})\d{2}T")
_COLUMNS = {
    "path": "VARCHAR", "digest": "VARCHAR", "size": "UBIGINT", "changed_ns": "BIGINT", "piece": "UINTEGER",
    "content": "BLOB",
}  # fmt: skip
_PIECE = 4096
# DuckDB's smallest: 8 MiB of pieces.
_GROUP_ROWS = 2048
# So much is handed to DuckDB at once, which gets less memory than for rows: nothing is sorted.
_AT_ONCE = 8 << 20
_MEMORY = "128MB"
_FROM = "read_parquet(?, hive_partitioning = false, union_by_name = false)"


class Kept(NamedTuple):
    """A file of the store as it was: its name in it, a digest (SHA-256), its size and date."""

    path: str
    digest: str
    size: int
    changed_ns: int


class Stated(NamedTuple):
    """A file of the store with its size and date."""

    path: str
    size: int
    changed_ns: int


def stated(store: Path) -> dict[str, list[Stated]]:
    """The files that a store is made of, by the archives that they belong into, in the order of their names."""
    found: dict[str, list[Stated]] = {}
    beside = (path for pattern in _BESIDE for path in store.glob(pattern))
    for path in sorted({*all_files(store), *beside}):
        name = path.relative_to(store).as_posix()
        with contextlib.suppress(OSError):
            status = path.stat()
            if path.is_file():
                found.setdefault(_archive(name), []).append(Stated(name, status.st_size, status.st_mtime_ns))
    return found


def _archive(name: str) -> str:
    """The archive of a file."""
    path = PurePosixPath(name)
    if path.parts[0] != "runs":
        return f"{ARCHIVE}/beside"
    month = _MONTH.match(path.name)
    words = f"{month[1]}-{month[2]}" if month is not None else "unknown"
    return f"{ARCHIVE}/machine={safe_folder(machine_folder(Path(name)))}/month={words}"


def _belongs(name: str) -> bool:
    """Whether a name, which may be somebody else's, is that of a file of a store."""
    path = PurePosixPath(name)
    fits = (len(path.parts) == one.count("/") + 1 and path.match(one) for one in (*_RUNS, *_BESIDE))
    return ".." not in path.parts and "\0" not in name and any(fits)


def state_of(files: Iterable[Stated]) -> str:
    """A digest of names, sizes and dates."""
    return hashlib.sha256(repr([tuple(one) for one in files]).encode(errors="backslashreplace")).hexdigest()


def is_current(store: Path, manifest: Manifest) -> bool:
    """Whether what was compacted has the files that are there now."""
    now = {name: state_of(files) for name, files in stated(store).items()}
    return now == {name: one.state for name, one in manifest.archives.items()}


def is_whole(path: Path, size: int, digest: str) -> bool:
    """Whether a Parquet file is what was written, bit for bit. Raises OSError."""
    return path.is_file() and path.stat().st_size == size and digest_of(path) == digest


@dataclass
class Archived:
    """What was done: files that are kept, in archives that were written and left as they were; files that were `left`
    because they changed meanwhile or cannot be read; archives that had not been what was written."""

    files: int = 0
    written: list[str] = field(default_factory=list)
    kept: int = 0
    left: list[str] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)


def archive(store: Path, manifest: Manifest, result: Archived, save: Callable[[], None]) -> None:
    """Write the archives whose files have changed, and save the index after each, from when on it counts."""
    there = stated(store)
    for name in manifest.archives.keys() - there.keys():
        del manifest.archives[name]
        parquet_of(store, name).unlink(missing_ok=True)
    for name, files in there.items():
        old = manifest.archives.get(name)
        damaged = old is not None and not is_whole(parquet_of(store, name), old.size, old.digest)
        result.mended += [name] if damaged else []
        if old is None or damaged or old.state != state_of(files):
            manifest.archives[name], left = write_archive(store, name, files)
            result.written.append(name)
            result.left += left
            save()
    result.files = sum(one.files for one in manifest.archives.values())
    result.kept = len(manifest.archives) - len(result.written)


def write_archive(store: Path, name: str, files: Sequence[Stated]) -> tuple[Archive, list[str]]:
    """Make an archive of files, which takes the place of the one before once all of them were read back from it.

    Returns it, and the files that changed meanwhile or cannot be read, which are not in it. Raises StoreError.
    """
    path = parquet_of(store, name)
    partial = path.with_name(f".{secrets.token_hex(8)}{PARTIAL}")
    left: list[str] = []
    with scratch(store, _MEMORY) as connection:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection.execute("SET force_compression = 'uncompressed'")  # looking for a better one takes half the time
            columns = ", ".join(f"{column} {kind}" for column, kind in _COLUMNS.items())
            connection.execute(f"CREATE TABLE files({columns})")
            written = _take(store, files, connection, left)
            connection.execute(
                f"COPY (SELECT * FROM files) TO '{str(partial).replace(chr(39), 2 * chr(39))}' "
                f"(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {_GROUP_ROWS})"
            )
            if [one for one, _ in contents(partial, connection)] != written:
                raise StoreError(f"{path} does not read as it was written, and the one before stands. Run it again.")
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            digest, size = digest_of(partial), partial.stat().st_size
            partial.replace(path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    return Archive(size, digest, len(written), sum(one.size for one in written), "" if left else state_of(files)), left


def _take(store: Path, files: Sequence[Stated], connection: Any, left: list[str]) -> list[Kept]:
    """Put files into a table, piece by piece."""
    written: list[Kept] = []
    rows: list[tuple[Any, ...]] = []
    for one in files:
        content = _unchanged(store / one.path, one)
        if content is None:
            left.append(one.path)
            continue
        written.append(Kept(one.path, hashlib.sha256(content).hexdigest(), one.size, one.changed_ns))
        for number, begin in enumerate(range(0, max(1, len(content)), _PIECE)):
            rows.append((*written[-1], number, content[begin : begin + _PIECE]))
            if len(rows) * _PIECE >= _AT_ONCE:
                _insert(connection, rows)
    _insert(connection, rows)
    return written


def _unchanged(path: Path, one: Stated) -> bytes | None:
    try:
        content, status = path.read_bytes(), path.stat()
    except OSError:
        return None
    there = (len(content), status.st_size, status.st_mtime_ns)
    return content if there == (one.size, one.size, one.changed_ns) else None


def _insert(connection: Any, rows: list[tuple[Any, ...]]) -> None:
    if rows:
        columns = (objects(column) for column in zip(*rows, strict=True))
        insert(connection, "files", dict(zip(_COLUMNS, columns, strict=True)))
        rows.clear()


def kept_files(path: Path, connection: Any) -> list[Kept]:
    """The files of an archive, without their bytes. Raises StoreError."""
    query = f"SELECT path, digest, size, changed_ns FROM {_FROM} WHERE piece = 0"
    with _reading(path):
        found = [Kept(*row) for row in connection.execute(query, [str(path)]).fetchall()]
    for one in found:
        if not _belongs(one.path):
            raise StoreError(f"{path} has a file {one.path!r:.80}, which is none of a store. Get it once more.")
    return found


def contents(path: Path, connection: Any, wanted: Collection[str] | None = None) -> Iterator[tuple[Kept, bytes]]:
    """The wanted files of an archive, or all, each with its bytes, which are what was written. Raises StoreError."""
    where, names = ("", []) if wanted is None else ("WHERE list_contains(?, path)", [list(wanted)])
    with _reading(path):
        # In the order of the file, of which no more is read than is asked for.
        asked = connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM {_FROM} {where}", [str(path), *names])
        pieces: list[bytes] = []
        own: Kept | None = None
        while rows := asked.fetchmany(_GROUP_ROWS // 8):
            for *head, number, content in rows:
                if number == 0 and own is not None:
                    yield own, _checked(path, own, pieces)
                    pieces = []
                if own is None or number == 0:
                    own = Kept(*head)
                pieces.append(content)
        if own is not None:
            yield own, _checked(path, own, pieces)


def _checked(path: Path, one: Kept, pieces: Sequence[bytes]) -> bytes:
    content = b"".join(pieces)
    if len(content) != one.size or hashlib.sha256(content).hexdigest() != one.digest:
        raise StoreError(f"{path} does not have {one.path} as it was written: `fp8bench store compact` makes it again.")
    return content


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except need_duckdb().Error as error:
        raise StoreError(f"{path} cannot be read ({first_line(error)}).") from None


def open_archive() -> Any:
    """A connection to read with, that takes no more memory than a group of rows needs."""
    return connected(memory=_MEMORY)
