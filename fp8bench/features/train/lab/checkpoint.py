"""Reads and writes weights on disk: checkpoints, and initial weights of trainings.

A checkpoint is a folder with a file of state for each arm, and a head file that identifies the training. A training
may begin with the weights of a checkpoint or of a state dict file, and with stored scales.
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
from fp8bench.features.train.lab.step_optimizer import derive_seed
from fp8bench.features.train.request import TrainerSettings, find_start_weights_file
from fp8bench.features.train.values import Arm, ArmRole, SeedTask, State
from fp8bench.files import (
    MEMORY_BYTES,
    PARTIAL_FILE_SUFFIX,
    add_checksum,
    convert_write_errors,
    open_file,
    parse_json,
    read_file,
    remove_checksum,
    write_whole,
)
from fp8bench.model import StaticScales
from fp8bench.protocols import Arithmetic, ScaleBook
from fp8bench.report.words.naming import join_words
from fp8bench.user_code import own_words

_CHECKPOINT_HEADER_FILE = "checkpoint.json"
_CHECKPOINT_VERSION = 1


class _DigestingFile:
    """Wraps the file to which torch.save writes. Computes the SHA-256 of all written bytes. Keeps the latest disk
    error, which torch.save would hide.
    """

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


def write_checkpoint(folder: str, task: SeedTask, states: Mapping[str, State], rank: int) -> None:
    target = Path(folder)
    partial_checkpoint_folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PARTIAL_FILE_SUFFIX}")
    try:
        # If the disk is full, the error asks the user to make room and to resume the training.
        with convert_write_errors(f"the checkpoint {target}", "Make room, and resume."):
            partial_checkpoint_folder.mkdir(parents=True)
            checkpoint_files = {}
            for number, (name, state) in enumerate(states.items()):
                checkpoint_files[name] = _write_arm_state(partial_checkpoint_folder / f"{number}.pt", state)
            checkpoint_header = {"task": _compute_task_digest(task, rank), "arms": checkpoint_files}
            write_whole(
                partial_checkpoint_folder / _CHECKPOINT_HEADER_FILE,
                json.dumps(add_checksum(checkpoint_header), indent=1),
            )
            # The folder gets its final name once all of it is on disk. If the process is killed, the old checkpoint
            # remains, or none.
            shutil.rmtree(target, ignore_errors=True)
            partial_checkpoint_folder.rename(target)
    finally:
        shutil.rmtree(partial_checkpoint_folder, ignore_errors=True)


def _write_arm_state(path: Path, state: State) -> dict[str, str]:
    with path.open("xb") as file:
        hashing_file = _DigestingFile(file)
        try:
            torch.save(state, cast(IO[bytes], hashing_file))
        except RuntimeError:
            raise hashing_file.failure or RuntimeError(f"torch cannot write {path}") from None
        file.flush()
        os.fsync(file.fileno())
    return {"file": path.name, "sha256": hashing_file.digest}


def read_checkpoint(folder: str, task: SeedTask, rank: int) -> dict[str, State]:
    """Returns the state of every arm in a checkpoint. Raises StoreError if a file is missing or damaged."""
    path = Path(folder)
    checkpoint_header = _read_checkpoint_header(path)
    if checkpoint_header["task"] != _compute_task_digest(task, rank):
        raise StoreError(f"the checkpoint {path} is from another training. Resume with the settings it began with.")
    return {
        name: _load_arm_state(path / file["file"], file["sha256"]) for name, file in checkpoint_header["arms"].items()
    }


def read_weights(folder: str, arm: str) -> list[Tensor]:
    """Returns one arm's weights from a checkpoint, in the order of its model's parameters. The checkpoint may come
    from a different training. Raises StoreError.
    """
    path = Path(folder)
    files = _read_checkpoint_header(path)["arms"]
    if arm not in files:
        raise StoreError(f"the checkpoint {folder} has no arm {arm!r}. It has {', '.join(files)}.")
    tensors: list[Tensor] = _load_arm_state(path / files[arm]["file"], files[arm]["sha256"])["optimizer"]["weights"]
    return tensors


def _read_checkpoint_header(path: Path) -> State:
    try:
        return remove_checksum(parse_json(read_file(path / _CHECKPOINT_HEADER_FILE)))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} holds no complete checkpoint ({error}). Choose another.") from None


def _load_arm_state(path: Path, digest: str) -> State:
    """Returns an arm's state. Loads only tensors and plain values, and never runs code in the file."""
    try:
        with open_file(path, most=MEMORY_BYTES) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise StoreError(f"the checkpoint's file {path} is damaged: its SHA-256 differs from the recorded one.")
            file.seek(0)
            state: State = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise StoreError(f"the checkpoint's file {path} cannot be read ({error.strerror}).") from None
    except pickle.UnpicklingError:
        raise StoreError(f"the checkpoint's file {path} has more than tensors and plain values.") from None
    return state


def _compute_task_digest(task: SeedTask, rank: int) -> str:
    """Returns a digest of everything except weights that a checkpoint depends on: the format of its files, the task,
    and the rank.
    """
    ranks = rank, task.facts.ranks
    checkpoint_identity = repr(
        (_CHECKPOINT_VERSION, task.seed, task.arms, task.settings, task.steps, task.text.identity, ranks)
    )
    return hashlib.sha256(checkpoint_identity.encode()).hexdigest()


def is_finite(state: Any) -> bool:
    """Returns whether all tensors in a state are finite."""
    if isinstance(state, Tensor):
        return not state.is_floating_point() or bool(state.to(torch.float32).isfinite().all())
    if isinstance(state, dict):
        return all(map(is_finite, state.values()))
    return all(map(is_finite, state)) if isinstance(state, list) else True


# Keys under which trainers store a state dict.
_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")
# Prefixes that wrappers such as DDP add to the names of a state dict.
_WRAPPER_PREFIXES = ("module.", "_orig_mod.")
_MAX_LISTED_NAMES = 3


def load_initial_weights(model: nn.Module, settings: TrainerSettings, arm: Arm, seed: int) -> None:
    if find_start_weights_file(settings.start) is not None:
        load_state_dict_file(model, settings.start, settings.make)
    elif settings.start:
        _load_checkpoint_weights(model, *settings.start.rpartition("::")[::2])
    if arm.role is ArmRole.CHAOS:
        _perturb_weights(model, derive_seed("ulp", seed))


@torch.no_grad()
def _perturb_weights(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        # Each weight moves up or down at random by one unit in the last place.
        moved_up_mask = torch.rand(parameter.shape, generator=generator) < 0.5
        parameter.copy_(torch.nextafter(parameter, torch.where(moved_up_mask, math.inf, -math.inf).to(parameter)))


@torch.no_grad()
def _load_checkpoint_weights(model: nn.Module, folder: str, arm: str) -> None:
    checkpoint_weights = read_weights(folder, arm)
    parameters = list(model.parameters())
    if [weight.shape for weight in checkpoint_weights] != [parameter.shape for parameter in parameters]:
        raise UsageError(
            f"--start: the weights in {folder} belong to a different model. Choose its --model and --arch."
        )
    for parameter, weight in zip(parameters, checkpoint_weights, strict=True):
        parameter.copy_(weight)


def list_frozen_weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters() if not parameter.requires_grad]


def load_state_dict_file(model: nn.Module, start: str, make: str = "") -> None:
    """Loads the state dict that `start` names as 'FILE::DIGEST' into a model. Raises UsageError if it does not fit
    the model that `make` returns.
    """
    name, _, digest = start.rpartition("::")
    path = Path(name)
    with open_file(path, most=MEMORY_BYTES) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise UsageError(f"--start {path} has changed since the training began. Restore the file.")
    tensor_by_name = _load_state_dict(path)
    for tensor_name, tensor in tensor_by_name.items():
        if not is_finite(tensor):
            raise UsageError(
                f"--start {path}: {tensor_name} has values that are not finite. Give weights without them."
            )
    advice = f"Give weights of the model that {make} makes" if make else "Choose the --model and --arch of that model"
    try:
        missing_names, unknown_names = model.load_state_dict(tensor_by_name, strict=False)
    except RuntimeError as error:  # raised if a tensor has another shape than in the model
        raise UsageError(f"--start {path} has a different model: {own_words(error)}. {advice}.") from None
    # A state dict file lists a tied parameter under both of its names, but named_parameters() only under the first.
    missing_names = [name for name, _ in model.named_parameters() if name in missing_names]
    if missing_names or unknown_names:
        reasons = [f"lacks {join_words(missing_names, _MAX_LISTED_NAMES)}"] if missing_names else []
        reasons += (
            [f"has {join_words(unknown_names, _MAX_LISTED_NAMES)}, which this model lacks"] if unknown_names else []
        )
        raise UsageError(f"--start {path} has a different model: it {', and '.join(reasons)}. {advice}.")
    for tensor_name, tensor in model.state_dict().items():
        # If two names share a tensor in the model, the values of one name have replaced those of the other.
        if tensor_name in tensor_by_name and not torch.equal(tensor, tensor_by_name[tensor_name].to(tensor)):
            raise UsageError(
                f"--start {path}: {tensor_name} is the same tensor as another one in this model (its weights are "
                "tied), and not in the file. Give weights of a tied model."
            )


def _load_state_dict(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a state dict file by name. Code in the file is never run."""
    # 1. Read the file, by a loader that accepts only tensors and plain values.
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
    # 2. In the files of trainers, the state dict is one of several entries.
    for name in _STATE_DICT_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    tensors = list(content.values()) if isinstance(content, Mapping) else []
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise UsageError(f"--start {path} is not a state dict: expected tensors by name. Save model.state_dict().")
    # 3. Remove the prefixes of wrappers, so that names match those of the plain model.
    for prefix in _WRAPPER_PREFIXES:
        if all(name.startswith(prefix) for name in content):
            content = {name.removeprefix(prefix): tensor for name, tensor in content.items()}
    return dict(content)


def apply_scales(
    arithmetic: Arithmetic, settings: TrainerSettings, precision: str, layer_name: str, books: list[ScaleBook]
) -> Arithmetic:
    """Returns a layer's arithmetic with scales from data if the settings ask for them, and otherwise unchanged. The
    ScaleBook that holds these scales is added to `books`. Raises UsageError if --scales-from has no scales for this
    layer.
    """
    saturation_bound_share = None if settings.saturation_bound is None else settings.saturation_bound / 100
    if not settings.scales and settings.refresh_scales is None and saturation_bound_share is None:
        return arithmetic
    rule = StaticScales(0, settings.refresh_scales or 0, saturation_bound_share, source="stored", known=settings.scales)
    scales = rule.find_magnitudes(precision)
    scale_book = ScaleBook(rule, scales)
    scaled_arithmetic = arithmetic.scaled_by(scale_book, layer_name)
    if scaled_arithmetic is not arithmetic:
        books.append(scale_book)
    if settings.scales and scaled_arithmetic is not arithmetic and not any(layer == layer_name for layer, _ in scales):
        raise UsageError(
            f"--scales-from has scales for {join_words((layer for layer, _ in scales), _MAX_LISTED_NAMES)}, and none "
            f"for {layer_name}, a layer of this model. Choose a training or run of the same model."
        )
    return scaled_arithmetic
