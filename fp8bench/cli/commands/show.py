"""`fp8bench show`: print a stored run or duel."""

from __future__ import annotations

import argparse

from fp8bench.cli.grammar import shared
from fp8bench.cli.outputs import check_outputs, print_duel, print_run, wanted_of
from fp8bench.cli.streams import complain
from fp8bench.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError
from fp8bench.store.duels import find_duel, load_duel
from fp8bench.store.runs.listing import load_named


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    words = "an id, a file's stem, a path, or 'last'; a duel's too, but for 'last'"
    parser.add_argument("run", metavar="RUN", help=words)
    shared(parser, "--store", help="as in suite")
    shared(parser, "--explain", "--json", "--csv", "--tensorboard", "--wandb")


def run(arguments: argparse.Namespace) -> int:
    """Print it, and export it where that was asked for."""
    from fp8bench.jobs.after_run import exported

    check_outputs(arguments)
    duel = find_duel(arguments.run, arguments.store)
    if duel is None:
        run = load_named(arguments.run, arguments.store)
        print_run(run, arguments)
        return EXIT_OK if exported(run, arguments.store, wanted_of(arguments), complain) else EXIT_INTERRUPTED
    for name in ("csv", "tensorboard", "wandb"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"{duel.stem} is a duel, which --{name} does not go with. Leave it out, or use --json.")
    print_duel(load_duel(duel), arguments)
    return EXIT_OK
