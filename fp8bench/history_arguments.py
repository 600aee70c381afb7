"""The grammar of `fp8bench history`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Protocol

from fp8bench import argument_types as types


class Command(Protocol):
    """Makes the parser of one command, with what all of them take."""

    def __call__(self, name: str, words: str, epilog: str = "", /) -> argparse.ArgumentParser: ...


def add_history(history: argparse.ArgumentParser, store: Path) -> None:
    """Give the parser of `history` its commands; `store` is the one that they look into by themselves."""
    commands = history.add_subparsers(dest="history_command", metavar="COMMAND", parser_class=type(history))

    def command(name: str, words: str, epilog: str = "") -> argparse.ArgumentParser:
        parser = commands.add_parser(
            name, help=words, description=words[:1].upper() + words[1:] + ".", epilog=epilog, allow_abbrev=False
        )
        parser.add_argument("--store", type=types.path, default=store, metavar="DIR", help="as in suite")
        words = "module or .py file of suites of your own that were measured"
        parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE", help=words)
        return parser

    _add_reading(command)
    _add_changes(command)
    _add_keeping(command)


def _add_reading(command: Command) -> None:
    listing = command("list", "the series that there are, or the runs")
    listing.add_argument("word", nargs="?", default="", metavar="WORD", help="only those whose line has it")
    listing.add_argument("--runs", action="store_true", help="the runs instead, newest first")
    show = command("show", "one series, commit by commit")
    words = "as `history list` names it; a part that fits one series will do"
    show.add_argument("series", metavar="SERIES", help=words)


def _add_changes(command: Command) -> None:
    codes = "Exit codes: 0 none that is open is worse, 1 one is, 2 wrong usage."
    regressions = command("regressions", "where series stepped up or down, and stayed there", codes)
    words = "also what was acknowledged, taken back by a later change, or measured with another version"
    regressions.add_argument("--all", action="store_true", help=words)
    regressions.add_argument("--json", action="store_true", help="print all of them as JSON instead")
    ack = command("ack", "say that a change of a series is known and stays, so that it alarms no more")
    words = "as in show; with * for any part, all that fit: 'gemm.Gemm.track_*(bf16, 512)'"
    ack.add_argument("series", metavar="SERIES", help=words)
    words = "the last commit that it may be, as regressions shows it; needed where several are open"
    ack.add_argument("--until", type=types.commit, metavar="COMMIT", help=words)
    ack.add_argument("--because", metavar="TEXT", help="why it stays")
    ack.add_argument("--undo", action="store_true", help="it does alarm again")


def _add_keeping(command: Command) -> None:
    codes = "Exit codes: 0 nothing is broken, 2 there is no such store, 3 something is."
    command("verify", "read every file of the store and say what is broken, and where; changes nothing", codes)
    codes = "Exit codes: 0 fine, 2 the store cannot be written, 3 something could not be made."
    command("rebuild", "make asv's view from the runs again; what asv alone measured stays", codes)
    codes = "Exit codes: 0 fine, 2 wrong usage, 3 something of the other store could not be taken."
    merge = command("merge", "take in the store of another machine, or let an interpreter count as another", codes)
    merge.add_argument("folder", nargs="?", type=types.path, metavar="DIR", help="the other store; it is only read")
    words = "an interpreter's path that counts as another's from now on: a virtual environment that moved"
    merge.add_argument("--rename-env", action="append", default=[], type=types.renaming, metavar="OLD=NEW", help=words)
