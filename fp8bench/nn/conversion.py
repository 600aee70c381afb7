"""Temporarily computes some layers of a model in a different arithmetic.

The forward pass of such a layer is replaced on the instance, and the replacement is removed to undo the conversion. The
layer's class, parameters, hooks and state do not change, nor do tied weights and existing optimizers. The result has
the dtype of the layer's original forward pass, which is the input's or autocast's.

Accelerate replaces layers itself, so `AcceleratedModel` lets it prepare the whole model instead.
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
from fp8bench.formats.recipes import round_up
from fp8bench.model import DeviceFacts
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.around import make_rounded_forward, make_rounded_head_forward
from fp8bench.nn.convolution import ConvolutionGeometry, convolve
from fp8bench.nn.holders import (
    EXPERTS_KIND,
    LINEAR_KIND,
    ProductWeight,
    StackedWeightWatch,
    check_precision_map,
    classify_module,
    find_product_weights,
    get_weight,
    list_surrounding_layers,
    refuse_meta_parameters,
)
from fp8bench.nn.linear import grouped_linear, linear, region
from fp8bench.nn.whole_layers import LibraryLayerArithmetic
from fp8bench.protocols import Arithmetic, Layer, Phases, SilentPhases, find_map_key

# A function that returns the arithmetic of a layer, or None if the layer shall not change.
ChooseLayerArithmetic = Callable[[Layer], Arithmetic | None]


class Conversion:
    """A context in which layers of a model compute in the arithmetics that `choose` returns for them.

        with Conversion(model, setup.layer, skip=["head"]) as conversion:
            conversion.phase = phase
            loss = model(**batch).loss

    `product_weights` lists all weights that the model multiplies by, with a reason for each that is not converted. On
    this device, K and N of native products must be multiples of the two numbers in `multiples`. So rows are padded, and
    a layer whose inputs or outputs do not fit is not converted. With `shown`, each converted module gets its arithmetic
    as an attribute, so that other code can watch its casts. `keys` are the keys of the precision map that `choose`
    uses. If a layer has two paths, `choose` gets the path that a key matches.

    Raises UsageError if no layer would be converted, and UnknownName for a pattern or key that matches no layer. The
    model does not change until the context is entered. Copy a model before converting it, because replacements refer to
    the original.
    """

    def __init__(
        self,
        model: nn.Module,
        choose: ChooseLayerArithmetic,
        *,
        skip: Sequence[str] = (),
        keys: Collection[str] = (),
        multiples: tuple[int, int] = (1, 1),
        shown: bool = False,
    ) -> None:
        refuse_meta_parameters(model)
        self._shown = shown
        self.phase: Phases = SilentPhases()
        self._row_multiple = multiples[0]
        self._replaced: list[nn.Module] = []
        # 1. Find all weights of products, and the layers around them (such as norms) that the precision map names.
        holders = find_product_weights(model, skip)
        surrounding_layers = list_surrounding_layers(model, holders)
        check_precision_map(keys, holders, [layer for layer, _ in surrounding_layers])
        self._around: list[tuple[nn.Module, Arithmetic]] = []
        for layer, module in surrounding_layers:
            arithmetic = None if find_map_key(layer, keys) is None else choose(layer)
            if isinstance(arithmetic, LibraryLayerArithmetic):
                raise UsageError(
                    f"{layer.name} has no matrix product, and this backend only has layers with one. Give {layer.kind} "
                    "another precision in --precision-map."
                )
            if arithmetic is not None:
                self._around.append((module, arithmetic))
        # 2. Choose an arithmetic for each weight, or a reason why it is not converted.
        arithmetics = [
            (product_weight, None if product_weight.reason else choose(product_weight.layer(keys)))
            for product_weight in holders
        ]
        self.product_weights = tuple(
            _apply_conversion_rules(product_weight, arithmetic, multiples) for product_weight, arithmetic in arithmetics
        )
        self._arithmetics = {
            id(product_weight): arithmetic
            for product_weight, (_, arithmetic) in zip(self.product_weights, arithmetics, strict=True)
            if arithmetic is not None and not product_weight.reason
        }
        # 3. Refuse a conversion that converts no layer. Its figures would not be those of the precision.
        if not self._arithmetics:
            raise UsageError(
                f"no layer of {type(model).__name__} can be converted ({_list_reasons(self.product_weights)}). "
                "`fp8bench profile --dtypes untouched` measures it unchanged. To convert it, build these layers from "
                "nn.Linear."
            )

    @property
    def converted_weights(self) -> tuple[ProductWeight, ...]:
        return tuple(product_weight for product_weight in self.product_weights if not product_weight.reason)

    def __enter__(self) -> Self:
        try:
            weights_by_module: dict[nn.Module, list[ProductWeight]] = {}
            # All experts of a module share the module's forward pass, so they are replaced together.
            for product_weight in self.converted_weights:
                if product_weight.kind == EXPERTS_KIND:
                    weights_by_module.setdefault(product_weight.module, []).append(product_weight)
                else:
                    if self._shown:
                        self._replaced.append(product_weight.module)
                        vars(product_weight.module)["arithmetic"] = self._arithmetics[id(product_weight)]
                    self._replace_forward(
                        product_weight.module,
                        make_forward(product_weight.module, product_weight.kind, self._make_products(product_weight)),
                    )
            # A module of experts distributes its rows itself. So run its forward pass, and replace the products in it.
            for module, parameters in weights_by_module.items():
                self._replace_forward(module, self._make_stacked_forward(module, parameters))
            for module, arithmetic in self._around:
                self._replace_surrounding_layer(module, arithmetic)
        # If a replacement fails, undo all of them, so that no model stays half converted.
        except BaseException:
            self.restore_forward_passes()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.restore_forward_passes()

    def restore_forward_passes(self) -> None:
        while self._replaced:
            for name in ("forward", "arithmetic") if self._shown else ("forward",):
                vars(self._replaced[-1]).pop(name, None)
            self._replaced.pop()

    def _replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        # Record the module first, so that its forward pass is also restored after an interrupt before the next line.
        self._replaced.append(module)
        vars(module)["forward"] = forward

    def _replace_surrounding_layer(self, module: nn.Module, arithmetic: Arithmetic) -> None:
        """Replaces the forward pass of an embedding or a norm by one in this arithmetic. A head keeps its forward
        pass, and only its output is rounded.
        """
        make_replacement = (
            make_rounded_forward
            if isinstance(module, nn.Embedding) or not classify_module(module)[0]
            else make_rounded_head_forward
        )
        self._replace_forward(module, make_replacement(module, arithmetic))
        if self._shown and make_replacement is make_rounded_forward:
            vars(module)["arithmetic"] = arithmetic

    def _make_products(self, product_weight: ProductWeight) -> LayerProducts:
        arithmetic_module = product_weight.module if self._shown and product_weight.kind != EXPERTS_KIND else None
        return LayerProducts(
            self._arithmetics[id(product_weight)], lambda: self.phase, self._row_multiple, arithmetic_module
        )

    def _make_stacked_forward(self, module: nn.Module, parameters: Sequence[ProductWeight]) -> Callable[..., Any]:
        products = {parameter.parameter: self._make_products(parameter) for parameter in parameters}
        original_forward = module.forward

        def forward(*arguments: Any, **options: Any) -> Any:
            with StackedWeightWatch({name: getattr(module, name) for name in products}, products):
                return original_forward(*arguments, **options)

        return forward


def _apply_conversion_rules(
    product_weight: ProductWeight, arithmetic: Arithmetic | None, multiples: tuple[int, int]
) -> ProductWeight:
    if product_weight.reason:
        return product_weight
    if arithmetic is None:
        return replace(product_weight, rule="kept", reason="the precision map leaves it unconverted")
    if isinstance(arithmetic, LibraryLayerArithmetic) and product_weight.kind != LINEAR_KIND:
        return replace(
            product_weight,
            rule="backend",
            reason=f"the backend has linear layers only, and none for {product_weight.kind}",
        )
    misfit_text = explain_misfit(product_weight, multiples)
    return replace(product_weight, rule="shape", reason=misfit_text) if misfit_text else product_weight


def explain_misfit(product_weight: ProductWeight, multiples: tuple[int, int]) -> str:
    """Returns why native products refuse the shape of a layer's weight, or '' if they accept it. The rows of the
    layer's input are not checked, because they can be padded.
    """
    required_side_multiple = max(multiples)  # each side is K in one product of the layer and N in a second one
    outputs, inputs = product_weight.sides
    misfit_sides = [f"{name}={size}" for name, size in (("N", outputs), ("K", inputs)) if size % required_side_multiple]
    verb_phrase = "is no multiple" if len(misfit_sides) == 1 else "are no multiples"
    return (
        f"{' and '.join(misfit_sides)} {verb_phrase} of {required_side_multiple}, as native products require"
        if misfit_sides
        else ""
    )


def _list_reasons(product_weights: Sequence[ProductWeight]) -> str:
    counts = Counter(product_weight.reason for product_weight in product_weights)
    reasons = [f"{count} weight{'s' if count > 1 else ''}: {reason}" for reason, count in counts.most_common(3)]
    return "; ".join(reasons) or "it has no layer with a matrix product"


# A function that multiplies x (..., K) by a transposed weight (N, K). The result is (..., N).
MultiplyFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(eq=False)
class LayerProducts:
    """Computes the products of one layer in one arithmetic. `phase` returns the phase markers of the running step.

    Native products require K to be a multiple of `row_multiple`. A weight gradient sums over the rows of its input, so
    these rows are padded with zeros, which change no product and no scale. If `arithmetic_module` is set, the
    arithmetic is read from this module's attribute `arithmetic`.
    """

    chosen_arithmetic: Arithmetic
    phase: Callable[[], Phases]
    row_multiple: int = 1
    arithmetic_module: nn.Module | None = None

    @property
    def arithmetic(self) -> Arithmetic:
        return self.chosen_arithmetic if self.arithmetic_module is None else vars(self.arithmetic_module)["arithmetic"]

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        dtype = _get_result_dtype(x)
        if not x.numel():  # no rows: an expert without tokens
            return F.linear(x, weight.to(x.dtype)).to(dtype)
        with _disable_autocast(x):
            weight = self._limit_to_fp32(weight)
            padding_rows = -(x.numel() // x.shape[-1]) % self.row_multiple
            if not padding_rows:
                return linear(x, weight, self.arithmetic, self.phase()).to(dtype)
            flattened_input_rows = x.reshape(-1, x.shape[-1])
            y = linear(F.pad(flattened_input_rows, (0, 0, 0, padding_rows)), weight, self.arithmetic, self.phase())
            return y[: len(flattened_input_rows)].view(*x.shape[:-1], -1).to(dtype)

    def multiply_groups(self, x: Tensor, weights: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """Multiplies groups of rows of x (M, K) by transposed weights (N, K). The first sizes[0] rows are multiplied
        by the first weight, and so on.

        All groups run as one grouped product, if the arithmetic has one and if at least half of the padded rows hold
        tokens.
        """
        required_side_multiple = self.arithmetic.groups
        part_rows = self.arithmetic.part_rows
        padded_sizes = [max(part_rows, round_up(size, part_rows)) for size in sizes]
        rows_by_group = torch.split_with_sizes(x, list(sizes))
        weight_sides = {side for weight in weights for side in weight.shape}
        # If most rows would be padding, or the grouped kernel refuses a weight's shape, multiply the groups one by one.
        if (
            not required_side_multiple
            or sum(padded_sizes) > 2 * len(x)
            or any(side % required_side_multiple for side in weight_sides)
        ):
            part_weight_pairs = zip(rows_by_group, weights, strict=True)
            products = [self.linear(part, weight) for part, weight in part_weight_pairs if len(part)]
            return torch.cat(products) if products else self.linear(x, weights[0])
        rows = torch.cat(
            [F.pad(part, (0, 0, 0, size - len(part))) for part, size in zip(rows_by_group, padded_sizes, strict=True)]
        )
        ends = torch.tensor(padded_sizes, device=x.device).cumsum(0).to(torch.int32)
        limited_weights = [self._limit_to_fp32(weight) for weight in weights]
        dtype = _get_result_dtype(x)
        with _disable_autocast(x):
            y = grouped_linear(
                rows, limited_weights, padded_sizes, ends, self.arithmetic, self.phase(), [None] * len(limited_weights)
            ).to(dtype)
        # Remove the padding rows.
        results = zip(torch.split_with_sizes(y, padded_sizes), sizes, strict=True)
        return torch.cat([part[:size] for part, size in results])

    def _limit_to_fp32(self, weight: Tensor) -> Tensor:
        is_wider = weight.dtype == torch.float64 != self.arithmetic.carrier
        return weight.to(torch.float32) if is_wider else weight

    def run_whole_library_layer(self, multiply: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        phase = self.phase()
        dtype = _get_result_dtype(x)
        with _disable_autocast(x):
            carrier_input = x.to(self.arithmetic.carrier)
            if carrier_input.requires_grad:
                return region(phase.gemm, multiply, carrier_input).to(dtype)
            with phase.gemm:
                return multiply(carrier_input).to(dtype)

    def convolve_images(self, x: Tensor, weight: Tensor, geometry: ConvolutionGeometry, groups: int) -> Tensor:
        # Return the result in the memory layout of the input, as torch does: a later layer may rely on it.
        channels_last = any(
            tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
            for tensor in (x, weight)
        )
        dtype = _get_result_dtype(x)
        with _disable_autocast(x):
            pixels = x.permute(0, 2, 3, 1)
            rows = self._limit_to_fp32(weight).permute(0, 2, 3, 1).flatten(1)
            group_outputs = [
                convolve(part, filters, geometry, self.arithmetic, self.phase())
                for part, filters in zip(pixels.chunk(groups, -1), rows.chunk(groups), strict=True)
            ]
            y = (group_outputs[0] if groups == 1 else torch.cat(group_outputs, -1)).permute(0, 3, 1, 2).to(dtype)
        return y if channels_last else y.contiguous()  # the next layer may call `view`, which needs contiguous memory


def make_forward(module: nn.Module, kind: str, products: LayerProducts) -> Callable[..., Any]:
    if kind == "linear":
        multiply = products.linear
        if isinstance(weight := get_weight(module), nn.Parameter):
            library_layer = products.arithmetic.whole(weight)
            multiply = multiply if library_layer is None else partial(products.run_whole_library_layer, library_layer)
        return partial(_linear_forward, module, multiply)
    return partial(_conv1d_forward if kind == "conv1d" else _conv2d_forward, module, products)


# Parameter names are those of the forward passes that these functions replace.
def _linear_forward(module: Any, multiply: MultiplyFunction, input: Tensor) -> Tensor:  # noqa: A002
    return _add_bias(multiply(input, module.weight), module.bias)


def _conv1d_forward(module: Any, products: LayerProducts, x: Tensor) -> Tensor:
    return _add_bias(products.linear(x, module.weight.t()), module.bias)


def _conv2d_forward(module: Any, products: LayerProducts, input: Tensor) -> Tensor:  # noqa: A002
    images = input if input.dim() == 4 else input[None]  # nn.Conv2d also accepts a single image
    padding = module.padding
    # A convolution itself can pad only with zeros, and equally on opposite sides.
    if isinstance(padding, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        images = F.pad(images, module._reversed_padding_repeated_twice, mode)
        padding = (0, 0)
    convolution_geometry = ConvolutionGeometry(
        tuple(module.kernel_size), tuple(module.stride), tuple(padding), tuple(module.dilation)
    )
    y = products.convolve_images(images, module.weight, convolution_geometry, module.groups)
    if module.bias is not None:
        y = y + module.bias.to(y.dtype)[:, None, None]
    return y if input.dim() == 4 else y[0]


def _add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def _get_result_dtype(x: Tensor) -> torch.dtype:
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def _disable_autocast(x: Tensor) -> AbstractContextManager[None]:
    # Autocast would override the dtypes that the arithmetic chooses.
    device_type = x.device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer | None]
# Class names of FP8 layers that Accelerate inserts: torchao's and MS-AMP's.
_FP8_LAYER_CLASSES = ("Float8Linear", "FP8Linear")
_TE_PACKAGE = "transformer_engine"


class AcceleratedModel(PlainArithmetic):
    """Lets Accelerate prepare a model with an FP8 recipe, and runs the model in bf16 as under Accelerate's autocast."""

    def __init__(self, recipe: str, level: str, facts: DeviceFacts) -> None:
        super().__init__(torch.bfloat16)
        self._recipe = recipe
        self._level = level
        self._facts = facts

    def prepare_model(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        """Returns the model that Accelerate has prepared, and its optimizer.

        torchao's layers get new parameters, which an existing optimizer would never update. So with torchao the
        optimizer is made afterwards. The other recipes need model and optimizer together. Raises UsageError if
        Accelerate refuses, or would convert no layer.
        """
        name = type(model).__name__
        makes_optimizer_afterwards = self._recipe == "ao"
        # Accelerate's packages warn about versions on every import.
        with _silence_warnings():
            try:
                from accelerate import Accelerator
                from accelerate.utils import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs

                recipe_handlers = {
                    "ao": AORecipeKwargs,
                    "te": TERecipeKwargs,
                    "msamp": partial(MSAMPRecipeKwargs, opt_level=self._level),
                }
                # The model is already on its device, so Accelerate must not move it.
                accelerator = Accelerator(
                    mixed_precision="fp8",
                    kwargs_handlers=[recipe_handlers[self._recipe]()],
                    cpu=not self._facts.accelerated,
                    device_placement=False,
                )
                prepared_model = accelerator.prepare(model) if makes_optimizer_afterwards else model
                optimizer = make_optimizer(
                    [parameter for parameter in prepared_model.parameters() if parameter.requires_grad]
                )
                if optimizer is not None:
                    optimizer = accelerator.prepare(optimizer) if makes_optimizer_afterwards else optimizer
                if not makes_optimizer_afterwards:
                    prepared_model, optimizer = accelerator.prepare(prepared_model, optimizer)
            # Accelerate refuses with any of these errors. The text has the reason.
            except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
                error_text = " ".join(str(error).split())
                raise UsageError(
                    f"Accelerate cannot prepare {name} with recipe={self._recipe}: {error_text}"
                ) from error
        if not find_converted_layers(prepared_model):
            raise UsageError(
                f"Accelerate converts no layer of {name}: it skips the first and the last linear layer, and layers "
                "whose sides are not multiples of 16. Choose fp8, or a model with more linear layers."
            )
        return prepared_model, optimizer


def find_converted_layers(model: nn.Module) -> frozenset[str]:
    return frozenset(
        name
        for name, module in model.named_modules()
        if type(module).__name__ in _FP8_LAYER_CLASSES or type(module).__module__.partition(".")[0] == _TE_PACKAGE
    )


def explain_unconverted_weight(product_weight: ProductWeight) -> ProductWeight:
    if product_weight.kind != LINEAR_KIND:
        return replace(product_weight, rule="class", reason="Accelerate converts nn.Linear only")
    if any(side % 16 for side in product_weight.sides):
        return replace(
            product_weight, rule="shape", reason="Accelerate skips layers whose sides are not multiples of 16"
        )
    return replace(product_weight, rule="kept", reason="Accelerate skips the first and the last linear layer")


@contextmanager
def _silence_warnings() -> Iterator[None]:
    """Silences warnings of Accelerate's packages about kernels for other versions and about deprecations."""
    previous_disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_disabled_level)
