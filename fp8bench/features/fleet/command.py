"""`fp8bench fleet`: measures the cells of a plan with several processes or machines, and shows their states."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial

from fp8bench.cli import option_types as types
from fp8bench.cli.main import DEFAULT_STORE
from fp8bench.cli.options import add_common_options, subcommands
from fp8bench.cli.outputs import check_outputs, tell, write_outputs
from fp8bench.cli.streams import say, write_sentence_to_stderr
from fp8bench.errors import EXIT_FAILED, EXIT_OK, UsageError
from fp8bench.features.fleet import view
from fp8bench.features.fleet.engines import (
    WORKER_STARTER_BY_ENGINE,
    WorkerStartOrder,
    measure_waiting_cells,
    run_local_workers,
    start_workers,
)
from fp8bench.features.fleet.report import make_fleet_report
from fp8bench.model.codec import encode
from fp8bench.model.request import whole_number
from fp8bench.model.run import CellState, CellStatus, FleetPlan
from fp8bench.report.page.html import render
from fp8bench.store.fleet_plans import check_cell, compute_cell_states, read_fleet_plan, should_run_cell


def add(parser: argparse.ArgumentParser) -> None:
    add_command = subcommands(parser)
    exit_codes = "Exit codes: 0 every cell is done and no case failed, 2 wrong usage, 3 otherwise, 130 interrupted."

    def command(name: str, help_text: str, exit_codes: str = exit_codes) -> argparse.ArgumentParser:
        subparser = add_command(name, help_text, exit_codes)
        subparser.add_argument(
            "plan",
            type=types.path,
            metavar="PLAN",
            help="a file that fp8bench suite NAME --dry-run --write-plan FILE wrote",
        )
        add_common_options(
            subparser,
            "--store",
            help="the folder for the runs of its cells, shared by all machines or one for each; default "
            f"{DEFAULT_STORE}",
        )
        return subparser

    work_command_parser = command("work", "measure the waiting cells, one after the other")
    work_command_parser.add_argument(
        "--workers",
        type=types.whole(whole_number(1, 256)),
        default=1,
        metavar="N",
        help="how many processes measure at a time on this machine (they disturb each other); default 1",
    )
    work_command_parser.add_argument(
        "--cell",
        type=types.whole(whole_number(0)),
        metavar="N",
        help="only this cell, counted from 0; default all waiting cells",
    )
    work_command_parser.add_argument(
        "--retry", action="store_true", help="also measure cells whose last attempt failed"
    )
    add_common_options(work_command_parser, "--explain")
    submit_exit_codes = exit_codes.replace("0 every", "0 workers are submitted, or with --wait every")
    submit_command_parser = command("submit", "start workers in Slurm or in a Ray cluster", submit_exit_codes)
    _add_submit_options(submit_command_parser)
    status = command("status", "list the cells that are done, running, failed (with the reason) or waiting")
    add_common_options(status, "--explain")
    add_common_options(status, "--json", help="print the states as JSON instead")
    _add_report_command(add_command)
    collect_command_parser = add_command(
        "collect",
        "copy the runs of several machines' stores into one, by machine and month",
        "Exit codes: 0 all copied, 2 wrong usage, 3 a file is damaged or could not be copied, 130 interrupted.",
    )
    collect_command_parser.add_argument(
        "plan",
        type=types.parse_plan_or_all,
        metavar="PLAN",
        help="copy the runs of this plan's cells; '-' copies all runs",
    )
    collect_command_parser.add_argument(
        "folders", nargs="+", type=types.path, metavar="DIR", help="a store, or a folder with .fp8bench in it"
    )
    add_common_options(
        collect_command_parser, "--store", help=f"where the copies go; existing files stay; default {DEFAULT_STORE}"
    )


def _add_submit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on",
        choices=[*WORKER_STARTER_BY_ENGINE],
        required=True,
        help=(
            "what starts the workers. ray: a running Ray cluster, one cell for each node with the plan's kind of "
            "device (fp8bench[ray]); slurm: Slurm, by submitit (fp8bench[fleet])"
        ),
    )
    parser.add_argument(
        "--workers",
        type=types.whole(whole_number(1, 4096)),
        metavar="N",
        help="number of workers, which share the cells; default 1, on ray one for each device",
    )
    parser.add_argument("--retry", action="store_true", help="also measure cells whose last attempt failed")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=parse_option,
        metavar="NAME=VALUE",
        help="ray: address=HOST:PORT of the cluster; default RAY_ADDRESS, or the one on this machine; slurm: "
        "options of sbatch, like partition=gpu or gres=gpu:1; exclusive, which is the default, may be 'no'",
    )
    parser.add_argument("--wait", action="store_true", help="return when all workers have ended; Ctrl-C then ends them")
    add_common_options(parser, "--explain")


def _add_report_command(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    exit_codes = "Exit codes: 0 no machine stands out, 2 wrong usage, 3 a machine stands out, 130 interrupted."
    report = add_command(
        "report", "compare the machines of a fleet, and name those that are slow or sent nothing", exit_codes
    )
    report.add_argument(
        "source",
        type=types.path,
        metavar="PLAN|STORE",
        help="a plan, whose runs are in --store; or a store, such as the one that fleet collect made",
    )
    add_common_options(report, "--store", help=f"where the runs of the plan's cells are; default {DEFAULT_STORE}")
    report.add_argument(
        "--machines",
        type=types.words,
        default=(),
        metavar="NAMES",
        help="machines that you expect, as A,B,C; the report names those that sent nothing",
    )
    add_common_options(report, "--explain")
    add_common_options(report, "--json", help="print everything as JSON instead")
    add_common_options(
        report,
        "--csv",
        help="also write a CSV row for each case on each machine to this file; '-' prints the rows instead",
    )
    add_common_options(report, "--html", help="also write a page for a browser to this file")
    add_common_options(report, "--md")


def parse_option(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    name = name.removeprefix("--")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", name):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r:.80}")
    return name, value


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    # These commands do not always need a plan.
    commands = {"collect": _collect_runs, "report": _show_report}
    if arguments.subcommand in commands:
        return commands[arguments.subcommand](arguments)
    plan_commands = {"work": _run_worker, "submit": _submit_workers, "status": _show_status}
    return plan_commands[arguments.subcommand](read_fleet_plan(arguments.plan), arguments)


def _show_status(plan: FleetPlan, arguments: argparse.Namespace) -> int:
    if arguments.store.exists() and not arguments.store.is_dir():
        raise UsageError(f"the store {arguments.store} is a file, expected a folder. Give another --store DIR.")
    cell_states = compute_cell_states(plan, arguments.store)
    tell(
        arguments,
        partial(view.status_page, plan, cell_states),
        lambda: {"plan": encode(plan), "cells": encode(cell_states)},
    )
    return _choose_exit_code(cell_states)


def _run_worker(plan: FleetPlan, arguments: argparse.Namespace) -> int:
    file, store, only_cell = arguments.plan.resolve(), arguments.store, arguments.cell
    # 1. If several workers are requested, start each of them as a process that runs this function.
    if arguments.workers > 1:
        if only_cell is not None:
            raise UsageError("--cell is for one worker. Leave --workers out.")
        run_local_workers(WorkerStartOrder(plan, file, store, arguments.workers, arguments.retry))
        return _show_status(plan, arguments)
    if only_cell is not None:
        check_cell(plan, only_cell)

    def report_begin(state: CellState) -> None:
        write_sentence_to_stderr(f"cell {plan.name_of(state.number)} starts: {state.cell.setting}")

    # 2. Measure the cells that no other worker measures.
    exit_code_by_cell, refusal_by_cell = measure_waiting_cells(
        plan, file, store, arguments.retry, report_begin, only_cell
    )
    # 3. Report failed, damaged and refused cells. The counts come last, because users look at the last line first.
    cell_states = compute_cell_states(plan, store)
    for state in cell_states:
        if state.number in exit_code_by_cell and state.why:
            write_sentence_to_stderr(f"cell {state.number} {state.status}: {state.why}")
        for sentence in state.damage:
            write_sentence_to_stderr(f"cell {state.number} is damaged: {sentence}")
        if state.number in refusal_by_cell and should_run_cell(state, arguments.retry):
            write_sentence_to_stderr(refusal_by_cell[state.number])
    status_counts = view.describe_status_counts(cell_states)
    write_sentence_to_stderr(
        f"plan {plan.id}: {len(exit_code_by_cell)} of {len(cell_states)} cells measured here; {status_counts}"
    )
    return _choose_exit_code(cell_states if only_cell is None else cell_states[only_cell : only_cell + 1])


def _submit_workers(plan: FleetPlan, arguments: argparse.Namespace) -> int:
    options, store = dict(arguments.option), arguments.store
    worker_order = WorkerStartOrder(
        plan, arguments.plan, store, arguments.workers, arguments.retry, arguments.wait, options
    )

    def report_jobs(jobs: Sequence[str]) -> None:
        write_sentence_to_stderr(
            f"jobs {', '.join(jobs)} on {arguments.on}; their output is in {worker_order.log_folder}"
        )
        write_sentence_to_stderr(f"See their states: fp8bench fleet status {arguments.plan} --store {store}")

    for trouble in start_workers(arguments.on, worker_order, report_jobs):
        write_sentence_to_stderr(trouble)
    return _show_status(plan, arguments) if arguments.wait else EXIT_OK


def _choose_exit_code(states: tuple[CellState, ...]) -> int:
    return EXIT_OK if all(state.status is CellStatus.DONE and not state.why for state in states) else EXIT_FAILED


def _collect_runs(arguments: argparse.Namespace) -> int:
    from fp8bench.features.fleet.collect import collect_runs  # this import is slow

    out = arguments.store
    collected_run_counts = collect_runs(
        read_fleet_plan(arguments.plan) if arguments.plan is not None else None, arguments.folders, out
    )
    for sentence in collected_run_counts.failures:
        write_sentence_to_stderr(sentence)
    copied_counts_text = ", ".join(
        f"{count} of {name}" for name, count in sorted(collected_run_counts.taken_count_by_machine.items())
    )
    lines = [
        f"taken: {copied_counts_text or 'nothing new'}",
        f"copied before: {collected_run_counts.unchanged_file_count}",
    ]
    lines += [
        f"left out: {count} {reason}"
        # The unary plus drops reasons with a count of 0.
        for reason, count in sorted((+collected_run_counts.excluded_count_by_reason).items())
    ]
    lines += [f"refused: {len(collected_run_counts.failures)}"] if collected_run_counts.failures else []
    say("\n".join([*lines, f"in {out}", ""]))
    return EXIT_FAILED if collected_run_counts.failures else EXIT_OK


def _show_report(arguments: argparse.Namespace) -> int:
    report = make_fleet_report(arguments.source, arguments.store, arguments.machines)
    page, html = partial(view.report_page, report, str(arguments.source)), ""
    if arguments.html is not None:
        html = render(page())
    with write_outputs({"--html": (arguments.html, html)}):
        tell(arguments, page, partial(encode, report), partial(view.list_fleet_rows, report))
    if arguments.html is not None:
        write_sentence_to_stderr(f"the page is {arguments.html}")
    return EXIT_FAILED if report.alarms else EXIT_OK
