"""Files of JSON lines, whatever they keep: found by a word, headed by a schema, read without what is broken in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fp8bench.errors import RunNotFound, StoreError
from fp8bench.model.codec import SCHEMA, Malformed

T = TypeVar("T")
Content = dict[str, Any]
# What foreign content raises on its way to a value; Malformed is a ValueError.
_BROKEN = (ValueError, KeyError, TypeError, RecursionError)


class UnknownKind(ValueError):
    """A line that is well formed and of no kind that this version knows."""


def fitting(word: str, names: Mapping[Path, Sequence[str]]) -> list[Path]:
    """The files that have the word as a name; if none has, those of which a name begins with it."""
    whole = [path for path, own in names.items() if word in own]
    return whole or [path for path, own in names.items() if word and any(one.startswith(word) for one in own)]


def lines_of(path: Path, called: str) -> list[str]:
    """The lines of a file. Raises RunNotFound where it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8-sig", errors="replace").split("\n")
    except OSError as error:
        raise RunNotFound(f"{called} {path} cannot be read ({error.strerror}).") from None


def object_of(line: str) -> Content:
    """A line as a JSON object."""
    content = json.loads(line)
    if not isinstance(content, dict):
        raise Malformed("expected an object")
    return content


def check_schema(content: Content, path: Path) -> None:
    """Raises StoreError where a newer version has written a file, Malformed where its header says none."""
    schema = content.get("schema")
    if type(schema) is not int:
        raise Malformed("it has no schema version")
    if schema > SCHEMA:
        raise StoreError(
            f"{path} was written by a newer fp8bench (schema {schema}, this one reads {SCHEMA}). Upgrade it."
        )


def headed(line: str, path: Path, what: str, made: Callable[[Any], T]) -> T:
    """What is `made` of a first line's content under `what`; raises StoreError where it is no header."""
    try:
        content = object_of(line)
        check_schema(content, path)
        return made(content[what])
    except _BROKEN as error:
        raise StoreError(f"{path} is no {what}: its first line is no header ({str(error)[:120]}).") from None


def take_lines(lines: Iterable[tuple[int, str]], take: Callable[[Content], None]) -> list[str]:
    """Hand over what each line has; what is wrong with those that were left out."""
    troubles = []
    for number, line in lines:
        if not line.strip():
            continue
        try:
            take(object_of(line))
        except UnknownKind:
            troubles.append(f"line {number} is of a kind that this version does not know, and was left out")
        except _BROKEN as error:
            troubles.append(f"line {number} is broken and was left out ({str(error)[:120]})")
    return troubles
