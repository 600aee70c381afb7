"""The entry of the command line: finds the command, parses options, turns errors into a sentence and an exit code.

`--help`, a bare `list` and bad usage need only light imports. Heavier imports wait until their command runs, so that a
mistyped name takes a tenth of a second instead of two.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from fp8bench import __version__
from fp8bench.cli.streams import complain, make_usable, say, silence
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Fp8benchError, OpenStore, UnknownName, UsageError
from fp8bench.feature_list import feature_help, feature_names
from fp8bench.measure.interrupts import ends_are_interrupts
from fp8bench.suggestions import meant_name

DEFAULT_STORE = ".fp8bench"
# The verbs by which the help groups commands; each command's description begins with one.
VERBS = ("measure", "understand", "decide", "guard", "machine")
# The core commands, each a module of cli/commands with add(parser) and run(arguments), and optionally EXAMPLES and
# FIRST_OPTIONS, which --help shows if there are many options.
_CORE = {
    "suite": "measure: run a suite in several precisions: speed, error, memory",
    "profile": "measure: measure your model unchanged and in low precision",
    "show": "understand: print a stored run, duel or training",
    "report": "understand: write a report of stored runs, side by side if several",
    "compare": "understand: compare two runs, commits or stores",
    "history": "understand: follow figures over commits and find where they changed",
    "tape": "understand: count a step's operators, FLOPs and bytes, by precision",
    "doctor": "machine: report what this machine supports, and why not",
    "list": "machine: name suites, precisions, backends and devices",
    "store": "machine: delete files of a store that no result needs",
    "completion": "machine: print a completion script for bash or zsh",
}
# Packages whose import name differs.
_CALLED = {"yaml": "PyYAML", "pynvml": "nvidia-ml-py"}
_FEATURES = {name.replace("_", "-"): name for name in feature_names()}
COMMANDS = (*_CORE, *_FEATURES)


def command_module(name: str) -> ModuleType:
    if name in _FEATURES:
        return importlib.import_module(f"fp8bench.features.{_FEATURES[name]}.command")
    return importlib.import_module(f"fp8bench.cli.commands.{name}")


def build_parser(named: Collection[str] = COMMANDS) -> Parser:
    """Builds the parser of the whole command line, with options only for the commands in `named`."""
    parser = Parser(
        prog="fp8bench",
        allow_abbrev=False,
        description="Does low precision pay here, what does it cost in numbers, and can you believe it?",
        epilog="Begin with: fp8bench suite transformer --dtypes fp8,bf16. To read more: fp8bench COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"fp8bench {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name in COMMANDS:
        words = _CORE.get(name) or feature_help(_FEATURES[name])
        command = commands.add_parser(name, help=words, allow_abbrev=False, add_help=name in named)
        if name in named:
            module = command_module(name)
            module.add(command)
            command.show_first(getattr(module, "EXAMPLES", ()), getattr(module, "FIRST_OPTIONS", ""))
    return parser


class Parser(argparse.ArgumentParser):
    """An argparse parser that answers bad usage with one sentence and the nearest known word.

    Its help groups commands by verb, shows examples, and lists only the most used of many options.
    """

    examples: Sequence[str] = ()
    first = ""

    def __init__(self, *words: Any, **keywords: Any) -> None:
        super().__init__(*words, **keywords)
        if self.add_help:  # not listed where --help shows all options
            self.add_argument("--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        chosen = re.match(r"argument \S+: invalid choice: (['\"])(.*)\1 \(choose from (.*)\)", message, re.DOTALL)
        wrong, nearest = "", None
        if chosen:
            wrong, choices = chosen[2], chosen[3].replace("'", "").split(", ")
            nearest = meant_name("choice", wrong, choices)
            if len(choices) == 1:  # the word that was left out, as in `duel suite gemm`
                nearest = f"{choices[0]} {wrong}"
        example = "".join(self.examples[:1]).partition("  #")[0] if "arguments are required" in message else ""
        words = f"{_explain_usage(self, message)} See `{self.prog} --help`."
        raise UsageError(words, wrong, nearest, shlex.split(example))

    def show_first(self, examples: Sequence[str], options: str) -> None:
        self.examples, self.first = examples, options
        if options:
            every = next(action for action in self._actions if isinstance(action, _HelpAll))
            every.help = f"show all {sum(bool(action.option_strings) for action in self._actions)} options"

    def format_help(self, every: bool = False) -> str:
        formatter = self._get_formatter()
        needed = [action for action in self._actions if action.required or not action.option_strings]
        optional = {*self._actions} - {*needed}
        formatter.add_usage(self.usage, [_OPTIONS, *needed] if len(optional) > 2 else needed, [])  # more than --help
        formatter.add_text(self.description)
        if self.examples:
            lines = "".join(f"\n  {example}" for example in self.examples)
            formatter._add_item(str, [f"for example:{lines}\n\n"])
        for title, actions in self._sections(every or not self.first):
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _sections(self, every: bool) -> Iterator[tuple[str | None, list[argparse.Action]]]:
        first = {"--help", "--help-all", *self.first.split()}
        for group in self._action_groups:
            listed: list[argparse.Action] = []
            for action in group._group_actions:
                if isinstance(action, argparse._SubParsersAction):
                    yield from _by_verb(action._choices_actions)
                elif every or not action.option_strings or first & {*action.option_strings}:
                    listed.append(action)
            yield group.title, listed


# Stands for all optional options in a usage line.
_OPTIONS = argparse.Action([], "options", nargs="?", metavar="OPTION ...")


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        parser._print_message(parser.format_help(every=True), sys.stdout)
        parser.exit()


def _by_verb(commands: Sequence[argparse.Action]) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Yields commands by verb; subcommands, which have no verb, under one title."""
    verbs: dict[str, list[argparse.Action]] = {verb: [] for verb in (*VERBS, "commands")}
    for command in map(copy, commands):
        verb, _, words = (command.help or "").partition(": ")
        command.help = words if verb in VERBS else command.help
        verbs[verb if verb in VERBS else "commands"].append(command)
    yield from verbs.items()


def _explain_usage(parser: argparse.ArgumentParser, message: str) -> str:
    command = re.match(r"argument COMMAND: invalid choice: (['\"])(.*)\1 \(choose from ", message, re.DOTALL)
    if command:
        # If options precede the command, an option's value is mistaken for the command.
        error = UnknownName("command", command[2][:80], commands_of(parser))
        return f"{error} Options follow the command."
    lacking = re.match(r"the following arguments are required: (.*)|argument (\S+): expected .* argument", message)
    words = "; ".join(_describe_lacking(parser, *re.split(r"[,/] ?", lacking[1] or lacking[2]))) if lacking else ""
    return message[:1].lower() + message[1:].rstrip(".") + f"{f' ({words})' if words else ''}."


def _describe_lacking(parser: argparse.ArgumentParser, *names: str) -> Iterator[str]:
    """Explains missing arguments by their help: 'RUN is an id, a file's stem, a path, or 'last''."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        option_names = set(action.option_strings) or {str(action.metavar or action.dest)}
        if action.help and (name := next((name for name in names if name in option_names), "")):
            yield f"{name}: {formatter._expand_help(action)}"


def _options(parser: argparse.ArgumentParser) -> set[str]:
    words: set[str] = set()
    for action in parser._actions:
        words.update(action.option_strings)
    return words.union(*map(_options, commands_of(parser).values()))


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    commands: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands |= action.choices
    return commands


def parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parses the words; the command that got an unknown argument reports it."""
    arguments, unknown = parser.parse_known_args(words)
    if not unknown:
        return arguments
    command = meant_by(parser, arguments)
    assert isinstance(command, Parser)
    raise UnknownName("argument", unknown[0].partition("=")[0], _options(command), f"those of `{command.prog} --help`")


def meant_by(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> argparse.ArgumentParser:
    for name in (arguments.command, getattr(arguments, "subcommand", None)):
        parser = commands_of(parser)[name] if name is not None else parser
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    make_usable()
    try:
        with ends_are_interrupts(), _report_exits(), _report_open_stores():
            code = _run(words)
    except Fp8benchError as error:
        remedy = _remedy(words, error)
        complain(f"{error}\n  {shlex.join(remedy)}" if remedy else str(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        if (name := (error.name or "").partition(".")[0]) in ("", "fp8bench"):
            raise
        problem = f"{name} is not installed for {sys.executable}, and this needs it"
        complain(f"{problem}: pip install {_CALLED.get(name, name)}")
        return UsageError.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED
    except MemoryError:
        complain("this process got no more memory. Free some, or raise its limit (ulimit -v); what was kept stays.")
        return EXIT_FAILED
    except BrokenPipeError:
        silence()  # the reader of our output has closed the pipe
        return EXIT_OK
    # A user's script runs here, so that its exits, signals and exceptions pass through.
    return code if isinstance(code, int) else code()


def _remedy(words: Sequence[str], error: Fp8benchError) -> Sequence[str]:
    """Returns a command line to paste after wrong usage: a corrected one, or else one that explains more."""
    if error.nearest and (corrected := _correct_words(words, error.given, error.nearest)):
        return ("fp8bench", *corrected)
    if error.instead or not isinstance(error, UsageError) or re.search("[`:] ?fp8bench |\n", str(error)):
        return error.instead
    command = [word for word in words if word in COMMANDS][:1]
    return ("fp8bench", *command, "--help")


def _correct_words(words: Sequence[str], wrong: str, meant: str) -> list[str]:
    """Returns the words with the wrong one corrected; [] if no word contains it."""
    preceding: list[str] = []
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        following = list(words[place + 1 :])
        if meant.endswith("=") and option == wrong:
            value = value if equals or not following else following.pop(0)
            return [*preceding, *f"{meant}{value}".split(), *following]
        if word == wrong:
            return [*preceding, *meant.split(), *following]
        part = re.compile(rf"(?<![\w.-]){re.escape(wrong)}(?![\w.-])")
        if part.search(word):
            return [*preceding, part.sub(lambda _: meant, word, count=1), *following]
        preceding.append(word)
    return []


@contextmanager
def _report_open_stores() -> Iterator[None]:
    """Prints store warnings as sentences, without the line of code that warned."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_warning(message: Warning | str, category: type[Warning], *arguments: Any, **named: Any) -> None:
            complain(str(message)) if issubclass(category, OpenStore) else show(message, category, *arguments, **named)

        warnings.showwarning = show_warning
        yield


@contextmanager
def _report_exits() -> Iterator[None]:
    """Reports os._exit() in a user's code, which would end this process with only an exit code, perhaps 0."""
    exit_now, own_pid = os._exit, os.getpid()

    def tell(status: int) -> NoReturn:
        if os.getpid() == own_pid:  # forks may exit as they like
            caller = sys._getframe(1)
            place = f"{Path(caller.f_code.co_filename).name}, line {caller.f_lineno}"
            complain(f"{place} ended the whole process (os._exit({status})). Nothing that came after was done.")
            status = UsageError.exit_code
        exit_now(status)

    os._exit = tell
    try:
        yield
    finally:
        os._exit = exit_now


def _run(words: list[str]) -> int | Callable[[], int]:
    """Runs a command. Returns its exit code, or a function that runs a user's script and returns it."""
    # 1. A suite in place of a command is the most common mistake: suggest the right command.
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        from fp8bench.plan.asked_suites import known_suites

        if words[0] in known_suites() or words[0].endswith(".py"):
            raise UsageError(
                f"{words[0]!r:.80} is a suite, and the command before it is missing.",
                instead=("fp8bench", "suite", *words),
            )
        raise UnknownName("command", words[0], COMMANDS)
    # 2. Build only the requested command, because imports take time.
    parser = build_parser([word for word in words if word in COMMANDS][:1])
    arguments = parse(parser, words)
    if getattr(arguments, "config", None) is not None:
        from fp8bench.cli.config_file import with_config

        arguments = with_config(parser, commands_of(parser)[arguments.command], words, arguments.config)
    # 3. A command alone prints its help.
    arguments.words = words
    if arguments.command is None or getattr(arguments, "subcommand", "") is None:
        meant_by(parser, arguments).print_help()
        return EXIT_OK
    # 4. Run the command; user code must not end it silently.
    check_working_directory()
    import_own(arguments)
    try:
        code = command_module(arguments.command).run(arguments)
    except SystemExit as error:
        from fp8bench.user_code import own_words

        raise UsageError(f"your code ended the command: {own_words(error)}. Let it raise an error instead.") from None
    # Flush stdout: a full disk is reported here, with an exit code, and not while Python shuts down.
    say("")
    return code if callable(code) else int(code)


def check_working_directory() -> None:
    """Raises UsageError if somebody has deleted the directory in which the command was started."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "the working directory has been deleted. Change to a directory that exists, and run the command again."
        ) from None


def import_own(arguments: argparse.Namespace) -> None:
    if "imports" not in arguments:
        return
    from fp8bench.plan.asked_suites import files_of
    from fp8bench.user_code import import_user_modules

    # The script `fp8bench` does not have the working directory on its path, `python -m fp8bench` does.
    working_directory = str(Path.cwd())
    if "" not in sys.path and working_directory not in sys.path:
        sys.path.insert(0, working_directory)
    suite = getattr(arguments, "suite", None) or getattr(arguments, "what", None) or ""
    import_user_modules((*arguments.imports, *files_of(suite)))
