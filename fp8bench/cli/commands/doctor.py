"""`fp8bench doctor`: what this machine can do, and what not and why."""

from __future__ import annotations

import argparse

from fp8bench.cli.outputs import say_folded
from fp8bench.errors import EXIT_OK
from fp8bench.jobs import doctor


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--calibrate", action="store_true", help="measure what the harness itself costs")


def run(arguments: argparse.Namespace) -> int:
    """Print all that is found."""
    say_folded(doctor.examine(arguments.calibrate))
    return EXIT_OK
