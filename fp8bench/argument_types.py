"""What a word of the command line may be: parsers of single values, each of which says what it expected."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from fp8bench.units import bytes_of
from fp8bench.units import size as show_size

MOST_SECONDS = 1e7
MOST_BYTES = 100 << 40


def path(text: str) -> Path:
    """A path that a file system may have."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text is no path; give one, or leave the option out")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} has a zero byte, which no path may have")
    return Path(text)


def words(option: str) -> Callable[[str], tuple[str, ...]]:
    """Names with commas between."""

    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word.strip() for word in text.split(","))
        if not all(words):
            raise argparse.ArgumentTypeError(f"{text!r} has an empty name; give names with commas between, like a,b")
        return words

    parse.__name__ = option
    return parse


def axis(text: str) -> tuple[str, tuple[str, ...]]:
    """An axis and its values: 'AXIS=A,B'."""
    name, equals, values = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form AXIS=VALUE,VALUE")
    return name, words("--set")(values)


def renaming(text: str) -> tuple[str, str]:
    """Two interpreters: 'OLD=NEW'."""
    old, equals, new = text.partition("=")
    if not old or not new or not equals or old == new:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form OLD=NEW, two different interpreters")
    return old, new


def layers(text: str) -> tuple[tuple[str, str], ...]:
    """Layers and their precisions: 'LAYER=DTYPE,...'."""
    pairs = [tuple(part.strip() for part in one.split("=", 1)) for one in text.split(",")]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form LAYER=DTYPE,LAYER=DTYPE")
    if len({pair[0] for pair in pairs}) != len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names a layer twice")
    return tuple((pair[0], pair[1]) for pair in pairs)


def whole(option: str, low: int = 1, high: int = (1 << 31) - 1) -> Callable[[str], int]:
    """A whole number within bounds."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and low <= int(text) <= high):
            most = f" to {high}" if high < 1 << 30 else ""
            raise argparse.ArgumentTypeError(f"expected a whole number from {low}{most}, got {text!r}")
        return int(text)

    parse.__name__ = option
    return parse


def percent(text: str) -> float:
    """A percentage below 100."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"expected a percentage from 0 to below 100, got {text!r}")
    return value


def seconds(text: str) -> float:
    """A number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return value


def commit(text: str) -> str:
    """The beginning of a commit's hash."""
    if not re.fullmatch(r"[0-9a-fA-F]{4,64}", text):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no commit; give at least four digits of its hash")
    return text.lower()


def size(text: str) -> int:
    """Bytes, from '2GiB' and its like."""
    try:
        value = bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None
    if not 0 < value <= MOST_BYTES:
        raise argparse.ArgumentTypeError(f"expected a size above 0 and up to {show_size(MOST_BYTES)}, got {text!r}")
    return value
