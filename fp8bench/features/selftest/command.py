"""`fp8bench selftest`: check the harness itself."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from fp8bench.cli import option_types as types
from fp8bench.cli.progress import TERMINAL
from fp8bench.cli.streams import say
from fp8bench.errors import EXIT_FAILED, EXIT_OK, UsageError
from fp8bench.model.request import whole_number
from fp8bench.units import percent, seconds

if TYPE_CHECKING:
    from fp8bench.features.selftest.power import Power


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--power", action="store_true", help="how often verdicts are right, on injected slow-downs")
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1: what is timed is timed there; default cpu")
    words = "trials an operation, with --power; default 20"
    add("--trials", type=types.whole(whole_number(1)), metavar="N", help=words)
    add("--operation", action="append", metavar="NAME", help="small, medium or step, with --power; default all")
    add("--json", type=types.path, metavar="PATH", help="with --power, also write the figures there")


def run(arguments: argparse.Namespace) -> int:
    """A line a check, as each is done; or the table of the power experiment, and 3 if a verdict had the wrong sign."""
    if arguments.power:
        from fp8bench.features.selftest.power import run_power

        power = run_power(arguments.operation, arguments.trials or 20, arguments.json, TERMINAL, arguments.device)
        say(power_table(power) + "\n")
        return EXIT_FAILED if any(row.wrong_signs for row in power.rows) else EXIT_OK
    for name in ("trials", "operation", "json"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name} goes with --power, which was not given. Add --power, or leave --{name} out.")
    return _checks(arguments.device)


def _checks(device: str) -> int:
    """3 if a check does not hold."""
    from fp8bench.features.selftest.checks import checks

    failed = 0
    for check in checks(device):
        failed += not check.held
        say(f"{'ok  ' if check.held else 'FAIL'}  {check.what}\n        seen: {check.seen}\n")
    say(f"{failed} checks failed\n" if failed else "all checks held\n")
    return EXIT_FAILED if failed else EXIT_OK


def power_table(power: Power) -> str:
    """The experiment's table: one line an operation and effect."""
    rows, loads = power.rows, power.loads
    load = f"load {loads[0]:.1f} to {loads[-1]:.1f}, median {loads[len(loads) // 2]:.1f}, on {os.cpu_count()} cores"
    heading = (
        f"{'operation':<22}{'planted':>9}{'found':>8}{'trials':>8}{'slower':>8}{'faster':>8}{'same':>7}{'unsure':>8}"
    )
    lines = [
        "Injected slow-downs judged by the real estimator. `found` is the median ratio over trials; a verdict",
        "'slower' is a detection, and on 0% injected any 'faster' or 'slower' is a false alarm.",
        f"One thread; {load}.",
        "",
        heading + f"{'time a verdict':>24}",
    ]
    for row in rows:
        # What was injected: '5.0%', or in which order some calls were slower.
        planted = row.order if row.uneven else percent(row.planted)
        typical, longest = seconds(row.seconds_median, 2), seconds(row.seconds_longest, 2)
        lines.append(
            f"{row.operation:<22}{planted:>9}{percent(row.found):>8}{row.trials:>8}"
            f"{percent(row.slower / row.trials, 0):>8}{percent(row.faster / row.trials, 0):>8}"
            f"{percent(row.same / row.trials, 0):>7}{percent(row.unsure / row.trials, 0):>8}"
            f"{f'{typical} (at most {longest})':>24}"
        )
    lines.append("")
    uneven = [row.too_few for row in rows if row.uneven]
    if uneven:
        words = "periodic, random: slower by 5 to 300% in the mean, on k of n calls only; 'same' counts as a wrong sign"
        lines += [f"{words}.", f"{sum(uneven)} more had too few calls for three periods of n.", ""]
    alarms = [row for row in rows if row.planted == 0]
    compared = sum(row.trials for row in rows)
    lines.append(
        f"false alarms: {sum(row.slower + row.faster for row in alarms)} of {sum(row.trials for row in alarms)} "
        f"identical pairs; wrong signs: {sum(row.wrong_signs for row in rows)} of {compared} comparisons"
    )
    return "\n".join(lines)
