"""`fp8bench doctor`: prints what this machine supports. If it does not support something, prints the reason."""

from __future__ import annotations

import argparse

from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common_options
from fp8bench.cli.outputs import print_lines
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.errors import EXIT_OK, EXIT_REGRESSION, UsageError
from fp8bench.jobs import doctor


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure the cost of the harness, and the spread between runs of a standard case",
    )
    parser.add_argument(
        "--peak",
        action="append",
        metavar="'DEVICE FIGURE [NUMBER]'",
        help="compare a quoted figure with the vendor's, and print nothing else: 'H200 tf32 312'; may be repeated",
    )
    parser.add_argument(
        "--topology",
        type=types.path,
        metavar="FILE",
        help="write this machine's GPU links to FILE, for plan-parallel, and print nothing else",
    )
    add_common_options(parser, "--store", help="where ceilings and spreads are stored, as in suite")


def run(arguments: argparse.Namespace) -> int:
    if sum(map(bool, (arguments.peak, arguments.topology, arguments.calibrate))) > 1:
        raise UsageError("--peak, --topology and --calibrate print different things. Give only one of them.")
    if arguments.topology:
        from fp8bench.jobs.topology import write_topology

        print_lines(write_topology(arguments.topology, arguments.store))
        return EXIT_OK
    if arguments.peak:
        from fp8bench.jobs.ceilings import describe_quoted_figures, is_quote_wrong, parse_quoted_figure

        quoted_figures = [parse_quoted_figure(text) for text in arguments.peak]
        print_lines(describe_quoted_figures(quoted_figures))
        return EXIT_REGRESSION if any(map(is_quote_wrong, quoted_figures)) else EXIT_OK
    print_lines(doctor.examine(arguments.calibrate))
    if arguments.calibrate:
        from fp8bench.jobs.several_runs import measure_standard_case

        print_lines(measure_standard_case(arguments.store, TERMINAL_JOB_OBSERVER))
    return EXIT_OK
