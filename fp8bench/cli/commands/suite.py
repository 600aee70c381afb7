"""`fp8bench suite`: measures a suite, or resumes an interrupted run."""

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
from fp8bench.cli.options import add_common_options, add_request_options, make_request, refuse_other_options
from fp8bench.cli.outputs import (
    check_outputs,
    format_store_option,
    import_renderers,
    print_run,
    read_requested_outputs,
    tell,
)
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.cli.streams import say, write_sentence_to_stderr
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, NotKept, UsageError
from fp8bench.measure.environment import command_line
from fp8bench.measure.handle import start_workers_early
from fp8bench.measure.interrupts import interrupt_only_once
from fp8bench.measure.windows import count_windows, make_window_rule
from fp8bench.model import Plan, Request, Run
from fp8bench.model.request import HOW_TO_MEASURE, NVTX, PROFILERS, WHAT_TO_MEASURE, whole_number
from fp8bench.model.run import CEILINGS
from fp8bench.model.stopping import BRISK_SECONDS, BUDGET_SECONDS, QUICK_ROUNDS
from fp8bench.plan.asked_suites import known_suites
from fp8bench.plan.make import check_request
from fp8bench.plan.resolve import read_switches
from fp8bench.protocols import Observer
from fp8bench.store.fleet_plans import read_fleet_plan, write_plan
from fp8bench.store.runs.listing import find_run
from fp8bench.units import clock

# The options of additional measurements, such as a trace, a tape, or energy.
PASS_OPTIONS = ("--trace", "--no-energy", "--energy", "--sustained", "--tape", "--shares", "--counters")
OUTPUT_OPTIONS = (
    "--explain",
    "--json",
    "--csv",
    "--html",
    "--md",
    "--open",
    "--no-report",
    "--log",
)
EXAMPLES = (
    "fp8bench suite transformer --dtypes fp8,bf16  # with fp32 as the reference",
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
        help="a suite, several with commas, all, or a .py file that defines suites; `fp8bench list` names suites; or "
        "ceilings, which measures the machine's peaks",
    )
    add_request_options(parser.add_argument_group(WHAT_TO_MEASURE))
    measurement_options_group = parser.add_argument_group(HOW_TO_MEASURE)
    add_request_options(measurement_options_group)
    measurement_options_group.add_argument(
        "--sessions",
        type=types.parse_sessions,
        default=types.Sessions(),
        metavar="N[@TIME]",
        help=(
            "repeat the run N times in fresh processes, TIME (90s, 10m, 1h) apart; intervals span all sessions "
            "and so include slow changes of the machine; default 1"
        ),
    )
    measurement_options_group.add_argument("--dry-run", action="store_true", help="print the plan, measure nothing")
    measurement_options_group.add_argument(
        "--write-plan",
        type=types.path,
        metavar="FILE",
        help="with --dry-run: also write the plan to FILE, divided into cells for --plan and --cell",
    )
    _add_storage_options(parser.add_argument_group("where"))


def _add_storage_options(group: argparse._ArgumentGroup) -> None:
    add_common_options(group, "--store")
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
    add_common_options(group, *OUTPUT_OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    # 1. Handle the options that need no suite.
    check_outputs(arguments)
    if arguments.resume is not None:
        return _resume_run(arguments)
    if arguments.plan is not None or arguments.cell is not None:
        return _measure_cell(arguments)
    if arguments.write_plan is not None and not arguments.dry_run:
        raise UsageError(
            "--write-plan only works with --dry-run, which measures nothing. Add --dry-run, or leave --write-plan out."
        )
    if arguments.suite is None:
        raise UsageError(f"no suite was named. Give one of {', '.join(known_suites())}, all, or a .py file.")
    # 2. Measure the ceilings of this machine if they are requested: they have separate rounds and a separate file.
    request = make_request(arguments)
    if arguments.sessions.runs > 1 and (arguments.dry_run or request.suite == CEILINGS):
        raise UsageError("--sessions measures a suite several times. Leave it out with --dry-run and with ceilings.")
    if request.suite == CEILINGS:
        return _measure_ceilings(request, arguments)
    check_request(request)
    if request.trace in PROFILERS:
        return _run_under_profiler(request.trace, arguments)
    # 3. For a dry run, only make and print the plan.
    if arguments.dry_run:
        from fp8bench.pipeline import plan_only
        from fp8bench.report.terminal.run import plan_page

        plan, facts = plan_only(request, arguments.store)
        tell(arguments, partial(plan_page, plan, facts, describe_expected_time(plan, request)))
        if arguments.write_plan is not None:
            from fp8bench.jobs.several_runs import make_fleet_plan

            fleet_plan, file = make_fleet_plan(request, plan, facts, command_line()), arguments.write_plan
            try:
                write_plan(fleet_plan, file)
            except OSError as error:
                raise UsageError(f"--write-plan {file} could not be written ({error.strerror}).") from None
            cell_count_text = "1 cell" if len(fleet_plan.cells) == 1 else f"{len(fleet_plan.cells)} cells"
            command = f"fp8bench suite --plan {file} --cell 0"
            write_sentence_to_stderr(f"plan {fleet_plan.id}: {cell_count_text} in {file}; one of them: {command}")
        return EXIT_OK
    # 4. Measure in one or several sessions. While workers import torch, this process imports the modules for printing.
    if arguments.sessions.runs == 1:
        with start_workers_early(request, read_switches(os.environ).second) as early_workers:
            from fp8bench.pipeline import execute

            return measure_and_print(
                request, arguments, partial(execute, begun=early_workers, meanwhile=import_renderers)
            )
    from fp8bench.jobs.several_runs import execute_sessions

    execute_run_sessions = partial(
        execute_sessions, sessions=arguments.sessions.runs, pause=arguments.sessions.pause_seconds
    )
    return measure_and_print(request, arguments, execute_run_sessions)


# The options of each profiler. With them, a profiler records only the slots that fp8bench marks. It writes a report for
# each slot, and the name of the report has the id of the process.
_PROFILER_OPTIONS = {
    "nsys": "--trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=repeat --output=fp8bench-%p",
    "ncu": "--profile-from-start off --target-processes all --nvtx --set full --export fp8bench-%p",
}


def _run_under_profiler(profiler: str, arguments: argparse.Namespace) -> int:
    """Runs this command again under a profiler, and returns the exit code. With --dry-run, only prints the command.

    A profiler distorts times, so the run is stored in a separate folder, unless --store names one.
    """
    command = [profiler, *(["profile"] if profiler == "nsys" else []), *_PROFILER_OPTIONS[profiler].split()]
    # A dry run prints the command for a real run.
    words = [word for word in arguments.words if word != "--dry-run"]
    # Append the options, because the last one counts if an option is repeated.
    words += ["--trace", NVTX]
    folder = arguments.store
    if folder == Path(DEFAULT_STORE):
        folder = f"fp8bench-{profiler}"
        words += ["--store", folder]
    command += [sys.executable, "-m", "fp8bench", *words]
    if arguments.dry_run:
        say(shlex.join(command))
        return EXIT_OK
    if shutil.which(profiler) is None:
        raise UsageError(
            f"--trace {profiler}: {profiler} is not installed here. Install it, run this where it is installed, or "
            f"print the command with --dry-run: {shlex.join(command)}"
        )
    write_sentence_to_stderr(
        f"the run is stored in {folder}; its times are distorted by {profiler}, so compare it with no other run"
    )
    return subprocess.call(command)


def measure_and_print(
    request: Request, arguments: argparse.Namespace, execute: Callable[[Request, Path, Observer, str], Run]
) -> int:
    return _measure_and_store(arguments, lambda *where: (True, execute(request, *where)))


def _measure_and_store(
    arguments: argparse.Namespace,
    measure: Callable[[Path, Observer, str], tuple[bool, Run]],
    why_unmeasured: Callable[[Run], str] = str,
) -> int:
    """Calls `measure`, which returns a run and whether it measured anything. Prints the run, and stores what was
    measured. If the stored run was already complete, prints the sentence that `why_unmeasured` returns.
    """
    with interrupt_only_once():
        with _print_unstored_run(arguments), TERMINAL_JOB_OBSERVER.measuring() as observer:
            was_measured, run = measure(arguments.store, observer, command_line())
        _explain_resume(run)
    if was_measured:
        return _print_and_store_run(run, arguments)
    return _print_run_again(run, arguments, why_unmeasured(run))


def _measure_ceilings(request: Request, arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.ceilings import run_ceilings

    if arguments.dry_run:
        raise UsageError(
            f"the suite {CEILINGS} plans nothing: it searches for less than a minute. Leave --dry-run out."
        )
    with interrupt_only_once():
        run = run_ceilings(request, arguments.store, command_line())
    return _print_and_store_run(run, arguments)


def describe_expected_time(plan: Plan, request: Request) -> str:
    groups = sum(any(planned.runs for planned in group.cases) for group in plan)
    if not groups:
        return ""
    # Predict the time from the budget if there is one. It cannot be predicted from a number of rounds, because it is
    # unknown how long a round takes.
    if request.budget is not None:
        return f"time: about {clock(request.budget)}, the budget, plus the time to start"
    energy_time = _describe_energy_time(plan, request)
    if request.rounds is not None or request.quick:
        num_rounds = request.rounds or QUICK_ROUNDS
        return f"time: {num_rounds} rounds of every group, however long{energy_time}; --budget SECONDS sets a limit"
    # With neither a budget nor a number of rounds, a group may take twice its usual time if the noise is large.
    min_seconds = (BRISK_SECONDS if request.brisk else BUDGET_SECONDS) * groups
    duration_range_text = f"{clock(min_seconds)} to {clock(2 * min_seconds)}"
    return (
        f"time: about {duration_range_text}, or longer if a step takes seconds or a GPU warms up{energy_time}; "
        "--budget SECONDS sets a limit"
    )


def _describe_energy_time(plan: Plan, request: Request) -> str:
    """Returns a text with the time that measuring energy, or measuring for seconds with --sustained, will take. Returns
    '' if the plan measures neither, or if the time is unknown.

    The time of energy windows is predicted only for GPUs, because a CPU may have no energy counters.
    """
    rule = make_window_rule(request, len(plan.groups))
    if rule is None:
        return ""
    # --sustained measures CPUs as well, but the time of energy windows is predicted only for GPUs.
    measures_cpus = bool(rule.sustained_turn_seconds)
    groups = [group for group in plan if measures_cpus or not group.cases[0].case.device.startswith("cpu")]
    window_counts = [count for group in groups if (count := count_windows(group, rule))]
    if not window_counts:
        return ""
    idle_seconds = rule.idle_seconds * (1 if rule.brisk else 2 * len(window_counts))
    min_time, max_time = (clock(idle_seconds + sum(window_counts) * seconds) for seconds in rule.window_seconds)
    reason = "turns of seconds (--sustained)" if rule.sustained_turn_seconds else "energy, which --no-energy leaves out"
    phases_text = ", more for that of phases" if rule.phases else ""
    return f", and {min_time} to {max_time} for {reason}{phases_text}"


def _measure_cell(arguments: argparse.Namespace) -> int:
    """Measures one cell of a fleet's plan. The plan's file has the request."""
    from fp8bench.jobs.several_runs import measure_cell

    if arguments.plan is None or arguments.cell is None:
        raise UsageError("--plan FILE and --cell NUMBER only work together. Give both, or neither.")
    # Refuse other options: the plan contains the request, so they would have no effect.
    refuse_other_options(arguments.words, {"--plan", "--cell", "--store", *OUTPUT_OPTIONS}, [arguments.suite])
    measure = partial(measure_cell, read_fleet_plan(arguments.plan), arguments.cell)
    return _measure_and_store(arguments, measure, lambda run: f"cell {run.cell} is done: run {run.id}")


def _resume_run(arguments: argparse.Namespace) -> int:
    """Resumes an interrupted run. The run's file has the request."""
    from fp8bench.pipeline import resume

    refuse_other_options(arguments.words, {"--resume", "--store", *OUTPUT_OPTIONS}, [arguments.suite])
    path = find_run(arguments.resume, arguments.store)
    return _measure_and_store(
        arguments, partial(resume, path), lambda run: f"run {run.id} is finished; nothing was missing"
    )


def _print_run_again(run: Run, arguments: argparse.Namespace, reason: str) -> int:
    """Prints a run that was complete already, and writes the requested files. The report of the run in the store stays
    unchanged.
    """
    from fp8bench.jobs.after_run import publish_run

    write_sentence_to_stderr(reason)
    print_run(run, arguments)
    outputs = read_requested_outputs(arguments)
    # Write no report to the store, because it already has one.
    if outputs.report_pages is not None and not outputs.report_pages.are_report_pages_requested:
        outputs = replace(outputs, report_pages=None)
    is_complete = publish_run(run, arguments.store, outputs, write_sentence_to_stderr)
    return (EXIT_OK if run.ok else EXIT_FAILED) if is_complete else EXIT_INTERRUPTED


@contextmanager
def _print_unstored_run(arguments: argparse.Namespace) -> Iterator[None]:
    """A context for measuring a run. If the run cannot be stored, prints it and raises the error again."""
    try:
        yield
    except NotKept as error:
        print_run(cast(Run, error.run), arguments)
        raise


def _explain_resume(run: Run) -> None:
    """Prints how to resume an interrupted run. Called before the table of the run is printed, because a second
    interrupt may cut off the table.
    """
    if not run.finished:
        resume_command = f"fp8bench suite --resume {run.id}{format_store_option(run)}"
        write_sentence_to_stderr(
            f"interrupted; what was finished is kept in {run.path}.\n  To do the rest: {resume_command}"
        )


def _print_and_store_run(run: Run, arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.after_run import after_run

    exit_code = (EXIT_OK if run.ok else EXIT_FAILED) if run.finished else EXIT_INTERRUPTED
    try:
        print_run(run, arguments)
    except KeyboardInterrupt:  # the interrupt cuts off the table, but nothing else
        exit_code = EXIT_INTERRUPTED
    finally:  # Add the run to the history even if stdout cannot be written.
        is_complete = after_run(run, arguments.store, read_requested_outputs(arguments), write_sentence_to_stderr)
    return exit_code if is_complete else EXIT_INTERRUPTED
