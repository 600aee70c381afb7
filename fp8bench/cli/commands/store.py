"""`fp8bench store`: what is made of a store as a whole."""

from __future__ import annotations

import argparse

from fp8bench.cli.grammar import shared
from fp8bench.cli.outputs import say_folded
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_OK
from fp8bench.report.terminal.history import count_of


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


def run(arguments: argparse.Namespace) -> int:
    """Compact; returns the exit code."""
    from fp8bench.jobs.history import compacted, existing_store

    store = existing_store(arguments.store, TERMINAL)
    done = compacted(store, TERMINAL)
    written = len(done.written)
    files = count_of(written + done.kept, "Parquet file")
    lines = [f"{store}: {count_of(done.runs, 'run')}, {count_of(done.rows, 'figure')}, {files}; {written} written now"]
    lines += [f"  made again, since it was not what had been written: {name}" for name in done.mended]
    if done.busy:
        lines.append(f"  left for the next time: {count_of(done.busy, 'commit')} with runs that changed meanwhile")
    say_folded(lines)
    return EXIT_OK
