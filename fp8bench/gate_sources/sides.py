"""Two sides that were measured at different times. Suspects are duelled where the first side is a revision of the
repository in the working directory, else the second side's are measured again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8bench.choosing import runs_meant
from fp8bench.commits import commit_named
from fp8bench.compare_commands import compared_of, read_runs
from fp8bench.comparing.compare import Compared, compare
from fp8bench.comparing.sides import Side, side_of
from fp8bench.comparing.text import side_words
from fp8bench.dueling.opening import PACKAGE, Question
from fp8bench.environment import command_line
from fp8bench.errors import EXIT_BASELINE, EXIT_FAILED, Fp8benchError, RunNotFound, UsageError
from fp8bench.gate_sources.duel import duelled
from fp8bench.gate_sources.source import Source
from fp8bench.gating.judging import SecondLook, key_of
from fp8bench.history.runs import store_of
from fp8bench.model import Comparison, Run
from fp8bench.pipeline import findings, measure_again
from fp8bench.report.progress import progress
from fp8bench.streams import complain
from fp8bench.view import update_view

_MOST_LISTED = 5


def of_sides(before: str, after: str, store: Path) -> Source:
    """What two words come to. A first side that is not there is a problem and no wrong usage."""
    title = f"{after} against {before}"
    new = read_runs(runs_meant(after, store))
    try:
        old = read_runs(runs_meant(before, store))
    except RunNotFound as error:
        return Source(title, problem=f"the baseline is missing: {error}", code=EXIT_BASELINE)
    compared = compared_of(before, old, after, new)
    title = f"{side_words(compared.after)}; against {side_words(compared.before)}"
    problem, code = _problem(compared)
    if problem:
        return Source(title, compared.comparisons, problem=problem, code=code)

    def confirm(suspects: Sequence[Comparison]) -> SecondLook:
        return _second_look(compared, suspects, store)

    return Source(title, compared.comparisons, confirm, tuple(_notes(compared)))


def _problem(compared: Compared) -> tuple[str, int]:
    """Why nothing can be judged, and the exit code of that."""
    if not compared.after.measured:
        failed = any(one.failed for one in compared.comparisons)
        return ("" if failed else f"no case of {compared.after.name} came to a number."), EXIT_FAILED
    if compared.hardware:
        words = "; ".join(f"{one.name} was {one.before} and is {one.after}" for one in compared.hardware)
        return f"the baseline was measured on something else, and times do not compare: {words}.", EXIT_BASELINE
    if not compared.comparable and not any(one.failed for one in compared.comparisons):
        why = next((one.why for one in compared.comparisons if one.why), "they have no case in common")
        return f"the baseline does not compare: {why}.", EXIT_BASELINE
    return "", 0


def _notes(compared: Compared) -> list[str]:
    found = [f"{one.name} was {one.before:.60} and is {one.after:.60}" for one in compared.differing]
    for words, cases in (("is gone", compared.only_before), ("is new", compared.only_after)):
        found += [f"{case} {words}" for case in cases[:_MOST_LISTED]]
        found += [f"and {len(cases) - _MOST_LISTED} more"] if len(cases) > _MOST_LISTED else []
    unfinished = [run.id for run in compared.after.runs if not run.finished]
    return [*found, *(f"run {one} is unfinished" for one in unfinished)]


def _second_look(compared: Compared, suspects: Sequence[Comparison], store: Path) -> SecondLook:
    """A duel with the baseline's commit where that can be; else the second side alone, in fresh processes."""
    question = _question(compared.before)
    newest = _run_with(compared.after, suspects)
    if question is not None:
        look = duelled(question, newest.request, store, suspects)
        if not look.refused:
            return look
        complain(f"gate: no duel ({look.refused}); what is suspected is measured again alone")
    return _measured_again(compared, newest, suspects, store)


def _question(before: Side) -> Question | None:
    """How to duel with the commit that the baseline is of; None where it is none of the working directory's."""
    commits = {run.environment.get("commit") for run in before.runs}
    clean = all(run.environment.get("dirty") is False for run in before.runs)
    commit = next(iter(commits))
    if len(commits) != 1 or not isinstance(commit, str) or not clean or commit_named(commit, Path()) is None:
        return None
    own = Path.cwd().resolve().is_relative_to(PACKAGE.parent)
    return Question(against_self=commit) if own else Question(against=commit)


def _run_with(after: Side, suspects: Sequence[Comparison]) -> Run:
    """The newest run that has the first of the suspects: in nearly all comparisons there is but one."""
    return after.sightings[suspects[0].case][-1].run


def _measured_again(compared: Compared, run: Run, suspects: Sequence[Comparison], store: Path) -> SecondLook:
    kept = store_of(Path(run.path)) or store
    try:
        with progress(sys.stderr, os.environ) as observer:
            again = measure_again(run, {one.case for one in suspects}, kept, observer, command_line())
    except (UsageError, Fp8benchError) as error:
        return SecondLook({}, refused=str(error).rstrip("."))
    if not again.finished:
        raise KeyboardInterrupt
    complain(update_view(again, kept))
    found = compare(compared.before, side_of("again", [(again, findings(again))]))
    return SecondLook({key_of(one): one for one in found.comparisons}, f"measured again in run {again.id}")
