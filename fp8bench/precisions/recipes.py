"""Precisions that are recipes: FP8 with float32 scales; OCP's MX in blocks of 32; NVIDIA's NVFP4; and custom ones."""

from __future__ import annotations

from fp8bench.errors import RecipeRefused
from fp8bench.formats import hardware
from fp8bench.formats.grids import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FORMATS, Format
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
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.shared_precisions import (
    ACCUMULATOR,
    CASTS,
    HIGH_WEIGHT_GRADIENT,
    MX_SCALE,
    RecipePrecision,
    float_scale_option,
    formats_option,
    hadamard_option,
    stochastic_option,
)
from fp8bench.protocols.axes import Option, one_of, whole_number
from fp8bench.registry import precisions


@precisions.register("fp8")
class Fp8(RecipePrecision):
    """FP8 with one current scale a tensor: more mantissa in forward, more exponent for gradients."""

    name = "fp8"
    summary = (
        "E4M3 inputs and weights, E5M2 gradients, one current float32 scale a tensor (largest / amax, not rounded to "
        "a power of two), elements to nearest even."
    )
    rank = 40
    words = "FP8"
    options = (
        formats_option("hybrid"),
        float_scale_option(ScaleRounding.EXACT),
        HIGH_WEIGHT_GRADIENT,
        ACCUMULATOR,
        CASTS,
    )


@precisions.register("fp8-block")
class Fp8Block(RecipePrecision):
    """FP8 in blocks small enough for outliers, and large enough to scale where sums are promoted anyway."""

    name = "fp8-block"
    summary = (
        "E4M3 for every tensor, one power-of-two float32 scale for 1x128 of inputs and gradients along the contraction "
        "and for 128x128 of weights, elements to nearest even."
    )
    rank = 43
    words = "block-scaled FP8"
    compiled_multiple = 128  # torch's shape function wants whole blocks, its kernels do not
    options = (float_scale_option(ScaleRounding.POWER_OF_TWO), ACCUMULATOR, HIGH_WEIGHT_GRADIENT, CASTS)

    def make_recipe(self) -> Recipe:
        # As DeepSeek-V3: parts of rows for inputs and gradients, squares for weights.
        rows = Treatment(E4M3, Scaling(1, 128, rounding=self.scale))
        squares = Treatment(E4M3, Scaling(128, 128, rounding=self.scale))
        return self.recipe_of((rows, squares, rows))


@precisions.register("fp8-delayed")
class Fp8Delayed(RecipePrecision):
    """FP8 with a scale that is known before the tensor: nothing is read twice, and larger values saturate."""

    name = "fp8-delayed"
    summary = (
        "E4M3 inputs and weights, E5M2 gradients, one float32 scale a tensor from the largest of its last 1024 amaxes, "
        "elements to nearest even."
    )
    rank = 41
    words = "FP8"
    options = (
        Option("history", "amaxes that a scale comes from", "1024", whole_number(1, LONGEST_HISTORY)),
        Option("algorithm", "what of them: the max, or the most_recent", Amax.MAX.value, one_of(*Amax)),
        Option("margin", "scales are divided by 2^margin", "0", whole_number(0, MOST_MARGIN)),
        Option("interval", "casts between two scales", "1", whole_number(1, LONGEST_HISTORY)),
        formats_option("hybrid"),
        HIGH_WEIGHT_GRADIENT,
        ACCUMULATOR,
        CASTS,
    )

    def make_recipe(self) -> Recipe:
        history, margin, interval = (int(self.chosen[name]) for name in ("history", "margin", "interval"))
        delayed = Delayed(history, Amax(str(self.chosen["algorithm"])), margin, interval)
        # The scale is known before the tensor, so that rounding and history are all that there is to choose.
        return self.recipe_of((Treatment(fmt, TENSOR) for fmt in self.formats), delayed)


@precisions.register("fp8-e4m3")
class Fp8E4M3(RecipePrecision):
    """E4M3 for gradients too, if a tensor's scale covers their range."""

    name = "fp8-e4m3"
    summary = "E4M3 for every tensor, gradients included, one current float32 scale a tensor, elements to nearest even."
    rank = 44
    words = "FP8"
    element = E4M3
    options = (float_scale_option(ScaleRounding.EXACT), HIGH_WEIGHT_GRADIENT, ACCUMULATOR, CASTS)


@precisions.register("fp8-e5m2")
class Fp8E5M2(RecipePrecision):
    """Shows the cost of two mantissa bits. NVIDIA's devices have no product of two E5M2 tensors."""

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
    """FP8 without scales, for a unit-scaled model, whose tensors stay near a deviation of 1."""

    name = "fp8-unit"
    summary = (
        "E4M3 inputs and weights, E5M2 gradients, no scale at all: the model is unit-scaled, its tensors near a "
        "deviation of 1 by constants of its shapes, elements to nearest even."
    )
    rank = 46
    words = "FP8"
    unit_scaled = True
    options = (formats_option("hybrid"), HIGH_WEIGHT_GRADIENT, ACCUMULATOR)

    def make_recipe(self) -> Recipe:
        return self.recipe_of(Treatment(fmt) for fmt in self.formats)


@precisions.register("fp8-rowwise")
class Fp8Rowwise(RecipePrecision):
    """FP8 with a scale a row: an outlier spoils only its row, so no role needs E5M2's range."""

    name = "fp8-rowwise"
    summary = (
        "E4M3 for every tensor, one current power-of-two scale a row along the contraction of each product, elements "
        "to nearest even."
    )
    rank = 42
    words = "row-wise FP8"
    block = (1, 0)
    options = (formats_option("e4m3"), float_scale_option(ScaleRounding.POWER_OF_TWO), HIGH_WEIGHT_GRADIENT, CASTS)


_MX_WORDS = (
    "elements for every tensor in blocks of 32 along the contraction, E8M0 block scales rounded up (RCEIL), elements "
    "to nearest even."
)


@precisions.register("mxfp4")
class MxFp4(RecipePrecision):
    """OCP MXFP4, by default without the help (rotations, stochastic rounding) that training in it may need."""

    name = "mxfp4"
    summary = f"E2M1 {_MX_WORDS}"
    rank = 70
    words = "MXFP4"
    options = (MX_SCALE, stochastic_option("off"), hadamard_option("off"), HIGH_WEIGHT_GRADIENT)

    def make_recipe(self) -> Recipe:
        scaling = Scaling(1, 32, E8M0, self.scale)
        # Only gradients are rounded stochastically: their errors add up over a training, those of weights do not.
        plain = Treatment(E2M1, scaling)
        return self.recipe_of((plain, plain, Treatment(E2M1, scaling, self.chosen["stochastic"] == "on")))


# Input, weight and gradient.
_MXFP6_FORMATS = {"e3m2": (E3M2, E3M2, E3M2), "e2m3": (E2M3, E2M3, E2M3), "hybrid": (E2M3, E2M3, E3M2)}


@precisions.register("mxfp6")
class MxFp6(RecipePrecision):
    """OCP MXFP6: three quarters of MXFP8's bytes, at its speed where there are units for it."""

    name = "mxfp6"
    summary = f"E3M2 {_MX_WORDS}"
    rank = 55
    words = "MXFP6"
    block = (1, 32)
    scale_format = E8M0
    options = (
        Option(
            "formats",
            "e3m2 or e2m3: for all; hybrid: E2M3 for inputs and weights, E3M2 for gradients",
            "e3m2",
            one_of(*_MXFP6_FORMATS),
            ("format",),
        ),
        MX_SCALE,
        HIGH_WEIGHT_GRADIENT,
    )

    @property
    def formats(self) -> tuple[Format, Format, Format]:
        return _MXFP6_FORMATS[str(self.chosen["formats"])]


@precisions.register("mxfp8")
class MxFp8(RecipePrecision):
    """OCP MXFP8; E4M3 in every role, because blocks of 32 make E5M2's range unnecessary."""

    name = "mxfp8"
    summary = f"E4M3 {_MX_WORDS}"
    rank = 50
    words = "MXFP8"
    multiples = (32, 16)
    block = (1, 32)
    scale_format = E8M0
    options = (MX_SCALE, formats_option("e4m3"), HIGH_WEIGHT_GRADIENT, CASTS)


# The number of elements with one E4M3 scale, as the units of Blackwell multiply them.
_NVFP4_BLOCK = 16


@precisions.register("nvfp4", "fp4")
class NvFp4(RecipePrecision):
    """NVFP4 with all parts of NVIDIA's training recipe, each of which can be switched off."""

    name = "nvfp4"
    aliases = ("fp4",)
    summary = (
        "E2M1 elements, E4M3 block scales under one float32 tensor scale: blocks of 16 along the contraction, 16x16 of "
        "weights; gradients rounded stochastically, operands of the weight gradient turned by Hadamard matrices."
    )
    rank = 60
    words = "NVFP4"
    multiples = (32, 16)
    options = (
        Option(
            "weights", "2d: blocks of 16x16, the same values in both directions; 1d: of 16", "2d", one_of("2d", "1d")
        ),
        stochastic_option("on"),
        hadamard_option("on"),
        Option(
            "scale",
            "block scales to nearest, or up; those of stochastic gradients always up",
            "nearest",
            one_of(ScaleRounding.NEAREST, ScaleRounding.UP),
        ),
        HIGH_WEIGHT_GRADIENT,
    )

    def make_recipe(self) -> Recipe:
        rows = _NVFP4_BLOCK if self.chosen["weights"] == "2d" else 1
        stochastic = self.chosen["stochastic"] == "on"
        # Where scales are rounded down, a block's largest values saturate, and stochastic rounding becomes biased.
        upward = ScaleRounding.UP if stochastic else self.scale
        return self.recipe_of(
            (
                Treatment(E2M1, Scaling(1, _NVFP4_BLOCK, E4M3, self.scale)),
                Treatment(E2M1, Scaling(rows, _NVFP4_BLOCK, E4M3, self.scale)),
                Treatment(E2M1, Scaling(1, _NVFP4_BLOCK, E4M3, upward), stochastic),
            )
        )


# Rows and columns of a block, the format of its scale, and the default rounding of the scale.
_SCALINGS: dict[str, tuple[int, int, Format | None, ScaleRounding]] = {
    "tensor": (0, 0, None, ScaleRounding.EXACT),
    "row": (1, 0, None, ScaleRounding.EXACT),
    "1x128": (1, 128, None, ScaleRounding.EXACT),
    "128x128": (128, 128, None, ScaleRounding.EXACT),
    "mx": (1, 32, E8M0, ScaleRounding.RCEIL),
    "nvfp4": (1, 16, E4M3, ScaleRounding.NEAREST),
}
# Words of options that stand for no scaling, the usual rounding, and the common format.
_NONE = "none"
_AUTO = "auto"
_SAME = "same"
# E8M0 has powers of two only: it is for scales, and no element format.
_ELEMENTS = tuple(name for name, fmt in FORMATS.items() if fmt is not E8M0)


def _element(text: str) -> str:
    """The name of an element format. e4m3 means e4m3fn, which all hardware but MI300 has."""
    return one_of(*_ELEMENTS)(E4M3.name if text == "e4m3" else text)


def _own(role: str) -> Option:
    return Option(
        role, f"the format of {role}s, or the {_SAME}", _SAME, lambda text: _SAME if text == _SAME else _element(text)
    )


@precisions.register("custom")
class Custom(RecipePrecision):
    """Any format under any scaling; not a recipe that anybody trains with."""

    name = "custom"
    summary = (
        "Any element format under any scaling, e4m3fn under one float32 scale a tensor unless told otherwise: "
        "custom:format=e3m2:scaling=row."
    )
    rank = 90
    words = "custom formats"
    options = (
        Option("format", f"of all tensors: {', '.join(_ELEMENTS)}", E4M3.name, _element),
        _own("input"),
        _own("weight"),
        _own("gradient"),
        Option("scaling", f"what shares a scale: {_NONE}, {', '.join(_SCALINGS)}", "tensor", one_of(_NONE, *_SCALINGS)),
        Option(
            "scale",
            f"how scales are rounded; {_AUTO}: exact, rceil for mx, nearest for nvfp4",
            _AUTO,
            one_of(_AUTO, *ScaleRounding),
        ),
        HIGH_WEIGHT_GRADIENT,
    )

    def make_recipe(self) -> Recipe:
        # A role without a separate format has the common one.
        words = [str(self.chosen[role]) for role in ("input", "weight", "gradient")]
        common = str(self.chosen["format"])
        return self.recipe_of(Treatment(FORMATS[common if word == _SAME else word], self._scaling()) for word in words)

    def own_support(self, facts: DeviceFacts) -> Support:
        """Emulated even where it equals a recipe that has units."""
        return hardware.emulated_everywhere(facts, self.words)

    def _scaling(self) -> Scaling | None:
        extent = str(self.chosen["scaling"])
        rounding = str(self.chosen["scale"])
        # No scaling leaves nothing to round, so a rounding that was asked for would be ignored.
        if extent == _NONE:
            if rounding != _AUTO:
                raise RecipeRefused(f"scaling={_NONE} leaves scale={rounding} nothing to round: leave one out.")
            return None
        # Each scaling has the rounding that its hardware uses unless another one is chosen.
        rows, columns, scale_format, usual = _SCALINGS[extent]
        return Scaling(rows, columns, scale_format, usual if rounding == _AUTO else ScaleRounding(rounding))
