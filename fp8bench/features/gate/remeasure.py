"""Measuring suspects again: in a duel with a commit, or alone, in a fresh process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench.errors import Fp8benchError
from fp8bench.features.duel.run import run_duel
from fp8bench.features.duel.sides import PACKAGE, Question
from fp8bench.features.duel.values import DuelJobObserver
from fp8bench.features.duel.verdicts import comparisons, of_means
from fp8bench.features.gate.judging import SecondLook, key_of
from fp8bench.jobs.after_run import into_history
from fp8bench.measure.environment import command_line
from fp8bench.model import Comparison, Request, Run
from fp8bench.model.specs import MEAN, RELATIVE, RELATIVE_MEAN, TIME
from fp8bench.pipeline import measure_again
from fp8bench.plan.resumable import refuse_code_of_others
from fp8bench.store.commit_runs import commit_named
from fp8bench.store.runs.listing import store_of
from fp8bench.user_code import import_user_modules


def duelled(
    question: Question, request: Request, store: Path, suspects: Sequence[Comparison], observer: DuelJobObserver
) -> SecondLook:
    """The suspects in a duel. A time over the reference's is settled by the time itself: the sides share rounds."""
    try:
        refuse_code_of_others("what was measured", request.imports)
        import_user_modules(request.imports)
        duel = run_duel(question, replace(request, trace=None), store, observer, {one.case for one in suspects})
    except Fp8benchError as error:
        return SecondLook({}, refused=str(error).rstrip("."))
    if not duel.finished:
        raise KeyboardInterrupt
    found = {key_of(one): one for one in comparisons(duel)}
    found |= {key_of(one): one for one in of_means(duel)}
    relative: dict[str, str] = {TIME: RELATIVE, MEAN: RELATIVE_MEAN}
    found |= {(case, relative[metric]): one for (case, metric), one in found.items() if metric in relative}
    return SecondLook(found, f"in duel {duel.id}")


def duel_with(
    commit: str, request: Request, store: Path, suspects: Sequence[Comparison], observer: DuelJobObserver
) -> SecondLook | None:
    """The suspects of what is here in a duel with a commit; None where it is none of the repository at hand."""
    if commit_named(commit, Path()) is None:
        return None
    own = Path.cwd().resolve().is_relative_to(PACKAGE.parent)
    question = Question(against_self=commit) if own else Question(against=commit)
    look = duelled(question, request, store, suspects, observer)
    if look.refused:
        observer.note(f"gate: no duel ({look.refused}); what is suspected is measured again alone")
    return look


def measured_again(run: Run, cases: Collection[str], store: Path, observer: DuelJobObserver) -> tuple[Run | None, str]:
    """Some cases of a run once more; None and why where that cannot be."""
    kept = store_of(Path(run.path)) or store
    try:
        with observer.measuring() as progress:
            again = measure_again(run, cases, kept, progress, command_line())
    except Fp8benchError as error:
        return None, str(error).rstrip(".")
    if not again.finished:
        raise KeyboardInterrupt
    observer.note(into_history(again, kept))
    return again, ""
