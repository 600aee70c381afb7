"""`fp8bench advise`: recommends what to do about a precision on this machine, from measurements on this machine."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common_options
from fp8bench.cli.outputs import CommandResult, check_outputs, format_store_option
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.jobs.observer import JobObserver
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.model.request import PERCENT_RULE


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answers three questions about each precision of a stored run: does it pay, does it fit, does it "
        "learn? Then recommends, with the reason: adopt it, keep some layers in high precision, or change "
        "nothing. All figures were measured on this machine; for a missing one it prints the command that "
        "measures it."
    )
    parser.epilog = "Exit codes: 0 fine, 2 wrong usage."
    parser.add_argument(
        "run",
        metavar="RUN",
        help="a run or a profile: an id, a name, a path, or 'last'",
    )
    parser.add_argument(
        "--training",
        metavar="STUDY",
        help="a training that shows whether a precision still learns: an id, its folder, or 'last'",
    )
    parser.add_argument(
        "--least",
        type=types.number(PERCENT_RULE),
        default=10.0,
        metavar="PERCENT",
        help="smallest gain of a step that is worth adopting a precision for; default 10",
    )
    add_common_options(parser, "--store", help="as in suite")
    add_common_options(parser, "--import", help="as in suite")
    add_common_options(parser, "--md", "--all", "--explain")
    add_common_options(parser, "--json", help="print advice and answers as JSON instead of the tables")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    return answer(arguments, TERMINAL_JOB_OBSERVER).print_result(arguments)


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    from fp8bench.features.advise.decide import advise
    from fp8bench.features.advise.job import collect_advice_basis
    from fp8bench.features.advise.view import render_page

    basis, notes = collect_advice_basis(arguments.run, arguments.store, arguments.training, arguments.least / 100)
    advice = advise(replace(basis, store_options=format_store_option(basis.run)))
    page = partial(render_page, advice, notes)
    value = {"schema": SCHEMA, **encode(advice)}
    return CommandResult(
        advice, partial(page, everything=arguments.all), lambda: value, whole=partial(page, everything=True)
    )
