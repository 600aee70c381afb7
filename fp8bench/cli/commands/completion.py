"""`fp8bench completion SHELL`: prints a script that completes commands, options and names in a shell.

The package shtab makes the script from the parsers of all commands. In a list with commas, the script completes the
last name.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from fp8bench.cli import option_types as types
from fp8bench.cli.main import build_parser, subparsers_by_name
from fp8bench.cli.streams import say
from fp8bench.errors import EXIT_OK, UsageError
from fp8bench.plan.asked_suites import known_suites
from fp8bench.registry import backends, devices, precisions

EXAMPLES = (
    'eval "$(fp8bench completion bash)"                  # in ~/.bashrc',
    'eval "$(fp8bench completion zsh)"                   # in ~/.zshrc, below compinit',
)
# $1 is the word to complete, a name or a list of names with commas. The further arguments are the possible names.
_BASH_FUNCTION = """_fp8bench_names() {
  local before=""
  [[ $1 == *,* ]] && before="${1%,*},"
  compgen -P "$before" -W "${*:2}" -- "${1##*,}"
}
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")


def run(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise UsageError("completion needs the package shtab: `pip install shtab`, then try again.") from None
    # The names that complete an argument, by the argument's `dest`.
    names = {
        "dtypes": precisions.names(),
        "devices": devices.names(),
        "backend": backends.names(),
        "suite": [*known_suites(), "all"],
    }
    names |= {"dtype": names["dtypes"], "reference": names["dtypes"], "device": names["devices"]}
    parser = build_parser()
    # shtab reads an attribute `complete`, which argparse's actions do not have.
    for action in _list_parser_actions(parser):
        if action.dest in names and action.choices is None:
            vars(action)["complete"] = _make_completion_by_shell(action.dest, names[action.dest])
        elif action.type is types.path:
            vars(action)["complete"] = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
    say(shtab.complete(parser, arguments.shell))
    return EXIT_OK


def _list_parser_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    actions = list(parser._actions)
    for command in subparsers_by_name(parser).values():
        actions += _list_parser_actions(command)
    return actions


def _make_completion_by_shell(name: str, words: Sequence[str]) -> dict[str, object]:
    """Returns how shtab completes an argument: in bash by a function, which the preamble of the script defines, and in
    zsh by a command.
    """
    quoted_words, function = shlex.join(words), f"_fp8bench_{name}"
    bash_script = f'{_BASH_FUNCTION}{function}() {{\n  _fp8bench_names "$1" {quoted_words}\n}}\n'
    return {
        "bash": function,
        "zsh": f"_values -s , {name} {quoted_words}",
        "preamble": {"bash": bash_script},
    }
