"""`fp8bench store`: remove unneeded files from a store."""

from __future__ import annotations

import argparse

from fp8bench import units
from fp8bench.cli.options import add_common, subcommands
from fp8bench.cli.outputs import print_lines
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_OK


def add(parser: argparse.ArgumentParser) -> None:
    words = "list checkpoints that no stored result needs"
    prune = subcommands(parser)("prune", words, "Exit codes: 0 done, 2 wrong usage, or something could not be removed.")
    add_common(prune, "--store", help="as in suite")
    prune.add_argument("--yes", action="store_true", help="delete them")


def run(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.history import existing_store, prune_store

    store = existing_store(arguments.store, TERMINAL)
    parts = prune_store(store, remove=arguments.yes)
    total, verb = units.size(sum(size for _, size in parts)), "removed" if arguments.yes else "may go"
    lines = [f"{store}: {total} {verb}" if parts else f"{store}: there is nothing that nobody needs"]
    lines += [f"  {units.size(size)}: {content}" for content, size in parts]
    lines += ["  remove it with --yes"] if parts and not arguments.yes else []
    print_lines(lines)
    return EXIT_OK
