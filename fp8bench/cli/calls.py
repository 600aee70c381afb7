"""Commands as calls: `fp8bench.gate(a, b, thresholds=file)` is `fp8bench gate A B --thresholds FILE`.

A call becomes words for the command's own parser, so that both doors have the same options, defaults, limits and
sentences. Its signature and help are made of the parser, too; tests/house/test_python_signatures.py holds the types
that editors see (`fp8bench/__init__.pyi`) against them.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fp8bench.cli.keywords import help_of, keyword_of, python_type
from fp8bench.cli.main import build_parser, command_module, commands_of, import_own, parse
from fp8bench.cli.option_types import names, texts
from fp8bench.cli.outputs import CommandResult, write_outputs
from fp8bench.cli.progress import SILENT, TERMINAL
from fp8bench.errors import UnknownName, UsageError

# What says how a result is printed: a call returns it.
_PRINTED = {"help", "help_all", "json", "csv", "md", "all", "explain"}
_PARAMETERS = inspect.Parameter


def command_call(name: str) -> Callable[..., CommandResult]:
    parser = commands_of(build_parser([name]))[name]
    options = {keyword_of(action): action for action in parser._actions if action.dest not in _PRINTED}
    signature = _signature(options)

    def call(*words: Any, progress: bool = True, **given: Any) -> CommandResult:
        for keyword in given:
            if keyword not in options:
                raise UnknownName(f"argument of {name}", keyword, (*options, "progress"))
        typed = [
            word
            for option in options.values()
            if option.choices and not option.option_strings
            for word in option.choices
        ]
        for keyword, value in signature.bind_partial(*words, **given).arguments.items():
            typed += _words(keyword, options[keyword], value)
        arguments = parse(build_parser([name]), [name, *typed])
        import_own(arguments)
        result: CommandResult = command_module(name).answer(arguments, TERMINAL if progress else SILENT)
        with write_outputs(result.files):
            return result

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{parser.description}\n\n{help_of(options.values())}"
    vars(call)["__signature__"] = signature
    return call


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
