"""`fp8bench show`: print a stored run, duel or training."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from fp8bench.cli.grammar import shared
from fp8bench.cli.outputs import (
    check_outputs,
    print_duel,
    print_fleet,
    print_histories,
    print_run,
    print_shares,
    print_tapes,
    print_training,
    wanted_of,
)
from fp8bench.cli.streams import complain
from fp8bench.errors import EXIT_INTERRUPTED, EXIT_OK, RunNotFound, UsageError
from fp8bench.model import Run
from fp8bench.store.duels import find_duel, load_duel
from fp8bench.store.runs.listing import find_run, load_named
from fp8bench.store.trainings import find_training, id_of, load_training


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    words = "an id, a file's stem, a path, or 'last'; a duel's or a training's too, but for 'last'"
    parser.add_argument("run", metavar="RUN", help=words)
    shared(parser, "--store", help="as in suite")
    words = "of a training: what every history, margin and interval would have done to this arm's amaxes"
    parser.add_argument("--histories", metavar="ARM", help=words)
    words = "of a run: the operators of its steps, their FLOPs and bytes, by precision"
    parser.add_argument("--tape", action="store_true", help=words)
    words = "of a run: what each kind of work and each module takes of a step"
    parser.add_argument("--shares", action="store_true", help=words)
    words = "of a run that is a cell of a fleet's plan: the machines that measured cells of it, side by side"
    parser.add_argument("--fleet", action="store_true", help=words)
    shared(parser, "--explain", "--json", "--csv", "--tensorboard", "--wandb")


def run(arguments: argparse.Namespace) -> int:
    """Print it, and export it where that was asked for."""
    from fp8bench.jobs.after_run import exported, training_exported

    check_outputs(arguments)
    duel = find_duel(arguments.run, arguments.store)
    training = find_training(arguments.run, arguments.store)
    if training is not None:
        _check_meant(arguments.run, training, duel, arguments.store)
        _refuse(arguments, arguments.run, "training", ("tape", "shares", "fleet"))
        kept = load_training(training)
        if arguments.histories is None:
            print_training(kept, arguments)
        else:
            _refuse(arguments, "what --histories prints", "table", ("csv",))
            print_histories(kept, arguments.histories, arguments)
        told = training_exported(kept, arguments.store, wanted_of(arguments), complain)
        return EXIT_OK if told else EXIT_INTERRUPTED
    if duel is None:
        _refuse(arguments, arguments.run, "run", ("histories",))
        run = load_named(arguments.run, arguments.store)
        _print(run, arguments)
        return EXIT_OK if exported(run, arguments.store, wanted_of(arguments), complain) else EXIT_INTERRUPTED
    _refuse(arguments, duel.stem, "duel", ("csv", "tensorboard", "wandb", "histories", "tape", "shares", "fleet"))
    print_duel(load_duel(duel), arguments)
    return EXIT_OK


def _print(run: Run, arguments: argparse.Namespace) -> None:
    """The run, or the table of it that is wanted."""
    tables = {"tape": print_tapes, "shares": print_shares, "fleet": print_fleet}
    wanted = [name for name in tables if getattr(arguments, name)]
    if len(wanted) > 1:
        raise UsageError(f"--{wanted[0]} and --{wanted[1]} are two tables. Give one of them.")
    (tables[wanted[0]] if wanted else print_run)(run, arguments)


def _refuse(arguments: argparse.Namespace, name: str, what: str, options: Sequence[str]) -> None:
    for option in options:
        if getattr(arguments, option) not in (None, False):
            raise UsageError(
                f"{name!r:.80} is a {what}, which --{option} does not go with. Leave it out, or use --json."
            )


def _check_meant(word: str, training: Path, duel: Path | None, store: Path) -> None:
    """Raise where the beginning of an id is that of something else, too."""
    names = id_of(training), training.parent.name
    if word in names or not any(name.startswith(word) for name in names):
        return
    other = duel
    with contextlib.suppress(RunNotFound):
        other = other or find_run(word, store)
    if other is not None:
        raise RunNotFound(f"{word!r} fits {other.stem} and the training {training.parent.name}. Give more of the id.")
