"""Arithmetics that a device's memory is held against: a format as an emulation has it, and real codes in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8bench.protocols import Arithmetic, Operand, Role, ScaleBook
from fp8bench.protocols.arithmetic import DELEGATED_ATTRIBUTES
from fp8bench.worker.device_layout import DeviceLedger


class RealCodes(Arithmetic):
    """The hardware's codes and scales in memory, multiplied as values: temporary memory of a call is not counted."""

    def __init__(self, inner: Arithmetic, ledger: DeviceLedger) -> None:
        vars(self).update({name: getattr(inner, name) for name in DELEGATED_ATTRIBUTES if name != "restore"})
        self.inner = inner
        self.ledger = ledger

    def layer(self, name: str) -> Arithmetic:
        return RealCodes(self.inner.layer(name), self.ledger)

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        return RealCodes(self.inner.scaled_by(book, name), self.ledger)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        with self.ledger.mark_emulation():
            return (self.inner.restore(a, torch.float32) @ self.inner.restore(b, torch.float32).t()).to(dtype)

    def _emulation_blocks(self, name: str, *given: Any) -> Any:
        with self.ledger.mark_emulation():
            return getattr(self.inner, name)(*given)

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return self._emulation_blocks("cast", tensor, role)  # type: ignore[no-any-return]

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        return self._emulation_blocks("cast_without_scale", tensor, role)  # type: ignore[no-any-return]

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        return self._emulation_blocks("cast_transpose", source, role)  # type: ignore[no-any-return]

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        return self._emulation_blocks("turn", operand, source, role)  # type: ignore[no-any-return]

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        return self._emulation_blocks("cast_both", tensor, role, amax)  # type: ignore[no-any-return]

    def restore(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        return self._emulation_blocks("restore", operand, dtype)  # type: ignore[no-any-return]
