"""Reads files of JSON lines and leaves out broken lines.

The lines of a `Log` are independent of each other. All other files (`FileLines`) have numbered lines, and begin with
a header that has a schema version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from fp8bench.errors import RunNotFound, StoreError
from fp8bench.files import (
    DamagedFileError,
    append_file_lines,
    convert_write_errors,
    digest_checksums,
    format_checksummed_line,
    parse_checksummed_line,
    read_file,
)
from fp8bench.model.codec import SCHEMA, MalformedValueError, decode, encode

T = TypeVar("T")
LineContent = dict[str, Any]
# Errors that content from other programs may cause when it is decoded. MalformedValueError is a ValueError.
_DECODING_ERRORS = (ValueError, KeyError, TypeError, RecursionError)
# How many characters of an error, and of a broken line, are shown.
_MAX_ERROR_CHARACTERS, _LINE_START_CHARACTERS = 120, 20
_SCHEMA_NUMBER_PATTERN = re.compile(r'{"schema": ?(\d+)\b')
# Files with checksums, except for runs and acknowledgements, which are verified separately.
CHECKSUMMED_FILE_PATTERNS = (
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
    """A line is valid, but this version of fp8bench does not know its kind."""


def find_files_by_name(word: str, names: Mapping[Path, Sequence[str]]) -> list[Path]:
    """Returns the files that have `word` as one of their names. If no file has this name, returns the files with a name
    that starts with `word`.
    """
    exactly_named_files = [path for path, file_names in names.items() if word in file_names]
    if exactly_named_files or not word:
        return exactly_named_files
    return [path for path, file_names in names.items() if _has_name_with_prefix(word, file_names)]


def _has_name_with_prefix(word: str, names: Sequence[str]) -> bool:
    return any(name.startswith(word) for name in names)


@dataclass(frozen=True)
class Log(Generic[T]):
    """An append-only file with one value per line.

    A line is `{"version": 1, KIND: value}`, where `kinds` maps KIND to a type. For the KIND '', a line is the value
    itself, without a version. The order of lines has no meaning, so files of two machines can be merged line by line.
    Lines that cannot be read are ignored.
    """

    path: Path
    kinds: Mapping[str, type[T]]
    called: str
    version: int | None = None
    remedy: str = "Make room, or choose another --store DIR."

    def decode_line_value(self, content: LineContent) -> T:
        """Decodes the value of a parsed line. Raises MalformedValueError for a different version or an invalid
        value.
        """
        if content.get("version") != self.version:
            raise MalformedValueError(
                f"has version {content.get('version')!r:.20} (this fp8bench reads {self.version})"
            )
        kind = next((kind for kind in self.kinds if not kind or kind in content), None)
        if kind is None:
            raise MalformedValueError(f"is not a valid {self.called}")
        try:
            return decode(self.kinds[kind], content[kind] if kind else content)
        except MalformedValueError as error:
            raise MalformedValueError(f"is not a valid {self.called} ({error})") from None

    def encode_value(self, value: T) -> LineContent:
        key = next(key for key, kind in self.kinds.items() if isinstance(value, kind))
        return {"version": self.version, key: encode(value)} if key else encode(value)

    def lines(self) -> tuple[list[T], list[str]]:
        """Returns the valid values in the file, and a reason for each line that was left out. If the file is missing,
        both lists are empty. Raises StoreError.
        """
        values = []
        troubles = []
        try:
            content = read_file(self.path)
        except FileNotFoundError:
            return [], []
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read ({error.strerror}).") from None
        for line_number, line in enumerate(content.split(b"\n"), 1):
            try:
                if line.strip():
                    values.append(self.decode_line_value(parse_checksummed_line(line)[0]))
            except DamagedFileError as error:
                troubles.append(f"line {line_number} was changed after it was written: {error}")
            except MalformedValueError as error:
                troubles.append(f"line {line_number} {error}")
            except _DECODING_ERRORS:
                troubles.append(f"line {line_number} is not JSON")
        return values, troubles

    def append(self, values: Iterable[T]) -> None:
        """Appends values and syncs the file to the disk. Raises StoreError."""
        with convert_write_errors(self.path, self.remedy):
            append_file_lines(self.path, [format_checksummed_line(self.encode_value(value)) for value in values])

    def merge(self, other_values: Iterable[T]) -> list[T]:
        """Appends the values that this log lacks, and returns them. Raises StoreError."""
        logged_values = set(self.lines()[0])
        unlogged_values = [value for value in dict.fromkeys(other_values) if value not in logged_values]
        if unlogged_values:
            self.append(unlogged_values)
        return unlogged_values


class BrokenFileLine(NamedTuple):
    """A damaged line: its number in the file, its first characters, and why it counts as damaged."""

    number: int
    start_text: str
    why: str


@dataclass(frozen=True)
class FileLines:
    """The lines of a file with their numbers, in the order in which they were written, and its broken lines. `troubles`
    are sentences about missing, duplicate or misplaced lines. `has_lost_line` is True if a written line is missing; a
    line that was only half written when the process was killed does not count as written. `has_checksummed_lines` is
    True if some line has a checksum and contains its number. Lines of files of older versions have neither.
    """

    lines: tuple[tuple[int, LineContent], ...]
    broken: tuple[BrokenFileLine, ...]
    troubles: tuple[str, ...]
    has_lost_line: bool
    has_checksummed_lines: bool
    sums: tuple[str, ...] = ()


class _ChecksummedLine(NamedTuple):
    """A line with a checksum. `stored_line_number` is the number that the line contains, `number` its present number in
    the file.
    """

    stored_line_number: int
    number: int
    content: LineContent
    sum: str


def read_file_lines(path: Path, called: str) -> FileLines:
    """Reads and parses the lines of a file. Raises RunNotFound if the file cannot be read. `called` is the kind of file
    in the error message, as 'the run file'.
    """
    try:
        return parse_file_lines(read_file(path))
    except OSError as error:
        raise RunNotFound(f"{called} {path} cannot be read ({error.strerror}).") from None


def parse_file_lines(content: bytes) -> FileLines:
    # 1. Separate lines with checksums, lines of older versions, and broken lines.
    broken_lines = []
    lines_without_checksum = []
    lines_with_checksum = []
    for line_number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line or line.isspace():
            continue
        try:
            content_of_line, checksum = parse_checksummed_line(line)
            if (written_line_number := content_of_line.pop("line", 0)) and checksum:
                lines_with_checksum.append(
                    _ChecksummedLine(written_line_number, line_number, content_of_line, checksum)
                )
            elif lines_with_checksum:  # versions that write no checksums never append to a file with checksums
                raise DamagedFileError("it has no checksum, unlike the lines before it")
            else:
                lines_without_checksum.append((line_number, content_of_line))
        except (ValueError, RecursionError) as error:
            broken_lines.append(
                BrokenFileLine(
                    line_number,
                    line[:_LINE_START_CHARACTERS].decode(errors="replace"),
                    str(error)[:_MAX_ERROR_CHARACTERS],
                )
            )
    # 2. Detect missing lines by the number in each line, and by the digest in the end line of a run.
    sorted_lines, troubles = _sort_lines(lines_with_checksum)
    troubles += _describe_missing_lines(sorted_lines, broken_lines)
    is_file_incomplete = bool(sorted_lines) and sorted_lines[-1].stored_line_number > len(sorted_lines)
    digest_check_results = [_is_digest_correct(sorted_lines, line) for line in sorted_lines]
    if not (is_file_incomplete or troubles or all(digest_check_results)):
        troubles, is_file_incomplete = ["its lines do not match the digest in its end line"], True
    lines = (*lines_without_checksum, *((line.number, line.content) for line in sorted_lines))
    return FileLines(
        lines,
        tuple(broken_lines),
        tuple(troubles),
        is_file_incomplete,
        bool(lines_with_checksum),
        tuple(line.sum for line in sorted_lines),
    )


def _sort_lines(lines: Sequence[_ChecksummedLine]) -> tuple[list[_ChecksummedLine], list[str]]:
    """Sorts lines into the order in which they were written, and leaves out duplicates. Also returns a sentence for
    each duplicate or misplaced line.
    """
    line_by_number: dict[int, _ChecksummedLine] = {}
    troubles = []
    highest_written_line_number = 0
    for line in lines:
        first_line = line_by_number.setdefault(line.stored_line_number, line)
        if first_line is not line:
            troubles.append(f"line {line.number} is a duplicate of line {first_line.number} and was left out")
        elif line.stored_line_number < highest_written_line_number:
            troubles.append(f"line {line.number} is behind lines that were written after it")
        highest_written_line_number = max(highest_written_line_number, line.stored_line_number)
    return sorted(line_by_number.values()), troubles


def _describe_missing_lines(lines: Sequence[_ChecksummedLine], broken_lines: Sequence[BrokenFileLine]) -> Iterator[str]:
    """Yields a sentence for each place where lines are missing."""
    previous_written_number = line_number = 0
    for line in lines:
        missing_line_count = (
            line.stored_line_number
            - previous_written_number
            - 1
            # A broken line between the two explains one missing number.
            - sum(line_number < broken_line.number < line.number for broken_line in broken_lines)
        )
        if missing_line_count > 0:
            verb_phrase = "line is" if missing_line_count == 1 else "lines are"
            yield f"before line {line.number} {missing_line_count} {verb_phrase} missing"
        previous_written_number, line_number = line.stored_line_number, line.number


def _is_digest_correct(lines: Sequence[_ChecksummedLine], last_line: _ChecksummedLine) -> bool:
    """Removes the digest of all earlier lines from the last line of a run, and returns whether the digest is correct.
    Returns True for a line without a digest.
    """
    digest = last_line.content.pop("digest", None) if "end" in last_line.content else None
    return digest is None or digest == digest_checksums(
        line.sum for line in lines if line.stored_line_number < last_line.stored_line_number
    )


def check_schema(content: LineContent, path: Path) -> None:
    """Raises StoreError if a newer version wrote the file, and MalformedValueError if its header names no version."""
    schema = content.get("schema")
    if type(schema) is not int:
        raise MalformedValueError("it has no schema version")
    if schema > SCHEMA:
        raise StoreError(
            f"{path} was written by a newer fp8bench (schema {schema}, this one reads {SCHEMA}). Upgrade it."
        )


def refuse_newer(file_lines: FileLines, path: Path) -> None:
    """Raises StoreError if a broken line names a newer schema version: such a line may be intact, because newer
    versions may compute checksums differently.
    """
    for broken in file_lines.broken:
        if (version := _SCHEMA_NUMBER_PATTERN.match(broken.start_text)) is not None:
            check_schema({"schema": int(version[1])}, path)


def read_header(file_lines: FileLines, path: Path, key: str, make_result: Callable[[Any], T]) -> T:
    """Returns the result of `make_result` for the content under `key` in the header of the file. Raises StoreError if
    the header is missing or wrong.
    """
    refuse_newer(file_lines, path)
    try:
        line_number, content = file_lines.lines[0] if file_lines.lines else (0, {})
        if line_number != 1:
            raise DamagedFileError(
                next((broken.why for broken in file_lines.broken if broken.number == 1), "it is empty")
            )
        check_schema(content, path)
        return make_result(content[key])
    except _DECODING_ERRORS as error:
        raise StoreError(
            f"{path} is not a {key}: its first line is not a header ({str(error)[:_MAX_ERROR_CHARACTERS]})."
        ) from None


def process_line_contents(
    file_lines: FileLines, process_content: Callable[[LineContent], None], except_line: int = 0
) -> list[str]:
    """Calls `process_content` with the content of each line of a file, except the line with the number `except_line`.
    Returns sentences about broken lines and about lines for which `process_content` raises an error, followed by
    `file_lines.troubles`.
    """
    troubles = [(broken.number, broken.why) for broken in file_lines.broken if broken.number != except_line]
    for line_number, content in file_lines.lines:
        if line_number == except_line:
            continue
        try:
            process_content(content)
        except UnknownKind:
            troubles.append((line_number, ""))
        except _DECODING_ERRORS as error:
            troubles.append((line_number, str(error)[:_MAX_ERROR_CHARACTERS]))
    sentences = []
    for line_number, reason in sorted(troubles):
        problem = f"is broken and was left out ({reason})" if reason else "is of an unknown kind and was left out"
        sentences.append(f"line {line_number} {problem}")
    return [*sentences, *file_lines.troubles]
