"""Who is told how a duel goes along."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from fp8bench.features.duel.values import Duel
from fp8bench.jobs.observer import JobObserver
from fp8bench.protocols import Observer


class DuelObserver(Observer, Protocol):
    """Told of every session of a duel too."""

    def starts(self) -> None:
        """Workers are started, which takes a while."""

    def in_session(self, session: int, sessions: int, place: int, cases: int) -> None:
        """A case is measured, counted from 0."""

    def close(self) -> None:
        """Nothing more comes. May be called twice."""


class DuelJobObserver(JobObserver, Protocol):
    """An observer of a job that measures duels."""

    def duelling(self) -> AbstractContextManager[DuelObserver]:
        """A duel is measured."""

    def cut_off(self, duel: Duel) -> None:
        """What was measured of a duel before it failed."""
