"""The suite numerics: casts synthetic and real tensors once to a precision, and reports all figures of the error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Params, Scalars, Support, TensorStatistics, Work
from fp8bench.nn.shared_workloads import find_storage_support
from fp8bench.nn.sizes import CAPTURED, CAPTURED_STEP_COUNT
from fp8bench.protocols import Arithmetic, Grid, Phases, Precision, Role, Setup, Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import precisions, workloads

if TYPE_CHECKING:
    from torch import Tensor

# The synthetic tensors, and for each the role of the tensors that it resembles.
SYNTHETIC_TENSORS = {
    "gaussian": Role.INPUT,
    "student-t": Role.INPUT,
    "outliers": Role.INPUT,
    "log-normal": Role.GRADIENT,
}
# The tensors for --quick: an easy one, one with outliers, and a gradient from a training.
_QUICK_TENSORS = ("gaussian", "outliers", "head-gradient")
_AUTO_ROLE = "auto"
_FLOAT_SCALINGS = ("none", "tensor", "row", "1x128", "128x128")
# Suffixes of the scaling mx, which choose how scales are rounded. The empty suffix chooses the default, rceil.
_MX_SCALES = ("", ":scale=ceil", ":scale=even", ":scale=floor")


def _list_default_precisions() -> Iterator[str]:
    """Yields the default precisions: bf16, fp16, and pairs of an element format and a scaling.

    The 8-bit formats and e2m1 have all scalings. FP6 and the formats of MI300 have only their usual scalings. All
    roundings of MX scales are listed for two formats: e4m3, which training uses, and e2m1, whose errors depend most
    on the rounding.
    """
    mx_scalings = tuple(f"mx{scale}" for scale in _MX_SCALES)
    scalings_by_format = {
        "e4m3fn": (*_FLOAT_SCALINGS, *mx_scalings),
        "e4m3fnuz": ("tensor",),
        "e5m2": (*_FLOAT_SCALINGS, "mx"),
        "e5m2fnuz": ("tensor",),
        "e3m2": ("tensor", "row", "mx"),
        "e2m3": ("tensor", "row", "mx"),
        "e2m1": (*_FLOAT_SCALINGS, *mx_scalings, "nvfp4", "nvfp4:scale=up"),
    }
    yield from ("fp16", "bf16")
    for fmt, format_scalings in scalings_by_format.items():
        yield from (f"custom:format={fmt}:scaling={scaling}" for scaling in format_scalings)


@dataclass
class TensorState:
    """The tensor in fp32, its role in a product, and the arithmetic that casts it."""

    source: Tensor
    role: Role
    arithmetic: Arithmetic


@workloads.register("numerics")
class Numerics(Workload):
    """Measures the error of each format with each scaling, for one tensor at a time. The timed step is the cast. A
    precision with delayed scales first casts tensors of earlier steps. For a synthetic tensor these are other draws,
    and for a captured tensor they are its values in earlier steps.
    """

    name = "numerics"
    summary = "error of each format and scaling on Gaussian, heavy-tailed, outlier, gradient-like and real tensors"
    uses_corpus = True
    fused = False
    dtypes = tuple(_list_default_precisions())
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
                "synthetic, or captured from a short training of a small transformer: the input, weight "
                "and gradient of attn, mlp and head",
                *SYNTHETIC_TENSORS,
                *CAPTURED,
                quick=_QUICK_TENSORS,
            ),
            Axis.count("rows", "rows of a synthetic tensor", side, high=1 << 18),
            Axis.count("columns", "columns of a synthetic tensor; block scales run along them", side, high=1 << 18),
            Axis.choice(
                "role",
                "role whose formats and scalings are used; auto: the role that the tensor resembles",
                _AUTO_ROLE,
                *Role,
            ),
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        name = str(params["tensor"])
        role = str(params["role"])
        captured_tensor = CAPTURED.get(name)
        default_role = captured_tensor.role if captured_tensor else SYNTHETIC_TENSORS[name]
        rows, columns = (
            (captured_tensor.rows, captured_tensor.columns) if captured_tensor else (params["rows"], params["columns"])
        )
        return (
            (
                ("tensor", name),
                ("rows", rows),
                ("columns", columns),
                ("role", default_role.value if role == _AUTO_ROLE else role),
            ),
        )

    def work(self, params: Scalars) -> Work:
        source_bytes = 4.0 * int(params["rows"]) * int(params["columns"])
        # The least memory: the source in fp32, and codes of half a byte for each element.
        return Work(bytes=source_bytes, least_memory=1.125 * source_bytes)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        if precision.name == "fp32":
            return refused("the tensors are float32: nothing is rounded, so no error can be measured")
        return find_storage_support(precision, facts, "there is nothing to round")

    def prepare(self, setup: Setup) -> TensorState:
        return TensorState(next(_iterate_sample_tensors(setup)), _read_role(setup), setup.arithmetic.layer("tensor"))

    def step(self, state: TensorState, phase: Phases) -> None:
        with phase.cast:
            state.arithmetic.cast(state.source, state.role)  # the result is freed at once, within the phase

    def error(self, setup: Setup) -> dict[str, float]:
        """Returns all figures of the tensor's error. SQNR is at most 200 dB, which stands for no error."""
        import torch

        from fp8bench.nn.tensor_scales import make_recipe_view
        from fp8bench.numerics.tensor_error import name_error_figures, tensor_error

        role = _read_role(setup)
        arithmetic = setup.arithmetic.layer("tensor")
        source, *earlier_tensors = (
            _iterate_sample_tensors(setup) if arithmetic.settles else (next(_iterate_sample_tensors(setup)),)
        )
        for earlier_tensor in reversed(earlier_tensors):
            arithmetic.cast(earlier_tensor, role)
        restored_values = arithmetic.restore(arithmetic.cast(source, role), torch.float32)
        recipe_view = make_recipe_view(precisions.get(setup.case.precision), role, source, earlier_tensors)
        return name_error_figures(
            tensor_error(source, restored_values, recipe_view.fmt, recipe_view.factors), recipe_view.scale_course
        )

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        from fp8bench.numerics.ranges import compute_statistics

        name = str(setup.params["tensor"])
        tensor_kind = CAPTURED[name].kind if name in CAPTURED else name
        return compute_statistics([(tensor_kind, _read_role(setup).value, next(_iterate_unscaled_tensors(setup)))])


def _read_role(setup: Setup) -> Role:
    return Role(str(setup.params["role"]))


def _iterate_sample_tensors(setup: Setup) -> Iterator[Tensor]:
    """Yields the tensor to cast, then the tensors of earlier steps (for delayed scales), the most recent first.
    Gradients are multiplied by the loss scale.
    """
    gradient_loss_scale = setup.loss_scale if _read_role(setup) is Role.GRADIENT else 1.0
    return (tensor * gradient_loss_scale for tensor in _iterate_unscaled_tensors(setup))


def _iterate_unscaled_tensors(setup: Setup) -> Iterator[Tensor]:
    """Yields the case's tensor, then the tensors of earlier steps, without the loss scale."""
    name = str(setup.params["tensor"])
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

    generator = distributions.make_seeded_generator(setup.facts.key, setup.seed)
    shape = int(setup.params["rows"]), int(setup.params["columns"])
    yield from (distributions.DISTRIBUTIONS[name](shape, generator) for _ in range(CAPTURED_STEP_COUNT))
