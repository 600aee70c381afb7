"""An arithmetic that also counts what it is asked to cast: for the statistics of a step's data, never for timing."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8bench.numerics.ranges import Ledger
from fp8bench.protocols import Arithmetic, Operand, Role


class WatchingArithmetic(Arithmetic):
    """Another arithmetic, whose operands are entered into a ledger under a layer kind before they are cast."""

    def __init__(self, inner: Arithmetic, kind: str, ledger: Ledger) -> None:
        self.carrier = inner.carrier
        self.casts = inner.casts
        self.keeps_source = inner.keeps_source
        self.explicit = inner.explicit
        self.settles = inner.settles
        self._inner = inner
        self._kind = kind
        self._ledger = ledger

    def layer(self, name: str) -> Arithmetic:
        return WatchingArithmetic(self._inner.layer(name), self._kind, self._ledger)

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        self._ledger.add(self._kind, role.value, tensor)
        return self._inner.cast(tensor, role)

    def unscaled(self, tensor: Tensor, role: Role) -> Operand:
        self._ledger.add(self._kind, role.value, tensor)
        return self._inner.unscaled(tensor, role)

    # What is turned are values that were counted already.
    def turned(self, source: Tensor, role: Role) -> Operand:
        return self._inner.turned(source, role)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        return self._inner.turn(operand, source, role)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return self._inner.product(a, b, dtype)

    def restore(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        return self._inner.restore(operand, dtype)
