"""What a state may say of its own memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fp8bench.model import MemoryRole
from fp8bench.protocols.arithmetic import Role

# What a tensor is for that has a role in products, before it is cast.
MEMORY_OF: Mapping[Role, MemoryRole] = {
    Role.INPUT: MemoryRole.ACTIVATIONS,
    Role.WEIGHT: MemoryRole.WEIGHTS,
    Role.GRADIENT: MemoryRole.GRADIENTS,
}


class MemoryHolder(Protocol):
    """A workload's state, or anything in it, that says what its tensors are for.

    Nobody has to: parameters, their gradients and what torch's optimisers keep are known by themselves, and casts say
    what they cast. What is said here goes before all of that.
    """

    def memory_roles(self) -> Mapping[MemoryRole, object]:
        """Tensors, or whatever holds them, by what they are for."""
