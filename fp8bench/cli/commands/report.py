"""`fp8bench report`: the report of stored runs, side by side if there are several, or of a training."""

from __future__ import annotations

import argparse

from fp8bench.cli.options import shared
from fp8bench.cli.outputs import check_outputs
from fp8bench.cli.streams import complain, say
from fp8bench.errors import EXIT_OK
from fp8bench.report.elements import printable


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="ids, files' stems, paths, or 'last', a run's or a training's; or a store, for all of its runs",
    )
    shared(parser, "--store", help="as in suite")
    shared(parser, "--html", "--md", "--csv-wide", "--open")


def run(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.report_files import Pages, report_of, typed_from_here, why_not_shown

    check_outputs(arguments)
    pages = Pages(arguments.html, arguments.md, arguments.csv_wide, arguments.open)
    page = report_of(arguments.runs, arguments.store, pages)
    say(f"{printable(typed_from_here(page))}\n")
    problem = why_not_shown(page) if pages.browser else ""
    if problem:
        complain(problem)
    return EXIT_OK
