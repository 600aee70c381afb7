"""`fp8bench duel`: two interpreters or two revisions, measured in the same rounds."""

from __future__ import annotations

import argparse

from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common, request_of
from fp8bench.cli.outputs import CommandResult, check_outputs, tell
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_REGRESSION
from fp8bench.features.duel.kind import DuelKind
from fp8bench.features.duel.sides import DuelQuestion
from fp8bench.features.duel.values import Duel, DuelCutOff
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.interrupts import only_once
from fp8bench.model import Direction
from fp8bench.model.request import whole_number
from fp8bench.model.specs import TIME

EXAMPLES = ("fp8bench duel suite gemm --against HEAD~1 --dtypes fp32,bf16  # this tree against a commit",)
FIRST_OPTIONS = (
    "--against --against-self --python-a --python-b --dtypes --devices --set --import --sessions --quick --budget --md"
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures every case on two sides in the same rounds, B (new) against A (old): two interpreters, each"
        " with its torch, or two revisions of your code or of fp8bench. The default of a side is what runs "
        "here. Finds changes of 2-3% that separate runs cannot distinguish from noise."
    )
    parser.epilog = (
        "Exit codes: 0 nothing is slower, 1 something is, 2 wrong usage, 3 a case failed or nothing was measured, 130 "
        "interrupted."
    )
    parser.add_argument("door", metavar="suite", choices=("suite",), help="the word suite, and then its name")
    parser.add_argument(
        "suite", metavar="NAME", help="a suite, several with commas, all, or a .py file with your suites"
    )
    add = parser.add_argument_group("the sides").add_argument
    add(
        "--python-a",
        metavar="PYTHON",
        help="side A's Python, or the folder of its virtual environment; default this one",
    )
    add("--python-b", metavar="PYTHON", help="side B's; default this one")
    add(
        "--against",
        metavar="REV",
        help="side A runs the code of that commit of this repository, from a working tree made for the duel; B "
        "this tree",
    )
    add(
        "--against-self",
        metavar="REV",
        help="side A runs the workers of that commit of fp8bench, where fp8bench runs from a checkout of its "
        "repository",
    )
    what = parser.add_argument_group("what to measure, as in suite")
    add_common(what, "--dtypes", "--devices", "--set", "--data", "--import")
    how = parser.add_argument_group("how, as in suite")
    how.add_argument(
        "--sessions",
        type=types.whole(whole_number(1, 100)),
        metavar="N",
        help="sessions of every case, each with fresh processes; default 4, and 3 are the least for an interval",
    )
    add_common(how, "--quick", help="smoke test: one session of a few rounds")
    add_common(how, "--budget", help="time for the whole duel; default about 6 s a case")
    add_common(how, "--rounds", help="number of rounds a session")
    add_common(how, "--seed")
    add_common(how, "--threads", help="CPU threads of torch in each worker; default 1")
    add_common(how, "--case-timeout")
    add_common(how, "--store", help="where duels are kept, below duels/; default .fp8bench")
    add_common(how, "--explain")
    add_common(how, "--json", help="print the duel as JSON, all samples and comparisons, instead of the tables")
    add_common(how, "--md")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    with only_once():
        try:
            result = answer(arguments, TERMINAL)
        except DuelCutOff as cut_off:
            tell(argparse.Namespace(), *DuelKind().view(cut_off.duel))
            raise
        return result.print_result(arguments)


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    from fp8bench.features.duel.run import run_duel

    question = DuelQuestion(
        arguments.python_a, arguments.python_b, arguments.against, arguments.against_self, arguments.sessions
    )
    duel = run_duel(question, request_of(arguments), arguments.store, observer)
    return CommandResult(duel, *DuelKind().view(duel), code=exit_code(duel))


def exit_code(duel: Duel) -> int:
    from fp8bench.features.duel.verdicts import comparisons

    if not duel.finished:
        return EXIT_INTERRUPTED
    if not duel.ok:
        return EXIT_FAILED
    slower = any(figure.metric == TIME and figure.direction is Direction.WORSE for figure in comparisons(duel))
    return EXIT_REGRESSION if slower else EXIT_OK
