"""The index: the figures of a store's commits, in one file, `<store>/points/points.figures`.

Reading all runs takes minutes where there are thousands. The index names the run files that each commit's figures were
made of, and its figures count only while these are the same. It may be deleted at any time, and is made again from the
runs; where these were compacted and taken away, it is what is left.

Frames are appended. A frame has a checksum, a head in JSON, and figures as rows of numbers, which begin at multiples of
a row's size, so that the file is one array of rows. The last frame with a commit counts. A head has a column for each
field of commits, of their run files, and of the places where they were measured. Values that many of them share
(layouts, machines, conditions) have numbers, and are in the first frame that needs them.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fp8bench import files
from fp8bench.errors import StoreError
from fp8bench.files import append, locked, replacing
from fp8bench.model import Fault
from fp8bench.model.codec import SCHEMA
from fp8bench.store.asv.identity import Home
from fp8bench.store.commit_runs import TrackedRun, by_place
from fp8bench.store.index.figure_files import AGAIN, CommitFigures, Fingerprints, Stamp, are_known, as_they_are
from fp8bench.store.index.tables import ROW, FigureTable, MeasuredPlaces, PlaceShape, Rows, table_of
from fp8bench.store.runs.listing import POINTS, index_of

# Raised when the same runs would give other figures, or another file.
VERSION = 12
_MAGIC = b"fp8bench figures"
_SIZE = ROW.itemsize
_BEGINS = re.compile(rb"fp8bench figures (\d{1,9}) (\d{1,9}) *\n")
# The line that begins a frame: a checksum of all that follows, bytes of this line and the head, rows.
_FRAME = re.compile(rb"([0-9a-f]{8}) (\d{10}) (\d{10})\n")
_FRAME_SIZE, _CHECKED = 31, 8
_ROWS = -1  # the field of a shape with the number of rows
AT_ONCE = 200  # commits that are written together
_MOST_FRAMES = 250  # more take longer to read than a few commits
_LOCK_SECONDS = 20.0
Kept = tuple[str, CommitFigures[FigureTable]]


class _Commits(NamedTuple):
    """Columns of commits: suites and reasons are numbers of values, `sources` and `places` count a commit's own."""

    names: list[str]
    suites: list[int]
    runs: list[int]
    left: list[int]
    sources: list[int]
    places: list[int]


class _Sources(NamedTuple):
    names: list[str]
    sizes: list[int]
    dates: list[int]
    digests: list[str]
    ids: list[str]


class _PlaceColumns(NamedTuple):
    shapes: list[int]
    commits: list[str]
    dates: list[int | None]
    began: list[float]
    newest: list[str]


class _Head(NamedTuple):
    """The head of a frame, or of all frames together."""

    values: list[Any]
    commits: _Commits
    sources: _Sources
    places: _PlaceColumns


def _empty() -> _Head:
    return _Head([], _Commits([], [], [], [], [], []), _Sources([], [], [], [], []), _PlaceColumns([], [], [], [], []))


class Numbered:
    """Values that many share, each kept once and named by its number."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self._numbers = {self._key(value): number for number, value in enumerate(values)}

    def number(self, value: Any) -> int:
        key = self._key(value)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]

    def _key(self, value: Any) -> str | tuple[str]:
        return (value,) if isinstance(value, str) else json.dumps(value)  # layouts are long


def points_file(store: Path) -> Path:
    return store / POINTS / "points.figures"


@dataclass
class Index:
    """The file's content. It is `torn` where it is not what was written, `newer` where a newer fp8bench wrote it.

    What cannot be written is known as long as this object is.
    """

    store: Path
    torn: bool = False
    newer: bool = False
    head: _Head = field(default_factory=_empty)
    # A unit is a commit in a frame. The number of each commit's newest unit; the first source and place of each unit,
    # and the first row of each place.
    units: dict[str, int] = field(default_factory=dict)
    _sources: list[int] = field(default_factory=lambda: [0])
    _places: list[int] = field(default_factory=lambda: [0])
    _first: list[int] = field(default_factory=list)
    _frames: int = 0
    _end: int = 0
    _inode: int = 0
    _content: Any = b""
    _beside: bytes = b""

    @classmethod
    def opened(cls, store: Path) -> Index:
        index = cls(store)
        with contextlib.suppress(OSError), points_file(store).open("rb") as file:
            index._read(file)
        return index

    def _read(self, file: BinaryIO) -> None:
        """Takes the frames that were not taken yet. Raises OSError."""
        status = os.fstat(file.fileno())
        self._inode = status.st_ino
        if not status.st_size:
            self.torn = True
            return
        self._content = mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_READ)
        if not self._end:
            begins = _BEGINS.fullmatch(self._content[:_SIZE])
            self.torn = begins is None
            self.newer = begins is not None and int(begins[1]) > VERSION
            if begins is None or (int(begins[1]), int(begins[2])) != (VERSION, SCHEMA):
                return
            self._end = _SIZE
        content = memoryview(self._content)
        while self._end < len(content) and not self.torn:
            self.torn = not self._take(content[self._end :])

    def _take(self, content: memoryview) -> bool:
        """Takes the next frame; False where there is none."""
        line = _FRAME.fullmatch(bytes(content[:_FRAME_SIZE]))
        if line is None:
            return False
        size, rows = int(line[2]), int(line[3])
        whole = size + rows * _SIZE
        if whole > len(content) or zlib.crc32(content[_CHECKED:whole]) != int(line[1], 16):
            return False
        values, commits, sources, places = json.loads(bytes(content[_FRAME_SIZE:size]))
        known = len(self.head.commits.names)
        self.units.update(zip(commits[0], range(known, known + len(commits[0])), strict=True))
        self.head.values.extend(values)
        columns: list[list[Any]] = [*self.head.commits, *self.head.sources, *self.head.places]
        for column, added in zip(columns, [*commits, *sources, *places], strict=True):
            column.extend(added)
        self._sources += islice(accumulate(_Commits(*commits).sources, initial=self._sources[-1]), 1, None)
        self._places += islice(accumulate(_Commits(*commits).places, initial=self._places[-1]), 1, None)
        counts = (self.head.values[shape][_ROWS] for shape in _PlaceColumns(*places).shapes)
        self._first += list(accumulate(counts, initial=(self._end + size) // _SIZE))[:-1]
        self._end += whole
        self._frames += 1
        return True

    def stamps(self) -> dict[str, tuple[int, int]]:
        """Returns the run files of the commits, with size and date."""
        own = self.head.sources
        if len(self.units) == len(self.head.commits.names):
            return dict(zip(own.names, zip(own.sizes, own.dates, strict=True), strict=True))
        live = (number for unit in self.units.values() for number in self._range(self._sources, unit))
        return {own.names[number]: (own.sizes[number], own.dates[number]) for number in live}

    def sources(self, commit: str) -> list[Stamp]:
        """Returns the run files that a commit's figures were made of, as they were; none for an unknown commit."""
        if commit not in self.units:
            return []
        whose = self._range(self._sources, self.units[commit])
        return list(map(Stamp, *(column[whose.start : whose.stop] for column in self.head.sources)))

    def known(self, files: Mapping[str, tuple[int, int]]) -> dict[str, tuple[str, str]]:
        """Returns the run's id and the commit of each of these files that is as the index knows it."""
        own, known = self.head.sources, {}
        for commit, unit in self.units.items():
            for number in self._range(self._sources, unit):
                if files.get(own.names[number]) == (own.sizes[number], own.dates[number]):
                    known[own.names[number]] = own.ids[number], commit
        return known

    def in_order(self) -> list[str]:
        """Returns the commits in the order of their first runs, by the names of files."""
        firsts = ((self.head.sources.names[self._sources[unit]], commit) for commit, unit in self.units.items())
        return [commit for _, commit in sorted((name.rpartition("/")[2], commit) for name, commit in firsts)]

    def are_known(self, known: Fingerprints) -> bool:
        suites = {self.head.commits.suites[unit] for unit in self.units.values()}
        return all(are_known(self.head.values[number], known) for number in suites)

    def suites(self, commit: str) -> dict[str, str]:
        suites: dict[str, str] = self.head.values[self.head.commits.suites[self.units[commit]]]
        return suites

    def figures(self, commit: str) -> CommitFigures[FigureTable]:
        unit, own, rows = self.units[commit], self.head.commits, self._rows()
        tables = (self._table(place, rows) for place in self._range(self._places, unit))
        left = self.head.values[own.left[unit]]
        return CommitFigures(
            tuple(self.sources(commit)), self.suites(commit), own.runs[unit], tuple(left), tuple(tables)
        )

    def told(self, commits: Sequence[str]) -> tuple[int, int, Counter[str]]:
        units = [self.units[commit] for commit in commits]
        runs = [self.head.commits.runs[unit] for unit in units]
        left: Counter[str] = Counter()
        for number, count in Counter(self.head.commits.left[unit] for unit in units).items():
            for why in self.head.values[number]:
                left[why] += count
        return sum(runs), sum(count > 0 for count in runs), left

    def places(self, commits: Sequence[str]) -> MeasuredPlaces:
        chosen = [place for commit in commits for place in self._range(self._places, self.units[commit])]
        columns: list[list[Any]] = [[column[place] for place in chosen] for column in self.head.places]
        numbers, shape = np.unique(np.array(columns[0], np.int64), return_inverse=True)
        first = np.array([self._first[place] for place in chosen], np.int64)
        return MeasuredPlaces(self._rows(), list(map(self._shape, numbers.tolist())), shape, first, *columns[1:])

    def _range(self, begins: Sequence[int], number: int) -> range:
        return range(begins[number], begins[number + 1])

    def _shape(self, number: int) -> PlaceShape:
        value = self.head.values
        layout, machine, python, interpreter, versions, unders, reasons, count = value[number]
        conditions = tuple(tuple((name, fact) for name, fact in value[under]) for under in unders)
        home = Home(str(value[machine]["machine"]), python, interpreter)
        return PlaceShape(
            value[layout].encode(), home, value[machine], tuple(versions), conditions, tuple(reasons), count
        )

    def _table(self, place: int, rows: Rows) -> FigureTable:
        columns: list[list[Any]] = list(self.head.places)
        number, commit, date, began, newest = (column[place] for column in columns)
        shape, count = self._shape(number), self.head.values[number][_ROWS]
        said = {
            "commit": commit, "date": date, "began": began, "newest": newest, "machine": shape.machine,
            "python": shape.home.python, "interpreter": shape.home.interpreter, "versions": list(shape.versions),
            "unders": list(shape.unders), "reasons": list(shape.reasons),
        }  # fmt: skip
        return FigureTable(said, shape.layout, rows[self._first[place] : self._first[place] + count])

    def _rows(self) -> Rows:
        """Returns the whole file as rows, then what could not be written."""
        if not self._end:
            return np.zeros(0, ROW)
        content: Any = self._content
        if self._beside:
            content = content[: self._end - len(self._beside)] + self._beside
        return np.frombuffer(content, dtype=ROW, count=self._end // _SIZE)

    def keep(self, figures: Sequence[Kept], beside: bool = False) -> str:
        """Writes the figures of commits, and takes them; returns why they could not be written, '' if they were.

        With `beside` they are not written, nor is anything after them.
        """
        why = ""
        if not (beside or self._beside or self.newer):
            try:
                with locked(points_file(self.store).parent, _LOCK_SECONDS):
                    self._write(figures)
                return ""
            except OSError as error:
                why = error.strerror or str(error)
            except StoreError as error:
                why = str(error).rstrip(".")
        frame = self._frame(figures)
        self._content, self._end = self._content or bytes(_SIZE), self._end or _SIZE
        self._beside += frame
        self._take(memoryview(frame))
        return why

    def _write(self, figures: Sequence[Kept]) -> None:
        """Appends to the file, or writes it anew where much of it no longer counts. Raises OSError."""
        path = points_file(self.store)
        files.sweep(path.parent)
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if os.fstat(file.fileno()).st_ino == self._inode:
                self._read(file)
            else:  # another process has written it anew
                vars(self).update(vars(Index.opened(self.store)))
        if self._end and not self.torn and self._frames < _MOST_FRAMES and len(self._first) <= 2 * len(self.units) + 2:
            with path.open("r+b") as file:
                end = file.seek(0, os.SEEK_END)
                try:
                    append(file, self._frame(figures), sync=False)  # lost power loses nothing that is not in the runs
                except BaseException:
                    with contextlib.suppress(OSError):
                        file.truncate(end)
                    raise
                self._read(file)
            return
        self._write_anew(figures)

    def _write_anew(self, figures: Sequence[Kept]) -> None:
        """Writes the commits whose files are there, or were compacted."""
        new, known = Index(self.store), dict(figures)
        compacted = index_of(self.store).exists()
        rest = [
            commit for commit in self.units
            if commit not in known and (compacted or (self.store / self.sources(commit)[0].name).exists())
        ]  # fmt: skip
        with replacing(points_file(self.store)) as partial, partial.open("xb") as file:
            file.write(b"%-*b\n" % (_SIZE - 1, b"%b %d %d" % (_MAGIC, VERSION, SCHEMA)))
            for begin in range(0, len(rest), AT_ONCE):
                file.write(new._added([(commit, self.figures(commit)) for commit in rest[begin : begin + AT_ONCE]]))
            append(file, new._added(figures), sync=False)
        vars(self).update(vars(Index.opened(self.store)))

    def _added(self, figures: Sequence[Kept]) -> bytes:
        frame = self._frame(figures)
        self._take(memoryview(frame))
        return frame

    def _frame(self, figures: Sequence[Kept]) -> bytes:
        """Returns a frame of commits' figures that follows the frames that were taken."""
        head, known = _empty(), len(self.head.values)
        numbered = Numbered(list(self.head.values))
        number = numbered.number
        tables: list[FigureTable] = []
        for commit, own in figures:
            counts = number(own.suites), own.runs, number(list(own.left)), len(own.sources), len(own.places)
            _append(head.commits, (commit, *counts))
            for source in own.sources:
                _append(head.sources, source)
            for table in own.places:
                said = table.said
                places = (said["commit"], said["date"], said["began"], said["newest"])
                _append(head.places, (number(_shape_of(table, number)), *places))
            tables += own.places
        values = numbered.values[known:]
        text = json.dumps([values, *head[1:]], separators=(",", ":")).encode()
        text += b" " * (-(_FRAME_SIZE + len(text)) % _SIZE)
        rows = b"".join(table.rows.tobytes() for table in tables)
        rest = b" %010d %010d\n%b%b" % (_FRAME_SIZE + len(text), len(rows) // _SIZE, text, rows)
        return b"%08x%b" % (zlib.crc32(rest), rest)


def _append(columns: Iterable[list[Any]], values: Iterable[Any]) -> None:
    for column, value in zip(columns, values, strict=True):
        column.append(value)


def _shape_of(table: FigureTable, number: Callable[[Any], int]) -> list[Any]:
    said = table.said
    unders = [number(list(map(list, under))) for under in said["unders"]]
    return [
        number(table.layout.decode()), number(said["machine"]), said["python"], said["interpreter"],
        said["versions"], unders, said["reasons"], len(table.rows),
    ]  # fmt: skip


def check_index(index: Index) -> Iterator[Fault]:
    if index.torn:
        yield Fault(str(points_file(index.store)), "it is not what was written", AGAIN)


def check_figures(index: Index, commit: str, paths: Sequence[Path], runs: Sequence[TrackedRun]) -> Iterator[Fault]:
    """Yields a fault where the index differs from what the runs of a commit come to."""
    sources = index.sources(commit)
    if sources and are_known(index.suites(commit), Fingerprints()) and as_they_are(index.store, paths, sources):
        made = map(table_of, by_place(sorted(runs, key=lambda run: run.order)))
        if _said(made) != _said(index.figures(commit).places):
            what = f"it says otherwise of {commit} than the runs that it was made of"
            yield Fault(str(points_file(index.store)), what, AGAIN)


def _said(tables: Iterable[FigureTable]) -> list[tuple[bytes, bytes]]:
    return sorted((table.layout, table.rows.tobytes()) for table in tables)
