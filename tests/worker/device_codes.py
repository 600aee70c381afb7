"""Arithmetics that a device's memory is held against: a format as an emulation has it, and real codes in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8bench.protocols import Arithmetic, Operand, Role, ScaleBook
from fp8bench.protocols.arithmetic import AS_IT_IS
from fp8bench.worker.device_layout import DeviceLedger


class RealCodes(Arithmetic):
    """The hardware's codes and scales in memory, multiplied as values: temporary memory of a call is not counted."""

    def __init__(self, inner: Arithmetic, ledger: DeviceLedger) -> None:
        vars(self).update({name: getattr(inner, name) for name in AS_IT_IS if name != "restore"})
        self.inner, self.ledger = inner, ledger

    def layer(self, name: str) -> Arithmetic:
        return RealCodes(self.inner.layer(name), self.ledger)

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        return RealCodes(self.inner.scaled_by(book, name), self.ledger)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        with self.ledger.emulating():
            return (self.inner.restore(a, torch.float32) @ self.inner.restore(b, torch.float32).t()).to(dtype)

    def _aside(self, name: str, *given: Any) -> Any:
        with self.ledger.emulating():
            return getattr(self.inner, name)(*given)

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return self._aside("cast", tensor, role)  # type: ignore[no-any-return]

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        return self._aside("cast_without_scale", tensor, role)  # type: ignore[no-any-return]

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        return self._aside("cast_transpose", source, role)  # type: ignore[no-any-return]

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        return self._aside("turn", operand, source, role)  # type: ignore[no-any-return]

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        return self._aside("cast_both", tensor, role, amax)  # type: ignore[no-any-return]

    def restore(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        return self._aside("restore", operand, dtype)  # type: ignore[no-any-return]
