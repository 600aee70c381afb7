"""Writes and reads checkpoints: the state of each arm in its own file, and a head that identifies the training."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from fp8bench.errors import StoreError
from fp8bench.features.train.values import SeedTask
from fp8bench.files import MEMORY_BYTES, PARTIAL, keeping, open_file, read_file, sealed, unsealed, write_whole
from fp8bench.nn.sizes import SIZES

_HEAD = "checkpoint.json"
_VERSION = 1


class _DigestingFile:
    """A file with the digest of what was written, and the disk's last error, which torch's writer hides."""

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


def write(folder: str, task: SeedTask, memories: Mapping[str, dict[str, Any]], rank: int) -> None:
    target = Path(folder)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with keeping(f"the checkpoint {target}", "Make room, and resume."):
            partial.mkdir(parents=True)
            files = {}
            for number, (name, memory) in enumerate(memories.items()):
                files[name] = _written(partial / f"{number}.pt", memory)
            head = {"version": _VERSION, "task": _task_digest(task), "rank": rank, "arms": files}
            write_whole(partial / _HEAD, json.dumps(sealed(head), indent=1))
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _written(path: Path, memory: dict[str, Any]) -> dict[str, str]:
    with path.open("xb") as file:
        digesting = _DigestingFile(file)
        try:
            torch.save(memory, cast(IO[bytes], digesting))
        except RuntimeError:
            raise digesting.failure or RuntimeError(f"torch cannot write {path}") from None
        file.flush()
        os.fsync(file.fileno())
    return {"file": path.name, "sha256": digesting.digest}


def read(folder: str, task: SeedTask, rank: int) -> dict[str, dict[str, Any]]:
    """The state of every arm that was kept. Raises StoreError for what is missing or damaged."""
    place = Path(folder)
    head = _head(place)
    if head.get("version") != _VERSION or head.get("task") != _task_digest(task):
        raise StoreError(f"the checkpoint {place} is from another training. Resume with the settings it began with.")
    if (writer := head.get("rank", rank)) != rank:  # nothing else tells rows of one rank from those of another
        raise StoreError(f"the checkpoint {place} is of rank {writer}, not of rank {rank}. Move it back to its folder.")
    return {name: _loaded(place / file["file"], file["sha256"]) for name, file in head["arms"].items()}


def weights(folder: str, arm: str) -> list[Tensor]:
    """One arm's weights, in the order of its model's parameters, of whatever training. Raises StoreError."""
    place = Path(folder)
    files = _head(place)["arms"]
    if arm not in files:
        raise StoreError(f"the checkpoint {folder} has no arm {arm!r}. It has {', '.join(files)}.")
    kept: list[Tensor] = _loaded(place / files[arm]["file"], files[arm]["sha256"])["optimizer"]["weights"]
    return kept


def _head(place: Path) -> dict[str, Any]:
    try:
        return unsealed(json.loads(read_file(place / _HEAD)))
    except (OSError, ValueError) as error:
        raise StoreError(f"{place} holds no complete checkpoint ({error}). Choose another.") from None


def _loaded(path: Path, digest: str) -> dict[str, Any]:
    """Loads tensors and plain values only: nothing in the file is run."""
    try:
        with open_file(path, most=MEMORY_BYTES) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise StoreError(
                    f"the checkpoint's file {path} is damaged: its SHA-256 is not the one that was recorded."
                )
            file.seek(0)
            memory: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise StoreError(f"the checkpoint's file {path} cannot be read ({error.strerror}).") from None
    except pickle.UnpicklingError:
        raise StoreError(f"the checkpoint's file {path} holds more than tensors and plain values.") from None
    return memory


def _task_digest(task: SeedTask) -> str:
    """Identifies the trainings that may use a checkpoint: by seed, arms, settings, steps, text and number of ranks."""
    parts = repr((task.seed, task.arms, task.settings, task.steps, task.text.identity, task.facts.ranks))
    size = SIZES.get(task.settings.model)
    if size is not None and size.tied:  # it was not, once
        parts += " tied"
    return hashlib.sha256(parts.encode()).hexdigest()


def finite(memory: Any) -> bool:
    if isinstance(memory, Tensor):
        return not memory.is_floating_point() or bool(memory.to(torch.float32).isfinite().all())
    if isinstance(memory, dict):
        return all(map(finite, memory.values()))
    return all(map(finite, memory)) if isinstance(memory, list) else True
