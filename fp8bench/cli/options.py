"""Defines the options that several commands share, and builds requests from parsed options."""

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
from fp8bench.model.request import RequestOption, Rule, list_request_options
from fp8bench.plan.asked_suites import suite_files
from fp8bench.registry import AUTO, backends

_SHARED_OPTIONS: dict[str, dict[str, Any]] = {
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
    "--md": {"type": types.path, "metavar": "PATH", "help": "also write the result to PATH as Markdown"},
    "--no-report": {
        "dest": "report", "action": "store_false",
        "help": "write no report; `fp8bench report RUN` does it later",
    },
    "--open": {"action": "store_true", "help": "show the report in the browser"},
    "--log": {
        "type": types.parse_log_target, "action": "append", "default": [], "metavar": "TARGET",
        "help": "also log the figures to tensorboard[:DIR] or wandb[:PROJECT]; repeatable",
    },
}  # fmt: skip


def options_from_fields(request_class: type = Request) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns the options that set the fields of a request. Maps the name of an option to a pair: the title of its
    group in the help, and its arguments for argparse.
    """
    arguments = {}
    for field in fields(request_class):
        option = list_request_options(request_class).get(field.name)
        if option is None or not option.group:
            continue
        option_name = (option.called or field.name).replace("_", "-")
        help_text = option.help.replace("{default}", f"{field.default}")
        if "{backends}" in help_text:
            help_text = help_text.replace("{backends}", ", ".join((AUTO, *backends.names())))
        keywords: dict[str, Any] = {"dest": field.name, "help": help_text}
        if isinstance(field.default, bool):
            option_name = f"no-{option_name}" if field.default else option_name
            keywords |= {"action": "store_false" if field.default else "store_true"}
        else:
            keywords |= {"default": field.default, "metavar": option.metavar, **_choose_parser(str(field.type), option)}
        arguments[f"--{option_name}"] = (option.group, keywords)
    return arguments


def _choose_parser(kind: str, option: RequestOption) -> dict[str, Any]:
    # Prefer the choices or the parser that the option names. Without them, the type of the field determines the parser.
    if option.choices:
        return {"choices": tuple(filter(None, option.choices)), "metavar": option.metavar or None}
    if option.parse == "each":
        return {"action": "append", "default": []}
    if option.parse == "axis":
        return {"action": "append", "default": [], "type": types.parse_axis}
    if option.parse == "factors":
        return {"type": types.factors_parser(option.rule)}
    if option.parse:
        return {"type": getattr(types, option.parse)}
    if kind == "str":
        return {"type": types.text_parser(option.rule)}
    make_parser = next(
        (make_parser for type_prefix, make_parser in _PARSER_BY_TYPE_PREFIX.items() if kind.startswith(type_prefix)),
        None,
    )
    return {} if make_parser is None else {"type": make_parser(option.rule)}


_PARSER_BY_TYPE_PREFIX: dict[str, Callable[[Rule], Callable[[str], Any]]] = {
    "int": types.whole,
    "float | str": types.number_or_text_parser,
    "float": types.number,
    "tuple[str": lambda rule: types.words,
}


def add_common_options(group: argparse._ActionsContainer, *options: str, **overrides: str) -> None:
    """Adds options that several commands share. `overrides` replaces arguments that argparse gets, such as `help`."""
    request_options = options_from_fields()
    for option in options:
        arguments = request_options[option][1] if option in request_options else _SHARED_OPTIONS[option]
        group.add_argument(option, **{**arguments, **overrides})


def subcommands(parser: argparse.ArgumentParser) -> Callable[..., argparse.ArgumentParser]:
    """Returns a function that adds a subcommand to the parser. It gets the name, the purpose and the epilog of the
    subcommand.
    """
    commands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", parser_class=type(parser))

    def add_subcommand(name: str, purpose: str, epilog: str = "") -> argparse.ArgumentParser:
        description = purpose[:1].upper() + purpose[1:] + "."
        return commands.add_parser(name, help=purpose, description=description, epilog=epilog, allow_abbrev=False)

    return add_subcommand


def add_request_options(group: argparse._ArgumentGroup, kind: type = Request) -> None:
    for option, (title, keywords) in options_from_fields(kind).items():
        if title == group.title:
            group.add_argument(option, **keywords)


def refuse_other_options(
    words: Sequence[str], allowed: Collection[str], positional_values: Sequence[str | None]
) -> None:
    # Cut '--rounds=5' to '--rounds'.
    options = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    refused_words = [*filter(None, positional_values), *(word for word in options if word not in allowed)]
    if refused_words:
        raise UsageError(
            f"{'the plan of --plan' if '--plan' in allowed else 'the run of --resume'} determines what is measured "
            f"and how, and {refused_words[0]} was given too. Leave it out; --store and options for the output may stay."
        )


def make_request(arguments: argparse.Namespace) -> Request:
    field_values = {
        field.name: getattr(arguments, field.name) for field in fields(Request) if hasattr(arguments, field.name)
    }
    # If --set is given twice for the same axis, combine the values.
    axes: dict[str, tuple[str, ...]] = {}
    for name, values in arguments.axes:
        axes[name] = (*axes.get(name, ()), *values)
    trace = getattr(arguments, "trace", None)
    return Request(
        **{
            **field_values,
            "axes": tuple(axes.items()),
            "imports": (*arguments.imports, *suite_files(arguments.suite)),
            "trace": None if trace is None else str(trace),
        }
    )
