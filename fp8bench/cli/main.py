"""Runs the command line: finds the command, parses its options, and turns errors into a sentence and an exit code.

For `--help`, `list` without arguments and wrong usage, only small modules are imported. Each command imports its large
modules when it runs, so that a mistyped name is answered in a tenth of a second instead of two seconds.
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
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from fp8bench import __version__
from fp8bench.cli.streams import repair_standard_streams, say, silence_stdout, write_sentence_to_stderr
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Fp8benchError, OpenStore, UnknownName, UsageError
from fp8bench.feature_list import list_features, read_feature_help
from fp8bench.measure.interrupts import treat_end_signals_as_interrupts
from fp8bench.suggestions import guess_intended_name

DEFAULT_STORE = ".fp8bench"
# The help groups commands by these verbs. The description of a command begins with its verb.
COMMAND_HELP_VERBS = ("measure", "understand", "decide", "guard", "machine")
# Each core command is a module of cli/commands with the functions add(parser) and run(arguments). The module may have
# EXAMPLES. If the command has many options, it may have FIRST_OPTIONS: --help then shows only these.
_CORE_COMMANDS = {
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
# The package to install for a missing module, if the package has a different name than the module.
_PACKAGE_OF_MODULE = {"yaml": "PyYAML", "pynvml": "nvidia-ml-py"}
_FEATURE_BY_COMMAND = {name.replace("_", "-"): name for name in list_features()}
COMMANDS = (*_CORE_COMMANDS, *_FEATURE_BY_COMMAND)


def import_command_module(name: str) -> ModuleType:
    if name in _FEATURE_BY_COMMAND:
        return importlib.import_module(f"fp8bench.features.{_FEATURE_BY_COMMAND[name]}.command")
    return importlib.import_module(f"fp8bench.cli.commands.{name}")


def build_parser(requested: Collection[str] = COMMANDS) -> Parser:
    """Builds the parser of the command line. Only the commands in `requested` get their options."""
    parser = Parser(
        prog="fp8bench",
        allow_abbrev=False,
        description="Does low precision pay here, what does it cost in numbers, and can you believe it?",
        epilog="Begin with: fp8bench suite transformer --dtypes fp8,bf16. To read more: fp8bench COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"fp8bench {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name in COMMANDS:
        help_text = _CORE_COMMANDS.get(name) or read_feature_help(_FEATURE_BY_COMMAND[name])
        # The other commands appear only in the list of commands, so they need no options.
        command = commands.add_parser(name, help=help_text, allow_abbrev=False, add_help=name in requested)
        if name in requested:
            module = import_command_module(name)
            module.add(command)
            command.set_examples(getattr(module, "EXAMPLES", ()), getattr(module, "FIRST_OPTIONS", ""))
    return parser


class Parser(argparse.ArgumentParser):
    """An argparse parser that answers wrong usage with one sentence, which suggests the most similar correct word.

    Its help groups commands by verb and shows examples. If a command has many options, the help lists only the common
    options.
    """

    examples: Sequence[str] = ()
    first_options = ""
    typed_words: Sequence[str] = ()

    def __init__(self, *words: Any, **keywords: Any) -> None:
        super().__init__(*words, **keywords)
        if self.add_help:  # --help-all is hidden, unless set_examples gives it a help text
            self.add_argument(
                "--help-all", action=_HelpAllAction, nargs=0, default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )

    def error(self, message: str) -> NoReturn:
        # argparse passes nothing but the message, so read the wrong word and the choices from it.
        invalid_choice = re.match(
            r"argument \S+: invalid choice: (['\"])(.*)\1 \(choose from (.*)\)", message, re.DOTALL
        )
        wrong_word, nearest_word = "", None
        if invalid_choice:
            wrong_word, choices = invalid_choice[2], invalid_choice[3].replace("'", "").split(", ")
            nearest_word = guess_intended_name("choice", wrong_word, choices)
            # The user may have left out the only possible word, such as `suite` in `duel suite gemm`.
            if len(choices) == 1 and wrong_word not in COMMANDS:
                nearest_word = f"{choices[0]} {wrong_word}"
        first_usage_example = (
            "".join(self.examples[:1]).partition("  #")[0] if "arguments are required" in message else ""
        )
        suggestion = shlex.split(first_usage_example)
        # If only an option is missing, suggest the typed command with this option added.
        if " are required: --" in message:
            suggestion = [*self.prog.split(), *self.typed_words, message.rpartition(" ")[2], "..."]
        explanation = f"{_explain_usage(self, message)} See `{self.prog} --help`."
        raise UsageError(explanation, wrong_word, nearest_word, suggestion)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.typed_words = tuple(args or ())
        return super().parse_known_args(args, namespace)

    def set_examples(self, examples: Sequence[str], options: str) -> None:
        self.examples, self.first_options = examples, options
        if options:
            help_all_action = next(action for action in self._actions if isinstance(action, _HelpAllAction))
            help_all_action.help = f"show all {sum(bool(action.option_strings) for action in self._actions)} options"

    def format_help(self, with_all_options: bool = False) -> str:
        formatter = self._get_formatter()
        required_parser_actions = [action for action in self._actions if action.required or not action.option_strings]
        optional_parser_actions = {*self._actions} - {*required_parser_actions}
        formatter.add_usage(
            self.usage,
            [_OPTIONS_IN_USAGE, *required_parser_actions]
            if len(optional_parser_actions) > 2
            else required_parser_actions,
            [],
        )  # OPTION ... is shown only if there are options besides --help and --help-all
        formatter.add_text(self.description)
        if self.examples:
            example_lines = "".join(f"\n  {example}" for example in self.examples)
            formatter._add_item(str, [f"for example:{example_lines}\n\n"])
        for title, actions in self._list_help_sections(with_all_options or not self.first_options):
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _list_help_sections(self, with_all_options: bool) -> Iterator[tuple[str | None, list[argparse.Action]]]:
        first_option_names = {"--help", "--help-all", *self.first_options.split()}
        for group in self._action_groups:
            group_actions: list[argparse.Action] = []
            for action in group._group_actions:
                if isinstance(action, argparse._SubParsersAction):
                    yield from _group_commands_by_verb(action._choices_actions)
                elif with_all_options or not action.option_strings or first_option_names & {*action.option_strings}:
                    group_actions.append(action)
            yield group.title, group_actions


# The usage line shows this placeholder instead of all options.
_OPTIONS_IN_USAGE = argparse.Action([], "options", nargs="?", metavar="OPTION ...")


class _HelpAllAction(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        parser._print_message(parser.format_help(with_all_options=True), sys.stdout)
        parser.exit()


def _group_commands_by_verb(commands: Sequence[argparse.Action]) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Yields each verb with its commands. Subcommands have no verb, and come under the title "commands"."""
    commands_by_verb: dict[str, list[argparse.Action]] = {verb: [] for verb in (*COMMAND_HELP_VERBS, "commands")}
    # Change only copies, because the parser may print its help again.
    for command in map(copy, commands):
        verb, _, words = (command.help or "").partition(": ")
        command.help = words if verb in COMMAND_HELP_VERBS else command.help
        commands_by_verb[verb if verb in COMMAND_HELP_VERBS else "commands"].append(command)
    yield from commands_by_verb.items()


def _explain_usage(parser: argparse.ArgumentParser, message: str) -> str:
    command_match = re.match(r"argument COMMAND: invalid choice: (['\"])(.*)\1 \(choose from ", message, re.DOTALL)
    if command_match:
        # If an option comes before the command, argparse mistakes the value of the option for the command.
        error = UnknownName("command", command_match[2][:80], subparsers_by_name(parser))
        return f"{error} Options follow the command."
    missing_arguments_match = re.match(
        r"the following arguments are required: (.*)|argument (\S+): expected .* argument", message
    )
    explanation = (
        "; ".join(
            _describe_missing_arguments(
                parser, *re.split(r"[,/] ?", missing_arguments_match[1] or missing_arguments_match[2])
            )
        )
        if missing_arguments_match
        else ""
    )
    return message[:1].lower() + message[1:].rstrip(".") + f"{f' ({explanation})' if explanation else ''}."


def _describe_missing_arguments(parser: argparse.ArgumentParser, *names: str) -> Iterator[str]:
    """Yields the help of each missing argument, such as 'RUN: an id, a name, a path, or 'last''."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        option_names = set(action.option_strings) or {str(action.metavar or action.dest)}
        if action.help and (name := next((name for name in names if name in option_names), "")):
            yield f"{name}: {formatter._expand_help(action)}"


def _list_option_strings(parser: argparse.ArgumentParser) -> set[str]:
    options = set(chain.from_iterable(action.option_strings for action in parser._actions))
    return options.union(*map(_list_option_strings, subparsers_by_name(parser).values()))


def subparsers_by_name(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    commands: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands |= action.choices
    return commands


def parse_command_words(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parses the words of a command line. Raises UnknownName for an unknown option, and refers to the help of the
    command.
    """
    arguments: argparse.Namespace
    arguments, unknown_words = parser.parse_known_args(words)
    if not unknown_words:
        return arguments
    command = find_requested_parser(parser, arguments)
    assert isinstance(command, Parser)
    option, help_hint = unknown_words[0].partition("=")[0], f"those of `{command.prog} --help`"
    if any(action.nargs == argparse.REMAINDER for action in command._actions):
        help_hint += f". Options of your script go after it: {command.prog} train.py {unknown_words[0]} VALUE"
    raise UnknownName("argument", option, _list_option_strings(command), help_hint)


def find_requested_parser(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> argparse.ArgumentParser:
    for name in (arguments.command, getattr(arguments, "subcommand", None)):
        parser = subparsers_by_name(parser)[name] if name is not None else parser
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    repair_standard_streams()
    try:
        with treat_end_signals_as_interrupts(), _report_process_exits(), _report_store_warnings():
            exit_code_or_function = _run_command(words)
    except Fp8benchError as error:
        suggestion = _suggest_corrected_command(words, error)
        write_sentence_to_stderr(f"{error}\n  {shlex.join(suggestion)}" if suggestion else str(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        # A missing module of fp8bench itself is a bug, which no `pip install` mends.
        if (name := (error.name or "").partition(".")[0]) in ("", "fp8bench"):
            raise
        explanation = f"{name} is not installed for {sys.executable}, and this needs it"
        write_sentence_to_stderr(f"{explanation}: pip install {_PACKAGE_OF_MODULE.get(name, name)}")
        return UsageError.exit_code
    except KeyboardInterrupt:
        write_sentence_to_stderr("interrupted")
        return EXIT_INTERRUPTED
    except MemoryError:
        write_sentence_to_stderr(
            "this process ran out of memory. Free some, or raise its limit (ulimit -v). Stored results are intact."
        )
        return EXIT_FAILED
    except BrokenPipeError:
        silence_stdout()  # the reader of a pipe has closed it
        return EXIT_OK
    # Run a user's script here, outside of the error handlers above, so that its exits, signals and exceptions reach the
    # shell.
    return exit_code_or_function if isinstance(exit_code_or_function, int) else exit_code_or_function()


def _suggest_corrected_command(words: Sequence[str], error: Fp8benchError) -> Sequence[str]:
    """Returns a command line that the user can paste after an error: the corrected command line, the command that the
    error suggests, or one that prints help. Returns an empty sequence if the error's text already has a command.
    """
    if error.nearest and (corrected_words := _replace_wrong_word(words, error.given, error.nearest)):
        return ("fp8bench", *corrected_words)
    if error.instead or not isinstance(error, UsageError) or re.search("[`:] ?fp8bench |\n", str(error)):
        return error.instead
    first_command = [word for word in words if word in COMMANDS][:1]
    return ("fp8bench", *first_command, "--help")


def _replace_wrong_word(words: Sequence[str], wrong_word: str, correct_word: str) -> list[str]:
    """Returns the words of a command line in which the wrong word is replaced. Returns [] if it does not occur."""
    # First try the words that equal the wrong word, or that have it as a part between '=' and ','. Words that only
    # contain it, as file.py:int8 contains int8, come last.
    for index in sorted(range(len(words)), key=lambda position: wrong_word not in re.split("[=,]", words[position])):
        word, previous_words = words[index], words[:index]
        option, equals, value = word.partition("=")
        next_words = list(words[index + 1 :])
        if correct_word.endswith("=") and option == wrong_word:
            value = value if equals or not next_words else next_words.pop(0)
            return [*previous_words, *f"{correct_word}{value}".split(), *next_words]
        if word == wrong_word:
            return [*previous_words, *correct_word.split(), *next_words]
        pattern = re.compile(rf"(?<![\w.-]){re.escape(wrong_word)}(?![\w.-])")
        if pattern.search(word):
            return [*previous_words, pattern.sub(lambda _: correct_word, word, count=1), *next_words]
    return []


@contextmanager
def _report_store_warnings() -> Iterator[None]:
    """A context in which warnings about a store's permissions are printed as sentences, without a line of code."""
    with warnings.catch_warnings():
        original_show_warning = warnings.showwarning

        def show_warning(message: Warning | str, category: type[Warning], *arguments: Any, **keywords: Any) -> None:
            write_sentence_to_stderr(str(message)) if issubclass(category, OpenStore) else original_show_warning(
                message, category, *arguments, **keywords
            )

        warnings.showwarning = show_warning
        yield


@contextmanager
def _report_process_exits() -> Iterator[None]:
    """A context in which a call of os._exit() in a user's code is reported. Otherwise it would end the process
    silently.
    """
    exit_now, own_pid = os._exit, os.getpid()

    def report_exit(status: int) -> NoReturn:
        if os.getpid() == own_pid:  # a forked process may call os._exit()
            caller_frame = sys._getframe(1)
            user_call_site = f"{Path(caller_frame.f_code.co_filename).name}, line {caller_frame.f_lineno}"
            write_sentence_to_stderr(
                f"{user_call_site} ended the whole process (os._exit({status})). The command did not finish."
            )
            status = UsageError.exit_code
        exit_now(status)

    os._exit = report_exit
    try:
        yield
    finally:
        os._exit = exit_now


def _run_command(words: list[str]) -> int | Callable[[], int]:
    """Runs a command and returns its exit code. For a user's script, returns a function that runs the script and
    returns its exit code.
    """
    # 1. If the first word is a suite, the user has probably forgotten the command, so suggest it.
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        from fp8bench.plan.asked_suites import known_suites

        if words[0] in known_suites() or words[0].endswith(".py"):
            raise UsageError(
                f"{words[0]!r:.80} is a suite, and the command before it is missing.",
                instead=("fp8bench", "suite", *words),
            )
        raise UnknownName("command", words[0], COMMANDS)
    # 2. Make the parser with the options of the requested command only, because importing all commands takes time.
    parser = build_parser([word for word in words if word in COMMANDS][:1])
    arguments = parse_command_words(parser, words)
    if getattr(arguments, "config", None) is not None:
        from fp8bench.cli.config_file import parse_with_config

        arguments = parse_with_config(parser, subparsers_by_name(parser)[arguments.command], words, arguments.config)
    # 3. Print the help if the command or its subcommand is missing.
    arguments.words = words
    if arguments.command is None or getattr(arguments, "subcommand", "") is None:
        find_requested_parser(parser, arguments).print_help()
        return EXIT_OK
    # 4. Run the command. If a user's code exits, report this as an error.
    check_working_directory()
    import_user_code(arguments)
    try:
        exit_code_or_function = import_command_module(arguments.command).run(arguments)
    except SystemExit as error:
        from fp8bench.user_code import own_words

        raise UsageError(f"your code ended the command: {own_words(error)}. Let it raise an error instead.") from None
    # Flush stdout now, so that a full disk gives an error and an exit code. While Python shuts down, it is too late for
    # this.
    say("")
    return exit_code_or_function if callable(exit_code_or_function) else int(exit_code_or_function)


def check_working_directory() -> None:
    """Raises UsageError if the working directory was deleted."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "the working directory has been deleted. Change to a directory that exists, and run the command again."
        ) from None


def import_user_code(arguments: argparse.Namespace) -> None:
    # `python -m fp8bench` puts the working directory on the import path, but the script `fp8bench` does not.
    working_directory = str(Path.cwd())
    if "" not in sys.path and working_directory not in sys.path:
        sys.path.insert(0, working_directory)
    if "imports" not in arguments:
        return
    from fp8bench.plan.asked_suites import suite_files
    from fp8bench.user_code import import_user_modules

    suite_name = getattr(arguments, "suite", None) or getattr(arguments, "what", None) or ""
    import_user_modules((*arguments.imports, *suite_files(suite_name)))
