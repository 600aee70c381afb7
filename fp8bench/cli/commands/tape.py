"""`fp8bench tape`: counts the operators of a step, their FLOPs and bytes, in several precisions."""

from __future__ import annotations

import argparse
from functools import partial

from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common_options, make_request
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.errors import EXIT_FAILED, EXIT_OK
from fp8bench.model.codec import encode

EXAMPLES = ("fp8bench tape transformer --dtypes bf16,fp8",)
FIRST_OPTIONS = "--dtypes --devices --set --import --precision-map --json --csv"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Records one untimed step of each case: FLOPs and bytes by phase and operator, the largest first, "
        "precisions side by side. The counts come from the operators that ran, not from the suite; an "
        "operator without a formula is unknown."
    )
    parser.epilog = "Exit codes: 0 fine, 2 wrong usage, 3 no case has a tape."
    parser.add_argument("suite", metavar="NAME", help="a suite, or a .py file that defines suites")
    add_common_options(
        parser, "--dtypes", "--devices", "--set", "--data", "--import", "--seed", "--threads", "--case-timeout"
    )
    parser.add_argument(
        "--precision-map",
        type=types.precision_map,
        default=(),
        metavar="LAYER=DTYPE,...",
        help="layers whose precision differs from the case's, as in suite",
    )
    add_common_options(parser, "--store", help="where suites look for their text")
    add_common_options(parser, "--no-isolation", help="record in this process, without a worker")
    add_common_options(parser, "--explain")
    add_common_options(parser, "--json", help="print the tapes as JSON instead")
    add_common_options(
        parser, "--csv", help="also write a row per operator and shape to PATH; '-' prints the rows instead"
    )


def run(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.tape import record_tapes
    from fp8bench.report.topics.tape import make_tape_csv_rows, make_tape_page

    check_outputs(arguments)
    tapes = record_tapes(make_request(arguments), arguments.store, TERMINAL_JOB_OBSERVER)
    page = partial(make_tape_page, f"the operators of a step of {arguments.suite}", tapes)
    tell(arguments, page, lambda: {"tapes": encode(tapes)}, partial(make_tape_csv_rows, tapes))
    return EXIT_OK if any(case.tape is not None for case in tapes) else EXIT_FAILED
