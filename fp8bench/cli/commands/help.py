"""`fp8bench help COMMAND`: what COMMAND --help says."""

from __future__ import annotations

import argparse

from fp8bench.cli.main import main


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("about", nargs="*", metavar="COMMAND", help="a command; default all, by what they are for")


def run(arguments: argparse.Namespace) -> int:
    return main([*arguments.about, "--help"])
