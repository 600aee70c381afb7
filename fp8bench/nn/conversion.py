"""Temporarily computes some layers of any model in a different arithmetic.

The forward pass of such a layer is replaced on the instance: its class, parameters, hooks and state do not change, nor
do tied weights and existing optimizers. Undoing it removes the replacement. The result has the dtype that the
layer's own forward pass would give: the input's, or autocast's. Accelerate, which replaces layers itself, prepares a
whole model instead (`AcceleratedModel`).
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.around import rounded_forward, rounded_head
from fp8bench.nn.convolution import Windows, convolve
from fp8bench.nn.holders import (
    EXPERTS,
    LINEAR,
    ProductWeight,
    Stacked,
    check_map,
    kind_of,
    layers_around,
    refuse_meta,
    weight_of,
    weights_of,
)
from fp8bench.nn.linear import grouped_linear, linear, region
from fp8bench.nn.whole_layers import WholeLayers
from fp8bench.protocols import Arithmetic, Layer, Phases, SilentPhases, key_of

# Returns the arithmetic of a layer, or None to leave it unchanged.
Choose = Callable[[Layer], Arithmetic | None]


class Conversion:
    """While it is entered, layers of a model compute in the arithmetics that `choose` gives them.

        with Conversion(model, setup.layer, skip=["head"]) as conversion:
            conversion.phase = phase
            loss = model(**batch).loss

    `held` are all weights of products, with the reason where one is left unchanged. `multiples` are what native
    products of the device require of contractions and columns: a layer whose sides do not fit is left unchanged, and
    rows are padded. With `shown` each converted module has its arithmetic as an attribute, for whoever watches casts.
    `keys` are those of the precision map behind `choose`: a layer with two paths is asked for by the one that the map
    names.

    Raises UsageError if nothing would be converted, UnknownName for a pattern or key that names no layer; the model is
    untouched until this is entered. Copy a model before it is converted: replacements refer to the original.
    """

    def __init__(
        self,
        model: nn.Module,
        choose: Choose,
        *,
        skip: Sequence[str] = (),
        keys: Collection[str] = (),
        multiples: tuple[int, int] = (1, 1),
        shown: bool = False,
    ) -> None:
        refuse_meta(model)
        self._shown = shown
        self.phase: Phases = SilentPhases()
        self._rows = multiples[0]
        self._replaced: list[nn.Module] = []
        # 1. Find all products, and the layers around them that the map names.
        holders = weights_of(model, skip)
        parts = layers_around(model, holders)
        check_map(keys, holders, [layer for layer, _ in parts])
        self._around: list[tuple[nn.Module, Arithmetic]] = []
        for layer, module in parts:
            arithmetic = None if key_of(layer, keys) is None else choose(layer)
            if isinstance(arithmetic, WholeLayers):
                raise UsageError(
                    f"{layer.name} has no product, and a backend of whole layers has nothing else. Give {layer.kind} "
                    "another precision in --precision-map."
                )
            if arithmetic is not None:
                self._around.append((module, arithmetic))
        # 2. Choose an arithmetic for each, and a reason for each that is left unchanged.
        chosen = [(held, None if held.reason else choose(held.layer(keys))) for held in holders]
        self.held = tuple(_decide(held, arithmetic, multiples) for held, arithmetic in chosen)
        self._arithmetics = {
            id(held): arithmetic
            for held, (_, arithmetic) in zip(self.held, chosen, strict=True)
            if arithmetic is not None and not held.reason
        }
        # 3. A conversion that changes nothing would report the carrier's figures under the precision's name.
        if not self._arithmetics:
            raise UsageError(f"nothing of {type(model).__name__} can be converted ({_reasons(self.held)})")

    @property
    def converted_weights(self) -> tuple[ProductWeight, ...]:
        return tuple(held for held in self.held if not held.reason)

    def __enter__(self) -> Self:
        try:
            stacks: dict[nn.Module, list[ProductWeight]] = {}
            # Experts of one module share its forward pass, so they are replaced together.
            for held in self.converted_weights:
                if held.kind == EXPERTS:
                    stacks.setdefault(held.module, []).append(held)
                else:
                    if self._shown:
                        self._replaced.append(held.module)
                        vars(held.module)["arithmetic"] = self._arithmetics[id(held)]
                    self._replace(held.module, forward_of(held.module, held.kind, self._products(held)))
            # A listening forward pass recognises products with stacked weights as they happen.
            for module, parameters in stacks.items():
                self._replace(module, self._listening(module, parameters))
            for module, arithmetic in self._around:
                self._replace_around(module, arithmetic)
        # A conversion that fails half way must not leave a model half converted.
        except BaseException:
            self.undo()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def undo(self) -> None:
        while self._replaced:
            for name in ("forward", "arithmetic") if self._shown else ("forward",):
                vars(self._replaced[-1]).pop(name, None)
            self._replaced.pop()

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._replaced.append(module)  # first, so that an interrupt in between is undone
        vars(module)["forward"] = forward

    def _replace_around(self, module: nn.Module, arithmetic: Arithmetic) -> None:
        """For an embedding or a norm, all that it computes; for the head, the only other module, its output."""
        around = rounded_forward if isinstance(module, nn.Embedding) or not kind_of(module)[0] else rounded_head
        self._replace(module, around(module, arithmetic))
        if self._shown and around is rounded_forward:
            vars(module)["arithmetic"] = arithmetic

    def _products(self, held: ProductWeight) -> LayerProducts:
        home = held.module if self._shown and held.kind != EXPERTS else None
        return LayerProducts(self._arithmetics[id(held)], lambda: self.phase, self._rows, home)

    def _listening(self, module: nn.Module, parameters: Sequence[ProductWeight]) -> Callable[..., Any]:
        products = {parameter.parameter: self._products(parameter) for parameter in parameters}
        plain_forward = module.forward

        def forward(*arguments: Any, **options: Any) -> Any:
            with Stacked({name: getattr(module, name) for name in products}, products):
                return plain_forward(*arguments, **options)

        return forward


def _decide(held: ProductWeight, arithmetic: Arithmetic | None, multiples: tuple[int, int]) -> ProductWeight:
    if held.reason:
        return held
    if arithmetic is None:
        return replace(held, rule="kept", reason="kept as it is by the precision map")
    if isinstance(arithmetic, WholeLayers) and held.kind != LINEAR:
        return replace(held, rule="backend", reason=f"the backend has whole linear layers, and none for {held.kind}")
    wrong = misfit(held, multiples)
    return replace(held, rule="shape", reason=wrong) if wrong else held


def misfit(held: ProductWeight, multiples: tuple[int, int]) -> str:
    """Returns why native products refuse a layer's sides, or ''. Rows do not matter, because they can be padded."""
    least = max(multiples)  # each side is contracted in one product of the layer, and gives the columns of the next
    outputs, inputs = held.sides
    wrong = [f"{name}={size}" for name, size in (("N", outputs), ("K", inputs)) if size % least]
    verb = "is no multiple" if len(wrong) == 1 else "are no multiples"
    return f"{' and '.join(wrong)} {verb} of {least}, as native products want" if wrong else ""


def _reasons(held: Sequence[ProductWeight]) -> str:
    counts = Counter(holder.reason for holder in held)
    words = [f"{count} weight{'s' if count > 1 else ''}: {reason}" for reason, count in counts.most_common(3)]
    return "; ".join(words) or "it has no layer that multiplies by weights"


# x (..., K) times a weight (N, K) transposed, as (..., N).
Multiply = Callable[[Tensor, Tensor], Tensor]


@dataclass(eq=False)
class LayerProducts:
    """Products of one layer in one arithmetic. `phase` gives the markers of the running step.

    `rows` is what native products contract over in multiples of. Weight gradients contract over rows, which are padded
    with zeros: these change no product and no scale. `home` is the module that shows the arithmetic, if any.
    """

    chosen: Arithmetic
    phase: Callable[[], Phases]
    rows: int = 1
    home: nn.Module | None = None

    @property
    def arithmetic(self) -> Arithmetic:
        return self.chosen if self.home is None else vars(self.home)["arithmetic"]

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        dtype = _own_dtype(x)
        if not x.numel():  # an expert without tokens
            return F.linear(x, weight.to(x.dtype)).to(dtype)
        with _without_autocast(x):
            weight = self._master(weight)
            missing = -(x.numel() // x.shape[-1]) % self.rows
            if not missing:
                return linear(x, weight, self.arithmetic, self.phase()).to(dtype)
            flat = x.reshape(-1, x.shape[-1])
            y = linear(F.pad(flat, (0, 0, 0, missing)), weight, self.arithmetic, self.phase())
            return y[: len(flat)].view(*x.shape[:-1], -1).to(dtype)

    def multiply_groups(self, x: Tensor, weights: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """Multiplies parts of x (M, K) by their weights (N, K) transposed: the first sizes[0] rows by the first weight.

        It is one grouped product, its parts padded with zeros, if the arithmetic has one and most rows are not padding.
        """
        multiple = self.arithmetic.groups
        own_rows = self.arithmetic.part_rows
        filled = [max(own_rows, -(-size // own_rows) * own_rows) for size in sizes]
        parts = torch.split_with_sizes(x, list(sizes))
        sides = {side for weight in weights for side in weight.shape}
        # Mostly padding, or sides that its kernel refuses: one product a part is quicker.
        if not multiple or sum(filled) > 2 * len(x) or any(side % multiple for side in sides):
            pairs = zip(parts, weights, strict=True)
            products = [self.linear(part, weight) for part, weight in pairs if len(part)]
            return torch.cat(products) if products else self.linear(x, weights[0])
        rows = torch.cat([F.pad(part, (0, 0, 0, size - len(part))) for part, size in zip(parts, filled, strict=True)])
        ends = torch.tensor(filled, device=x.device).cumsum(0).to(torch.int32)
        masters = [self._master(weight) for weight in weights]
        dtype = _own_dtype(x)
        with _without_autocast(x):
            y = grouped_linear(rows, masters, filled, ends, self.arithmetic, self.phase(), [None] * len(masters)).to(
                dtype
            )
        # Cut off the rows that filled up the parts.
        cut = zip(torch.split_with_sizes(y, filled), sizes, strict=True)
        return torch.cat([part[:size] for part, size in cut])

    def _master(self, weight: Tensor) -> Tensor:
        wider = weight.dtype == torch.float64 != self.arithmetic.carrier
        return weight.to(torch.float32) if wider else weight

    def whole(self, multiply: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        phase = self.phase()
        dtype = _own_dtype(x)
        with _without_autocast(x):
            carried = x.to(self.arithmetic.carrier)
            if carried.requires_grad:
                return region(phase.gemm, multiply, carried).to(dtype)
            with phase.gemm:
                return multiply(carried).to(dtype)

    def convolution(self, x: Tensor, weight: Tensor, geometry: Windows, groups: int) -> Tensor:
        # torch keeps the layout of its input, and a layer after this one may rely on that.
        channels_last = any(
            tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
            for tensor in (x, weight)
        )
        dtype = _own_dtype(x)
        with _without_autocast(x):
            pixels = x.permute(0, 2, 3, 1)
            rows = self._master(weight).permute(0, 2, 3, 1).flatten(1)
            parts = [
                convolve(part, filters, geometry, self.arithmetic, self.phase())
                for part, filters in zip(pixels.chunk(groups, -1), rows.chunk(groups), strict=True)
            ]
            y = (parts[0] if groups == 1 else torch.cat(parts, -1)).permute(0, 3, 1, 2).to(dtype)
        return y if channels_last else y.contiguous()  # the next layer may take it for rows


def forward_of(module: nn.Module, kind: str, products: LayerProducts) -> Callable[..., Any]:
    if kind == "linear":
        multiply = products.linear
        if isinstance(weight := weight_of(module), nn.Parameter):
            whole_layer = products.arithmetic.whole(weight)
            multiply = multiply if whole_layer is None else partial(products.whole, whole_layer)
        return partial(_linear_forward, module, multiply)
    return partial(_conv1d if kind == "conv1d" else _conv2d, module, products)


# Argument names are those of the forward passes that these replace.
def _linear_forward(module: Any, multiply: Multiply, input: Tensor) -> Tensor:  # noqa: A002
    return _with_bias(multiply(input, module.weight), module.bias)


def _conv1d(module: Any, products: LayerProducts, x: Tensor) -> Tensor:
    return _with_bias(products.linear(x, module.weight.t()), module.bias)


def _conv2d(module: Any, products: LayerProducts, input: Tensor) -> Tensor:  # noqa: A002
    images = input if input.dim() == 4 else input[None]
    padding = module.padding
    if isinstance(padding, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        images = F.pad(images, module._reversed_padding_repeated_twice, mode)
        padding = (0, 0)
    geometry = Windows(tuple(module.kernel_size), tuple(module.stride), tuple(padding), tuple(module.dilation))
    y = products.convolution(images, module.weight, geometry, module.groups)
    if module.bias is not None:
        y = y + module.bias.to(y.dtype)[:, None, None]
    return y if input.dim() == 4 else y[0]


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def _own_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _without_autocast(x: Tensor) -> AbstractContextManager[None]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer | None]
# Class names of the layers that Accelerate puts in: torchao's, and MS-AMP's.
_CONVERTED = ("Float8Linear", "FP8Linear")
_TRANSFORMER_ENGINE = "transformer_engine"


class AcceleratedModel(PlainArithmetic):
    """bf16 as under Accelerate's autocast, for a model that Accelerate prepares by a recipe."""

    def __init__(self, recipe: str, level: str, facts: DeviceFacts) -> None:
        super().__init__(torch.bfloat16)
        self._recipe = recipe
        self._level = level
        self._facts = facts

    def prepare_model(
        self, model: nn.Module, optimizer_of: OptimizerOf
    ) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        """The prepared model and its optimizer.

        Raises UsageError where Accelerate refuses, or would change nothing. torchao's layers get new parameters, and an
        optimizer made before would never move them, so it is made afterwards. The other recipes want both at once.
        """
        name = type(model).__name__
        apart = self._recipe == "ao"
        # Its packages warn about versions whenever they are imported.
        with _quiet():
            try:
                from accelerate import Accelerator
                from accelerate.utils import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs

                recipes = {
                    "ao": AORecipeKwargs,
                    "te": TERecipeKwargs,
                    "msamp": partial(MSAMPRecipeKwargs, opt_level=self._level),
                }
                # The model is on its device already.
                accelerator = Accelerator(
                    mixed_precision="fp8",
                    kwargs_handlers=[recipes[self._recipe]()],
                    cpu=not self._facts.accelerated,
                    device_placement=False,
                )
                prepared = accelerator.prepare(model) if apart else model
                optimizer = optimizer_of([parameter for parameter in prepared.parameters() if parameter.requires_grad])
                if optimizer is not None:
                    optimizer = accelerator.prepare(optimizer) if apart else optimizer
                if not apart:
                    prepared, optimizer = accelerator.prepare(prepared, optimizer)
            # Refusals of Accelerate come as any of these; what is wrong is in the text.
            except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
                words = " ".join(str(error).split())
                raise UsageError(f"Accelerate prepares no {name} by recipe={self._recipe}: {words}") from error
        if not converted_in(prepared):
            raise UsageError(
                f"Accelerate converts nothing of {name}: it leaves the first and the last linear layer, and those "
                "whose sides are no multiples of 16, as they are. Choose fp8, or a model with more linear layers."
            )
        return prepared, optimizer


def converted_in(model: nn.Module) -> frozenset[str]:
    return frozenset(
        name
        for name, module in model.named_modules()
        if type(module).__name__ in _CONVERTED or type(module).__module__.partition(".")[0] == _TRANSFORMER_ENGINE
    )


def explain_unchanged(held: ProductWeight) -> ProductWeight:
    if held.kind != LINEAR:
        return replace(held, rule="class", reason="Accelerate converts nn.Linear alone")
    if any(side % 16 for side in held.sides):
        return replace(held, rule="shape", reason="Accelerate leaves layers whose sides are no multiples of 16")
    return replace(held, rule="kept", reason="Accelerate leaves the first and the last linear layer as they are")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings about kernels built for other versions, and about deprecations in Accelerate's packages."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
