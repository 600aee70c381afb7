"""A store's own files in tar.gz: the runs of each machine and month, and one archive of what lies beside runs.

Commands that read figures never open them. `restore` writes files back with their bytes and dates, and leaves those
that are here. Digests and dates are in the index, so the bytes of an archive depend on the names and contents of its
files alone.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from fp8bench.errors import StoreError
from fp8bench.files import keeping, locked, replacing, write_whole
from fp8bench.store.compacted.manifest import (
    ARCHIVE,
    MAKE_ROOM,
    Archive,
    ArchivedFile,
    Manifest,
    Partition,
    UnreadableIndex,
    archive_of,
    load_manifest,
    without_runs,
)
from fp8bench.store.index.figure_files import digest_of
from fp8bench.store.kept_lines import BESIDE_RUNS
from fp8bench.store.runs.listing import all_files, index_of, machine_folder
from fp8bench.store.runs.run_file import safe_folder

# What commands read of a store beside its runs; not what can be made again (figures, reports, prepared texts), nor what
# is of use on this machine alone (checkpoints of trainings, locks).
_BESIDE = (*BESIDE_RUNS, "acks.jsonl", "asv/results/*.json", "asv/results/*/*.json", "cells/*/output.txt")
_RUNS = ("runs/*/*.jsonl", "runs/machine=*/month=*/*.jsonl")
_MONTH = re.compile(r"(\d{4})(\d{2})\d{2}T")


def stated(store: Path) -> dict[str, list[ArchivedFile]]:
    """Returns the files of a store, without digests, sorted by name, by the archives that they go into."""
    by_archive: dict[str, list[ArchivedFile]] = {}
    beside = (path for pattern in _BESIDE for path in store.glob(pattern))
    for path in sorted({*all_files(store), *beside}):
        name = path.relative_to(store).as_posix()
        with contextlib.suppress(OSError):
            status = path.stat()
            if path.is_file():
                file = ArchivedFile(name, "", status.st_size, status.st_mtime_ns)
                by_archive.setdefault(_archive(name), []).append(file)
    return by_archive


def _archive(name: str) -> str:
    path = PurePosixPath(name)
    if path.parts[0] != "runs":
        return f"{ARCHIVE}/beside"
    month = _MONTH.match(path.name)
    words = f"{month[1]}-{month[2]}" if month is not None else "unknown"
    return f"{ARCHIVE}/machine={safe_folder(machine_folder(Path(name)))}/month={words}"


def belongs(name: str) -> bool:
    """Whether a name, which may come from elsewhere, is that of a file of a store."""
    path = PurePosixPath(name)
    fits = (len(path.parts) == pattern.count("/") + 1 and path.match(pattern) for pattern in (*_RUNS, *_BESIDE))
    return ".." not in path.parts and "\0" not in name and any(fits)


def is_whole(path: Path, written: Partition | Archive) -> bool:
    """Whether a compacted file is what was written, bit for bit. Raises OSError."""
    return path.is_file() and path.stat().st_size == written.size and digest_of(path) == written.digest


@dataclass
class Archived:
    """What was done: how many files are in archives, which archives were written, left as they were (`kept`) or had
    been damaged (`mended`), and which files were `left` out because they changed meanwhile or cannot be read."""

    files: int = 0
    written: list[str] = field(default_factory=list)
    kept: int = 0
    left: list[str] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)


def archive(store: Path, manifest: Manifest, result: Archived, save: Callable[[], None]) -> None:
    """Writes the archives whose files have changed, and saves the index after each one."""
    there = stated(store)
    for name in manifest.archives.keys() - there.keys():
        del manifest.archives[name]
        archive_of(store, name).unlink(missing_ok=True)
    for name, files in there.items():
        old = manifest.archives.get(name)
        damaged = old is not None and not is_whole(archive_of(store, name), old)
        result.mended += [name] if damaged else []
        if old is None or damaged or [file._replace(digest="") for file in old.files] != files:
            manifest.archives[name], left = write_archive(archive_of(store, name), store, files)
            result.written.append(name)
            result.left += left
            save()
    result.files = sum(len(packed.files) for packed in manifest.archives.values())
    result.kept = len(manifest.archives) - len(result.written)


def write_archive(path: Path, store: Path, files: Sequence[ArchivedFile]) -> tuple[Archive, list[str]]:
    """Replaces an archive once all its files were read back from it.

    Returns it, and the files that are not in it because they changed meanwhile or cannot be read. Raises StoreError.
    """
    packed: list[ArchivedFile] = []
    with keeping(path, MAKE_ROOM), replacing(path) as partial:
        with partial.open("xb") as file:
            with (
                gzip.GzipFile("", "wb", fileobj=file, mtime=0) as squeezed,
                tarfile.open(fileobj=squeezed, mode="w", encoding="utf-8") as tar,
            ):
                for archived_file in files:
                    if (content := _unchanged(store / archived_file.path, archived_file)) is not None:
                        member = tarfile.TarInfo(archived_file.path)  # without a date and an owner
                        member.size = archived_file.size
                        tar.addfile(member, io.BytesIO(content))
                        packed.append(archived_file._replace(digest=hashlib.sha256(content).hexdigest()))
            file.flush()
            os.fsync(file.fileno())
        made = Archive(partial.stat().st_size, digest_of(partial), tuple(packed))
        for _ in contents(partial, made):
            pass
    there = {archived_file.path for archived_file in packed}
    return made, [archived_file.path for archived_file in files if archived_file.path not in there]


def _unchanged(path: Path, file: ArchivedFile) -> bytes | None:
    try:
        content, status = path.read_bytes(), path.stat()
    except OSError:
        return None
    there = (len(content), status.st_size, status.st_mtime_ns)
    return content if there == (file.size, file.size, file.changed_ns) else None


def contents(
    path: Path, archive: Archive, wanted: Collection[str] | None = None
) -> Iterator[tuple[ArchivedFile, bytes]]:
    """Yields the wanted files of an archive with their bytes, which were compared with their digests. Raises
    StoreError."""
    try:
        with tarfile.open(path, "r:gz", encoding="utf-8") as tar:
            for archived_file in archive.files:
                member = tar.next()
                as_named = member is not None and (member.name, member.size) == (archived_file.path, archived_file.size)
                file = tar.extractfile(member) if as_named and member is not None else None
                content = file.read() if file is not None else b""
                if (
                    file is None
                    or len(content) != archived_file.size
                    or hashlib.sha256(content).hexdigest() != archived_file.digest
                ):
                    raise StoreError(
                        f"{path} does not have {archived_file.path} as it was written: "
                        "`fp8bench store compact` makes it again."
                    )
                if wanted is None or archived_file.path in wanted:
                    yield archived_file, content
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise StoreError(f"{path} cannot be read ({' '.join(str(error).split())[:300]}).") from None


def sha256_of(path: Path) -> str:
    """Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.sha256).hexdigest()


_LOCK_SECONDS = 5.0
# The JSON of a store shrinks to a tenth. An archive that would unpack to much more may be a bomb.
_ROOM, _MOST_RATIO = 64 << 20, 200


@dataclass
class Restored:
    """How many files were written or were here already; `own` are files here that differ and stay, `damaged` sentences
    on archives that could not be used."""

    written: int = 0
    there: int = 0
    own: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def restore(store: Path) -> Restored:
    """Writes the compacted files that are not here. Raises StoreError where nothing was compacted."""
    try:
        manifest = load_manifest(store)
    except FileNotFoundError:
        raise StoreError(f"nothing was compacted of {store}. There is nothing to write its files from.") from None
    except OSError as error:
        raise StoreError(f"{index_of(store)} cannot be read ({error.strerror}).") from None
    except UnreadableIndex as error:
        raise without_runs(store, error) from None
    result = Restored()
    with locked(store / ARCHIVE, _LOCK_SECONDS):
        for name, packed in manifest.archives.items():
            try:
                _put_back(store, archive_of(store, name), packed, result)
            except StoreError as error:
                result.damaged.append(str(error).rstrip("."))
            except OSError as error:
                raise StoreError(
                    f"{error.filename or store} cannot be written ({error.strerror}). Make room, and run it again to "
                    "go on."
                ) from None
    return result


def _put_back(store: Path, path: Path, archive: Archive, result: Restored) -> None:
    """Writes what is missing here of one archive, nothing of a damaged one. Raises StoreError for that, and OSError."""
    if not is_whole(path, archive):
        raise StoreError(f"{path} is not the file that was written, and none of its files is taken")
    # An index from elsewhere could name any path on this machine.
    foreign = [file.path for file in archive.files if not belongs(file.path)]
    if foreign:
        raise StoreError(f"{path} has a file {foreign[0]!r:.80}, which is none of a store. Get it once more.")
    size = sum(file.size for file in archive.files)
    if size > _ROOM + _MOST_RATIO * archive.size:
        raise StoreError(
            f"{path} would unpack to {size} bytes, more than {_MOST_RATIO} times its own: that is no store."
        )
    here = os.path.realpath(store)
    outside = [file.path for file in archive.files if not os.path.realpath(store / file.path).startswith(here + os.sep)]
    if outside:
        raise StoreError(f"{store / outside[0]} leads out of the store by a link: none of {path} is written there.")
    wanted = {file.path for file in archive.files if _is_wanted(store, file, result)}
    for file, content in contents(path, archive, wanted) if wanted else ():
        write_whole(store / file.path, content)
        _date(store / file.path, file)
        result.written += 1


def _is_wanted(store: Path, file: ArchivedFile, result: Restored) -> bool:
    path = store / file.path
    try:
        status = path.stat()
        same = (status.st_size, status.st_mtime_ns) == (file.size, file.changed_ns) or sha256_of(path) == file.digest
    except FileNotFoundError:
        return True
    if same:
        _date(path, file)
        result.there += 1
    else:
        result.own.append(file.path)
    return False


def _date(path: Path, file: ArchivedFile) -> None:
    """Sets a file's date: compacted figures know a run file by size and date, and read one of another date again."""
    with contextlib.suppress(OSError):
        if path.stat().st_mtime_ns != file.changed_ns:
            os.utime(path, ns=(file.changed_ns, file.changed_ns))


def archived_files(store: Path) -> dict[str, ArchivedFile]:
    """Returns the files in undamaged archives by their names in the store."""
    try:
        archives = load_manifest(store).archives
        whole = [packed for name, packed in archives.items() if is_whole(archive_of(store, name), packed)]
    except (OSError, UnreadableIndex):
        return {}
    return {file.path: file for packed in whole for file in packed.files}
