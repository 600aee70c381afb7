"""`fp8bench conform`: whether native casts and products give what their emulation gives, bit by bit."""

from __future__ import annotations

import argparse
from functools import partial

from fp8bench.cli.options import shared
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_FAILED, EXIT_OK, EXIT_REGRESSION
from fp8bench.features.conform.job import conformity
from fp8bench.features.conform.view import as_json, page_of


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.description = (
        "Runs every cast and product of each precision twice on the same operands, by the device's own kernels and by "
        "the emulation, and says what explains the elements that differ. Times nothing."
    )
    parser.epilog = (
        "Exit codes: 0 all are the same, up to the order of sums; 1 something is not; 2 wrong usage; 3 the device does "
        "none of it."
    )
    shared(parser, "--dtypes", help="precisions; default all that the device does")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    shared(parser, "--seed", help="for the operands; default 0")
    shared(parser, "--import", help="as in suite")
    shared(parser, "--explain")
    shared(parser, "--json", help="print all of it as JSON instead of the tables")


def run(arguments: argparse.Namespace) -> int:
    """Compare, tell, and end with 1 where something does not conform."""
    check_outputs(arguments)
    facts, found = conformity(
        arguments.dtypes, arguments.device, arguments.seed, tuple(arguments.imports), TERMINAL
    )  # fmt: skip
    tell(arguments, partial(page_of, facts, found), partial(as_json, facts, found))
    if not all(one.conforms for one in found):
        return EXIT_REGRESSION
    return EXIT_OK if any(one.compared for one in found) else EXIT_FAILED
