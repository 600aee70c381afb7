"""Finds the tensors that a workload's state holds, their addresses, and the purposes that the objects of the state
declare.
"""

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

# Maps the address of a state's memory to the purpose of this memory, None if it is unknown.
StateTensors = Mapping[int, MemoryRole | None]
TensorViewKey = tuple[int, int, tuple[int, ...], tuple[int, ...], Any]

# The most objects of a case's state that are inspected. Inspecting them takes about a second.
MAX_OBJECTS = 1_000_000
_UNSEARCHED_TYPES = (
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
    """Returns the purpose of each tensor that a state holds (None if unknown), by the address of its memory. Recognises
    parameters, gradients and the states of optimisers. An object of the state may declare other purposes in its method
    `memory_roles`, which take precedence.
    """
    import torch

    roles: dict[int, MemoryRole | None] = {}
    optimizers: list[torch.optim.Optimizer] = []
    role_declaring_objects: list[Any] = []
    for part in _iterate_reachable_objects(state):
        if isinstance(part, torch.Tensor):
            is_trained = part.requires_grad and part.is_leaf
            _add_tensor_addresses(roles, part, MemoryRole.WEIGHTS if is_trained else None)
            if part.is_leaf and part.grad is not None:
                _add_tensor_addresses(roles, part.grad, MemoryRole.GRADIENTS)
        elif isinstance(part, torch.optim.Optimizer):
            optimizers.append(part)
        elif callable(getattr(type(part), "memory_roles", None)):
            role_declaring_objects.append(part)
    for optimizer in optimizers:
        _set_tensor_roles(roles, list(optimizer.state.values()), MemoryRole.OPTIMIZER)
    # Outer objects come first in this list. Set their roles last, so that they replace roles of inner objects.
    for holder in reversed(role_declaring_objects):
        declared_roles = holder.memory_roles()
        if not isinstance(declared_roles, Mapping) or not all(isinstance(role, MemoryRole) for role in declared_roles):
            raise TypeError(
                f"{type(holder).__name__}.memory_roles() returned {str(declared_roles)[:60]!r}; expected a mapping of "
                "MemoryRole to tensors or what holds them"
            )
        for role, parts in dict(declared_roles).items():
            _set_tensor_roles(roles, parts, role)
    return roles


def find_models(state: object) -> list[Any]:
    """Returns the models of a state: the torch modules that no module contains."""
    import torch

    contained_modules: set[object] = set()
    models = []
    for part in _iterate_reachable_objects(state):
        if isinstance(part, torch.nn.Module) and part not in contained_modules:
            models.append(part)
            contained_modules.update(part.modules())
    return models


def _set_tensor_roles(roles: dict[int, MemoryRole | None], parts: object, role: MemoryRole) -> None:
    import torch

    for part in _iterate_reachable_objects(parts):
        if isinstance(part, torch.Tensor):
            roles.update(dict.fromkeys(iterate_addresses(part), role))


def _add_tensor_addresses(roles: dict[int, MemoryRole | None], tensor: Any, role: MemoryRole | None) -> None:
    """Adds the addresses of a tensor. If several tensors share memory, the first one that has a role decides."""
    for address in iterate_addresses(tensor):
        roles[address] = roles.get(address) or role


def _iterate_reachable_objects(root: object, until: float = math.inf) -> Iterator[Any]:
    """Yields an object and all objects that it holds, nearest first. The contents of tensors, classes and modules are
    not searched.
    """
    objects_to_visit = deque([root])
    visited_ids = set[int]()
    visited_objects = []  # keep all objects alive, so that no new object gets the id of a visited one
    while objects_to_visit and len(visited_ids) < MAX_OBJECTS and time.thread_time() < until:
        visited_object = objects_to_visit.popleft()
        if isinstance(visited_object, _UNSEARCHED_TYPES) or id(visited_object) in visited_ids:
            continue
        visited_ids.add(id(visited_object))
        visited_objects.append(visited_object)
        yield visited_object
        objects_to_visit.extend(_list_referenced_objects(visited_object))


def _list_referenced_objects(holder: Any) -> list[Any]:
    import torch

    if isinstance(holder, torch.Tensor):
        return []
    if isinstance(holder, types.FunctionType):  # skip a function's globals, because they belong to its module
        return [*(holder.__closure__ or ()), *(holder.__defaults__ or ()), *(holder.__kwdefaults__ or {}).values()]
    if isinstance(holder, torch.jit.ScriptModule):  # the garbage collector does not see the tensors of a ScriptModule
        return [*holder.parameters(), *holder.buffers()]
    return gc.get_referents(holder)


def iterate_addresses(tensor: Any) -> Iterator[int]:
    """Yields the addresses under which an allocator knows a tensor's memory. For a wrapper, these are the addresses
    of the wrapped tensors.
    """
    yield from filter(None, map(get_address, _iterate_wrapped_tensors(tensor)))


def iterate_tensors(*roots: object, until: float = math.inf) -> Iterator[Any]:
    """Yields all tensors with memory that the objects `roots` hold, directly or indirectly. These include gradients and
    the tensors inside wrapper tensors. Yields each view once.

    The search ends when this thread's CPU time reaches `until` seconds. Time in which the thread waits for a core does
    not count.
    """
    import torch

    visited_views = set()
    for tensor_holder in _iterate_reachable_objects(roots, until):
        if not isinstance(tensor_holder, torch.Tensor):
            continue
        tensors = [tensor_holder]
        if tensor_holder.is_leaf and tensor_holder.grad is not None:
            tensors.append(tensor_holder.grad)
        for tensor in tensors:
            for part in _iterate_wrapped_tensors(tensor):
                if get_address(part) and (view := get_tensor_view_key(part)) not in visited_views:
                    visited_views.add(view)
                    yield part


def get_address(tensor: Any) -> int:
    """Returns the address of a tensor's memory; 0 for a tensor without an address (sparse, meta, or from outside of
    torch).
    """
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


def is_foreign_tensor(tensor: Any) -> bool:
    """Returns whether a tensor's memory was not allocated by torch (NumPy, a mapped file) or is shared between
    processes.
    """
    storage = tensor.untyped_storage()
    return not storage.resizable() or (tensor.device.type == "cpu" and storage.is_shared())


def save_generators(state: object) -> list[Callable[[], object]]:
    """Returns functions that later reset torch's random generator, and the random generators of the state, to their
    present position.
    """
    import torch

    restore_generator_functions: list[Callable[[], object]] = [partial(torch.set_rng_state, torch.get_rng_state())]
    # Do not import NumPy: if nobody has imported it, no state can have its generators.
    numpy_generator: Any = getattr(getattr(sys.modules.get("numpy"), "random", None), "Generator", random.Random)
    for part in _iterate_reachable_objects(state):
        if isinstance(part, torch.Generator):
            restore_generator_functions.append(partial(part.set_state, part.get_state()))
        elif isinstance(part, random.Random):
            restore_generator_functions.append(partial(part.setstate, part.getstate()))
        elif isinstance(part, numpy_generator):
            bit_generator = part.bit_generator
            restore_generator_functions.append(partial(setattr, bit_generator, "state", bit_generator.state))
    return restore_generator_functions


def holds_non_torch_data(state: object) -> bool:
    """Returns whether a state holds numbers outside of torch's tensors: arrays, buffers, open files."""
    array_type = getattr(sys.modules.get("numpy"), "ndarray", memoryview)
    foreign_types = (array_type, memoryview, bytearray, mmap.mmap, io.IOBase)
    if any(isinstance(part, foreign_types) for part in _iterate_reachable_objects(state)):
        return True
    return any(map(is_foreign_tensor, iterate_tensors(state)))


def get_tensor_view_key(tensor: Any) -> TensorViewKey:
    return get_address(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def get_version(tensor: Any) -> int:
    """Returns torch's count of operations that wrote a tensor; 0 if torch keeps no count."""
    return 0 if tensor.is_inference() else int(tensor._version)


def _iterate_wrapped_tensors(tensor: Any) -> Iterator[Any]:
    """Yields a tensor, or the tensors that it wraps. DTensor also lists its device mesh, which is not a tensor."""
    import torch

    flatten_tensor = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten_tensor is None:
        yield tensor
        return
    for name in flatten_tensor(tensor)[0]:
        tensor_part = getattr(tensor, name)
        if isinstance(tensor_part, torch.Tensor):
            yield from _iterate_wrapped_tensors(tensor_part)
