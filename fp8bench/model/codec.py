"""Converts frozen dataclasses to JSON values and back, by their type hints.

Unknown keys are ignored and missing keys get their defaults, so that files of other versions can be read.
`collect_ignored_names` collects the ignored keys. Supported types are scalars, None, enums, dataclasses, tuples, and
mappings of scalars.
"""

from __future__ import annotations

import dataclasses
import itertools
import marshal
import math
import pickle
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from fp8bench.errors import UsageError

# The version of stored runs, and of runs printed as JSON. It is raised if an older version of fp8bench would misread
# new files.
SCHEMA = 1
_INTEGER_TYPE_SET = {int}
# No float can hold larger whole numbers, so computing with them would fail. They come from damaged files.
_LARGEST_INTEGER = int(sys.float_info.max)
_PLAIN_TYPES = frozenset({int, str, bool, type(None)})
_LIST_TYPE_SET = {list}
# The values of these types often repeat within a run, so equal values share one object. At most _MAX_SHARED_VALUES
# objects of a type are kept for this.
_CACHED_VALUE_TYPE_NAMES = {"Request", "Plan", "DeviceFacts", "Case", "Support", "Work", "Segments"}
_MAX_SHARED_VALUES = 1000

T = TypeVar("T")
_ignored_field_names: ContextVar[set[str]] = ContextVar("_ignored")


class MalformedValueError(ValueError):
    """A JSON value does not fit the type to which it should be converted."""


def encode(value: Any) -> Any:
    """Converts a value to JSON values. Infinity and NaN, which JSON lacks, become strings."""
    value_type = type(value)
    # Most values are integers, strings, booleans or None.
    if value_type in _PLAIN_TYPES:
        return value
    if value_type is float:
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return str.__str__(value)  # store only the name of a MetricSpec, which is a string too
    if dataclasses.is_dataclass(value_type):
        return {name: encode(getattr(value, name)) for name in _list_field_names(value_type)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        if set(map(type, value)) <= _INTEGER_TYPE_SET:
            return list(value)  # do not encode each item, because a run has many raw samples
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@cache
def _list_field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def decode(kind: type[T], json_value: Any) -> T:
    """Converts JSON values to a value of type `kind`. Raises MalformedValueError with the path to the first wrong
    value.
    """
    try:
        return cast(T, _make_decoder(cast(Any, kind))(json_value))
    except MalformedValueError as error:
        raise MalformedValueError(f"{kind.__name__}{error}") from None


@contextmanager
def collect_ignored_names() -> Iterator[set[str]]:
    """A context with a set that collects the names of the fields that `decode` ignores, because the type has no such
    field. Empty fields are not collected.
    """
    names: set[str] = set()
    ignored_names_token = _ignored_field_names.set(names)
    try:
        yield names
    finally:
        _ignored_field_names.reset(ignored_names_token)


@cache
def _make_decoder(kind: Any) -> Callable[[Any], Any]:
    """Makes the function that decodes one type. It is cached, because a run has hundreds of thousands of values.

    The made function raises MalformedValueError with the path from its value to the wrong part. Each caller adds its
    part of the path in front.
    """
    type_origin = typing.get_origin(kind)
    if type_origin in (typing.Union, types.UnionType):
        return _make_union_decoder(typing.get_args(kind))
    if type_origin is tuple:
        return _make_tuple_decoder(typing.get_args(kind))
    # Here `kind` may be a generic type, such as Mapping[str, float].
    if type_origin is not None and issubclass(type_origin, Mapping):
        return _make_mapping_decoder(typing.get_args(kind)[1])
    if dataclasses.is_dataclass(kind):
        decode_dataclass = _make_dataclass_decoder(cast(type, kind))
        # Equal values are decoded once and share one object. This is safe, because the objects are frozen.
        return (
            _share_equal_values(decode_dataclass)
            if cast(type, kind).__name__ in _CACHED_VALUE_TYPE_NAMES
            else decode_dataclass
        )
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _make_enum_decoder(kind)
    return _decode_float if kind is float else _make_scalar_decoder(kind)


def _make_mapping_decoder(value_type: Any) -> Callable[[Any], Any]:
    decode_mapping_value = _make_decoder(value_type)

    def decode(json_value: Any) -> Any:
        if not isinstance(json_value, dict):
            raise MalformedValueError(": expected an object")
        values = {}
        for key, item in json_value.items():
            try:
                values[key] = decode_mapping_value(item)
            # The message begins with a path. Prepend the key to it.
            except MalformedValueError as error:
                raise MalformedValueError(f".{key}{error}") from None
        return values

    return decode


def _share_equal_values(decode: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps `decode` so that equal input gives the same frozen object. 1, 1.0 and True count as different input."""
    decoded_values: dict[bytes, tuple[Any, set[str]]] = {}

    def decode_once(json_value: Any) -> Any:
        try:
            key = marshal.dumps(json_value, 2)  # later versions of marshal encode the same text in several ways
        except ValueError:  # the value is nested too deeply
            return decode(json_value)
        if key not in decoded_values:
            # Clear a full cache completely. This costs little, because most repeated values are in nearby records.
            if len(decoded_values) >= _MAX_SHARED_VALUES:
                decoded_values.clear()
            with collect_ignored_names() as names:
                decoded_values[key] = decode(json_value), names
        value, names = decoded_values[key]
        # A value that was decoded before must report its ignored names again.
        if names:
            _ignored_field_names.get(set()).update(names)
        return value

    return decode_once


def _find_unchanged_json_types(kind: Any) -> frozenset[type]:
    """Returns the types of JSON values that can be used as values of `kind` unchanged. int is not one of them, because
    integers are checked.
    """
    union_member_types = (
        typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    )
    return frozenset(part for part in union_member_types if part in (str, float, bool, type(None)))


def _make_dataclass_decoder(kind: type) -> Callable[[Any], Any]:
    type_hints = typing.get_type_hints(kind)
    field_decoders = [
        (field.name, _find_unchanged_json_types(type_hints[field.name]), _make_decoder(type_hints[field.name]))
        for field in dataclasses.fields(kind)
    ]
    field_names = {name: None for name, _, _ in field_decoders}
    missing_sentinel = dataclasses.MISSING
    required_names = dict.fromkeys(
        field.name
        for field in dataclasses.fields(kind)
        if field.default is missing_sentinel and field.default_factory is missing_sentinel
    )
    default_by_field_name = {
        field.name: field.default for field in dataclasses.fields(kind) if field.default is not missing_sentinel
    }
    # If a class has no checks and no default factories, fill in its fields directly: a run has thousands of values, and
    # calling a frozen class is slow.
    has_no_factories = len(default_by_field_name) + len(required_names) == len(field_decoders)
    skips_init = has_no_factories and not hasattr(kind, "__post_init__") and not hasattr(kind, "__slots__")

    def decode(json_value: Any) -> Any:
        if not isinstance(json_value, dict):
            raise MalformedValueError(": expected an object")
        # A file of a newer version may have unknown fields, and a file of an older one may lack fields.
        is_complete = json_value.keys() == field_names.keys()
        values = (
            json_value.copy() if is_complete else {name: json_value[name] for name in field_names if name in json_value}
        )
        if len(values) < len(json_value):
            _ignored_field_names.get(set()).update(
                name for name in json_value.keys() - field_names.keys() if json_value[name]
            )
        for name, plain_types, decode_one in field_decoders:
            if (is_complete or name in values) and type(item := values[name]) not in plain_types:
                try:
                    values[name] = decode_one(item)
                except MalformedValueError as error:
                    raise MalformedValueError(f".{name}{error}") from None
        if skips_init and required_names.keys() <= values.keys():
            dataclass_instance: Any = object.__new__(kind)
            dataclass_instance.__dict__.update(values if is_complete else default_by_field_name | values)
            return dataclass_instance
        try:
            # A check in the class raises an error without a path. Convert it to MalformedValueError, to which callers
            # add the path.
            return kind(**values)
        except UsageError as error:
            raise MalformedValueError(f": {error}") from None
        except TypeError as error:  # a field that has no default is missing
            missing_field_name = next((name for name in required_names if name not in values), "")
            raise MalformedValueError(
                f": the field {missing_field_name!r} is missing" if missing_field_name else f": {error}"
            ) from None

    return decode


def _make_tuple_decoder(item_types: tuple[Any, ...]) -> Callable[[Any], Any]:
    has_repeated_item_type = len(item_types) == 2 and item_types[1] is Ellipsis
    item_decoders = [_make_decoder(item_type) for item_type in item_types if item_type is not Ellipsis]
    holds_integers = has_repeated_item_type and item_types[0] is int
    holds_integer_lists = has_repeated_item_type and item_types[0] == tuple[int, ...]

    def decode(json_value: Any) -> Any:
        if not isinstance(json_value, list):
            raise MalformedValueError(": expected a list")
        if has_repeated_item_type and not json_value:
            return ()
        if holds_integers and set(map(type, json_value)) <= _INTEGER_TYPE_SET:
            return tuple(json_value)  # do not decode each item, because a run has many raw samples
        are_items_integer_lists = holds_integer_lists and set(map(type, json_value)) <= _LIST_TYPE_SET
        if are_items_integer_lists and set(map(type, itertools.chain.from_iterable(json_value))) <= _INTEGER_TYPE_SET:
            return tuple(map(tuple, json_value))
        if not has_repeated_item_type and len(item_decoders) != len(json_value):
            raise MalformedValueError(f": expected {len(item_decoders)} items, found {len(json_value)}")
        try:
            if has_repeated_item_type:
                return tuple(map(item_decoders[0], json_value))
            return tuple(decode_one(item) for decode_one, item in zip(item_decoders, json_value, strict=True))
        except MalformedValueError as error:
            raise MalformedValueError(f"[]{error}") from None

    return decode


def _make_union_decoder(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    # Return values of these types unchanged. int is not among them, because its decoder checks the size of integers.
    plain_value_types = tuple(kind for kind in kinds if isinstance(kind, type) and kind is not int)
    member_decoders = [_make_decoder(kind) for kind in kinds if kind is not type(None)]

    def decode(json_value: Any) -> Any:
        if type(json_value) in plain_value_types:
            return json_value
        # Use the first type that fits. The types of a union never accept the same value.
        for decode_one in member_decoders:
            try:
                return decode_one(json_value)
            except MalformedValueError:
                continue
        accepted_type_names = " or ".join(
            "null" if kind is type(None) else getattr(kind, "__name__", str(kind)) for kind in kinds
        )
        raise MalformedValueError(f": expected {accepted_type_names}, found {json_value!r:.60}")

    return decode


def _make_enum_decoder(kind: type[Enum]) -> Callable[[Any], Any]:
    def decode(json_value: Any) -> Any:
        try:
            return kind(json_value)
        except ValueError:
            raise MalformedValueError(f": {json_value!r} is not a {kind.__name__}") from None

    return decode


def _decode_float(json_value: Any) -> float:
    if type(json_value) is float:
        return json_value
    if isinstance(json_value, int) and not isinstance(json_value, bool):
        try:
            return float(json_value)
        except OverflowError:
            raise MalformedValueError(": a whole number too large for a float") from None
    # JSON cannot express infinity and NaN, so they are stored as strings.
    if json_value in ("inf", "-inf", "nan"):
        return float(json_value)
    raise MalformedValueError(f": expected float, found {json_value!r:.60}")


def _make_scalar_decoder(kind: Any) -> Callable[[Any], Any]:
    def decode(json_value: Any) -> Any:
        if kind is int and type(json_value) is int and abs(json_value) > _LARGEST_INTEGER:
            raise MalformedValueError(": a whole number too large for a float")
        if kind is Any or type(json_value) is kind:
            return json_value
        raise MalformedValueError(f": expected {getattr(kind, '__name__', kind)}, found {json_value!r:.60}")

    return decode


# The modules that define frozen values (immutable dataclasses and enums): those of this package, and the module
# `values` of each feature.
_VALUE_MODULE_PATTERN = re.compile(r"fp8bench\.(model\.\w+|features\.\w+\.values)")


def _find_enum_member(kind: object, name: str) -> Enum:
    """Returns the member of an enum with this name, and refuses any other attribute. This replaces getattr, because
    Python before 3.11.4 pickles a member as a call of getattr.
    """
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"{name} of {kind} is not a frozen value")


class PlainUnpickler(pickle.Unpickler):
    """Unpickles the frozen values in the answers of a worker, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        # Refuse a name with a dot: it could reach into modules that this module has imported.
        if _VALUE_MODULE_PATTERN.fullmatch(module) and "." not in name:
            value = super().find_class(module, name)
            # Refuse what the module only imports from elsewhere.
            if isinstance(value, type) and value.__module__ == module:
                return value
        if (module, name) == ("builtins", "getattr"):
            return _find_enum_member
        raise pickle.UnpicklingError(f"{module}.{name} is not a frozen value")
