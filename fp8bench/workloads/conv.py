"""The suite conv: a residual block of convolutions, whose norms run in high precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Params, Scalars, Support, Work
from fp8bench.nn import shared_workloads as shared
from fp8bench.nn.layer_workloads import ConvolvedWorkload
from fp8bench.protocols import Grid, Layer, Precision
from fp8bench.protocols.axes import VALUES, Axis, read_integers
from fp8bench.registry import workloads

if TYPE_CHECKING:
    from torch import nn

    from fp8bench.nn.linear import ChooseArithmetic

WINDOW_WEIGHTS = 9  # the number of weights in a 3x3 window
_NORM_AXIS = Axis.choice(
    "norm",
    "norm after each convolution: batch norm, or layer norm over channels",
    "batch",
    "layer",
    quiet=True,
)


@workloads.register("conv")
class Conv(ConvolvedWorkload):
    """Times ResNet's basic block: two 3x3 convolutions, norms, ReLU, and the residual sum. Norms are in fp32, unless
    a precision map changes them. Convolutions belong to the phase GEMM, because they are products that sum over
    windows and channels.
    """

    name = "conv"
    summary = "a residual block of two 3x3 convolutions with batch norm in fp32, forward or forward and backward"
    layer_kinds = ("conv",)
    batch_axis = "batch"
    not_on_device = "torch has no convolution in small formats, so no device stores such operands"
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
            Axis.count("channels", "channels in and out", *channels, high=1 << 14),
            Axis.count("image", "height and width of an image", image, high=1 << 12),
            shared.PASS,
            VALUES,
            _NORM_AXIS,
        )

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        return tuple(Layer(name, "norm", product=False) for name in ("norm_first", "norm_second"))

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        batch, image = read_integers(params, "batch", "image")
        if batch * image * image == 1 and _NORM_AXIS.of(params) == "batch":
            raise UsageError(
                "batch=1 with image=1 has one value per channel, too few for a batch norm: choose a larger one"
            )
        return super().expand(params)

    def work(self, params: Scalars) -> Work:
        """Counts the FLOPs of the two convolutions. Windows that reach over the edge of an image count in full."""
        batch, channels, image = read_integers(params, "batch", "channels", "image")
        positions = batch * image * image
        weight_count = 2 * WINDOW_WEIGHTS * channels * channels
        # The least memory: weights in fp32, and two bytes for each value of input and output.
        return Work(
            flops=2.0 * positions * weight_count * (3 if shared.is_training(params) else 1),
            least_memory=4.0 * weight_count + 4.0 * positions * channels,
        )

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        batch, channels, image = read_integers(params, "batch", "channels", "image")
        size_text = f"batch={batch}, channels={channels}, image={image}"
        support = shared.convolution_support(precision, facts)
        side_lengths = (WINDOW_WEIGHTS * channels, channels)
        return shared.refuse_unfit_sizes(
            support, precision, batch * image * image, side_lengths, shared.is_training(params), size_text
        )

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        return Layer("first", "conv"), Layer("second", "conv")

    def layer(self, params: Scalars, choose: ChooseArithmetic) -> nn.Module:
        """Returns a residual block. The errors of its gradients are far larger than those of its output, because a
        whole gradient appears or vanishes where rounding moves a value across ReLU's zero.
        """
        from fp8bench.nn.convolution import ResidualBlock

        return ResidualBlock(int(params["channels"]), choose, _NORM_AXIS.of(params) == "layer")

    def shapes(self, params: Scalars) -> list[tuple[int, ...]]:
        image = int(params["image"])
        return [(int(params["batch"]), image, image, int(params["channels"]))]
