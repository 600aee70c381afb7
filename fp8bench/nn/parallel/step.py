"""Training steps of a rank's part of a model, and how far they may be from those of one rank alone: as far as what
rounds in a case explains, and no more.

Held is what three steps change, by three figures: its relative distance over all weights, that of the weight that is
furthest away, and its gain, how many times one rank's change is in it. Noise falls out of a gain but for what it
shortens, half its square, so that a gain sees much less than a distance.

| what rounds most             | honest: distance, furthest, gain | limits              |
|------------------------------|----------------------------------|---------------------|
| order of float32 sums        | 5e-6, 5e-5, 1e-6                 | 0.001, 0.001, 0.001 |
| 16 bits, made or sent        | 0.014, 0.02, 0.001               | 0.03, 0.04, 0.01    |
| FP8, gradients sent          | 0.042, 0.05, 0.002               | 0.12, 0.15, 0.01    |
| FP8, weights or tokens sent  | 0.13, 0.16, 0.006                | 0.2, 0.25, 0.02     |
| FP8, a scale a row or block  | 0.12, 0.13, 0.005                | 0.2, 0.25, 0.02     |
| FP8, a scale a tensor        | 0.28, 0.3, 0.03                  | 0.4, 0.5, 0.08      |
| fewer bits                   | 0.54, 0.66, 0.15                 | 0.65, 0.9, 0.21     |
| a router's choice, beside it | 0.26, 0.62, 0.04                 | 0.4, 0.9, 0.1       |

Weights and tokens that are sent in FP8 are cast once more where products cast them: what both leave is added up. Where
anything rounds, a router sends a token near a boundary to another expert, whose weights then change by it: those of an
expert of few tokens are far away.

A mistake in scales, or in a mean that is sent in FP8, may be far below rounding: model.py and exchanges.py
see those.
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
from fp8bench.nn.parallel.model import ParallelModel
from fp8bench.nn.training_step import adamw
from fp8bench.nn.uncompiled import eager
from fp8bench.protocols import Phases, Precision, SilentPhases

_RATE = 3e-4
# Of steps that are held against one rank's: gradients as they are, where AdamW would take their scale out again, and
# would make as much of a gradient that should be zero as of any other.
_PLAIN_RATE = 0.05


class WeightUpdate(NamedTuple):
    """Of what steps of ranks have changed in a weight, beside those of one rank: the square of the distance, that of
    one rank's change, and the product of both."""

    distance: float
    wanted: float
    product: float

    @property
    def error(self) -> float:
        return (self.distance / self.wanted) ** 0.5 if self.wanted else math.inf if self.distance else 0.0

    @property
    def gain(self) -> float:
        """How many times one rank's change is in it: noise falls out, what is added twice does not."""
        return self.product / self.wanted if self.wanted else 1.0


@dataclass(frozen=True)
class Apart:
    """How far ranks are from one alone: the largest distances of a loss and of a weight, and what steps changed in each
    weight."""

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
        """All are zero where every bit is the same."""
        return {
            "loss_gap": self.loss, "weight_gap": self.weight, "update_error": self.update.error,
            "furthest_error": self.furthest[1].error, "gain_error": abs(self.update.gain - 1),
        }  # fmt: skip


class MostApart(NamedTuple):
    """Of the relative distance of all that steps change, of that of the weight furthest away, and of how far the gain
    is from 1."""

    update: float
    furthest: float
    gain: float

    def and_of(self, other: MostApart) -> MostApart:
        """Of two roundings that know nothing of each other: distances add up by their squares, gains as they are."""
        distances = math.hypot(self.update, other.update), math.hypot(self.furthest, other.furthest)
        return MostApart(*distances, self.gain + other.gain)

    def why_not(self, apart: Apart) -> str:
        """What of it is too much to be rounding; '' where nothing is."""
        name, furthest = apart.furthest
        update = apart.update
        held = (
            ("the relative distance of all weights' changes", update.error, self.update),
            (f"the relative distance of the change of {name}", furthest.error, self.furthest),
            (f"the distance from 1 of their gain {update.gain:.3g}", abs(update.gain - 1), self.gain),
        )
        told = [
            f"{what} is {value:.3g}, and at most {most:g} of it may be rounding"
            for what, value, most in held
            if not value <= most
        ]
        return "; ".join(told)


_EXACT, _IN_16_BITS, _NARROWER = MostApart(1e-3, 1e-3, 1e-3), MostApart(0.03, 0.04, 0.01), MostApart(0.65, 0.9, 0.21)
_FP8_SENT, _FP8_BY_BLOCKS = MostApart(0.12, 0.15, 0.01), MostApart(0.2, 0.25, 0.02)
_FP8_TOKENS_SENT, _FP8_BY_TENSORS = _FP8_BY_BLOCKS, MostApart(0.4, 0.5, 0.08)
_CHOSEN_OTHERWISE = MostApart(0.4, 0.9, 0.1)
_BYTE = 8


def most_apart(precisions: Iterable[Precision], wire: str, load: str = "") -> MostApart:
    """The limits of a case whose products are made in these precisions, and what is sent is `wire` ('' if that is no
    choice), to experts by that load."""
    made = max(map(_of_products, precisions))
    limits = made.and_of(_FP8_TOKENS_SENT) if wire == "fp8" else max(made, _of_wire(wire))
    return limits.and_of(_CHOSEN_OTHERWISE) if load == "router" and limits > _EXACT else limits


def _of_wire(wire: str) -> MostApart:
    if wire in ("", "fp32", "stream", "torchao_fp32"):
        return _EXACT
    return _IN_16_BITS if wire == "bf16" else _FP8_SENT


def _of_products(precision: Precision) -> MostApart:
    recipe = getattr(precision, "recipe", None)
    if recipe is None:
        return _EXACT if precision.name == "fp32" else _IN_16_BITS
    if min(treatment.fmt.bits for treatment in recipe.treatments) < _BYTE:
        return _NARROWER
    return _FP8_BY_TENSORS if recipe.per_tensor else _FP8_BY_BLOCKS


class NotTheSame(RuntimeError):
    """Ranks train together what one rank alone does not."""


@dataclass
class ParallelState:
    """Everything that one rank trains: its part, what updates it, and the text, of which every rank reads all."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    parameters: list[torch.nn.Parameter]
    loader: TokenLoader

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {**self.model.memory_roles(), MemoryRole.OPTIMIZER: list(self.optimizer.state.values())}

    def trained(self, phase: Phases) -> Tensor:
        """One step; the mean loss of this rank's share."""
        with phase.data_load:
            tokens, targets = self.loader.next()
        loss = self.model.loss(tokens, targets, phase)
        with phase.optimizer_step:
            for parameter, gradient in zip(self.parameters, self.model.gradients(), strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            for parameter in self.parameters:
                parameter.grad = None
        self.model.updated(phase)
        self.model.forget()
        return loss


def begun(model: ParallelModel, loader: TokenLoader, facts: DeviceFacts, plain: bool = False) -> ParallelState:
    """A state that takes AdamW's steps, or `plain` ones."""
    parameters = [torch.nn.Parameter(weight) for weight in model.weights]
    optimizer = eager(torch.optim.SGD)(parameters, lr=_PLAIN_RATE) if plain else adamw(parameters, _RATE, facts)
    return ParallelState(model, optimizer, parameters, loader)


def agreement(together: ParallelState, alone: ParallelState, steps: int) -> Apart:
    """How far so many steps are from those of one rank alone. Raises where a rank casts or sends otherwise than what
    it has asks for: much of that would be less than rounding."""
    witnesses = together.model.witnesses()
    before = {name: weight.clone() for name, weight in alone.model.full_weights().items()}
    phase, gaps = SilentPhases(), []
    for _ in range(steps):
        loss = together.model.whole_loss(together.trained(phase))
        gaps.append((loss.double() - alone.trained(phase).double()).abs().max())
    for mistake in [witness.mistake() for witness in witnesses]:
        if mistake:
            raise NotTheSame(mistake)
    weights, reference = together.model.full_weights(), alone.model.full_weights()
    if weights.keys() != reference.keys():
        raise NotTheSame(f"of the weights {sorted(weights.keys() ^ reference.keys())} one side has none")
    largest = max((weights[name].double() - reference[name].double()).abs().max() for name in reference)
    updates = {
        name: (weights[name].double() - tensor, reference[name].double() - tensor) for name, tensor in before.items()
    }
    return Apart(float(max(gaps)), float(largest), {name: _update(*both) for name, both in updates.items()})


def _update(change: Tensor, wanted: Tensor) -> WeightUpdate:
    squared = (change - wanted).square().sum(), wanted.square().sum(), (change * wanted).sum()
    return WeightUpdate(*map(float, squared))
