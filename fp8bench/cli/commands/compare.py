"""`fp8bench compare A B`: compares two runs, commits or stores, figure by figure."""

from __future__ import annotations

import argparse
from functools import partial

from fp8bench.cli.options import add_common_options
from fp8bench.cli.outputs import CommandResult, check_outputs
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.jobs.kinds import join_results
from fp8bench.jobs.observer import JobObserver

EXAMPLES = ("fp8bench compare HEAD~1 HEAD  # after `fp8bench suite all --grid` at each of them",)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares two runs, commits or stores: every case and figure that both have. `fp8bench gate` judges "
        "the comparison and sets an exit code."
    )
    parser.epilog = "Exit codes: 0 compared, whatever the result; 2 wrong usage, or an unknown run."
    parser.add_argument(
        "before",
        metavar="A",
        help=(
            "runs (ids, names, paths, 'last'), a commit, a store's folder, or a stream of fp8bench.watch; "
            "several, separated by commas, are joined (each stream as one seed)"
        ),
    )
    parser.add_argument("after", metavar="B", help="as A; ratios are B over A")
    add_common_options(parser, "--store", help="the store of A and B, as in suite")
    add_common_options(parser, "--json", help="print the comparison as JSON instead of the table")
    add_common_options(parser, "--csv", help="also write a row per figure to PATH; '-' prints the rows instead")
    add_common_options(parser, "--md", "--explain")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    return answer(arguments, TERMINAL_JOB_OBSERVER).print_result(arguments)


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    """Returns the comparison of two sides without a verdict. `fp8bench gate` gives verdicts."""
    from fp8bench.jobs.compare import compare_named_sides
    from fp8bench.report.comparisons import comparison_document, comparison_page, comparison_rows

    if (joined_results := join_results((arguments.before, arguments.after), arguments.store)) is not None:
        kind, results = joined_results
        return CommandResult(None, *kind.view(results))
    compared = compare_named_sides(arguments.before, arguments.after, arguments.store, observer)
    return CommandResult(
        compared,
        partial(comparison_page, compared),
        partial(comparison_document, compared),
        partial(comparison_rows, compared.comparisons),
        whole=partial(comparison_page, compared, with_unchanged=True, with_reasons=True),
    )
