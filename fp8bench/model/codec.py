"""Frozen dataclasses to plain JSON values and back, by their type hints.

Unknown keys are ignored and missing ones take their defaults, so files of other versions can be read;
`collect_ignored_names` collects their names. Known types: dataclasses, enums, tuples, mappings of scalars, and None.
"""

from __future__ import annotations

import dataclasses
import itertools
import marshal
import math
import pickle
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from fp8bench.errors import UsageError

# The version of stored runs, and of runs printed as JSON. Raised when an old reader would misread a new one.
SCHEMA = 1
_INTEGERS = {int}
_LISTS = {list}
# Types whose values repeat in every run of a suite, and the number of values of each that are remembered.
_REPEATED = {"Request", "Plan", "DeviceFacts", "Case", "Support", "Work", "Segments"}
_MOST_REMEMBERED = 1000

T = TypeVar("T")
_ignored: ContextVar[set[str]] = ContextVar("_ignored")


class Malformed(ValueError):
    """A value does not fit its type."""


def encode(value: Any) -> Any:
    """Plain JSON values. Infinity and NaN, which JSON lacks, become text."""
    if isinstance(value, str):
        return str.__str__(value)  # of a metric its name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        if set(map(type, value)) <= _INTEGERS:
            return list(value)  # raw samples: many, and worth a short way
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def decode(kind: type[T], plain: Any) -> T:
    """A value of `kind` from plain JSON values; raises Malformed with the place."""
    try:
        return cast(T, _decoder(cast(Any, kind))(plain))
    except Malformed as error:
        raise Malformed(f"{kind.__name__}{error}") from None


@contextmanager
def collect_ignored_names() -> Iterator[set[str]]:
    """Collects the names of fields that `decode` does not know and ignores, though they hold something."""
    names: set[str] = set()
    token = _ignored.set(names)
    try:
        yield names
    finally:
        _ignored.reset(token)


@cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
    """Builds the function that decodes one type; cached, because a run has hundreds of thousands of values.

    That function raises Malformed with the place from there on, and callers put their own part before it.
    """
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _union(typing.get_args(kind))
    if origin is tuple:
        return _tuple(typing.get_args(kind))
    # Containers before classes, because a mapping is also a class.
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(typing.get_args(kind)[1])
    if dataclasses.is_dataclass(kind):
        decode_one = _dataclass(cast(type, kind))
        # Frequent values are decoded once and shared, which they can be because they are frozen.
        return _remembering(decode_one) if cast(type, kind).__name__ in _REPEATED else decode_one
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind)
    return _float if kind is float else _scalar(kind)


def _mapping(inside: Any) -> Callable[[Any], Any]:
    decode_one = _decoder(inside)

    def decode(plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise Malformed(": expected an object")
        values = {}
        for key, item in plain.items():
            try:
                values[key] = decode_one(item)
            # The path grows from the inside out, one name a level.
            except Malformed as error:
                raise Malformed(f".{key}{error}") from None
        return values

    return decode


def _remembering(decode: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes `decode` return one frozen value for equal input, bit for bit: 1, 1.0 and True differ."""
    cache: dict[bytes, tuple[Any, set[str]]] = {}

    def decode_once(plain: Any) -> Any:
        try:
            key = marshal.dumps(plain, 2)  # a later version writes one text in several ways
        except ValueError:  # too deep
            return decode(plain)
        if key not in cache:
            # Cleared as a whole when full: a run repeats its values within a few records, so that little is lost.
            if len(cache) >= _MOST_REMEMBERED:
                cache.clear()
            with collect_ignored_names() as names:
                cache[key] = decode(plain), names
        value, names = cache[key]
        if names:
            _ignored.get(set()).update(names)
        return value

    return decode_once


def _taken_as_it_is(kind: Any) -> frozenset[type]:
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    return frozenset(part for part in kinds if part in (str, int, float, bool, type(None)))


def _dataclass(kind: type) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    decoders = [
        (field.name, _taken_as_it_is(hints[field.name]), _decoder(hints[field.name]))
        for field in dataclasses.fields(kind)
    ]
    names = {name: None for name, _, _ in decoders}
    lacks = dataclasses.MISSING
    required = dict.fromkeys(
        field.name for field in dataclasses.fields(kind) if field.default is lacks and field.default_factory is lacks
    )
    defaults = {field.name: field.default for field in dataclasses.fields(kind) if field.default is not lacks}
    # Values without checks are filled in directly: a run has thousands, and frozen ones are slow to make.
    plain_defaults = len(defaults) + len(required) == len(decoders)
    quick = plain_defaults and not hasattr(kind, "__post_init__") and not hasattr(kind, "__slots__")

    def decode(plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise Malformed(": expected an object")
        # Newer versions may have added fields, and older ones may lack them: both must be read.
        is_complete = plain.keys() == names.keys()
        values = plain.copy() if is_complete else {name: plain[name] for name in names if name in plain}
        if len(values) < len(plain):
            _ignored.get(set()).update(name for name in plain.keys() - names.keys() if plain[name])
        for name, as_it_is, decode_one in decoders:
            if (is_complete or name in values) and type(item := values[name]) not in as_it_is:
                try:
                    values[name] = decode_one(item)
                except Malformed as error:
                    raise Malformed(f".{name}{error}") from None
        if quick and required.keys() <= values.keys():
            instance: Any = object.__new__(kind)
            instance.__dict__.update(values if is_complete else defaults | values)
            return instance
        try:
            # The class checks itself; its message gets the path to the value.
            return kind(**values)
        except UsageError as error:
            raise Malformed(f": {error}") from None
        except TypeError as error:  # a field without a default
            lacking = next((name for name in required if name not in values), "")
            raise Malformed(f": the field {lacking!r} is missing" if lacking else f": {error}") from None

    return decode


def _tuple(inside: tuple[Any, ...]) -> Callable[[Any], Any]:
    many = len(inside) == 2 and inside[1] is Ellipsis
    decoders = [_decoder(kind) for kind in inside if kind is not Ellipsis]
    of_numbers = many and inside[0] is int
    of_lists_of_numbers = many and inside[0] == tuple[int, ...]

    def decode(plain: Any) -> Any:
        if not isinstance(plain, list):
            raise Malformed(": expected a list")
        if many and not plain:
            return ()
        if of_numbers and set(map(type, plain)) <= _INTEGERS:
            return tuple(plain)  # raw samples: many, and worth a short way
        lists = of_lists_of_numbers and set(map(type, plain)) <= _LISTS
        if lists and set(map(type, itertools.chain.from_iterable(plain))) <= _INTEGERS:
            return tuple(map(tuple, plain))
        if not many and len(decoders) != len(plain):
            raise Malformed(f": expected {len(decoders)} items, found {len(plain)}")
        try:
            if many:
                return tuple(map(decoders[0], plain))
            return tuple(decode_one(item) for decode_one, item in zip(decoders, plain, strict=True))
        except Malformed as error:
            raise Malformed(f"[]{error}") from None

    return decode


def _union(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    plain_kinds = tuple(kind for kind in kinds if isinstance(kind, type))
    decoders = [_decoder(kind) for kind in kinds if kind is not type(None)]

    def decode(plain: Any) -> Any:
        if type(plain) in plain_kinds:
            return plain
        # The first kind that fits is meant; kinds of one union differ in what they accept.
        for decode_one in decoders:
            try:
                return decode_one(plain)
            except Malformed:
                continue
        names = " or ".join("null" if kind is type(None) else getattr(kind, "__name__", str(kind)) for kind in kinds)
        raise Malformed(f": expected {names}, found {plain!r:.60}")

    return decode


def _enum(kind: type[Enum]) -> Callable[[Any], Any]:
    def decode(plain: Any) -> Any:
        try:
            return kind(plain)
        except ValueError:
            raise Malformed(f": {plain!r} is no {kind.__name__}") from None

    return decode


def _float(plain: Any) -> float:
    if type(plain) is float:
        return plain
    if isinstance(plain, int) and not isinstance(plain, bool):
        try:
            return float(plain)
        except OverflowError:
            raise Malformed(": a whole number too large for a float") from None
    # JSON has no such numbers, so they are stored as text.
    if plain in ("inf", "-inf", "nan"):
        return float(plain)
    raise Malformed(f": expected float, found {plain!r:.60}")


def _scalar(kind: Any) -> Callable[[Any], Any]:
    def decode(plain: Any) -> Any:
        if kind is Any or type(plain) is kind:
            return plain
        raise Malformed(f": expected {getattr(kind, '__name__', kind)}, found {plain!r:.60}")

    return decode


# Modules that define values: those of the core, and of features.
_VALUES = re.compile(r"fp8bench\.(model\.\w+|features\.\w+\.values)")


def _member(kind: object, name: str) -> Enum:
    """A member of an enum, which Python before 3.11.4 pickles as an attribute of it; refuses any other attribute."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"{name} of {kind} is no plain value")


class PlainUnpickler(pickle.Unpickler):
    """Unpickles the frozen values of answers, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if _VALUES.fullmatch(module) and "." not in name:  # a dot leads into what a module has imported
            value = super().find_class(module, name)
            if isinstance(value, type) and value.__module__ == module:
                return value
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")
