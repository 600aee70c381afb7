"""Who is told how a training goes along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fp8bench.features.train.values import Line, Training


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
