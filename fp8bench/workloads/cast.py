"""The suite cast: casts a tensor to a format or restores it, with or without a scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, MemoryRole, Params, Scalars, Support, TensorStatistics, Work
from fp8bench.nn import shared_workloads as shared
from fp8bench.protocols import MEMORY_ROLES, Grid, Operand, Phases, Precision, Role, Setup, Workload
from fp8bench.protocols.axes import CONTIGUOUS, LAYOUT, SPAN_FACTORS, STRIDED, VALUES, Axis, read_integers, whole_number
from fp8bench.registry import workloads

if TYPE_CHECKING:
    from torch import Tensor

SOURCE_BYTES_BY_DTYPE = {"fp32": 4, "bf16": 2}
_parse_tensor_side = whole_number(high=1 << 18)


@dataclass
class CastState:
    """The source tensor, and a function that casts or restores it once per step."""

    source: Tensor
    operation: Callable[[], object]
    role: Role

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MEMORY_ROLES[self.role]: self.source}


@workloads.register("cast")
class Cast(Workload):
    """Casts a matrix to a precision, including the search for its scale, or restores it from the precision.

    The source is fp32 by default, like master weights and gradients. So every other precision has something to round.
    If the source already has the dtype of the precision, the cast would change nothing. Then a plain copy is timed,
    which is the lower bound for casts of that size. Values of an emulated format are stored as fp32, so restoring them
    to fp32 is timed as a plain copy too.
    """

    name = "cast"
    summary = "one cast to or from each format, with its scale and without"
    dtypes = ("fp32", "bf16", "fp16", "fp8", "mxfp8", "mxfp4", "nvfp4")
    history = Grid(
        cpu={"shape": ("1024x1024",), "direction": ("to", "from"), "scaling": ("on",)},
        gpu={"shape": ("8192x8192",), "direction": ("to", "from"), "scaling": ("on",)},
        dtypes=("fp32", "bf16", "fp8", "mxfp8", "nvfp4"),
        errors=("cast_error", "cast_vanished"),
        per="bytes",
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        shape = "8192x8192" if facts.accelerated else "1024x1024"
        return (
            Axis("shape", "N (a square) or ROWSxCOLUMNS; block scales run along the columns", (shape,), parse_shape),
            Axis.choice(
                "source", "dtype of the values that are cast or restored: fp32 or bf16", *SOURCE_BYTES_BY_DTYPE
            ),
            Axis.each("direction", "to: cast values to the precision; from: restore them from its codes", "to", "from"),
            Axis.each(
                "scaling",
                "off: elements are rounded without a scale. It changes nothing for fp32, bf16 and fp16, "
                "which have no scales, nor for restoring",
                "on",
                "off",
            ),
            Axis.choice(
                "role",
                "values like inputs (fp8: E4M3) or like gradients (fp8: E5M2; fp16: times its loss scale)",
                Role.INPUT.value,
                Role.GRADIENT.value,
            ),
            LAYOUT,
            VALUES,
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        rows, columns = (int(side) for side in str(params["shape"]).split("x"))
        scaling_param = (("scaling", params["scaling"]),) if params["direction"] == "to" else ()
        return (
            (
                ("rows", rows),
                ("columns", columns),
                ("source", params["source"]),
                ("direction", params["direction"]),
                *scaling_param,
                ("role", params["role"]),
                ("layout", LAYOUT.of(params)),
                ("values", VALUES.of(params)),
            ),
        )

    def work(self, params: Scalars) -> Work:
        """Counts the bytes of the high-precision tensor, whether it is cast or restored. So the throughputs of both
        directions can be compared.
        """
        elements = int(params["rows"]) * int(params["columns"])
        source_bytes = float(SOURCE_BYTES_BY_DTYPE[str(params["source"])] * elements)
        # The least memory: the source, and codes of half a byte for each element.
        layout_span_factor = SPAN_FACTORS.get(str(LAYOUT.of(params)), 1)
        return Work(bytes=source_bytes, least_memory=layout_span_factor * source_bytes + elements / 2)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        layout = LAYOUT.of(params)
        # Refuse cases that would repeat a different case's figures.
        if layout != CONTIGUOUS and params["direction"] == "from":
            return refused("direction=from begins with codes, whose layout their format decides: choose direction=to")
        if layout not in (CONTIGUOUS, STRIDED) and int(params["rows"]) == 1:
            return refused(
                f"a single row is stored alike in layout={layout} and contiguous: choose contiguous or strided"
            )
        return shared.find_storage_support(precision, facts, "there is nothing to cast")

    def prepare(self, setup: Setup) -> CastState:
        source = _make_timed_source(setup)
        role = Role(str(setup.params["role"]))
        # For direction=from, the steps restore codes. Make the codes here, before timing.
        if setup.params["direction"] == "to":
            cast = _make_cast_function(setup)
            return CastState(source, _replace_by_copy(lambda: cast(source).data, source), role)
        operand = _make_cast_function(setup)(source)
        restore = setup.arithmetic.restore
        return CastState(source, _replace_by_copy(lambda: restore(operand, source.dtype), operand.data), role)

    def step(self, state: CastState, phase: Phases) -> None:
        with phase.cast:
            state.operation()  # the result is freed at once, within the phase

    def error_refused(self, params: Scalars) -> str:
        return shared.explain_missing_errors(params)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares the source with the values restored from its cast. Both contain the loss scale, which therefore
        cancels out.
        """
        from fp8bench.numerics import norms

        source = _make_timed_source(setup)
        cast = _make_cast_function(setup)
        # A delayed scale comes from earlier casts, so cast once before the cast that is compared.
        if setup.arithmetic.settles:
            cast(source)
        restored_values = setup.arithmetic.restore(cast(source), source.dtype)
        return {
            "cast_error": norms.relative_frobenius(restored_values, source),
            "cast_vanished": norms.compute_vanished_share([restored_values], [source]),
        }

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        from fp8bench.numerics.ranges import compute_statistics

        return compute_statistics([("source", str(setup.params["role"]), _draw_source_tensor(setup))])


def parse_shape(text: str) -> str:
    """Returns '512x512' for '512', and '512x1024' (rows x columns) unchanged. Raises ValueError."""
    side_texts = text.split("x")
    if len(side_texts) not in (1, 2) or not all(side.isascii() and side.isdigit() for side in side_texts):
        raise ValueError("expected a size or ROWSxCOLUMNS")
    numbers = [_parse_tensor_side(side) for side in side_texts] * (3 - len(side_texts))
    return "x".join(str(number) for number in numbers)


def _replace_by_copy(operation: Callable[[], Tensor], source: Tensor) -> Callable[[], object]:
    """Returns `operation`, or a function that copies the source if `operation` would return the source itself."""
    # A cast to the source's own dtype returns the source at once. Time a copy, which moves memory like other casts.
    return source.clone if operation().data_ptr() == source.data_ptr() else operation


def _make_cast_function(setup: Setup) -> Callable[[Tensor], Operand]:
    role = Role(str(setup.params["role"]))
    is_unscaled = setup.params.get("scaling") == "off"
    cast = setup.arithmetic.cast_without_scale if is_unscaled else setup.arithmetic.cast
    return lambda tensor: cast(tensor, role)


def _make_timed_source(setup: Setup) -> Tensor:
    from fp8bench.numerics.distributions import apply_layout

    source = _draw_source_tensor(setup)
    source = source * setup.loss_scale if setup.params["role"] == Role.GRADIENT else source
    return apply_layout(source, str(LAYOUT.of(setup.params)))


def _draw_source_tensor(setup: Setup) -> Tensor:
    """Draws the source tensor with the case's distribution of values. Rows of gradients get different magnitudes, as in
    a network.
    """
    import torch

    from fp8bench.numerics import distributions

    params = setup.params
    generator = distributions.make_seeded_generator(setup.facts.key, setup.seed)
    rows, columns = read_integers(params, "rows", "columns")
    shape = (rows, columns)
    source = distributions.GradientSource([shape], generator)
    values = distributions.draw_values(params, shape, generator, setup.facts.key)
    if params["role"] == Role.GRADIENT:
        values.mul_(source.scales[0])
    return values.to(torch.float32 if params["source"] == "fp32" else torch.bfloat16)
