"""The files of a store put back from its archives, each with the bytes and the date that it had.

A file that is here stays.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import locked, write_whole
from fp8bench.store.compacted.archive import belongs, contents, is_whole, sha256_of
from fp8bench.store.compacted.manifest import (
    Archive,
    ArchivedFile,
    Unreadable,
    archive_of,
    load_manifest,
    points_of,
    without_runs,
)
from fp8bench.store.runs.listing import index_of

_LOCK_SECONDS = 5.0


@dataclass
class Restored:
    """How many files were written, and were here already; `own` are files here that differ, which stay, `damaged`
    sentences on archives that did not serve."""

    written: int = 0
    there: int = 0
    own: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def restore(store: Path) -> Restored:
    """Write the files that were compacted and are not here any more. Raises StoreError where nothing was compacted."""
    try:
        manifest = load_manifest(store)
    except FileNotFoundError:
        raise StoreError(f"nothing was compacted of {store}. There is nothing to write its files from.") from None
    except OSError as error:
        raise StoreError(f"{index_of(store)} cannot be read ({error.strerror}).") from None
    except Unreadable as error:
        raise without_runs(store, error) from None
    result = Restored()
    with locked(points_of(store), _LOCK_SECONDS):
        for name, one in manifest.archives.items():
            try:
                _put_back(store, archive_of(store, name), one, result)
            except StoreError as error:
                result.damaged.append(str(error).rstrip("."))
            except OSError as error:
                raise StoreError(
                    f"{error.filename or store} cannot be written ({error.strerror}). Make room, and run it again to "
                    "go on."
                ) from None
    return result


def _put_back(store: Path, path: Path, archive: Archive, result: Restored) -> None:
    """Write what is not here of an archive; nothing of a damaged one. Raises StoreError for that, and OSError."""
    if not is_whole(path, archive.size, archive.digest):
        raise StoreError(f"{path} is not the file that was written, and none of its files is taken")
    # An index from elsewhere must not say where else on this machine to write.
    foreign = [one.path for one in archive.files if not belongs(one.path)]
    if foreign:
        raise StoreError(f"{path} has a file {foreign[0]!r:.80}, which is none of a store. Get it once more.")
    wanted = {one.path for one in archive.files if _is_wanted(store, one, result)}
    for file, content in contents(path, archive, wanted) if wanted else ():
        write_whole(store / file.path, content)
        _date(store / file.path, file)
        result.written += 1


def _is_wanted(store: Path, one: ArchivedFile, result: Restored) -> bool:
    path = store / one.path
    try:
        status = path.stat()
        same = (status.st_size, status.st_mtime_ns) == (one.size, one.changed_ns) or sha256_of(path) == one.digest
    except FileNotFoundError:
        return True
    if same:
        _date(path, one)
        result.there += 1
    else:
        result.own.append(one.path)
    return False


def _date(path: Path, one: ArchivedFile) -> None:
    """What was compacted knows a run file by its size and date; a copy of other dates is read, and slower."""
    with contextlib.suppress(OSError):
        if path.stat().st_mtime_ns != one.changed_ns:
            os.utime(path, ns=(one.changed_ns, one.changed_ns))
