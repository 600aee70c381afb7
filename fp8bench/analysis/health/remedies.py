"""What may help a training that is not well, and what an arm is with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

from fp8bench.model import Scalar
from fp8bench.model.training import TrainerSettings
from fp8bench.registry import precisions


class Remedy(StrEnum):
    """A change of one thing, in the words in which it is told."""

    RAISE_MARGIN = "raise the margin of delayed scales by an octave"
    SHORTER_HISTORY = "shorter history or interval of delayed scales"
    E5M2_GRADIENTS = "E5M2 for gradients"
    LAYER_IN_BF16 = "this layer in bf16"
    DYNAMIC_LOSS_SCALE = "a dynamic loss scale"
    CLIP_HARDER = "clip gradients harder"
    LOWER_RATE = "a lower learning rate"
    HIGHER_MASTER = "master weights, gradients and optimizer states in fp32"
    LOOK_AT_DATA = "look at the batches of these steps"
    LOOK_AT_LAYER = "look at how this layer is made: its gain, its momentum, whether anything reaches it"


_CLIP_SHARE = 0.25
_RATE_SHARE = 0.5
_HISTORY_SHARE = 16
_HIGH = ("fp32", "bf16", "tf32")


def helped(precision: str, settings: TrainerSettings, remedy: Remedy, layer: str = "") -> tuple[str, TrainerSettings]:
    """Precision and settings of an arm with a remedy; as they were where it changes nothing, or people have to look."""
    change: dict[str, Any] = {}
    match remedy:
        case Remedy.LAYER_IN_BF16 if layer and precision.partition(":")[0] not in _HIGH:
            change["precision_map"] = (*settings.precision_map, (layer, "bf16"))
        case Remedy.DYNAMIC_LOSS_SCALE:
            change["loss_scale"] = "dynamic"
        case Remedy.CLIP_HARDER:
            change["clip"] = settings.clip * _CLIP_SHARE or 1.0
        case Remedy.LOWER_RATE:
            change["rate"] = settings.rate * _RATE_SHARE
        case Remedy.HIGHER_MASTER:
            change.update(master="fp32", optimizer_states="fp32", gradients="fp32")
        case _:
            pass
    return _helped_precision(precision, remedy), replace(settings, **change)


def _helped_precision(mode: str, remedy: Remedy) -> str:
    """The word for the precision with other options; itself where it has none that help."""
    chosen: Mapping[str, Scalar] = precisions.get(mode).chosen
    name = mode.partition(":")[0]
    change: dict[str, Scalar] = {}
    if remedy is Remedy.RAISE_MARGIN and "margin" in chosen:
        change["margin"] = int(chosen["margin"]) + 1
    if remedy is Remedy.SHORTER_HISTORY and "history" in chosen:
        change.update(history=max(1, int(chosen["history"]) // _HISTORY_SHARE), interval=1)
    if remedy is Remedy.E5M2_GRADIENTS and chosen.get("formats") == "e4m3":
        change["formats"] = "hybrid"
    if remedy is Remedy.E5M2_GRADIENTS and name == "fp8-e4m3":
        return "fp8"
    if not change:
        return mode
    return precisions.canonical(":".join([name, *(f"{key}={value}" for key, value in {**chosen, **change}.items())]))
