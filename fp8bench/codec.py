"""Frozen dataclasses to plain JSON values and back, by their type hints.

Unknown keys are ignored and missing ones take their defaults, so that a newer minor version's file still reads. Only
the kinds of types that model.py uses are known: dataclasses, enums, tuples, mappings of scalars, and None.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

# The version of what is kept of a run, and printed as JSON. It is raised when an old reader would read a new one wrong.
SCHEMA = 1

T = TypeVar("T")


class Malformed(ValueError):
    """A value does not fit its type."""


def encode(value: Any) -> Any:
    """Plain JSON values. A number that JSON has no word for (inf, NaN) becomes its name as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        if set(map(type, value)) <= {int}:
            return list(value)  # raw samples: many, and worth a short way
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def decode(kind: type[T], plain: Any) -> T:
    """A value of `kind` from plain JSON values; raises Malformed with the place."""
    return cast(T, _decode(kind, plain, kind.__name__))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode(kind: Any, plain: Any, place: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(kind), plain, place)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), plain, place)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(plain, dict):
            raise Malformed(f"{place}: expected an object")
        inside = typing.get_args(kind)[1]
        return {key: _decode(inside, item, f"{place}.{key}") for key, item in plain.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(cast(type, kind), plain, place)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(plain)
        except ValueError:
            raise Malformed(f"{place}: {plain!r} is no {kind.__name__}") from None
    return _decode_scalar(kind, plain, place)


def _decode_dataclass(kind: type, plain: Any, place: str) -> Any:
    if not isinstance(plain, dict):
        raise Malformed(f"{place}: expected an object")
    hints = _hints(kind)
    values = {
        field.name: _decode(hints[field.name], plain[field.name], f"{place}.{field.name}")
        for field in dataclasses.fields(kind)
        if field.name in plain
    }
    try:
        return kind(**values)
    except TypeError as error:
        raise Malformed(f"{place}: {error}") from None


def _decode_tuple(inside: tuple[Any, ...], plain: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(plain, list):
        raise Malformed(f"{place}: expected a list")
    if len(inside) == 2 and inside[1] is Ellipsis:
        if inside[0] is int and set(map(type, plain)) <= {int}:
            return tuple(plain)  # raw samples: many, and worth a short way
        return tuple(_decode(inside[0], item, f"{place}[]") for item in plain)
    if len(inside) != len(plain):
        raise Malformed(f"{place}: expected {len(inside)} items, found {len(plain)}")
    return tuple(_decode(one, item, f"{place}[]") for one, item in zip(inside, plain, strict=True))


def _decode_union(kinds: tuple[Any, ...], plain: Any, place: str) -> Any:
    if plain is None and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is type(plain):
            return plain
    for kind in kinds:
        if kind is not type(None):
            try:
                return _decode(kind, plain, place)
            except Malformed:
                continue
    raise Malformed(f"{place}: {plain!r} fits none of {kinds}")


def _decode_scalar(kind: Any, plain: Any, place: str) -> Any:
    if kind is float and isinstance(plain, int | float) and not isinstance(plain, bool):
        try:
            return float(plain)
        except OverflowError:
            raise Malformed(f"{place}: a whole number too large for a float") from None
    if kind is float and plain in ("inf", "-inf", "nan"):
        return float(plain)
    if kind is Any or type(plain) is kind:
        return plain
    raise Malformed(f"{place}: expected {getattr(kind, '__name__', kind)}, found {plain!r:.60}")
