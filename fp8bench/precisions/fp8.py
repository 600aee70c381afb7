"""FP8 with float32 scales: hybrid or one format, a current or delayed scale a tensor, a scale a row, or one a block."""

from __future__ import annotations

from fp8bench.formats.grids import E4M3, E5M2
from fp8bench.formats.recipes import (
    LONGEST_HISTORY,
    MOST_MARGIN,
    TENSOR,
    Amax,
    Delayed,
    Recipe,
    ScaleRounding,
    Scaling,
    Treatment,
)
from fp8bench.nn.shared_precisions import (
    ACCUMULATOR,
    HIGH_WEIGHT_GRADIENT,
    RecipePrecision,
    float_scale_option,
    formats_option,
)
from fp8bench.protocols.axes import Option, one_of, whole_number
from fp8bench.registry import precisions


@precisions.register("fp8")
class Fp8(RecipePrecision):
    """More mantissa where the forward pass needs it, more exponent for gradients."""

    name = "fp8"
    summary = (
        "E4M3 inputs and weights, E5M2 gradients, one current float32 scale a tensor (largest / amax, not rounded to "
        "a power of two), elements to nearest even."
    )
    rank = 40
    words = "FP8"
    options = (formats_option("hybrid"), float_scale_option(ScaleRounding.EXACT), HIGH_WEIGHT_GRADIENT, ACCUMULATOR)


@precisions.register("fp8-block")
class Fp8Block(RecipePrecision):
    """Scales small enough for outliers, and large enough to be applied where sums are promoted anyway."""

    name = "fp8-block"
    summary = (
        "E4M3 for every tensor, one power-of-two float32 scale for 1x128 of inputs and gradients along the contraction "
        "and for 128x128 of weights, elements to nearest even."
    )
    rank = 43
    words = "block-scaled FP8"
    compiled_multiple = 128  # torch's shape function counts whole blocks only, where its kernels take a part of one
    options = (float_scale_option(ScaleRounding.POWER_OF_TWO), ACCUMULATOR, HIGH_WEIGHT_GRADIENT)

    def made(self) -> Recipe:
        rows = Treatment(E4M3, Scaling(1, 128, rounding=self.scale))
        squares = Treatment(E4M3, Scaling(128, 128, rounding=self.scale))
        return self.recipe_of((rows, squares, rows))


@precisions.register("fp8-delayed")
class Fp8Delayed(RecipePrecision):
    """A scale that is known before the tensor is: nothing has to be read twice, and what outgrows it saturates."""

    name = "fp8-delayed"
    summary = (
        "E4M3 inputs and weights, E5M2 gradients, one float32 scale a tensor from the largest of its last 1024 amaxes, "
        "elements to nearest even."
    )
    rank = 41
    words = "FP8"
    options = (
        Option("history", "amaxes that a scale comes from", "1024", whole_number(1, LONGEST_HISTORY),
               ("amax_history_len", "fp8_amax_history_len")),
        Option("algorithm", "what of them: the max, or the most_recent", Amax.MAX.value, one_of(*Amax),
               ("amax_compute_algo", "fp8_amax_compute_algo")),
        Option("margin", "scales are divided by 2^margin", "0", whole_number(0, MOST_MARGIN), ("fp8_margin",)),
        Option("interval", "casts between two scales", "1", whole_number(1, LONGEST_HISTORY), ("fp8_interval",)),
        formats_option("hybrid"), HIGH_WEIGHT_GRADIENT, ACCUMULATOR,
    )  # fmt: skip

    def made(self) -> Recipe:
        history, margin, interval = (int(self.chosen[name]) for name in ("history", "margin", "interval"))
        delayed = Delayed(history, Amax(str(self.chosen["algorithm"])), margin, interval)
        return self.recipe_of((Treatment(fmt, TENSOR) for fmt in self.formats), delayed)


@precisions.register("fp8-e4m3")
class Fp8E4M3(RecipePrecision):
    """Mantissa for gradients too, for those whose range a tensor's scale covers."""

    name = "fp8-e4m3"
    summary = "E4M3 for every tensor, gradients included, one current float32 scale a tensor, elements to nearest even."
    rank = 44
    words = "FP8"
    element = E4M3
    options = (float_scale_option(ScaleRounding.EXACT), HIGH_WEIGHT_GRADIENT, ACCUMULATOR)


@precisions.register("fp8-e5m2")
class Fp8E5M2(RecipePrecision):
    """What two bits of mantissa cost: no product of two E5M2 tensors exists on NVIDIA's devices."""

    name = "fp8-e5m2"
    summary = (
        "E5M2 for every tensor, one current float32 scale a tensor, elements to nearest even; native on AMD's and "
        "Intel's GPUs alone."
    )
    rank = 45
    words = "FP8"
    element = E5M2
    options = (float_scale_option(ScaleRounding.EXACT), HIGH_WEIGHT_GRADIENT, ACCUMULATOR)


@precisions.register("fp8-unit")
class Fp8Unit(RecipePrecision):
    """A model that keeps every tensor near a deviation of 1 has nothing to scale when it casts."""

    name = "fp8-unit"
    summary = (
        "E4M3 inputs and weights, E5M2 gradients, no scale at all: the model is unit-scaled, its tensors near a "
        "deviation of 1 by constants of its shapes, elements to nearest even."
    )
    rank = 46
    words = "FP8"
    unit_scaled = True
    options = (formats_option("hybrid"), HIGH_WEIGHT_GRADIENT, ACCUMULATOR)

    def made(self) -> Recipe:
        return self.recipe_of(Treatment(fmt) for fmt in self.formats)


@precisions.register("fp8-rowwise")
class Fp8Rowwise(RecipePrecision):
    """An outlier spoils its own row only, so that no role needs E5M2's range."""

    name = "fp8-rowwise"
    summary = (
        "E4M3 for every tensor, one current power-of-two scale a row along the contraction of each product, elements "
        "to nearest even."
    )
    rank = 42
    words = "row-wise FP8"
    block = (1, 0)
    options = (formats_option("e4m3"), float_scale_option(ScaleRounding.POWER_OF_TWO), HIGH_WEIGHT_GRADIENT)
