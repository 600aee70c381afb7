"""Layers that cast more than one operand at a time: another library's, and weights that are cast once for many passes.

A library's layer casts and multiplies in one: it has no separate cast or product. Weights are cast once for all
micro-batches of a step, as in Transformer Engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8bench.formats.native_codes import casts_in_one_call
from fp8bench.model import LayerScale
from fp8bench.nn.linear import Linear, cast_both_ways
from fp8bench.nn.tensor_scales import largest_magnitudes
from fp8bench.protocols import Arithmetic, Fused, Operand, Phases, Role


class WholeLayer(NamedTuple):
    """A library's layer: `multiply` its inputs by its weights, and `scales` (part, role, largest magnitude, scale).

    `in_step` multiplies within a step; its second argument is whether this is the step's first pass, which casts the
    weights. None where the library casts them in each pass.
    """

    multiply: Callable[[Tensor], Tensor]
    scales: Callable[[], list[tuple[str, str, float, float]]] = list
    in_step: Callable[[Tensor, bool], Tensor] | None = None


# Makes a layer around a float32 weight.
Build = Callable[[nn.Parameter], WholeLayer]


class WholeLayers(Arithmetic):
    """A backend's layers as an arithmetic: `whole` makes one for each weight, which must not be cast before.

    A model's forward pass must run inside `around`, if given; `fuse` makes layers of more than one product.
    """

    casts = False

    def __init__(
        self,
        backend: str,
        carrier: torch.dtype,
        build: Build,
        around: Callable[[], AbstractContextManager[None]] | None = None,
        fuse: Callable[[Fused], WholeLayer] | None = None,
        separate: Callable[[], Arithmetic] | None = None,
    ) -> None:
        self.carrier = carrier
        self._separate = separate
        self.around = around
        self._backend = backend
        self._build = build
        self._fuse = fuse
        self._name = ""
        self._layers: dict[str, WholeLayer] = {}
        # The layers that the open step has passed; None between steps. In a list, so that copies share it.
        self._passed: list[set[int] | None] = [None]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Makes passes in the body one step: layers that can cast their weights in its first pass only."""
        self._passed[0] = set()
        try:
            yield
        finally:
            self._passed[0] = None

    def layer(self, name: str) -> Arithmetic:
        named = copy.copy(self)  # shares _layers and _passed
        named._name = name
        return named

    def whole(self, weight: nn.Parameter) -> Callable[[Tensor], Tensor]:
        return self._remember(self._build(weight))

    def separate(self) -> Arithmetic:
        return self if self._separate is None else self._separate()

    def fuse(self, layers: Fused) -> Callable[[Tensor], Tensor] | None:
        return None if self._fuse is None else self._remember(self._fuse(layers))

    def _remember(self, layer: WholeLayer) -> Callable[[Tensor], Tensor]:
        self._layers[self._name] = layer

        def multiply(x: Tensor) -> Tensor:  # a function: a module inside a module would list its weight twice
            passed = self._passed[0]
            if layer.in_step is None or passed is None:
                return layer.multiply(x)
            first = id(layer) not in passed
            passed.add(id(layer))
            return layer.in_step(x, first)

        return multiply

    def layer_scales(self) -> tuple[LayerScale, ...]:
        scales = []
        for name, layer in self._layers.items():
            for part, role, amax, scale in layer.scales():
                scales.append(LayerScale(f"{name}.{part}" if part else name, role, amax, scale))
        return tuple(scales)

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        raise TypeError(self._refusal)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        raise TypeError(self._refusal)

    @property
    def _refusal(self) -> str:
        return f"{self._backend} has whole layers only, and no separate cast or product. Use `whole`."


@dataclass(eq=False)
class SingleProducts(Arithmetic):
    """A library's casts and products, called one by one. The data of operands are the library's own tensors.

    The last argument of `quantise` is whether the role is turned for its product; `multiply` (a, b, dtype, whether a
    gradient is among them) gives a times b transposed.
    """

    keeps_source = True
    carrier: torch.dtype
    quantise: Callable[[Tensor, Role, bool], Tensor]
    multiply: Callable[[Tensor, Tensor, torch.dtype, bool], Tensor]
    dequantise: Callable[[Tensor], Tensor]

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(self.quantise(tensor, role, False), gradient=role is Role.GRADIENT)

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        return Operand(self.quantise(source, role, True), gradient=role is Role.GRADIENT)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return self.multiply(a.data, b.data, dtype, a.gradient or b.gradient)

    def restore(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        return self.dequantise(operand.data).to(dtype)


def surround(model: nn.Module) -> None:
    """Makes each forward pass of a model run in what its whole layers need around it: once, not once a layer."""
    # A library's context goes around the whole forward pass, or each layer would enter it again.
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
    """Casts the weights of a model's linear layers once for many passes.

    Other libraries' layers cast their own weights, and only learn which pass is the first of a step.
    """

    def __init__(self, model: nn.Module) -> None:
        linear = [module for module in model.modules() if isinstance(module, Linear)]
        self._layers = [layer for layer in linear if layer.arithmetic.casts]
        self._whole = [layer.arithmetic for layer in linear if isinstance(layer.arithmetic, WholeLayers)]

    @contextmanager
    def cast(self, phase: Phases) -> Iterator[None]:
        """Casts every weight in both orientations; in the body layers multiply by these operands.

        Weights may not change in the body, and the operands are dropped at its end, so that none can be stale.
        """
        with ExitStack() as steps:
            for whole_layer in self._whole:
                steps.enter_context(whole_layer.step())
            try:
                # Layers multiply by what was cast here, so that a step with several micro batches casts once.
                if self._layers:
                    with phase.cast, torch.no_grad():
                        self._cast()
                yield
            finally:
                for layer in self._layers:
                    layer.operands = None

    def _cast(self) -> None:
        taking = []
        for layer in self._layers:
            # A cast with a delayed scale finds the magnitude while it casts.
            finds = layer.arithmetic.settles and casts_in_one_call(layer.weight)
            if layer.arithmetic.takes_amax and not finds:
                taking.append(layer)
        amaxes = dict(zip(taking, largest_magnitudes([linear.weight for linear in taking]), strict=True))
        for layer in self._layers:
            weight = layer.weight if layer.unit is None else layer.weight * layer.factor
            layer.operands = cast_both_ways(layer.arithmetic, weight, amaxes.get(layer))
