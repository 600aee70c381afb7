"""`fp8bench store`: packs, unpacks and cleans a whole store."""

from __future__ import annotations

import argparse

from fp8bench import units
from fp8bench.cli.options import shared, subcommands
from fp8bench.cli.outputs import say_folded
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_OK, StoreError
from fp8bench.report.terminal.history import count_of


def add(parser: argparse.ArgumentParser) -> None:
    command = subcommands(parser)
    words = "pack a store for each machine and month: figures into a Parquet file, run files into a tar.gz"
    codes = "Exit codes: 0 done, 2 wrong usage, DuckDB is not installed, or it cannot be written."
    compact = command("compact", words, codes)
    shared(compact, "--store", help="as in suite; the runs stay as they are")
    shared(compact, "--import", help="module or .py file of suites of your own that were measured")
    words = "write the files of a store that were compacted and are not there any more, byte for byte"
    codes = "Exit codes: 0 done, 2 wrong usage, it cannot be written, or it is not whole."
    shared(command("restore", words, codes), "--store", help="as in suite")
    words = "say what nobody needs to read what a store holds: checkpoints of trainings, and what killed writers left"
    prune = command("prune", words, "Exit codes: 0 done, 2 wrong usage, or something could not be removed.")
    shared(prune, "--store", help="as in suite")
    prune.add_argument("--yes", action="store_true", help="remove it")


def run(arguments: argparse.Namespace) -> int:
    return {"compact": _compact, "restore": _restore, "prune": _prune}[arguments.subcommand](arguments)


def _restore(arguments: argparse.Namespace) -> int:
    """Says what was written, and what was not. Raises StoreError if something was damaged."""
    from fp8bench.jobs.history import existing_store
    from fp8bench.store.compacted.archive import restore

    store = existing_store(arguments.store, TERMINAL)
    done = restore(store)
    lines = [f"{store}: {count_of(done.written, 'file')} written, {done.there} here already"]
    lines += [f"  left as it is here, where it was changed: {name}" for name in done.own]
    say_folded([*lines, f"  see it with: fp8bench history list --store {store}"])
    if done.damaged:
        raise StoreError(f"{'; '.join(done.damaged)}. Get it again from a copy.")
    return EXIT_OK


def _prune(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.history import existing_store, prune_store

    store = existing_store(arguments.store, TERMINAL)
    parts = prune_store(store, remove=arguments.yes)
    total, verb = units.size(sum(size for _, size in parts)), "removed" if arguments.yes else "may go"
    lines = [f"{store}: {total} {verb}" if parts else f"{store}: there is nothing that nobody needs"]
    lines += [f"  {units.size(size)}: {what}" for what, size in parts]
    lines += ["  remove it with --yes"] if parts and not arguments.yes else []
    say_folded(lines)
    return EXIT_OK


def _compact(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.history import compact_store, existing_store, read_history

    store = existing_store(arguments.store, TERMINAL)
    done = compact_store(store, TERMINAL)
    unknown = [why for why in read_history(store, TERMINAL).left if "--import" in why]
    archived = done.archived
    written = len(done.written) + len(archived.written)
    files = count_of(written + done.kept + archived.kept, "compacted file")
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
    lines += [f"  figures left out: {why}" for why in unknown]
    say_folded(lines)
    return EXIT_OK
