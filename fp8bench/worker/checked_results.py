"""Checks the results of those workload functions that are not timed, and converts them to plain values.

An invalid result would otherwise cause an error far from its origin. A torch object would import torch in the parent
process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat, SupportsIndex

from fp8bench.model import TensorStatistics
from fp8bench.model.specs import explain_reserved_name


def check_error_figures(returned: object) -> dict[str, float]:
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"error() returned {_describe_value(returned)}; "
            "expected a mapping of names to numbers, like {'loss': 0.1}"
        )
    errors = {
        _require_text(name, "a name that error() gives"): _require_number(value, f"error()[{name!r}]")
        for name, value in returned.items()
    }
    # A reserved name would replace one of fp8bench's own figures in tables.
    if reserved_reason := next(filter(None, map(explain_reserved_name, errors)), ""):
        raise ValueError(f"error() returned a number with a reserved name: {reserved_reason}.")
    return errors


def check_statistics(returned: object) -> tuple[TensorStatistics, ...]:
    return tuple(
        map(
            _copy_tensor_statistics, _require_iterable(returned, "statistics() returned", "a tuple of TensorStatistics")
        )
    )


def require_check_text(returned: object) -> str:
    return _require_text(returned, "what check() returns ('' if nothing is wrong)")


def check_losses(returned: object) -> tuple[float, ...]:
    return tuple(
        _require_number(loss, "a loss")
        for loss in _require_iterable(returned, "losses() returned", "numbers, one a step")
    )


def check_gradient_error(returned: object) -> float | None:
    return None if returned is None else _require_number(returned, "what gradient_error() returns")


def _copy_tensor_statistics(returned: object) -> TensorStatistics:
    if not isinstance(returned, TensorStatistics):
        raise TypeError(f"statistics() gave {_describe_value(returned)}; expected a TensorStatistics")
    out_of_range_rows = []
    subject_and_expectation = ("outside of TensorStatistics holds", "a tuple")
    for row in _require_iterable(returned.outside, *subject_and_expectation):
        # Accept any iterable of a format's name and two numbers, not only a tuple.
        match tuple(_require_iterable(row, *subject_and_expectation)):
            case (name, over, under):
                share_subject = f"a share in TensorStatistics.outside of {returned.kind!r}"
                out_of_range_rows.append(
                    (
                        _require_text(name, "a format in outside"),
                        _require_number(over, share_subject),
                        _require_number(under, share_subject),
                    )
                )
            case wrong:
                raise TypeError(
                    f"TensorStatistics.outside holds {_describe_value(wrong)}; "
                    "expected (format, share above, share that becomes zero)"
                )
    return TensorStatistics(
        _require_text(returned.kind, "kind"),
        _require_text(returned.role, "role"),
        _require_count(returned.count),
        _require_number(returned.amax, "amax"),
        tuple(out_of_range_rows),
    )


def _require_iterable(value: Any, subject: str, expected: str) -> Iterable[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{subject} {_describe_value(value)}; expected {expected}")
    return value


def _require_text(value: object, subject: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{subject} is {_describe_value(value)}; expected a text")
    # Make a plain text: a subclass of str may override methods, or be defined by torch.
    plain_text = str.__str__(value)
    try:
        plain_text.encode()
    except UnicodeEncodeError:
        raise TypeError(f"{subject} is {plain_text!r}, which holds half a surrogate pair; expected a text") from None
    return plain_text


def _require_number(value: object, subject: str) -> float:
    """Converts a number, or an array of one element, to a float. Raises TypeError for texts and booleans."""
    if not isinstance(value, str | bytes | bool) and isinstance(value, SupportsFloat | SupportsIndex):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise TypeError(f"{subject} is {_describe_value(value)}; expected a number")


def _require_count(number: object) -> int:
    value = _require_number(number, "count")
    if value < 0 or not value.is_integer():
        raise TypeError(f"count is {_describe_value(number)}; expected a whole number")
    return int(value)


def _describe_value(value: object) -> str:
    try:
        return f"{type(value).__name__} {value!r:.60}"
    except Exception:  # noqa: BLE001 - it is foreign code that makes the text
        return f"a {type(value).__name__}"
