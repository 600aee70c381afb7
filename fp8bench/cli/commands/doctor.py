"""`fp8bench doctor`: what this machine can do, and what not and why."""

from __future__ import annotations

import argparse

from fp8bench.cli import option_types as types
from fp8bench.cli.options import shared
from fp8bench.cli.outputs import say_folded
from fp8bench.cli.progress import TERMINAL
from fp8bench.cli.streams import say
from fp8bench.errors import EXIT_OK, EXIT_REGRESSION, UsageError
from fp8bench.jobs import doctor
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.report.data.plain import json_line


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibrate", action="store_true",
        help="measure what the harness itself costs, and how far runs of a standard case lie apart",
    )  # fmt: skip
    parser.add_argument(
        "--ceilings", action="store_true",
        help="measure what each device does at most (12 to 20 s), keep it in the store, and print nothing else",
    )  # fmt: skip
    parser.add_argument(
        "--peak", action="append", metavar="'DEVICE FIGURE [NUMBER]'",
        help="compare a quoted figure with the vendor's, and print nothing else: 'H200 tf32 312'; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--topology", type=types.path, metavar="FILE",
        help="write how this machine's GPUs are linked to this file, as plan-parallel takes it, and print nothing else",
    )  # fmt: skip
    shared(parser, "--threads", help="of a processor, for --ceilings; default 1")
    shared(parser, "--store", help="where ceilings and spreads are kept, as in suite")
    shared(parser, "--json", help="with --ceilings: print every run of every rate as JSON")


def run(arguments: argparse.Namespace) -> int:
    if (arguments.peak or arguments.topology) and (arguments.calibrate or arguments.ceilings or arguments.json):
        raise UsageError("--peak and --topology measure nothing. Give them without --calibrate, --ceilings and --json.")
    if arguments.peak and arguments.topology:
        raise UsageError("--peak and --topology each print nothing else. Give one of them.")
    if arguments.threads != 1 and not arguments.ceilings:
        raise UsageError("--threads is of ceilings. Give it with --ceilings.")
    if arguments.topology:
        from fp8bench.jobs.topology import topology_lines

        say_folded(topology_lines(arguments.topology, arguments.store))
        return EXIT_OK
    if arguments.peak:
        from fp8bench.jobs.ceilings import is_wrong, quote_lines, quote_of

        quotes = [quote_of(text) for text in arguments.peak]
        say_folded(quote_lines(quotes))
        return EXIT_REGRESSION if any(map(is_wrong, quotes)) else EXIT_OK
    if arguments.json:
        return _ceilings_as_json(arguments)
    if arguments.calibrate or not arguments.ceilings:
        say_folded(doctor.examine(arguments.calibrate))
    if arguments.calibrate:
        from fp8bench.jobs.several_runs import standard_runs

        say_folded(standard_runs(arguments.store, TERMINAL))
    if arguments.ceilings:
        from fp8bench.jobs.ceilings import ceiling_lines

        say_folded(ceiling_lines(arguments.store, arguments.threads))
    return EXIT_OK


def _ceilings_as_json(arguments: argparse.Namespace) -> int:
    if arguments.calibrate or not arguments.ceilings:
        raise UsageError("--json prints what devices do at most. Give it with --ceilings, and without --calibrate.")
    from fp8bench.jobs.ceilings import ceilings_here

    pairs = ceilings_here(arguments.store, arguments.threads)
    devices = [{"facts": encode(facts), "ceilings": encode(ceilings)} for facts, ceilings in pairs]
    say(json_line({"schema": SCHEMA, "devices": devices}))
    return EXIT_OK
