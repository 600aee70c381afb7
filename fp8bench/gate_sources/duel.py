"""A stored duel. Suspects are duelled again, with fresh processes on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8bench.dueling.duel import Duel, Side
from fp8bench.dueling.keeping import find_duel, load_duel
from fp8bench.dueling.opening import OWN, Question
from fp8bench.dueling.verdicts import comparisons
from fp8bench.errors import EXIT_FAILED, RunNotFound
from fp8bench.gate_sources.again import duelled
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
    notes = [*duel.notes, *duel.troubles]
    missing = len(duel.cases) - len(duel.bouts)
    notes += [f"the duel is unfinished: {missing} of {len(duel.cases)} cases are missing"] if missing else []
    if not any(one.measured or one.failed for one in duel.bouts):
        return Source(title, notes=tuple(notes), problem="the duel measured nothing.", code=EXIT_FAILED)

    def confirm(suspects: Sequence[Comparison]) -> SecondLook:
        return duelled(_question(duel), duel.request, store, suspects)

    return Source(title, comparisons(duel), confirm, tuple(notes))


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
