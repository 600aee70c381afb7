"""The suite gemm: one matrix product with the casts of its operands. Sizes are squares, rectangles, a matrix times a
vector (GEMV), or the layers of named models.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, MemoryRole, Params, Scalar, Scalars, Support, TensorStatistics, Work
from fp8bench.nn import served
from fp8bench.nn.shared_workloads import explain_missing_errors
from fp8bench.nn.sizes import MODELS, OPERAND_ROLES, TRANSPOSED_ROLES, get_product_sides, parse_model_products
from fp8bench.protocols import (
    MEMORY_ROLES,
    Arithmetic,
    Grid,
    Operand,
    Phases,
    Precision,
    Role,
    Setup,
    SilentPhases,
    Workload,
)
from fp8bench.protocols.axes import (
    CONTIGUOUS,
    LAYOUT,
    MATRIX_LAYOUTS,
    SPAN_FACTORS,
    STRIDED,
    VALUES,
    Axis,
    one_of,
    read_integers,
)
from fp8bench.registry import precisions, workloads
from fp8bench.suggestions import guess_intended_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fp8bench.nn.storage import StoredWeight

LARGEST_SIDE = 1 << 18
_CPU_PRODUCT_SHAPES = ("256", "512", "1024", "256x2048x512", "1x2048x2048")
# A sweep starts at 16, because sizes of native FP8 products are multiples of 16. It ends at four times the base side.
_SMALLEST_SWEEP_SIDE = 16
_LARGEST_BASE_MULTIPLE = 4
_PRODUCT_SIDE_NAMES = "mnk"
_OPERAND_CHOICES = ("cast", "ready")
_OPERAND_LAYOUT_SEPARATOR = "/"
_GPU_PRODUCT_SHAPES = ("1024", "2048", "4096", "8192", "16384x2048x4096", "1x8192x8192")


@dataclass
class GemmState:
    """The operands in the carrier's dtype, and the function that casts them. If operands are cast only once, before the
    timing, `prepared_operands` has the result. If weights are stored in a low-precision format, `b` holds the codes of
    the weight.
    """

    arithmetic: Arithmetic
    a: Tensor
    b: Tensor
    cast: Callable[[Tensor, Tensor], tuple[Operand, Operand]]
    prepared_operands: tuple[Operand, Operand] | None
    roles: tuple[Role, Role]
    stored_weight: StoredWeight | None = None

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MEMORY_ROLES[role]: tensor for role, tensor in zip(self.roles, (self.a, self.b), strict=True)}


@workloads.register("gemm")
class Gemm(Workload):
    """Multiplies a (m, k) by the transpose of b (n, k). Operands have the carrier's dtype: fp32 for fp32 and tf32, and
    bf16 for bf16 and smaller formats. So fp8 casts from bf16, and bf16 casts nothing.
    """

    name = "gemm"
    summary = "matrix products: squares, rectangles, GEMV, and the layers of models (model=llama3-8b, or by sizes)"
    history = Grid(
        cpu={"shape": ("512", "256x2048x512"), "product": ("forward",), "operands": ("cast",)},
        gpu={"shape": ("4096", "16384x2048x4096"), "product": ("forward",), "operands": ("cast",)},
        phases=("cast", "gemm"),
        errors=("product_error", "kernel_error"),
        per="flops",
    )
    numbers_ignore = ("operands",)
    single_products = True

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        shapes = _GPU_PRODUCT_SHAPES if facts.accelerated else _CPU_PRODUCT_SHAPES
        tokens = "8192" if facts.accelerated else "512"
        return (
            Axis(
                "shape",
                "M (a square) or MxNxK; ranges of sizes: sweep, sweep:m, sweep:nk; or a model, also as "
                f"model=: {', '.join(MODELS)}, or the sizes of a model with a gated feed-forward layer: "
                "hidden:4096/ffn:14336/heads:32/kv:8/tokens:16384",
                shapes,
                parse_shape,
                alias="model",
            ),
            Axis.choice(
                "product",
                "auto (all three for a model or a sweep), forward, input-gradient, weight-gradient",
                "auto",
                *OPERAND_ROLES,
            ),
            Axis.count("tokens", "rows of a model's activations", tokens, high=LARGEST_SIDE),
            Axis.choice(
                "operands",
                "cast: from the carrier in every step; ready: cast before timing; auto: cast, or both for a sweep",
                "auto",
                *_OPERAND_CHOICES,
            ),
            Axis(
                "base",
                "M or MxNxK: base sizes of a sweep, which varies one side from 16 to four times its base",
                ("4096" if facts.accelerated else "512",),
                parse_gemm_sides,
            ),
            Axis.count("factor", "factor between neighbouring sizes of a sweep", "2", low=2, high=64, quick=("4",)),
            replace(
                LAYOUT,
                description=f"{LAYOUT.description}; of both operands, or of each: transposed/contiguous",
                parse=parse_layouts,
            ),
            VALUES,
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        """Returns the cases that a shape stands for. A model stands for the products of all its layers. A sweep
        stands for all its sizes.
        """
        layout_and_value_params = (("layout", LAYOUT.of(params)), ("values", VALUES.of(params)))
        return tuple((*shape, *layout_and_value_params) for shape in self._expand_shape(params))

    def _expand_shape(self, params: Scalars) -> tuple[Params, ...]:
        shape = str(params["shape"])
        name, _, swept_sides = shape.partition(":")
        is_model_shape = _is_model_shape(shape)
        has_many_products = name == "sweep" or is_model_shape
        # By default, a model or a sweep has all three products of training, and a single shape has the forward product.
        products = _expand_auto_value(params["product"], tuple(OPERAND_ROLES) if has_many_products else ("forward",))
        operands = _expand_auto_value(params["operands"], _OPERAND_CHOICES if name == "sweep" else ("cast",))
        if is_model_shape:
            cases = []
            layer_features, tokens = parse_model_products(shape)
            for layer, product, operand_choice in itertools.product(layer_features, products, operands):
                product_sides = get_product_sides(product, tokens or int(params["tokens"]), *layer_features[layer])
                cases.append(
                    (("layer", f"{shape}/{layer}"), *_make_product_params(*product_sides, product, operand_choice))
                )
            return tuple(cases)
        if name == "sweep":
            sizes = tuple(
                _iterate_swept_shapes(
                    swept_sides or _PRODUCT_SIDE_NAMES,
                    _parse_product_dimensions(str(params["base"])),
                    int(params["factor"]),
                )
            )
        else:
            sizes = (_parse_product_dimensions(shape),)
        return tuple(
            _make_product_params(*product_sides, product, operand_choice)
            for operand_choice, product, product_sides in itertools.product(operands, products, sizes)
        )

    def work(self, params: Scalars) -> Work:
        m, n, k = read_integers(params, *"mnk")
        span_a, span_b = (SPAN_FACTORS.get(layout, 1) for layout in _read_operand_layouts(params))
        # The least memory: two bytes for each value of operands and result.
        return Work(flops=2.0 * m * n * k, least_memory=2.0 * (span_a * m * k + span_b * n * k + m * n))

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        k, n = read_integers(params, "k", "n")
        if reason := _explain_useless_layout(params, precision):
            return refused(reason)
        if precision.whole_layers and params["operands"] != "cast":
            return refused("a library's operands are cast in every step: choose operands=cast")
        # Weights that are stored for inference are not trained, so only the forward product exists.
        if precision.name == served.SERVED_PRECISION:
            if (params["product"], params["operands"]) != ("forward", "cast"):
                return refused(
                    "stored weights have forward products only, with inputs cast in every step: choose "
                    "product=forward, operands=cast"
                )
            return served.check_stored_weight_support(precision, n, k, facts)
        support = precision.support(facts)
        multiple_k, multiple_n = precision.multiples
        if support.is_native and (k % multiple_k or n % multiple_n):
            return refused(
                f"native {precision.name} needs K a multiple of {multiple_k} and N of {multiple_n}; this product has "
                f"K={k}, N={n}: pad it, or choose another shape"
            )
        return support

    def prepare(self, setup: Setup) -> GemmState:
        arithmetic, cast = _select_casts(setup)
        a, b, roles = _draw_operands(setup, arithmetic.carrier)
        if (stored_weight := _store_weight(setup, b)) is not None:
            return GemmState(arithmetic, a, stored_weight.tensors()[0], cast, None, roles, stored_weight)
        return GemmState(arithmetic, a, b, cast, cast(a, b) if setup.params["operands"] == "ready" else None, roles)

    def step(self, state: GemmState, phase: Phases) -> None:
        arithmetic = state.arithmetic
        if state.stored_weight is not None:
            state.stored_weight.multiply(state.a, phase)
            return
        # Ready operands were cast before timing. If the precision casts nothing, operands keep the carrier's dtype.
        if state.prepared_operands is not None:
            a, b = state.prepared_operands
        elif arithmetic.casts:
            with phase.cast:
                a, b = state.cast(state.a, state.b)
        else:
            a = Operand(state.a)
            b = Operand(state.b)
        with phase.gemm:
            arithmetic.product(a, b, arithmetic.carrier)
            del a, b  # the phase includes the time of freeing these tensors

    def error_refused(self, params: Scalars) -> str:
        return explain_missing_errors(params)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares the product with two fp64 products: that of the unrounded operands and that of the cast operands.
        Compares as many rows as a fixed number of FLOPs allows.
        """
        import torch

        from fp8bench.numerics import products

        a, b, _ = _draw_operands(setup)
        arithmetic, cast = _select_casts(setup)
        # 1. Draw operands in fp32 and round them to the carrier. This rounding is a part of the error.
        carrier_operands = a.to(arithmetic.carrier), b.to(arithmetic.carrier)
        operands_after_cast = cast(*carrier_operands)
        # Delayed scales fit the operands only after a first cast.
        if arithmetic.settles:
            operands_after_cast = cast(*carrier_operands)
        # 2. Compute the product, and the values that the codes of the operands represent.
        if (stored_weight := _store_weight(setup, carrier_operands[1])) is not None:
            product = stored_weight.multiply(carrier_operands[0], SilentPhases())
            restored_operands = (carrier_operands[0].float(), stored_weight.restore())
        else:
            product = arithmetic.product(operands_after_cast[0], operands_after_cast[1], arithmetic.carrier)
            restored_operands = (
                arithmetic.restore(operands_after_cast[0], torch.float32),
                arithmetic.restore(operands_after_cast[1], torch.float32),
            )
        # 3. Compare with the exact operands, and with the rounded operands that the kernel got.
        errors = products.measure_product_errors(
            product, (a, b), restored_operands, products.choose_product_error_rows(a.shape[0], b.shape[0], a.shape[1])
        )
        return dict(zip(("product_error", "kernel_error"), errors, strict=True))

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        from fp8bench.numerics.ranges import compute_statistics

        a, b, roles = _draw_operands(setup)
        return compute_statistics([("a", roles[0].value, a), ("b", roles[1].value, b)])


def parse_shape(text: str) -> str:
    """Parses a shape. It can be '512' (a square), '1x2048x512' (MxNxK), a model, 'sweep:m' (sizes of M), or 'sweep'
    (sizes of M, N and K).
    """
    if text.lower() in MODELS:
        return text.lower()
    if _is_model_shape(text):
        parse_model_products(text)  # called only to raise ValueError if the model's sizes are invalid
        return text
    name, colon, swept_sides = text.partition(":")
    if name == "sweep":
        if (
            (colon and not swept_sides)
            or not set(swept_sides) <= set(_PRODUCT_SIDE_NAMES)
            or len(set(swept_sides)) < len(swept_sides)
        ):
            raise ValueError("expected sweep, or sweep: and the sides that vary, of m, n and k: sweep:m, sweep:nk")
        return text
    try:
        return parse_gemm_sides(text)
    except ValueError as error:
        nearest_model_name = guess_intended_name("model", text, MODELS)
        hint = f"; the nearest is {nearest_model_name!r}" if nearest_model_name else ""
        sizes = "hidden:4096/ffn:14336/heads:32/kv:8"
        raise ValueError(f"{error}, sweep, {sizes}, or one of {', '.join(MODELS)}{hint}") from None


def _is_model_shape(shape: str) -> bool:
    return shape in MODELS or "hidden:" in shape


def parse_gemm_sides(text: str) -> str:
    """Returns '512x512x512' for '512', and '1x2048x512' (MxNxK) unchanged. Raises ValueError."""
    side_texts = text.split("x")
    if len(side_texts) not in (1, 3) or not all(side.isascii() and side.isdigit() for side in side_texts):
        raise ValueError("expected a size, MxNxK")
    # A single number means a square.
    numbers = [int(side) for side in side_texts] * (1 if len(side_texts) == 3 else 3)
    if not all(1 <= number <= LARGEST_SIDE for number in numbers):
        raise ValueError(f"expected sizes from 1 to {LARGEST_SIDE}")
    return "x".join(str(number) for number in numbers)


def _parse_product_dimensions(text: str) -> tuple[int, int, int]:
    m, n, k = (int(side) for side in text.split("x"))
    return m, n, k


def _iterate_swept_shapes(swept_sides: str, base: tuple[int, int, int], factor: int) -> Iterator[tuple[int, int, int]]:
    """Yields product sizes (M, N, K) that differ from `base` in one side, for each of `swept_sides` in turn. This side
    goes from 16 to four times its base size.
    """
    for swept_index in map(_PRODUCT_SIDE_NAMES.index, swept_sides):
        side = _SMALLEST_SWEEP_SIDE
        while side <= min(_LARGEST_BASE_MULTIPLE * base[swept_index], LARGEST_SIDE):
            m, n, k = (side if index == swept_index else base_side for index, base_side in enumerate(base))
            yield m, n, k
            side *= factor


def _expand_auto_value(value: Scalar, auto: tuple[str, ...]) -> tuple[str, ...]:
    return auto if value == "auto" else (str(value),)


def _make_product_params(m: int, n: int, k: int, product: str, operands: str) -> Params:
    return (("m", m), ("n", n), ("k", k), ("product", product), ("operands", operands))


def parse_layouts(text: str) -> str:
    """Parses one layout for both operands, such as 'strided', or a layout for each, such as 'transposed/contiguous' for
    a and b. Returns a single layout if both are equal.
    """
    texts = text.split(_OPERAND_LAYOUT_SEPARATOR)
    if len(texts) > 2:
        raise ValueError(
            f"expected one layout, or two as in transposed{_OPERAND_LAYOUT_SEPARATOR}contiguous; layouts: "
            f"{', '.join(MATRIX_LAYOUTS)}"
        )
    first_layout, *other_layouts = map(one_of(*MATRIX_LAYOUTS), texts)
    return (
        first_layout
        if other_layouts in ([], [first_layout])
        else _OPERAND_LAYOUT_SEPARATOR.join((first_layout, *other_layouts))
    )


def _read_operand_layouts(params: Scalars) -> tuple[str, str]:
    first_layout, _, second_layout = str(LAYOUT.of(params)).partition(_OPERAND_LAYOUT_SEPARATOR)
    return first_layout, second_layout or first_layout


def _explain_useless_layout(params: Scalars, precision: Precision) -> str:
    """Returns why a layout would change nothing in this case. Returns '' if it has an effect or is the default."""
    layout_by_operand = dict(zip("ab", _read_operand_layouts(params), strict=True))
    operands_with_layout = [name for name, layout in layout_by_operand.items() if layout != CONTIGUOUS]
    if precision.name == served.SERVED_PRECISION and "b" in operands_with_layout:
        return "weights are stored row by row, whatever their layout: choose contiguous for operand b"
    # Operands that are cast before timing have the same codes in every layout, so this case would repeat another case.
    if operands_with_layout and precision.carried_by and params["operands"] == "ready":
        return (
            "codes are written the way that the product reads them, whatever layout they are cast from: measure "
            "operands=cast, in which that is done in every step"
        )
    for name, layout in layout_by_operand.items():
        rows = int(params["m" if name == "a" else "n"])
        if rows == 1 and layout not in (CONTIGUOUS, STRIDED):
            return (
                f"operand {name} is a single row, stored alike in layout={layout} and contiguous: choose contiguous or "
                "strided"
            )
    return ""


def _select_casts(setup: Setup) -> tuple[Arithmetic, Callable[[Tensor, Tensor], tuple[Operand, Operand]]]:
    """Returns the case's arithmetic, in which casts are separate calls from products, and a function that casts both
    operands of the product.
    """
    product = str(setup.params["product"])
    arithmetic = setup.arithmetic.separate()
    (role_a, role_b) = OPERAND_ROLES[product]
    cast_a, cast_b = (
        arithmetic.cast_transpose if role in TRANSPOSED_ROLES[product] else arithmetic.cast for role in (role_a, role_b)
    )
    return arithmetic, lambda a, b: (cast_a(a, role_a), cast_b(b, role_b))


def _store_weight(setup: Setup, b: Tensor) -> StoredWeight | None:
    """Returns the weight as inference stores it. Returns None unless the case's precision stores weights in a
    low-precision format.
    """
    from fp8bench.nn.storage import store_weight

    precision = precisions.get(setup.case.precision)
    if precision.name != served.SERVED_PRECISION:
        return None
    served_arm = served.choose_served_arm({"kv": served.OWN, "weights": served.OWN}, precision)
    weight_format = served_arm.weight_format
    return None if weight_format in served.CARRIER_BYTES else store_weight(b, weight_format, served_arm.low_inputs)


def _draw_operands(setup: Setup, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, tuple[Role, Role]]:
    """Draws operands from the seed. They are Gaussian unless the case asks for other values. Each operand is drawn in
    fp32 and converted before the next is drawn, because two in fp32 may not fit into memory.
    """
    import torch

    from fp8bench.numerics import distributions

    params = setup.params
    k = int(params["k"])
    generator = distributions.make_seeded_generator(setup.facts.key, setup.seed)
    a, b = (
        distributions.apply_layout(
            distributions.draw_values(params, (int(params[rows]), k), generator, setup.facts.key).to(
                dtype or torch.float32
            ),
            layout,
        )
        for rows, layout in zip("mn", _read_operand_layouts(params), strict=True)
    )
    return a, b, OPERAND_ROLES[str(params["product"])]
