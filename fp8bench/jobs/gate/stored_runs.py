"""Two sides that were measured before: runs at different times, or a stored duel.

Suspects of runs are duelled where the first side is a revision of the repository in the working directory, else the
second side's are measured again. Those of a duel are duelled again, with fresh processes on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8bench.analysis.compare.compare import Compared, compare
from fp8bench.analysis.compare.duel_verdicts import comparisons
from fp8bench.analysis.compare.sides import side_of
from fp8bench.analysis.findings import findings
from fp8bench.analysis.gate.judging import SecondLook, key_of
from fp8bench.analysis.gate.power import Second
from fp8bench.errors import EXIT_BASELINE, EXIT_FAILED, RunNotFound, StoreError
from fp8bench.jobs.compare import compared_of, read_runs
from fp8bench.jobs.duel.sides import OWN, PACKAGE, Question
from fp8bench.jobs.gate.remeasure import duel_with, duelled, measured_again
from fp8bench.jobs.gate.source import Source, failed, unmeasured
from fp8bench.jobs.observer import JobObserver
from fp8bench.model import Comparison, Evidence, Run
from fp8bench.model.duel import Duel
from fp8bench.report.terminal.comparison import side_words
from fp8bench.store.duels import find_duel, load_duel
from fp8bench.store.find_runs import commit_named, runs_meant

_MOST_LISTED = 5


def of_sides(before: str, after: str, store: Path, observer: JobObserver) -> Source:
    """What two words come to. A first side that is not there is a problem and no wrong usage."""
    title = f"{after} against {before}"
    new = read_runs(runs_meant(after, store), observer)
    try:
        old = read_runs(runs_meant(before, store), observer)
    except StoreError as error:
        return Source(title, problem=f"the baseline is missing: {error}", code=EXIT_BASELINE)
    compared = compared_of(before, old, after, new, observer)
    title = f"{side_words(compared.after)}; against {side_words(compared.before)}"
    problem, code = _problem(compared)
    if problem:
        return Source(title, compared.comparisons, problem=problem, code=code)

    def confirm(suspects: Sequence[Comparison]) -> SecondLook:
        return _second_look(compared, suspects, store, observer)

    cut_off = unmeasured(compared.after.runs, Evidence.CROSS_RUN)
    second = Second.DUEL if _commit_to_duel(compared, compared.after.runs[-1]) is not None else Second.AGAIN
    return Source(title, (*compared.comparisons, *cut_off), confirm, tuple(_notes(compared)), second=second)


def _problem(compared: Compared) -> tuple[str, int]:
    """Why nothing can be judged, and the exit code of that."""
    if not compared.after.measured:
        lost = any(one.failed for one in compared.comparisons)
        return ("" if lost else f"no case of {compared.after.name} came to a number."), EXIT_FAILED
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
    return found


def _second_look(compared: Compared, suspects: Sequence[Comparison], store: Path, observer: JobObserver) -> SecondLook:
    """A duel with the baseline's commit where that can be; else the second side alone."""
    # The newest run that has the first of the suspects: in nearly all comparisons there is but one.
    newest = compared.after.sightings[suspects[0].case][-1].run
    commit = _commit_to_duel(compared, newest)
    look = duel_with(commit, newest.request, store, suspects, observer) if commit is not None else None
    if look is not None and not look.refused:
        return look
    again, refused = measured_again(newest, {one.case for one in suspects}, store, observer)
    if again is None:
        return SecondLook({}, refused=refused)
    found = compare(compared.before, side_of("again", [(again, findings(again))]), beside=compared.after)
    return SecondLook({key_of(one): one for one in found.comparisons}, f"measured again in run {again.id}")


def _commit_to_duel(compared: Compared, newest: Run) -> str | None:
    """The commit of the first side, where a duel with it would ask the same question; else None.

    A duel has what is here on its second side, and one interpreter on both: what another torch costs it would not see.
    """
    here = commit_named("HEAD", Path())
    if here is None or newest.environment.get("commit") != here or compared.differing:
        return None
    runs = compared.before.runs
    commit, *others = {run.environment.get("commit") for run in runs}
    clean = all(run.environment.get("dirty") is False for run in runs)
    return commit if not others and isinstance(commit, str) and clean else None


def of_duel(word: str, store: Path, observer: JobObserver) -> Source:
    """What a duel of the store came to."""
    files = (store / "duels").glob("*.jsonl")
    path = max(files, key=lambda one: one.name, default=None) if word == "last" else find_duel(word, store)
    if path is None:
        raise RunNotFound(f"no duel {word!r:.200} in {store}. Give an id, a file's stem, a path, or 'last'.")
    duel = load_duel(path)
    title = f"duel {duel.id}: {' against '.join(one.title or one.name for one in (duel.after, duel.before))}"
    notes = (*duel.notes, *duel.troubles)
    if not any(one.measured or one.failed for one in duel.results):
        return Source(title, notes=notes, problem="the duel measured nothing.", code=EXIT_FAILED)

    def confirm(suspects: Sequence[Comparison]) -> SecondLook:
        refused = _moved_on(duel)
        if refused:
            return SecondLook({}, refused=refused)
        # Words like HEAD may have moved since, and commits have not.
        commit, own = duel.before.commit or None, duel.before.title.startswith(OWN)
        against, against_self = (None, commit) if own else (commit, None)
        question = Question(duel.before.python, duel.after.python, against, against_self, duel.sessions)
        return duelled(question, duel.request, store, suspects, observer)

    found = comparisons(duel)
    known = {one.case for one in found}
    why = "the duel was interrupted before it was measured"
    cut_off = [failed(case, case.partition("[")[0], Evidence.PAIRED, why) for case in duel.cases if case not in known]
    second = Second.NONE if _moved_on(duel) else Second.DUEL
    return Source(title, (*found, *cut_off), confirm, notes, second=second)


def _moved_on(duel: Duel) -> str:
    """Why a duel with what is here would be another one; '' if it would not."""
    if not duel.after.commit:
        return ""
    here = commit_named("HEAD", PACKAGE if duel.before.title.startswith(OWN) else Path())
    if here == duel.after.commit:
        return ""
    return f"the duel was of commit {duel.after.commit[:8]}, and here is {here[:8] if here else 'no repository'}"
