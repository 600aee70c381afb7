"""Parses the values of options on the command line, and values that Python callers pass.

An error names the form that the value should have. Values from Python that are not parsed here are checked by the
request.
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
from fp8bench.report.data.loggers import DEFAULT_DESTINATIONS, LogTarget
from fp8bench.units import parse_number, parse_number_or_text, parse_size

T = TypeVar("T")
_SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600}
_MAX_DURATION_SECONDS = 7 * 24 * 3600
_ADDRESS_START_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_url(text: str) -> bool:
    """Returns whether the text is a URL like s3://bucket. As a path, it would create a folder called `s3:`."""
    return _ADDRESS_START_PATTERN.match(text) is not None


def path(text: str) -> Path:
    # Refuse an empty text, which pathlib would take for the current folder.
    if not text:
        raise argparse.ArgumentTypeError("an empty text is not a path; give one, or leave the option out")
    # Refuse a zero byte here, because the error of the operating system would not name the option.
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} has a zero byte, which paths cannot contain")
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text!r:.200} is an address, not a path; mount it, and give the folder")
    return Path(text)


def parse_log_target(text: str) -> LogTarget:
    """Parses 'tensorboard[:DIR]' or 'wandb[:PROJECT]'."""
    kind, _, log_destination = text.partition(":")
    if kind not in DEFAULT_DESTINATIONS:
        raise argparse.ArgumentTypeError(f"expected tensorboard[:DIR] or wandb[:PROJECT], got {text!r:.80}")
    return LogTarget(kind, log_destination or DEFAULT_DESTINATIONS[kind])


def parse_plan_or_all(text: str) -> Path | None:
    """Returns the path of a fleet plan's file. Returns None for '-', which stands for all runs."""
    return None if text == "-" else path(text)


def words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    # Refuse an empty name, because a trailing comma is most often a typing mistake.
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name; give names with commas between, like a,b")
    return words


def parse_axis(text: str) -> tuple[str, tuple[str, ...]]:
    name, separator, values = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form AXIS=VALUE,VALUE")
    return name, words(values)


def parse_layers(text: str) -> tuple[tuple[str, str], ...]:
    partitioned_words = (word.partition("=") for word in text.split(","))
    layer_dtype_pairs = tuple((layer.strip(), dtype.strip()) for layer, _, dtype in partitioned_words)
    if not all(map(all, layer_dtype_pairs)):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form LAYER=DTYPE,LAYER=DTYPE")
    # Refuse a layer with several entries: the last one would silently replace the others.
    if len(dict(layer_dtype_pairs)) != len(layer_dtype_pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names a layer twice")
    return layer_dtype_pairs


def precision_map(text: str) -> tuple[tuple[str, str], ...]:
    """Parses LAYER=DTYPE pairs from a text, or from a file that the text names. The file has one pair per line, and
    comments after #.
    """
    # Read a text with '=' as a list of pairs, even if a file has that name.
    file = Path(text) if text and "=" not in text and "\0" not in text else None
    if file is None or not os.path.lexists(file):
        return parse_layers(text)
    try:
        lines = [line.partition("#")[0].strip() for line in read_file(file).decode().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"the file {text!r} cannot be read ({reason})") from None
    return parse_layers(",".join(filter(None, lines)))


def whole(rule: Rule) -> Callable[[str], int]:
    # int() alone would also accept texts like ' 5', '1_000' and '+5'.
    return lambda text: int(
        _check_option_value(rule, text, int(text) if re.fullmatch("[0-9]{1,10}", text) else math.nan)
    )


def number(rule: Rule) -> Callable[[str], float]:
    return lambda text: _check_option_value(rule, text, parse_number(text))


def number_or_text_parser(rule: Rule) -> Callable[[str], float | str]:
    return lambda text: _check_option_value(rule, text, parse_number_or_text(text))


def text_parser(rule: Rule) -> Callable[[str], str]:
    return lambda text: _check_option_value(rule, text, text)


def factors_parser(rule: Rule) -> Callable[[str], tuple[tuple[str, float], ...]]:
    """Returns a parser of texts like 'NAME=NUMBER,...', which rejects pairs that break the rule."""
    return lambda text: _check_option_value(
        rule, text, tuple((name, parse_number(value)) for name, value in parse_layers(text))
    )


def memory(text: str) -> int:
    if text == ALL_MEMORY_WORD:
        return ALL_MEMORY
    try:
        value = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None
    # In a request, 0 means all memory (ALL_MEMORY). If the user typed 0, use a number that the rule rejects instead.
    return _check_option_value(REQUEST_RULES["memory_limit"], text, value or ALL_MEMORY - 1)


def _check_option_value(rule: Rule, text: str, value: T) -> T:
    if not rule.holds(value):
        raise argparse.ArgumentTypeError(f"expected {rule.words}, got {text!r}")
    return value


def parse_duration(text: str) -> float:
    """Parses a duration in seconds, as '90s', '10m', '1.5h' or a bare number."""
    unit_seconds = _SECONDS_PER_UNIT.get(text[-1:])
    seconds = parse_number(text[:-1]) * unit_seconds if unit_seconds else parse_number(text)
    # Written as `not 0 <= seconds`, the condition is also True for NaN.
    if not 0 <= seconds < _MAX_DURATION_SECONDS:
        raise argparse.ArgumentTypeError(f"expected a time below a week, like 90s, 10m or 1h, got {text!r}")
    return seconds


class Sessions(NamedTuple):
    """How many times a run is measured, each time in fresh processes, and the pause between two times in seconds."""

    runs: int = 1
    pause_seconds: float = 0.0


def parse_sessions(text: str) -> Sessions:
    """Parses '3', or '3@10m' for a pause of ten minutes between two sessions."""
    runs, separator, pause_text = text.partition("@")
    return Sessions(whole(whole_number(1, 100))(runs), parse_duration(pause_text) if separator else 0.0)


def split_names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(","))
    # Return any other value unchanged: the request rejects it with a message that names the field.
    return cast(tuple[str, ...], tuple(value) if isinstance(value, Iterable) else value)


def as_name_value_pairs(values: object, parse: Callable[[Any], Any] = lambda value: value) -> Any:
    if isinstance(values, Mapping):
        return tuple((name, parse(value)) for name, value in values.items())
    return () if values is None else values


def make_text_tuple(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (str(value),)
    return tuple(str(part) for part in value)


def memory_as_bytes(value: Any) -> Any:
    # Return an invalid text unchanged: the request rejects it.
    with suppress(argparse.ArgumentTypeError):
        return memory(value) if isinstance(value, str) else value
    return value


def parse_folder_option(name: str, value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise UsageError(f"{name} cannot be {value!r:.80}: give a folder.")
    # Refuse a URL: it would create a folder called 's3:', where nobody would look for a store.
    if is_url(str(value)):
        raise UsageError(f"{name} cannot be {value!r:.80}, which is an address: mount it, and give the folder.")
    return Path(value)
