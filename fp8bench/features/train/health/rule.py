"""What a health rule is: it reads the lines of one arm of one seed in their order, and raises an alarm."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import UnionType
from typing import Any, ClassVar, Generic, TypeVar

from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import LayerReading, StepFigure, StepRow
from fp8bench.model import Params, Scalar
from fp8bench.registry import precisions

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


class Remedy(StrEnum):
    """A change of one thing, in the words in which it is told."""

    RAISE_MARGIN = "raise the margin of delayed scales by an octave"
    SHORTER_HISTORY = "shorter history or interval of delayed scales"
    E5M2_GRADIENTS = "E5M2 for gradients"
    LAYER_IN_BF16 = "this layer in bf16"
    DYNAMIC_LOSS_SCALE = "a dynamic loss scale"
    CLIP_HARDER = "clip gradients harder"
    LOWER_RATE = "a lower learning rate"
    HIGHER_MASTER = "master weights, gradients and optimizer states in fp32"
    LOOK_AT_DATA = "look at the batches of these steps"
    LOOK_AT_LAYER = "look at how this layer is made: its gain, its momentum, whether anything reaches it"


_CLIP_SHARE = 0.25
_RATE_SHARE = 0.5
_HISTORY_SHARE = 16
_HIGH = ("fp32", "bf16", "tf32")


def helped(precision: str, settings: TrainerSettings, remedy: Remedy, layer: str = "") -> tuple[str, TrainerSettings]:
    """Precision and settings of an arm with a remedy; as they were where it changes nothing, or people have to look."""
    change: dict[str, Any] = {}
    match remedy:
        case Remedy.LAYER_IN_BF16 if layer and precision.partition(":")[0] not in _HIGH:
            change["precision_map"] = (*settings.precision_map, (layer, "bf16"))
        case Remedy.DYNAMIC_LOSS_SCALE:
            change["loss_scale"] = "dynamic"
        case Remedy.CLIP_HARDER:
            change["clip"] = settings.clip * _CLIP_SHARE or 1.0
        case Remedy.LOWER_RATE:
            change["rate"] = settings.rate * _RATE_SHARE
        case Remedy.HIGHER_MASTER:
            change.update(master="fp32", optimizer_states="fp32", gradients="fp32")
        case _:
            pass
    return _helped_precision(precision, remedy), replace(settings, **change)


def _helped_precision(mode: str, remedy: Remedy) -> str:
    """The word for the precision with other options; itself where it has none that help."""
    chosen: Mapping[str, Scalar] = precisions.get(mode).chosen
    name = mode.partition(":")[0]
    change: dict[str, Scalar] = {}
    if remedy is Remedy.RAISE_MARGIN and "margin" in chosen:
        change["margin"] = int(chosen["margin"]) + 1
    if remedy is Remedy.SHORTER_HISTORY and "history" in chosen:
        change.update(history=max(1, int(chosen["history"]) // _HISTORY_SHARE), interval=1)
    if remedy is Remedy.E5M2_GRADIENTS and chosen.get("formats") == "e4m3":
        change["formats"] = "hybrid"
    if remedy is Remedy.E5M2_GRADIENTS and name == "fp8-e4m3":
        return "fp8"
    if not change:
        return mode
    return precisions.canonical(":".join([name, *(f"{key}={value}" for key, value in {**chosen, **change}.items())]))
