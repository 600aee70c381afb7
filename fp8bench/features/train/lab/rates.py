"""Learning rates and loss scales step by step, and the groups of parameters with separate rates or clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from fp8bench.features.train.lab.low_precision import Tensors
from fp8bench.features.train.request import LARGEST_LOSS_SCALE, TrainerSettings, parse_schedule
from fp8bench.units import number_of

# The final share of the steps in which wsd decreases the rate.
_WSD_FALLS = 0.2
# Bad validations in a row before plateau halves the rate.
PATIENCE = 2


class RateSchedule:
    """The share of the full learning rate in each step: a scheduler of torch on a separate optimizer with a rate of
    1."""

    def __init__(self, settings: TrainerSettings, steps: int) -> None:
        # Run a scheduler of torch on one empty parameter, to get its share of the rate.
        name, keys = parse_schedule(settings.schedule)
        self._optimizer = SGD([torch.empty(0)], lr=1.0)
        self._scheduler = _scheduler(self._optimizer, name, keys["warmup"], keys.get("floor", 0.0), steps)
        self._plateau: ReduceLROnPlateau | None = None
        if name == "plateau":
            self._plateau = ReduceLROnPlateau(self._optimizer, factor=0.5, patience=PATIENCE, min_lr=keys["floor"])

    def share(self, step: int) -> float:
        """Returns the share in a step, counted from 0. Steps are in order; a repeated step gets the last share."""
        while self._scheduler.last_epoch < step:
            self._optimizer.step()  # which changes nothing; torch warns where a schedule is ahead of its optimizer
            self._scheduler.step()
        return float(self._optimizer.param_groups[0]["lr"])

    def see_held_out(self, loss: float) -> None:
        """Records a held-out loss, from which plateau lowers the rate."""
        if self._plateau is not None:
            self._plateau.step(loss)

    def memory(self) -> list[float]:
        plateau = self._plateau
        best, bad = (math.inf, 0) if plateau is None else (float(plateau.best), plateau.num_bad_epochs)
        return [float(self._scheduler.last_epoch), self.share(0), best, bad]

    def recall(self, memory: Sequence[float]) -> None:
        step, share, best, bad = memory
        self.share(int(step))
        self._optimizer.param_groups[0]["lr"] = share
        if self._plateau is not None:
            self._plateau.best, self._plateau.num_bad_epochs = best, int(bad)


def _scheduler(optimizer: SGD, name: str, warmup: float, floor: float, steps: int) -> LRScheduler:
    """Returns a linear warm-up, then the schedule named; one-cycle has its own warm-up, from 1/25 along a cosine."""
    if name == "one-cycle" and warmup * steps > 1:
        final = 1 / (25 * floor) if floor else math.inf
        return OneCycleLR(
            optimizer, 1.0, total_steps=steps, pct_start=warmup, final_div_factor=final, cycle_momentum=False
        )
    rising = 0 if name == "one-cycle" else round(warmup * steps)
    falling = max(1, steps - 1 - rising)
    schedule: LRScheduler
    if name in ("cosine", "one-cycle"):
        schedule = CosineAnnealingLR(optimizer, falling, floor)
    elif name == "linear":
        schedule = LinearLR(optimizer, 1.0, floor, falling)
    elif name == "wsd":
        last = max(1, min(round(_WSD_FALLS * steps), steps - rising))
        schedule = LambdaLR(optimizer, lambda step: min(1.0, floor + (1 - floor) * (steps - 1 - rising - step) / last))
    elif name == "inverse-sqrt":
        schedule = LambdaLR(optimizer, lambda step: max(floor, math.sqrt(max(1, rising) / (rising + step + 1))))
    else:
        schedule = ConstantLR(optimizer, 1.0)
    if not rising:
        return schedule
    # The first step has a rate above 0: a step at 0 would change nothing.
    rise = LinearLR(optimizer, 1 / rising, 1.0, rising - 1)
    return SequentialLR(optimizer, [rise, schedule], [rising])


def kind_of(name: str, dimensions: int) -> str:
    """Returns a parameter's kind, as --rates names it: 'embedding', 'head', 'norm' (one dimension) or 'layer'."""
    first = name.partition(".")[0]
    if first in ("embedding", "positions", "head"):
        return "head" if first == "head" else "embedding"
    return "norm" if dimensions < 2 else "layer"


# Words of a matrix's path that name its kind of layer; without one it belongs to an mlp.
_LAYERS = {"attn": "attn", "first": "conv", "second": "conv"}


def _layer_kind(name: str, dimensions: int) -> str:
    """Like kind_of, but with the kind of layer in place of 'layer'."""
    kind = kind_of(name, dimensions)
    return kind if kind != "layer" else next((_LAYERS[word] for word in name.split(".") if word in _LAYERS), "mlp")


def factor_of(name: str, dimensions: int, rates: tuple[tuple[str, float], ...]) -> float:
    """Returns a parameter's rate factor: longest matching path prefix wins, then the kind of layer, then the kind of
    parameter."""
    factors = dict(rates)
    prefixes = [key for key in factors if name == key or name.startswith(f"{key}.")]
    if prefixes:
        return factors[max(prefixes, key=len)]
    return factors.get(_layer_kind(name, dimensions), factors.get(kind_of(name, dimensions), 1.0))


def group_of(name: str, dimensions: int, group: str) -> str:
    """Returns the name of the gradients that are clipped together with this one; `group` is '' for all."""
    if group == "kind":
        return _layer_kind(name, dimensions)
    if group == "block":
        words = name.split(".")
        return ".".join(words[:2]) if words[0] == "blocks" else words[0]
    return name if group == "tensor" else ""


# A dynamic loss scale begins with the first, is never below the second, and doubles after this many steps.
_FIRST, _LEAST, GROWTH = 2.0**16, 1.0, 200


@dataclass
class LossScale:
    """A loss scale: fixed, or `dynamic`: halved at an overflow, and doubled after 200 steps without one."""

    scale: float
    dynamic: bool = False
    good_steps: int = 0

    def see(self, finite: bool) -> None:
        if not self.dynamic:
            return
        # The count restarts at each overflow, as GradScaler's does.
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(_LEAST, self.scale / 2)
        elif self.good_steps == GROWTH:
            self.scale, self.good_steps = min(LARGEST_LOSS_SCALE, self.scale * 2), 0


def loss_scale_of(settings: TrainerSettings, scale_of_precision: float) -> LossScale:
    word = settings.loss_scale
    if word == "dynamic":
        return LossScale(_FIRST, dynamic=True)
    return LossScale(scale_of_precision if word == "auto" else number_of(word))


def joint(norms: Tensors) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm
