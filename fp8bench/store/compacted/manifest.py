"""What was compacted, and from what: `<store>/points/index.json`.

It names the run files with their stamps, says what of each commit is not in the Parquet files (the texts of its places,
how many runs tell nothing and why), and which writing of each file counts: of the Parquet files, and of the archives
with files of the store (archive.py). It is replaced after the files that it names: a kill in between leaves files that
it does not name, and whose commits are read from the runs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fp8bench.errors import StoreError
from fp8bench.files import write_whole
from fp8bench.model import Conditions, trend_name
from fp8bench.model.codec import SCHEMA
from fp8bench.store.index.figure_files import CommitFigures, Stamp
from fp8bench.store.runs.listing import Listing, index_of

# Raised when the same runs would come to other rows, or be written down in another way.
VERSION = 4
ARCHIVE = "archive"
MAKE_ROOM = "Make room, and run it again; the runs are untouched."
_MAGIC = b"fp8bench points"
_NUMBERED = ("layouts", "silents", "lines", "unders", "machines")


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
    """A tar.gz that has files of the store in it: its size, a digest, and the files in their order."""

    size: int
    digest: str
    files: tuple[ArchivedFile, ...]


class CompactedPlace(NamedTuple):
    """What a commit has come to in one place: texts with numbers for machine and conditions, its cells, its file.

    `silent` numbers the list of lines that have neither a number nor a failure here; `runs` are ids.
    """

    said: dict[str, Any]
    layout: int
    silent: int
    partition: str
    runs: list[str]


class LineKey(NamedTuple):
    """What the number of a line stands for: one cell of a series, whatever the machine."""

    series: str
    cell: str
    workload: str
    metric: str
    unit: str

    @property
    def name(self) -> str:
        return trend_name(self.series, tuple(json.loads(self.cell)))


@dataclass
class Numbered:
    """Values that many places share, each kept once and named by its number."""

    values: list[Any] = field(default_factory=list)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {json.dumps(value): number for number, value in enumerate(self.values)}

    def number(self, value: Any) -> int:
        """The number of a value, which is a new one for a new value."""
        text = json.dumps(value)
        if text not in self._numbers:
            self._numbers[text] = len(self.values)
            self.values.append(value)
        return self._numbers[text]


@dataclass
class Manifest:
    """All of it. `units` are commits, with the numbers of their places. `files` are all run files by their names in the
    store, with size and date, newest first; empty until every commit was looked at."""

    units: dict[str, CommitFigures[int]] = field(default_factory=dict)
    places: dict[int, CompactedPlace] = field(default_factory=dict)
    partitions: dict[str, Partition] = field(default_factory=dict)
    archives: dict[str, Archive] = field(default_factory=dict)
    layouts: Numbered = field(default_factory=Numbered)
    silents: Numbered = field(default_factory=Numbered)
    lines: Numbered = field(default_factory=Numbered)
    unders: Numbered = field(default_factory=Numbered)
    machines: Numbered = field(default_factory=Numbered)
    order: list[tuple[str, list[str]]] = field(default_factory=list)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)
    _known: dict[int, Conditions] = field(default_factory=dict)

    @cached_property
    def line_names(self) -> list[str]:
        return [LineKey(*line).name for line in self.lines.values]

    def said(self, number: int) -> dict[str, Any]:
        """What is said of a place, as a table says it."""
        said = self.places[number].said
        unders = tuple(self._conditions(under) for under in said["unders"])
        return {**said, "machine": self.machines.values[said["machine"]], "unders": unders}

    def written(self, store: Path) -> dict[Path, Partition | Archive]:
        """All files that count."""
        parquet = {parquet_of(store, name): partition for name, partition in self.partitions.items()}
        return {**parquet, **{archive_of(store, name): archive for name, archive in self.archives.items()}}

    def _conditions(self, number: int) -> Conditions:
        if number not in self._known:
            self._known[number] = tuple((name, value) for name, value in self.unders.values[number])
        return self._known[number]

    def listing(self, store: Path) -> Listing:
        """The run files, where they are those that were listed when this was written."""
        apart = self.copies.keys() | self.refused.keys()
        return Listing(
            tuple(store / name for name in self.files if name not in apart),
            {store / name: store / own for name, own in self.copies.items()},
            {store / name: tuple(store / one for one in group) for name, group in self.refused.items()},
        )

    def keep_listing(self, store: Path, files: Mapping[str, tuple[int, int]], there: Listing) -> None:
        """Note that every commit of these files is here."""

        def name(path: Path) -> str:
            return path.relative_to(store).as_posix()

        self.files = dict(files)
        self.copies = {name(path): name(own) for path, own in there.copies.items()}
        self.refused = {name(path): [name(one) for one in group] for path, group in there.refused.items()}

    def drop(self, commits: Iterable[str]) -> set[str]:
        """Forget commits and their places; returns the partitions that their rows are in."""
        gone = [number for commit in commits for number in self.units.pop(commit).places]
        return {self.places.pop(number).partition for number in gone}


def points_of(store: Path) -> Path:
    return index_of(store).parent


def parquet_of(store: Path, name: str) -> Path:
    return points_of(store) / name / "points.parquet"


def archive_of(store: Path, name: str) -> Path:
    return store / f"{name}.tar.gz"


class UnreadableIndex(ValueError):
    """Why an index does not serve; `newer` where a newer fp8bench wrote it."""

    def __init__(self, why: str, newer: bool = False) -> None:
        super().__init__(why)
        self.newer = newer


def without_runs(store: Path, why: UnreadableIndex) -> StoreError:
    """An index that does not serve, where there are no runs to make it again from."""
    return StoreError(
        f"{index_of(store)} does not serve: {why}. Nothing writes the runs of {store} back from it but the fp8bench "
        "that compacted them (`fp8bench store restore`, and then `store compact` with this one), or a copy of them."
    )


def load_manifest(store: Path) -> Manifest:
    """What the index says. Raises FileNotFoundError, OSError, or UnreadableIndex with the reason."""
    return read_manifest(index_of(store).read_bytes())


def read_manifest(content: bytes) -> Manifest:
    """What the bytes of an index say. Raises UnreadableIndex with the reason."""
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


def _check(what: str, found: int, meant: int) -> None:
    if found != meant:
        raise UnreadableIndex(f"it is of {what} {found}, and this fp8bench reads {meant}", found > meant)


def _manifest(plain: dict[str, Any]) -> Manifest:
    layouts, silents, lines, unders, machines = (Numbered(plain[name]) for name in _NUMBERED)
    return Manifest(
        {commit: _unit(plain, *unit) for commit, unit in plain["units"].items()},
        {int(number): CompactedPlace(*place) for number, place in plain["places"].items()},
        {name: Partition(*one) for name, one in plain["partitions"].items()},
        {
            name: Archive(size, digest, tuple(ArchivedFile(*file) for file in files))
            for name, (size, digest, files) in plain["archives"].items()
        },
        layouts, silents, lines, unders, machines, plain["order"],
        {name: (size, changed) for name, size, changed in plain["files"]}, plain["copies"], plain["refused"],
    )  # fmt: skip


def _unit(
    plain: dict[str, Any], sources: list[Any], suites: int, runs: int, left: list[str], places: list[int]
) -> CommitFigures[int]:
    return CommitFigures(
        tuple(Stamp(*source) for source in sources), plain["asked"][suites], runs, tuple(left), tuple(places)
    )


def save_manifest(store: Path, manifest: Manifest) -> None:
    """Write it in one step. Raises OSError."""
    asked = Numbered()
    units = {
        commit: [unit.sources, asked.number(unit.suites), unit.runs, unit.left, unit.places]
        for commit, unit in manifest.units.items()
    }
    plain = {
        "schema": SCHEMA, "units": units, "asked": asked.values, "places": manifest.places,
        "partitions": manifest.partitions, "archives": manifest.archives, "order": manifest.order,
        "copies": manifest.copies, "refused": manifest.refused,
        "files": [[name, *stamp] for name, stamp in manifest.files.items()],
        **{name: getattr(manifest, name).values for name in _NUMBERED},
    }  # fmt: skip
    body = json.dumps(plain, separators=(",", ":")).encode()
    write_whole(index_of(store), b"%s %d %08x\n%s" % (_MAGIC, VERSION, zlib.crc32(body), body))


def same_stamps(sources: Sequence[Stamp], names: Sequence[str], files: Mapping[str, tuple[int, int]]) -> bool:
    """Whether a unit was read from these files, with the sizes and dates that they have now."""
    return sorted(source.name for source in sources) == sorted(names) and all(
        files.get(source.name) == (source.size, source.changed_ns) for source in sources
    )
