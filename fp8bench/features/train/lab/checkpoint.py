"""The master weights: what is kept of the parameters from one step to the next."""

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
from fp8bench.features.train.lab.trainer import Trainer
from fp8bench.features.train.values import SeedTask
from fp8bench.files import PARTIAL, sealed, unsealed, write_whole

_HEAD = "checkpoint.json"
_VERSION = 1


class _Digesting:
    """A file that says what was written into it, and what its disk said last: torch's writer does not hand that on."""

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


def not_finite(trainers: Mapping[str, Trainer]) -> tuple[str, ...]:
    return tuple(name for name, one in trainers.items() if not _finite(one.memory()))


def write(folder: str, task: SeedTask, trainers: Mapping[str, Trainer], rank: int) -> None:
    """Keep the state of these arms, of one rank. Raises StoreError."""
    memories = {name: one.memory() for name, one in trainers.items()}
    target = Path(folder)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        partial.mkdir(parents=True)
        files = {}
        for number, (name, memory) in enumerate(memories.items()):
            files[name] = _written(partial / f"{number}.pt", memory)
        head = {"version": _VERSION, "task": _plan(task), "rank": rank, "arms": files}
        write_whole(partial / _HEAD, json.dumps(sealed(head), indent=1))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError as error:
        raise StoreError(
            f"the checkpoint {target} cannot be written ({error.strerror}). Make room, and resume."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _written(path: Path, memory: dict[str, Any]) -> dict[str, str]:
    with path.open("xb") as file:
        digesting = _Digesting(file)
        try:
            torch.save(memory, cast(IO[bytes], digesting))
        except RuntimeError:
            raise digesting.failure or RuntimeError(f"torch cannot write {path}") from None
        file.flush()
        os.fsync(file.fileno())
    return {"file": path.name, "sha256": digesting.digest}


def read(folder: str, task: SeedTask, rank: int) -> dict[str, dict[str, Any]]:
    """The state of every arm that was kept. Raises StoreError for whatever is not as written."""
    return {name: _loaded(*file) for name, file in _files(Path(folder), task, rank).items()}


def give_back(memories: Mapping[str, dict[str, Any]], trainers: Mapping[str, Trainer]) -> None:
    """Every arm goes on from its state; one of which nothing was kept has stopped."""
    for name, trainer in trainers.items():
        if name in memories:
            trainer.recall(memories[name])
        else:
            trainer.stopped = True


def memory_of(folder: str, task: SeedTask, arm: str, rank: int) -> dict[str, Any]:
    """The state of one arm. Raises StoreError where it was not kept, or is not as written."""
    files = _files(Path(folder), task, rank)
    if arm not in files:
        raise StoreError(f"the checkpoint {folder} has nothing of {arm}: its numbers were not finite then.")
    return _loaded(*files[arm])


def _files(place: Path, task: SeedTask, rank: int) -> dict[str, tuple[Path, str]]:
    """The file of each arm that a checkpoint keeps, and its digest."""
    try:
        head = unsealed(json.loads((place / _HEAD).read_text()))
    except (OSError, ValueError) as error:
        raise StoreError(f"{place} holds no whole checkpoint ({error}). Choose another.") from None
    if head.get("version") != _VERSION or head.get("task") != _plan(task):
        raise StoreError(f"the checkpoint {place} is of another training. Resume with the settings it was begun with.")
    if (whose := head.get("rank", rank)) != rank:  # nothing else tells rows of one rank from those of another
        raise StoreError(f"the checkpoint {place} is of rank {whose}, not of rank {rank}. Put it back where it lay.")
    return {name: (place / said["file"], said["sha256"]) for name, said in head["arms"].items()}


def _loaded(path: Path, digest: str) -> dict[str, Any]:
    """Tensors and plain values alone: nothing in a file is run."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != digest:
                raise StoreError(
                    f"the checkpoint's file {path} is damaged: its SHA-256 is not the one it was kept under."
                )
            file.seek(0)
            memory: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise StoreError(f"the checkpoint's file {path} cannot be read ({error.strerror}).") from None
    except pickle.UnpicklingError:
        raise StoreError(f"the checkpoint's file {path} holds more than tensors and plain values.") from None
    return memory


def _plan(task: SeedTask) -> str:
    """What a checkpoint is good for: the same seed, settings, text and number of ranks."""
    return hashlib.sha256(
        repr((task.seed, task.arms, task.settings, task.steps, task.text.identity, task.facts.ranks)).encode()
    ).hexdigest()


def _finite(memory: Any) -> bool:
    if isinstance(memory, Tensor):
        return not memory.is_floating_point() or bool(memory.to(torch.float32).isfinite().all())
    if isinstance(memory, dict):
        return all(map(_finite, memory.values()))
    return all(map(_finite, memory)) if isinstance(memory, list) else True
