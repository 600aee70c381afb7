"""The options that several commands share, and what commands make of their options."""

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
        "help": f"where runs are kept; default {DEFAULT_STORE}",
    },
    "--json": {
        "action": "store_true", "help": "print the run as JSON, all samples and verdicts, instead of the table",
    },
    "--explain": {"action": "store_true", "help": "print how to read the tables, too"},
    "--all": {"action": "store_true", "help": "print all that is known, not the answer alone"},
    "--csv": {
        "metavar": "PATH",
        "help": "also write tidy rows there, one a case, phase and metric; '-' prints them instead of the table",
    },
    "--html": {
        "type": types.path, "metavar": "PATH", "help": "also write the report there, one file that loads nothing",
    },
    "--md": {"type": types.path, "metavar": "PATH", "help": "also write it there as Markdown"},
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
        said = options_of(kind).get(field.name)
        if said is None or not said.group:
            continue
        word = (said.called or field.name).replace("_", "-")
        words = said.help.replace("{default}", f"{field.default}")
        if "{backends}" in words:
            words = words.replace("{backends}", ", ".join((AUTO, *backends.names())))
        known: dict[str, Any] = {"dest": field.name, "help": words}
        if isinstance(field.default, bool):
            word = f"no-{word}" if field.default else word
            known |= {"action": "store_false" if field.default else "store_true"}
        else:
            known |= {"default": field.default, "metavar": said.metavar, **_parser_of(str(field.type), said)}
        arguments[f"--{word}"] = (said.group, known)
    return arguments


def _parser_of(kind: str, said: RequestOption) -> dict[str, Any]:
    if said.choices:
        return {"choices": tuple(filter(None, said.choices)), "metavar": said.metavar or None}
    if said.parse == "each":
        return {"action": "append", "default": []}
    if said.parse == "axis":
        return {"action": "append", "default": [], "type": types.axis}
    if said.parse == "factors":
        return {"type": types.factors(said.rule)}
    if said.parse:
        return {"type": getattr(types, said.parse)}
    if kind == "str":
        return {"type": types.text(said.rule)}
    reader = next((reader for start, reader in _READERS.items() if kind.startswith(start)), None)
    return {} if reader is None else {"type": reader(said.rule)}


_READERS: dict[str, Callable[[Rule], Callable[[str], Any]]] = {
    "int": types.whole,
    "float | str": types.number_or_text,
    "float": types.number,
    "tuple[str": lambda rule: types.words,
}


def shared(group: argparse._ActionsContainer, *options: str, **other: str) -> None:
    """Adds options that several commands have; `other` replaces arguments, such as the help."""
    from_request = arguments_of()
    for option in options:
        known = from_request[option][1] if option in from_request else _SHARED[option]
        group.add_argument(option, **{**known, **other})


def subcommands(parser: argparse.ArgumentParser) -> Callable[..., argparse.ArgumentParser]:
    """Returns a function that adds a subcommand: its name, what it is for, and its exit codes."""
    commands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", parser_class=type(parser))

    def add(name: str, words: str, epilog: str = "") -> argparse.ArgumentParser:
        described = words[:1].upper() + words[1:] + "."
        return commands.add_parser(name, help=words, description=described, epilog=epilog, allow_abbrev=False)

    return add


def add_options_of(group: argparse._ArgumentGroup, kind: type = Request) -> None:
    for option, (title, known) in arguments_of(kind).items():
        if title == group.title:
            group.add_argument(option, **known)


def check_alone(words: Sequence[str], beside: Collection[str], given: Sequence[str] = ()) -> None:
    options = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    others = [*given, *(word for word in options if word not in beside)]
    if others:
        raise UsageError(
            f"{'the plan of --plan' if '--plan' in beside else 'the run of --resume'} says what to measure and how, "
            f"and {others[0]} was given too. Leave it out; --store and options that say what is printed may stay."
        )


def request_of(arguments: argparse.Namespace) -> Request:
    given = {field.name: getattr(arguments, field.name) for field in fields(Request) if hasattr(arguments, field.name)}
    axes: dict[str, tuple[str, ...]] = {}
    for name, values in arguments.axes:
        axes[name] = (*axes.get(name, ()), *values)
    trace = getattr(arguments, "trace", None)
    return Request(
        **{
            **given,
            "axes": tuple(axes.items()),
            "imports": (*arguments.imports, *files_of(arguments.suite)),
            "trace": None if trace is None else str(trace),
        }
    )
