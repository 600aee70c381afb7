"""`fp8bench selftest`: checks the harness itself."""

from __future__ import annotations

import argparse

from fp8bench.cli import option_types as types
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.cli.streams import say
from fp8bench.errors import EXIT_FAILED, EXIT_OK, UsageError
from fp8bench.model.request import whole_number


def add(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--power", action="store_true", help="only count how often verdicts on injected slow-downs are right")
    add("--device", default="cpu", metavar="NAME", help="the device to measure on: cpu, cuda, cuda:1; default cpu")
    trials_help = "with --power: the number of trials of each operation; default 20"
    add("--trials", type=types.whole(whole_number(1)), metavar="N", help=trials_help)
    add(
        "--operation",
        action="append",
        metavar="NAME",
        help="with --power: the operation to slow down: small, medium or step; default all",
    )
    add("--json", type=types.path, metavar="PATH", help="with --power: also write the figures to PATH")


def run(arguments: argparse.Namespace) -> int:
    if arguments.power:
        from fp8bench.features.selftest.power import format_power_table, run_power

        power_result = run_power(
            arguments.operation, arguments.trials or 20, arguments.json, TERMINAL_JOB_OBSERVER, arguments.device
        )
        say(format_power_table(power_result) + "\n")
        return EXIT_FAILED if any(row.wrong_signs for row in power_result.rows) else EXIT_OK
    for name in ("trials", "operation", "json"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name} needs --power. Add --power, or omit --{name}.")
    from fp8bench.features.selftest.checks import run_selfchecks

    failed_count = 0
    for check in run_selfchecks(arguments.device):
        failed_count += not check.holds
        say(f"{'ok  ' if check.holds else 'FAIL'}  {check.claim}\n        seen: {check.observation}\n")
    say(f"{failed_count} checks failed\n" if failed_count else "all checks held\n")
    return EXIT_FAILED if failed_count else EXIT_OK
