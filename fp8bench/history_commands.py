"""The command `history`: what is kept, one series over time, whether it is sound, and how to mend and merge it."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from fp8bench.commits import gone
from fp8bench.errors import EXIT_FAILED, EXIT_OK, StoreError, UsageError
from fp8bench.followed import metrics_of
from fp8bench.history.merging import find_store
from fp8bench.history.runs import closed_folders, load_run, run_files
from fp8bench.history.writing import is_being_written
from fp8bench.joining import join
from fp8bench.model import Course
from fp8bench.rebuilding import rebuild
from fp8bench.registry import workloads
from fp8bench.regression_commands import acknowledge, regressions
from fp8bench.report.history_text import (
    render_course,
    render_courses,
    render_faults,
    render_joined,
    render_rebuilt,
    render_runs,
    run_row,
)
from fp8bench.report.layout import Row
from fp8bench.stores import announce, existing_store, in_store, opened, options_of, series_meant
from fp8bench.streams import complain, say
from fp8bench.telling import UNREADABLE
from fp8bench.verifying import verify


def run_command(arguments: argparse.Namespace) -> int:
    """Do what one of history's commands asks for; returns the exit code."""
    commands = {
        "list": _list, "show": _show, "regressions": regressions, "ack": acknowledge, "verify": _verify,
        "rebuild": _rebuild, "merge": _merge,
    }  # fmt: skip
    return commands[arguments.history_command](arguments)


def _list(arguments: argparse.Namespace) -> int:
    store = existing_store(arguments.store)
    if not announce(store, reading=arguments.runs):
        begin = "no runs yet. Begin with: fp8bench suite gemm --grid"
        say(f"{store}: {'no runs that may be read' if closed_folders(store) else begin}\n")
        return EXIT_OK
    word = arguments.word.lower()
    if arguments.runs:
        return _list_runs(store, word)
    found = opened(store)
    endings = found.endings(lambda name: word in name.lower())
    if not endings and word and found.runs:
        raise UsageError(f"no series has {arguments.word!r:.80} in its name. `fp8bench history list` names them all.")
    say(render_courses(endings, str(store), found.runs, found.commits, found.left, options_of(arguments)))
    return EXIT_OK


def _list_runs(store: Path, word: str) -> int:
    rows: list[Row] = []
    left: Counter[str] = Counter()
    for path in run_files(store):
        try:
            run = load_run(path)
        except StoreError:
            left[UNREADABLE] += 1
            continue
        row = run_row(run, not run.finished and is_being_written(path), in_store(store))
        if any(word in cell.lower() for cell in row.cells):
            rows.append(row)
    if not rows and word:
        raise UsageError(f"no run has {word!r:.80} in its line. `fp8bench history list --runs` names them all.")
    say(render_runs(rows, str(store), left, in_store(store)))
    return EXIT_OK


def _show(arguments: argparse.Namespace) -> int:
    store = existing_store(arguments.store)
    announce(store, reading=False)
    found = opened(store)
    wanted = series_meant(arguments.series, found, store)
    courses = found.courses(lambda name: name == wanted).courses
    commits = {figure.commit for course in courses for figure in course.figures}
    lost = gone(commits, Path())
    if lost == commits:
        complain("none of these commits is in the repository of this directory")
        lost = frozenset()
    say(render_course(courses, _description(courses[0]), lost))
    return EXIT_OK


def _description(course: Course) -> str:
    """What a series is, in its workload's words."""
    grid = workloads.get(course.series.workload).history
    assert grid is not None
    unit = course.series.unit
    words = next(one.description for one in metrics_of(grid) if one.name == course.series.metric)
    return f"{words}, in {unit}" if unit != "ratio" else f"{words}, a ratio"


def _verify(arguments: argparse.Namespace) -> int:
    store = existing_store(arguments.store)
    announce(store)
    found = verify(store, Path(), datetime.now(UTC))
    say(render_faults(found.faults, found.sound, str(store)))
    return EXIT_FAILED if any(fault.broken for fault in found.faults) else EXIT_OK


def _rebuild(arguments: argparse.Namespace) -> int:
    store = existing_store(arguments.store)
    announce(store)
    made = rebuild(store)
    say(render_rebuilt(str(store), len(made.files), made.series, made.runs, made.left))
    _complain_of(f"{path.name} was broken, and was set aside in {path.parent}" for path in made.aside)
    return _complain_of(made.failed)


def _merge(arguments: argparse.Namespace) -> int:
    store = arguments.store
    if arguments.folder is None and not arguments.rename_env:
        raise UsageError("nothing was given to merge. Give DIR, another machine's store, or --rename-env OLD=NEW.")
    other = find_store(arguments.folder, store) if arguments.folder is not None else None
    if other is None:
        existing_store(store)
    announce(store if other is None else other)
    done = join(store, other, arguments.rename_env)
    counts: dict[str, int] = {}
    if other is not None:
        counts["runs that are new here"] = len(done.runs.copied)
        counts["runs that had gone on there"] = len(done.runs.extended)
        counts["runs that were here already"] = done.runs.same
        counts["asv's files that are new or have more in them"] = len(done.taken.files)
        counts |= {"acknowledgements that are new here": done.acks} if done.acks else {}
    if done.renamed:
        counts["asv's files that have come under another interpreter"] = len(done.folded)
    counts["asv's files made again from the runs"] = len(done.view.files)
    say(render_joined(f"{store}: took in {other}" if other is not None else str(store), counts, done.renamed))
    _complain_of([*done.runs.notes, *done.taken.notes])
    _complain_of(f"{path.name} was broken, and was set aside in {path.parent}" for path in done.view.aside)
    return _complain_of(done.failed)


def _complain_of(sentences: Iterable[str]) -> int:
    """Say each on stderr; returns the exit code of what could not be done."""
    code = EXIT_OK
    for sentence in sentences:
        complain(sentence)
        code = EXIT_FAILED
    return code
