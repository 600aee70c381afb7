"""Weights on disk: checkpoints, and initial weights of trainings.

A checkpoint has the state of each arm in a separate file, and a head that identifies the training. A training may begin
with a checkpoint's weights, with those of a state dict file, and with stored scales.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn

from fp8bench.errors import StoreError, UsageError
from fp8bench.features.train.lab.step_optimizer import seed_of
from fp8bench.features.train.request import TrainerSettings, file_of
from fp8bench.features.train.values import Arm, ArmRole, SeedTask, State
from fp8bench.files import MEMORY_BYTES, PARTIAL, keeping, open_file, read_file, seal, unseal, write_whole
from fp8bench.model import StaticScales
from fp8bench.protocols import Arithmetic, ScaleBook
from fp8bench.report.words.naming import join_words

_HEAD = "checkpoint.json"
_VERSION = 1


class _DigestingFile:
    """A file with a digest of its content, and the latest disk error, which torch's writer hides."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self._file.flush()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


def write(folder: str, task: SeedTask, memories: Mapping[str, State], rank: int) -> None:
    target = Path(folder)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        # The user can make room on a full disk, as the error asks, and resume the training.
        with keeping(f"the checkpoint {target}", "Make room, and resume."):
            partial.mkdir(parents=True)
            files = {}
            for number, (name, memory) in enumerate(memories.items()):
                files[name] = _write_arm(partial / f"{number}.pt", memory)
            head = {"version": _VERSION, "task": _task_digest(task), "rank": rank, "arms": files}
            write_whole(partial / _HEAD, json.dumps(seal(head), indent=1))
            # The folder gets its name once all of it is on the disk: a kill leaves the old one, or none.
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_arm(path: Path, memory: State) -> dict[str, str]:
    with path.open("xb") as file:
        digesting = _DigestingFile(file)
        try:
            torch.save(memory, cast(IO[bytes], digesting))
        except RuntimeError:
            raise digesting.failure or RuntimeError(f"torch cannot write {path}") from None
        file.flush()
        os.fsync(file.fileno())
    return {"file": path.name, "sha256": digesting.digest}


def read(folder: str, task: SeedTask, rank: int) -> dict[str, State]:
    """Returns the state of every stored arm. Raises StoreError if one is missing or damaged."""
    place = Path(folder)
    head = _head(place)
    if head.get("version") != _VERSION or head.get("task") != _task_digest(task):
        raise StoreError(f"the checkpoint {place} is from another training. Resume with the settings it began with.")
    if (writer := head.get("rank", rank)) != rank:  # only this number distinguishes rows of different ranks
        raise StoreError(f"the checkpoint {place} is of rank {writer}, not of rank {rank}. Move it back to its folder.")
    return {name: _load_arm(place / file["file"], file["sha256"]) for name, file in head["arms"].items()}


def weights(folder: str, arm: str) -> list[Tensor]:
    """Returns one arm's weights, in the order of its model's parameters, from any training. Raises StoreError."""
    place = Path(folder)
    files = _head(place)["arms"]
    if arm not in files:
        raise StoreError(f"the checkpoint {folder} has no arm {arm!r}. It has {', '.join(files)}.")
    tensors: list[Tensor] = _load_arm(place / files[arm]["file"], files[arm]["sha256"])["optimizer"]["weights"]
    return tensors


def _head(place: Path) -> State:
    try:
        return unseal(json.loads(read_file(place / _HEAD)))
    except (OSError, ValueError) as error:
        raise StoreError(f"{place} holds no complete checkpoint ({error}). Choose another.") from None


def _load_arm(path: Path, digest: str) -> State:
    """Loads only tensors and plain values; code in the file is never run."""
    try:
        with open_file(path, most=MEMORY_BYTES) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise StoreError(f"the checkpoint's file {path} is damaged: its SHA-256 differs from the recorded one.")
            file.seek(0)
            memory: State = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise StoreError(f"the checkpoint's file {path} cannot be read ({error.strerror}).") from None
    except pickle.UnpicklingError:
        raise StoreError(f"the checkpoint's file {path} has more than tensors and plain values.") from None
    return memory


def _task_digest(task: SeedTask) -> str:
    """Returns a digest of what makes a checkpoint usable: seed, arms, settings, steps, text and number of ranks."""
    parts = repr((task.seed, task.arms, task.settings, task.steps, task.text.identity, task.facts.ranks))
    return hashlib.sha256(parts.encode()).hexdigest()


def finite(memory: Any) -> bool:
    if isinstance(memory, Tensor):
        return not memory.is_floating_point() or bool(memory.to(torch.float32).isfinite().all())
    if isinstance(memory, dict):
        return all(map(finite, memory.values()))
    return all(map(finite, memory)) if isinstance(memory, list) else True


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
        # Each weight moves randomly up or down by one unit.
        up = torch.rand(parameter.shape, generator=generator) < 0.5
        parameter.copy_(torch.nextafter(parameter, torch.where(up, math.inf, -math.inf).to(parameter)))


@torch.no_grad()
def _take_checkpoint(model: nn.Module, folder: str, arm: str) -> None:
    stored, parameters = weights(folder, arm), list(model.parameters())
    if [weight.shape for weight in stored] != [parameter.shape for parameter in parameters]:
        raise UsageError(
            f"--start: the weights in {folder} are of another model. Choose that one's --model and --arch."
        )
    for parameter, weight in zip(parameters, stored, strict=True):
        parameter.copy_(weight)


def frozen_in(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters() if not parameter.requires_grad]


def take_file(model: nn.Module, start: str, make: str = "") -> None:
    """Loads the state dict of 'FILE::DIGEST'. Raises UsageError if it does not match the model that `make` makes."""
    name, _, digest = start.rpartition("::")
    path = Path(name)
    with open_file(path, most=MEMORY_BYTES) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise UsageError(f"--start {path} has changed since the training began. Restore the file.")
    stored = _load_file(path)
    tensors = model.state_dict(keep_vars=True)
    # A tied parameter is listed once among the parameters, but under both names in the file.
    missing = [text for text, _ in model.named_parameters() if text not in stored]
    unknown = [text for text in stored if text not in tensors]
    if missing or unknown:
        reasons = [f"lacks {join_words(missing, _SHOWN)}"] if missing else []
        reasons += [f"has {join_words(unknown, _SHOWN)}, which this model lacks"] if unknown else []
        advice = f"Give one of the model that {make} makes" if make else "Choose that one's --model and --arch"
        raise UsageError(f"--start {path} is of another model: it {', and '.join(reasons)}. {advice}.")
    for text, tensor in stored.items():
        if tensor.shape != tensors[text].shape:
            raise UsageError(
                f"--start {path}: {text} has shape {list(tensor.shape)}, and in the model {list(tensors[text].shape)}."
            )
        if tensor.is_floating_point() and not tensor.float().isfinite().all():
            raise UsageError(f"--start {path}: {text} has values that are not finite. Give weights without them.")
    with torch.no_grad():
        for text, tensor in stored.items():
            tensors[text].copy_(tensor)
    for text, tensor in stored.items():
        if not torch.equal(tensors[text], tensor.to(tensors[text])):
            raise UsageError(
                f"--start {path}: {text} is the same tensor as another one in this model (its weights are tied), and "
                "not in the file. Give weights of a tied model."
            )


def _load_file(path: Path) -> dict[str, Tensor]:
    """Loads only tensors; code in the file is never run."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError:
        raise UsageError(f"--start {path} needs the package safetensors, which is not installed.") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError, KeyError):
        raise UsageError(
            f"--start {path} is not a state dict: torch.load, with weights_only, cannot read it. Give what torch.save "
            "made of model.state_dict(), or a .safetensors."
        ) from None
    for name in _WITHIN:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if (
        not isinstance(content, Mapping)
        or not content
        or not all(isinstance(tensor, Tensor) for tensor in content.values())
    ):
        raise UsageError(f"--start {path} is not a state dict: expected tensors by name. Save model.state_dict().")
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in content):
            content = {name.removeprefix(prefix): tensor for name, tensor in content.items()}
    return dict(content)


def apply_scales(
    arithmetic: Arithmetic, settings: TrainerSettings, mode: str, name: str, books: list[ScaleBook]
) -> Arithmetic:
    """Gives a layer's arithmetic scales from data, if settings ask for them, and adds their book to `books`. Raises
    UsageError for a layer without stored scales."""
    bound = None if settings.saturation_bound is None else settings.saturation_bound / 100
    if not settings.scales and settings.refresh_scales is None and bound is None:
        return arithmetic
    rule = StaticScales(0, settings.refresh_scales or 0, bound, source="stored", known=settings.scales)
    scales = rule.known_for(mode)
    book = ScaleBook(rule, scales)
    by_book = arithmetic.scaled_by(book, name)
    if by_book is not arithmetic:
        books.append(book)
    if settings.scales and by_book is not arithmetic and not any(layer == name for layer, _ in scales):
        raise UsageError(
            f"--scales-from has scales for {join_words((layer for layer, _ in scales), _SHOWN)}, and none "
            f"for {name}, a layer of this model. Choose a training or run of the same model."
        )
    return by_book
