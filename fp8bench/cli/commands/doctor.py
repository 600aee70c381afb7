"""`fp8bench doctor`: what this machine can do, and what not and why."""

from __future__ import annotations

import argparse

from fp8bench.cli.options import shared
from fp8bench.cli.outputs import say_folded
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_OK
from fp8bench.jobs import doctor


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibrate", action="store_true",
        help="measure what the harness itself costs, and how far runs of a standard case lie apart",
    )  # fmt: skip
    parser.add_argument(
        "--ceilings", action="store_true",
        help="measure what each device does at most, in five runs (less than a minute), and keep it in the store",
    )  # fmt: skip
    shared(parser, "--threads", help="of a processor, for --ceilings; default 1")
    shared(parser, "--store", help="where ceilings and spreads are kept, as in suite")


def run(arguments: argparse.Namespace) -> int:
    say_folded(doctor.examine(arguments.calibrate))
    if arguments.calibrate:
        from fp8bench.jobs.standard_runs import standard_runs

        say_folded(standard_runs(arguments.store, TERMINAL))
    if arguments.ceilings:
        from fp8bench.jobs.ceilings import ceiling_lines

        say_folded(ceiling_lines(arguments.store, TERMINAL, arguments.threads))
    return EXIT_OK
