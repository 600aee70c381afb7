"""Base classes and options that precisions share. This module must not import torch, because planning imports it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from fp8bench.errors import RecipeRefused
from fp8bench.formats.grids import Format
from fp8bench.formats.hardware import refused
from fp8bench.formats.product_rules import do_row_scales_give_float32, find_grouped_size_multiple
from fp8bench.formats.recipe_support import explain_unknown_layout, recipe_on_device, recipe_support
from fp8bench.formats.recipes import (
    FORMATS_BY_ROLE,
    HOPPER_SUM_BITS,
    SHORT_SUM_BITS,
    Accumulator,
    DelayedScaling,
    Recipe,
    ScaleRounding,
    Scaling,
    Treatment,
)
from fp8bench.formats.triton_casts import choose_cast_compiler
from fp8bench.model import DeviceFacts, Level, Scalars, Support
from fp8bench.protocols import Arithmetic, Precision, TensorScale
from fp8bench.protocols.axes import Option, one_of

HIGH_WEIGHT_GRADIENT_OPTION = Option(
    "weight-gradient",
    "bf16: the weight gradient's product is computed in bf16; low: like the other products",
    "low",
    one_of("low", "bf16"),
    ("gw",),
)


def _parse_accumulator(text: str) -> str:
    """Parses how a product sums: 'fp32', 'short', 'promoted', or the number of bits of a short sum. Returns 'short' for
    the number of bits that Hopper has.
    """
    if text.isascii() and text.isdigit() and int(text) in SHORT_SUM_BITS:
        # One accumulator must have only one name, so remove leading zeros.
        return Accumulator.SHORT.value if int(text) == HOPPER_SUM_BITS else str(int(text))
    try:
        return one_of(*Accumulator)(text)
    except ValueError as error:
        raise ValueError(f"{error}; or a number of bits from {SHORT_SUM_BITS[0]} to {SHORT_SUM_BITS[-1]}") from None


ACCUMULATOR_OPTION = Option(
    "accumulator",
    "fp32; short: 14-bit sums as on Hopper, or a number of bits; promoted: short, added to fp32 every 128 elements",
    "fp32",
    _parse_accumulator,
)
CAST_KERNELS_OPTION = Option(
    "casts",
    "triton: on NVIDIA's GPUs by kernels written in Triton, where it is installed; compiled: by torch.compile",
    "triton",
    one_of("triton", "compiled"),
)
MX_SCALE_OPTION = Option(
    "scale",
    "rceil: quotient rounded up; floor: rounded down, as in OCP; even, ceil: as floor, but the amax is first rounded "
    "to nearest (even) or up (ceil)",
    ScaleRounding.RCEIL.value,
    one_of(ScaleRounding.FLOOR, ScaleRounding.EVEN, ScaleRounding.CEIL, ScaleRounding.RCEIL),
)


def formats_option(default: str) -> Option:
    return Option(
        "formats",
        "hybrid: E4M3 for inputs and weights, E5M2 for gradients; e4m3 or e5m2: for all",
        default,
        one_of(*FORMATS_BY_ROLE),
    )


def float_scale_option(default: ScaleRounding) -> Option:
    return Option(
        "scale",
        "exact: largest / amax; pow2: the next lower power of two, so that no value saturates",
        default.value,
        one_of(ScaleRounding.EXACT, ScaleRounding.POWER_OF_TWO),
    )


def stochastic_option(default: str) -> Option:
    return Option("stochastic", "on: gradients are rounded stochastically", default, one_of("on", "off"))


def hadamard_option(default: str) -> Option:
    return Option(
        "hadamard",
        "on: the weight gradient's operands are rotated by random Hadamard matrices of 16",
        default,
        one_of("on", "off"),
    )


class PlainPrecision(Precision):
    """A precision that uses one of torch's dtypes for every tensor and product."""

    dtype: ClassVar[str]

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic

        return PlainArithmetic(getattr(torch, self.dtype))


class RecipePrecision(Precision):
    """A precision whose options make a recipe. An impossible recipe is refused before anything is planned.

    `words` names the formats in messages about devices that do not support them. All roles have the same scaling,
    unless `make_recipe` is overridden. `block` is the shape (rows, columns) of the elements that share a scale, and
    `scale_format` the format of that scale. `element` is the format of every role, or None if options choose it.
    """

    carried_by = "bf16"
    takes_backend = True
    # K and N of scaled products must be multiples of 16. Recipes with block scales require larger multiples.
    multiples = (16, 16)
    words: ClassVar[str]
    block: ClassVar[tuple[int, int]] = (0, 0)
    scale_format: ClassVar[Format | None] = None
    element: ClassVar[Format | None] = None

    def __init__(self, chosen: Scalars | None = None) -> None:
        super().__init__(chosen)
        try:
            self.recipe = self.make_recipe()
        except RecipeRefused as error:
            raise RecipeRefused(f"{self.mode}: {error}") from None

    def make_recipe(self) -> Recipe:
        scaling = Scaling(*self.block, self.scale_format, self.scale)
        return self.build_recipe(Treatment(fmt, scaling) for fmt in self.formats)

    @property
    def tensor_scale(self) -> TensorScale:
        if not self.recipe.has_tensor_scales_only or self.whole_layers:
            return TensorScale.NONE
        return TensorScale.DELAYED if self.recipe.delayed else TensorScale.CURRENT

    @property
    def remembers(self) -> bool:
        return self.recipe.delayed is not None or any(treatment.stochastic for treatment in self.recipe.treatments)

    @contextmanager
    def scope(self) -> Iterator[None]:
        with super().scope(), choose_cast_compiler(self.chosen.get("casts") != "compiled"):
            yield

    def own_support(self, facts: DeviceFacts) -> Support:
        return recipe_support(self.recipe, self.words, facts)

    def support(self, facts: DeviceFacts) -> Support:
        if self.backend is None:
            return self.own_support(facts)
        support = self.backend.support(self, facts)
        if support.level is Level.REFUSED:  # installing the library would not help, so do not suggest it
            return support
        missing_package_reason = self.backend.missing(facts.version_of(self.backend.package))
        return refused(missing_package_reason) if missing_package_reason else support

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        if self.backend is not None:
            return self.backend.arithmetic(self, facts)
        from fp8bench.nn.arithmetics import RecipeArithmetic

        return self.native(facts) if self.own_support(facts).is_native else RecipeArithmetic(self.recipe)

    def native(self, facts: DeviceFacts) -> Arithmetic:
        return native_arithmetic(self.recipe, facts)

    def laid_out(self, facts: DeviceFacts) -> Arithmetic | str:
        if self.support(facts).is_native:
            return self.arithmetic(facts)
        if self.whole_layers:
            return f"{self.mode} is emulated inside a library's layers, whose stored tensors cannot be observed"
        return explain_unknown_layout(self.recipe) or self.native(facts)

    def build_recipe(self, treatments: Iterable[Treatment], delayed: DelayedScaling | None = None) -> Recipe:
        inputs, weight, gradient = treatments
        accumulator_name = str(self.chosen.get("accumulator", Accumulator.FP32))
        return Recipe(
            inputs,
            weight,
            gradient,
            delayed,
            hadamard=self.chosen.get("hadamard") == "on",
            high_weight_gradient=self.chosen.get("weight-gradient") == "bf16",
            accumulator=Accumulator.SHORT if accumulator_name.isdigit() else Accumulator(accumulator_name),
            accumulator_bits=int(accumulator_name) if accumulator_name.isdigit() else HOPPER_SUM_BITS,
        )

    @property
    def formats(self) -> tuple[Format, Format, Format]:
        return FORMATS_BY_ROLE[str(self.chosen["formats"])] if self.element is None else (self.element,) * 3

    @property
    def scale(self) -> ScaleRounding:
        return ScaleRounding(str(self.chosen["scale"]))


def native_arithmetic(recipe: Recipe, facts: DeviceFacts) -> Arithmetic:
    from fp8bench.nn.arithmetics import Float32RowScaledArithmetic, ScaledArithmetic
    from fp8bench.nn.block_arithmetic import BlockArithmetic

    device_recipe = recipe_on_device(recipe, facts)
    scaled_arithmetic_class = Float32RowScaledArithmetic if do_row_scales_give_float32(facts) else ScaledArithmetic
    arithmetic = (BlockArithmetic if device_recipe.has_block_scaling else scaled_arithmetic_class)(device_recipe)
    arithmetic.groups = find_grouped_size_multiple(device_recipe.products, facts)
    return arithmetic


def get_recipe(precision: Precision) -> Recipe:
    assert isinstance(precision, RecipePrecision)
    return precision.recipe


def refuse_backend_pairing(backend: str, precision: Precision, modes_of_backend: Iterable[str]) -> Support:
    modes = list(modes_of_backend)
    nearest = precision.name if precision.name in modes else difflib.get_close_matches(precision.name, modes, 1, 0.0)[0]
    return refused(f"{backend} has no recipe {precision.plain_mode}, only {', '.join(modes)}: the nearest is {nearest}")
