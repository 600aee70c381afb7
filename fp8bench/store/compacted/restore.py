"""The files of a store put back from what was compacted of it, each with the bytes and the date that it had.

A file that is here stays, unless it is what was fetched before and the other store has another one by now.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fp8bench.errors import StoreError
from fp8bench.files import compact, locked, sealed, unsealed, write_whole
from fp8bench.store.compacted.archive import Kept, contents, is_whole, kept_files, open_archive
from fp8bench.store.compacted.manifest import Manifest, Unreadable, load_manifest, parquet_of, points_of
from fp8bench.store.runs.listing import index_of

_LOCK_SECONDS = 5.0


@dataclass
class Restored:
    """How many files were written, were here already, and were removed; `own` are files here that differ, which stay,
    `damaged` sentences on Parquet files that did not serve."""

    written: int = 0
    there: int = 0
    removed: int = 0
    own: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


class Fetched(NamedTuple):
    """Where a store was fetched from, and the digest of each file that came from there."""

    address: str = ""
    files: Mapping[str, str] = {}


def restore(store: Path) -> Restored:
    """Write the files that were compacted and are not here any more. Raises StoreError where nothing was compacted."""
    try:
        manifest = load_manifest(store)
    except (OSError, Unreadable) as error:
        absent = isinstance(error, FileNotFoundError)
        why = f"nothing was compacted of {store}" if absent else f"{index_of(store)} does not serve: {error}"
        raise StoreError(f"{why}. There is nothing to write its files from.") from None
    with locked(points_of(store), _LOCK_SECONDS):
        return _put_back(store, manifest, {})[0]


def update(store: Path, manifest: Manifest, before: Fetched) -> Restored:
    """Make the files of a store those of an index that was fetched, and note which they are."""
    result, known = _put_back(store, manifest, before.files)
    if not result.damaged:
        result.removed = _remove_gone(store, before.files, known)
        save_fetched(store, Fetched(before.address, known))
    return result


def _put_back(store: Path, manifest: Manifest, before: Mapping[str, str]) -> tuple[Restored, dict[str, str]]:
    """Write what is not here, or is as it was fetched `before`; returns that, and the digests of all files.

    A damaged archive is named, and none of its files written.
    """
    result, known = Restored(), dict[str, str]()
    connection = open_archive()
    for name, one in manifest.archives.items():
        path = parquet_of(store, name)
        try:
            if not is_whole(path, one.size, one.digest):
                raise StoreError(f"{path} is not the file that was written, and none of its files is taken")
            files = kept_files(path, connection)
            known |= {file.path: file.digest for file in files}
            wanted = [file.path for file in files if _is_wanted(store, file, before, result)]
            for file, content in contents(path, connection, wanted) if wanted else ():
                write_whole(store / file.path, content)
                _date(store / file.path, file)
                result.written += 1
        except StoreError as error:
            result.damaged.append(str(error).rstrip("."))
        except OSError as error:
            raise StoreError(
                f"{error.filename or store} cannot be written ({error.strerror}). Make room, and run it again to go on."
            ) from None
    return result, known


def _is_wanted(store: Path, one: Kept, before: Mapping[str, str], result: Restored) -> bool:
    path = store / one.path
    try:
        status = path.stat()
        digest = one.digest if (status.st_size, status.st_mtime_ns) == (one.size, one.changed_ns) else _digest(path)
    except FileNotFoundError:
        return True
    if digest == one.digest:
        _date(path, one)
        result.there += 1
        return False
    if digest != before.get(one.path):
        result.own.append(one.path)
        return False
    return True


def _date(path: Path, one: Kept) -> None:
    """What was compacted knows a run file by its size and date; a copy of other dates is read, and slower."""
    with contextlib.suppress(OSError):
        if path.stat().st_mtime_ns != one.changed_ns:
            os.utime(path, ns=(one.changed_ns, one.changed_ns))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.sha256).hexdigest()


def _remove_gone(store: Path, before: Mapping[str, str], known: Mapping[str, str]) -> int:
    """Remove files that were fetched before, are as they were, and the other store has no more."""
    gone = [store / name for name, digest in before.items() if name not in known and _is(store / name, digest)]
    for path in gone:
        path.unlink()
    return len(gone)


def _is(path: Path, digest: str) -> bool:
    try:
        return _digest(path) == digest
    except OSError:
        return False


def load_fetched(store: Path) -> Fetched:
    """What a fetch has noted; nothing of a store that was not fetched."""
    try:
        plain = unsealed(json.loads(_fetched(store).read_bytes()))
        return Fetched(str(plain["address"]), dict(plain["files"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Fetched()


def save_fetched(store: Path, fetched: Fetched) -> None:
    """Raises OSError."""
    write_whole(_fetched(store), compact(sealed(fetched._asdict())))


def _fetched(store: Path) -> Path:
    return points_of(store) / "fetched.json"
