"""Illnesses to plant in a training: each does to it what the rule of its name has to find.

A plant is called before every step from the onset on. Only the benchmark reaches into a trainer: nothing of fp8bench
has a door for it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.trainer import Trainer
from fp8bench.nn.convolution import BatchNorm
from fp8bench.nn.tensor_scales import DelayedScale, ScalePair
from fp8bench.protocols import Role

# Where most are planted: a layer, the norm before it, and attention's input product.
LAYER, NORM, QKV = "blocks.0.mlp.up", "blocks.0.norm_mlp.weight", "blocks.0.attn.qkv.weight"
CURRENT, DELAYED, LONG = "fp8", "fp8-delayed:history=16", "fp8-delayed"


class Patient:
    """What a plant may do to an arm; `steps` counts those since the onset."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer
        self.model: nn.Module = self.trainer._model
        self.steps = 0
        self.notes: dict[str, Any] = {}

    def weight(self, name: str) -> Tensor:
        return self.model.get_parameter(name).detach()

    def delayed(self, role: Role) -> DelayedScale:
        scale = self.trainer._arithmetics[LAYER].scales[role]
        assert isinstance(scale, DelayedScale)
        return scale

    def freeze(self, role: Role, scale: float | None = None) -> None:
        """The scale of the layer's tensor stays as it is from now on, or becomes another."""
        kept = self.delayed(role)
        if kept.scale is None:
            return
        value = kept.scale.clone() if scale is None else torch.full_like(kept.scale, scale)
        pair = ScalePair(value, value.reciprocal())

        def stands(x: Tensor, again: bool = False, amax: Tensor | None = None) -> ScalePair:
            kept._used = pair
            return pair

        kept.next = stands  # type: ignore[method-assign]

    def rates(self, factor: float) -> None:
        self.trainer._rate *= factor


class Garbage:
    """Windows of random tokens."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def drawn(self, *numbers: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self._inner.drawn(*numbers)
        return torch.zeros_like(tokens), torch.randint_like(targets, 128)


@dataclass(frozen=True)
class Illness:
    """What is planted from step `onset` on in an arm of that precision, and the rule that has to find it.

    `beside`: the reference trains beside it, and the same under another seed.
    """

    words: str
    rule: str
    plant: Callable[[Patient], None]
    precision: str = CURRENT
    arch: str = "gpt"
    onset: int = 100
    steps: int = 180
    beside: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def bad_batch(patient: Patient) -> None:
    """One batch of a single token whose targets are random."""
    if patient.steps == 0:
        patient.notes["windows"] = patient.trainer._windows
        patient.trainer._windows = Garbage(patient.trainer._windows)
    else:
        patient.trainer._windows = patient.notes["windows"]


def exploding(patient: Patient) -> None:
    """The gradient of a layer's weights is 10,000 times as large in one step."""
    if patient.steps == 0:
        weight = patient.model.get_parameter(f"{LAYER}.weight")
        patient.notes["hook"] = weight.register_hook(lambda gradient: 10_000 * gradient)  # type: ignore[no-untyped-call]
    elif patient.steps == 1:
        patient.notes["hook"].remove()


def rate_spike(patient: Patient) -> None:
    """Thirty times the rate for three steps."""
    if patient.steps in (0, 3):
        patient.rates(30 if patient.steps == 0 else 1 / 30)


def lost_updates(patient: Patient) -> None:
    """The weights are before every step what they were at the onset."""
    weights = patient.notes.setdefault("weights", [one.detach().clone() for one in patient.model.parameters()])
    with torch.no_grad():
        torch._foreach_copy_(list(patient.model.parameters()), weights)


def infinite_weight(patient: Patient) -> None:
    """One weight of a layer is infinite."""
    patient.weight(f"{LAYER}.weight")[0, 0] = math.inf


def slow_learner(patient: Patient) -> None:
    """A twentieth of the rate from the onset on."""
    if patient.steps == 0:
        patient.rates(0.05)


def louder(factor: float) -> Callable[[Patient], None]:
    """Gains before a layer are multiplied, once."""

    def plant(patient: Patient) -> None:
        if patient.steps == 0:
            patient.weight(NORM).mul_(factor)

    return plant


def swinging(patient: Patient) -> None:
    """Gains before a layer are 16 times as large for ten steps, and as before for ten."""
    if patient.steps % 10 == 0:
        patient.weight(NORM).mul_(16.0 if patient.steps % 20 == 0 else 1 / 16)


def frozen_scale(growth: float) -> Callable[[Patient], None]:
    """A layer's input keeps its scale while its gains grow by a factor a step."""

    def plant(patient: Patient) -> None:
        if patient.steps == 0:
            patient.freeze(Role.INPUT)
        patient.weight(NORM).mul_(growth)

    return plant


def frozen_then_louder(patient: Patient) -> None:
    """The same with gains that are 64 times as large at once."""
    if patient.steps == 0:
        patient.freeze(Role.INPUT)
        patient.weight(NORM).mul_(64.0)


def zero_scale(patient: Patient) -> None:
    """The scale of a layer's input has become 0."""
    if patient.steps == 0:
        patient.freeze(Role.INPUT, 0.0)


def fading_gradients(patient: Patient) -> None:
    """Gradients are smaller by a third every step on their way back; the trainer makes up for it."""
    patient.trainer._loss_scale.scale *= 0.67


def poisoned_gain(patient: Patient) -> None:
    """A gain before a layer is no number, once."""
    if patient.steps == 0:
        patient.weight(NORM)[0] = math.nan


def shrinking_embedding(patient: Patient) -> None:
    """Rows of the embedding come nearer to their mean by a twentieth every step."""
    rows = patient.weight("embedding")
    rows.lerp_(rows.mean(0, keepdim=True), 0.05)


def growing_scores(patient: Patient) -> None:
    """Weights of queries, keys and values grow by a twentieth every step."""
    patient.weight(QKV).mul_(1.05)


def stuck_batch_norm(patient: Patient) -> None:
    """What batch norms keep stays as it was at the onset (a momentum of 0), while their inputs become louder."""
    kept = patient.notes.setdefault("kept", [one.clone() for one in patient.model.buffers()])
    for buffer, value in zip(patient.model.buffers(), kept, strict=True):
        buffer.copy_(value)
    for module in patient.model.modules():
        if isinstance(module, BatchNorm):
            module.bias.add_(0.05)


def unreached(patient: Patient) -> None:
    """No gradient reaches the weights of a layer."""
    if patient.steps == 0:
        patient.model.get_parameter(f"{LAYER}.weight").register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]


def stale_casts(patient: Patient) -> None:
    """A layer is multiplied by its weights as they were cast at the onset."""
    if patient.steps:
        return
    arithmetic = patient.trainer._arithmetics[LAYER]
    cast = arithmetic.cast_both
    kept: list[Any] = []

    def stale(tensor: Tensor, role: Role, amax: Tensor | None = None) -> Any:
        if role is Role.WEIGHT and kept:
            return kept[0]
        found = cast(tensor, role, amax)
        if role is Role.WEIGHT:
            kept.append(copy.deepcopy(found))
        return found

    arithmetic.cast_both = stale


_SKIPPING = {"on_nan": "skip"}
ILLNESSES: tuple[Illness, ...] = (
    Illness("a batch of garbage", "gradient-norm-spike", bad_batch),
    Illness("30 times the rate, for three steps", "update-norm-burst", rate_spike),
    Illness("updates that are lost from the first step on", "plateau", lost_updates, onset=0, steps=400),
    Illness("an infinite weight", "not-finite", infinite_weight, settings=_SKIPPING),
    Illness("a twentieth of the rate", "loss-gap", slow_learner, onset=30, steps=300, beside=True),
    Illness("gains 40 times as large", "scale-falls", louder(40.0)),
    Illness("gains a 40th", "scale-rises", louder(1 / 40)),
    Illness("gains that swing", "scale-never-settles", swinging, steps=260),
    Illness("a scale of 0", "scale-at-edge", zero_scale, DELAYED),
    Illness("a scale frozen while its tensor grows 3% a step", "lag", frozen_scale(1.03), DELAYED),
    Illness("a scale frozen, then a tensor 64 times as large", "overflow-burst", frozen_then_louder, DELAYED),
    Illness("gradients that fade, and a history too long", "underflow-creep", fading_gradients, LONG, steps=200),
    Illness("a gain that is no number", "tensor-not-finite", poisoned_gain, settings=_SKIPPING),
    Illness("embeddings drawn together", "embedding-collapse", shrinking_embedding),
    Illness("queries and keys that grow 5% a step", "attention-score-overflow", growing_scores, steps=260),
    Illness("batch norms of momentum 0", "batch-norm-drift", stuck_batch_norm, arch="cnn"),
    Illness("a layer that no gradient reaches", "layer-stands-still", unreached),
    Illness("casts of weights that are kept", "weights-behind", stale_casts),
    Illness(
        "gradients of a layer 10,000 times as large, once, among batches of 64 tokens",
        "gradient-norm-spike",
        exploding,
        onset=150,
        steps=160,
        settings={"batch": 1},
    ),
    Illness("gains 40 times as large, in nvfp4", "scale-falls", louder(40.0), "nvfp4"),
    Illness("a gain that is no number, in nvfp4", "tensor-not-finite", poisoned_gain, "nvfp4", settings=_SKIPPING),
    Illness(
        "queries and keys that grow 5% a step, in nvfp4", "attention-score-overflow", growing_scores, "nvfp4", steps=260
    ),
)
