"""Layers of other libraries, each of which casts and multiplies in one call. Also: weights that are cast once for
many passes.

A library's layer has no separate cast or product. The weights of fp8bench's own layers can be cast once for all
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
from fp8bench.nn.linear import Linear, cast_weight_both_ways
from fp8bench.nn.tensor_scales import largest_magnitudes
from fp8bench.protocols import Arithmetic, Fused, Operand, Phases, Role


class LibraryLayer(NamedTuple):
    """A layer of a library, as functions.

    `multiply` multiplies inputs by the layer's weights. `scales` lists its scales as (part, role, largest magnitude,
    scale). In a step with several passes, `multiply_in_step` multiplies instead. Its second argument is True in the
    first pass of the step, which casts the weights. `multiply_in_step` is None if the library casts weights in each
    pass.
    """

    multiply: Callable[[Tensor], Tensor]
    scales: Callable[[], list[tuple[str, str, float, float]]] = list
    multiply_in_step: Callable[[Tensor, bool], Tensor] | None = None


# Makes a library's layer that uses a given float32 weight.
BuildLayer = Callable[[nn.Parameter], LibraryLayer]


class LibraryLayerArithmetic(Arithmetic):
    """An arithmetic that uses a library's layers. `whole` makes a layer from an fp32 weight, and `fuse` a layer with
    several products. A model's forward pass must run inside the context `around`, unless it is None.
    """

    casts = False

    def __init__(
        self,
        backend: str,
        carrier: torch.dtype,
        build: BuildLayer,
        around: Callable[[], AbstractContextManager[None]] | None = None,
        fuse: Callable[[Fused], LibraryLayer] | None = None,
        separate: Callable[[], Arithmetic] | None = None,
    ) -> None:
        self.carrier = carrier
        self._separate = separate
        self.around = around
        self._backend = backend
        self._build = build
        self._fuse = fuse
        self._name = ""
        self._layers: dict[str, LibraryLayer] = {}
        # Ids of the layers that have run in the current step, or None between steps. The set is in a list, so that
        # copies of this object share it.
        self._passed_layers: list[set[int] | None] = [None]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Opens a context for all passes of one step. Layers may cast their weights only in the first pass."""
        self._passed_layers[0] = set()
        try:
            yield
        finally:
            self._passed_layers[0] = None

    def layer(self, name: str) -> Arithmetic:
        copy_for_layer = copy.copy(self)  # not a deep copy: all layers share _layers and _passed_layers
        copy_for_layer._name = name
        return copy_for_layer

    def whole(self, weight: nn.Parameter) -> Callable[[Tensor], Tensor]:
        return self._register_layer(self._build(weight))

    def separate(self) -> Arithmetic:
        return self if self._separate is None else self._separate()

    def fuse(self, layers: Fused) -> Callable[[Tensor], Tensor] | None:
        return None if self._fuse is None else self._register_layer(self._fuse(layers))

    def _register_layer(self, layer: LibraryLayer) -> Callable[[Tensor], Tensor]:
        self._layers[self._name] = layer

        # Return a function: torch would register a module as a submodule, and list its weight twice.
        def multiply(x: Tensor) -> Tensor:
            passed_layer_ids = self._passed_layers[0]
            if layer.multiply_in_step is None or passed_layer_ids is None:
                return layer.multiply(x)
            is_first_layer_pass = id(layer) not in passed_layer_ids
            passed_layer_ids.add(id(layer))
            return layer.multiply_in_step(x, is_first_layer_pass)

        return multiply

    def layer_scales(self) -> tuple[LayerScale, ...]:
        scales = []
        for name, layer in self._layers.items():
            for part, role, amax, scale in layer.scales():
                scales.append(LayerScale(f"{name}.{part}" if part else name, role, amax, scale))
        return tuple(scales)

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        raise TypeError(self._inseparable_refusal_text)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        raise TypeError(self._inseparable_refusal_text)

    @property
    def _inseparable_refusal_text(self) -> str:
        return f"{self._backend} has no separate cast or product, only layers that do both. Use `whole`."


@dataclass(eq=False)
class SeparateProductArithmetic(Arithmetic):
    """An arithmetic that calls a library's casts and products separately. The data of its operands are tensors of the
    library.

    The last argument of `quantise` is whether the operand is transposed for its product. `multiply(a, b, ...)` returns
    a times b transposed. Its last two arguments are the dtype of the result, and whether a or b is a gradient.
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


def wrap_model_forward(model: nn.Module) -> None:
    """Runs each forward pass of a model inside the context that its library's layers need."""
    # Enter the library's context once around the whole forward pass, not once in each layer.
    arithmetics = (module.arithmetic for module in model.modules() if isinstance(module, Linear))
    around = next(
        (
            arithmetic.around
            for arithmetic in arithmetics
            if isinstance(arithmetic, LibraryLayerArithmetic) and arithmetic.around
        ),
        None,
    )
    if around is None:
        return
    original_forward = model.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        with around():
            return original_forward(*arguments, **options)

    model.forward = forward


class CachedWeights:
    """Casts the weights of a model's linear layers once for many passes.

    Layers of other libraries cast their weights themselves. For them, only the first pass of a step is marked.
    """

    def __init__(self, model: nn.Module) -> None:
        linear = [module for module in model.modules() if isinstance(module, Linear)]
        self._layers = [layer for layer in linear if layer.arithmetic.casts]
        self._library_arithmetics = [
            layer.arithmetic for layer in linear if isinstance(layer.arithmetic, LibraryLayerArithmetic)
        ]

    @contextmanager
    def cast(self, phase: Phases) -> Iterator[None]:
        """Opens a context in which layers multiply by weights that are cast now, in both orientations.

        Weights must not change inside the context. On exit the operands are dropped, because the weights may change
        afterwards.
        """
        with ExitStack() as steps:
            for whole_layer in self._library_arithmetics:
                steps.enter_context(whole_layer.step())
            try:
                # Cast all weights here, before the first of the step's micro-batches.
                if self._layers:
                    with phase.cast, torch.no_grad():
                        self._cast_weights()
                yield
            finally:
                for layer in self._layers:
                    layer.operands = None

    def _cast_weights(self) -> None:
        layers_without_amax = []
        for layer in self._layers:
            # A cast with a delayed scale finds the largest magnitude itself.
            finds_amax = layer.arithmetic.settles and casts_in_one_call(layer.weight)
            if layer.arithmetic.takes_amax and not finds_amax:
                layers_without_amax.append(layer)
        amaxes = dict(
            zip(layers_without_amax, largest_magnitudes([linear.weight for linear in layers_without_amax]), strict=True)
        )
        for layer in self._layers:
            weight = layer.weight if layer.unit_scaling is None else layer.weight * layer.weight_factor
            layer.operands = cast_weight_both_ways(layer.arithmetic, weight, amaxes.get(layer))
