"""Layers that cast more than an operand at once: those of another library, and weights cast once for several passes.

A library's layers cast and multiply in one: there is no cast and no product by itself. Weights are cast once by the
micro-batches of a step, as Transformer Engine does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8bench.model import LayerScale
from fp8bench.nn.linear import Linear, both_of
from fp8bench.nn.tensor_scales import largest_magnitudes
from fp8bench.protocols import Arithmetic, Fused, Operand, Phases, Role


class WholeLayer(NamedTuple):
    """What multiplies inputs by its weights, and what it says of its scales: part, role, largest magnitude, scale.

    `in_step` is the same in a step's passes, and whether it is the first: weights are cast in that one. None where the
    library casts them in each.
    """

    multiply: Callable[[Tensor], Tensor]
    scales: Callable[[], list[tuple[str, str, float, float]]] = list
    in_step: Callable[[Tensor, bool], Tensor] | None = None


# Makes the layer of a float32 weight.
Build = Callable[[nn.Parameter], WholeLayer]


class WholeLayers(Arithmetic):
    """A backend's layers as an arithmetic: `whole` makes one for each weight, which nobody may cast ahead of it.

    `around` is what a model's forward pass must run in, if anything; `fuse` makes layers of more than a product.
    """

    casts = False

    def __init__(
        self,
        backend: str,
        carrier: torch.dtype,
        build: Build,
        around: Callable[[], AbstractContextManager[None]] | None = None,
        fuse: Callable[[Fused], WholeLayer] | None = None,
    ) -> None:
        self.carrier = carrier
        self.around = around
        self._backend = backend
        self._build = build
        self._fuse = fuse
        self._name = ""
        self._layers: dict[str, WholeLayer] = {}
        # The layers that a step has passed already; no step is open while it holds None.
        self._passed: list[set[int] | None] = [None]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Passes until the end are those of one step: layers that can cast their weights in its first one alone."""
        self._passed[0] = set()
        try:
            yield
        finally:
            self._passed[0] = None

    def layer(self, name: str) -> Arithmetic:
        other = copy.copy(self)  # with the same layers
        other._name = name
        return other

    def whole(self, weight: nn.Parameter) -> Callable[[Tensor], Tensor]:
        return self._kept(self._build(weight))

    def fused(self, layers: Fused) -> Callable[[Tensor], Tensor] | None:
        return None if self._fuse is None else self._kept(self._fuse(layers))

    def _kept(self, made: WholeLayer) -> Callable[[Tensor], Tensor]:
        self._layers[self._name] = made

        def multiply(x: Tensor) -> Tensor:  # a module in a module would show its weight twice
            passed = self._passed[0]
            if made.in_step is None or passed is None:
                return made.multiply(x)
            first = id(made) not in passed
            passed.add(id(made))
            return made.in_step(x, first)

        return multiply

    def layer_scales(self) -> tuple[LayerScale, ...]:
        return tuple(
            LayerScale(f"{name}.{part}" if part else name, role, amax, scale)
            for name, made in self._layers.items()
            for part, role, amax, scale in made.scales()
        )

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        raise TypeError(self._refusal)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        raise TypeError(self._refusal)

    @property
    def _refusal(self) -> str:
        return f"{self._backend} has whole layers only: no cast and no product by itself. Use `whole`."


def surrounded(model: nn.Module) -> None:
    """Have each forward pass of a model run in what its whole layers need around it: once, and not once a layer."""
    arithmetics = (module.arithmetic for module in model.modules() if isinstance(module, Linear))
    around = next(
        (arithmetic.around for arithmetic in arithmetics if isinstance(arithmetic, WholeLayers) and arithmetic.around),
        None,
    )
    if around is None:
        return
    inner = model.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        with around():
            return inner(*arguments, **options)

    model.forward = forward


class CachedWeights:
    """The linear layers of a model whose weights a cast changes. Other weights are multiplied as they are.

    Layers of another library are told which pass is a step's first, and cast their weights by themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        linear = [module for module in model.modules() if isinstance(module, Linear)]
        self._layers = [layer for layer in linear if layer.arithmetic.casts]
        self._whole = [layer.arithmetic for layer in linear if isinstance(layer.arithmetic, WholeLayers)]

    @contextmanager
    def cast(self, phase: Phases) -> Iterator[None]:
        """Cast every weight, in both orientations; until the end layers multiply by these operands.

        Weights may not change before the end, and what was cast is gone then: nothing is left that could be old.
        """
        with ExitStack() as steps:
            for whole in self._whole:
                steps.enter_context(whole.step())
            try:
                if self._layers:
                    with phase.cast, torch.no_grad():
                        self._cast()
                yield
            finally:
                for layer in self._layers:
                    layer.operands = None

    def _cast(self) -> None:
        taking = [layer for layer in self._layers if layer.arithmetic.takes_amax]
        amaxes = dict(zip(taking, largest_magnitudes([linear.weight for linear in taking]), strict=True))
        for layer in self._layers:
            weight = layer.weight if layer.unit is None else layer.weight * layer.factor
            layer.operands = both_of(layer.arithmetic, weight, amaxes.get(layer))
