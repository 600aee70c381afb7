"""`fp8bench history`: lists stored runs and series, finds changes over commits, and checks and repairs a store."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common_options, subcommands
from fp8bench.cli.outputs import check_outputs, format_store_option, print_lines, store_and_import_options, tell
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.cli.streams import write_sentence_to_stderr
from fp8bench.errors import EXIT_FAILED, EXIT_OK, EXIT_REGRESSION, StoreError, UsageError
from fp8bench.files import is_locked
from fp8bench.jobs.kinds import kinds
from fp8bench.registry import workloads
from fp8bench.report.terminal.history import (
    asv_files_page,
    merge_page,
    run_row,
    runs_page,
    store_faults_page,
    trend_page,
    trends_page,
)
from fp8bench.store.commit_runs import UNREADABLE_FILE
from fp8bench.store.runs.listing import iterate_newest_files, list_unreadable_folders, listing
from fp8bench.store.runs.run_file import load_run
from fp8bench.store.series import list_tracked_metrics
from fp8bench.store.verify import verify_store


def add(parser: argparse.ArgumentParser) -> None:
    add_command = subcommands(parser)

    def add_with_store(name: str, words: str, epilog: str = "") -> argparse.ArgumentParser:
        subparser = add_command(name, words, epilog)
        add_common_options(subparser, "--store", help="as in suite")
        add_common_options(subparser, "--import", help="module or .py file that defines the measured suites")
        return subparser

    list_command_parser = add_with_store("list", "list the series, or the runs")
    list_command_parser.add_argument(
        "word", nargs="?", default="", metavar="WORD", help="print only lines that contain WORD"
    )
    add_common_options(list_command_parser, "--explain", "--md")
    list_command_parser.add_argument("--runs", action="store_true", help="list the runs instead, newest first")
    show_command_parser = add_with_store("show", "print a series, commit by commit")
    add_common_options(show_command_parser, "--explain", "--md")
    show_command_parser.add_argument(
        "series", metavar="SERIES", help="a name from `history list`, or a part that only one name has"
    )
    regressions_parser = add_with_store(
        "regressions",
        "list lasting changes of series, up or down",
        "Exit codes: 0 no alarm, 1 an open change is worse or changes a count, 2 wrong usage.",
    )
    regressions_parser.add_argument(
        "--all",
        action="store_true",
        help="also changes that were acknowledged, reverted later, or measured with another version",
    )
    add_common_options(regressions_parser, "--explain", "--md")
    add_common_options(regressions_parser, "--json", help="print all changes as JSON instead")
    ack_parser = add_with_store("ack", "accept the open changes of a series, so that they raise no more alarms")
    ack_parser.add_argument(
        "series", metavar="SERIES", help="as in show; * stands for any part: 'gemm.Gemm.track_*(bf16, 512)'"
    )
    ack_parser.add_argument("--because", metavar="TEXT", help="the reason")
    ack_parser.add_argument("--undo", action="store_true", help="allow alarms again")
    add_with_store(
        "verify",
        "read every file of the store and report damage; change nothing",
        "Exit codes: 0 no damage, 2 no such store, 3 damage found.",
    )
    add_with_store(
        "rebuild",
        "write asv's files again from the runs; keep results that only asv measured",
        "Exit codes: 0 fine, 2 the store cannot be written, 3 something could not be written.",
    )
    merge_parser = add_with_store(
        "merge",
        "import a store from a different machine",
        "Exit codes: 0 fine, 2 wrong usage, 3 part of the other store could not be imported.",
    )
    merge_parser.add_argument("folder", type=types.path, metavar="DIR", help="the other store; it is only read")


def run(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.history import check_store_exists

    check_outputs(arguments)
    # Only the imported store must exist for a merge.
    if arguments.subcommand == "merge":
        return _merge_stores(arguments)
    reads_all_runs = arguments.subcommand in ("verify", "rebuild") or getattr(arguments, "runs", False)
    store = check_store_exists(arguments.store, TERMINAL_JOB_OBSERVER, reads_all_runs)
    if arguments.subcommand == "verify":
        store_verification = verify_store(store)
        tell(
            arguments,
            partial(
                store_faults_page,
                store_verification.faults,
                store_verification.run_files_without_fault,
                store_verification.files,
                str(store),
            ),
        )
        return EXIT_FAILED if any(fault.broken for fault in store_verification.faults) else EXIT_OK
    function_by_command = {
        "list": _list_series,
        "show": _show_series,
        "regressions": _list_regressions,
        "ack": _acknowledge_changes,
        "rebuild": _rebuild_asv_view,
    }
    return function_by_command[arguments.subcommand](arguments, store)


def _list_series(arguments: argparse.Namespace, store: Path) -> int:
    from fp8bench.jobs.history import read_history

    # 1. Read the history, unless runs are listed, which is faster without it.
    history = None if arguments.runs else read_history(store, TERMINAL_JOB_OBSERVER)
    if history is not None:
        has_results = bool(history.runs or history.skipped_run_reasons)
    else:
        has_results = bool(_list_other_results(store, Counter())) or any(iterate_newest_files(store))
    # 2. Without results, explain how to begin, or that this process lacks permission to read the store's files.
    if not has_results:
        empty_history_hint = "no runs yet. Begin with: fp8bench suite gemm --grid"
        print_lines(
            [f"{store}: {'no runs that may be read' if list_unreadable_folders(store) else empty_history_hint}"]
        )
        return EXIT_OK
    word = arguments.word.lower()
    if history is None:
        return _print_run_list(arguments, store, word)
    # 3. List the last figure of each series whose name contains the user's WORD.
    trend_endings = history.list_trend_endings(lambda name: word in name.lower())
    if not trend_endings and word and history.runs:
        raise UsageError(f"no series has {arguments.word!r:.80} in its name. `fp8bench history list` names them all.")
    options = store_and_import_options(arguments)
    tell(
        arguments,
        partial(
            trends_page, trend_endings, str(store), history.runs, history.commits, history.skipped_run_reasons, options
        ),
    )
    return EXIT_OK


def _print_run_list(arguments: argparse.Namespace, store: Path, word: str) -> int:
    rows = []
    run_listing = listing(store)
    skipped_file_counts = run_listing.skipped_run_reasons
    # 1. List the runs whose line contains the user's WORD, and count unreadable files.
    for path in run_listing.files:
        try:
            run = load_run(path)
        except StoreError:
            skipped_file_counts[UNREADABLE_FILE] += 1
            continue
        row = run_row(run, not run.finished and is_locked(path), format_store_option(store))
        if any(word in field.text.lower() for field in row):
            rows.append(row)
    # 2. List other stored results, such as duels of two revisions, studies and ablations.
    non_run_result_lines = {}
    for name, lines in _list_other_results(store, skipped_file_counts).items():
        if matching_lines := [line for line in lines if word in line.lower()]:
            non_run_result_lines[name] = matching_lines
    if not rows and not non_run_result_lines and word:
        raise UsageError(f"no run has {word!r:.80} in its line. `fp8bench history list --runs` names them all.")
    tell(
        arguments,
        partial(runs_page, rows, str(store), skipped_file_counts, format_store_option(store), non_run_result_lines),
    )
    return EXIT_OK


def _list_other_results(store: Path, skipped_counts: Counter[str]) -> dict[str, list[str]]:
    lines_by_kind: dict[str, list[str]] = {}
    for kind in kinds():
        for line in kind.lines(store):
            try:
                lines_by_kind.setdefault(kind.name, []).append(line())
            except StoreError:
                skipped_counts[UNREADABLE_FILE] += 1
    return lines_by_kind


def _show_series(arguments: argparse.Namespace, store: Path) -> int:
    from fp8bench.jobs.history import find_series, read_history

    history = read_history(store, TERMINAL_JOB_OBSERVER)
    series_name = find_series(arguments.series, history)
    series_trends = history.trends(lambda name: name == series_name)
    metric_series = series_trends[0].series
    grid = workloads.get(metric_series.workload).history
    assert grid is not None
    metric_text = next(spec.history for spec in list_tracked_metrics(grid) if spec.name == metric_series.metric)
    description = (
        f"{metric_text}, a ratio" if metric_series.unit == "ratio" else f"{metric_text}, in {metric_series.unit}"
    )
    tell(arguments, partial(trend_page, series_trends, description))
    return EXIT_OK


def _list_regressions(arguments: argparse.Namespace, store: Path) -> int:
    from fp8bench.jobs.history import find_all_changes, read_history
    from fp8bench.report.terminal.changes import changes_document, make_changes_page

    search_result = find_all_changes(read_history(store, TERMINAL_JOB_OBSERVER), store, TERMINAL_JOB_OBSERVER)
    make_page = partial(
        make_changes_page, search_result, str(store), arguments.all, store_and_import_options(arguments)
    )
    tell(arguments, make_page, partial(changes_document, search_result))
    return EXIT_REGRESSION if any(change.alarms for change in search_result.changes) else EXIT_OK


def _acknowledge_changes(arguments: argparse.Namespace, store: Path) -> int:
    from fp8bench.jobs.history import acknowledge_changes

    acknowledged_changes = acknowledge_changes(
        arguments.series, store, TERMINAL_JOB_OBSERVER, arguments.because, arguments.undo
    )
    changes = (f"  {name}, after {since[:8]} and up to {until[:8]}" for name, since, until in acknowledged_changes)
    print_lines((f"{store}: {'not acknowledged any more' if arguments.undo else 'acknowledged'}", *changes))
    return EXIT_OK


def _rebuild_asv_view(arguments: argparse.Namespace, store: Path) -> int:
    from fp8bench.store.merge_stores import rebuild_asv_view

    rebuild_result = rebuild_asv_view(store)
    tell(
        arguments,
        partial(
            asv_files_page,
            str(store),
            len(rebuild_result.files),
            rebuild_result.series,
            rebuild_result.runs,
            rebuild_result.skipped_run_reasons,
        ),
    )
    return _print_failures(rebuild_result.failed, rebuild_result.renamed_files)


def _merge_stores(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.history import check_store_exists
    from fp8bench.store.merge_stores import find_store, merge_store

    store = arguments.store
    imported_store = find_store(arguments.folder, store)
    check_store_exists(imported_store, TERMINAL_JOB_OBSERVER, reading=True)
    merge_result, rebuild_result = merge_store(store, imported_store)
    counts = {
        "new runs": len(merge_result.copied_files),
        "runs with new cases": len(merge_result.extended_paths),
        "runs that both stores had": merge_result.same,
        **({"new acknowledgements": merge_result.acks} if merge_result.acks else {}),
        "asv's files written again": len(rebuild_result.files),
    }
    tell(arguments, partial(merge_page, f"{store}: imported {imported_store}", counts))
    for note in merge_result.notes:
        write_sentence_to_stderr(note)
    return _print_failures([*merge_result.failed, *rebuild_result.failed], rebuild_result.renamed_files)


def _print_failures(failures: Sequence[str], files_set_aside: Iterable[Path]) -> int:
    """Prints the failures, and the names of broken files of asv that were renamed. Returns the exit code."""
    for path in files_set_aside:
        write_sentence_to_stderr(f"{path.name} was broken, and was set aside in {path.parent}")
    for failure in failures:
        write_sentence_to_stderr(failure)
    return EXIT_FAILED if failures else EXIT_OK
