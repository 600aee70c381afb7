"""Two sides that were measured at different times. Suspects are duelled where the first side is a revision of the
repository in the working directory, else the second side's are measured again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8bench.choosing import runs_meant
from fp8bench.commits import commit_named
from fp8bench.compare_commands import compared_of, read_runs
from fp8bench.comparing.compare import Compared, compare
from fp8bench.comparing.sides import Side, side_of
from fp8bench.comparing.text import side_words
from fp8bench.errors import EXIT_BASELINE, EXIT_FAILED, RunNotFound
from fp8bench.gate_sources.again import duel_with, measured_again
from fp8bench.gate_sources.missing import unmeasured
from fp8bench.gate_sources.source import Source
from fp8bench.gating.judging import SecondLook, key_of
from fp8bench.model import Comparison, Evidence, Run
from fp8bench.pipeline import findings

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

    cut_off = unmeasured(compared.after.runs, Evidence.CROSS_RUN)
    return Source(title, (*compared.comparisons, *cut_off), confirm, tuple(_notes(compared)))


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
    return found


def _second_look(compared: Compared, suspects: Sequence[Comparison], store: Path) -> SecondLook:
    """A duel with the baseline's commit where that can be; else the second side alone."""
    newest = _run_with(compared.after, suspects)
    commit = _commit_to_duel(compared, newest)
    look = duel_with(commit, newest.request, store, suspects) if commit is not None else None
    if look is not None and not look.refused:
        return look
    again, refused = measured_again(newest, {one.case for one in suspects}, store)
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
    return _commit_of(compared.before)


def _commit_of(side: Side) -> str | None:
    """The one commit that a side is of; None if it is of several, of none, or of files that differed from it."""
    commits = {run.environment.get("commit") for run in side.runs}
    clean = all(run.environment.get("dirty") is False for run in side.runs)
    commit = next(iter(commits))
    return commit if len(commits) == 1 and isinstance(commit, str) and clean else None


def _run_with(after: Side, suspects: Sequence[Comparison]) -> Run:
    """The newest run that has the first of the suspects: in nearly all comparisons there is but one."""
    return after.sightings[suspects[0].case][-1].run
