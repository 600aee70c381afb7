"""Makes Python calls of commands: `fp8bench.gate(a, b, thresholds=f)` does what `fp8bench gate A B --thresholds F`
does.

The arguments of a call are turned into words for the command's parser. So Python and the command line have the same
options, defaults, limits and errors. The parser also provides the signature and the help of a call. The types for
editors are in `fp8bench/__init__.pyi`, and tests/house/test_python_signatures.py compares them with the parser.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import Field, fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from fp8bench.cli import option_types as types
from fp8bench.cli.main import (
    COMMANDS,
    build_parser,
    import_command_module,
    import_user_code,
    parse_command_words,
    subparsers_by_name,
)
from fp8bench.cli.option_types import make_text_tuple, split_names
from fp8bench.cli.outputs import CommandResult, write_outputs
from fp8bench.cli.progress import SILENT, TERMINAL_JOB_OBSERVER
from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Request
from fp8bench.model.request import RequestOption, list_request_options, name_fields

# The options that determine how a result is printed. A call has none of them, because it returns the result.
_PRINT_OPTIONS = {"help", "help_all", "json", "csv", "md", "all", "explain"}
_PARAMETER_CLASS = inspect.Parameter


def make_command_call(name: str) -> Callable[..., CommandResult]:
    parser = subparsers_by_name(build_parser([name]))[name]
    options = {python_keyword(action): action for action in parser._actions if action.dest not in _PRINT_OPTIONS}
    signature = _make_call_signature(options)

    def call(*words: Any, progress: bool = True, **keywords: Any) -> CommandResult:
        _check_keywords(name, keywords, (*options, "progress"))
        # Begin with the words that every command line of this command has, such as `suite` in `duel suite`.
        typed_words: list[str] = []
        for option in options.values():
            if not option.option_strings:
                typed_words += map(str, option.choices or ())
        for keyword, value in signature.bind_partial(*words, **keywords).arguments.items():
            typed_words += _list_option_words(keyword, options[keyword], value)
        arguments = parse_command_words(build_parser([name]), [name, *typed_words])
        import_user_code(arguments)
        result: CommandResult = import_command_module(name).answer(
            arguments, TERMINAL_JOB_OBSERVER if progress else SILENT
        )
        with write_outputs(result.files):
            return result

    call.__name__ = call.__qualname__ = name
    call.__doc__ = parser.description
    vars(call)["__signature__"] = signature
    explain_arguments(name, call)
    return call


def _check_keywords(name: str, keywords: Iterable[str], allowed_keywords: Collection[str]) -> None:
    for keyword in keywords:
        if keyword not in allowed_keywords:
            argument_names_text = f"{', '.join(sorted(allowed_keywords))}; help(fp8bench.{name}) explains them"
            raise UnknownName(f"argument of {name}", keyword, allowed_keywords, argument_names_text)


def _make_call_signature(options: Mapping[str, argparse.Action]) -> inspect.Signature:
    signature_parameters = []
    for name, action in options.items():
        kind: Any = _PARAMETER_CLASS.KEYWORD_ONLY
        option_default = action.default
        if not action.option_strings:
            # A positional argument with fixed words, such as `suite` in `duel suite`, does not become a parameter: the
            # call adds the word.
            if action.choices:
                continue
            kind = _PARAMETER_CLASS.VAR_POSITIONAL if action.nargs == "*" else _PARAMETER_CLASS.POSITIONAL_OR_KEYWORD
            option_default = _PARAMETER_CLASS.empty if action.nargs != "?" else None
        elif action.required:
            option_default = _PARAMETER_CLASS.empty
        option_default = (
            () if option_default == [] else str(option_default) if isinstance(option_default, Path) else option_default
        )
        signature_parameters.append(
            _PARAMETER_CLASS(name, kind, default=option_default, annotation=get_python_type(action))
        )
    signature_parameters.append(
        _PARAMETER_CLASS("progress", _PARAMETER_CLASS.KEYWORD_ONLY, default=True, annotation="bool")
    )
    # inspect.Signature requires positional parameters first. The sort keeps the order within a kind.
    signature_parameters.sort(key=lambda parameter: parameter.kind)
    return inspect.Signature(signature_parameters, return_annotation="CommandResult")


def _list_option_words(name: str, action: argparse.Action, value: Any) -> list[str]:
    if not action.option_strings:
        return [
            _format_argument(name, word) for word in (value if action.nargs == "*" else (value,)) if word is not None
        ]
    option = action.option_strings[0]
    if isinstance(value, bool) and action.nargs in (0, "?"):
        return [option] if value == (action.const if action.nargs == 0 else True) else []
    if action.nargs == 0:
        raise UsageError(f"{name} must be True or False, got {value!r:.80}.")
    if value is None:
        return []
    # Join option and value with '=', so that a value may begin with a dash.
    if isinstance(action, argparse._AppendAction):
        items = value.items() if isinstance(value, Mapping) else split_names(value)
        return [f"{option}={_format_argument(name, part)}" for part in items]
    return [f"{option}={_format_argument(name, value)}"]


def _format_argument(name: str, value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and name == "set":
        return f"{value[0]}={','.join(make_text_tuple(value[1]))}"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={_format_argument(name, part)}" for key, part in value.items())
    if callable(value):
        return _find_function_address(value)
    if isinstance(value, str | Path) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return str(value)
    if isinstance(value, Iterable):
        return ",".join(_format_argument(name, part) for part in value)
    raise UsageError(f"{name} cannot be {value!r:.80}: give a text or a number, as on the command line.")


def _find_function_address(function: Callable[..., Any]) -> str:
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    is_in_file = "." not in module and Path(file).is_file()
    if not name.isidentifier() or (module == "__main__" and not is_in_file):
        raise UsageError(
            f"{name or function!r:.80} cannot be found by another process: define it at the top of a .py file or a "
            "module, and give the function or 'file.py:name'."
        )
    return f"{file if is_in_file else module}:{name}"


F = TypeVar("F", bound=Callable[..., Any])
# For each type that a parser returns, the types that a Python caller may pass.
_ACCEPTED_TYPES = {
    "Path": "str | Path", "Path | None": "str | Path", "tuple[str, ...]": "str | Iterable[str]",
    "tuple[tuple[str, str], ...]": "Mapping[str, str]", "tuple[float, ...]": "Iterable[float]",
    "tuple[tuple[str, float], ...]": "Mapping[str, float]",
    "tuple[str, tuple[str, ...]]": "Mapping[str, object]",
    "tuple[tuple[str, tuple[str, ...]], ...]": "Mapping[str, object]",
}  # fmt: skip


def accept_request_fields(*classes: type, excluded: Iterable[str] = ()) -> Callable[[F], F]:
    """Returns a decorator that adds the fields of request classes to the keywords of a function.

    The keywords become part of the function's signature. A wrong keyword raises UnknownName, which suggests the most
    similar keyword.
    """

    def add_options(function: F) -> F:
        signature = inspect.signature(function)
        # 1. Take the parameters that the function declares, except **options.
        parameters = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        }
        # 2. Add a keyword for each field of the request classes.
        for kind in classes:
            for word, field in fields_by_keyword(kind).items():
                if word not in parameters and word not in excluded:
                    type_text = _name_field_type(str(field.type), list_request_options(kind).get(field.name))
                    parameters[word] = inspect.Parameter(
                        word, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=type_text
                    )

        @wraps(function)
        # 3. Refuse a wrong keyword before anything runs.
        def call(*values: Any, **keywords: Any) -> Any:
            _check_keywords(function.__name__, keywords, parameters)
            return function(*values, **keywords)

        # Set the attribute from which help() and editors read the signature.
        vars(call)["__signature__"] = signature.replace(parameters=list(parameters.values()))
        return cast(F, call)

    return add_options


def fields_by_keyword(kind: type) -> dict[str, Field[Any]]:
    words = name_fields(kind)
    return {words[field.name]: field for field in fields(kind)}


def request_fields(kind: type, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a request's fields by name, parsed from the keywords that a Python caller gave."""
    field_by_keyword = fields_by_keyword(kind)
    field_values: dict[str, Any] = {}
    for word, value in keywords.items():
        field = field_by_keyword[word]
        match list_request_options(kind)[field.name].parse:
            case "memory":
                field_values[field.name] = types.memory_as_bytes(value)
            case "axis":
                field_values[field.name] = types.as_name_value_pairs(value, types.make_text_tuple)
            case "precision_map":
                field_values[field.name] = types.as_name_value_pairs(value)
            case _ if str(field.type).startswith("tuple[str"):
                field_values[field.name] = types.split_names(value)
            case _:
                field_values[field.name] = str(value) if isinstance(value, Path) else value
    return field_values


def _name_field_type(kind: str, option: RequestOption | None) -> str:
    type_name, optional, _ = kind.partition(" | None")
    if option is not None and option.choices:
        type_name = _format_literal_type(option.choices)
    elif option is not None and option.parse in ("path", "memory"):
        type_name = {"path": "str | Path", "memory": "int | str"}[option.parse]
    return _ACCEPTED_TYPES.get(type_name, type_name) + optional


def _format_literal_type(words: Iterable[object]) -> str:
    return f"Literal[{', '.join(map(repr, words))}]"


def python_keyword(action: argparse.Action) -> str:
    """Returns the keyword of an option in Python calls: that of the request's field if it has one, or the option's
    name.
    """
    words = [option[2:].replace("-", "_") for option in action.option_strings if option.startswith("--")]
    default_keyword = action.dest if not words or words[0].startswith("no_") else words[0]
    return name_fields(Request).get(action.dest, default_keyword)


def get_python_type(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "bool"
    accepted_type = _ACCEPTED_TYPES.get(parsed_type := _format_parser_type(action), parsed_type)
    if action.choices:
        accepted_type = _format_literal_type(action.choices)
    elif isinstance(action, argparse._AppendAction) and accepted_type == "str":
        accepted_type = "str | Iterable[str]"
    accepted_type += " | bool" if action.nargs == "?" and action.option_strings else ""
    return (
        f"{accepted_type} | None"
        if action.default is None and action.nargs != "*" and not action.required
        else accepted_type
    )


def _format_parser_type(action: argparse.Action) -> str:
    """Returns the name of the type to which an option's values are parsed."""
    # A function that a factory made has a name such as 'whole.<locals>.<lambda>', which begins with the factory's name.
    name = getattr(action.type, "__qualname__", "str").partition(".")[0]
    parser = vars(types).get(name)
    returned_type = parser.__annotations__["return"] if parser is not None else name
    return re.sub(r"^Callable\[\[str\], (.*)\]$", r"\1", returned_type)


# For each Python call: the commands whose help explains its arguments. For a call that is not listed, this is the
# command with the same name.
_COMMANDS_OF_CALL = {
    "run": ("suite",),
    "profile": ("profile", "suite"),
    "resume": ("show", "suite"),
    "load": ("show",),
    "resume_training": ("train",),
    "load_training": ("train",),
    "compare_streams": ("train",),
}
_COMMON_HELP = {
    "progress": "False: no progress on stderr",
    "observer": "an object that receives the progress instead of stderr",
}


def explain_arguments(name: str, call: Callable[..., Any]) -> None:
    """Appends a line for each argument to the docstring of a call.

    An argument that the docstring does not explain is explained by the help of the command's option.
    """
    parameters = inspect.signature(call).parameters
    help_by_argument, description_lines = dict(_COMMON_HELP), []
    for command in _COMMANDS_OF_CALL.get(name, (name,) if name in COMMANDS else ()):
        for action in subparsers_by_name(build_parser([command]))[command]._actions:
            text = f"{'False: ' if action.const is False else ''}{(action.help or '').replace('%%', '%')}"
            for word in (action.dest, python_keyword(action)):
                help_by_argument.setdefault(word, text)
    for line in (inspect.getdoc(call) or "").splitlines():
        word, _, text = line.partition(": ")
        if text and word in parameters:
            help_by_argument[word] = text
        else:
            description_lines.append(line)
    lines = (f"{parameter}: {help_by_argument.get(parameter, '')}" for parameter in parameters)
    call.__doc__ = "\n".join(("\n".join(description_lines).rstrip(), "", *lines))
