"""Commands and requests as Python calls: `fp8bench.gate(a, b, thresholds=f)` is `fp8bench gate A B --thresholds F`.

A call becomes words for the command's own parser, so that Python and the command line have the same options, defaults,
limits and errors. Its signature and help also come from the parser; tests/house/test_python_signatures.py compares the
types for editors (`fp8bench/__init__.pyi`) with them.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from fp8bench.cli import option_types as types
from fp8bench.cli.main import COMMANDS, build_parser, command_module, commands_of, import_own, parse
from fp8bench.cli.option_types import names, texts
from fp8bench.cli.outputs import CommandResult, write_outputs
from fp8bench.cli.progress import SILENT, TERMINAL
from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Request
from fp8bench.model.request import RequestOption, options_of, words_of

# Options for printing a result, which a call returns instead.
_PRINTED = {"help", "help_all", "json", "csv", "md", "all", "explain"}
_PARAMETERS = inspect.Parameter


def command_call(name: str) -> Callable[..., CommandResult]:
    parser = commands_of(build_parser([name]))[name]
    options = {keyword_of(action): action for action in parser._actions if action.dest not in _PRINTED}
    signature = _signature(options)

    def call(*words: Any, progress: bool = True, **keywords: Any) -> CommandResult:
        for keyword in keywords:
            if keyword not in options:
                raise _unknown_argument(name, keyword, (*options, "progress"))
        typed: list[str] = []
        for option in options.values():
            if option.choices and not option.option_strings:  # the word that a command begins with, as in `duel suite`
                typed += option.choices
        for keyword, value in signature.bind_partial(*words, **keywords).arguments.items():
            typed += _words(keyword, options[keyword], value)
        arguments = parse(build_parser([name]), [name, *typed])
        import_own(arguments)
        result: CommandResult = command_module(name).answer(arguments, TERMINAL if progress else SILENT)
        with write_outputs(result.files):
            return result

    call.__name__ = call.__qualname__ = name
    call.__doc__ = parser.description
    vars(call)["__signature__"] = signature
    explain_arguments(name, call)
    return call


def _unknown_argument(name: str, keyword: str, names: Iterable[str]) -> UnknownName:
    listed = f"{', '.join(sorted(names))}; help(fp8bench.{name}) explains them"
    return UnknownName(f"argument of {name}", keyword, names, listed)


def _signature(options: Mapping[str, argparse.Action]) -> inspect.Signature:
    parameters = []
    for name, action in options.items():
        kind: Any = _PARAMETERS.KEYWORD_ONLY
        default = action.default
        if not action.option_strings:
            if action.choices:
                continue
            kind = _PARAMETERS.VAR_POSITIONAL if action.nargs == "*" else _PARAMETERS.POSITIONAL_OR_KEYWORD
            default = _PARAMETERS.empty if action.nargs != "?" else None
        elif action.required:
            default = _PARAMETERS.empty
        default = () if default == [] else str(default) if isinstance(default, Path) else default
        parameters.append(_PARAMETERS(name, kind, default=default, annotation=python_type(action)))
    parameters.append(_PARAMETERS("progress", _PARAMETERS.KEYWORD_ONLY, default=True, annotation="bool"))
    parameters.sort(key=lambda parameter: parameter.kind)
    return inspect.Signature(parameters, return_annotation="CommandResult")


def _words(name: str, action: argparse.Action, value: Any) -> list[str]:
    if not action.option_strings:
        return [_text(name, word) for word in (value if action.nargs == "*" else (value,)) if word is not None]
    option = action.option_strings[0]
    if isinstance(value, bool) and action.nargs in (0, "?"):
        return [option] if value == (action.const if action.nargs == 0 else True) else []
    if action.nargs == 0:
        raise UsageError(f"{name} must be True or False, got {value!r:.80}.")
    if value is None:
        return []
    if isinstance(action, argparse._AppendAction):
        several = value.items() if isinstance(value, Mapping) else names(value)
        return [f"{option}={_text(name, part)}" for part in several]
    return [f"{option}={_text(name, value)}"]


def _text(name: str, value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and name == "set":
        return f"{value[0]}={','.join(texts(value[1]))}"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={_text(name, part)}" for key, part in value.items())
    if callable(value):
        return _place_of(value)
    if isinstance(value, str | Path) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return str(value)
    if isinstance(value, Iterable):
        return ",".join(_text(name, part) for part in value)
    raise UsageError(f"{name} cannot be {value!r:.80}: give what the command line takes, as text or a number.")


def _place_of(function: Callable[..., Any]) -> str:
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    in_file = "." not in module and Path(file).is_file()
    if not name.isidentifier() or (module == "__main__" and not in_file):
        raise UsageError(
            f"{name or function!r:.80} cannot be found by another process: define it at the top of a .py file or a "
            "module, and give the function or 'file.py:name'."
        )
    return f"{file if in_file else module}:{name}"


F = TypeVar("F", bound=Callable[..., Any])
# The types that parsers return, and those that a caller may pass.
_GIVEN = {
    "Path": "str | Path", "Path | None": "str | Path", "tuple[str, ...]": "str | Iterable[str]",
    "tuple[tuple[str, str], ...]": "Mapping[str, str]", "tuple[float, ...]": "Iterable[float]",
    "tuple[tuple[str, float], ...]": "Mapping[str, float]",
    "tuple[str, tuple[str, ...]]": "Mapping[str, object]",
    "tuple[tuple[str, tuple[str, ...]], ...]": "Mapping[str, object]",
}  # fmt: skip


def takes_options_of(*kinds: type, without: Iterable[str] = ()) -> Callable[[F], F]:
    """Adds the fields of requests to a call's keywords and signature; others are refused with the nearest one."""

    def add_options(function: F) -> F:
        signature = inspect.signature(function)
        # 1. The call's declared parameters, without the catch-all for options.
        parameters = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        }
        # 2. A keyword for each field of the options' classes.
        for kind in kinds:
            for word, field in keywords_of(kind).items():
                if word not in parameters and word not in without:
                    annotation = _field_type(str(field.type), options_of(kind).get(field.name))
                    parameters[word] = inspect.Parameter(
                        word, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation
                    )

        @wraps(function)
        # 3. Answer a wrong keyword with the nearest right one, before anything runs.
        def call(*values: Any, **keywords: Any) -> Any:
            for word in keywords:
                if word not in parameters:
                    raise _unknown_argument(function.__name__, word, parameters)
            return function(*values, **keywords)

        # help() and editors read this signature.
        vars(call)["__signature__"] = signature.replace(parameters=list(parameters.values()))
        return cast(F, call)

    return add_options


def keywords_of(kind: type) -> dict[str, Field[Any]]:
    words = words_of(kind)
    return {words[field.name]: field for field in fields(kind)}


def request_fields(kind: type, values_given: Mapping[str, Any]) -> dict[str, Any]:
    by_keyword, parsed_fields = keywords_of(kind), {}
    for word, value in values_given.items():
        name, parse = by_keyword[word].name, options_of(kind)[by_keyword[word].name].parse
        if parse == "memory":
            parsed_fields[name] = types.in_bytes(value)
        elif parse in ("axis", "precision_map"):
            parsed_fields[name] = types.pairs(value, types.texts if parse == "axis" else lambda same: same)
        else:
            parsed_fields[name] = (
                types.names(value) if str(by_keyword[word].type).startswith("tuple[str") else types.plain(value)
            )
    return parsed_fields


def _field_type(kind: str, option: RequestOption | None) -> str:
    base, _, none = kind.partition(" | None")
    if option is not None and option.choices:
        base = _one_of(option.choices)
    elif option is not None and option.parse in ("path", "memory"):
        base = {"path": "str | Path", "memory": "int | str"}[option.parse]
    return _GIVEN.get(base, base) + (" | None" if kind.endswith("None") or none else "")


def _one_of(words: Iterable[object]) -> str:
    return f"Literal[{', '.join(map(repr, words))}]"


def keyword_of(action: argparse.Action) -> str:
    """Returns an option's name in Python: the request's field, or else its word or destination."""
    words = [option[2:].replace("-", "_") for option in action.option_strings if option.startswith("--")]
    fallback = action.dest if not words or words[0].startswith("no_") else words[0]
    return words_of(Request).get(action.dest, fallback)


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
    """Returns the type that an option's parser returns."""
    name = getattr(action.type, "__qualname__", "str").partition(".")[0]
    parser = vars(types).get(name)
    returned = parser.__annotations__["return"] if parser is not None else name
    return str(returned.removeprefix("Callable[[str], ").removesuffix("]") if returned.startswith("Call") else returned)


# The commands whose options a call takes, if not those of the command with its name.
_COMMANDS = {
    "run": ("suite",),
    "profile": ("profile", "suite"),
    "resume": ("show", "suite"),
    "load": ("show",),
    "resume_training": ("train",),
    "load_training": ("train",),
    "compare_streams": ("train",),
}
_FOR_ALL = {
    "progress": "False: nothing on stderr about how far it has come",
    "observer": "an object that receives the progress instead of stderr",
}


def explain_arguments(name: str, call: Callable[..., Any]) -> None:
    """Appends a line per argument to a call's help, from its docstring or else from the command's option."""
    parameters = inspect.signature(call).parameters
    words, prose = dict(_FOR_ALL), []
    for command in _COMMANDS.get(name, (name,) if name in COMMANDS else ()):
        for action in commands_of(build_parser([command]))[command]._actions:
            text = f"{'False: ' if action.const is False else ''}{(action.help or '').replace('%%', '%')}"
            words |= {word: text for word in (action.dest, keyword_of(action)) if word not in words}
    for line in (inspect.getdoc(call) or "").splitlines():
        word, _, text = line.partition(": ")
        if text and word in parameters:
            words[word] = text
        else:
            prose.append(line)
    lines = (f"{parameter}: {words.get(parameter, '')}" for parameter in parameters)
    call.__doc__ = "\n".join(("\n".join(prose).rstrip(), "", *lines))
