"""`fp8bench compare A B`: two runs, commits or stores, figure by figure."""

from __future__ import annotations

import argparse
from functools import partial

from fp8bench.cli.options import add_common
from fp8bench.cli.outputs import CommandResult, check_outputs
from fp8bench.cli.progress import TERMINAL
from fp8bench.jobs.kinds import join_results
from fp8bench.jobs.observer import JobObserver

EXAMPLES = ("fp8bench compare HEAD~1 HEAD  # after `fp8bench suite all --grid` at each of them",)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares two runs, commits or stores: every case and figure that both have. `fp8bench gate` judges "
        "the comparison and sets an exit code."
    )
    parser.epilog = "Exit codes: 0 compared, whatever it says; 2 wrong usage, or there is no such run."
    parser.add_argument(
        "before",
        metavar="A",
        help=(
            "runs (ids, files' stems, paths, 'last'), a commit, a store's folder, or a stream of fp8bench.watch; "
            "several, separated by commas, are joined (streams as seeds)"
        ),
    )
    parser.add_argument("after", metavar="B", help="the same; ratios are of B over A")
    add_common(parser, "--store", help="where A and B are, as in suite")
    add_common(parser, "--json", help="print the comparison as JSON instead of the table")
    add_common(parser, "--csv", help="also write it there as rows, one a figure; '-' prints them instead of the table")
    add_common(parser, "--md", "--explain")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    return answer(arguments, TERMINAL).print_result(arguments)


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    """Compares both sides, without judging: `gate` does that."""
    from fp8bench.jobs.compare import compared_sides
    from fp8bench.report.comparisons import page_of, rows_of, value_of

    if (together := join_results((arguments.before, arguments.after), arguments.store)) is not None:
        kind, kept = together
        return CommandResult(None, *kind.view(kept))
    compared = compared_sides(arguments.before, arguments.after, arguments.store, observer)
    return CommandResult(
        compared,
        partial(page_of, compared),
        partial(value_of, compared),
        partial(rows_of, compared.comparisons),
        whole=partial(page_of, compared, everything=True),
    )
