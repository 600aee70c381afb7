"""Parsers of single words of the command line, and of values passed from Python.

Each error names the expected form. The request checks other values from Python.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from fp8bench.errors import UsageError
from fp8bench.files import read_file
from fp8bench.model.request import ALL_MEMORY, ALL_MEMORY_WORD, REQUEST_RULES, Rule, whole_number
from fp8bench.report.data.loggers import DEFAULT_PLACES, LogTarget
from fp8bench.units import bytes_of, number_of, number_or_text_of

T = TypeVar("T")
_UNITS = {"s": 1, "m": 60, "h": 3600}
_LONGEST = 7 * 24 * 3600
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_address(text: str) -> bool:
    """Whether the text is not a local path, like s3://bucket, which would create a folder called `s3:`."""
    return _ADDRESS.match(text) is not None


def path(text: str) -> Path:
    # pathlib reads an empty text as the current folder.
    if not text:
        raise argparse.ArgumentTypeError("an empty text is not a path; give one, or leave the option out")
    # The system's error would not name the option.
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} has a zero byte, which paths cannot contain")
    if is_address(text):
        raise argparse.ArgumentTypeError(f"{text!r:.200} is an address, not a path; mount it, and give the folder")
    return Path(text)


def log_target(text: str) -> LogTarget:
    """Parses 'tensorboard[:DIR]' or 'wandb[:PROJECT]'."""
    kind, _, place = text.partition(":")
    if kind not in DEFAULT_PLACES:
        raise argparse.ArgumentTypeError(f"expected tensorboard[:DIR] or wandb[:PROJECT], got {text!r:.80}")
    return LogTarget(kind, place or DEFAULT_PLACES[kind])


def plan_or_all(text: str) -> Path | None:
    """Returns the path of a plan's file; None for '-'."""
    return None if text == "-" else path(text)


def words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    # A trailing comma is more often a slip than an empty name.
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name; give names with commas between, like a,b")
    return words


def axis(text: str) -> tuple[str, tuple[str, ...]]:
    name, equals, values = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form AXIS=VALUE,VALUE")
    return name, words(values)


def layers(text: str) -> tuple[tuple[str, str], ...]:
    split = (word.partition("=") for word in text.split(","))
    pairs = tuple((layer.strip(), dtype.strip()) for layer, _, dtype in split)
    if not all(map(all, pairs)):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form LAYER=DTYPE,LAYER=DTYPE")
    # Otherwise the second one would win silently.
    if len(dict(pairs)) != len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names a layer twice")
    return pairs


def precision_map(text: str) -> tuple[tuple[str, str], ...]:
    """Parses LAYER=DTYPE pairs, or a file with one per line and comments after #."""
    # A text with '=' is a map, even if a file has that name.
    file = Path(text) if text and "=" not in text and "\0" not in text else None
    if file is None or not os.path.lexists(file):
        return layers(text)
    try:
        lines = [line.partition("#")[0].strip() for line in read_file(file).decode().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"the file {text!r} cannot be read ({reason})") from None
    return layers(",".join(filter(None, lines)))


def whole(rule: Rule) -> Callable[[str], int]:
    return lambda text: int(_held(rule, text, int(text) if re.fullmatch("[0-9]{1,10}", text) else math.nan))


def number(rule: Rule) -> Callable[[str], float]:
    return lambda text: _held(rule, text, number_of(text))


def number_or_text(rule: Rule) -> Callable[[str], float | str]:
    return lambda text: _held(rule, text, number_or_text_of(text))


def text(rule: Rule) -> Callable[[str], str]:
    return lambda word: _held(rule, word, word)


def factors(rule: Rule) -> Callable[[str], tuple[tuple[str, float], ...]]:
    """Returns a parser of 'NAME=NUMBER,...' that checks the rule."""
    return lambda text: _held(rule, text, tuple((name, number_of(value)) for name, value in layers(text)))


def memory(text: str) -> int:
    if text == ALL_MEMORY_WORD:
        return ALL_MEMORY
    try:
        value = bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None
    # 0 would mean ALL_MEMORY: the rule gets a number that it rejects.
    return _held(REQUEST_RULES["memory_limit"], text, value or ALL_MEMORY - 1)


def _held(rule: Rule, text: str, value: T) -> T:
    if not rule.holds(value):
        raise argparse.ArgumentTypeError(f"expected {rule.words}, got {text!r}")
    return value


def _float(text: str) -> float:
    """Returns NaN, which fails every rule, if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def duration(text: str) -> float:
    """Parses seconds: '90s', '10m', '1.5h', or a bare number."""
    unit = text[-1:] if text[-1:] in _UNITS else ""
    seconds = _float(text.removesuffix(unit)) * _UNITS.get(unit, 1)
    # This also rejects NaN, which fails every comparison.
    if not 0 <= seconds < _LONGEST:
        raise argparse.ArgumentTypeError(f"expected a time below a week, like 90s, 10m or 1h, got {text!r}")
    return seconds


class Sessions(NamedTuple):
    """The number of runs in fresh processes, and the pause between them in seconds."""

    runs: int = 1
    pause: float = 0.0


def sessions(text: str) -> Sessions:
    """Parses '3', or '3@10m' for ten minutes between two sessions."""
    runs, at, pause = text.partition("@")
    return Sessions(whole(whole_number(1, 100))(runs), duration(pause) if at else 0.0)


def names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(","))
    # Other values are passed on: the request rejects them and names the field.
    return cast(tuple[str, ...], tuple(value) if isinstance(value, Iterable) else value)


def pairs(value_given: object, parse: Callable[[Any], Any] = lambda value: value) -> Any:
    if isinstance(value_given, Mapping):
        return tuple((name, parse(value)) for name, value in value_given.items())
    return () if value_given is None else value_given


def texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (str(value),)
    return tuple(str(part) for part in value)


def plain(path: Any) -> Any:
    return str(path) if isinstance(path, Path) else path


def in_bytes(value: Any) -> Any:
    # Invalid text is passed on, and the request refuses it.
    with suppress(argparse.ArgumentTypeError):
        return memory(value) if isinstance(value, str) else value
    return value


def folder(name: str, value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise UsageError(f"{name} cannot be {value!r:.80}: give a folder.")
    # Nobody would find a store in a folder called 's3:'.
    if is_address(str(value)):
        raise UsageError(f"{name} cannot be {value!r:.80}, which is an address: mount it, and give the folder.")
    return Path(value)
