"""Illnesses to plant in a training, each what the rule of the same name has to find.

A plant is called before every step from the onset on. Only this benchmark reaches into a trainer; fp8bench has no
interface for it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.trainer import Trainer
from fp8bench.nn.convolution import BatchNorm
from fp8bench.nn.tensor_scales import DelayedScale, ScalePair
from fp8bench.protocols import Role

# Where most are planted: a layer, the norm before it, and attention's input projection.
LAYER, NORM, QKV = "blocks.0.mlp.up", "blocks.0.norm_mlp.weight", "blocks.0.attn.qkv.weight"
CURRENT, DELAYED, LONG = "fp8", "fp8-delayed:history=16", "fp8-delayed"


class Patient:
    """What a plant may do to an arm; `steps` counts steps since the onset."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer
        self.model: nn.Module = self.trainer._model
        self.steps = 0
        self.notes: dict[str, Any] = {}

    def weight(self, name: str = f"{LAYER}.weight") -> Tensor:
        return self.model.get_parameter(name).detach()

    def gain(self, factor: float) -> None:
        """Multiply the gain before the layer."""
        self.weight(NORM).mul_(factor)

    def hook(self, change: Callable[[Tensor], Tensor]) -> Any:
        """Change gradients of the layer's weights from now on."""
        return self.model.get_parameter(f"{LAYER}.weight").register_hook(change)  # type: ignore[no-untyped-call]

    def rate(self, factor: float) -> None:
        self.trainer._rate *= factor

    def freeze(self, scale: float | None = None) -> None:
        """Fix the scale of the layer's input from now on, at its present value or another."""
        kept = self.trainer._arithmetics[LAYER].scales[Role.INPUT]
        assert isinstance(kept, DelayedScale)
        if kept.scale is None:
            return
        value = kept.scale.clone() if scale is None else torch.full_like(kept.scale, scale)
        pair = ScalePair(value, value.reciprocal())

        def fixed(x: Tensor, again: bool = False, amax: Tensor | None = None) -> ScalePair:
            kept._used = pair
            return pair

        kept.next = fixed  # type: ignore[method-assign]


Plant = Callable[[Patient], object]


def once(plant: Plant) -> Plant:
    return lambda patient: plant(patient) if patient.steps == 0 else None


def both(*plants: Plant) -> Plant:
    return lambda patient: [plant(patient) for plant in plants]


@dataclass(frozen=True)
class Illness:
    """What is planted from step `onset` on in an arm of that precision, and the rule that has to find it. `beside`: the
    reference trains in the same seed."""

    words: str
    rule: str
    plant: Plant
    precision: str = CURRENT
    arch: str = "gpt"
    onset: int = 100
    steps: int = 180
    beside: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


class Garbage:
    """Windows of one repeated token with random targets."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def drawn(self, *numbers: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self._inner.drawn(*numbers)
        return torch.zeros_like(tokens), torch.randint_like(targets, 128)


def bad_batch(patient: Patient) -> None:
    if patient.steps == 0:
        patient.notes["windows"] = patient.trainer._windows
        garbage = Garbage(patient.trainer._windows(0))
        patient.trainer._windows = lambda step: garbage
    else:
        patient.trainer._windows = patient.notes["windows"]


def exploding(patient: Patient) -> None:
    if patient.steps == 0:
        patient.notes["hook"] = patient.hook(lambda gradient: 10_000 * gradient)
    elif patient.steps == 1:
        patient.notes["hook"].remove()


def lost_updates(patient: Patient) -> None:
    """Before every step the weights are those at the onset."""
    weights = patient.notes.setdefault("weights", [weight.detach().clone() for weight in patient.model.parameters()])
    torch._foreach_copy_(list(patient.model.parameters()), weights)


def fading_gradients(patient: Patient) -> None:
    """Gradients shrink by a third every step on their way back; the trainer undoes the scale."""
    patient.trainer._loss_scale.scale *= 0.67


def shrinking_embedding(patient: Patient) -> None:
    """Rows move towards their mean by a twentieth every step."""
    rows = patient.weight("embedding")
    rows.lerp_(rows.mean(0, keepdim=True), 0.05)


def stuck_batch_norm(patient: Patient) -> None:
    """Running statistics stay as at the onset, while inputs become larger."""
    kept = patient.notes.setdefault("kept", [buffer.clone() for buffer in patient.model.buffers()])
    for buffer, value in zip(patient.model.buffers(), kept, strict=True):
        buffer.copy_(value)
    for module in patient.model.modules():
        if isinstance(module, BatchNorm):
            module.bias.add_(0.05)


def stale_casts(patient: Patient) -> None:
    """The layer is multiplied by the first cast of its weights."""
    arithmetic = patient.trainer._arithmetics[LAYER]
    cast = arithmetic.cast_both
    kept: list[Any] = []

    def stale(tensor: Tensor, role: Role, amax: Tensor | None = None) -> Any:
        if role is not Role.WEIGHT:
            return cast(tensor, role, amax)
        if not kept:
            kept.append(copy.deepcopy(cast(tensor, role, amax)))
        return kept[0]

    arithmetic.cast_both = stale


_SKIPPING = {"on_nan": "skip"}
_ILLNESSES = (
    Illness("a batch of garbage", "gradient-norm-spike", bad_batch),
    Illness(
        "30 times the rate, for three steps", "update-norm-burst",
        lambda patient: patient.rate({0: 30, 3: 1 / 30}.get(patient.steps, 1)),
    ),
    Illness("updates that are lost from the first step on", "plateau", lost_updates, onset=0, steps=400),
    Illness(
        "an infinite weight", "not-finite", lambda patient: patient.weight()[0, 0].fill_(math.inf), settings=_SKIPPING,
    ),
    Illness(
        "a twentieth of the rate", "loss-gap", once(lambda patient: patient.rate(0.05)), onset=30, steps=300,
        beside=True,
    ),
    Illness("gains 40 times as large", "scale-falls", once(lambda patient: patient.gain(40))),
    Illness("gains a 40th", "scale-rises", once(lambda patient: patient.gain(1 / 40))),
    Illness(
        "gains that swing", "scale-never-settles",  # by 16, for ten steps each
        lambda patient: patient.gain({0: 16, 10: 1 / 16}.get(patient.steps % 20, 1)), steps=260,
    ),
    Illness("a scale of 0", "scale-at-edge", once(lambda patient: patient.freeze(0.0)), DELAYED),
    Illness(
        "a scale frozen while its tensor grows 3% a step", "lag",
        both(once(Patient.freeze), lambda patient: patient.gain(1.03)), DELAYED,
    ),
    Illness(
        "a scale frozen, then a tensor 64 times as large", "overflow-burst",
        once(both(Patient.freeze, lambda patient: patient.gain(64))), DELAYED,
    ),
    Illness("gradients that fade, and a history too long", "underflow-creep", fading_gradients, LONG, steps=200),
    Illness(
        "a gain that is no number", "tensor-not-finite",
        once(lambda patient: patient.weight(NORM)[0].fill_(math.nan)), settings=_SKIPPING,
    ),
    Illness("embeddings drawn together", "embedding-collapse", shrinking_embedding),
    Illness(
        "queries and keys that grow 5% a step", "attention-score-overflow",
        lambda patient: patient.weight(QKV).mul_(1.05), steps=260,
    ),
    Illness("batch norms of momentum 0", "batch-norm-drift", stuck_batch_norm, arch="cnn"),
    Illness(
        "a layer that no gradient reaches", "layer-stands-still",
        once(lambda patient: patient.hook(torch.zeros_like)),
    ),
    Illness("casts of weights that are kept", "weights-behind", once(stale_casts)),
    Illness(
        "gradients of a layer 10,000 times as large, once, among batches of 64 tokens", "gradient-norm-spike",
        exploding, onset=150, steps=160, settings={"batch": 1},
    ),
)  # fmt: skip
_IN_NVFP4 = ("scale-falls", "tensor-not-finite", "attention-score-overflow")
ILLNESSES = (
    *_ILLNESSES,
    *(
        replace(illness, words=f"{illness.words}, in nvfp4", precision="nvfp4")
        for illness in _ILLNESSES
        if illness.rule in _IN_NVFP4
    ),
)
