"""`fp8bench history`: what is stored, one series over time, what changed, whether files are intact, and repairs."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common, subcommands
from fp8bench.cli.outputs import check_outputs, in_store, options_of, print_lines, tell
from fp8bench.cli.progress import TERMINAL
from fp8bench.cli.streams import complain
from fp8bench.errors import EXIT_FAILED, EXIT_OK, EXIT_REGRESSION, StoreError, UsageError
from fp8bench.files import is_locked
from fp8bench.jobs.kinds import kinds
from fp8bench.registry import workloads
from fp8bench.report.terminal.history import (
    faults_page,
    joined_page,
    rebuilt_page,
    run_row,
    runs_page,
    trend_page,
    trends_page,
)
from fp8bench.store.commit_runs import UNREADABLE
from fp8bench.store.runs.listing import closed_folders, listing, newest_files
from fp8bench.store.runs.run_file import load_run
from fp8bench.store.series import tracked_by
from fp8bench.store.verify import verify


def add(parser: argparse.ArgumentParser) -> None:
    add_command = subcommands(parser)

    def command(name: str, words: str, epilog: str = "") -> argparse.ArgumentParser:
        subparser = add_command(name, words, epilog)
        add_common(subparser, "--store", help="as in suite")
        add_common(subparser, "--import", help="module or .py file of your suites that were measured")
        return subparser

    listing = command("list", "list the series, or the runs")
    listing.add_argument("word", nargs="?", default="", metavar="WORD", help="print only lines that contain WORD")
    add_common(listing, "--explain", "--md")
    listing.add_argument("--runs", action="store_true", help="list the runs instead, newest first")
    show = command("show", "print a series, commit by commit")
    add_common(show, "--explain", "--md")
    show.add_argument(
        "series", metavar="SERIES", help="a name from `history list`, or a part of it that matches only one"
    )
    regressions = command(
        "regressions",
        "list lasting steps of series, up or down",
        "Exit codes: 0 no open change is worse and no count changed, 1 one is or has, 2 wrong usage.",
    )
    regressions.add_argument(
        "--all",
        action="store_true",
        help="also steps that were acknowledged, reverted by a later change, or measured with another version",
    )
    add_common(regressions, "--explain", "--md")
    add_common(regressions, "--json", help="print all of them as JSON instead")
    ack = command("ack", "accept the open changes of a series, so that they raise no more alarms")
    ack.add_argument(
        "series", metavar="SERIES", help="as in show; with * for any part, all that fit: 'gemm.Gemm.track_*(bf16, 512)'"
    )
    ack.add_argument("--because", metavar="TEXT", help="the reason")
    ack.add_argument("--undo", action="store_true", help="allow alarms again")
    command(
        "verify",
        "read every file of the store and report damage; change nothing",
        "Exit codes: 0 no damage, 2 no such store, 3 damage found.",
    )
    command(
        "rebuild",
        "write asv's view again from the runs; results that only asv measured stay",
        "Exit codes: 0 fine, 2 the store cannot be written, 3 something could not be written.",
    )
    merge = command(
        "merge",
        "import the store of another machine",
        "Exit codes: 0 fine, 2 wrong usage, 3 something of the other store could not be taken.",
    )
    merge.add_argument("folder", type=types.path, metavar="DIR", help="the other store; it is only read")


def run(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.history import existing_store

    check_outputs(arguments)
    if arguments.subcommand == "merge":
        return _merge(arguments)
    reads_all = arguments.subcommand in ("verify", "rebuild") or getattr(arguments, "runs", False)
    store = existing_store(arguments.store, TERMINAL, reads_all)
    if arguments.subcommand == "verify":
        checked = verify(store)
        tell(arguments, partial(faults_page, checked.faults, checked.sound, checked.files, str(store)))
        return EXIT_FAILED if any(fault.broken for fault in checked.faults) else EXIT_OK
    commands = {
        "list": _list,
        "show": _show,
        "regressions": _regressions,
        "ack": _acknowledge,
        "rebuild": _rebuild,
    }
    return commands[arguments.subcommand](arguments, store)


def _list(arguments: argparse.Namespace, store: Path) -> int:
    from fp8bench.jobs.history import read_history

    # 1. List runs from their files alone: reading a long history takes time.
    history = read_history(store, TERMINAL) if not arguments.runs else None
    if history is not None:
        told_of = bool(history.runs or history.left)
    else:
        told_of = bool(_kept_lines(store, Counter())) or any(newest_files(store))
    # 2. Explain an empty store, unless its files could not be read.
    if not told_of:
        begin = "no runs yet. Begin with: fp8bench suite gemm --grid"
        print_lines([f"{store}: {'no runs that may be read' if closed_folders(store) else begin}"])
        return EXIT_OK
    word = arguments.word.lower()
    if history is None:
        return _list_runs(arguments, store, word)
    # 3. List the last point of every series that contains the word.
    endings = history.endings(lambda name: word in name.lower())
    if not endings and word and history.runs:
        raise UsageError(f"no series has {arguments.word!r:.80} in its name. `fp8bench history list` names them all.")
    options = options_of(arguments)
    tell(arguments, partial(trends_page, endings, str(store), history.runs, history.commits, history.left, options))
    return EXIT_OK


def _list_runs(arguments: argparse.Namespace, store: Path, word: str) -> int:
    rows = []
    files = listing(store)
    skipped = files.left
    # 1. List runs whose line contains the word; count unreadable ones.
    for path in files.files:
        try:
            run = load_run(path)
        except StoreError:
            skipped[UNREADABLE] += 1
            continue
        row = run_row(run, not run.finished and is_locked(path), in_store(store))
        if any(word in field.text.lower() for field in row):
            rows.append(row)
    # 2. List other stored results: duels, studies, ablations.
    other_lines = {}
    for name, lines in _kept_lines(store, skipped).items():
        if fitting := [line for line in lines if word in line.lower()]:
            other_lines[name] = fitting
    if not rows and not other_lines and word:
        raise UsageError(f"no run has {word!r:.80} in its line. `fp8bench history list --runs` names them all.")
    tell(arguments, partial(runs_page, rows, str(store), skipped, in_store(store), other_lines))
    return EXIT_OK


def _kept_lines(store: Path, skipped: Counter[str]) -> dict[str, list[str]]:
    by_kind: dict[str, list[str]] = {}
    for kind in kinds():
        for line in kind.lines(store):
            try:
                by_kind.setdefault(kind.name, []).append(line())
            except StoreError:
                skipped[UNREADABLE] += 1
    return by_kind


def _show(arguments: argparse.Namespace, store: Path) -> int:
    from fp8bench.jobs.history import read_history, series_meant

    history = read_history(store, TERMINAL)
    series_name = series_meant(arguments.series, history)
    trends = history.trends(lambda name: name == series_name)
    series = trends[0].series
    grid = workloads.get(series.workload).history
    assert grid is not None
    words = next(spec.history for spec in tracked_by(grid) if spec.name == series.metric)
    description = f"{words}, a ratio" if series.unit == "ratio" else f"{words}, in {series.unit}"
    tell(arguments, partial(trend_page, trends, description))
    return EXIT_OK


def _regressions(arguments: argparse.Namespace, store: Path) -> int:
    from fp8bench.jobs.history import all_changes, read_history
    from fp8bench.report.terminal.changes import page_of, value_of

    search = all_changes(read_history(store, TERMINAL), store, TERMINAL)
    page = partial(page_of, search, str(store), arguments.all, options_of(arguments))
    tell(arguments, page, partial(value_of, search))
    return EXIT_REGRESSION if any(change.alarms for change in search.changes) else EXIT_OK


def _acknowledge(arguments: argparse.Namespace, store: Path) -> int:
    from fp8bench.jobs.history import acknowledge

    done = acknowledge(arguments.series, store, TERMINAL, arguments.because, arguments.undo)
    changes = (f"  {name}, after {since[:8]} and up to {until[:8]}" for name, since, until in done)
    print_lines((f"{store}: {'not acknowledged any more' if arguments.undo else 'acknowledged'}", *changes))
    return EXIT_OK


def _rebuild(arguments: argparse.Namespace, store: Path) -> int:
    from fp8bench.store.merge_stores import rebuild

    rebuilt = rebuild(store)
    tell(arguments, partial(rebuilt_page, str(store), len(rebuilt.files), rebuilt.series, rebuilt.runs, rebuilt.left))
    _complain_of(f"{path.name} was broken, and was set aside in {path.parent}" for path in rebuilt.aside)
    return _complain_of(rebuilt.failed)


def _merge(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.history import existing_store
    from fp8bench.store.merge_stores import find_store, join

    store = arguments.store
    other_store = find_store(arguments.folder, store)
    existing_store(other_store, TERMINAL, reading=True)
    merged, view = join(store, other_store)
    counts = {
        "runs that are new here": len(merged.copied),
        "runs that had gone on there": len(merged.extended),
        "runs that were here already": merged.same,
        **({"acknowledgements that are new here": merged.acks} if merged.acks else {}),
        "asv's files made again from the runs": len(view.files),
    }
    tell(arguments, partial(joined_page, f"{store}: took in {other_store}", counts))
    _complain_of(merged.notes)
    _complain_of(f"{path.name} was broken, and was set aside in {path.parent}" for path in view.aside)
    return _complain_of([*merged.failed, *view.failed])


def _complain_of(sentences: Iterable[str]) -> int:
    messages = list(sentences)
    for sentence in messages:
        complain(sentence)
    return EXIT_FAILED if messages else EXIT_OK
