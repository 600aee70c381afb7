"""`fp8bench selftest`: checks the harness itself."""

from __future__ import annotations

import argparse

from fp8bench.cli import option_types as types
from fp8bench.cli.progress import TERMINAL
from fp8bench.cli.streams import say
from fp8bench.errors import EXIT_FAILED, EXIT_OK, UsageError
from fp8bench.model.request import whole_number


def add(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--power", action="store_true", help="instead, count how often verdicts on injected slow-downs are right")
    add("--device", default="cpu", metavar="NAME", help="where to time: cpu, cuda, cuda:1; default cpu")
    words = "with --power: trials of each operation; default 20"
    add("--trials", type=types.whole(whole_number(1)), metavar="N", help=words)
    add("--operation", action="append", metavar="NAME", help="with --power: small, medium or step; default all")
    add("--json", type=types.path, metavar="PATH", help="with --power: also write the figures there")


def run(arguments: argparse.Namespace) -> int:
    if arguments.power:
        from fp8bench.features.selftest.power import power_table, run_power

        power = run_power(arguments.operation, arguments.trials or 20, arguments.json, TERMINAL, arguments.device)
        say(power_table(power) + "\n")
        return EXIT_FAILED if any(row.wrong_signs for row in power.rows) else EXIT_OK
    for name in ("trials", "operation", "json"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name} goes with --power, which was not given. Add --power, or leave --{name} out.")
    from fp8bench.features.selftest.checks import checks

    failed = 0
    for check in checks(arguments.device):
        failed += not check.held
        say(f"{'ok  ' if check.held else 'FAIL'}  {check.what}\n        seen: {check.seen}\n")
    say(f"{failed} checks failed\n" if failed else "all checks held\n")
    return EXIT_FAILED if failed else EXIT_OK
