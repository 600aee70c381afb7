"""`fp8bench store`: what is made of a store as a whole."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fp8bench.cli.grammar import shared
from fp8bench.cli.outputs import say_folded
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_OK, StoreError
from fp8bench.report.terminal.history import count_of

if TYPE_CHECKING:
    from fp8bench.store.compacted.restore import Restored

_COPYING = {
    "restore": "write the files of a store that were compacted and are not there any more, byte for byte",
    "publish": "put what was compacted into object storage, its index last",
    "fetch": "get the store that was published there, and what is new of it the next time",
}


def add(parser: argparse.ArgumentParser) -> None:
    """The commands of a store, each with its options."""
    commands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", parser_class=type(parser))
    words = "write a store into Parquet files: for each machine and month one of figures and one of the files"
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
        if name != "restore":
            one.add_argument("address", metavar="ADDRESS", help="a place of a store's own there: s3://bucket/box")
        shared(one, "--store", help="as in suite")


def run(arguments: argparse.Namespace) -> int:
    """Compact, copy or restore; returns the exit code."""
    commands = {"compact": _compact, "publish": _publish, "fetch": _fetch, "restore": _restore}
    return commands[arguments.subcommand](arguments)


def _publish(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.history import existing_store
    from fp8bench.store.compacted.object_storage import publish

    done = publish(existing_store(arguments.store, TERMINAL), arguments.address)
    say_folded([f"{arguments.address}: {done.words}"])
    return EXIT_OK


def _fetch(arguments: argparse.Namespace) -> int:
    from fp8bench.store.compacted.object_storage import fetch

    copied, restored = fetch(arguments.address, arguments.store)
    return _say_restored(arguments.store, restored, f"{copied.words}; ")


def _restore(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.history import existing_store
    from fp8bench.store.compacted.restore import restore

    return _say_restored(arguments.store, restore(existing_store(arguments.store, TERMINAL)))


def _say_restored(store: Path, done: Restored, before: str = "") -> int:
    """What was written, and whatever was not. Raises StoreError where some of it could not be had."""
    gone = f", {done.removed} removed that are not there any more" if done.removed else ""
    lines = [f"{store}: {before}{count_of(done.written, 'file')} written, {done.there} here already{gone}"]
    lines += [f"  left as it is here, where it was changed: {name}" for name in done.own]
    say_folded([*lines, f"  see it with: fp8bench history list --store {store}"])
    if done.damaged:
        again = "Get it again from where it was published, or from a copy"
        raise StoreError(f"{'; '.join(done.damaged)}. {again}.")
    return EXIT_OK


def _compact(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.history import compacted, existing_store

    store = existing_store(arguments.store, TERMINAL)
    done = compacted(store, TERMINAL)
    archived = done.archived
    written = len(done.written) + len(archived.written)
    files = count_of(written + done.kept + archived.kept, "Parquet file")
    runs, kept = count_of(done.runs, "run"), count_of(archived.files, "whole file")
    lines = [f"{store}: {runs}, {count_of(done.rows, 'figure')}, {kept} in {files}; {written} written now"]
    lines += [
        f"  made again, since it was not what had been written: {name}" for name in (*done.mended, *archived.mended)
    ]
    if done.busy:
        lines.append(f"  left for the next time: {count_of(done.busy, 'commit')} with runs that changed meanwhile")
    lines += [
        f"  left for the next time, since it changed meanwhile or cannot be read: {name}" for name in archived.left
    ]
    say_folded(lines)
    return EXIT_OK
