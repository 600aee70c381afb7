"""Training steps of a rank's part of a model, and how far from one rank's they may be: as far as rounding explains.

Compared is what three steps change, by three figures: the relative distance over all weights, that of the weight that
is furthest off, and the gain, how many times one rank's change is contained in it. Noise enters the gain only by half
its square, so a gain can be held much closer than a distance.

| what rounds most             | honest: distance, furthest, gain | limits              |
|------------------------------|----------------------------------|---------------------| | order of float32 sums
| 5e-6, 5e-5, 1e-6                 | 0.001, 0.001, 0.001 | | 16 bits, made or sent        | 0.014, 0.02, 0.001
| 0.03, 0.04, 0.01    | | FP8, gradients sent          | 0.042, 0.05, 0.002               | 0.12, 0.15, 0.01    | | FP8,
weights or tokens sent  | 0.13, 0.16, 0.006                | 0.2, 0.25, 0.02     | | FP8, a scale a row or block  |
0.12, 0.13, 0.005                | 0.2, 0.25, 0.02     | | FP8, a scale a tensor        | 0.28, 0.3, 0.03
| 0.4, 0.5, 0.08      | | fewer bits                   | 0.54, 0.66, 0.15                 | 0.65, 0.9, 0.21     | | a
router's choice, as well   | 0.26, 0.62, 0.04                 | 0.4, 0.9, 0.1       |

Weights and tokens sent in FP8 are cast again for products, so both roundings add up. Where anything rounds, a router
sends a token near a boundary to a different expert, whose weights then change by it: an expert with few tokens is then
far off.

A mistake in scales, or in a mean sent in FP8, may be far below rounding: model.py and exchanges.py find those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.model import DeviceFacts, MemoryRole
from fp8bench.nn.batches import TokenLoader
from fp8bench.nn.parallel.division import Division
from fp8bench.nn.training_step import adamw, eager
from fp8bench.protocols import Phases, Precision, SilentPhases

_RATE = 3e-4
# Plain SGD for steps that are compared with one rank's: AdamW would cancel the scale of gradients, and treat one that
# should be zero like any other.
_PLAIN_RATE = 0.05


class WeightUpdate(NamedTuple):
    """The change of a weight by several ranks against that by one: squared distance, squared change of the one, and the
    product of both changes."""

    distance: float
    wanted: float
    product: float

    @property
    def error(self) -> float:
        return (self.distance / self.wanted) ** 0.5 if self.wanted else math.inf if self.distance else 0.0

    @property
    def gain(self) -> float:
        """How many times one rank's change is contained: 1 for noise, 2 for gradients that are added twice."""
        return self.product / self.wanted if self.wanted else 1.0


@dataclass(frozen=True)
class Apart:
    """How far ranks are from one alone: the largest distances of a loss and of a weight, and each weight's change."""

    loss: float
    weight: float
    updates: Mapping[str, WeightUpdate]

    @property
    def update(self) -> WeightUpdate:
        return WeightUpdate(*map(sum, zip(*self.updates.values(), strict=True)))

    @property
    def furthest(self) -> tuple[str, WeightUpdate]:
        return max(self.updates.items(), key=lambda named: named[1].error)

    def figures(self) -> dict[str, float]:
        return {
            "loss_gap": self.loss,
            "weight_gap": self.weight,
            "update_error": self.update.error,
            "furthest_error": self.furthest[1].error,
            "gain_error": abs(self.update.gain - 1),
        }


class Limits(NamedTuple):
    """Limits of the relative distance over all weights, of that of the furthest weight, and of the gain from 1."""

    update: float
    furthest: float
    gain: float

    def combined_with(self, second: Limits) -> Limits:
        """Limits for two independent roundings: distances add by their squares, gains linearly."""
        distances = math.hypot(self.update, second.update), math.hypot(self.furthest, second.furthest)
        return Limits(*distances, self.gain + second.gain)

    def describe_excess(self, apart: Apart) -> str:
        name, furthest = apart.furthest
        update = apart.update
        figures = (
            ("the relative distance of all weights' changes", update.error, self.update),
            (f"the relative distance of the change of {name}", furthest.error, self.furthest),
            (f"the distance from 1 of their gain {update.gain:.3g}", abs(update.gain - 1), self.gain),
        )
        sentences = []
        for figure, value, limit in figures:
            if not value <= limit:  # NaN is in excess, too
                sentences.append(f"{figure} is {value:.3g}, and at most {limit:g} of it may be rounding")
        return "; ".join(sentences)


_EXACT = Limits(1e-3, 1e-3, 1e-3)
_IN_16_BITS = Limits(0.03, 0.04, 0.01)
_NARROWER = Limits(0.65, 0.9, 0.21)
_FP8_SENT = Limits(0.12, 0.15, 0.01)
_FP8_BY_BLOCKS = Limits(0.2, 0.25, 0.02)
_FP8_TOKENS_SENT = _FP8_BY_BLOCKS
_FP8_BY_TENSORS = Limits(0.4, 0.5, 0.08)
_CHOSEN_OTHERWISE = Limits(0.4, 0.9, 0.1)
_BYTE = 8


def limits_of(precisions: Iterable[Precision], wire: str, load: str = "") -> Limits:
    """The limits of a case with products in these precisions, exchanges in the format `wire` ('' without a choice), and
    that load of experts."""
    products = max(map(_of_products, precisions))
    if wire == "fp8":
        limits = products.combined_with(_FP8_TOKENS_SENT)
    elif wire in ("", "fp32", "stream", "torchao_fp32"):
        limits = max(products, _EXACT)
    else:
        limits = max(products, _IN_16_BITS if wire == "bf16" else _FP8_SENT)
    return limits.combined_with(_CHOSEN_OTHERWISE) if load == "router" and limits > _EXACT else limits


def _of_products(precision: Precision) -> Limits:
    recipe = getattr(precision, "recipe", None)
    if recipe is None:
        return _EXACT if precision.name == "fp32" else _IN_16_BITS
    if min(treatment.fmt.bits for treatment in recipe.treatments) < _BYTE:
        return _NARROWER
    return _FP8_BY_TENSORS if recipe.per_tensor else _FP8_BY_BLOCKS


class NotTheSame(RuntimeError):
    """Ranks together train something else than one rank alone."""


@dataclass
class ParallelState:
    """All that one rank trains: its part, the optimizer, and the text, which every rank reads whole."""

    model: Division
    optimizer: torch.optim.Optimizer
    parameters: list[torch.nn.Parameter]
    loader: TokenLoader

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {**self.model.memory_roles(), MemoryRole.OPTIMIZER: list(self.optimizer.state.values())}

    def train_step(self, phase: Phases) -> Tensor:
        with phase.data_load:
            tokens, targets = self.loader.next()
        loss = self.model.loss(tokens, targets, phase)
        with phase.optimizer_step:
            for parameter, gradient in zip(self.parameters, self.model.gradients(), strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            for parameter in self.parameters:
                parameter.grad = None
        self.model.send_updates(phase)
        self.model.drop_gradients()
        return loss


def new_state(model: Division, loader: TokenLoader, facts: DeviceFacts, plain: bool = False) -> ParallelState:
    parameters = [torch.nn.Parameter(weight) for weight in model.weights]
    optimizer = eager(torch.optim.SGD)(parameters, lr=_PLAIN_RATE) if plain else adamw(parameters, _RATE, facts)
    return ParallelState(model, optimizer, parameters, loader)


def agreement(together: ParallelState, alone: ParallelState, steps: int) -> Apart:
    """Compares this number of steps with those of one rank. Raises NotTheSame where a rank's scales or exchanges are
    wrong: much of that would be less than rounding."""
    # 1. Train both, and watch what ranks exchange.
    witnesses = together.model.witnesses()
    initial = {name: weight.clone() for name, weight in alone.model.full_weights().items()}
    phase = SilentPhases()
    gaps = []
    for _ in range(steps):
        loss = together.model.whole_loss(together.train_step(phase))
        gaps.append((loss.double() - alone.train_step(phase).double()).abs().max())

    # 2. All ranks have to ask every witness, even after a mistake.
    mistakes = [witness.mistake() for witness in witnesses]
    for mistake in filter(None, mistakes):
        raise NotTheSame(mistake)

    # 3. Compare the weights, and what the steps have changed in them.
    weights = together.model.full_weights()
    reference = alone.model.full_weights()
    distances = []
    updates = {}
    for name, tensor in initial.items():
        weight = weights[name].double()
        exact = reference[name].double()
        distances.append((weight - exact).abs().max())
        change = weight - tensor
        exact_change = exact - tensor
        sums = (change - exact_change).square().sum(), exact_change.square().sum(), (change * exact_change).sum()
        updates[name] = WeightUpdate(*map(float, sums))
    return Apart(float(max(gaps)), float(max(distances)), updates)
