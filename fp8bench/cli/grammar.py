"""The grammar of the command line: its commands, the options that several have, and bad usage as one sentence."""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from fp8bench import __version__
from fp8bench.cli import option_types as types
from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Request
from fp8bench.model.request import ENERGY_OF, STEP_ENERGY
from fp8bench.model.request import REQUEST_RULES as RULES
from fp8bench.plan.asked_suites import files_of
from fp8bench.registry import AUTO, backends

DEFAULT_STORE = ".fp8bench"
DEFAULT_PROJECT = "fp8bench"
# Every command, and what it is for. Each is a module of cli/commands with add(parser) and run(arguments).
COMMANDS = {
    "suite": "measure a suite",
    "profile": "measure a model of your own, as it came and in low precision",
    "config": "write a file of options for suite --config",
    "list": "what there is to choose from",
    "doctor": "what this machine can do, and what not and why",
    "train": "train a model in several precisions side by side: does it still learn?",
    "show": "print a stored run, duel or training",
    "report": "the report of stored runs, side by side if several",
    "compare": "two runs, commits or stores, figure by figure",
    "fleet": "have the cells of a plan measured by many processes, and see where they stand",
    "gate": "fail a build where something has become worse",
    "duel": "two interpreters or two revisions, in the same rounds",
    "history": "runs and numbers over time, and asv's view",
    "store": "what is made of a store as a whole: Parquet files of its history",
    "advise": "what to do about a precision here: adopt it, leave layers or steps high, or nothing, because",
    "tape": "the operators of a step, their FLOPs and bytes, by precision, or against a run",
    "conform": "whether native casts and products give what their emulation gives, bit by bit",
    "audit": "whether a kernel of your own computes what its precision promises",
    "lint-shapes": "which products native FP8, MX and NVFP4 refuse or pad, by device",
    "plan-parallel": "how to cut a training for many GPUs: memory and pace by formulas, held against published rows",
    "sensitivity": "which layers suffer most in low precision, and a map that keeps the loss",
    "selftest": "check the harness itself",
}
_SHARED: dict[str, dict[str, Any]] = {
    "--store": {
        "type": types.path, "default": Path(DEFAULT_STORE), "metavar": "DIR",
        "help": f"where runs are kept; default {DEFAULT_STORE}",
    },
    "--import": {
        "dest": "imports", "action": "append", "default": [], "metavar": "MODULE",
        "help": "module or .py file that registers workloads, precisions or devices of your own",
    },
    "--dtypes": {
        "type": types.words, "default": (), "metavar": "A,B",
        "help": "precisions; default fp32,bf16,fp8",
    },
    "--devices": {
        "type": types.words, "default": (), "metavar": "A,B",
        "help": "cpu, cuda, cuda:1; default the first GPU, else cpu",
    },
    "--reference": {
        "metavar": "DTYPE", "help": "what the others are compared with; default the highest precision",
    },
    "--set": {
        "dest": "axes", "action": "append", "default": [], "type": types.axis, "metavar": "AXIS=A,B",
        "help": "values of an axis; `fp8bench list NAME` names the axes of a suite",
    },
    "--data": {"metavar": "FILE", "help": "text to train on; default Python's own sources"},
    "--quick": {"action": "store_true", "help": "a few rounds, to see that it runs"},
    "--budget": {
        "type": types.number(RULES["budget"]), "metavar": "SECONDS",
        "help": "time for the whole run; default about 10 s a group",
    },
    "--rounds": {"type": types.whole(RULES["rounds"]), "metavar": "N", "help": "exactly so many rounds, no early stop"},
    "--seed": {
        "type": types.whole(RULES["seed"]), "default": 0, "metavar": "N",
        "help": "for data, weights and order; default 0",
    },
    "--threads": {
        "type": types.whole(RULES["threads"]), "default": 1, "metavar": "N", "help": "CPU threads of torch; default 1",
    },
    "--case-timeout": {
        "type": types.number(RULES["case_timeout"]), "metavar": "SECONDS",
        "help": "the most that preparing a case or one slot of it may take; default 60 or far more than its work needs",
    },
    "--trace": {
        "type": types.path, "metavar": "DIR",
        "help": "also record a few steps of each case there, untimed: traces for Perfetto and TensorBoard's profiler",
    },
    "--no-energy": {
        "dest": "energy", "action": "store_false",
        "help": "measure no energy; else it is where a device can tell it, in windows of a second or more a case",
    },
    "--energy": {
        "dest": "energy_of", "choices": ENERGY_OF, "default": STEP_ENERGY, "metavar": "OF",
        "help": "phases: also measure the joules of each phase of a step, in windows in which it is done by itself",
    },
    "--sustained": {
        "type": types.number(RULES["sustained"]), "metavar": "SECONDS",
        "help": "also run each case for so many seconds at a time, once it has settled: the time that it sustains",
    },
    "--tape": {
        "action": "store_true",
        "help": "count the operators of a step, their FLOPs and bytes, also with --quick; else this is always done",
    },
    "--shares": {
        "action": "store_true",
        "help": "also find what each kind of work and each module takes of a step, in an untimed pass",
    },
    "--no-isolation": {
        "dest": "isolation", "action": "store_false", "help": "measure in this process, without a worker",
    },
    "--json": {
        "action": "store_true", "help": "print the run as JSON, all samples and verdicts, instead of the table",
    },
    "--explain": {"action": "store_true", "help": "print how to read the tables, too"},
    "--csv": {
        "metavar": "PATH",
        "help": "also write tidy rows there, one a case, phase and metric; '-' prints them instead of the table",
    },
    "--html": {
        "type": types.path, "metavar": "PATH", "help": "also write the report there, one file that loads nothing",
    },
    "--md": {"type": types.path, "metavar": "PATH", "help": "also write it there as Markdown"},
    "--csv-wide": {
        "action": "store_true", "help": "CSV with one row a case and a column a figure, instead of tidy rows",
    },
    "--no-report": {
        "dest": "report", "action": "store_false",
        "help": "write no report; `fp8bench report RUN` does it later",
    },
    "--open": {"action": "store_true", "help": "show the report in the browser"},
    "--tensorboard": {
        "type": types.path, "metavar": "DIR",
        "help": "also write the figures there as TensorBoard's scalars, a point a run",
    },
    "--wandb": {
        "nargs": "?", "const": DEFAULT_PROJECT, "metavar": "PROJECT",
        "help": f"also send figures and report to Weights & Biases; default project {DEFAULT_PROJECT}",
    },
}  # fmt: skip


def shared(group: argparse._ActionsContainer, *options: str, **other: str) -> None:
    """Options that several commands have. `other` is what a command says differently: its help, say."""
    for option in options:
        group.add_argument(option, **{**_SHARED[option], **other})


def backend_option(group: argparse._ActionsContainer) -> None:
    """Who multiplies, by the names that there are."""
    words = (
        f"who multiplies in low precision: {', '.join((AUTO, *backends.names()))} (default {AUTO}: torch where it can, "
        "else emulated); a dtype may say so itself: fp8:backend=torchao"
    )
    group.add_argument("--backend", default=AUTO, metavar="NAME", help=words)


def command_module(name: str) -> ModuleType:
    """The module of a command: imported when the command is named, so that the help of the whole stays light."""
    return importlib.import_module(f"fp8bench.cli.commands.{name.replace('-', '_')}")


def build_parser(named: Collection[str] = tuple(COMMANDS)) -> Parser:
    """The whole command line, with the options of the commands that are `named`; tests freeze the set of them."""
    parser = Parser(
        prog="fp8bench", allow_abbrev=False,
        description="Does low precision pay here, what does it cost in numbers, and can you believe it?",
        epilog="Begin with: fp8bench suite transformer --dtypes fp8,bf16",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"fp8bench {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, words in COMMANDS.items():
        command = commands.add_parser(name, help=words, allow_abbrev=False, add_help=name in named)
        if name in named:
            command_module(name).add(command)
    return parser


def check_alone(words: Sequence[str], beside: Collection[str], given: Sequence[str] = ()) -> None:
    """Raise for what was said beside --resume or --plan and does not go with it. `given` are no options."""
    options = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    others = [*given, *(word for word in options if word not in beside)]
    if others:
        raise UsageError(
            f"{'the plan of --plan' if '--plan' in beside else 'the run of --resume'} says what to measure and how, "
            f"and {others[0]} was given too. Leave it out; --store and options that say what is printed may stay."
        )


def request_of(arguments: argparse.Namespace) -> Request:
    """What the arguments ask for: every field of a request that the command has an option for."""
    given = {one.name: getattr(arguments, one.name) for one in fields(Request) if hasattr(arguments, one.name)}
    axes: dict[str, tuple[str, ...]] = {}
    for name, values in arguments.axes:
        axes[name] = (*axes.get(name, ()), *values)
    trace = getattr(arguments, "trace", None)
    return Request(**{
        **given, "axes": tuple(axes.items()), "imports": (*arguments.imports, *files_of(arguments.suite)),
        "trace": None if trace is None else str(trace),
    })  # fmt: skip


class Parser(argparse.ArgumentParser):
    """argparse that answers bad usage with one sentence and the nearest known word."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{_nearest(self, message)} See `{self.prog} --help`.")


def _nearest(parser: argparse.ArgumentParser, message: str) -> str:
    given = re.match(r"unrecognized arguments: (\S+)", message)
    if given:
        known = sorted(_options(parser))
        near = difflib.get_close_matches(given[1].partition("=")[0], known, n=1)
        return f"unknown argument {given[1]!r}." + (f" Did you mean {near[0]}?" if near else "")
    command = re.match(r"argument COMMAND: invalid choice: (['\"])(.*)\1 \(choose from ", message, re.DOTALL)
    if command:
        # A word behind an option that belongs to the command looks like a command itself.
        return f"{UnknownName('command', command[2][:80], commands_of(parser))} Options stand behind the command."
    return message[:1].lower() + message[1:].rstrip(".") + "."


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """All option words of a parser and its commands."""
    words = {word for action in parser._actions for word in action.option_strings}
    return words.union(*(_options(command) for command in commands_of(parser).values()))


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands, by name."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: command for action in found for name, command in action.choices.items()}


def parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """The words as arguments; a word too many is told by the command that it was given to."""
    arguments, others = parser.parse_known_args(words)
    if others:
        meant_by(parser, arguments).error(f"unrecognized arguments: {others[0]}")
    return arguments


def meant_by(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the command that was given, or of what its command is missing from."""
    for name in (arguments.command, getattr(arguments, "subcommand", None)):
        parser = commands_of(parser)[name] if name is not None else parser
    return parser
