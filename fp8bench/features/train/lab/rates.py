"""Learning rates and loss scales by step. Also divides parameters into groups with separate rates or separate
clipping.
"""

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

from fp8bench.features.train.lab.low_precision import TensorSequence
from fp8bench.features.train.request import MAX_LOSS_SCALE, TrainerSettings, parse_schedule
from fp8bench.units import parse_number

# The wsd schedule decreases the rate during this last share of the steps.
_WSD_DECAY_SHARE = 0.2
# The plateau schedule halves the rate after more than this many validations in a row without progress.
PLATEAU_PATIENCE = 2


class RateSchedule:
    """Computes the learning rate of each step as a share of the full rate. For this it runs a torch scheduler on a
    dummy optimizer, whose full rate is 1.
    """

    def __init__(self, settings: TrainerSettings, steps: int) -> None:
        schedule_name, keys = parse_schedule(settings.schedule)
        # torch accepts no optimizer without parameters, so this one has an empty parameter.
        self._optimizer = SGD([torch.empty(0)], lr=1.0)
        self._scheduler = _make_scheduler(self._optimizer, schedule_name, keys["warmup"], keys.get("floor", 0.0), steps)
        self._plateau: ReduceLROnPlateau | None = None
        if schedule_name == "plateau":
            self._plateau = ReduceLROnPlateau(
                self._optimizer, factor=0.5, patience=PLATEAU_PATIENCE, min_lr=keys["floor"]
            )

    def rate_share(self, step: int) -> float:
        """Returns the share of the full rate in a step, counted from 0. Steps have to be requested in order. An earlier
        step gets the share of the latest requested step.
        """
        while self._scheduler.last_epoch < step:
            self._optimizer.step()  # changes no weight, but avoids torch's warning about a scheduler that steps first
            self._scheduler.step()
        return float(self._optimizer.param_groups[0]["lr"])

    def record_held_out(self, loss: float) -> None:
        """Records a held-out loss. The plateau schedule lowers the rate by these losses."""
        if self._plateau is not None:
            self._plateau.step(loss)

    def get_state(self) -> list[float]:
        plateau_scheduler = self._plateau
        best, bad = (
            (math.inf, 0)
            if plateau_scheduler is None
            else (float(plateau_scheduler.best), plateau_scheduler.num_bad_epochs)
        )
        # For step 0, `rate_share` returns the current share without advancing the schedule.
        return [float(self._scheduler.last_epoch), self.rate_share(0), best, bad]

    def set_state(self, state: Sequence[float]) -> None:
        step, rate_share, best, bad = state
        self.rate_share(int(step))
        # The plateau schedule may have lowered the rate.
        self._optimizer.param_groups[0]["lr"] = rate_share
        if self._plateau is not None:
            self._plateau.best = best
            self._plateau.num_bad_epochs = int(bad)


def _make_scheduler(optimizer: SGD, name: str, warmup: float, floor: float, steps: int) -> LRScheduler:
    """Returns a scheduler with a linear warm-up, followed by the named schedule. The one-cycle schedule has its usual
    warm-up instead, which rises from 1/25 of the rate along a cosine.
    """
    if name == "one-cycle" and warmup * steps > 1:
        # OneCycleLR ends at 1/25 of the full rate, divided by this number.
        final_rate_divisor = 1 / (25 * floor) if floor else math.inf
        return OneCycleLR(
            optimizer,
            1.0,
            total_steps=steps,
            pct_start=warmup,
            final_div_factor=final_rate_divisor,
            # The dummy optimizer has no momentum.
            cycle_momentum=False,
        )
    warmup_steps = 0 if name == "one-cycle" else round(warmup * steps)
    # The last step has the final rate, so the decay is one step shorter.
    decay_steps = max(1, steps - 1 - warmup_steps)
    rate_schedule: LRScheduler
    if name in ("cosine", "one-cycle"):
        rate_schedule = CosineAnnealingLR(optimizer, decay_steps, floor)
    elif name == "linear":
        rate_schedule = LinearLR(optimizer, 1.0, floor, decay_steps)
    elif name == "wsd":
        wsd_decay_steps = max(1, min(round(_WSD_DECAY_SHARE * steps), steps - warmup_steps))
        rate_schedule = LambdaLR(
            optimizer, lambda step: min(1.0, floor + (1 - floor) * (steps - 1 - warmup_steps - step) / wsd_decay_steps)
        )
    elif name == "inverse-sqrt":
        rate_schedule = LambdaLR(
            optimizer, lambda step: max(floor, math.sqrt(max(1, warmup_steps) / (warmup_steps + step + 1)))
        )
    else:
        rate_schedule = ConstantLR(optimizer, 1.0)
    if not warmup_steps:
        return rate_schedule
    # The first step has a rate above 0, because a step at a rate of 0 changes nothing.
    warmup_schedule = LinearLR(optimizer, 1 / warmup_steps, 1.0, warmup_steps - 1)
    return SequentialLR(optimizer, [warmup_schedule, rate_schedule], [warmup_steps])


def find_parameter_kind(name: str, dimensions: int) -> str:
    """Returns the kind of a parameter as --rates names it: 'embedding', 'head', 'norm' (fewer than two dimensions) or
    'layer'.
    """
    first_parameter_path_part = name.partition(".")[0]
    if first_parameter_path_part in ("embedding", "positions", "head"):
        return "head" if first_parameter_path_part == "head" else "embedding"
    return "norm" if dimensions < 2 else "layer"


# Parts of a matrix's path that show its kind of layer. A matrix with none of these parts belongs to an mlp.
_LAYER_KIND_BY_PATH_PART = {"attn": "attn", "first": "conv", "second": "conv"}


def _find_layer_kind(name: str, dimensions: int) -> str:
    """Returns the kind of a parameter. Unlike `find_parameter_kind`, it distinguishes kinds of layers: 'attn', 'conv'
    or 'mlp' instead of 'layer'.
    """
    kind = find_parameter_kind(name, dimensions)
    return (
        kind
        if kind != "layer"
        else next(
            (_LAYER_KIND_BY_PATH_PART[word] for word in name.split(".") if word in _LAYER_KIND_BY_PATH_PART), "mlp"
        )
    )


def find_learning_rate_factor(name: str, dimensions: int, rates: tuple[tuple[str, float], ...]) -> float:
    """Returns the factor by which `rates` multiplies a parameter's learning rate. The longest prefix of the parameter's
    path has priority, then its kind of layer, such as 'attn', then its kind, such as 'norm'. The default is 1.
    """
    rate_factor_by_name = dict(rates)
    matching_name_prefixes = [key for key in rate_factor_by_name if name == key or name.startswith(f"{key}.")]
    if matching_name_prefixes:
        return rate_factor_by_name[max(matching_name_prefixes, key=len)]
    return rate_factor_by_name.get(
        _find_layer_kind(name, dimensions), rate_factor_by_name.get(find_parameter_kind(name, dimensions), 1.0)
    )


def find_clip_group(name: str, dimensions: int, group: str) -> str:
    """Returns the name of the group of gradients with which a parameter's gradient is clipped; '' if all gradients
    are clipped together.
    """
    if group == "kind":
        return _find_layer_kind(name, dimensions)
    if group == "block":
        path_parts = name.split(".")
        return ".".join(path_parts[:2]) if path_parts[0] == "blocks" else path_parts[0]
    return name if group == "tensor" else ""


# The first value and the smallest value of a dynamic loss scale.
_FIRST_LOSS_SCALE = 2.0**16
_MIN_LOSS_SCALE = 1.0
# A dynamic loss scale doubles after this many steps without an overflow.
GROWTH_STEPS = 200


@dataclass
class LossScale:
    """The factor by which a loss is multiplied before backward. It is fixed or, if `is_dynamic`, halved at an overflow
    and doubled after 200 steps without an overflow.
    """

    scale: float
    is_dynamic: bool = False
    finite_steps: int = 0

    def adapt_scale(self, finite: bool) -> None:
        if not self.is_dynamic:
            return
        # Like GradScaler, count consecutive steps without an overflow.
        self.finite_steps = self.finite_steps + 1 if finite else 0
        if not finite:
            self.scale = max(_MIN_LOSS_SCALE, self.scale / 2)
        elif self.finite_steps == GROWTH_STEPS:
            self.scale = min(MAX_LOSS_SCALE, self.scale * 2)
            self.finite_steps = 0


def make_loss_scale(settings: TrainerSettings, precision_scale: float) -> LossScale:
    loss_scale_setting = settings.loss_scale
    if loss_scale_setting == "dynamic":
        return LossScale(_FIRST_LOSS_SCALE, is_dynamic=True)
    return LossScale(precision_scale if loss_scale_setting == "auto" else parse_number(loss_scale_setting))


def join_norms(norms: TensorSequence) -> Tensor:
    joint_norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return joint_norm
