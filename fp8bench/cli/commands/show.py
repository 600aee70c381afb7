"""`fp8bench show`: prints a stored run or another stored result."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fp8bench.analysis.tapes import list_step_shares, require_step_shares
from fp8bench.cli.options import add_common_options
from fp8bench.cli.outputs import check_outputs, format_store_option, print_run, stdout_format, tell
from fp8bench.cli.streams import write_sentence_to_stderr
from fp8bench.errors import EXIT_INTERRUPTED, EXIT_OK, RunNotFound, UsageError
from fp8bench.jobs.kinds import ResultKind, ResultView, RunTableOption, find_results
from fp8bench.model import Run
from fp8bench.model.codec import collect_ignored_names, encode
from fp8bench.store.runs.listing import find_run, load_stored_run

EXAMPLES = ("fp8bench show last --all", "fp8bench show last --csv rows.csv")
# The options that print one detailed table of a run instead of its answer.
_DETAIL_OPTIONS = {
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
        help="a run, training or duel: its id, its name or its path; 'last' is the newest run or training",
    )
    add_common_options(parser, "--store", help="as in suite")
    for table in _RUN_TABLE_OPTIONS:
        parser.add_argument(f"--{table.name}", help=table.help, action="store_true")
    add_common_options(parser, "--explain", "--json", "--csv", "--log")


def run(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.after_run import log_result, log_run

    check_outputs(arguments)
    word, store = arguments.run, arguments.store
    selected_tables = [table for table in _RUN_TABLE_OPTIONS if getattr(arguments, table.name)]
    # 1. Find out whether the word names another kind of result than a run, such as a training. Only runs have the
    # tables that options select.
    non_run_results = find_results(word, store, only_runs=any(table.name != "all" for table in selected_tables))
    if not non_run_results:
        # 2. Print a run: the requested table, or the answer if no table is requested.
        with collect_ignored_names() as ignored_names:
            loaded_run = load_stored_run(word, store)
        if len(selected_tables) > 1:
            raise UsageError(
                f"--{selected_tables[0].name} and --{selected_tables[1].name} are two tables. Give one of them."
            )
        for table in selected_tables:
            tell(arguments, *table.view(loaded_run, store))
        if not selected_tables:
            print_run(loaded_run, arguments)
        is_complete = log_run(loaded_run, arguments.log, write_sentence_to_stderr)
    else:
        # 3. Print another kind of result, which has its own view and no tables.
        kind, path = non_run_results[0]
        _refuse_ambiguous_name(word, non_run_results, store)
        table_names = [table.name for table in selected_tables if table.name != "all"]
        _refuse_options(arguments, repr(word), kind.name, [*table_names, *kind.refused])
        with collect_ignored_names() as ignored_names:
            loaded_result = kind.load(path)
        tell(arguments, *(kind.make_complete_view(loaded_result) if arguments.all else kind.view(loaded_result)))
        is_complete = log_result(kind, loaded_result, arguments.log, write_sentence_to_stderr)
    # 4. Warn if the file has fields that this version does not know, because they are missing in the output.
    if ignored_names:
        write_sentence_to_stderr(
            f"{word} was written by another version, and these fields of it were ignored: "
            f"{', '.join(sorted(ignored_names))}"
        )
    return EXIT_OK if is_complete else EXIT_INTERRUPTED


def _refuse_options(arguments: argparse.Namespace, name: str, kind: str, options: Iterable[str]) -> None:
    for option in options:
        if getattr(arguments, option) not in (None, False, []):
            raise UsageError(f"{name:.80} is a {kind}, which has no --{option}. Leave it out, or use --json.")


def _refuse_ambiguous_name(word: str, candidates: Sequence[tuple[ResultKind[Any], Path]], store: Path) -> None:
    kind, path = candidates[0]
    names = kind.names(path)
    if word in names or not any(name.startswith(word) for name in names):
        return
    other_result_names = [other_kind.names(other_path)[-1] for other_kind, other_path in candidates[1:]]
    with contextlib.suppress(RunNotFound):
        other_result_names.append(find_run(word, store).stem)
    if other_result_names:
        raise RunNotFound(
            f"{word!r} fits {other_result_names[0]} and the {kind.name} {names[-1]}. Give more of the id."
        )


def _make_tape_view(run: Run, store: Path) -> ResultView:
    from fp8bench.jobs.tape import read_tapes
    from fp8bench.report.topics import tape

    tapes = read_tapes(run)
    make_page = partial(tape.make_tape_page, f"the operators of a step of run {run.id}", tapes)
    return ResultView(make_page, lambda: {"tapes": encode(tapes)}, partial(tape.make_tape_csv_rows, tapes))


def _make_step_shares_view(run: Run, store: Path) -> ResultView:
    from fp8bench.analysis.findings import findings
    from fp8bench.report.topics import shares

    require_step_shares(run)
    step_shares = list_step_shares(run, findings(run))
    return ResultView(
        partial(shares.step_shares_page, run, step_shares),
        partial(shares.step_shares_document, step_shares),
        partial(shares.make_share_rows, step_shares),
    )


def _make_run_detail_view(name: str, run: Run, store: Path) -> ResultView:
    from fp8bench.analysis.findings import findings
    from fp8bench.jobs.report_files import find_report_page
    from fp8bench.report.data.run import run_document, run_rows
    from fp8bench.report.terminal.run import detail_page

    results = findings(run)
    make_page = partial(
        detail_page, name, run, results, stdout_format()[0], find_report_page(run), format_store_option(run)
    )
    return ResultView(make_page, partial(run_document, run, results), partial(run_rows, [(run, results)]))


_RUN_TABLE_OPTIONS = (
    *(
        RunTableOption(name, f"run: {words}", partial(_make_run_detail_view, name))
        for name, words in _DETAIL_OPTIONS.items()
    ),
    RunTableOption("tape", "run: the operators of its steps, their FLOPs and bytes, by precision", _make_tape_view),
    RunTableOption("shares", "run: the share of each module and each kind of work in a step", _make_step_shares_view),
)
