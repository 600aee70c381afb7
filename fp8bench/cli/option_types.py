"""What a word of the command line may be: parsers of single values, each of which says what it expected."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

from fp8bench.files import is_address
from fp8bench.model.request import REQUEST_RULES, Rule
from fp8bench.units import bytes_of


def path(text: str) -> Path:
    """A path that a file system may have."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text is no path; give one, or leave the option out")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} has a zero byte, which no path may have")
    if is_address(text):
        raise argparse.ArgumentTypeError(f"{text!r:.200} is an address, and no path; mount it, and give the folder")
    return Path(text)


def plan_or_all(text: str) -> Path | None:
    """A plan's file; None for '-'."""
    return None if text == "-" else path(text)


def words(text: str) -> tuple[str, ...]:
    """Names with commas between."""
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name; give names with commas between, like a,b")
    return words


def axis(text: str) -> tuple[str, tuple[str, ...]]:
    """An axis and its values: 'AXIS=A,B'."""
    name, equals, values = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form AXIS=VALUE,VALUE")
    return name, words(values)


def layers(text: str) -> tuple[tuple[str, str], ...]:
    """Layers and their precisions: 'LAYER=DTYPE,...'."""
    split = (one.partition("=") for one in text.split(","))
    pairs = tuple((layer.strip(), dtype.strip()) for layer, _, dtype in split)
    if not all(map(all, pairs)):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form LAYER=DTYPE,LAYER=DTYPE")
    if len(dict(pairs)) != len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names a layer twice")
    return pairs


def precision_map(text: str) -> tuple[tuple[str, str], ...]:
    """The same, or a file of them: one on each line, what stands after # is a remark."""
    file = Path(text) if text and "=" not in text and "\0" not in text else None
    if file is None or not file.is_file():
        return layers(text)
    try:
        lines = [line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"the file {text!r} cannot be read ({error})") from None
    return layers(",".join(filter(None, lines)))


def whole(rule: Rule) -> Callable[[str], int]:
    """A whole number that a rule holds for."""

    return lambda text: int(_held(rule, text, int(text) if re.fullmatch("[0-9]{1,10}", text) else math.nan))


def number(rule: Rule) -> Callable[[str], float]:
    """A number that a rule holds for."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        return float(_held(rule, text, value))

    return parse


def text(rule: Rule) -> Callable[[str], str]:
    """A text that a rule holds for."""

    def parse(given: str) -> str:
        if not rule.holds(given):
            raise argparse.ArgumentTypeError(f"expected {rule.words}, got {given!r}")
        return given

    return parse


def factors(rule: Rule) -> Callable[[str], tuple[tuple[str, float], ...]]:
    """Names and numbers that a rule holds for: 'NAME=NUMBER,...'."""

    def parse(given: str) -> tuple[tuple[str, float], ...]:
        try:
            pairs = tuple((name, float(value)) for name, value in layers(given))
        except ValueError:
            pairs = ()
        if not pairs or not rule.holds(pairs):
            raise argparse.ArgumentTypeError(f"expected {rule.words}, got {given!r}")
        return pairs

    return parse


def share(text: str) -> float:
    """A share between nothing and all: '80%' or '0.8'."""
    number, percent = (text[:-1], 100.0) if text.endswith("%") else (text, 1.0)
    try:
        value = float(number) / percent
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; give one above 0 and below 1, like 80% or 0.8")
    return value


def size(text: str) -> int:
    """Bytes, from '2GiB' and its like."""
    try:
        value = bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None
    return int(_held(REQUEST_RULES["memory_limit"], text, value))


def _held(rule: Rule, text: str, value: float) -> float:
    if not rule.holds(value):
        raise argparse.ArgumentTypeError(f"expected {rule.words}, got {text!r}")
    return value


def price(text: str) -> float:
    """What an hour costs: '2.50/h' or '2.50'."""
    try:
        value = float(text.removesuffix("/h"))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no price of an hour; give a number above 0, like 2.50/h")
    return value


def commit(text: str) -> str:
    """The beginning of a commit's hash."""
    if not re.fullmatch(r"[0-9a-fA-F]{4,64}", text):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no commit; give at least four digits of its hash")
    return text.lower()
