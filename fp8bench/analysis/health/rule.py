"""What a health rule is: it reads the lines of one arm of one seed in their order, and raises an alarm."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import UnionType
from typing import ClassVar, Generic, TypeVar

from fp8bench.analysis.health.remedies import Remedy
from fp8bench.model import Params
from fp8bench.model.training import LayerReading, StepFigure, StepRow

L = TypeVar("L", StepRow, LayerReading, StepFigure)


@dataclass(frozen=True)
class WatchedArm:
    """The arm that a rule watches, and of which arms the rows are beside its own: the reference, and other seeds.

    `slowest` is the least factor that some of its parameters have on their rate.
    """

    name: str
    reference: str = ""
    other_seed: str = ""
    slowest: float = 1.0


@dataclass(frozen=True)
class Alarm:
    """What a rule saw: a sentence, and the layer and tensor if it was one's. `figures` are what decided."""

    words: str
    layer: str = ""
    tensor: str = ""
    figures: Params = ()


class Rule(ABC, Generic[L]):
    """One way for a training not to be well.

    `window` says how far back it looks, `threshold` from which figure on it alarms, and `reason` why from that one. It
    keeps of earlier lines what it needs. `compares`: it reads the rows of the arms beside its own, too.
    """

    name: ClassVar[str]
    reads: ClassVar[type[StepRow] | type[LayerReading] | type[StepFigure] | UnionType]
    window: ClassVar[str]
    threshold: ClassVar[str]
    reason: ClassVar[str]
    remedies: ClassVar[tuple[Remedy, ...]]
    compares: ClassVar[bool] = False

    def __init__(self, arm: WatchedArm) -> None:
        self.arm = arm

    @abstractmethod
    def see(self, line: L) -> Alarm | None:
        """The next line of its kind; an alarm as long as it is not well."""


class TensorRule(Rule[LayerReading]):
    """A rule over the readings of every tensor by itself: `judge` gets one, and the `keep` before it of that tensor."""

    reads = LayerReading
    keep: ClassVar[int]

    def __init__(self, arm: WatchedArm) -> None:
        super().__init__(arm)
        self._before: dict[tuple[str, str], deque[LayerReading]] = defaultdict(lambda: deque(maxlen=self.keep))

    def see(self, line: LayerReading) -> Alarm | None:
        before = self._before[line.layer, line.role]
        found = self.judge(line, before)
        before.append(line)
        return None if found is None else Alarm(found[0], line.layer, line.role, found[1])

    @abstractmethod
    def judge(self, reading: LayerReading, before: deque[LayerReading]) -> tuple[str, Params] | None:
        """The sentence and the figures if this is not well."""


def middle(values: Iterable[float]) -> float:
    """The median."""
    ranked = sorted(values)
    half = len(ranked) // 2
    return ranked[half] if len(ranked) % 2 else (ranked[half - 1] + ranked[half]) / 2


def octaves(scale: float) -> float | None:
    """log2 of a scale; None of one that has none."""
    return math.log2(scale) if 0 < scale < math.inf else None
