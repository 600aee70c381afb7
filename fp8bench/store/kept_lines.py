"""Reads files of JSON lines, without their broken lines.

A `Log` is a file whose lines are independent of each other. All other files begin with a header that has a schema
version, and their lines are numbered (`FileLines`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from fp8bench.errors import RunNotFound, StoreError
from fp8bench.files import Damaged, append_lines, digest_of, keeping, read_file, sealed_line, unsealed_line
from fp8bench.model.codec import SCHEMA, Malformed, decode, encode

T = TypeVar("T")
Content = dict[str, Any]
# Errors that foreign content may cause when it is decoded; Malformed is a ValueError.
_BROKEN = (ValueError, KeyError, TypeError, RecursionError)
# The most characters shown of an error, and of a broken line.
_LETTERS, _BEGINNING = 120, 20
_SCHEMA = re.compile(r'{"schema": ?(\d+)\b')
# The files with checksums that a store has next to its runs; acknowledgements are checked by `load_acks`.
BESIDE_RUNS = (
    "advice.jsonl",
    "ceilings/*.json",
    "ceilings/history.jsonl",
    "cells/*/attempts.jsonl",
    "duels/*.jsonl",
    "inference.jsonl",
    "plans/*.json",
    "sensitivity/*.json",
    "trainings/*/steps.jsonl",
)


class UnknownKind(ValueError):
    """A well-formed line of a kind that this version does not know."""


def fitting(word: str, names: Mapping[Path, Sequence[str]]) -> list[Path]:
    """Returns the files with this name, or else those with a name that begins with the word."""
    exact = [path for path, file_names in names.items() if word in file_names]
    if exact or not word:
        return exact
    return [path for path, file_names in names.items() if _begins_one(word, file_names)]


def _begins_one(word: str, names: Sequence[str]) -> bool:
    return any(name.startswith(word) for name in names)


@dataclass(frozen=True)
class Log(Generic[T]):
    """A file of values, one a line, which is only ever added to: `{"version": 1, WORD: value}`, where `kinds` has the
    WORDs.

    The order of the lines means nothing, so that the files of two machines are merged line by line. A line that cannot
    be read counts for nothing. A kind under '' is the whole line, and has no version.
    """

    path: Path
    kinds: Mapping[str, type[T]]
    called: str
    version: int | None = None
    remedy: str = "Make room, or choose another --store DIR."

    def read(self, content: Content) -> T:
        """Returns the value in a line's content; raises Malformed."""
        if content.get("version") != self.version:
            raise Malformed(f"is of version {content.get('version')!r:.20} (this fp8bench reads {self.version})")
        word = next((word for word in self.kinds if not word or word in content), None)
        if word is None:
            raise Malformed(f"is no {self.called}")
        try:
            return decode(self.kinds[word], content[word] if word else content)
        except Malformed as error:
            raise Malformed(f"is no {self.called} ({error})") from None

    def content_of(self, value: T) -> Content:
        key = next(key for key, kind in self.kinds.items() if isinstance(value, kind))
        return {"version": self.version, key: encode(value)} if key else encode(value)

    def lines(self) -> tuple[list[T], list[str]]:
        """Returns the values, and for each line that has none the reason; nothing without a file. Raises
        StoreError."""
        sound = []
        troubles = []
        try:
            content = read_file(self.path)
        except FileNotFoundError:
            return [], []
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read ({error.strerror}).") from None
        for number, line in enumerate(content.split(b"\n"), 1):
            try:
                if line.strip():
                    sound.append(self.read(unsealed_line(line)[0]))
            except Damaged as error:
                troubles.append(f"line {number} is not as it was written: {error}")
            except Malformed as error:
                troubles.append(f"line {number} {error}")
            except _BROKEN:
                troubles.append(f"line {number} is not JSON")
        return sound, troubles

    def append(self, values: Iterable[T]) -> None:
        """Writes values through to the disk, behind what is there. Raises StoreError."""
        with keeping(self.path, self.remedy):
            append_lines(self.path, [sealed_line(self.content_of(value)) for value in values])

    def merge(self, theirs: Iterable[T]) -> list[T]:
        """Adds the values of a second log that are missing here, and returns them. Raises StoreError."""
        present = set(self.lines()[0])
        new = [value for value in dict.fromkeys(theirs) if value not in present]
        if new:
            self.append(new)
        return new


class Broken(NamedTuple):
    """A damaged line: its number in the file, its first characters, and the reason."""

    number: int
    begins: str
    why: str


@dataclass(frozen=True)
class FileLines:
    """The lines of a file by their numbers, in the order in which they were written, and those that are broken.

    `troubles` are sentences on what no line shows by itself: lines that are gone, stand twice or elsewhere. `lost` is
    True where something that was written is not there; a line that a kill cut short does not count. `sealed` is False
    where no line has a number and a checksum, as in files of older versions and in logs.
    """

    lines: tuple[tuple[int, Content], ...]
    broken: tuple[Broken, ...]
    troubles: tuple[str, ...]
    lost: bool
    sealed: bool
    sums: tuple[str, ...] = ()


class _SealedLine(NamedTuple):
    """A line with a checksum: `rank` is its number when it was written, `number` that in the file."""

    rank: int
    number: int
    content: Content
    sum: str


def lines_of(path: Path, called: str) -> FileLines:
    """Reads a file. Raises RunNotFound."""
    try:
        return sheet_of(read_file(path))
    except OSError as error:
        raise RunNotFound(f"{called} {path} cannot be read ({error.strerror}).") from None


def sheet_of(content: bytes) -> FileLines:
    # 1. Sort the lines into sealed ones, those of older versions, and broken ones.
    broken = []
    free = []
    sealed = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line or line.isspace():
            continue
        try:
            plain, checksum = unsealed_line(line)
            if (rank := plain.pop("line", 0)) and checksum:
                sealed.append(_SealedLine(rank, number, plain, checksum))
            elif sealed:  # versions that write no checksums do not resume a file that has them
                raise Damaged("it has no checksum, as those before it have")
            else:
                free.append((number, plain))
        except (ValueError, RecursionError) as error:
            broken.append(Broken(number, line[:_BEGINNING].decode(errors="replace"), str(error)[:_LETTERS]))
    # 2. Check by the numbers and digests that nothing is missing.
    in_order, troubles = _in_order(sealed)
    troubles += _missing_lines(in_order, broken)
    lost = bool(in_order) and in_order[-1].rank > len(in_order)
    digests_fit = [_digest_fits(in_order, line) for line in in_order]
    if not (lost or troubles or all(digests_fit)):
        troubles, lost = ["its end was written behind other lines than these"], True
    lines = (*free, *((line.number, line.content) for line in in_order))
    return FileLines(lines, tuple(broken), tuple(troubles), lost, bool(sealed), tuple(line.sum for line in in_order))


def _in_order(lines: Sequence[_SealedLine]) -> tuple[list[_SealedLine], list[str]]:
    """Returns each line once, in the order of writing, and a sentence on each that stood elsewhere."""
    by_rank: dict[int, _SealedLine] = {}
    troubles = []
    last = 0
    for line in lines:
        first = by_rank.setdefault(line.rank, line)
        if first is not line:
            troubles.append(f"line {line.number} was written as line {first.number} was, and was left out")
        elif line.rank < last:
            troubles.append(f"line {line.number} stands behind lines that were written after it")
        last = max(last, line.rank)
    return sorted(by_rank.values()), troubles


def _missing_lines(lines: Sequence[_SealedLine], broken: Sequence[Broken]) -> Iterator[str]:
    """Yields a sentence for each place where lines are missing altogether."""
    rank = number = 0
    for line in lines:
        missing = line.rank - rank - 1 - sum(number < bad.number < line.number for bad in broken)
        if missing > 0:
            yield f"before line {line.number} {missing} {'line is' if missing == 1 else 'lines are'} gone"
        rank, number = line.rank, line.number


def _digest_fits(lines: Sequence[_SealedLine], end: _SealedLine) -> bool:
    """Whether the digest in an end line is that of the lines before it; True where it has none. It is removed."""
    digest = end.content.pop("digest", None) if "end" in end.content else None
    return digest is None or digest == digest_of(line.sum for line in lines if line.rank < end.rank)


def check_schema(content: Content, path: Path) -> None:
    """Raises StoreError if a newer version wrote the file, Malformed if its header names no version."""
    schema = content.get("schema")
    if type(schema) is not int:
        raise Malformed("it has no schema version")
    if schema > SCHEMA:
        raise StoreError(
            f"{path} was written by a newer fp8bench (schema {schema}, this one reads {SCHEMA}). Upgrade it."
        )


def refuse_newer(sheet: FileLines, path: Path) -> None:
    """Raises StoreError if a broken line names a newer version, whose checksums may be computed differently."""
    for broken in sheet.broken:
        if (version := _SCHEMA.match(broken.begins)) is not None:
            check_schema({"schema": int(version[1])}, path)


def read_header(sheet: FileLines, path: Path, key: str, make: Callable[[Any], T]) -> T:
    """Returns what `make` makes of the header's content under `key`. Raises StoreError without a header."""
    refuse_newer(sheet, path)
    try:
        number, content = sheet.lines[0] if sheet.lines else (0, {})
        if number != 1:
            raise Damaged(next((broken.why for broken in sheet.broken if broken.number == 1), "it is empty"))
        check_schema(content, path)
        return make(content[key])
    except _BROKEN as error:
        raise StoreError(f"{path} is not a {key}: its first line is not a header ({str(error)[:_LETTERS]}).") from None


def take_lines(sheet: FileLines, take: Callable[[Content], None], but: int = 0) -> list[str]:
    """Calls `take` with the content of every line except line `but`; returns a sentence on each that it refuses."""
    troubles = [(broken.number, broken.why) for broken in sheet.broken if broken.number != but]
    for number, content in sheet.lines:
        if number == but:
            continue
        try:
            take(content)
        except UnknownKind:
            troubles.append((number, ""))
        except _BROKEN as error:
            troubles.append((number, str(error)[:_LETTERS]))
    sentences = []
    for number, reason in sorted(troubles):
        unknown = "is of a kind that this version does not know, and was left out"
        sentences.append(f"line {number} {f'is broken and was left out ({reason})' if reason else unknown}")
    return [*sentences, *sheet.troubles]
