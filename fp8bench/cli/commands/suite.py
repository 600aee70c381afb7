"""`fp8bench suite`: measure a suite, or resume a run that was interrupted."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from fp8bench.cli import option_types as types
from fp8bench.cli.main import DEFAULT_STORE
from fp8bench.cli.options import add_common, add_options_of, check_alone, request_of
from fp8bench.cli.outputs import check_outputs, import_renderers, in_store, print_run, tell, wanted_of
from fp8bench.cli.progress import TERMINAL
from fp8bench.cli.streams import complain, say
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, NotKept, UsageError
from fp8bench.measure.environment import command_line
from fp8bench.measure.handle import workers_ahead
from fp8bench.measure.interrupts import only_once
from fp8bench.measure.windows import window_rule_for, windows_of
from fp8bench.model import Plan, Request, Run
from fp8bench.model.request import HOW, NVTX, PROFILERS, WHAT, whole_number
from fp8bench.model.run import CEILINGS
from fp8bench.model.stopping import BRISK_SECONDS, BUDGET_SECONDS, QUICK_ROUNDS
from fp8bench.plan.asked_suites import known_suites
from fp8bench.plan.make import check_names
from fp8bench.plan.resolve import switches_of
from fp8bench.protocols import Observer
from fp8bench.store.fleet_plans import read_plan, write_plan
from fp8bench.store.runs.listing import find_run
from fp8bench.units import clock

PASSES = ("--trace", "--no-energy", "--energy", "--sustained", "--tape", "--shares", "--counters")
OUTPUTS = (
    "--explain",
    "--json",
    "--csv",
    "--html",
    "--md",
    "--open",
    "--no-report",
    "--log",
)
_BESIDE_RESUME = {"--resume", "--store", *OUTPUTS}
EXAMPLES = (
    "fp8bench suite transformer --dtypes fp8,bf16  # beside fp32",
    "fp8bench suite gemm --set shape=1024 --quick  # does it run?",
)
FIRST_OPTIONS = (
    "--dtypes --devices --set --quick --budget --sessions --max-batch --dry-run --config --resume --csv --html"
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit codes: 0 fine, 2 wrong usage, 3 a case failed or nothing was measured, 130 interrupted."
    parser.add_argument(
        "suite",
        nargs="?",
        metavar="NAME",
        help="a suite, several with commas, all, or a .py file with suites of your own; `fp8bench list` names them; or "
        "ceilings, what this machine does at most",
    )
    add_options_of(parser.add_argument_group(WHAT))
    how = parser.add_argument_group(HOW)
    add_options_of(how)
    how.add_argument(
        "--sessions",
        type=types.sessions,
        default=types.Sessions(),
        metavar="N[@TIME]",
        help=(
            "repeat the run N times in fresh processes, TIME (90s, 10m, 1h) apart; intervals span all sessions "
            "and so include slow changes of the machine; default 1"
        ),
    )
    how.add_argument("--dry-run", action="store_true", help="print the plan, measure nothing")
    how.add_argument(
        "--write-plan",
        type=types.path,
        metavar="FILE",
        help="with --dry-run: also write the plan to FILE, divided into cells for --plan and --cell",
    )
    _add_where(parser.add_argument_group("where"))


def _add_where(group: argparse._ArgumentGroup) -> None:
    add_common(group, "--store")
    group.add_argument(
        "--config",
        type=types.path,
        metavar="FILE",
        help="options in YAML, by name without dashes, and suite: NAME; the command line overrides it",
    )
    group.add_argument("--resume", metavar="RUN", help="resume an interrupted run: measure only what is missing")
    group.add_argument(
        "--plan",
        type=types.path,
        metavar="FILE",
        help="measure one --cell of a plan that --write-plan wrote; a finished cell is skipped",
    )
    group.add_argument(
        "--cell",
        type=types.whole(whole_number(0)),
        metavar="N",
        help="the cell of the plan to measure, counted from 0",
    )
    add_common(group, *OUTPUTS)


def run(arguments: argparse.Namespace) -> int:
    # 1. Handle options that need no suite name.
    check_outputs(arguments)
    if arguments.resume is not None:
        return _resume(arguments)
    if arguments.plan is not None or arguments.cell is not None:
        return _cell(arguments)
    if arguments.write_plan is not None and not arguments.dry_run:
        raise UsageError(
            "--write-plan only works with --dry-run, which measures nothing. Add --dry-run, or leave --write-plan out."
        )
    if arguments.suite is None:
        raise UsageError(f"no suite was named. Give one of {', '.join(known_suites())}, all, or a .py file.")
    # 2. Ceilings have separate rounds and a separate file.
    request = request_of(arguments)
    if arguments.sessions.runs > 1 and (arguments.dry_run or request.suite == CEILINGS):
        raise UsageError("--sessions measures a suite several times. Leave it out with --dry-run and with ceilings.")
    if request.suite == CEILINGS:
        return _ceilings(request, arguments)
    check_names(request)
    if request.trace in PROFILERS:
        return _run_under(request.trace, arguments)
    # 3. A dry run plans without measuring.
    if arguments.dry_run:
        from fp8bench.pipeline import plan_only
        from fp8bench.report.terminal.run import page_of_plan

        plan, facts = plan_only(request, arguments.store)
        tell(arguments, partial(page_of_plan, plan, facts, expected_time(plan, request)))
        if arguments.write_plan is not None:
            from fp8bench.jobs.several_runs import cut_into_cells

            cells, file = cut_into_cells(request, plan, facts, command_line()), arguments.write_plan
            try:
                write_plan(cells, file)
            except OSError as error:
                raise UsageError(f"--write-plan {file} could not be written ({error.strerror}).") from None
            count = "1 cell" if len(cells.cells) == 1 else f"{len(cells.cells)} cells"
            command = f"fp8bench suite --plan {file} --cell 0"
            complain(f"plan {cells.id}: {count} in {file}; one of them: {command}")
        return EXIT_OK
    # 4. Measure, once or in several sessions. Workers import torch while this process imports the rest.
    if arguments.sessions.runs == 1:
        with workers_ahead(request, switches_of(os.environ).second) as begun:
            from fp8bench.pipeline import execute

            return measure_and_tell(request, arguments, partial(execute, begun=begun, meanwhile=import_renderers))
    from fp8bench.jobs.several_runs import execute_sessions

    several = partial(execute_sessions, sessions=arguments.sessions.runs, apart=arguments.sessions.pause)
    return measure_and_tell(request, arguments, several)


# Both record nothing outside of the marked slots; a report a slot, named by the process.
_PROFILER_WORDS = {
    "nsys": "--trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=repeat --output=fp8bench-%p",
    "ncu": "--profile-from-start off --target-processes all --nvtx --set full --export fp8bench-%p",
}


def _run_under(profiler: str, arguments: argparse.Namespace) -> int:
    """Runs this command again under a profiler, or prints the command for that.

    Times under a profiler are distorted, so the run is stored in a separate folder unless --store names one.
    """
    command = [profiler, *(["profile"] if profiler == "nsys" else []), *_PROFILER_WORDS[profiler].split()]
    words = [word for word in arguments.words if word != "--dry-run"]
    # The last --trace and --store of a command count.
    words += ["--trace", NVTX]
    if arguments.store == Path(DEFAULT_STORE):
        words += ["--store", f"fp8bench-{profiler}"]
    command += [sys.executable, "-m", "fp8bench", *words]
    if arguments.dry_run:
        say(shlex.join(command))
        return EXIT_OK
    if shutil.which(profiler) is None:
        raise UsageError(
            f"--trace {profiler}: {profiler} is not installed here. Install it, run this where it is installed, or "
            f"print the command with --dry-run: {shlex.join(command)}"
        )
    folder = f"fp8bench-{profiler}" if arguments.store == Path(DEFAULT_STORE) else arguments.store
    complain(f"the run is stored in {folder}; its times are distorted by {profiler}, so compare it with no other run")
    return subprocess.call(command)


def measure_and_tell(
    request: Request, arguments: argparse.Namespace, execute: Callable[[Request, Path, Observer, str], Run]
) -> int:
    with only_once():
        with _kept_or_shown(arguments), TERMINAL.measuring() as observer:
            run = execute(request, arguments.store, observer, command_line())
        _tell_how_to_go_on(run)
    return _finish(run, arguments)


def _ceilings(request: Request, arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.ceilings import ceilings_run

    if arguments.dry_run:
        raise UsageError(
            f"the suite {CEILINGS} plans nothing: it searches for less than a minute. Leave --dry-run out."
        )
    with only_once():
        run = ceilings_run(request, arguments.store, command_line())
    return _finish(run, arguments)


def expected_time(plan: Plan, request: Request) -> str:
    groups = sum(any(planned.runs for planned in group.cases) for group in plan)
    if not groups:
        return ""
    # A budget bounds the time; rounds do not, because their length is unknown.
    if request.budget is not None:
        return f"time: about {clock(request.budget)}, the budget, beside what starting takes"
    energy = _energy_time(plan, request)
    if request.rounds is not None or request.quick:
        count = request.rounds or QUICK_ROUNDS
        return f"time: {count} rounds of every group take what they take{energy}; --budget SECONDS sets an end"
    # Without either, groups may take up to twice their usual time if noise is large.
    least = (BRISK_SECONDS if request.brisk else BUDGET_SECONDS) * groups
    times = f"{clock(least)} to {clock(2 * least)}"
    return (
        f"time: about {times}, more where a step takes seconds or a GPU warms up{energy}; --budget SECONDS sets an end"
    )


def _energy_time(plan: Plan, request: Request) -> str:
    """Returns the time for energy, for GPUs only: other devices must be opened before their counters are known."""
    rule = window_rule_for(request, len(plan.groups))
    if rule is None:
        return ""
    # Sustained turns run on every device, energy windows only on GPUs.
    everywhere = bool(rule.turn_seconds)
    groups = [group for group in plan if everywhere or not group.cases[0].case.device.startswith("cpu")]
    windows = [count for group in groups if (count := windows_of(group, rule))]
    if not windows:
        return ""
    idle = rule.idle_seconds * (1 if rule.brisk else 2 * len(windows))
    least, most = (clock(idle + sum(windows) * seconds) for seconds in rule.window_seconds)
    reason = "turns of seconds (--sustained)" if rule.turn_seconds else "energy, which --no-energy leaves out"
    phases_words = ", more for that of phases" if rule.phases else ""
    return f", and {least} to {most} for {reason}{phases_words}"


def _cell(arguments: argparse.Namespace) -> int:
    """Measures one cell of a plan, which holds the request."""
    from fp8bench.jobs.several_runs import measure_cell

    if arguments.plan is None or arguments.cell is None:
        raise UsageError("--plan FILE and --cell NUMBER only work together. Give both, or neither.")
    # The plan holds the request: any other option would be ignored.
    positional = [arguments.suite] if arguments.suite is not None else []
    check_alone(arguments.words, {"--plan", "--cell", "--store", *OUTPUTS}, positional)
    plan = read_plan(arguments.plan)
    with only_once(), _kept_or_shown(arguments), TERMINAL.measuring() as observer:
        now, run = measure_cell(plan, arguments.cell, arguments.store, observer, command_line())
    if now:
        return _finish(run, arguments)
    return _print_again(run, arguments, f"cell {run.cell} is done: run {run.id}")


def _resume(arguments: argparse.Namespace) -> int:
    """Resumes a run, whose file holds the request."""
    from fp8bench.pipeline import resume

    check_alone(arguments.words, _BESIDE_RESUME, [arguments.suite] if arguments.suite is not None else [])
    path = find_run(arguments.resume, arguments.store)
    with only_once():
        with _kept_or_shown(arguments), TERMINAL.measuring() as observer:
            resumed, run = resume(path, arguments.store, observer, command_line())
        _tell_how_to_go_on(run)
    if resumed:
        return _finish(run, arguments)
    return _print_again(run, arguments, f"run {run.id} is finished; nothing was missing")


def _print_again(run: Run, arguments: argparse.Namespace, reason: str) -> int:
    """Prints a run that was measured earlier, and writes the requested files; its page in the store is unchanged."""
    from fp8bench.jobs.after_run import published

    complain(reason)
    print_run(run, arguments)
    outputs = wanted_of(arguments)
    # The store already has the default page.
    if outputs.pages is not None and not outputs.pages.asked:
        outputs = replace(outputs, pages=None)
    is_complete = published(run, arguments.store, outputs, complain)
    return (EXIT_OK if run.ok else EXIT_FAILED) if is_complete else EXIT_INTERRUPTED


@contextmanager
def _kept_or_shown(arguments: argparse.Namespace) -> Iterator[None]:
    """Prints a run that could not be stored."""
    try:
        yield
    except NotKept as error:
        print_run(cast(Run, error.run), arguments)
        raise


def _tell_how_to_go_on(run: Run) -> None:
    """Prints how to resume, before the table, which another interrupt may cut off."""
    if not run.finished:
        resume = f"fp8bench suite --resume {run.id}{in_store(run)}"
        complain(f"interrupted; what was finished is kept in {run.path}.\n  To do the rest: {resume}")


def _finish(run: Run, arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.after_run import after_run

    code = (EXIT_OK if run.ok else EXIT_FAILED) if run.finished else EXIT_INTERRUPTED
    try:
        print_run(run, arguments)
    except KeyboardInterrupt:  # it only cuts the table short
        code = EXIT_INTERRUPTED
    finally:  # even if stdout cannot be written, the run is added to the history
        is_complete = after_run(run, arguments.store, wanted_of(arguments), complain)
    return code if is_complete else EXIT_INTERRUPTED
