"""Measuring suspects again: in a duel with a commit, or alone, in a fresh process."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench.commits import commit_named
from fp8bench.comparing.figures import RELATIVE, TIME
from fp8bench.duel_commands import fight
from fp8bench.dueling.opening import PACKAGE, Question
from fp8bench.dueling.verdicts import comparisons
from fp8bench.environment import command_line
from fp8bench.errors import Fp8benchError
from fp8bench.gating.judging import SecondLook, key_of
from fp8bench.history.runs import store_of
from fp8bench.model import Comparison, Request, Run
from fp8bench.pipeline import measure_again
from fp8bench.registry import import_user_modules
from fp8bench.report.progress import progress
from fp8bench.streams import complain
from fp8bench.view import update_view


def duelled(question: Question, request: Request, store: Path, suspects: Sequence[Comparison]) -> SecondLook:
    """The suspects in a duel. A time over the reference's is settled by the time itself: the sides share rounds."""
    try:
        import_user_modules(request.imports)
        duel = fight(question, replace(request, trace=None), store, {one.case for one in suspects})
    except Fp8benchError as error:
        return SecondLook({}, refused=str(error).rstrip("."))
    if not duel.finished:
        raise KeyboardInterrupt
    found = {key_of(one): one for one in comparisons(duel)}
    found |= {(case, RELATIVE): one for (case, metric), one in found.items() if metric == TIME}
    return SecondLook(found, f"in duel {duel.id}")


def duel_with(commit: str, request: Request, store: Path, suspects: Sequence[Comparison]) -> SecondLook | None:
    """The suspects of what is here in a duel with a commit; None where it is none of the repository at hand."""
    if commit_named(commit, Path()) is None:
        return None
    own = Path.cwd().resolve().is_relative_to(PACKAGE.parent)
    question = Question(against_self=commit) if own else Question(against=commit)
    look = duelled(question, request, store, suspects)
    if look.refused:
        complain(f"gate: no duel ({look.refused}); what is suspected is measured again alone")
    return look


def measured_again(run: Run, cases: Collection[str], store: Path) -> tuple[Run | None, str]:
    """Some cases of a run once more; None and why where that cannot be."""
    kept = store_of(Path(run.path)) or store
    try:
        with progress(sys.stderr, os.environ) as observer:
            again = measure_again(run, cases, kept, observer, command_line())
    except Fp8benchError as error:
        return None, str(error).rstrip(".")
    if not again.finished:
        raise KeyboardInterrupt
    complain(update_view(again, kept))
    return again, ""
