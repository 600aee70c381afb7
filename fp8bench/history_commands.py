"""The command `history`: what is kept, one series over time, whether it is sound, and how to mend and merge it."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections import Counter
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path

from fp8bench.arguments import DEFAULT_STORE
from fp8bench.commits import gone
from fp8bench.errors import EXIT_FAILED, EXIT_OK, StoreError, UsageError
from fp8bench.followed import metrics_of
from fp8bench.history.environments import load_renamings
from fp8bench.history.merging import find_store
from fp8bench.history.runs import closed_folders, load_run, run_files
from fp8bench.history.writing import is_being_written
from fp8bench.index.opening import History, open_history
from fp8bench.joining import join
from fp8bench.model import Course
from fp8bench.rebuilding import rebuild
from fp8bench.registry import workloads
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
from fp8bench.streams import complain, say
from fp8bench.telling import UNREADABLE
from fp8bench.verifying import verify

# Reading so many takes longer than one waits without a word.
_MANY_RUNS = 200
_MOST_NAMED = 20


def run_command(arguments: argparse.Namespace) -> int:
    """Do what one of history's commands asks for; returns the exit code."""
    commands = {"list": _list, "show": _show, "verify": _verify, "rebuild": _rebuild, "merge": _merge}
    return commands[arguments.history_command](arguments)


def _list(arguments: argparse.Namespace) -> int:
    store = _store(arguments.store)
    if not _announce(store, reading=arguments.runs):
        begin = "no runs yet. Begin with: fp8bench suite gemm --grid"
        say(f"{store}: {'no runs that may be read' if closed_folders(store) else begin}\n")
        return EXIT_OK
    word = arguments.word.lower()
    if arguments.runs:
        return _list_runs(store, word)
    found = _opened(store)
    courses = found.courses(lambda name: word in name.lower()).courses
    if not courses and word and found.runs:
        raise UsageError(f"no series has {arguments.word!r:.80} in its name. `fp8bench history list` names them all.")
    options = _in_store(store) + "".join(f" --import {shlex.quote(one)}" for one in arguments.imports)
    say(render_courses(courses, str(store), found.runs, found.commits, found.left, options))
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
        row = run_row(run, not run.finished and is_being_written(path), _in_store(store))
        if any(word in cell.lower() for cell in row.cells):
            rows.append(row)
    if not rows and word:
        raise UsageError(f"no run has {word!r:.80} in its line. `fp8bench history list --runs` names them all.")
    say(render_runs(rows, str(store), left, _in_store(store)))
    return EXIT_OK


def _in_store(store: Path) -> str:
    """' --store DIR' for a store that commands do not look into by themselves."""
    return "" if store == Path(DEFAULT_STORE) else f" --store {shlex.quote(str(store))}"


def _show(arguments: argparse.Namespace) -> int:
    store = _store(arguments.store)
    _announce(store, reading=False)
    courses = _chosen(_opened(store), arguments.series, store)
    commits = {figure.commit for course in courses for figure in course.figures}
    lost = gone(commits, Path())
    if lost == commits:
        complain("none of these commits is in the repository of this directory")
        lost = frozenset()
    say(render_course(courses, _description(courses[0]), lost))
    return EXIT_OK


def _opened(store: Path) -> History:
    """The history of a store, with a word where that takes a while or something about its figures' files was wrong."""
    history = open_history(store, lambda runs: complain(f"reading {runs} runs") if runs > _MANY_RUNS else None)
    for trouble in history.troubles:
        complain(trouble)
    return history


def _chosen(found: History, word: str, store: Path) -> list[Course]:
    """The courses of the one series that a word fits: one for each machine and interpreter."""
    every = sorted({line.course.name for line in found.lines.lines})
    names = [name for name in every if word.lower() in name.lower()]
    exact = [name for name in names if name.lower() == word.lower()]
    if len(exact or names) == 1:
        return list(found.courses(lambda name: name == (exact or names)[0]).courses)
    if names:
        more = f"\n  and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        listed = "".join(f"\n  {name}" for name in names[:_MOST_NAMED])
        raise UsageError(f"{word!r:.80} fits {len(names)} series. Give more of the name of one:{listed}{more}")
    raise UsageError(f"no series has {word!r:.80} in its name.{_nearest(word, store, every, found.left)}")


def _nearest(word: str, store: Path, names: Collection[str], left: Collection[str]) -> str:
    """What a mistyped name was meant to be, perhaps, or why runs are `left` out."""
    if not names:
        why = f" Not in it: {'; '.join(left)}." if left else " Begin with: fp8bench suite gemm --grid"
        return f" The store {store} has no series yet.{why}"
    unknown = [why for why in left if "--import" in why]
    if unknown:
        return f" Not in it: {'; '.join(unknown)}."
    short = {name.partition("track_")[2].lower(): name for name in names}
    whole = {name.lower(): name for name in names}
    for known in (whole, short):
        near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
        if near:
            return f" Did you mean {known[near[0]]!r}?"
    return " `fp8bench history list` names them all."


def _description(course: Course) -> str:
    """What a series is, in its workload's words."""
    grid = workloads.get(course.series.workload).history
    assert grid is not None
    unit = course.series.unit
    words = next(one.description for one in metrics_of(grid) if one.name == course.series.metric)
    return f"{words}, in {unit}" if unit != "ratio" else f"{words}, a ratio"


def _verify(arguments: argparse.Namespace) -> int:
    store = _store(arguments.store)
    _announce(store)
    found = verify(store, Path(), datetime.now(UTC))
    say(render_faults(found.faults, found.sound, str(store)))
    return EXIT_FAILED if any(fault.broken for fault in found.faults) else EXIT_OK


def _rebuild(arguments: argparse.Namespace) -> int:
    store = _store(arguments.store)
    _announce(store)
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
        _store(store)
    _announce(store if other is None else other)
    done = join(store, other, arguments.rename_env)
    counts: dict[str, int] = {}
    if other is not None:
        counts["runs that are new here"] = len(done.runs.copied)
        counts["runs that had gone on there"] = len(done.runs.extended)
        counts["runs that were here already"] = done.runs.same
        counts["asv's files that are new or have more in them"] = len(done.taken.files)
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


def _store(path: Path) -> Path:
    """The store, if there is one."""
    try:
        if (path / "runs").is_dir() or (path / "asv").is_dir():
            return path
        what = "is no store: it has neither runs nor asv in it" if path.exists() else "is not there"
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    raise StoreError(f"the store {path} {what}. Give --store DIR, or begin one with: fp8bench suite gemm --grid.")


def _announce(store: Path, reading: bool = True) -> int:
    """How many run files there are; what a person should know before they are read, if all of them are."""
    trouble = load_renamings(store).trouble
    if trouble:
        complain(trouble)
    try:
        count = sum(1 for _ in run_files(store))
    except OSError as error:
        raise StoreError(f"the store {store} cannot be read ({error.strerror}).") from None
    for folder in closed_folders(store):
        complain(f"{folder} may not be read, so that its runs are left out")
    if reading and count > _MANY_RUNS:
        complain(f"reading {count} runs")
    return count
