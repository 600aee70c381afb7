"""What a workload's state holds: where its tensors lie, and what they are for as far as whoever holds them says."""

from __future__ import annotations

import gc
import io
import math
import mmap
import random
import sys
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from fp8bench.model import MemoryRole

# None: it is of the state, and nobody says what for.
StateTensors = Mapping[int, MemoryRole | None]
View = tuple[int, int, tuple[int, ...], tuple[int, ...], Any]

# A state that holds more objects is not looked through to its end: a second's work.
MOST_OBJECTS = 1_000_000
_CLOSED = (
    type, types.ModuleType, types.CodeType, types.FrameType, types.GetSetDescriptorType,
    weakref.ReferenceType, str, bytes, int, float, complex, type(None),
)  # fmt: skip


def state_tensors(state: object) -> StateTensors:
    """By address. Parameters, gradients and what optimisers keep are known; a holder's own words go before that."""
    import torch

    roles: dict[int, MemoryRole | None] = {}
    optimizers, holders = [], []
    for part in _within(state):
        if isinstance(part, torch.Tensor):
            trained = part.requires_grad and part.is_leaf
            _enter(roles, part, MemoryRole.WEIGHTS if trained else None)
            if part.is_leaf and part.grad is not None:
                _enter(roles, part.grad, MemoryRole.GRADIENTS)
        elif isinstance(part, torch.optim.Optimizer):
            optimizers.append(part)
        elif callable(getattr(type(part), "memory_roles", None)):
            holders.append(part)
    for optimizer in optimizers:
        _claim(roles, list(optimizer.state.values()), MemoryRole.OPTIMIZER)
    for holder in reversed(holders):  # what is further out knows better
        for role, parts in _said_by(holder).items():
            _claim(roles, parts, role)
    return roles


def modules_of(state: object) -> list[Any]:
    """The models that a state holds: torch's modules that are part of no other."""
    import torch

    inside: set[object] = set()
    modules = []
    for part in _within(state):
        if isinstance(part, torch.nn.Module) and part not in inside:
            modules.append(part)
            inside.update(part.modules())
    return modules


def _claim(roles: dict[int, MemoryRole | None], parts: object, role: MemoryRole) -> None:
    import torch

    for part in _within(parts):
        if isinstance(part, torch.Tensor):
            roles.update(dict.fromkeys(addresses_of(part), role))


def _enter(roles: dict[int, MemoryRole | None], tensor: Any, role: MemoryRole | None) -> None:
    """Of several tensors in one memory the first that is for something says it."""
    for address in addresses_of(tensor):
        roles[address] = roles.get(address) or role


def _said_by(holder: Any) -> dict[MemoryRole, object]:
    said = holder.memory_roles()
    if not isinstance(said, Mapping) or not all(isinstance(role, MemoryRole) for role in said):
        raise TypeError(
            f"{type(holder).__name__}.memory_roles() returned {str(said)[:60]!r}; expected a mapping of MemoryRole to "
            "tensors or what holds them"
        )
    return dict(said)


def _within(root: object, until: float = math.inf) -> Iterator[object]:
    """An object and all that it holds, near ones first; tensors are not looked into, classes and modules not at all."""
    waiting, seen = deque([root]), set[int]()
    kept = []  # what is looked at lives as long as its number counts
    while waiting and len(seen) < MOST_OBJECTS and time.thread_time() < until:
        part = waiting.popleft()
        if isinstance(part, _CLOSED) or id(part) in seen:
            continue
        seen.add(id(part))
        kept.append(part)
        yield part
        waiting.extend(_held_by(part))


def _held_by(holder: Any) -> list[Any]:
    import torch

    if isinstance(holder, torch.Tensor):
        return []
    if isinstance(holder, types.FunctionType):  # and not what its module holds
        return [*(holder.__closure__ or ()), *(holder.__defaults__ or ()), *(holder.__kwdefaults__ or {}).values()]
    if isinstance(holder, torch.jit.ScriptModule):  # it keeps its tensors where nobody else looks
        return [*holder.parameters(), *holder.buffers()]
    return gc.get_referents(holder)


def addresses_of(tensor: Any) -> Iterator[int]:
    """Where a tensor's memory begins, as an allocator knows it; of a tensor that wraps others, where theirs do."""
    yield from filter(None, map(address_of, _parts_of(tensor)))


def tensors_of(*roots: object, until: float = math.inf) -> Iterator[Any]:
    """All tensors with memory that these hold, gradients included, each view of a memory once; parts of wrappers.

    They are looked for until a moment of the thread's processor time, which waits while others have the core.
    """
    import torch

    seen = set()
    for one in _within(roots, until):
        if not isinstance(one, torch.Tensor):
            continue
        held = (one, one.grad) if one.is_leaf and one.grad is not None else (one,)
        for part in (part for tensor in held for part in _parts_of(tensor)):
            if address_of(part) and (view := view_of(part)) not in seen:
                seen.add(view)
                yield part


def address_of(tensor: Any) -> int:
    """Of a tensor that wraps no others; 0 for one that lies nowhere: sparse, on no device, or of another library."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


def is_foreign(tensor: Any) -> bool:
    """Whether somebody else than torch has allocated its memory (NumPy, a file that is mapped), or other processes
    share it."""
    storage = tensor.untyped_storage()
    return not storage.resizable() or (tensor.device.type == "cpu" and storage.is_shared())


def draws_of(state: object) -> list[Callable[[], object]]:
    """What has torch's generator, and those that a state holds, draw again what they draw from now on."""
    import torch

    restorers: list[Callable[[], object]] = [partial(torch.set_rng_state, torch.get_rng_state())]
    numpys: Any = getattr(getattr(sys.modules.get("numpy"), "random", None), "Generator", random.Random)
    for part in _within(state):
        held: Any = part
        if isinstance(part, torch.Generator):
            restorers.append(partial(part.set_state, part.get_state()))
        elif isinstance(part, random.Random):
            restorers.append(partial(part.setstate, part.getstate()))
        elif isinstance(part, numpys):
            restorers.append(partial(setattr, held.bit_generator, "state", held.bit_generator.state))
    return restorers


def reads_elsewhere(state: object) -> bool:
    """Whether a state holds numbers that are in no tensor of torch's own: arrays, buffers, open files."""
    array = getattr(sys.modules.get("numpy"), "ndarray", memoryview)
    elsewhere = (array, memoryview, bytearray, mmap.mmap, io.IOBase)
    return any(isinstance(part, elsewhere) for part in _within(state)) or any(map(is_foreign, tensors_of(state)))


def view_of(tensor: Any) -> View:
    return address_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def version_of(tensor: Any) -> int:
    """Grows with each operation of torch's that writes a tensor; always 0 where torch does not count."""
    return 0 if tensor.is_inference() else int(tensor._version)


def _parts_of(tensor: Any) -> Iterator[Any]:
    """The tensor, or those that it wraps. DTensor names its mesh of devices among these, which is none."""
    import torch

    names = getattr(type(tensor), "__tensor_flatten__", None)
    if names is None:
        yield tensor
        return
    for part in (getattr(tensor, name) for name in names(tensor)[0]):
        if isinstance(part, torch.Tensor):
            yield from _parts_of(part)
