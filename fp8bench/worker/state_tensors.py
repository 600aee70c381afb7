"""Inspects a workload's state: the addresses of its tensors, and their purpose if their holder declares it."""

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

# None for memory of the state whose purpose is unknown.
StateTensors = Mapping[int, MemoryRole | None]
View = tuple[int, int, tuple[int, ...], tuple[int, ...], Any]

# The number of objects of a state that are inspected: about a second's work.
MOST_OBJECTS = 1_000_000
_CLOSED = (
    type,
    types.ModuleType,
    types.CodeType,
    types.FrameType,
    types.GetSetDescriptorType,
    weakref.ReferenceType,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
)


def state_tensors(state: object) -> StateTensors:
    """Returns the purpose of the state's memory, by address. Parameters, gradients and the state of optimisers are
    known; what a holder declares in `memory_roles` takes precedence."""
    import torch

    roles: dict[int, MemoryRole | None] = {}
    optimizers: list[torch.optim.Optimizer] = []
    holders: list[Any] = []
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
    for holder in reversed(holders):  # the outer one takes precedence, so it comes last
        declared_roles = holder.memory_roles()
        if not isinstance(declared_roles, Mapping) or not all(isinstance(role, MemoryRole) for role in declared_roles):
            raise TypeError(
                f"{type(holder).__name__}.memory_roles() returned {str(declared_roles)[:60]!r}; expected a mapping of "
                "MemoryRole to tensors or what holds them"
            )
        for role, parts in dict(declared_roles).items():
            _claim(roles, parts, role)
    return roles


def modules_of(state: object) -> list[Any]:
    """Returns the models of a state: torch modules that no other module contains."""
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
    """Enters a tensor's addresses. If several tensors share memory, the first that has a role decides."""
    for address in addresses_of(tensor):
        roles[address] = roles.get(address) or role


def _within(root: object, until: float = math.inf) -> Iterator[object]:
    """Yields an object and everything that it holds, near ones first; does not look into tensors, classes and
    modules."""
    waiting, visited = deque([root]), set[int]()
    alive = []  # an object must live as long as its id counts
    while waiting and len(visited) < MOST_OBJECTS and time.thread_time() < until:
        part = waiting.popleft()
        if isinstance(part, _CLOSED) or id(part) in visited:
            continue
        visited.add(id(part))
        alive.append(part)
        yield part
        waiting.extend(_held_by(part))


def _held_by(holder: Any) -> list[Any]:
    import torch

    if isinstance(holder, torch.Tensor):
        return []
    if isinstance(holder, types.FunctionType):  # not its globals, which belong to its module
        return [*(holder.__closure__ or ()), *(holder.__defaults__ or ()), *(holder.__kwdefaults__ or {}).values()]
    if isinstance(holder, torch.jit.ScriptModule):  # its tensors are not reachable otherwise
        return [*holder.parameters(), *holder.buffers()]
    return gc.get_referents(holder)


def addresses_of(tensor: Any) -> Iterator[int]:
    """Yields where a tensor's memory begins, as an allocator knows it; for a wrapper, that of the wrapped ones."""
    yield from filter(None, map(address_of, _parts_of(tensor)))


def tensors_of(*roots: object, until: float = math.inf) -> Iterator[Any]:
    """Yields all tensors with memory that the roots hold, including gradients, each view once, and parts of wrappers.
    `until` ends the search, in the thread's CPU time, which excludes time without a core."""
    import torch

    views = set()
    for held in _within(roots, until):
        if not isinstance(held, torch.Tensor):
            continue
        tensors = (held, held.grad) if held.is_leaf and held.grad is not None else (held,)
        for tensor in tensors:
            for part in _parts_of(tensor):
                if address_of(part) and (view := view_of(part)) not in views:
                    views.add(view)
                    yield part


def address_of(tensor: Any) -> int:
    """Returns where a tensor's memory begins; 0 for one without: sparse, without a device, or from a different
    library."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


def is_foreign(tensor: Any) -> bool:
    """Whether a tensor's memory was not allocated by torch (NumPy, a mapped file), or is shared between processes."""
    storage = tensor.untyped_storage()
    return not storage.resizable() or (tensor.device.type == "cpu" and storage.is_shared())


def draws_of(state: object) -> list[Callable[[], object]]:
    """Returns functions that reset torch's generator, and those of a state, to their present position."""
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
    """Whether a state holds numbers outside torch's tensors: arrays, buffers, open files."""
    array = getattr(sys.modules.get("numpy"), "ndarray", memoryview)
    elsewhere = (array, memoryview, bytearray, mmap.mmap, io.IOBase)
    return any(isinstance(part, elsewhere) for part in _within(state)) or any(map(is_foreign, tensors_of(state)))


def view_of(tensor: Any) -> View:
    return address_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def version_of(tensor: Any) -> int:
    """Returns a count that grows with each torch operation that writes the tensor; 0 if torch keeps none."""
    return 0 if tensor.is_inference() else int(tensor._version)


def _parts_of(tensor: Any) -> Iterator[Any]:
    """Yields the tensor, or those that it wraps. DTensor also names its device mesh, which is not a tensor."""
    import torch

    names = getattr(type(tensor), "__tensor_flatten__", None)
    if names is None:
        yield tensor
        return
    for part in (getattr(tensor, name) for name in names(tensor)[0]):
        if isinstance(part, torch.Tensor):
            yield from _parts_of(part)
