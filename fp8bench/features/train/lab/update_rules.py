"""How weights are updated: learning-rate schedules and factors, groups of clipping, the loss scale, and the rules of
SGD, Lion and Adafactor over a bucket of float32 weights.

SGD and Adafactor are torch's, in its order of operations; Lion is algorithm 2 of Chen et al. (2023). The host never
waits: what torch reads there (count of steps, norms) stays on the device. A skipped step changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8bench.features.train.request import LARGEST_LOSS_SCALE, TrainerSettings
from fp8bench.nn.moments import Bucket, Update
from fp8bench.units import number_of

# One-cycle begins at this share of its largest rate, as in torch.
_CYCLE_BEGINS = 1 / 25
# The share of the steps, at the end, in which wsd falls.
_WSD_FALLS = 0.2


def share_of_rate(settings: TrainerSettings, step: int, steps: int) -> float:
    """The share of the full learning rate in a step, counted from 0: a linear warm-up, then the schedule. One-cycle
    rises and falls along cosines, as torch's does. Plateau is flat here: PlateauShare is its factor."""
    floor, name = settings.floor, settings.schedule
    if name == "one-cycle":
        top, last = max(0.0, settings.warmup * steps - 1), steps - 1
        if step <= top:
            return _along_cosine(_CYCLE_BEGINS, 1.0, step / top if top else 1.0)
        return _along_cosine(1.0, floor, (step - top) / (last - top))
    rising = round(settings.warmup * steps)
    if step < rising:
        return (step + 1) / rising
    gone = min(1.0, (step - rising) / max(1, steps - 1 - rising))
    if name == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * gone))
    if name == "linear":
        return 1 - (1 - floor) * gone
    if name == "inverse-sqrt":
        return max(floor, math.sqrt(max(1, rising) / (step + 1)))
    if name == "wsd":
        falling = max(1, min(round(_WSD_FALLS * steps), steps - rising))
        return min(1.0, floor + (1 - floor) * (steps - 1 - step) / falling)
    return 1.0


def _along_cosine(start: float, end: float, gone: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * gone))


# As of torch's ReduceLROnPlateau: the factor, the bad validations before it, and the share by which a loss is better.
_DROP, PATIENCE, _BETTER = 0.5, 2, 1e-4


class PlateauShare:
    """A factor that is halved after 3 validations in a row without a loss better by 0.01%, down to `floor`; 1 under
    another schedule."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self.share, self.best, self.bad, self.at = 1.0, math.inf, 0, -1

    def seen(self, step: int, loss: float) -> None:
        """Take in the held-out loss after so many steps; a step that was seen before changes nothing."""
        if step <= self.at or self._settings.schedule != "plateau":
            return
        self.at = step
        if loss < self.best * (1 - _BETTER):
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
        if self.bad > PATIENCE:
            self.share, self.bad = max(self._settings.floor, self.share * _DROP), 0

    def memory(self) -> list[float]:
        return [self.share, self.best, self.bad, self.at]

    def recall(self, memory: list[float]) -> None:
        self.share, self.best, bad, at = memory
        self.bad, self.at = int(bad), int(at)


def kind_of(name: str, dimensions: int) -> str:
    """A parameter's kind, as --rates names it: 'embedding', 'head', 'norm' (anything of one dimension) or 'layer'."""
    first = name.partition(".")[0]
    if first in ("embedding", "positions", "head"):
        return "head" if first == "head" else "embedding"
    return "norm" if dimensions < 2 else "layer"


# Words of a matrix's path that name its kind of layer; without one it belongs to an mlp.
_LAYERS = {"attn": "attn", "first": "conv", "second": "conv"}


def _layer_kind(name: str, dimensions: int) -> str:
    """As kind_of, but with the kind of layer in place of 'layer'."""
    kind = kind_of(name, dimensions)
    return kind if kind != "layer" else next((_LAYERS[word] for word in name.split(".") if word in _LAYERS), "mlp")


def factor_of(name: str, dimensions: int, rates: tuple[tuple[str, float], ...]) -> float:
    """The longest matching path prefix wins, then the kind of layer, then the kind of parameter."""
    factors = dict(rates)
    prefixes = [key for key in factors if name == key or name.startswith(f"{key}.")]
    if prefixes:
        return factors[max(prefixes, key=len)]
    return factors.get(_layer_kind(name, dimensions), factors.get(kind_of(name, dimensions), 1.0))


def group_of(name: str, dimensions: int, group: str) -> str:
    """The name of the gradients that are clipped together with this one; `group` is '' for all."""
    if group == "kind":
        return _layer_kind(name, dimensions)
    if group == "block":
        words = name.split(".")
        return ".".join(words[:2]) if words[0] == "blocks" else words[0]
    return name if group == "tensor" else ""


# A dynamic loss scale begins with the first, is never below the least, and doubles after so many steps.
_FIRST, _LEAST, GROWTH = 2.0**16, 1.0, 200


@dataclass
class LossScale:
    """Fixed, or `dynamic`: halved at an overflow, and doubled after 200 steps without one."""

    scale: float
    dynamic: bool = False
    good_steps: int = 0

    def seen(self, finite: bool) -> None:
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(_LEAST, self.scale / 2)
        elif self.good_steps == GROWTH:
            self.scale, self.good_steps = min(LARGEST_LOSS_SCALE, self.scale * 2), 0


def loss_scale_of(settings: TrainerSettings, own: float) -> LossScale:
    word = settings.loss_scale
    if word == "dynamic":
        return LossScale(_FIRST, dynamic=True)
    return LossScale(own if word == "auto" else number_of(word))


Moments = list[Tensor]
# Adafactor's clipping threshold, and the power of the step by which its averages forget, as in torch.
_THRESHOLD, _FORGETS = 1.0, -0.8
_TINY = torch.finfo(torch.float32).eps


def states_for(optimizer: str, parameters: Sequence[Tensor]) -> tuple[Moments, Moments]:
    """First and second moments at the start; empty tensors where an optimizer has none. For a matrix, Adafactor keeps
    means of rows as the first and of columns as the second; for a vector, the whole as the second."""
    zeros, none = torch.zeros_like, [parameter.new_zeros(0) for parameter in parameters]
    if optimizer == "adafactor":
        rows = [zeros(parameter[..., :1]) if parameter.ndim > 1 else parameter.new_zeros(0) for parameter in parameters]
        columns = [zeros(parameter[..., :1, :]) if parameter.ndim > 1 else zeros(parameter) for parameter in parameters]
        return rows, columns
    return [zeros(parameter) for parameter in parameters], none if optimizer in RULES else [
        zeros(parameter) for parameter in parameters
    ]


def _sgd(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, how: Update) -> None:
    if how.decay:
        gradient = gradient.add(weight, alpha=how.decay)
    first.mul_(how.betas[0]).add_(gradient)
    weight.sub_(first, alpha=how.rate)


def _lion(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, how: Update) -> None:
    update = (how.betas[0] * first + (1 - how.betas[0]) * gradient).sign()
    weight.sub_(how.rate * (update + how.decay * weight))
    first.copy_(how.betas[1] * first + (1 - how.betas[1]) * gradient)


def _adafactor(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, how: Update) -> None:
    forgets = step**_FORGETS
    mean = weight.norm(2) / weight.numel() ** 0.5
    rate = mean.clamp(min=how.epsilon) * step.rsqrt().clamp(max=how.rate)
    if how.decay:
        weight.mul_(1 - how.rate * how.decay)
    if gradient.ndim > 1:
        first.lerp_(gradient.norm(dim=-1, keepdim=True).square_().div_(gradient.shape[-1]), forgets)
        second.lerp_(gradient.norm(dim=-2, keepdim=True).square_().div_(gradient.shape[-2]), forgets)
        estimate = (first @ second) / first.mean(dim=-2, keepdim=True).clamp(min=_TINY)
    else:
        second.lerp_(gradient * gradient, forgets)
        estimate = second.clone()
    update = estimate.clamp_(min=_TINY * _TINY).rsqrt_().mul_(gradient)
    shrunk = (update.norm(2) / (update.numel() ** 0.5 * _THRESHOLD)).clamp(min=1.0)
    weight.sub_(update * (rate / shrunk))


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Update], None]


def _over(rule: Rule) -> Callable[[Bucket, Moments, Moments, Update], None]:
    @torch.no_grad()
    def update(bucket: Bucket, first: Moments, second: Moments, how: Update) -> None:
        assert how.divisor is not None and how.skip is not None
        skipped = how.skip > 0
        each = zip(bucket.parameters, bucket.gradients, first, second, bucket.kept()[2], strict=True)
        for weight, gradient, mean, square, step in each:
            changed = weight, mean, square
            before = [tensor.clone() for tensor in changed]
            step.add_(1 - how.skip)
            rule(weight, gradient / how.divisor, mean, square, step, how)
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(torch.where(skipped, old, tensor))

    return update


RULES = {"sgd": _over(_sgd), "lion": _over(_lion), "adafactor": _over(_adafactor)}
