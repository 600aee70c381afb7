"""`fp8bench list`: names the suites, precisions, backends and devices."""

from __future__ import annotations

import argparse

from fp8bench.cli.options import add_common
from fp8bench.cli.outputs import print_lines
from fp8bench.cli.streams import say
from fp8bench.errors import EXIT_OK, UnknownName, UsageError
from fp8bench.jobs import doctor
from fp8bench.plan.asked_suites import known_suites, suite_files
from fp8bench.registry import backends, devices, precisions

_SYNONYMS = {"precisions": "dtypes"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="?", metavar="WHAT", help="suites, dtypes, backends, devices, or a suite (its axes)"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a dtype: its details and options")
    add_common(parser, "--import", help="as in suite")


def run(arguments: argparse.Namespace) -> int:
    files = suite_files(arguments.what or "")
    names_by_kind = {"suites": known_suites(), "dtypes": precisions.names()}
    names_by_kind |= {"backends": backends.names(), "devices": devices.names()}
    if arguments.what is None:
        say("".join(f"{kind}: {', '.join(names)}\n" for kind, names in names_by_kind.items()))
        return EXIT_OK
    arguments.what = _SYNONYMS.get(arguments.what, arguments.what)
    if not files and arguments.what not in (*names_by_kind, *names_by_kind["suites"]):
        raise UnknownName("thing to list", arguments.what, [*names_by_kind, *names_by_kind["suites"]])
    if arguments.name is not None and arguments.what != "dtypes":
        raise UsageError(f"{arguments.name!r:.80} was given, but {arguments.what} takes no name. Leave it out.")
    if arguments.name is not None:
        precisions.get(arguments.name)
    print_lines(doctor.listing(arguments.what, (*arguments.imports, *files), arguments.name))
    return EXIT_OK
