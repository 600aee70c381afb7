"""The rate of each step, by kind of parameter, and which parameters decay."""

from __future__ import annotations

import hashlib
import math

from fp8bench.features.train.request import LARGEST_LOSS_SCALE, TrainerSettings
from fp8bench.features.train.values import Arm, ArmRole


def share_of_rate(settings: TrainerSettings, step: int, steps: int) -> float:
    """The share of the full rate in a step, which counts from 0: it rises in a line, then falls along a cosine."""
    rising = round(settings.warmup * steps)
    if step < rising:
        return (step + 1) / rising
    gone = (step - rising) / max(1, steps - 1 - rising)
    return settings.floor + (1 - settings.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, gone)))


def kind_of(name: str, dimensions: int) -> str:
    """What a parameter is, as `rates` names it: 'embedding', 'norm' (whatever has one dimension), 'head' or 'layer'."""
    first = name.partition(".")[0]
    if first in ("embedding", "positions", "head"):
        return "head" if first == "head" else "embedding"
    return "norm" if dimensions < 2 else "layer"


def decays(dimensions: int) -> bool:
    """Whether weight decay shrinks a parameter: matrices, and neither norms nor biases."""
    return dimensions > 1


_LEAST = 1.0
# Where a dynamic scale begins, as torch's own.
_FIRST = 2.0**16


class LossScale:
    """A scale that stays (`growth` 0), or one that finds itself: halved after a step whose gradients overflow, doubled
    after `growth` steps in a row in which none did."""

    def __init__(self, scale: float, growth: int = 0) -> None:
        self.scale = scale
        self.growth = growth
        self.good_steps = 0

    def seen(self, finite: bool) -> None:
        """A step with this scale was done."""
        if not self.growth:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(_LEAST, self.scale / 2)
        elif self.good_steps == self.growth:
            self.scale, self.good_steps = min(LARGEST_LOSS_SCALE, self.scale * 2), 0


def loss_scale_of(settings: TrainerSettings, own: float) -> LossScale:
    """As the settings say; `own` is the precision's."""
    word = settings.loss_scale
    if word == "dynamic":
        return LossScale(_FIRST, settings.scale_growth)
    return LossScale(own if word == "auto" else float(word))


def seed_of(purpose: str, *numbers: int) -> int:
    """32 bits, all that a generator on a processor takes, unlike for any other purpose or numbers."""
    words = "/".join((purpose, *map(str, numbers)))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big")


def own_seed(seed: int, arm: Arm) -> int:
    """The seed of an arm's weights, batches and dropout: its neighbours', but for one that is to have another."""
    return seed_of("other", seed) if arm.role is ArmRole.OTHER_SEED else seed
