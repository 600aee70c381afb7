"""What options are called in Python, and which types they have there: fields of a request, and options of a parser."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from functools import wraps
from typing import Any, TypeVar, cast

from fp8bench.cli import option_types as types
from fp8bench.errors import UnknownName
from fp8bench.model import Request
from fp8bench.model.request import RequestOption, options_of, words_of

F = TypeVar("F", bound=Callable[..., Any])
# What a parser makes of a word, and what a caller may give for it.
_GIVEN = {
    "Path": "str | Path", "Path | None": "str | Path", "tuple[str, ...]": "str | Iterable[str]",
    "tuple[tuple[str, str], ...]": "Mapping[str, str]", "tuple[tuple[str, float], ...]": "Mapping[str, float]",
    "tuple[str, tuple[str, ...]]": "Mapping[str, object]",
    "tuple[tuple[str, tuple[str, ...]], ...]": "Mapping[str, object]",
}  # fmt: skip


def asks(*kinds: type, without: Iterable[str] = ()) -> Callable[[F], F]:
    """A call whose keywords are the fields of requests, too: its signature names them, with types and defaults, and a
    keyword that is none of them is refused by the nearest one."""

    def named(function: F) -> F:
        signature = inspect.signature(function)
        own = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        }
        for kind in kinds:
            for word, field in keywords_of(kind).items():
                if word not in own and word not in without:
                    annotation = _field_type(str(field.type), options_of(kind).get(field.name))
                    own[word] = inspect.Parameter(
                        word, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation
                    )  # fmt: skip

        @wraps(function)
        def call(*values: Any, **given: Any) -> Any:
            for word in given:
                if word not in own:
                    raise UnknownName(f"argument of {function.__name__}", word, own)
            return function(*values, **given)

        vars(call)["__signature__"] = signature.replace(parameters=list(own.values()))
        return cast(F, call)

    return named


def keywords_of(kind: type) -> dict[str, Field[Any]]:
    words = words_of(kind)
    return {words[field.name]: field for field in fields(kind)}


def asked(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    known, made = keywords_of(kind), {}
    for word, value in given.items():
        name, parse = known[word].name, options_of(kind)[known[word].name].parse
        if parse == "size":
            made[name] = types.in_bytes(value)
        elif parse in ("axis", "precision_map"):
            made[name] = types.pairs(value, types.texts if parse == "axis" else lambda same: same)
        else:
            made[name] = types.names(value) if str(known[word].type).startswith("tuple[str") else types.plain(value)
    return made


def _field_type(kind: str, said: RequestOption | None) -> str:
    base, _, none = kind.partition(" | None")
    if said is not None and said.choices:
        base = _one_of(said.choices)
    elif said is not None and said.parse in ("path", "size"):
        base = {"path": "str | Path", "size": "int | str"}[said.parse]
    return _GIVEN.get(base, base) + (" | None" if kind.endswith("None") or none else "")


def _one_of(words: Iterable[object]) -> str:
    return f"Literal[{', '.join(map(repr, words))}]"


def keyword_of(action: argparse.Action) -> str:
    """What an option is called in Python: as a field of a request is, else by its word or by what it turns off."""
    words = [option[2:].replace("-", "_") for option in action.option_strings if option.startswith("--")]
    own = action.dest if not words or words[0].startswith("no_") else words[0]
    return words_of(Request).get(action.dest, own)


def python_type(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "bool"
    base = _GIVEN.get(parsed := _parsed_as(action), parsed)
    if action.choices:
        base = _one_of(action.choices)
    elif isinstance(action, argparse._AppendAction) and base == "str":
        base = "str | Iterable[str]"
    base += " | bool" if action.nargs == "?" and action.option_strings else ""
    return f"{base} | None" if action.default is None and action.nargs != "*" and not action.required else base


def _parsed_as(action: argparse.Action) -> str:
    """What its parser returns; those of a rule are made by a function of the same module."""
    name = getattr(action.type, "__qualname__", "str").partition(".")[0]
    parser = vars(types).get(name)
    returned = parser.__annotations__["return"] if parser is not None else name
    return str(returned.removeprefix("Callable[[str], ").removesuffix("]") if returned.startswith("Call") else returned)


def help_of(actions: Iterable[argparse.Action]) -> str:
    """A line an option, as the command line's help has it; of an option that turns something off, what False does."""
    return "\n".join(
        f"{keyword_of(action)}: {'False: ' if action.const is False else ''}{(action.help or '').replace('%%', '%')}"
        for action in actions
    )
