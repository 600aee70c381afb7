"""Who is told how a job goes along: jobs report here, and never print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from fp8bench.model.duel import Duel
from fp8bench.model.training import Line, Training
from fp8bench.protocols import Observer

# Told how many of how many things are done, what they are called, and what is being done now.
Tell = Callable[[int, int, str, str], None]


class DuelObserver(Observer, Protocol):
    """Told of every session of a duel too."""

    def starts(self) -> None:
        """Workers are started, which takes a while."""

    def in_session(self, session: int, sessions: int, place: int, cases: int) -> None:
        """A case is measured, counted from 0."""

    def close(self) -> None:
        """Nothing more comes. May be called twice."""


class TrainingObserver(Protocol):
    """Told of every slice of a training."""

    def begun(self, training: Training) -> None:
        """It starts, or goes on."""

    def working(self, arm: str, doing: str) -> None:
        """Something is done with an arm that is no step of it."""

    def trained(self, number: int, step: int, lines: Sequence[Line]) -> None:
        """Lines of one arm were kept; so far is it in its seed, which are counted from 0."""

    def note(self, sentence: str) -> None:
        """Something happened that no line says."""


class SilentTraining:
    """An observer of a training that ignores everything."""

    def begun(self, training: Training) -> None:
        return None

    def working(self, arm: str, doing: str) -> None:
        return None

    def trained(self, number: int, step: int, lines: Sequence[Line]) -> None:
        return None

    def note(self, sentence: str) -> None:
        return None


class JobObserver(Protocol):
    """Told what a person should know while a job is done, and asked who watches what is measured."""

    def note(self, sentence: str) -> None:
        """Something happened that the job's result does not say."""

    def measuring(self) -> AbstractContextManager[Observer]:
        """A run is measured."""

    def duelling(self) -> AbstractContextManager[DuelObserver]:
        """A duel is measured."""

    def training(self) -> AbstractContextManager[TrainingObserver]:
        """Models are trained."""

    def counting(self) -> AbstractContextManager[Tell]:
        """Many things of one kind are done, one after the other."""

    def cut_off(self, duel: Duel) -> None:
        """What was measured of a duel before it failed."""
