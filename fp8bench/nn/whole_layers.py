"""Layers of another library, which cast and multiply in one: there is no cast and no product by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fp8bench.protocols import Arithmetic, Operand, Role

# Of a layer's float32 weight makes what multiplies inputs by it.
Build = Callable[[nn.Parameter], Callable[[Tensor], Tensor]]


class WholeLayers(Arithmetic):
    """A backend's layers as an arithmetic: `whole` makes one for each weight, which nobody may cast ahead of it."""

    casts = False

    def __init__(self, backend: str, carrier: torch.dtype, build: Build) -> None:
        self.carrier = carrier
        self._backend = backend
        self._build = build

    def whole(self, weight: nn.Parameter) -> Callable[[Tensor], Tensor]:
        return partial(self._build(weight))  # a module in a module would show its weight twice

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        raise TypeError(self._refusal)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        raise TypeError(self._refusal)

    @property
    def _refusal(self) -> str:
        return f"{self._backend} has whole layers only: no cast and no product by itself. Use `whole`."
