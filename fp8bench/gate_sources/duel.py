"""A stored duel. Suspects are duelled again, with fresh processes on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8bench.commits import commit_named
from fp8bench.dueling.duel import Duel, Side
from fp8bench.dueling.keeping import find_duel, load_duel
from fp8bench.dueling.opening import OWN, PACKAGE, Question
from fp8bench.dueling.verdicts import comparisons
from fp8bench.errors import EXIT_FAILED, RunNotFound
from fp8bench.gate_sources.again import duelled
from fp8bench.gate_sources.missing import unfought
from fp8bench.gate_sources.source import Source
from fp8bench.gating.judging import SecondLook
from fp8bench.model import Comparison


def of_duel(word: str, store: Path) -> Source:
    """What a duel of the store came to."""
    path = _newest(store) if word == "last" else find_duel(word, store)
    if path is None:
        raise RunNotFound(f"no duel {word!r:.200} in {store}. Give an id, a file's stem, a path, or 'last'.")
    duel = load_duel(path)
    title = f"duel {duel.id}: {_words(duel.after)} against {_words(duel.before)}"
    notes = (*duel.notes, *duel.troubles)
    if not any(one.measured or one.failed for one in duel.bouts):
        return Source(title, notes=notes, problem="the duel measured nothing.", code=EXIT_FAILED)

    def confirm(suspects: Sequence[Comparison]) -> SecondLook:
        refused = _moved_on(duel)
        return SecondLook({}, refused=refused) if refused else duelled(_question(duel), duel.request, store, suspects)

    found = comparisons(duel)
    return Source(title, (*found, *unfought(duel, {one.case for one in found})), confirm, notes)


def _moved_on(duel: Duel) -> str:
    """Why a duel with what is here would be another one; '' if it would not."""
    if not duel.after.commit:
        return ""
    here = commit_named("HEAD", PACKAGE if duel.before.title.startswith(OWN) else Path())
    if here == duel.after.commit:
        return ""
    return f"the duel was of commit {duel.after.commit[:8]}, and here is {here[:8] if here else 'no repository'}"


def _newest(store: Path) -> Path | None:
    return max((store / "duels").glob("*.jsonl"), key=lambda path: path.name, default=None)


def _question(duel: Duel) -> Question:
    """What made its sides differ. Words like HEAD may have moved since, and commits have not."""
    commit = duel.before.commit or None
    own = duel.before.title.startswith(OWN)
    against, against_self = (None, commit) if own else (commit, None)
    return Question(duel.before.python, duel.after.python, against, against_self, duel.sittings)


def _words(side: Side) -> str:
    return side.title or side.name
