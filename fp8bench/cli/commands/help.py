"""`fp8bench help COMMAND`: what COMMAND --help says."""

from __future__ import annotations

import argparse
from contextlib import suppress

from fp8bench.cli.main import main
from fp8bench.errors import EXIT_OK


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("about", nargs="*", metavar="COMMAND", help="a command; default all, by what they are for")


def run(arguments: argparse.Namespace) -> int:
    with suppress(SystemExit):  # by which argparse ends once it has printed
        return main([*arguments.about, "--help"])
    return EXIT_OK
