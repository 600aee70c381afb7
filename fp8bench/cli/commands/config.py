"""`fp8bench config`: writes a file of options for `suite --config`."""

from __future__ import annotations

import argparse

from fp8bench.cli import option_types as types
from fp8bench.cli.commands import suite
from fp8bench.cli.options import request_of
from fp8bench.cli.outputs import check_files, write_outputs
from fp8bench.cli.streams import complain, say
from fp8bench.errors import EXIT_OK
from fp8bench.plan.make import check_names

EXAMPLES = ("fp8bench config gemm --dtypes fp32,bf16 --write nightly.yaml",)
FIRST_OPTIONS = f"{suite.FIRST_OPTIONS} --write"


def add(parser: argparse.ArgumentParser) -> None:
    suite.add(parser)
    parser.description = (
        "Writes a file of options in YAML: those that are given here as they are given, all others as comments with "
        "what they are for. `fp8bench suite --config FILE` reads it."
    )
    parser.epilog = "Exit codes: 0 fine, 2 wrong usage."
    words = "write the file there instead of printing it"
    parser.add_argument("--write", type=types.path, metavar="FILE", help=words)


def run(arguments: argparse.Namespace) -> int:
    """Refuses what could not be measured."""
    from fp8bench.cli.config_file import config_text

    check_files({"--write": arguments.write})
    if arguments.suite is not None:
        check_names(request_of(arguments))
    command = argparse.ArgumentParser()
    suite.add(command)
    text = config_text(command, arguments)
    with write_outputs({"--write": (arguments.write, text)}):
        if arguments.write is None:
            say(text)
        else:
            complain(f"{arguments.write} is written; `fp8bench suite --config {arguments.write}` reads it")
    return EXIT_OK
