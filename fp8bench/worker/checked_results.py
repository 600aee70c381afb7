"""Checks the results of a workload's untimed passes, and converts them to plain values.

Otherwise an unreadable record, or one that brings torch into the parent, would fail far from its cause.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat, SupportsIndex

from fp8bench.model import TensorStatistics
from fp8bench.model.specs import reserved_name_reason


def errors_of(returned: object) -> dict[str, float]:
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"error() returned {_describe(returned)}; expected a mapping of names to numbers, like {{'loss': 0.1}}"
        )
    errors = {
        _text(name, "a name that error() gives"): _number(value, f"error()[{name!r}]")
        for name, value in returned.items()
    }
    # A name of one of our own figures would take its place in tables.
    if wrong := next(filter(None, map(reserved_name_reason, errors)), ""):
        raise ValueError(f"error() returned a number with a reserved name: {wrong}.")
    return errors


def statistics_of(returned: object) -> tuple[TensorStatistics, ...]:
    return tuple(map(_statistics, _iterable(returned, "statistics() returned", "a tuple of TensorStatistics")))


def wrong_of(returned: object) -> str:
    return _text(returned, "what check() returns ('' if nothing is wrong)")


def losses_of(returned: object) -> tuple[float, ...]:
    return tuple(_number(loss, "a loss") for loss in _iterable(returned, "losses() returned", "numbers, one a step"))


def gradient_error_of(returned: object) -> float | None:
    return None if returned is None else _number(returned, "what gradient_error() returns")


def _statistics(returned: object) -> TensorStatistics:
    if not isinstance(returned, TensorStatistics):
        raise TypeError(f"statistics() gave {_describe(returned)}; expected a TensorStatistics")
    outside, holds = [], ("outside of TensorStatistics holds", "a tuple")
    for row in _iterable(returned.outside, *holds):
        # Rows may be any sequence of three.
        match tuple(_iterable(row, *holds)):
            case (name, over, under):
                share = f"a share in outside of {returned.kind!r}"
                outside.append((_text(name, "a format in outside"), _number(over, share), _number(under, share)))
            case wrong:
                raise TypeError(
                    f"outside holds {_describe(wrong)}; expected (format, share above, share that becomes zero)"
                )
    return TensorStatistics(
        _text(returned.kind, "kind"),
        _text(returned.role, "role"),
        _count(returned.count),
        _number(returned.amax, "amax"),
        tuple(outside),
    )


def _iterable(value: Any, subject: str, expected: str) -> Iterable[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{subject} {_describe(value)}; expected {expected}")
    return value


def _text(value: object, subject: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{subject} is {_describe(value)}; expected a text")
    # A subclass of str may override methods, or come from torch.
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TypeError(f"{subject} is {text!r}, which holds half a surrogate pair; expected a text") from None
    return text


def _number(value: object, subject: str) -> float:
    """Returns a float. Arrays of one element are accepted; texts and booleans are not."""
    if not isinstance(value, str | bytes | bool) and isinstance(value, SupportsFloat | SupportsIndex):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise TypeError(f"{subject} is {_describe(value)}; expected a number")


def _count(number: object) -> int:
    value = _number(number, "count")
    if value < 0 or not value.is_integer():
        raise TypeError(f"count is {_describe(number)}; expected a whole number")
    return int(value)


def _describe(value: object) -> str:
    try:
        return f"{type(value).__name__} {value!r:.60}"
    except Exception:  # noqa: BLE001 - it is foreign code that makes the text
        return f"a {type(value).__name__}"
