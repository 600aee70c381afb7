"""Trains a rank's part of a model, and checks that training on one rank gives the same weights but for rounding.

Three figures compare how the weights changed in three steps: the relative distance over all weights, the relative
distance of the weight that is furthest off, and the gain. The gain is the size of the change on several ranks, divided
by the size of the change on one rank. A relative noise of d changes the gain only by about d squared / 2, so the gain
has a much closer limit than a distance. The table shows the figures of correct code ('honest') and the limits.

| coarsest rounding            | honest: distance, furthest, gain | limits              |
|------------------------------|----------------------------------|---------------------|
| order of float32 sums        | 5e-6, 5e-5, 1e-6                 | 0.001, 0.001, 0.001 |
| 16 bits, computed or sent    | 0.014, 0.02, 0.001               | 0.03, 0.04, 0.01    |
| FP8, gradients sent          | 0.042, 0.05, 0.002               | 0.12, 0.15, 0.01    |
| FP8, weights or tokens sent  | 0.13, 0.16, 0.006                | 0.2, 0.25, 0.02     |
| FP8, row or block scales     | 0.12, 0.13, 0.005                | 0.2, 0.25, 0.02     |
| FP8, tensor scales           | 0.28, 0.3, 0.03                  | 0.4, 0.5, 0.08      |
| fewer than 8 bits            | 0.54, 0.66, 0.15                 | 0.65, 0.9, 0.21     |
| router, added to a row above | 0.26, 0.62, 0.04                 | 0.4, 0.9, 0.1       |

Weights and tokens that are sent in FP8 are cast again for products, so both roundings add up. Rounding can change
which expert a router chooses for a token, if two experts have nearly equal scores. That changes the weights of the
expert that gets the token. An expert with few tokens is then far off. So the limits of a router are added to those of
the case's other row (`RankDifferenceLimits.combine_limits`), unless that is the first row.

A fault in scales, or in a mean that is sent in FP8, may change results far less than rounding does. witnesses.py and
exchanges.py find such faults.
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
from fp8bench.nn.parallel.division import RankModelPart
from fp8bench.nn.training_step import make_adamw, skip_compiler_wrappers
from fp8bench.protocols import Phases, Precision, SilentPhases

_ADAMW_LEARNING_RATE = 3e-4
# The rate of plain SGD, for steps that are compared with those of one rank. AdamW would cancel the scale of
# gradients, and would move a weight whose gradient should be zero as much as any other.
_SGD_LEARNING_RATE = 0.05


class WeightUpdate(NamedTuple):
    """Compares the change of a weight in training on several ranks with its change on one rank. `distance` is the
    squared distance between the two changes. `reference` is the squared change on one rank. `product` is the scalar
    product of the two changes.
    """

    distance: float
    reference: float
    product: float

    @property
    def error(self) -> float:
        return (self.distance / self.reference) ** 0.5 if self.reference else math.inf if self.distance else 0.0

    @property
    def gain(self) -> float:
        """Returns the change of a weight on several ranks as a multiple of its change on one rank (a projection). The
        multiple is about 1 if the changes differ only by noise, and 2 if gradients are added twice.
        """
        return self.product / self.reference if self.reference else 1.0


@dataclass(frozen=True)
class RankDifference:
    """How training on several ranks differs from training on one rank: the largest difference of a loss, the largest
    difference of a weight, and how each weight changed (`WeightUpdate`).
    """

    loss: float
    weight: float
    update_by_weight: Mapping[str, WeightUpdate]

    @property
    def update(self) -> WeightUpdate:
        return WeightUpdate(*map(sum, zip(*self.update_by_weight.values(), strict=True)))

    @property
    def furthest_update(self) -> tuple[str, WeightUpdate]:
        return max(self.update_by_weight.items(), key=lambda named: named[1].error)

    def figures(self) -> dict[str, float]:
        return {
            "loss_gap": self.loss,
            "weight_gap": self.weight,
            "update_error": self.update.error,
            "furthest_error": self.furthest_update[1].error,
            "gain_error": abs(self.update.gain - 1),
        }


class RankDifferenceLimits(NamedTuple):
    """The largest differences between training on several ranks and on one rank that rounding can explain. `update`
    limits the relative distance of all weights' changes, and `max_weight_distance` that of a single weight's change.
    `gain` limits how far `WeightUpdate.gain` is from 1.
    """

    update: float
    max_weight_distance: float
    gain: float

    def combine_limits(self, further_limits: RankDifferenceLimits) -> RankDifferenceLimits:
        """Returns the limits for the sum of two independent roundings. The new limit of a distance is the root of the
        summed squares, and that of the gain is the sum.
        """
        combined_limits = (
            math.hypot(self.update, further_limits.update),
            math.hypot(self.max_weight_distance, further_limits.max_weight_distance),
        )
        return RankDifferenceLimits(*combined_limits, self.gain + further_limits.gain)

    def describe_exceeded_limit(self, difference: RankDifference) -> str:
        name, furthest_update_of_weight = difference.furthest_update
        update = difference.update
        figures = (
            ("the relative distance of all weights' changes from those on one rank", update.error, self.update),
            (
                f"the relative distance of {name}'s change from that on one rank",
                furthest_update_of_weight.error,
                self.max_weight_distance,
            ),
            (f"the distance of all weights' gain {update.gain:.3g} from 1", abs(update.gain - 1), self.gain),
        )
        sentences = []
        for description, value, limit in figures:
            if not value <= limit:  # unlike `value > limit`, this is True for NaN
                sentences.append(f"{description} is {value:.3g}, but rounding explains at most {limit:g}")
        return "; ".join(sentences)


_LIMITS_FP32 = RankDifferenceLimits(1e-3, 1e-3, 1e-3)
_LIMITS_16_BITS = RankDifferenceLimits(0.03, 0.04, 0.01)
_LIMITS_BELOW_8_BITS = RankDifferenceLimits(0.65, 0.9, 0.21)
_LIMITS_FP8_GRADIENTS = RankDifferenceLimits(0.12, 0.15, 0.01)
_LIMITS_FP8_BLOCKS = RankDifferenceLimits(0.2, 0.25, 0.02)
_LIMITS_FP8_TOKENS = _LIMITS_FP8_BLOCKS
_LIMITS_FP8_TENSORS = RankDifferenceLimits(0.4, 0.5, 0.08)
_LIMITS_ROUTER = RankDifferenceLimits(0.4, 0.9, 0.1)
_FP8_BITS = 8


def find_difference_limits(precisions: Iterable[Precision], wire: str, load: str = "") -> RankDifferenceLimits:
    """Returns the differences from training on one rank that rounding can explain in a case. They depend on the
    precisions of the products, the format `wire` of exchanges ('' without that option), and the `load` of the experts.
    """
    # `max` compares limits by their first field, `update`.
    products = max(map(_find_product_limits, precisions))
    if wire == "fp8":
        limits = products.combine_limits(_LIMITS_FP8_TOKENS)
    elif wire in ("", "fp32", "stream", "torchao_fp32"):
        limits = max(products, _LIMITS_FP32)
    else:
        limits = max(products, _LIMITS_16_BITS if wire == "bf16" else _LIMITS_FP8_GRADIENTS)
    return limits.combine_limits(_LIMITS_ROUTER) if load == "router" and limits > _LIMITS_FP32 else limits


def _find_product_limits(precision: Precision) -> RankDifferenceLimits:
    recipe = getattr(precision, "recipe", None)
    if recipe is None:
        return _LIMITS_FP32 if precision.name == "fp32" else _LIMITS_16_BITS
    if min(treatment.fmt.bits for treatment in recipe.treatments) < _FP8_BITS:
        return _LIMITS_BELOW_8_BITS
    return _LIMITS_FP8_TENSORS if recipe.has_tensor_scales_only else _LIMITS_FP8_BLOCKS


class RanksDisagree(RuntimeError):
    """Raised if training on several ranks gives another result than training on one rank."""


@dataclass
class ParallelState:
    """The state of one rank's training: its part of the model, the optimizer, and the whole text, which every rank
    reads.
    """

    model: RankModelPart
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


def make_parallel_state(
    model: RankModelPart, loader: TokenLoader, facts: DeviceFacts, plain: bool = False
) -> ParallelState:
    # These parameters share memory with the model's weights, so the optimizer updates the model.
    parameters = [torch.nn.Parameter(weight) for weight in model.weights]
    optimizer = (
        skip_compiler_wrappers(torch.optim.SGD)(parameters, lr=_SGD_LEARNING_RATE)
        if plain
        else make_adamw(parameters, _ADAMW_LEARNING_RATE, facts)
    )
    return ParallelState(model, optimizer, parameters, loader)


def compare_with_one_rank(parallel: ParallelState, single: ParallelState, steps: int) -> RankDifference:
    """Trains for `steps` steps on several ranks and on one rank, and returns the differences. Also checks scales and
    exchanges, because wrong ones may change results less than rounding does. Raises RanksDisagree if a scale or an
    exchange is wrong.
    """
    # 1. Train on several ranks and on one rank, and record scales and exchanges.
    witnesses = parallel.model.witnesses()
    # Copy the weights, because steps update them in place.
    initial_weights = {name: weight.clone() for name, weight in single.model.gather_weights().items()}
    phase = SilentPhases()
    loss_differences = []
    for _ in range(steps):
        loss = parallel.model.average_loss(parallel.train_step(phase))
        loss_differences.append((loss.double() - single.train_step(phase).double()).abs().max())

    # 2. Check the recorded scales and exchanges. Continue after a fault, because every rank must take part in all
    # checks.
    faults_of_witnesses = [witness.find_fault() for witness in witnesses]
    for fault in filter(None, faults_of_witnesses):
        raise RanksDisagree(fault)

    # 3. Compare the final weights, and how much each has changed since the start.
    gathered_weights = parallel.model.gather_weights()
    reference_weights = single.model.gather_weights()
    distances = []
    updates_by_name = {}
    for name, tensor in initial_weights.items():
        weight = gathered_weights[name].double()
        reference_weight = reference_weights[name].double()
        distances.append((weight - reference_weight).abs().max())
        weight_update = weight - tensor
        reference_weight_change = reference_weight - tensor
        weight_update_sums = (
            (weight_update - reference_weight_change).square().sum(),
            reference_weight_change.square().sum(),
            (weight_update * reference_weight_change).sum(),
        )
        updates_by_name[name] = WeightUpdate(*map(float, weight_update_sums))
    return RankDifference(float(max(loss_differences)), float(max(distances)), updates_by_name)
