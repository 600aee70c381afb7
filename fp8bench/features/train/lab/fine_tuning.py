"""What a training may begin with: weights from a checkpoint or from a file with a state dict, and stored scales."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.checkpoint import weights
from fp8bench.features.train.lab.step_optimizer import seed_of
from fp8bench.features.train.request import TrainerSettings, file_of
from fp8bench.features.train.values import Arm, ArmRole
from fp8bench.files import MEMORY_BYTES, open_file
from fp8bench.model import StaticScales
from fp8bench.protocols import Arithmetic, ScaleBook
from fp8bench.report.words.naming import join_words

# Keys under which trainers store a state dict, and what wrappers prepend to its names.
_WITHIN, _PREFIXES = ("state_dict", "model_state_dict", "model"), ("module.", "_orig_mod.")
_SHOWN = 3


def apply_start(model: nn.Module, settings: TrainerSettings, arm: Arm, seed: int) -> None:
    if file_of(settings.start) is not None:
        take_file(model, settings.start, settings.make)
    elif settings.start:
        _take_checkpoint(model, *settings.start.rpartition("::")[::2])
    if arm.role is ArmRole.CHAOS:
        _move_by_an_ulp(model, seed_of("ulp", seed))


@torch.no_grad()
def _move_by_an_ulp(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        up = torch.rand(parameter.shape, generator=generator) < 0.5
        parameter.copy_(torch.nextafter(parameter, torch.where(up, math.inf, -math.inf).to(parameter)))


@torch.no_grad()
def _take_checkpoint(model: nn.Module, folder: str, arm: str) -> None:
    kept, own = weights(folder, arm), list(model.parameters())
    if [weight.shape for weight in kept] != [parameter.shape for parameter in own]:
        raise UsageError(
            f"--start: the weights in {folder} are of another model. Choose that one's --model and --arch."
        )
    for parameter, weight in zip(own, kept, strict=True):
        parameter.copy_(weight)


def frozen_in(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters() if not parameter.requires_grad]


def take_file(model: nn.Module, start: str, make: str = "") -> None:
    """Load the state dict of 'FILE::DIGEST'. Raises UsageError where it is not of the model that `make` makes."""
    name, _, digest = start.rpartition("::")
    path = Path(name)
    with open_file(path, most=MEMORY_BYTES) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise UsageError(f"--start {path} has changed since the training began. Restore the file.")
    kept = _loaded(path)
    own = model.state_dict(keep_vars=True)
    missing = [text for text, _ in model.named_parameters() if text not in kept]
    others = [text for text in kept if text not in own]
    if missing or others:
        reasons = [f"lacks {join_words(missing, _SHOWN)}"] if missing else []
        reasons += [f"has {join_words(others, _SHOWN)}, which this model lacks"] if others else []
        advice = f"Give one of the model that {make} makes" if make else "Choose that one's --model and --arch"
        raise UsageError(f"--start {path} is of another model: it {', and '.join(reasons)}. {advice}.")
    for text, tensor in kept.items():
        if tensor.shape != own[text].shape:
            raise UsageError(
                f"--start {path}: {text} has shape {list(tensor.shape)}, and in the model {list(own[text].shape)}."
            )
        if tensor.is_floating_point() and not tensor.float().isfinite().all():
            raise UsageError(f"--start {path}: {text} has values that are not finite. Give weights without them.")
    with torch.no_grad():
        for text, tensor in kept.items():
            own[text].copy_(tensor)
    for text, tensor in kept.items():
        if not torch.equal(own[text], tensor.to(own[text])):
            raise UsageError(
                f"--start {path}: {text} is the same tensor as another one in this model (its weights are tied), and "
                "not in the file. Give weights of a tied model."
            )


def _loaded(path: Path) -> dict[str, Tensor]:
    """Loads tensors only: nothing in the file is run."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            kept: Any = load_file(path)
        else:
            kept = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError:
        raise UsageError(f"--start {path} needs the package safetensors, which is not installed.") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError, KeyError):
        raise UsageError(
            f"--start {path} is no state dict: torch.load, with weights_only, cannot read it. Give what torch.save "
            "made of model.state_dict(), or a .safetensors."
        ) from None
    for name in _WITHIN:
        if isinstance(kept, Mapping) and isinstance(kept.get(name), Mapping):
            kept = kept[name]
    if not isinstance(kept, Mapping) or not kept or not all(isinstance(tensor, Tensor) for tensor in kept.values()):
        raise UsageError(f"--start {path} is no state dict: expected tensors by name. Save model.state_dict().")
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in kept):
            kept = {name.removeprefix(prefix): tensor for name, tensor in kept.items()}
    return dict(kept)


def scaled(arithmetic: Arithmetic, settings: TrainerSettings, mode: str, name: str) -> Arithmetic:
    """Give a layer's arithmetic its stored scales, if settings have any. Raises UsageError for a layer without."""
    if not settings.scales:
        return arithmetic
    rule = StaticScales(0, source="stored", known=settings.scales)
    known = rule.known_for(mode)
    by_book = arithmetic.scaled_by(ScaleBook(rule, known), name)
    if by_book is not arithmetic and not any(layer == name for layer, _ in known):
        raise UsageError(
            f"--scales-from has scales for {join_words(list(dict.fromkeys(layer for layer, _ in known)), _SHOWN)}, and "
            f"none for {name}, a layer of this model. Choose a training or run of the same model."
        )
    return by_book
