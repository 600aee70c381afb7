"""Casts and phases that tell the pass that measures memory what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fp8bench.model import UNATTRIBUTED, MemoryRole
from fp8bench.protocols import MEMORY_OF, Markers, Operand, Role, Setup, WatchedArithmetic
from fp8bench.worker.state_tensors import addresses_of

# Told where something lies, and what it is for.
Told = Callable[[Sequence[int], MemoryRole], None]

_COPIES = {
    Role.INPUT: MemoryRole.LOW_ACTIVATIONS,
    Role.WEIGHT: MemoryRole.LOW_WEIGHTS,
    Role.GRADIENT: MemoryRole.GRADIENTS,
}


def listening(setup: Setup, told: Told) -> Setup:
    """The setup, whose casts are told of. A cast that changes nothing makes no copy, and is told of by its source."""
    watch = partial(_tell, told)
    return replace(
        setup,
        arithmetic=WatchedArithmetic(setup.arithmetic, watch),
        high=WatchedArithmetic(setup.high, watch),
        layers={key: WatchedArithmetic(arithmetic, watch) for key, arithmetic in setup.layers.items()},
    )


def _tell(told: Told, operand: Operand, source: Any, role: Role, before: Operand | None) -> None:
    """What is neither the source's memory nor that of the same operand in its other orientation is a copy."""
    import torch

    if torch.compiler.is_compiling():  # nothing lies anywhere yet
        return
    sources = [] if source is None else list(addresses_of(source))
    known = {*sources, *_addresses(before)}
    made = [address for address in _addresses(operand) if address not in known]
    for addresses, role_of_memory in ((sources, MEMORY_OF[role]), (made, _COPIES[role])):
        if addresses:
            told(addresses, role_of_memory)


def _addresses(operand: Operand | None) -> list[int]:
    parts = () if operand is None else (operand.data, operand.scale)
    return [address for part in parts if part is not None for address in addresses_of(part)]


@dataclass(slots=True, eq=False)
class ListeningMarker:
    """One phase's context manager; nested ones are exclusive, as under the clock."""

    _name: str
    _stack: list[str]
    _told: Callable[[str], None]

    def __enter__(self) -> None:
        self._stack.append(self._name)
        self._told(self._name)

    def __exit__(self, *exc: object) -> None:
        self._stack.pop()
        self._told(self._stack[-1])


def listening_phases(told: Callable[[str], None]) -> Markers[ListeningMarker]:
    """Phases that tell when a step goes on in another. Backward may run on another thread: they share one stack."""
    stack: list[str] = [UNATTRIBUTED]
    return Markers(lambda name: ListeningMarker(name, stack, told))
