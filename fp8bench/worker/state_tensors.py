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

    found: dict[int, MemoryRole | None] = {}
    optimizers, holders = [], []
    for one in _within(state):
        if isinstance(one, torch.Tensor):
            trained = one.requires_grad and one.is_leaf
            _enter(found, one, MemoryRole.WEIGHTS if trained else None)
            if one.is_leaf and one.grad is not None:
                _enter(found, one.grad, MemoryRole.GRADIENTS)
        elif isinstance(one, torch.optim.Optimizer):
            optimizers.append(one)
        elif callable(getattr(type(one), "memory_roles", None)):
            holders.append(one)
    for optimizer in optimizers:
        _claim(found, list(optimizer.state.values()), MemoryRole.OPTIMIZER)
    for holder in reversed(holders):  # what is further out knows better
        for role, parts in _said_by(holder).items():
            _claim(found, parts, role)
    return found


def modules_of(state: object) -> list[Any]:
    """The models that a state holds: torch's modules that are part of no other."""
    import torch

    inside: set[object] = set()
    found = []
    for one in _within(state):
        if isinstance(one, torch.nn.Module) and one not in inside:
            found.append(one)
            inside.update(one.modules())
    return found


def _claim(found: dict[int, MemoryRole | None], parts: object, role: MemoryRole) -> None:
    import torch

    for one in _within(parts):
        if isinstance(one, torch.Tensor):
            found.update(dict.fromkeys(addresses_of(one), role))


def _enter(found: dict[int, MemoryRole | None], tensor: Any, role: MemoryRole | None) -> None:
    """Of several tensors in one memory the first that is for something says it."""
    for address in addresses_of(tensor):
        found[address] = found.get(address) or role


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
        one = waiting.popleft()
        if isinstance(one, _CLOSED) or id(one) in seen:
            continue
        seen.add(id(one))
        kept.append(one)
        yield one
        waiting.extend(_held_by(one))


def _held_by(one: Any) -> list[Any]:
    import torch

    if isinstance(one, torch.Tensor):
        return []
    if isinstance(one, types.FunctionType):  # and not what its module holds
        return [*(one.__closure__ or ()), *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
    if isinstance(one, torch.jit.ScriptModule):  # it keeps its tensors where nobody else looks
        return [*one.parameters(), *one.buffers()]
    return gc.get_referents(one)


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

    found: list[Callable[[], object]] = [partial(torch.set_rng_state, torch.get_rng_state())]
    numpys: Any = getattr(getattr(sys.modules.get("numpy"), "random", None), "Generator", random.Random)
    for one in _within(state):
        held: Any = one
        if isinstance(one, torch.Generator):
            found.append(partial(one.set_state, one.get_state()))
        elif isinstance(one, random.Random):
            found.append(partial(one.setstate, one.getstate()))
        elif isinstance(one, numpys):
            found.append(partial(setattr, held.bit_generator, "state", held.bit_generator.state))
    return found


def reads_elsewhere(state: object) -> bool:
    """Whether a state holds numbers that are in no tensor of torch's own: arrays, buffers, open files."""
    array = getattr(sys.modules.get("numpy"), "ndarray", memoryview)
    elsewhere = (array, memoryview, bytearray, mmap.mmap, io.IOBase)
    return any(isinstance(one, elsewhere) for one in _within(state)) or any(map(is_foreign, tensors_of(state)))


def view_of(tensor: Any) -> View:
    """What tells a tensor that lies somewhere from all others that do."""
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
