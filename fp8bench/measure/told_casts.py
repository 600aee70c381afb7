"""Arithmetics that also tell what they cast, and what it was cast for: for the pass that measures memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fp8bench.measure.addresses import addresses_of
from fp8bench.model import MemoryRole
from fp8bench.protocols import MEMORY_OF, Arithmetic, Operand, Role, ScaleBook, Setup

# Told where something lies, and what it is for.
Told = Callable[[Sequence[int], MemoryRole], None]

_COPIES = {
    Role.INPUT: MemoryRole.LOW_ACTIVATIONS,
    Role.WEIGHT: MemoryRole.LOW_WEIGHTS,
    Role.GRADIENT: MemoryRole.GRADIENTS,
}


def telling(setup: Setup, told: Told) -> Setup:
    """The setup, whose casts are told of. A cast that changes nothing makes no copy, and is told of by its source."""
    layers = {key: _telling(one, told) for key, one in setup.layers.items()}
    return replace(
        setup, arithmetic=_telling(setup.arithmetic, told), high=_telling(setup.high, told), layers=layers
    )  # fmt: skip


def _telling(arithmetic: Arithmetic, told: Told) -> Arithmetic:
    """The same arithmetic, of a class between its own and its users: what asks for its class finds it.

    One whose class takes no other in its place stays silent.
    """
    kind = type(arithmetic)
    names = {"_told": staticmethod(told), "__slots__": (), "__module__": __name__}
    try:
        one = copy.copy(arithmetic)
        object.__setattr__(one, "__class__", type(f"Telling{kind.__name__}", (_Telling, kind), names))
    except (TypeError, ValueError, AttributeError, RuntimeError, copy.Error):  # it is foreign code
        return arithmetic
    return one


class _Telling(Arithmetic):
    """Placed before another arithmetic's class."""

    __slots__ = ()
    _told: Told

    def layer(self, name: str) -> Arithmetic:
        inner: Any = super()
        return self._still(inner.layer(name))

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        inner: Any = super()
        return self._still(inner.scaled_by(book, name))

    def cast(self, tensor: Any, role: Role) -> Operand:
        inner: Any = super()
        return self._tell(inner.cast(tensor, role), tensor, role)

    def unscaled(self, tensor: Any, role: Role) -> Operand:
        inner: Any = super()
        return self._tell(inner.unscaled(tensor, role), tensor, role)

    def turned(self, source: Any, role: Role) -> Operand:
        inner: Any = super()
        return self._tell(inner.turned(source, role), source, role)

    def turn(self, operand: Operand, source: Any, role: Role) -> Operand:
        inner: Any = super()
        return self._tell(inner.turn(operand, source, role), source, role, operand)

    def _still(self, arithmetic: Arithmetic) -> Arithmetic:
        return arithmetic if isinstance(arithmetic, _Telling) else _telling(arithmetic, self._told)

    def _tell(self, operand: Operand, source: Any, role: Role, other: Operand | None = None) -> Operand:
        """What is neither the source's memory nor that of the same operand in its other orientation is a copy."""
        import torch

        if torch.compiler.is_compiling():  # nothing lies anywhere yet
            return operand
        before = [] if source is None else list(addresses_of(source))
        known = {*before, *_addresses(other)}
        made = [address for address in _addresses(operand) if address not in known]
        for addresses, what in ((before, MEMORY_OF[role]), (made, _COPIES[role])):
            if addresses:
                self._told(addresses, what)
        return operand


def _addresses(operand: Operand | None) -> list[int]:
    parts = () if operand is None else (operand.data, operand.scale)
    return [address for part in parts if part is not None for address in addresses_of(part)]
