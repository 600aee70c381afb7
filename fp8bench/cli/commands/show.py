"""`fp8bench show`: print a stored run or another stored result."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fp8bench.analysis.tapes import parts_of, refuse_none
from fp8bench.cli.options import add_common
from fp8bench.cli.outputs import check_outputs, in_store, print_run, stdout_look, tell
from fp8bench.cli.streams import complain
from fp8bench.errors import EXIT_INTERRUPTED, EXIT_OK, RunNotFound, UsageError
from fp8bench.jobs.kinds import KeptTable, Kind, View, meant_by
from fp8bench.model import Run
from fp8bench.model.codec import collect_ignored_names, encode
from fp8bench.store.runs.listing import find_run, load_stored_run

EXAMPLES = ("fp8bench show last --all", "fp8bench show last --csv rows.csv")
# Tables of a run with more detail than the answer.
_DETAILS = {
    "memory": "memory at the peak of a step, by role",
    "data": "its data before scaling, and the share outside each format's range",
    "numbers": "all errors and other figures",
    "energy": "energy of a step and of its phases, or why it is missing",
    "notes": "notes, skipped cases, doubts, and what was not checked",
    "all": "print everything; also of a training",
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        help="a run, training or duel: its id, its file's stem or its path; 'last' is the newest run or training",
    )
    add_common(parser, "--store", help="as in suite")
    for table in _OF_RUNS:
        parser.add_argument(f"--{table.name}", help=table.help, action="store_true")
    add_common(parser, "--explain", "--json", "--csv", "--log")


def run(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.after_run import log_kept, log_run

    check_outputs(arguments)
    word, store = arguments.run, arguments.store
    selected = [table for table in _OF_RUNS if getattr(arguments, table.name)]
    # 1. A word may name a run or any other stored result.
    meant = meant_by(word, store, only_runs=any(table.name != "all" for table in selected))
    if not meant:
        # 2. A run, as its page or as the one table that was asked for.
        with collect_ignored_names() as ignored:
            measured = load_stored_run(word, store)
        if len(selected) > 1:
            raise UsageError(f"--{selected[0].name} and --{selected[1].name} are two tables. Give one of them.")
        for table in selected:
            tell(arguments, *table.view(measured, store))
        if not selected:
            print_run(measured, arguments)
        is_complete = log_run(measured, arguments.log, complain)
    else:
        # 3. Print another kind of result, which has a separate view and no tables of runs.
        kind, path = meant[0]
        _check_meant(word, meant, store)
        tables = [table.name for table in selected if table.name != "all"]
        _refuse(arguments, repr(word), kind.name, [*tables, *kind.refused])
        with collect_ignored_names() as ignored:
            loaded = kind.load(path)
        tell(arguments, *(kind.whole_view(loaded) if arguments.all else kind.view(loaded)))
        is_complete = log_kept(kind, loaded, arguments.log, complain)
    # 4. Name fields of a newer version that are ignored: the output may be incomplete.
    if ignored:
        complain(
            f"{word} was written by another version, and these fields of it were ignored: {', '.join(sorted(ignored))}"
        )
    return EXIT_OK if is_complete else EXIT_INTERRUPTED


def _refuse(arguments: argparse.Namespace, name: str, kind: str, options: Iterable[str]) -> None:
    for option in options:
        if getattr(arguments, option) not in (None, False, []):
            raise UsageError(f"{name:.80} is a {kind}, which has no --{option}. Leave it out, or use --json.")


def _check_meant(word: str, meant: Sequence[tuple[Kind[Any], Path]], store: Path) -> None:
    kind, path = meant[0]
    names = kind.names(path)
    if word in names or not any(name.startswith(word) for name in names):
        return
    other_names = [other_kind.names(place)[-1] for other_kind, place in meant[1:]]
    with contextlib.suppress(RunNotFound):
        other_names.append(find_run(word, store).stem)
    if other_names:
        raise RunNotFound(f"{word!r} fits {other_names[0]} and the {kind.name} {names[-1]}. Give more of the id.")


def _tape(run: Run, store: Path) -> View:
    from fp8bench.jobs.tape import tapes_of
    from fp8bench.report.topics import tape

    tapes = tapes_of(run)
    page = partial(tape.page_of, f"the operators of a step of run {run.id}", tapes)
    return View(page, lambda: {"tapes": encode(tapes)}, partial(tape.tape_rows, tapes))


def _shares(run: Run, store: Path) -> View:
    from fp8bench.analysis.findings import findings
    from fp8bench.report.topics import shares

    refuse_none(run)
    parts = parts_of(run, findings(run))
    return View(partial(shares.page_of, run, parts), partial(shares.value_of, parts), partial(shares.rows_of, parts))


def _detail(name: str, run: Run, store: Path) -> View:
    from fp8bench.analysis.findings import findings
    from fp8bench.jobs.report_files import place_of_report
    from fp8bench.report.data.run import run_rows, run_value
    from fp8bench.report.terminal.run import detail_of

    results = findings(run)
    page = partial(detail_of, name, run, results, stdout_look()[0], place_of_report(run), in_store(run))
    return View(page, partial(run_value, run, results), partial(run_rows, [(run, results)]))


_OF_RUNS = (
    *(KeptTable(name, f"run: {words}", partial(_detail, name)) for name, words in _DETAILS.items()),
    KeptTable("tape", "run: the operators of its steps, their FLOPs and bytes, by precision", _tape),
    KeptTable("shares", "run: the share of each module and each kind of work in a step", _shares),
)
