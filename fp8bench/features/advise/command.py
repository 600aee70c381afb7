"""`fp8bench advise`: what to do about a precision on this machine, by what was measured here."""

from __future__ import annotations

import argparse
from functools import partial

from fp8bench.cli import option_types as types
from fp8bench.cli.options import shared
from fp8bench.cli.outputs import CommandResult, check_files, check_outputs, in_store
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_FAILED, EXIT_OK, UsageError
from fp8bench.features.advise.values import Checked
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.interrupts import only_once
from fp8bench.model.request import PERCENT, whole_number

_CHECKED = 3


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Says what to do about each precision of a stored run: adopt it, leave layers high, leave steps high, or do "
        "nothing, because. Every piece of advice names the figures it rests on, all of them measured on this machine; "
        "what nobody measured is said to be so, with the command that would."
    )
    parser.epilog = "Exit codes: 0 fine, 2 wrong usage, 3 a check came to no figure, 130 interrupted."
    words = "a run, or the profile of a model of your own: an id, a file's stem, a path, or 'last'"
    parser.add_argument("run", metavar="RUN", nargs="?", help=words)
    words = "another run of this machine whose figures answer questions, too: of products, say; may be given again"
    parser.add_argument("--beside", metavar="RUN", action="append", default=[], help=words)
    words = "a training whose arms say whether a precision still learns: an id, its folder, or 'last'"
    parser.add_argument("--training", metavar="STUDY", help=words)
    words = "what an hour of the device costs, like 2.50/h: money to the same loss, with --training"
    parser.add_argument("--price", type=types.price, metavar="PRICE/h", help=words)
    words = "the gain of a step from which on a precision is worth the trouble; default 10"
    parser.add_argument("--least", type=types.number(PERCENT), default=10.0, metavar="PERCENT", help=words)
    words = "write the layers that shall stay high there, as --precision-map takes them"
    parser.add_argument("--write-map", type=types.path, metavar="FILE", help=words)
    words = f"measure what the first N pieces of advice predict, each by a run of its own; default {_CHECKED}"
    number = types.whole(whole_number(1, 100))
    parser.add_argument("--check", type=number, nargs="?", const=_CHECKED, metavar="N", help=words)
    words = "how often what was measured lay within what was predicted, of all checks that the store has"
    parser.add_argument("--score", action="store_true", help=words)
    shared(parser, "--store", help="as in suite")
    shared(parser, "--import", help="as in suite")
    shared(parser, "--md", "--all", "--explain")
    shared(parser, "--json", help="print all of it as JSON instead of the tables")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    with only_once():
        result = answer(arguments, TERMINAL)
    return result.told(arguments)


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    from fp8bench.features.advise.decide import advised
    from fp8bench.features.advise.job import basis_of, checked, costs_of, load_checks, write_map
    from fp8bench.features.advise.view import page_of, score_page, score_value, value_of

    check_files({"--write-map": arguments.write_map})
    if arguments.score:
        others = ("run", "training", "price", "write_map", "check")
        if arguments.beside or any(getattr(arguments, name) is not None for name in others):
            raise UsageError("--score is of all checks of the store: leave the run and all options of it out.")
        checks, troubles = load_checks(arguments.store)
        return CommandResult(checks, partial(score_page, checks, troubles), partial(score_value, checks))
    if arguments.run is None:
        raise UsageError("no run was named. Give an id, a path, or 'last'; or --score.")
    basis, notes = basis_of(arguments.run, arguments.store, arguments.training, arguments.least / 100, arguments.beside)
    advice = advised(basis)
    if (store := in_store(basis.run)) and any(answer.measure for answer in advice.answers):
        notes.append(f"add{store} to the commands that measure more: they know this run by it")
    if arguments.write_map is not None:
        write_map(advice, basis.run, arguments.write_map)
        notes.append(f"the map is in {arguments.write_map}: --precision-map {arguments.write_map}")
    done: tuple[Checked, ...] = ()
    if arguments.check is not None:
        with observer.measuring() as measuring:
            done = checked(basis, advice, arguments.check, arguments.store, measuring)
    costs = costs_of(basis) if arguments.training is not None or arguments.price is not None else ()
    page = partial(page_of, advice, done, costs, arguments.price, notes)
    value = partial(value_of, advice, done, costs, arguments.price)
    code = EXIT_FAILED if any(check.measured is None for check in done) else EXIT_OK
    whole = partial(page, whole=True)
    return CommandResult(advice, partial(page, whole=arguments.all), value, whole=whole, code=code)
