"""`fp8bench duel`: measures two interpreters or two revisions of code in the same rounds."""

from __future__ import annotations

import argparse

from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common_options, make_request
from fp8bench.cli.outputs import CommandResult, check_outputs, tell
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_REGRESSION
from fp8bench.features.duel.kind import DuelKind
from fp8bench.features.duel.sides import DuelQuestion
from fp8bench.features.duel.values import Duel, DuelCutOff
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.interrupts import interrupt_only_once
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
        " with its torch, or two revisions of your code or of fp8bench. By default, a side is the current Python "
        "and code. Finds changes of 2-3% that separate runs cannot distinguish from noise."
    )
    parser.epilog = (
        "Exit codes: 0 nothing is slower, 1 something is slower, 2 wrong usage, 3 a case failed or "
        "nothing was measured, 130 "
        "interrupted."
    )
    parser.add_argument("door", metavar="suite", choices=("suite",), help="the word `suite`, followed by its name")
    parser.add_argument(
        "suite", metavar="NAME", help="a suite, several with commas, all, or a .py file with your suites"
    )
    add = parser.add_argument_group("the sides").add_argument
    add(
        "--python-a",
        metavar="PYTHON",
        help="the Python of side A, or the folder of its virtual environment; default this Python",
    )
    add("--python-b", metavar="PYTHON", help="the same for side B; default this Python")
    add(
        "--against",
        metavar="REV",
        help="side A runs the code of this commit, in a temporary working tree; side B runs the current tree",
    )
    add(
        "--against-self",
        metavar="REV",
        help="side A runs the workers of this commit of fp8bench; fp8bench must run from a checkout of its repository",
    )
    subject_argument_group = parser.add_argument_group("what to measure, as in suite")
    add_common_options(subject_argument_group, "--dtypes", "--devices", "--set", "--data", "--import")
    session_options = parser.add_argument_group("how, as in suite")
    session_options.add_argument(
        "--sessions",
        type=types.whole(whole_number(1, 100)),
        metavar="N",
        help="sessions of every case, each with new processes; default 4; an interval needs at least 3",
    )
    add_common_options(session_options, "--quick", help="quick test: one session of a few rounds")
    add_common_options(session_options, "--budget", help="time for the whole duel; default about 6 s a case")
    add_common_options(session_options, "--rounds", help="number of rounds per session")
    add_common_options(session_options, "--seed")
    add_common_options(session_options, "--threads", help="CPU threads of torch in each worker; default 1")
    add_common_options(session_options, "--case-timeout")
    add_common_options(session_options, "--store", help="the folder for duels, below duels/; default .fp8bench")
    add_common_options(session_options, "--explain")
    add_common_options(
        session_options, "--json", help="print the duel as JSON, with all samples and comparisons, instead of tables"
    )
    add_common_options(session_options, "--md")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    with interrupt_only_once():
        try:
            result = answer(arguments, TERMINAL_JOB_OBSERVER)
        except DuelCutOff as cut_off:
            tell(argparse.Namespace(), *DuelKind().view(cut_off.duel))
            raise
        return result.print_result(arguments)


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    from fp8bench.features.duel.run import run_duel

    question = DuelQuestion(
        arguments.python_a, arguments.python_b, arguments.against, arguments.against_self, arguments.sessions
    )
    duel = run_duel(question, make_request(arguments), arguments.store, observer)
    return CommandResult(duel, *DuelKind().view(duel), code=choose_exit_code(duel))


def choose_exit_code(duel: Duel) -> int:
    from fp8bench.features.duel.verdicts import comparisons

    if not duel.finished:
        return EXIT_INTERRUPTED
    if not duel.ok:
        return EXIT_FAILED
    has_slower_case = any(figure.metric == TIME and figure.direction is Direction.WORSE for figure in comparisons(duel))
    return EXIT_REGRESSION if has_slower_case else EXIT_OK
