"""What was compacted, and from what: `<store>/points/index.json`.

It names the commits whose rows are in Parquet files, with a digest of their run files and the numbers of their places,
and which writing of each Parquet file and archive (archive.py) counts. It is written after the files that it names: a
kill in between leaves files that it does not name, whose commits are compacted again.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fp8bench.errors import StoreError
from fp8bench.files import write_whole
from fp8bench.model.codec import SCHEMA
from fp8bench.store.index.figure_files import Stamp
from fp8bench.store.index.points_file import Index, Numbered, points_file
from fp8bench.store.runs.listing import index_of

# Raised when the same runs would come to other rows, or be written down in another way.
VERSION = 5
ARCHIVE = "archive"
MAKE_ROOM = "Make room, and run it again; the runs are untouched."
_MAGIC = b"fp8bench points"


class Partition(NamedTuple):
    """A Parquet file as it was written: its size, the id in its footer, its rows, a digest, and the sum of checks."""

    size: int
    id: str
    rows: int
    digest: str
    total: int


class ArchivedFile(NamedTuple):
    """A file of the store as it was: its name in it, a digest (SHA-256), its size and date."""

    path: str
    digest: str
    size: int
    changed_ns: int


class Archive(NamedTuple):
    """A tar.gz of files of the store: its size, a digest, and the files in their order."""

    size: int
    digest: str
    files: tuple[ArchivedFile, ...]


class CompactedPlace(NamedTuple):
    """A place of a commit by its rank among these, the file that its rows are in, and the ids of its runs."""

    commit: str
    rank: int
    partition: str
    runs: list[str]


class LineKey(NamedTuple):
    """The cell of a series that a line's number stands for, whatever the machine."""

    series: str
    cell: str
    workload: str
    metric: str
    unit: str


@dataclass
class Manifest:
    """`units` are commits, each with a digest of its run files and how many of its runs are tracked.

    `files` are all run files by their names in the store, with size and date, newest first; it is empty until every
    commit was read.
    """

    units: dict[str, tuple[str, int]] = field(default_factory=dict)
    places: dict[int, CompactedPlace] = field(default_factory=dict)
    partitions: dict[str, Partition] = field(default_factory=dict)
    archives: dict[str, Archive] = field(default_factory=dict)
    lines: Numbered = field(default_factory=lambda: Numbered([]))
    files: dict[str, tuple[int, int]] = field(default_factory=dict)

    def written(self, store: Path) -> dict[Path, Partition | Archive]:
        parquet = {parquet_of(store, name): partition for name, partition in self.partitions.items()}
        return {**parquet, **{archive_of(store, name): archive for name, archive in self.archives.items()}}

    def drop(self, commits: Collection[str]) -> set[str]:
        """Forgets commits and their places; returns the partitions that have their rows."""
        gone = [number for number, place in self.places.items() if place.commit in commits]
        for commit in commits:
            self.units.pop(commit, None)
        return {self.places.pop(number).partition for number in gone}


def points_of(store: Path) -> Path:
    return index_of(store).parent


def parquet_of(store: Path, name: str) -> Path:
    return points_of(store) / name / "points.parquet"


def archive_of(store: Path, name: str) -> Path:
    return store / f"{name}.tar.gz"


class UnreadableIndex(ValueError):
    """An index that cannot be used; `newer` where a newer fp8bench wrote it."""

    def __init__(self, why: str, newer: bool = False) -> None:
        super().__init__(why)
        self.newer = newer


def without_runs(store: Path, why: UnreadableIndex) -> StoreError:
    """The error of an index that cannot be used, where there are no runs to make it again from."""
    return StoreError(
        f"{index_of(store)} does not serve: {why}. Nothing writes the runs of {store} back from it but the fp8bench "
        "that compacted them (`fp8bench store restore`, and then `store compact` with this one), or a copy of them."
    )


def load_manifest(store: Path) -> Manifest:
    """Raises FileNotFoundError, OSError, or UnreadableIndex with the reason."""
    return read_manifest(index_of(store).read_bytes())


def read_manifest(content: bytes) -> Manifest:
    first, _, body = content.partition(b"\n")
    words = first.removeprefix(_MAGIC).split()
    try:
        if not first.startswith(_MAGIC) or len(words) != 2:
            raise ValueError
        _check("version", int(words[0]), VERSION)
        if zlib.crc32(body) != int(words[1], 16):
            raise ValueError
        plain = json.loads(body)
        _check("schema", plain["schema"], SCHEMA)
        return _manifest(plain)
    except UnreadableIndex:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise UnreadableIndex("it is not what was written") from None


def _check(what: str, written: int, expected: int) -> None:
    if written != expected:
        raise UnreadableIndex(f"it is of {what} {written}, and this fp8bench reads {expected}", written > expected)


def _manifest(plain: dict[str, Any]) -> Manifest:
    return Manifest(
        {commit: (digest, runs) for commit, (digest, runs) in plain["units"].items()},
        {int(number): CompactedPlace(*place) for number, place in plain["places"].items()},
        {name: Partition(*fields) for name, fields in plain["partitions"].items()},
        {
            name: Archive(size, digest, tuple(ArchivedFile(*file) for file in files))
            for name, (size, digest, files) in plain["archives"].items()
        },
        Numbered(plain["lines"]), {name: (size, changed) for name, size, changed in plain["files"]},
    )  # fmt: skip


def save_manifest(store: Path, manifest: Manifest) -> None:
    """Raises OSError."""
    plain = {
        "schema": SCHEMA, "units": manifest.units, "places": manifest.places, "partitions": manifest.partitions,
        "archives": manifest.archives, "lines": manifest.lines.values,
        "files": [[name, *stamp] for name, stamp in manifest.files.items()],
    }  # fmt: skip
    body = json.dumps(plain, separators=(",", ":")).encode()
    write_whole(index_of(store), b"%s %d %08x\n%s" % (_MAGIC, VERSION, zlib.crc32(body), body))


def digest_of_sources(sources: Iterable[Stamp]) -> str:
    """Returns a digest of the run files of a commit that does not depend on their dates."""
    words = sorted((source.name, source.digest) for source in sources)
    return hashlib.blake2b(json.dumps(words).encode(), digest_size=16).hexdigest()


def stands_alone(store: Path, index: Index) -> bool:
    """Whether compacted figures are all that is known of a store without runs. Raises StoreError if some lack."""
    try:
        manifest = load_manifest(store)
    except OSError as error:
        raise StoreError(f"{index_of(store)} cannot be read ({error.strerror}).") from None
    except UnreadableIndex as error:
        raise without_runs(store, error) from None
    lacking = sum(digest_of_sources(index.sources(commit)) != digest for commit, (digest, _) in manifest.units.items())
    if lacking and manifest.files:
        raise StoreError(
            f"{points_file(store)} lacks {lacking} of {len(manifest.units)} commits that were compacted, and {store} "
            "has no runs. Copy it again, or write the runs: `fp8bench store restore`."
        )
    return bool(manifest.files)


def lacking_files(store: Path, files: Mapping[str, tuple[int, int]]) -> int:
    """Counts the run files that were compacted and are not there any more."""
    try:
        return len(load_manifest(store).files.keys() - files.keys())
    except (OSError, UnreadableIndex):
        return 0
