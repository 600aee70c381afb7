"""Precisions that are recipes of casts and scales: FP8 with float32 scales, OCP's MX formats in blocks of 32
elements, NVIDIA's NVFP4, and custom recipes.

`Precision` and `RecipePrecision` explain the attributes of these classes. `rank` sorts precisions, the highest first.
`words` names the formats in messages. `element` is the format of all tensors, unless options choose formats. `block`
has the rows and columns that share a scale, where 0 stands for all. `scale_format` is the format of that scale, None
for float32, and `self.scale` is how the options round it. In a native product, the contraction must be a multiple of
the first number in `multiples`, and the number of columns of the result a multiple of the second. Only precisions
whose native casts are Triton kernels have `CAST_KERNELS_OPTION`, which switches these kernels off.
"""

from __future__ import annotations

from fp8bench.errors import RecipeRefused
from fp8bench.formats import hardware
from fp8bench.formats.grids import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FORMATS, Format
from fp8bench.formats.recipes import (
    LONGEST_HISTORY,
    MAX_SCALE_MARGIN,
    TENSOR,
    Amax,
    DelayedScaling,
    Recipe,
    ScaleRounding,
    Scaling,
    Treatment,
)
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.shared_precisions import (
    ACCUMULATOR_OPTION,
    CAST_KERNELS_OPTION,
    HIGH_WEIGHT_GRADIENT_OPTION,
    MX_SCALE_OPTION,
    RecipePrecision,
    float_scale_option,
    formats_option,
    hadamard_option,
    stochastic_option,
)
from fp8bench.protocols.axes import Option, one_of, read_integers, whole_number
from fp8bench.registry import precisions


@precisions.register("fp8")
class Fp8(RecipePrecision):
    """FP8 with more mantissa bits in the forward pass (E4M3), and more range for gradients (E5M2)."""

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
        HIGH_WEIGHT_GRADIENT_OPTION,
        ACCUMULATOR_OPTION,
        CAST_KERNELS_OPTION,
    )


@precisions.register("fp8-block")
class Fp8Block(RecipePrecision):
    """FP8 with blocks that are small enough to isolate outliers. Hopper kernels add partial sums of 128 products in
    float32 anyway, so that each partial sum belongs to one block.
    """

    name = "fp8-block"
    summary = (
        "E4M3 for every tensor, one power-of-two float32 scale for 1x128 of inputs and gradients along the contraction "
        "and for 128x128 of weights, elements to nearest even."
    )
    rank = 43
    words = "block-scaled FP8"
    compiled_multiple = 128  # torch's compiler needs complete blocks, although torch's kernels do not
    options = (
        float_scale_option(ScaleRounding.POWER_OF_TWO),
        ACCUMULATOR_OPTION,
        HIGH_WEIGHT_GRADIENT_OPTION,
        CAST_KERNELS_OPTION,
    )

    def make_recipe(self) -> Recipe:
        # DeepSeek-V3 was trained with blocks of these shapes.
        row_block_treatment = Treatment(E4M3, Scaling(1, 128, rounding=self.scale))
        square_block_treatment = Treatment(E4M3, Scaling(128, 128, rounding=self.scale))
        inputs, weights, gradients = row_block_treatment, square_block_treatment, row_block_treatment
        return self.build_recipe((inputs, weights, gradients))


@precisions.register("fp8-delayed")
class Fp8Delayed(RecipePrecision):
    """FP8 with a scale that is computed from earlier tensors, so that a tensor is not read twice. Values above the
    earlier maximum saturate.
    """

    name = "fp8-delayed"
    summary = (
        "E4M3 inputs and weights, E5M2 gradients, one float32 scale a tensor from the largest of its last 1024 amaxes, "
        "elements to nearest even."
    )
    rank = 41
    words = "FP8"
    options = (
        Option(
            "history",
            "number of earlier amaxes from which a scale is computed",
            "1024",
            whole_number(1, LONGEST_HISTORY),
        ),
        Option(
            "algorithm", "which of these amaxes is used: the max, or the most_recent", Amax.MAX.value, one_of(*Amax)
        ),
        Option("margin", "scales are divided by 2^margin", "0", whole_number(0, MAX_SCALE_MARGIN)),
        Option("interval", "casts between two scales", "1", whole_number(1, LONGEST_HISTORY)),
        formats_option("hybrid"),
        HIGH_WEIGHT_GRADIENT_OPTION,
        ACCUMULATOR_OPTION,
        CAST_KERNELS_OPTION,
    )

    def make_recipe(self) -> Recipe:
        history, margin, interval = read_integers(self.chosen, "history", "margin", "interval")
        delayed = DelayedScaling(history, Amax(str(self.chosen["algorithm"])), margin, interval)
        # A delayed scale is known before its tensor is read, and applies to the whole tensor. So no option selects a
        # different scaling.
        return self.build_recipe((Treatment(fmt, TENSOR) for fmt in self.formats), delayed)


@precisions.register("fp8-e4m3")
class Fp8E4M3(RecipePrecision):
    """FP8 with E4M3 for gradients too. This suffices if one scale covers the range of a tensor's values."""

    name = "fp8-e4m3"
    summary = "E4M3 for every tensor, gradients included, one current float32 scale a tensor, elements to nearest even."
    rank = 44
    words = "FP8"
    element = E4M3
    options = (
        float_scale_option(ScaleRounding.EXACT),
        HIGH_WEIGHT_GRADIENT_OPTION,
        ACCUMULATOR_OPTION,
        CAST_KERNELS_OPTION,
    )


@precisions.register("fp8-e5m2")
class Fp8E5M2(RecipePrecision):
    """FP8 that shows what it costs to have only two mantissa bits."""

    name = "fp8-e5m2"
    summary = (
        "E5M2 for every tensor, one current float32 scale a tensor, elements to nearest even; native on AMD's and "
        "Intel's GPUs alone."
    )
    rank = 45
    words = "FP8"
    element = E5M2
    options = (float_scale_option(ScaleRounding.EXACT), HIGH_WEIGHT_GRADIENT_OPTION, ACCUMULATOR_OPTION)


@precisions.register("fp8-unit")
class Fp8Unit(RecipePrecision):
    """FP8 for unit-scaled models, whose tensors fit the range of FP8 without scales."""

    name = "fp8-unit"
    summary = (
        "E4M3 inputs and weights, E5M2 gradients, no scales: the model is unit-scaled, so constants computed from its "
        "shapes keep the standard deviation of tensors near 1, elements to nearest even."
    )
    rank = 46
    words = "FP8"
    unit_scaled = True
    options = (formats_option("hybrid"), HIGH_WEIGHT_GRADIENT_OPTION, ACCUMULATOR_OPTION)

    def make_recipe(self) -> Recipe:
        return self.build_recipe(Treatment(fmt) for fmt in self.formats)


@precisions.register("fp8-rowwise")
class Fp8Rowwise(RecipePrecision):
    """FP8 with a scale for each row. An outlier spoils only its row, so even gradients need no E5M2."""

    name = "fp8-rowwise"
    summary = (
        "E4M3 for every tensor, one current power-of-two scale a row along the contraction of each product, elements "
        "to nearest even."
    )
    rank = 42
    words = "row-wise FP8"
    block = (1, 0)
    options = (
        formats_option("e4m3"),
        float_scale_option(ScaleRounding.POWER_OF_TWO),
        HIGH_WEIGHT_GRADIENT_OPTION,
        CAST_KERNELS_OPTION,
    )


_MX_SUMMARY = (
    "elements for every tensor in blocks of 32 along the contraction, E8M0 block scales rounded up (RCEIL), elements "
    "to nearest even."
)


@precisions.register("mxfp4")
class MxFp4(RecipePrecision):
    """OCP MXFP4. Training may need rotations and stochastic rounding, which are off by default."""

    name = "mxfp4"
    summary = f"E2M1 {_MX_SUMMARY}"
    rank = 70
    words = "MXFP4"
    options = (MX_SCALE_OPTION, stochastic_option("off"), hadamard_option("off"), HIGH_WEIGHT_GRADIENT_OPTION)

    def make_recipe(self) -> Recipe:
        scaling = Scaling(1, 32, E8M0, self.scale)
        # Only gradients are rounded stochastically, because their rounding errors would otherwise add up during a
        # training. Rounding errors of weights do not add up.
        nearest_rounding_treatment = Treatment(E2M1, scaling)
        return self.build_recipe(
            (
                nearest_rounding_treatment,
                nearest_rounding_treatment,
                Treatment(E2M1, scaling, self.chosen["stochastic"] == "on"),
            )
        )


# The formats of inputs, weights and gradients for each value of the option `formats`.
_MXFP6_FORMATS = {"e3m2": (E3M2, E3M2, E3M2), "e2m3": (E2M3, E2M3, E2M3), "hybrid": (E2M3, E2M3, E3M2)}


@precisions.register("mxfp6")
class MxFp6(RecipePrecision):
    """OCP MXFP6. It takes three quarters of the bytes of MXFP8. On hardware with FP6 units it is as fast as MXFP8."""

    name = "mxfp6"
    summary = f"E3M2 {_MX_SUMMARY}"
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
            aliases=("format",),
        ),
        MX_SCALE_OPTION,
        HIGH_WEIGHT_GRADIENT_OPTION,
    )

    @property
    def formats(self) -> tuple[Format, Format, Format]:
        return _MXFP6_FORMATS[str(self.chosen["formats"])]


@precisions.register("mxfp8")
class MxFp8(RecipePrecision):
    """OCP MXFP8 with E4M3 in every role. Each block of 32 elements has a scale, so that the range of E5M2 is not
    needed.
    """

    name = "mxfp8"
    summary = f"E4M3 {_MX_SUMMARY}"
    rank = 50
    words = "MXFP8"
    multiples = (32, 16)
    block = (1, 32)
    scale_format = E8M0
    options = (MX_SCALE_OPTION, formats_option("e4m3"), HIGH_WEIGHT_GRADIENT_OPTION, CAST_KERNELS_OPTION)


# The number of elements that share one E4M3 scale in Blackwell's tensor cores.
_NVFP4_BLOCK = 16


@precisions.register("nvfp4", "fp4")
class NvFp4(RecipePrecision):
    """All parts of NVIDIA's recipe for training in NVFP4. Each part can be switched off by an option."""

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
            "weights",
            "2d: blocks of 16x16, the same values in both directions; 1d: blocks of 16",
            "2d",
            one_of("2d", "1d"),
        ),
        stochastic_option("on"),
        hadamard_option("on"),
        Option(
            "scale",
            "block scales to nearest, or up; those of stochastic gradients always up",
            "nearest",
            one_of(ScaleRounding.NEAREST, ScaleRounding.UP),
        ),
        HIGH_WEIGHT_GRADIENT_OPTION,
    )

    def make_recipe(self) -> Recipe:
        weight_rows = _NVFP4_BLOCK if self.chosen["weights"] == "2d" else 1
        is_stochastic = self.chosen["stochastic"] == "on"
        # If a scale is rounded down, the largest values of its block saturate. That would bias stochastic rounding.
        gradient_rounding = ScaleRounding.UP if is_stochastic else self.scale
        return self.build_recipe(
            (
                Treatment(E2M1, Scaling(1, _NVFP4_BLOCK, E4M3, self.scale)),
                Treatment(E2M1, Scaling(weight_rows, _NVFP4_BLOCK, E4M3, self.scale)),
                Treatment(E2M1, Scaling(1, _NVFP4_BLOCK, E4M3, gradient_rounding), is_stochastic),
            )
        )


# For each value of `scaling`: the rows and columns of a block (0: all), the format of its scale, and the default
# rounding of that scale.
_SCALINGS: dict[str, tuple[int, int, Format | None, ScaleRounding]] = {
    "tensor": (0, 0, None, ScaleRounding.EXACT),
    "row": (1, 0, None, ScaleRounding.EXACT),
    "1x128": (1, 128, None, ScaleRounding.EXACT),
    "128x128": (128, 128, None, ScaleRounding.EXACT),
    "mx": (1, 32, E8M0, ScaleRounding.RCEIL),
    "nvfp4": (1, 16, E4M3, ScaleRounding.NEAREST),
}
# The value of option `scaling` for no scaling.
_NO_SCALING = "none"
# The value of option `scale` for the default rounding of the scaling.
_DEFAULT_ROUNDING = "auto"
# The options `input`, `weight` and `gradient` choose formats for single operands. With this value, an operand has the
# format of the option `format`.
_SAME_FORMAT_WORD = "same"
# All formats except E8M0, which has only powers of two and serves only for scales.
_ELEMENT_FORMATS = tuple(name for name, fmt in FORMATS.items() if fmt is not E8M0)


def _parse_element_format(text: str) -> str:
    """Returns the name of an element format. 'e4m3' stands for e4m3fn, the variant of all hardware except MI300."""
    return one_of(*_ELEMENT_FORMATS)(E4M3.name if text == "e4m3" else text)


def _make_role_format_option(role: str) -> Option:
    """Makes the option that chooses the element format of one role."""
    return Option(
        role,
        f"element format of {role}s; {_SAME_FORMAT_WORD}: that of option format",
        _SAME_FORMAT_WORD,
        lambda text: _SAME_FORMAT_WORD if text == _SAME_FORMAT_WORD else _parse_element_format(text),
    )


@precisions.register("custom")
class Custom(RecipePrecision):
    """A precision for comparing formats and scalings. Every device emulates it."""

    name = "custom"
    summary = (
        "Any element format under any scaling, by default e4m3fn under one float32 scale a tensor: "
        "custom:format=e3m2:scaling=row."
    )
    rank = 90
    words = "custom formats"
    options = (
        Option(
            "format", f"element format of all tensors: {', '.join(_ELEMENT_FORMATS)}", E4M3.name, _parse_element_format
        ),
        _make_role_format_option("input"),
        _make_role_format_option("weight"),
        _make_role_format_option("gradient"),
        Option(
            "scaling",
            f"the values that share a scale: {_NO_SCALING}, {', '.join(_SCALINGS)}",
            "tensor",
            one_of(_NO_SCALING, *_SCALINGS),
        ),
        Option(
            "scale",
            f"how scales are rounded; {_DEFAULT_ROUNDING}: exact, rceil for mx, nearest for nvfp4",
            _DEFAULT_ROUNDING,
            one_of(_DEFAULT_ROUNDING, *ScaleRounding),
        ),
        HIGH_WEIGHT_GRADIENT_OPTION,
    )

    def make_recipe(self) -> Recipe:
        # A role without a separate format gets the format of all tensors.
        role_formats = [str(self.chosen[role]) for role in ("input", "weight", "gradient")]
        common_format = str(self.chosen["format"])
        return self.build_recipe(
            Treatment(
                FORMATS[common_format if role_format == _SAME_FORMAT_WORD else role_format], self._make_chosen_scaling()
            )
            for role_format in role_formats
        )

    def own_support(self, facts: DeviceFacts) -> Support:
        """Emulates the recipe, even if the device has hardware for an equal recipe."""
        return hardware.emulated_everywhere(facts, self.words)

    def _make_chosen_scaling(self) -> Scaling | None:
        scaling = str(self.chosen["scaling"])
        chosen_rounding = str(self.chosen["scale"])
        # Without scaling there is no scale to round, so refuse a chosen rounding instead of ignoring it.
        if scaling == _NO_SCALING:
            if chosen_rounding != _DEFAULT_ROUNDING:
                raise RecipeRefused(
                    f"scaling={_NO_SCALING} leaves scale={chosen_rounding} nothing to round: leave one out."
                )
            return None
        # By default scales are rounded as hardware rounds them for this scaling.
        rows, columns, scale_format, default_rounding = _SCALINGS[scaling]
        return Scaling(
            rows,
            columns,
            scale_format,
            default_rounding if chosen_rounding == _DEFAULT_ROUNDING else ScaleRounding(chosen_rounding),
        )
