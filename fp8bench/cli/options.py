"""The options that several commands share, and the objects that commands build from them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fp8bench.cli import option_types as types
from fp8bench.cli.main import DEFAULT_STORE
from fp8bench.errors import UsageError
from fp8bench.model import Request
from fp8bench.model.request import RequestOption, Rule, options_of
from fp8bench.plan.asked_suites import files_of
from fp8bench.registry import AUTO, backends

_SHARED: dict[str, dict[str, Any]] = {
    "--store": {
        "type": types.path, "default": Path(DEFAULT_STORE), "metavar": "DIR",
        "help": f"where runs are stored; default {DEFAULT_STORE}",
    },
    "--json": {
        "action": "store_true", "help": "print the run as JSON, all samples and verdicts, instead of the table",
    },
    "--explain": {"action": "store_true", "help": "also explain how to read the tables"},
    "--all": {"action": "store_true", "help": "print all details, not only the answer"},
    "--csv": {
        "metavar": "PATH",
        "help": "also write a row per case, phase and metric to PATH; '-' prints them instead of the table",
    },
    "--html": {
        "type": types.path, "metavar": "PATH", "help": "also write the report to PATH, as one self-contained file",
    },
    "--md": {"type": types.path, "metavar": "PATH", "help": "also write it to PATH as Markdown"},
    "--no-report": {
        "dest": "report", "action": "store_false",
        "help": "write no report; `fp8bench report RUN` does it later",
    },
    "--open": {"action": "store_true", "help": "show the report in the browser"},
    "--log": {
        "type": types.log_target, "action": "append", "default": [], "metavar": "TARGET",
        "help": "also log the figures to tensorboard[:DIR] or wandb[:PROJECT]; repeatable",
    },
}  # fmt: skip


def arguments_of(kind: type = Request) -> dict[str, tuple[str, dict[str, Any]]]:
    """Arguments for argparse from a request's fields, by option, each with its group."""
    arguments = {}
    for field in fields(kind):
        option = options_of(kind).get(field.name)
        if option is None or not option.group:
            continue
        word = (option.called or field.name).replace("_", "-")
        words = option.help.replace("{default}", f"{field.default}")
        if "{backends}" in words:
            words = words.replace("{backends}", ", ".join((AUTO, *backends.names())))
        keywords: dict[str, Any] = {"dest": field.name, "help": words}
        if isinstance(field.default, bool):
            word = f"no-{word}" if field.default else word
            keywords |= {"action": "store_false" if field.default else "store_true"}
        else:
            keywords |= {"default": field.default, "metavar": option.metavar, **_parser_of(str(field.type), option)}
        arguments[f"--{word}"] = (option.group, keywords)
    return arguments


def _parser_of(kind: str, option: RequestOption) -> dict[str, Any]:
    # Most specific first; a type's parser comes last.
    if option.choices:
        return {"choices": tuple(filter(None, option.choices)), "metavar": option.metavar or None}
    if option.parse == "each":
        return {"action": "append", "default": []}
    if option.parse == "axis":
        return {"action": "append", "default": [], "type": types.axis}
    if option.parse == "factors":
        return {"type": types.factors(option.rule)}
    if option.parse:
        return {"type": getattr(types, option.parse)}
    if kind == "str":
        return {"type": types.text(option.rule)}
    reader = next((reader for start, reader in _READERS.items() if kind.startswith(start)), None)
    return {} if reader is None else {"type": reader(option.rule)}


_READERS: dict[str, Callable[[Rule], Callable[[str], Any]]] = {
    "int": types.whole,
    "float | str": types.number_or_text,
    "float": types.number,
    "tuple[str": lambda rule: types.words,
}


def add_common(group: argparse._ActionsContainer, *options: str, **replaced: str) -> None:
    """Adds options that several commands have; `replaced` overrides arguments such as the help."""
    from_request = arguments_of()
    for option in options:
        arguments = from_request[option][1] if option in from_request else _SHARED[option]
        group.add_argument(option, **{**arguments, **replaced})


def subcommands(parser: argparse.ArgumentParser) -> Callable[..., argparse.ArgumentParser]:
    """Returns a function that adds a subcommand, given its name, purpose and exit codes."""
    commands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", parser_class=type(parser))

    def add(name: str, words: str, epilog: str = "") -> argparse.ArgumentParser:
        described = words[:1].upper() + words[1:] + "."
        return commands.add_parser(name, help=words, description=described, epilog=epilog, allow_abbrev=False)

    return add


def add_options_of(group: argparse._ArgumentGroup, kind: type = Request) -> None:
    for option, (title, keywords) in arguments_of(kind).items():
        if title == group.title:
            group.add_argument(option, **keywords)


def check_alone(words: Sequence[str], allowed: Collection[str], positional: Sequence[str] = ()) -> None:
    # Match '--rounds=5' like '--rounds 5'.
    options = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    refused = [*positional, *(word for word in options if word not in allowed)]
    if refused:
        raise UsageError(
            f"{'the plan of --plan' if '--plan' in allowed else 'the run of --resume'} says what to measure and how, "
            f"and {refused[0]} was given too. Leave it out; --store and options that say what is printed may stay."
        )


def request_of(arguments: argparse.Namespace) -> Request:
    request_fields = {
        field.name: getattr(arguments, field.name) for field in fields(Request) if hasattr(arguments, field.name)
    }
    # An axis that is set twice has the values of both.
    axes: dict[str, tuple[str, ...]] = {}
    for name, values in arguments.axes:
        axes[name] = (*axes.get(name, ()), *values)
    trace = getattr(arguments, "trace", None)
    return Request(
        **{
            **request_fields,
            "axes": tuple(axes.items()),
            "imports": (*arguments.imports, *files_of(arguments.suite)),
            "trace": None if trace is None else str(trace),
        }
    )
