"""Checks what a workload's untimed passes return, and turns it into plain values.

Otherwise a record that cannot be read back, or that brings torch into the parent, would fail far from its cause.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat, SupportsIndex

from fp8bench.model import TensorStatistics
from fp8bench.model.specs import why_reserved


def errors_of(given: object) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"error() returned {_shown(given)}; expected a mapping of names to numbers, like {{'loss': 0.1}}"
        )
    errors = {
        _text(name, "a name that error() gives"): _number(value, f"error()[{name!r}]") for name, value in given.items()
    }
    if wrong := next(filter(None, map(why_reserved, errors)), ""):
        raise ValueError(f"error() gives a number whose name is not free: {wrong}.")
    return errors


def statistics_of(given: object) -> tuple[TensorStatistics, ...]:
    return tuple(map(_statistics, _iterable(given, "statistics() returned", "a tuple of TensorStatistics")))


def wrong_of(given: object) -> str:
    return _text(given, "what check() returns ('' if nothing is wrong)")


def losses_of(given: object) -> tuple[float, ...]:
    return tuple(_number(loss, "a loss") for loss in _iterable(given, "losses() returned", "numbers, one a step"))


def gradient_error_of(given: object) -> float | None:
    return None if given is None else _number(given, "what gradient_error() returns")


def _statistics(given: object) -> TensorStatistics:
    if not isinstance(given, TensorStatistics):
        raise TypeError(f"statistics() gave {_shown(given)}; expected a TensorStatistics")
    outside, holds = [], ("outside of TensorStatistics holds", "a tuple")
    for row in _iterable(given.outside, *holds):
        match tuple(_iterable(row, *holds)):
            case (name, over, under):
                share = f"a share in outside of {given.kind!r}"
                outside.append((_text(name, "a format in outside"), _number(over, share), _number(under, share)))
            case wrong:
                raise TypeError(
                    f"outside holds {_shown(wrong)}; expected (format, share above, share that becomes zero)"
                )
    return TensorStatistics(
        _text(given.kind, "kind"),
        _text(given.role, "role"),
        _count(given.count),
        _number(given.amax, "amax"),
        tuple(outside),
    )


def _iterable(given: Any, said: str, expected: str) -> Iterable[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{said} {_shown(given)}; expected {expected}")
    return given


def _text(given: object, what: str) -> str:
    if not isinstance(given, str):
        raise TypeError(f"{what} is {_shown(given)}; expected a text")
    text = str.__str__(given)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TypeError(f"{what} is {text!r}, which holds half a surrogate pair; expected a text") from None
    return text


def _number(given: object, what: str) -> float:
    """Returns a float. Arrays of one element are numbers too; texts and truth values are not."""
    if not isinstance(given, str | bytes | bool) and isinstance(given, SupportsFloat | SupportsIndex):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(given)
    raise TypeError(f"{what} is {_shown(given)}; expected a number")


def _count(given: object) -> int:
    value = _number(given, "count")
    if value < 0 or not value.is_integer():
        raise TypeError(f"count is {_shown(given)}; expected a whole number")
    return int(value)


def _shown(given: object) -> str:
    try:
        return f"{type(given).__name__} {given!r:.60}"
    except Exception:  # noqa: BLE001 - it is foreign code that makes the text
        return f"a {type(given).__name__}"
