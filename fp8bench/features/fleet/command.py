"""`fp8bench fleet`: measures the cells of a plan with many processes, and shows their states."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial

from fp8bench.cli import option_types as types
from fp8bench.cli.main import DEFAULT_STORE
from fp8bench.cli.options import add_common, subcommands
from fp8bench.cli.outputs import check_outputs, tell, write_outputs
from fp8bench.cli.streams import complain, say
from fp8bench.errors import EXIT_FAILED, EXIT_OK, UsageError
from fp8bench.features.fleet import view
from fp8bench.features.fleet.engines import ENGINES, Order, run_crew, start, work
from fp8bench.features.fleet.report import fleet_report
from fp8bench.model.codec import encode
from fp8bench.model.request import whole_number
from fp8bench.model.run import CellState, CellStatus, FleetPlan
from fp8bench.report.page.html import render
from fp8bench.store.fleet_plans import check_cell, read_plan, should_run, states_of


def add(parser: argparse.ArgumentParser) -> None:
    bare = subcommands(parser)
    codes = "Exit codes: 0 every cell is done and no case failed, 2 wrong usage, 3 otherwise, 130 interrupted."

    def command(name: str, words: str, codes: str = codes) -> argparse.ArgumentParser:
        subparser = bare(name, words, codes)
        subparser.add_argument(
            "plan",
            type=types.path,
            metavar="PLAN",
            help="a file that fp8bench suite NAME --dry-run --write-plan FILE wrote",
        )
        add_common(
            subparser,
            "--store",
            help="the folder for the runs of its cells, shared by all machines or one for each; default "
            f"{DEFAULT_STORE}",
        )
        return subparser

    work = command("work", "measure the waiting cells, one after the other")
    work.add_argument(
        "--workers",
        type=types.whole(whole_number(1, 256)),
        default=1,
        metavar="N",
        help="how many processes measure at a time on this machine (they disturb each other); default 1",
    )
    work.add_argument(
        "--cell",
        type=types.whole(whole_number(0)),
        metavar="N",
        help="only this cell, counted from 0; default all waiting cells",
    )
    work.add_argument("--retry", action="store_true", help="also measure cells whose last attempt failed")
    add_common(work, "--explain")
    submit_codes = codes.replace("0 every", "0 handed over, or with --wait every")
    handed = command("submit", "start workers in Slurm or in a Ray cluster", submit_codes)
    _add_submit(handed)
    status = command("status", "list the cells that are done, running, failed (with the reason) or waiting")
    add_common(status, "--explain")
    add_common(status, "--json", help="print the states as JSON instead")
    _add_report(bare)
    taken = bare(
        "collect",
        "copy the runs of several machines' stores into one, by machine and month",
        "Exit codes: 0 all copied, 2 wrong usage, 3 a file is damaged or could not be copied, 130 interrupted.",
    )
    taken.add_argument("plan", type=types.plan_or_all, metavar="PLAN", help="copy runs of its cells; '-': all runs")
    taken.add_argument(
        "folders", nargs="+", type=types.path, metavar="DIR", help="a store, or a folder with .fp8bench in it"
    )
    add_common(taken, "--store", help=f"where the copies go; existing files stay; default {DEFAULT_STORE}")


def _add_submit(handed: argparse.ArgumentParser) -> None:
    handed.add_argument(
        "--on",
        choices=[*ENGINES],
        required=True,
        help=(
            "what starts the workers. ray: a running Ray cluster, one cell for each node with the plan's kind of "
            "device (fp8bench[ray]); slurm: Slurm, by submitit (fp8bench[fleet])"
        ),
    )
    handed.add_argument(
        "--workers",
        type=types.whole(whole_number(1, 4096)),
        metavar="N",
        help="number of workers, which share the cells; default 1, on ray one for each device",
    )
    handed.add_argument("--retry", action="store_true", help="also measure cells whose last attempt failed")
    handed.add_argument(
        "--option",
        action="append",
        default=[],
        type=option,
        metavar="NAME=VALUE",
        help="ray: address=HOST:PORT of the cluster; default RAY_ADDRESS, or the one on this machine; slurm: "
        "options of sbatch, like partition=gpu or gres=gpu:1; exclusive, which is the default, may be 'no'",
    )
    handed.add_argument("--wait", action="store_true", help="return when all workers have ended; Ctrl-C then ends them")
    add_common(handed, "--explain")


def _add_report(bare: Callable[..., argparse.ArgumentParser]) -> None:
    ends = "Exit codes: 0 no machine is named, 2 wrong usage, 3 one is, 130 interrupted."
    report = bare("report", "compare the machines of a fleet, and name those that are slow or sent nothing", ends)
    report.add_argument(
        "source",
        type=types.path,
        metavar="PLAN|STORE",
        help="a plan, whose runs are in --store; or a store, such as the one that fleet collect made",
    )
    add_common(report, "--store", help=f"where the runs of the plan's cells are; default {DEFAULT_STORE}")
    report.add_argument(
        "--machines",
        type=types.words,
        default=(),
        metavar="NAMES",
        help="machines that you expect, as A,B,C; the report names those that sent nothing",
    )
    add_common(report, "--explain")
    add_common(report, "--json", help="print everything as JSON instead")
    add_common(
        report, "--csv", help="also write a row for each case on each machine to this file; '-' prints them instead"
    )
    add_common(report, "--html", help="also write a page for a browser to this file")
    add_common(report, "--md")


def option(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    name = name.removeprefix("--")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", name):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r:.80}")
    return name, value


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    if arguments.subcommand in ("collect", "report"):
        return _collect(arguments) if arguments.subcommand == "collect" else _report(arguments)
    of_plan = {"work": _work, "submit": _submit, "status": _status}
    return of_plan[arguments.subcommand](read_plan(arguments.plan), arguments)


def _status(plan: FleetPlan, arguments: argparse.Namespace) -> int:
    if arguments.store.exists() and not arguments.store.is_dir():
        raise UsageError(f"the store {arguments.store} is a file, expected a folder. Give another --store DIR.")
    states = states_of(plan, arguments.store)
    tell(arguments, partial(view.status_page, plan, states), lambda: {"plan": encode(plan), "cells": encode(states)})
    return _code(states)


def _work(plan: FleetPlan, arguments: argparse.Namespace) -> int:
    file, store, only = arguments.plan.resolve(), arguments.store, arguments.cell
    # 1. Several workers are processes, each of which runs this function alone.
    if arguments.workers > 1:
        if only is not None:
            raise UsageError("--cell is for one worker. Leave --workers out.")
        run_crew(Order(plan, file, store, arguments.workers, arguments.retry))
        return _status(plan, arguments)
    if only is not None:
        check_cell(plan, only)

    def begins(state: CellState) -> None:
        complain(f"cell {plan.name_of(state.number)} begins: {state.cell.setting}")

    # 2. Measure cells that nobody else has begun.
    done, refused = work(plan, file, store, arguments.retry, begins, only)
    # 3. Report failed, damaged and refused cells; the counts come last, where they are read.
    states = states_of(plan, store)
    for state in states:
        if state.number in done and state.why:
            complain(f"cell {state.number} {state.status}: {state.why}")
        for sentence in state.damage:
            complain(f"cell {state.number} is damaged: {sentence}")
        if state.number in refused and should_run(state, arguments.retry):
            complain(refused[state.number])
    complain(f"plan {plan.id}: {len(done)} of {len(states)} cells begun here; {view.describe_counts(states)}")
    return _code(states if only is None else states[only : only + 1])


def _submit(plan: FleetPlan, arguments: argparse.Namespace) -> int:
    options, store = dict(arguments.option), arguments.store
    order = Order(plan, arguments.plan, store, arguments.workers, arguments.retry, arguments.wait, options)

    def report_jobs(jobs: Sequence[str]) -> None:
        complain(f"jobs {', '.join(jobs)} on {arguments.on}; their output is in {order.logs}")
        complain(f"See their states: fp8bench fleet status {arguments.plan} --store {store}")

    for trouble in start(arguments.on, order, report_jobs):
        complain(trouble)
    return _status(plan, arguments) if arguments.wait else EXIT_OK


def _code(states: tuple[CellState, ...]) -> int:
    return EXIT_OK if all(state.status is CellStatus.DONE and not state.why for state in states) else EXIT_FAILED


def _collect(arguments: argparse.Namespace) -> int:
    from fp8bench.features.fleet.collect import collect  # heavy

    out = arguments.store
    collected = collect(read_plan(arguments.plan) if arguments.plan is not None else None, arguments.folders, out)
    for sentence in collected.failed:
        complain(sentence)
    taken = ", ".join(f"{count} of {name}" for name, count in sorted(collected.taken.items()))
    lines = [f"taken: {taken or 'nothing new'}", f"here before: {collected.same}"]
    lines += [f"left out: {count} {reason}" for reason, count in sorted((+collected.left).items())]
    lines += [f"refused: {len(collected.failed)}"] if collected.failed else []
    say("\n".join([*lines, f"in {out}", ""]))
    return EXIT_FAILED if collected.failed else EXIT_OK


def _report(arguments: argparse.Namespace) -> int:
    report = fleet_report(arguments.source, arguments.store, arguments.machines)
    page, html = partial(view.report_page, report, str(arguments.source)), ""
    if arguments.html is not None:
        html = render(page())
    with write_outputs({"--html": (arguments.html, html)}):
        tell(arguments, page, partial(encode, report), partial(view.report_rows, report))
    if arguments.html is not None:
        complain(f"the page is {arguments.html}")
    return EXIT_FAILED if report.alarms else EXIT_OK
