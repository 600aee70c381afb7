"""`fp8bench store`: deletes files of a store that no result needs."""

from __future__ import annotations

import argparse

from fp8bench import units
from fp8bench.cli.options import add_common_options, subcommands
from fp8bench.cli.outputs import print_lines
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.errors import EXIT_OK


def add(parser: argparse.ArgumentParser) -> None:
    prune_help_text = "list checkpoints that no stored result needs"
    prune_parser = subcommands(parser)(
        "prune", prune_help_text, "Exit codes: 0 done, 2 wrong usage, or something could not be removed."
    )
    add_common_options(prune_parser, "--store", help="as in suite")
    prune_parser.add_argument("--yes", action="store_true", help="delete them")


def run(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.history import check_store_exists, prune_store

    store = check_store_exists(arguments.store, TERMINAL_JOB_OBSERVER)
    removable_files = prune_store(store, remove=arguments.yes)
    if not removable_files:
        print_lines([f"{store}: there is nothing to remove"])
        return EXIT_OK
    total = units.size(sum(size for _, size in removable_files))
    lines = [f"{store}: {total} {'removed' if arguments.yes else 'can be removed'}"]
    lines += [f"  {units.size(size)}: {content}" for content, size in removable_files]
    if not arguments.yes:
        lines.append("  remove these files with --yes")
    print_lines(lines)
    return EXIT_OK
