"""A residual block of convolutions, its batch norms in high precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Params, Scalars, Support, Work
from fp8bench.nn import shared_workloads as shared
from fp8bench.nn.layer_workloads import ConvolvedWorkload
from fp8bench.protocols import Grid, Layer, Precision
from fp8bench.protocols.axes import VALUES, Axis
from fp8bench.registry import workloads

if TYPE_CHECKING:
    from torch import nn

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
            Axis.count("channels", "channels in and out", *channels, high=1 << 14),
            Axis.count("image", "height and width of an image", image, high=1 << 12),
            shared.PASS,
            VALUES,
            _NORM,
        )

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        return tuple(Layer(name, "norm", product=False) for name in ("norm_first", "norm_second"))

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        batch = int(params["batch"])
        image = int(params["image"])
        if batch * image * image == 1 and _NORM.of(params) == "batch":
            raise UsageError(
                "batch=1 with image=1 has one value per channel, too few for a batch norm: choose a larger one"
            )
        return super().expand(params)

    def work(self, params: Scalars) -> Work:
        """Counts FLOPs of the two convolutions, windows over the edge in full."""
        batch, channels, image = (int(params[name]) for name in ("batch", "channels", "image"))
        positions = batch * image * image
        weights = 2 * WINDOW * channels * channels
        # fp32 weights; input and output in two bytes, the least of any carrier.
        return Work(
            flops=2.0 * positions * weights * (3 if shared.is_training(params) else 1),
            least_memory=4.0 * weights + 4.0 * positions * channels,
        )

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        batch, channels, image = (int(params[name]) for name in ("batch", "channels", "image"))
        shown = f"batch={batch}, channels={channels}, image={image}"
        support, sides = shared.convolution_support(precision, facts), (WINDOW * channels, channels)
        return shared.require_fit(support, precision, batch * image * image, sides, shared.is_training(params), shown)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        return Layer("first", "conv"), Layer("second", "conv")

    def layer(self, params: Scalars, choose: Choose) -> nn.Module:
        """Its gradients have far larger errors than its output: where rounding moves a value across ReLU's corner, a
        gradient appears or vanishes."""
        from fp8bench.nn.convolution import ResidualBlock

        return ResidualBlock(int(params["channels"]), choose, _NORM.of(params) == "layer")

    def shapes(self, params: Scalars) -> list[tuple[int, ...]]:
        image = int(params["image"])
        return [(int(params["batch"]), image, image, int(params["channels"]))]
