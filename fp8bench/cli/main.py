"""The door: its commands, words on a command line to one of them, bad usage as one sentence, and the exit code.

What `--help`, a bare `list` and bad usage need is light; what options need is imported with the command that is named,
so that a mistyped name costs a tenth of a second and not two.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from fp8bench import __version__
from fp8bench.cli.streams import complain, make_usable, say, silence
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Fp8benchError, UnknownName, UsageError
from fp8bench.feature_list import feature_help, feature_names
from fp8bench.measure.interrupts import ends_are_interrupts

DEFAULT_STORE = ".fp8bench"
# The commands of the core, and what each is for: a module of cli/commands with add(parser) and run(arguments).
_CORE = {
    "suite": "measure a suite",
    "profile": "measure a model of your own, as it came and in low precision",
    "config": "write a file of options for suite --config",
    "list": "what there is to choose from",
    "doctor": "what this machine can do, and what not and why",
    "show": "print a stored run, duel or training",
    "report": "the report of stored runs, side by side if several",
    "compare": "two runs, commits or stores, figure by figure",
    "history": "runs and numbers over time, and asv's view",
    "store": "what is made of a store as a whole: compacted files, and its runs from them",
    "tape": "the operators of a step, their FLOPs and bytes, by precision, or against a run",
}
# Those of features lie in the feature's folder.
_FEATURES = {name.replace("_", "-"): name for name in feature_names()}
COMMANDS = (*_CORE, *_FEATURES)


def command_module(name: str) -> ModuleType:
    """The module of a command: imported when the command is named, so that the help of the whole stays light."""
    if name in _FEATURES:
        return importlib.import_module(f"fp8bench.features.{_FEATURES[name]}.command")
    return importlib.import_module(f"fp8bench.cli.commands.{name}")


def build_parser(named: Collection[str] = COMMANDS) -> Parser:
    """The whole command line, with the options of the commands that are `named`; tests freeze the set of them."""
    parser = Parser(
        prog="fp8bench", allow_abbrev=False,
        description="Does low precision pay here, what does it cost in numbers, and can you believe it?",
        epilog="Begin with: fp8bench suite transformer --dtypes fp8,bf16",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"fp8bench {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name in COMMANDS:
        words = _CORE.get(name) or feature_help(_FEATURES[name])
        command = commands.add_parser(name, help=words, allow_abbrev=False, add_help=name in named)
        if name in named:
            command_module(name).add(command)
    return parser


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
    words = {word for action in parser._actions for word in action.option_strings}
    return words.union(*(_options(command) for command in commands_of(parser).values()))


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
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


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    make_usable()
    try:
        with ends_are_interrupts():
            return _run(words)
    except Fp8benchError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED
    except MemoryError:
        complain("this process got no more memory. Free some, or raise its limit (ulimit -v); what was kept stays.")
        return EXIT_FAILED
    except BrokenPipeError:
        silence()  # the reader of our output has left
        return EXIT_OK


def _run(words: list[str]) -> int:
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        raise UnknownName("command", words[0], COMMANDS)
    parser = build_parser([word for word in words if word in COMMANDS][:1])
    arguments = parse(parser, words)
    if getattr(arguments, "config", None) is not None:
        from fp8bench.cli.config_file import with_config

        arguments = with_config(parser, commands_of(parser)[arguments.command], words, arguments.config)
        for sentence in arguments.unused:
            complain(sentence)
    arguments.words = words
    if arguments.command is None or getattr(arguments, "subcommand", "") is None:
        meant_by(parser, arguments).print_help()
        return EXIT_OK
    _import_own(arguments)
    code = int(command_module(arguments.command).run(arguments))
    say("")
    return code


def _import_own(arguments: argparse.Namespace) -> None:
    if "imports" not in arguments:
        return
    from fp8bench.plan.asked_suites import files_of
    from fp8bench.user_code import import_user_modules

    # The script `fp8bench` does not have the working directory on its path, `python -m fp8bench` does.
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)
    suite = getattr(arguments, "suite", None) or getattr(arguments, "what", None) or ""
    import_user_modules((*arguments.imports, *files_of(suite)))
