"""One matrix product with its casts: squares, rectangles, GEMV, and the shapes of named models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, MemoryRole, Params, Scalar, Scalars, Support, TensorStatistics, Work
from fp8bench.nn import served
from fp8bench.nn.shared_workloads import why_no_errors
from fp8bench.nn.sizes import MODELS, PRODUCTS, TURNED, model_products, sides_of
from fp8bench.protocols import (
    MEMORY_OF,
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
    LAYOUTS,
    SPREAD,
    STRIDED,
    VALUES,
    Axis,
    one_of,
)
from fp8bench.registry import precisions, workloads
from fp8bench.suggestions import meant_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fp8bench.nn.kept import KeptWeight

LARGEST = 1 << 18
_CPU_SHAPES = ("256", "512", "1024", "256x2048x512", "1x2048x2048")
# A sweep ranges from the first number, whose multiples native FP8 products take, to this many times its base.
_LEAST_SIDE = 16
_BEYOND_BASE = 4
_SIDES = "mnk"
_OPERANDS = ("cast", "ready")
_EACH = "/"
_GPU_SHAPES = ("1024", "2048", "4096", "8192", "16384x2048x4096", "1x8192x8192")


@dataclass
class GemmState:
    """The operands in the carrier's dtype, their casts, and the cast operands if they are cast once. Or a weight stored
    in a format, with its codes in `b`."""

    arithmetic: Arithmetic
    a: Tensor
    b: Tensor
    cast: Callable[[Tensor, Tensor], tuple[Operand, Operand]]
    ready: tuple[Operand, Operand] | None
    roles: tuple[Role, Role]
    kept: KeptWeight | None = None

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MEMORY_OF[role]: tensor for role, tensor in zip(self.roles, (self.a, self.b), strict=True)}


@workloads.register("gemm")
class Gemm(Workload):
    """Multiplies a (m, k) by b (n, k) transposed, both contracted over their last dimension. Operands have the dtype in
    which a network would carry them: fp32 for fp32 and tf32, bf16 for bf16 and below. So fp8 casts from bf16, and bf16
    casts nothing."""

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
        shapes = _GPU_SHAPES if facts.accelerated else _CPU_SHAPES
        tokens = "8192" if facts.accelerated else "512"
        return (
            Axis(
                "shape",
                f"M (a square), MxNxK; sweep, sweep:m, sweep:nk; or, also as model=: {', '.join(MODELS)}, or the sizes "
                "of a model with a gated feed-forward layer: hidden:4096/ffn:14336/heads:32/kv:8/tokens:16384",
                shapes,
                parse_shape,
                alias="model",
            ),
            Axis.choice(
                "product",
                "auto (all three for a model or a sweep), forward, input-gradient, weight-gradient",
                "auto",
                *PRODUCTS,
            ),
            Axis.count("tokens", "rows of a model's activations", tokens, high=LARGEST),
            Axis.choice(
                "operands",
                "cast from the carrier in every step, or ready before it; auto: cast, for a sweep both",
                "auto",
                *_OPERANDS,
            ),
            Axis(
                "base",
                "M or MxNxK: what a sweep holds sides at; it varies one from 16 to four times of that",
                ("4096" if facts.accelerated else "512",),
                parse_sides,
            ),
            Axis.count("factor", "from one size of a sweep to the next", "2", low=2, high=64, quick=("4",)),
            replace(
                LAYOUT,
                description=f"{LAYOUT.description}; of both operands, or of each: transposed/contiguous",
                parse=parse_layouts,
            ),
            VALUES,
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        """Expands a model to all its layers' products, and a sweep to all its sizes."""
        layout_params = (("layout", LAYOUT.of(params)), ("values", VALUES.of(params)))
        return tuple((*shape, *layout_params) for shape in self._expand(params))

    def _expand(self, params: Scalars) -> tuple[Params, ...]:
        shape = str(params["shape"])
        name, _, swept = shape.partition(":")
        is_model = _is_model(shape)
        several = name == "sweep" or is_model
        # A layer of a model trains with three products; a single shape is the forward one by default.
        products = _choices(params["product"], tuple(PRODUCTS) if several else ("forward",))
        operands = _choices(params["operands"], _OPERANDS if name == "sweep" else ("cast",))
        if is_model:
            cases = []
            features, tokens = model_products(shape)
            for layer, product, how in itertools.product(features, products, operands):
                sides = sides_of(product, tokens or int(params["tokens"]), *features[layer])
                cases.append((("layer", f"{shape}/{layer}"), *_params(*sides, product, how)))
            return tuple(cases)
        if name == "sweep":
            sizes = tuple(_sweep(swept or _SIDES, _sides(str(params["base"])), int(params["factor"])))
        else:
            sizes = (_sides(shape),)
        return tuple(
            _params(*sides, product, how) for how, product, sides in itertools.product(operands, products, sizes)
        )

    def work(self, params: Scalars) -> Work:
        m, n, k = (int(params[name]) for name in "mnk")
        spread_a, spread_b = (SPREAD.get(layout, 1) for layout in _layouts(params))
        # Operands and product in two bytes, the least of any carrier.
        return Work(flops=2.0 * m * n * k, least_memory=2.0 * (spread_a * m * k + spread_b * n * k + m * n))

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        k = int(params["k"])
        n = int(params["n"])
        if wrong := _same_anyway(params, precision):
            return refused(wrong)
        if precision.whole_layers and params["operands"] != "cast":
            return refused("a library's operands are cast in every step: choose operands=cast")
        # Weights that are stored for inference have no gradients.
        if precision.name == served.SERVED:
            if (params["product"], params["operands"]) != ("forward", "cast"):
                return refused("weights are kept for forward products alone, their inputs cast as they come")
            return served.kept_support(precision, n, k, facts)
        support = precision.support(facts)
        along_k, along_n = precision.multiples
        if support.is_native and (k % along_k or n % along_n):
            return refused(
                f"native {precision.name} needs K a multiple of {along_k} and N of {along_n}; this product has K={k}, "
                f"N={n}: pad it, or choose another shape"
            )
        return support

    def prepare(self, setup: Setup) -> GemmState:
        arithmetic, cast = _casts(setup)
        a, b, roles = _operands(setup, arithmetic.carrier)
        if (kept_weight := _kept_weight(setup, b)) is not None:
            return GemmState(arithmetic, a, kept_weight.tensors()[0], cast, None, roles, kept_weight)
        return GemmState(arithmetic, a, b, cast, cast(a, b) if setup.case.param("operands") == "ready" else None, roles)

    def step(self, state: GemmState, phase: Phases) -> None:
        arithmetic = state.arithmetic
        if state.kept is not None:
            state.kept.times(state.a, phase)
            return
        # Ready operands were cast in advance; those that need no cast are the carrier's.
        if state.ready is not None:
            a, b = state.ready
        elif arithmetic.casts:
            with phase.cast:
                a, b = state.cast(state.a, state.b)
        else:
            a = Operand(state.a)
            b = Operand(state.b)
        with phase.gemm:
            arithmetic.product(a, b, arithmetic.carrier)
            del a, b  # freeing memory takes time that must count for a phase

    def error_refused(self, params: Scalars) -> str:
        return why_no_errors(params)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares with fp64 products of the unrounded and of the cast operands, on as many rows as are affordable."""
        import torch

        from fp8bench.numerics import products

        a, b, _ = _operands(setup)
        arithmetic, cast = _casts(setup)
        # 1. Operands are drawn in fp32 and rounded to the carrier, which is part of the error.
        carried = a.to(arithmetic.carrier), b.to(arithmetic.carrier)
        low = cast(*carried)
        # Delayed scales need a cast before they fit.
        if arithmetic.settles:
            low = cast(*carried)
        # 2. Compute the product, and the values that the operands' codes represent.
        if (kept_weight := _kept_weight(setup, carried[1])) is not None:
            product = kept_weight.times(carried[0], SilentPhases())
            values = (carried[0].float(), kept_weight.restore())
        else:
            product = arithmetic.product(low[0], low[1], arithmetic.carrier)
            values = arithmetic.restore(low[0], torch.float32), arithmetic.restore(low[1], torch.float32)
        # 3. Compare with exact operands, and with what the kernel was given.
        errors = products.product_errors(
            product, (a, b), values, products.rows_within(a.shape[0], b.shape[0], a.shape[1])
        )
        return dict(zip(("product_error", "kernel_error"), errors, strict=True))

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        from fp8bench.numerics.ranges import statistics_of

        a, b, roles = _operands(setup)
        return statistics_of([("a", roles[0].value, a), ("b", roles[1].value, b)])


def parse_shape(text: str) -> str:
    """Accepts '512' (a square), '1x2048x512' (M x N x K), a model, 'sweep:m' (sizes of M) and 'sweep' (all sides)."""
    if text.lower() in MODELS:
        return text.lower()
    if _is_model(text):
        model_products(text)  # raises for invalid sizes of a model
        return text
    name, colon, swept = text.partition(":")
    if name == "sweep":
        if (colon and not swept) or not set(swept) <= set(_SIDES) or len(set(swept)) < len(swept):
            raise ValueError("expected sweep, or sweep: and the sides that vary, of m, n and k: sweep:m, sweep:nk")
        return text
    try:
        return parse_sides(text)
    except ValueError as error:
        nearest = meant_name("model", text, MODELS)
        hint = f"; the nearest is {nearest!r}" if nearest else ""
        sizes = "hidden:4096/ffn:14336/heads:32/kv:8"
        raise ValueError(f"{error}, sweep, {sizes}, or one of {', '.join(MODELS)}{hint}") from None


def _is_model(shape: str) -> bool:
    return shape in MODELS or "hidden:" in shape


def parse_sides(text: str) -> str:
    sides = text.split("x")
    if len(sides) not in (1, 3) or not all(side.isascii() and side.isdigit() for side in sides):
        raise ValueError("expected a size, MxNxK")
    # A single number is a square.
    numbers = [int(side) for side in sides] * (1 if len(sides) == 3 else 3)
    if not all(1 <= number <= LARGEST for number in numbers):
        raise ValueError(f"expected sizes from 1 to {LARGEST}")
    return "x".join(str(number) for number in numbers)


def _sides(text: str) -> tuple[int, int, int]:
    m, n, k = (int(side) for side in text.split("x"))
    return m, n, k


def _sweep(swept: str, base: tuple[int, int, int], factor: int) -> Iterator[tuple[int, int, int]]:
    """Yields sides that differ from the base in one of `swept`, which ranges from 16 to four times its base."""
    for place in map(_SIDES.index, swept):
        side = _LEAST_SIDE
        while side <= min(_BEYOND_BASE * base[place], LARGEST):
            m, n, k = (side if at == place else base_side for at, base_side in enumerate(base))
            yield m, n, k
            side *= factor


def _choices(value: Scalar, auto: tuple[str, ...]) -> tuple[str, ...]:
    return auto if value == "auto" else (str(value),)


def _params(m: int, n: int, k: int, product: str, operands: str) -> Params:
    return (("m", m), ("n", n), ("k", k), ("product", product), ("operands", operands))


def parse_layouts(text: str) -> str:
    """Accepts 'strided' for both operands or 'transposed/contiguous' for each; writes equal ones once."""
    words = text.split(_EACH)
    if len(words) > 2:
        raise ValueError(
            f"expected one layout, or two as in transposed{_EACH}contiguous; layouts: {', '.join(LAYOUTS)}"
        )
    first, *second = map(one_of(*LAYOUTS), words)
    return first if second in ([], [first]) else _EACH.join((first, *second))


def _layouts(params: Scalars) -> tuple[str, str]:
    first, _, second = str(LAYOUT.of(params)).partition(_EACH)
    return first, second or first


def _same_anyway(params: Scalars, precision: Precision) -> str:
    """Returns why a layout changes nothing here; '' if it does, or is the usual one."""
    layouts = dict(zip("ab", _layouts(params), strict=True))
    odd = [name for name, layout in layouts.items() if layout != CONTIGUOUS]
    if precision.name == served.SERVED and "b" in odd:
        return "weights are kept row by row, whatever layout they come in: choose contiguous for operand b"
    # Such a case would repeat another one's numbers under a different name.
    if odd and precision.carried_by and params["operands"] == "ready":
        return (
            "codes are written the way that the product reads them, whatever layout they are cast from: measure "
            "operands=cast, in which that is done in every step"
        )
    for name, layout in layouts.items():
        rows = int(params["m" if name == "a" else "n"])
        if rows == 1 and layout not in (CONTIGUOUS, STRIDED):
            return f"operand {name} is one row, which lies the same in layout={layout}: choose contiguous or strided"
    return ""


def _casts(setup: Setup) -> tuple[Arithmetic, Callable[[Tensor, Tensor], tuple[Operand, Operand]]]:
    """Returns the arithmetic of single products, and the casts of this one's operands."""
    product = str(setup.case.param("product"))
    arithmetic = setup.arithmetic.separate()
    (role_a, role_b) = PRODUCTS[product]
    turned = TURNED[product]
    cast_a, cast_b = (arithmetic.cast_transpose if role in turned else arithmetic.cast for role in (role_a, role_b))
    return arithmetic, lambda a, b: (cast_a(a, role_a), cast_b(b, role_b))


def _kept_weight(setup: Setup, b: Tensor) -> KeptWeight | None:
    """Returns the weight as inference stores it, if the case's precision is an arm of that."""
    from fp8bench.nn.kept import kept_weight

    mode = precisions.get(setup.case.precision)
    if mode.name != served.SERVED:
        return None
    arm = served.arm_of({"kv": served.OWN, "weights": served.OWN}, mode)
    word = arm.weight_format
    return None if word in served.CARRIERS else kept_weight(b, word, arm.low_inputs)


def _operands(setup: Setup, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, tuple[Role, Role]]:
    """Draws operands from the seed, Gaussian unless the case requests other values. They are drawn in fp32, and each is
    converted before the next is drawn: two in fp32 may not fit."""
    import torch

    from fp8bench.numerics import distributions

    params = setup.params
    k = int(setup.case.param("k"))
    generator = distributions.seeded_generator(setup.facts.key, setup.seed)
    a, b = (
        distributions.laid_out(
            distributions.drawn(params, (int(params[rows]), k), generator, setup.facts.key).to(dtype or torch.float32),
            layout,
        )
        for rows, layout in zip("mn", _layouts(params), strict=True)
    )
    return a, b, PRODUCTS[str(setup.case.param("product"))]
