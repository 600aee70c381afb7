"""The errors of a tensor in a precision: synthetic tensors and real ones, one cast, and every figure of its error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Params, Scalars, Support, TensorStatistics, Work
from fp8bench.nn.shared_workloads import storage_support
from fp8bench.nn.sizes import CAPTURED, CAPTURED_STEPS
from fp8bench.protocols import Arithmetic, Grid, Phases, Precision, Role, Setup, Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import precisions, workloads

if TYPE_CHECKING:
    from torch import Tensor

# Synthetic tensors, and the role that suits each best.
MADE = {"gaussian": Role.INPUT, "student-t": Role.INPUT, "outliers": Role.INPUT, "log-normal": Role.GRADIENT}
# For --quick: an easy tensor, one with outliers, and a gradient of a training.
_QUICK = ("gaussian", "outliers", "head-gradient")
_AUTO = "auto"
_FLOAT_SCALINGS = ("none", "tensor", "row", "1x128", "128x128")
# The default is rceil.
_MX_SCALES = ("", ":scale=ceil", ":scale=even", ":scale=floor")


def _table() -> Iterator[str]:
    """Yields the default precisions: bf16 and fp16, then the table of element formats and scalings. It has all scalings
    of the 8-bit formats and of e2m1; the four roundings of MX scales for e4m3, which training uses, and for e2m1, which
    suffers most; FP6 and the formats of MI300 in their usual scalings."""
    mx = tuple(f"mx{scale}" for scale in _MX_SCALES)
    scalings = {
        "e4m3fn": (*_FLOAT_SCALINGS, *mx),
        "e4m3fnuz": ("tensor",),
        "e5m2": (*_FLOAT_SCALINGS, "mx"),
        "e5m2fnuz": ("tensor",),
        "e3m2": ("tensor", "row", "mx"),
        "e2m3": ("tensor", "row", "mx"),
        "e2m1": (*_FLOAT_SCALINGS, *mx, "nvfp4", "nvfp4:scale=up"),
    }
    yield from ("fp16", "bf16")
    for fmt, words in scalings.items():
        yield from (f"custom:format={fmt}:scaling={scaling}" for scaling in words)


@dataclass
class TensorState:
    """The tensor in fp32, and its cast."""

    source: Tensor
    role: Role
    arithmetic: Arithmetic


@workloads.register("numerics")
class Numerics(Workload):
    """The error of each format under each scaling, tensor by tensor. Its times are those of the casts. A precision with
    delayed scales first casts the earlier steps: other draws of a synthetic tensor, earlier steps of a captured one."""

    name = "numerics"
    summary = "what each format and scaling leaves of Gaussian, heavy-tailed, outlier, gradient-like and real tensors"
    uses_corpus = True
    fused = False
    dtypes = tuple(_table())
    history = Grid(
        cpu={"tensor": ("gaussian", "outliers", "log-normal"), "columns": ("512",)},
        gpu={"tensor": ("gaussian", "outliers", "log-normal"), "columns": ("4096",)},
        dtypes=("fp16", "bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"),
        errors=("relative_error", "max_ulp", "underflow_percent", "saturation_percent"),
        energy=False,
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        side = "4096" if facts.accelerated else "512"
        return (
            Axis.each(
                "tensor",
                "made, or captured from a short training of a small transformer: the input, weight and "
                "gradient of attn, mlp and head",
                *MADE,
                *CAPTURED,
                quick=_QUICK,
            ),
            Axis.count("rows", "of a made tensor", side, high=1 << 18),
            Axis.count("columns", "of a made tensor; block scales run along them", side, high=1 << 18),
            Axis.choice(
                "role",
                "which of a precision's formats and scalings it gets; auto: the one that is most its own",
                _AUTO,
                *Role,
            ),
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        name = str(params["tensor"])
        role = str(params["role"])
        captured = CAPTURED.get(name)
        usual_role = captured.role if captured else MADE[name]
        rows, columns = (captured.rows, captured.columns) if captured else (params["rows"], params["columns"])
        return (
            (
                ("tensor", name),
                ("rows", rows),
                ("columns", columns),
                ("role", usual_role.value if role == _AUTO else role),
            ),
        )

    def work(self, params: Scalars) -> Work:
        source = 4.0 * int(params["rows"]) * int(params["columns"])
        return Work(bytes=source, least_memory=1.125 * source)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        if precision.name == "fp32":
            return refused("the tensors are float32: nothing is rounded, and there is no error to look at")
        return storage_support(precision, facts, "there is nothing to round")

    def prepare(self, setup: Setup) -> TensorState:
        return TensorState(next(_course(setup)), _role(setup), setup.arithmetic.layer("tensor"))

    def step(self, state: TensorState, phase: Phases) -> None:
        with phase.cast:
            state.arithmetic.cast(state.source, state.role)  # the result is freed at once, inside the phase

    def error(self, setup: Setup) -> dict[str, float]:
        """Returns all errors of the tensor. SQNR is at most 200 dB, which stands for no error."""
        import torch

        from fp8bench.nn.tensor_scales import view_of
        from fp8bench.numerics.tensor_error import figures, tensor_error

        role = _role(setup)
        arithmetic = setup.arithmetic.layer("tensor")
        source, *earlier_tensors = _course(setup) if arithmetic.settles else (next(_course(setup)),)
        for earlier in reversed(earlier_tensors):
            arithmetic.cast(earlier, role)
        restored = arithmetic.restore(arithmetic.cast(source, role), torch.float32)
        view = view_of(precisions.get(setup.case.precision), role, source, earlier_tensors)
        return figures(tensor_error(source, restored, view.fmt, view.factors), view.course)

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        from fp8bench.numerics.ranges import statistics_of

        name = str(setup.case.param("tensor"))
        kind = CAPTURED[name].kind if name in CAPTURED else name
        return statistics_of([(kind, _role(setup).value, next(_plain_course(setup)))])


def _role(setup: Setup) -> Role:
    return Role(str(setup.case.param("role")))


def _course(setup: Setup) -> Iterator[Tensor]:
    """Yields the case's tensor, then those of earlier steps, the nearest first; gradients with their loss scale."""
    factor = setup.loss_scale if _role(setup) is Role.GRADIENT else 1.0
    return (tensor * factor for tensor in _plain_course(setup))


def _plain_course(setup: Setup) -> Iterator[Tensor]:
    name = str(setup.case.param("tensor"))
    if name in CAPTURED:
        from fp8bench.nn.captured import capture_tensors

        if setup.corpus is None:
            raise ValueError("a captured tensor needs a token file to train on, but there is none")
        yield from (
            tensor.to(setup.facts.key, copy=True)
            for tensor in reversed(capture_tensors(setup.corpus, setup.seed)[name])
        )
        return
    from fp8bench.numerics import distributions

    generator = distributions.seeded_generator(setup.facts.key, setup.seed)
    shape = int(setup.case.param("rows")), int(setup.case.param("columns"))
    yield from (distributions.DISTRIBUTIONS[name](shape, generator) for _ in range(CAPTURED_STEPS))
