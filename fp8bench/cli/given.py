"""What callers give in Python, as the command line's options have it. What is none is refused by the request."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from fp8bench.errors import UnknownName, UsageError
from fp8bench.files import is_address
from fp8bench.model.request import Option, options_of, words_of
from fp8bench.units import bytes_of

F = TypeVar("F", bound=Callable[..., Any])


def asks(kind: type, *without: str) -> Callable[[F], F]:
    """A call whose keywords are the fields of a request, too: its signature names them, with their defaults."""

    def named(function: F) -> F:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        more = [
            inspect.Parameter(word, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
            for word, one in keywords_of(kind).items() if word not in {*without, *signature.parameters}
        ]  # fmt: skip
        vars(function)["__signature__"] = signature.replace(parameters=[*own, *more])
        return function

    return named


def keywords_of(kind: type) -> dict[str, Field[Any]]:
    """The fields of a request by the words of a call."""
    words = words_of(kind)
    return {words[one.name]: one for one in fields(kind)}


def asked(kind: type, given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The fields of a request from the keywords of a call. What is none of them is refused by the nearest word."""
    known = keywords_of(kind)
    for word in given:
        if word not in known:
            raise UnknownName(f"argument of {what}", word, known)
    options = options_of(kind)
    return {known[word].name: _as_field(known[word], options[known[word].name], value) for word, value in given.items()}


def _as_field(one: Field[Any], said: Option, value: Any) -> Any:
    if said.parse == "size":
        return in_bytes(value)
    if said.parse in ("axis", "precision_map"):
        return pairs(value, texts if said.parse == "axis" else lambda same: same)
    return names(value) if str(one.type).startswith("tuple[str") else plain(value)


def names(given: object) -> tuple[str, ...]:
    """Names from a list, or from a text with commas as on the command line."""
    if isinstance(given, str):
        return tuple(word.strip() for word in given.split(","))
    return cast(tuple[str, ...], tuple(given) if isinstance(given, Iterable) else given)


def pairs(given: object, made: Callable[[Any], Any] = lambda value: value) -> Any:
    """A mapping as pairs."""
    if isinstance(given, Mapping):
        return tuple((name, made(value)) for name, value in given.items())
    return () if given is None else given


def texts(value: object) -> tuple[str, ...]:
    """The values of an axis: one, or several."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (str(value),)
    return tuple(str(one) for one in value)


def plain(path: Any) -> Any:
    """A path as text."""
    return str(path) if isinstance(path, Path) else path


def in_bytes(value: Any) -> Any:
    """Bytes, from a size in words too."""
    with suppress(ValueError):
        return bytes_of(value) if isinstance(value, str) else value
    return value


def folder(name: str, given: object) -> Path:
    """The folder that an argument names."""
    if not isinstance(given, str | Path) or not str(given):
        raise UsageError(f"{name} cannot be {given!r:.80}: give a folder.")
    if is_address(str(given)):
        raise UsageError(f"{name} cannot be {given!r:.80}, which is an address: mount it, and give the folder.")
    return Path(given)
