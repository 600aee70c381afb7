"""The arithmetics that several precisions share, and one that counts what it casts. Imports torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8bench.numerics.products import in_dtype, values_product
from fp8bench.numerics.ranges import Ledger
from fp8bench.protocols import Arithmetic, Operand, Role, WatchedArithmetic

Quantise = Callable[[Tensor, Role], Tensor]


class PlainArithmetic(Arithmetic):
    """torch's own products of one dtype."""

    plain = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.carrier = dtype
        self.casts = dtype != torch.float32
        self.groups = 8 if dtype == torch.bfloat16 else 0  # torch has no other on a GPU

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(tensor.detach().to(self.carrier))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return in_dtype(torch.mm(a.data, b.data.t()), dtype)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        return Operand(operand.data.t())

    def grouped(self, a: Operand, b: Operand, ends: Tensor) -> Tensor:
        return F.grouped_mm(a.data, b.data.transpose(-2, -1), offs=ends)


class EmulatedArithmetic(Arithmetic):
    """Values rounded by `quantise` and multiplied in float32: right in numbers, and its speed means nothing."""

    def __init__(self, carrier: torch.dtype, quantise: Quantise, keeps_source: bool = False) -> None:
        self.carrier = carrier
        self.keeps_source = keeps_source
        self._quantise = quantise

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(self._quantise(tensor, role))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return values_product(a.data, b.data, dtype)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        if self.keeps_source:
            return self.cast(source.t(), role)
        return Operand(operand.data.t())


def counted(inner: Arithmetic, kind: str, ledger: Ledger) -> Arithmetic:
    """Another arithmetic, whose operands are entered into a ledger under a layer kind. Never for timing.

    What is turned are values that were counted already.
    """

    def count(operand: Operand, source: Tensor | None, role: Role, before: Operand | None) -> None:
        assert source is not None
        ledger.add(kind, role.value, source)

    return WatchedArithmetic(inner, count, turned=False)
