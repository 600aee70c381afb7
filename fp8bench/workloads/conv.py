"""A residual block of convolutions, its batch norms in high precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.errors import UsageError
from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Params, Scalars, Support, Work
from fp8bench.nn.layer_workloads import ConvolvedWorkload
from fp8bench.nn.shared_workloads import PASS, convolution_support, is_training, misfit
from fp8bench.protocols import Grid, Layer, Precision, Setup
from fp8bench.protocols.axes import VALUES, Axis, whole_number
from fp8bench.registry import workloads

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.exercise import Exercise
    from fp8bench.nn.linear import Choose

WINDOW = 9  # weights of a 3x3 window
_NORM = Axis.choice(
    "norm",
    "behind each convolution: batch norm, or layer norm over channels",
    "batch",
    "layer",
    quiet=True,
)


@workloads.register("conv")
class Conv(ConvolvedWorkload):
    """ResNet's basic block: two 3x3 convolutions, batch norm in fp32 unless mapped, ReLU, and the residual's sum. Its
    convolutions are in the phase GEMM: they are products, contracted over windows and channels."""

    name = "conv"
    summary = "a residual block of two 3x3 convolutions with batch norm in fp32, forward or forward and backward"
    layer_kinds = ("conv",)
    batch_axis = "batch"
    not_on_device = "torch has no convolution in small formats, so that no device keeps these operands"
    history = Grid(
        cpu={"channels": ("32",)},
        gpu={"channels": ("256",)},
        phases=("cast", "gemm", "elementwise"),
        errors=("output_error", "gradient_error"),
        per="flops",
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        batch, channels, image = ("128", ("64", "256"), "28") if facts.accelerated else ("8", ("32",), "16")
        return (
            Axis.count("batch", "images in a batch", batch, high=1 << 16),
            Axis("channels", "channels in and out", channels, whole_number(high=1 << 14)),
            Axis.count("image", "height and width of an image", image, high=1 << 12),
            PASS,
            VALUES,
            _NORM,
        )

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        return tuple(Layer(name, "norm", product=False) for name in ("norm_first", "norm_second"))

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        batch, image = int(params["batch"]), int(params["image"])
        if batch * image * image == 1 and _NORM.of(params) == "batch":
            raise UsageError(
                "batch=1 with image=1 has one value per channel, too few for a batch norm: choose a larger one"
            )
        return super().expand(params)

    def work(self, params: Scalars) -> Work:
        """Counts FLOPs of the two convolutions, windows over the edge in full."""
        batch, channels, image = (int(params[name]) for name in ("batch", "channels", "image"))
        positions, weights = batch * image * image, 2 * WINDOW * channels * channels
        # fp32 weights; input and output in two bytes, the least of any carrier.
        return Work(
            flops=2.0 * positions * weights * (3 if is_training(params) else 1),
            least_memory=4.0 * weights + 4.0 * positions * channels,
        )

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        support = convolution_support(precision, facts)
        if not support.is_native:
            return support
        batch, channels, image = (int(params[name]) for name in ("batch", "channels", "image"))
        wrong = misfit(
            precision,
            batch * image * image,
            (WINDOW * channels, channels),
            is_training(params),
            f"batch={batch}, channels={channels}, image={image}",
        )
        return refused(wrong) if wrong else support

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        return Layer("first", "conv"), Layer("second", "conv")

    def exercise(self, setup: Setup, choose: Choose, carrier: torch.dtype) -> Exercise:
        """Builds the block on random images. Its gradients have far larger errors than its output: where rounding moves
        a value across ReLU's corner, a gradient appears or vanishes."""
        from fp8bench.nn.convolution import ResidualBlock
        from fp8bench.nn.exercise import exercise

        params = setup.params
        batch, channels, image = (int(params[name]) for name in ("batch", "channels", "image"))
        shape = (batch, image, image, channels)
        layered = _NORM.of(params) == "layer"
        return exercise(setup, lambda: ResidualBlock(channels, choose, layered), [shape], carrier, is_training(params))
