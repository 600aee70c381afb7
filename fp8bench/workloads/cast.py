"""One cast: a tensor into a format, or back from it, with a scale or without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, MemoryRole, Params, Scalars, Support, TensorStatistics, Work
from fp8bench.nn import shared_workloads as shared
from fp8bench.protocols import MEMORY_OF, Grid, Operand, Phases, Precision, Role, Setup, Workload
from fp8bench.protocols.axes import CONTIGUOUS, LAYOUT, SPREAD, STRIDED, VALUES, Axis, whole_number
from fp8bench.registry import workloads

if TYPE_CHECKING:
    from torch import Tensor

BYTES = {"fp32": 4, "bf16": 2}
_SIDE = whole_number(high=1 << 18)


@dataclass
class CastState:
    """The source, and the operation that every step applies to it."""

    source: Tensor
    change: Callable[[], object]
    role: Role

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MEMORY_OF[self.role]: self.source}


@workloads.register("cast")
class Cast(Workload):
    """A matrix cast to a precision, including the search for its scale, or restored from it.

    By default the source is fp32, like master weights and gradients: so fp32 is the floor for casts of that size, and
    every other precision has something to round. If a cast changes nothing, because the source already has that dtype,
    a step is a plain copy: that floor. The values of an emulated format are fp32, so restoring them to fp32 is also
    such a copy.
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
            Axis.choice("source", "what is cast from, and restored to: fp32 or bf16", *BYTES),
            Axis.each("direction", "to the precision, or from it", "to", "from"),
            Axis.each(
                "scaling",
                "on, or off: the elements' own grid. fp32, bf16 and fp16 have no scales: both are "
                "the same there. A way back always has its scales",
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
        scaling = (("scaling", params["scaling"]),) if params["direction"] == "to" else ()
        return (
            (
                ("rows", rows),
                ("columns", columns),
                ("source", params["source"]),
                ("direction", params["direction"]),
                *scaling,
                ("role", params["role"]),
                ("layout", LAYOUT.of(params)),
                ("values", VALUES.of(params)),
            ),
        )

    def work(self, params: Scalars) -> Work:
        """Counts the bytes of the high-precision side for either direction, so that throughputs compare."""
        count = int(params["rows"]) * int(params["columns"])
        source = float(BYTES[str(params["source"])] * count)
        # The source and its image, which has at least half a byte per element.
        spread = SPREAD.get(str(LAYOUT.of(params)), 1)
        return Work(bytes=source, least_memory=spread * source + count / 2)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        layout = LAYOUT.of(params)
        # Refuse cases that would measure the same thing under two names.
        if layout != CONTIGUOUS and params["direction"] == "from":
            return refused("direction=from begins with codes, whose layout their format decides: choose direction=to")
        if layout not in (CONTIGUOUS, STRIDED) and int(params["rows"]) == 1:
            return refused(f"one row is the same in layout={layout}: choose contiguous or strided")
        return shared.storage_support(precision, facts, "there is nothing to cast")

    def prepare(self, setup: Setup) -> CastState:
        source = _scaled_source(setup)
        role = Role(str(setup.case.param("role")))
        # For restoring, the codes are made in advance.
        if setup.case.param("direction") == "to":
            into = _into(setup)
            return CastState(source, _or_copy(lambda: into(source).data, source), role)
        operand = _into(setup)(source)
        restore = setup.arithmetic.restore
        return CastState(source, _or_copy(lambda: restore(operand, source.dtype), operand.data), role)

    def step(self, state: CastState, phase: Phases) -> None:
        with phase.cast:
            state.change()  # the result is freed at once, inside the phase

    def error_refused(self, params: Scalars) -> str:
        return shared.why_no_errors(params)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares the source with its values after a cast and back; the loss scale in both cancels out."""
        from fp8bench.numerics import norms

        source = _scaled_source(setup)
        into = _into(setup)
        # Delayed scales come from an earlier cast.
        if setup.arithmetic.settles:
            into(source)
        back = setup.arithmetic.restore(into(source), source.dtype)
        return {
            "cast_error": norms.relative_frobenius(back, source),
            "cast_vanished": norms.vanished_share([back], [source]),
        }

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        from fp8bench.numerics.ranges import statistics_of

        return statistics_of([("source", str(setup.case.param("role")), _source(setup))])


def parse_shape(text: str) -> str:
    """Expands '512' to the square '512x512', and keeps '512x1024' as rows and columns."""
    sides = text.split("x")
    if len(sides) not in (1, 2) or not all(side.isascii() and side.isdigit() for side in sides):
        raise ValueError("expected a size or ROWSxCOLUMNS")
    numbers = [_SIDE(side) for side in sides] * (3 - len(sides))
    return "x".join(str(number) for number in numbers)


def _or_copy(change: Callable[[], Tensor], source: Tensor) -> Callable[[], object]:
    """Returns `change`, or a copy if it would only return its argument."""
    # A cast to the same dtype would take no time, while others read and write.
    return source.clone if change().data_ptr() == source.data_ptr() else change


def _into(setup: Setup) -> Callable[[Tensor], Operand]:
    role = Role(str(setup.case.param("role")))
    off = setup.params.get("scaling") == "off"
    cast = setup.arithmetic.cast_without_scale if off else setup.arithmetic.cast
    return lambda tensor: cast(tensor, role)


def _scaled_source(setup: Setup) -> Tensor:
    from fp8bench.numerics.distributions import laid_out

    source = _source(setup)
    source = source * setup.loss_scale if setup.case.param("role") == Role.GRADIENT else source
    return laid_out(source, str(LAYOUT.of(setup.params)))


def _source(setup: Setup) -> Tensor:
    """Draws values of the case's kind; gradients get a network's magnitudes."""
    import torch

    from fp8bench.numerics import distributions

    case = setup.case
    generator = distributions.seeded_generator(setup.facts.key, setup.seed)
    shape = (int(case.param("rows")), int(case.param("columns")))
    source = distributions.GradientSource([shape], generator)
    values = distributions.drawn(dict(case.params), shape, generator, setup.facts.key)
    if case.param("role") == Role.GRADIENT:
        values.mul_(source.scales[0])
    return values.to(torch.float32 if case.param("source") == "fp32" else torch.bfloat16)
