"""Files of JSON lines, whatever they keep: found by a word, headed by a schema, read without what is broken in them.

A `Log` has lines in any order, each of which stands for itself; all others are a `FileLines`, whose lines are numbered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from fp8bench.errors import RunNotFound, StoreError
from fp8bench.files import Damaged, append_lines, digest_of, keeping, sealed_line, unsealed_line
from fp8bench.model.codec import SCHEMA, Malformed, decode, encode

T = TypeVar("T")
Content = dict[str, Any]
# What foreign content raises on its way to a value; Malformed is a ValueError.
_BROKEN = (ValueError, KeyError, TypeError, RecursionError)
# Of an error's words, and of how a broken line begins.
_LETTERS, _BEGINNING = 120, 20
_SCHEMA = re.compile(r'{"schema": ?(\d+)\b')
# What a store keeps beside its runs, with checksums; of acknowledgements `load_acks` says what is wrong.
BESIDE_RUNS = (
    "advice.jsonl", "ceilings/*.json", "ceilings/history.jsonl", "cells/*/attempts.jsonl", "duels/*.jsonl",
    "inference.jsonl", "plans/*.json", "sensitivity/*.json", "trainings/*/steps.jsonl",
)  # fmt: skip


class UnknownKind(ValueError):
    """A line that is well formed and of no kind that this version knows."""


def fitting(word: str, names: Mapping[Path, Sequence[str]]) -> list[Path]:
    """The files that have the word as a name; if none has, those of which a name begins with it."""
    whole = [path for path, own in names.items() if word in own]
    return whole or [path for path, own in names.items() if word and any(text.startswith(word) for text in own)]


@dataclass(frozen=True)
class Log(Generic[T]):
    """Values with a line each, which is only ever added to: `{"version": 1, WORD: value}`, by the words of `kinds`.

    What holds is a matter of which lines there are and not of their order, so that files of two machines merge line by
    line. A line that cannot be read counts for nothing. A value under '' is the whole line, and has no version.
    """

    path: Path
    kinds: Mapping[str, type[T]]
    called: str
    version: int | None = None
    remedy: str = "Make room, or choose another --store DIR."

    def read(self, content: Content) -> T:
        """What a line says. Raises Malformed."""
        if content.get("version") != self.version:
            raise Malformed(f"is of version {content.get('version')!r:.20} (this fp8bench reads {self.version})")
        word = next((word for word in self.kinds if not word or word in content), None)
        if word is None:
            raise Malformed(f"is no {self.called}")
        try:
            return decode(self.kinds[word], content[word] if word else content)
        except Malformed as error:
            raise Malformed(f"is no {self.called} ({error})") from None

    def written(self, value: T) -> Content:
        word = next(word for word, kind in self.kinds.items() if isinstance(value, kind))
        return {"version": self.version, word: encode(value)} if word else encode(value)

    def lines(self) -> tuple[list[T], list[str]]:
        """What the lines say, and of each that says nothing why; none without a file. Raises OSError."""
        sound: list[T] = []
        troubles = []
        for number, line in enumerate(self.path.read_bytes().split(b"\n") if self.path.exists() else (), 1):
            try:
                if line.strip():
                    sound.append(self.read(unsealed_line(line)[0]))
            except Damaged as error:
                troubles.append(f"line {number} is not as it was written: {error}")
            except Malformed as error:
                troubles.append(f"line {number} {error}")
            except _BROKEN:
                troubles.append(f"line {number} is no JSON")
        return sound, troubles

    def values(self) -> list[T]:
        try:
            return self.lines()[0]
        except OSError:
            return []

    def append(self, values: Iterable[T]) -> None:
        """Write them through to the disk, behind whatever stands there. Raises StoreError."""
        with keeping(self.path, self.remedy):
            append_lines(self.path, [sealed_line(self.written(value)) for value in values])

    def merge(self, theirs: Iterable[T]) -> list[T]:
        """Take in what another log says and this one does not; returns that. Raises StoreError and OSError."""
        known = set(self.lines()[0])
        new = [value for value in dict.fromkeys(theirs) if value not in known]
        if new:
            self.append(new)
        return new


class Broken(NamedTuple):
    """A line that is not as it was written: its number in the file, how it begins, and why."""

    number: int
    begins: str
    why: str


@dataclass(frozen=True)
class FileLines:
    """A file's lines that are as they were written, by their numbers, in the order in which they were; and the others.

    `troubles` are sentences on what no line by itself tells: lines that are gone, stand twice or elsewhere. `lost` says
    that something was written that is not there; a line that a kill has cut short never was. `sealed` says whether
    its lines are numbered and have checksums: what older versions wrote is not, nor what is added to in any order.
    """

    lines: tuple[tuple[int, Content], ...]
    broken: tuple[Broken, ...]
    troubles: tuple[str, ...]
    lost: bool
    sealed: bool
    sums: tuple[str, ...] = ()


class _SealedLine(NamedTuple):
    """A line with its checksum: `rank` counts lines as they were written, `number` as they stand."""

    rank: int
    number: int
    content: Content
    sum: str


def lines_of(path: Path, called: str, content: bytes | None = None) -> FileLines:
    """What is in a file, or in `content` where that was read already. Raises RunNotFound where it cannot be read."""
    try:
        return sheet_of(path.read_bytes() if content is None else content)
    except OSError as error:
        raise RunNotFound(f"{called} {path} cannot be read ({error.strerror}).") from None


def sheet_of(content: bytes) -> FileLines:
    broken: list[Broken] = []
    free: list[tuple[int, Content]] = []
    sealed: list[_SealedLine] = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line or line.isspace():
            continue
        try:
            plain, checksum = unsealed_line(line)
            if (rank := plain.pop("line", 0)) and checksum:
                sealed.append(_SealedLine(rank, number, plain, checksum))
            elif sealed:  # no version that writes none goes on behind one that does
                raise Damaged("it has no checksum, as those before it have")
            else:
                free.append((number, plain))
        except (ValueError, RecursionError) as error:
            broken.append(Broken(number, line[:_BEGINNING].decode(errors="replace"), str(error)[:_LETTERS]))
    in_order, troubles = _once(sealed)
    troubles += _gone(in_order, broken)
    lost = bool(in_order) and in_order[-1].rank > len(in_order)
    as_ended = [_as_ended(in_order, line) for line in in_order]
    if not (lost or troubles or all(as_ended)):
        troubles, lost = ["its end was written behind other lines than these"], True
    lines = (*free, *((line.number, line.content) for line in in_order))
    return FileLines(lines, tuple(broken), tuple(troubles), lost, bool(sealed), tuple(line.sum for line in in_order))


def _once(lines: Sequence[_SealedLine]) -> tuple[list[_SealedLine], list[str]]:
    """Each line once and in the order in which it was written, and a sentence on each that stands elsewhere."""
    kept: dict[int, _SealedLine] = {}
    troubles = []
    last = 0
    for line in lines:
        before = kept.setdefault(line.rank, line)
        if before is not line:
            troubles.append(f"line {line.number} was written as line {before.number} was, and was left out")
        elif line.rank < last:
            troubles.append(f"line {line.number} stands behind lines that were written after it")
        last = max(last, line.rank)
    return sorted(kept.values()), troubles


def _gone(lines: Sequence[_SealedLine], broken: Sequence[Broken]) -> Iterator[str]:
    """A sentence on lines that are not even there as broken ones."""
    rank = number = 0
    for line in lines:
        missing = line.rank - rank - 1 - sum(number < bad.number < line.number for bad in broken)
        if missing > 0:
            yield f"before line {line.number} {missing} {'line is' if missing == 1 else 'lines are'} gone"
        rank, number = line.rank, line.number


def _as_ended(lines: Sequence[_SealedLine], end: _SealedLine) -> bool:
    """Whether a line that ends a file has the digest of those before it, where it has any."""
    digest = end.content.pop("digest", None) if "end" in end.content else None
    return digest is None or digest == digest_of(line.sum for line in lines if line.rank < end.rank)


def check_schema(content: Content, path: Path) -> None:
    """Raises StoreError where a newer version has written a file, Malformed where its header says none."""
    schema = content.get("schema")
    if type(schema) is not int:
        raise Malformed("it has no schema version")
    if schema > SCHEMA:
        raise StoreError(
            f"{path} was written by a newer fp8bench (schema {schema}, this one reads {SCHEMA}). Upgrade it."
        )


def refuse_newer(sheet: FileLines, path: Path) -> None:
    """Raises StoreError where a broken line says that a newer version wrote it, whose checksums may be others."""
    for broken in sheet.broken:
        if (said := _SCHEMA.match(broken.begins)) is not None:
            check_schema({"schema": int(said[1])}, path)


def headed(sheet: FileLines, path: Path, what: str, made: Callable[[Any], T]) -> T:
    """What is `made` of the first line's content under `what`; raises StoreError where it is no header."""
    refuse_newer(sheet, path)
    try:
        number, content = sheet.lines[0] if sheet.lines else (0, {})
        if number != 1:
            raise Damaged(next((broken.why for broken in sheet.broken if broken.number == 1), "it is empty"))
        check_schema(content, path)
        return made(content[what])
    except _BROKEN as error:
        raise StoreError(f"{path} is no {what}: its first line is no header ({str(error)[:_LETTERS]}).") from None


def take_lines(sheet: FileLines, take: Callable[[Content], None], but: int = 0) -> list[str]:
    """Hand over what each line has, except for the line `but`; what is wrong with those that were left out."""
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
    unknown = "is of a kind that this version does not know, and was left out"
    said = ((number, f"is broken and was left out ({why})" if why else unknown) for number, why in sorted(troubles))
    return [*(f"line {number} {words}" for number, words in said), *sheet.troubles]
