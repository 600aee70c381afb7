"""`fp8bench store`: what is made of a store as a whole."""

from __future__ import annotations

import argparse

from fp8bench.cli.grammar import shared
from fp8bench.cli.outputs import say_folded
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_OK
from fp8bench.report.terminal.history import count_of

_COPYING = {
    "publish": "put what was compacted into object storage, its index last",
    "fetch": "get what was published there into a store that has no runs, and keep what is here already",
}


def add(parser: argparse.ArgumentParser) -> None:
    """The commands of a store, each with its options."""
    commands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", parser_class=type(parser))
    words = "write what commits have come to into Parquet files, one a machine and month, for long and shared histories"
    codes = "Exit codes: 0 done, 2 wrong usage, DuckDB is not installed, or it cannot be written."
    compact = commands.add_parser(
        "compact", help=words, description=f"{words[:1].upper()}{words[1:]}.", epilog=codes, allow_abbrev=False
    )
    shared(compact, "--store", help="as in suite; the runs stay as they are")
    shared(compact, "--import", help="module or .py file of suites of your own that were measured")
    for name, words in _COPYING.items():
        codes = "Exit codes: 0 done, 2 wrong usage, it cannot be reached or written, or it is not whole."
        one = commands.add_parser(
            name, help=words, description=f"{words[:1].upper()}{words[1:]}.", epilog=codes, allow_abbrev=False
        )
        one.add_argument("address", metavar="ADDRESS", help="a place of a store's own there: s3://bucket/box")
        shared(one, "--store", help="as in suite")


def run(arguments: argparse.Namespace) -> int:
    """Compact or copy; returns the exit code."""
    say_folded(_compact(arguments) if arguments.subcommand == "compact" else _copy(arguments))
    return EXIT_OK


def _copy(arguments: argparse.Namespace) -> list[str]:
    from fp8bench.jobs.history import existing_store
    from fp8bench.store.compacted.object_storage import fetch, publish

    if arguments.subcommand == "publish":
        done = publish(existing_store(arguments.store, TERMINAL), arguments.address)
        return [f"{arguments.address}: {done.words}"]
    done = fetch(arguments.address, arguments.store)
    return [f"{arguments.store}: {done.words}", f"  see it with: fp8bench history list --store {arguments.store}"]


def _compact(arguments: argparse.Namespace) -> list[str]:
    from fp8bench.jobs.history import compacted, existing_store

    store = existing_store(arguments.store, TERMINAL)
    done = compacted(store, TERMINAL)
    written = len(done.written)
    files = count_of(written + done.kept, "Parquet file")
    lines = [f"{store}: {count_of(done.runs, 'run')}, {count_of(done.rows, 'figure')}, {files}; {written} written now"]
    lines += [f"  made again, since it was not what had been written: {name}" for name in done.mended]
    if done.busy:
        lines.append(f"  left for the next time: {count_of(done.busy, 'commit')} with runs that changed meanwhile")
    return lines
