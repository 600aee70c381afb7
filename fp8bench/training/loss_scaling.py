"""What the loss of a step is multiplied by before backward, so that small gradients do not underflow."""

from __future__ import annotations

from fp8bench.model.training import TrainerSettings
from fp8bench.model.training_rules import LARGEST_LOSS_SCALE

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
