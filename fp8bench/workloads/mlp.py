"""The suite mlp: the dense feed-forward block of a transformer layer, which has two products and the operations between
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Scalars, Support, Work
from fp8bench.nn import shared_workloads as shared
from fp8bench.nn.layer_workloads import LayerWorkload
from fp8bench.protocols import Grid, Precision, Setup
from fp8bench.protocols.axes import VALUES, Axis, read_integers
from fp8bench.registry import precisions, workloads

if TYPE_CHECKING:
    from torch import nn

    from fp8bench.nn.exercise import LayerExercise
    from fp8bench.nn.linear import ChooseArithmetic

LARGEST_SIZE = 1 << 18
_LINEAR_CUT = "linear"
NORM_LINEAR = "norm-linear"
NORM_MLP = "norm-mlp"


@workloads.register("mlp")
class Mlp(LayerWorkload):
    """Times a feed-forward block: the up product, an activation, and the down product. In a gated block, as in Llama,
    the up product has twice as many columns.
    """

    name = "mlp"
    summary = "a dense feed-forward block, plain (GELU) and gated (SiLU), forward or forward and backward"
    linear_layers = True
    unit_scales = True  # `prepare` can unit-scale the block
    layer_kinds = ("up", "down")
    batch_axis = "tokens"
    history = Grid(
        cpu={"width": ("256",), "gated": ("yes",)},
        gpu={"width": ("4096",), "gated": ("yes",)},
        phases=("cast", "gemm", "elementwise"),
        errors=("output_error", "gradient_error"),
        per="flops",  # the history also has the time of a fixed number of FLOPs
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        tokens, width, hidden = ("4096", "4096", "14336") if facts.accelerated else ("256", "256", "1024")
        return (
            Axis.count("tokens", "rows of the input", tokens, high=LARGEST_SIZE),
            Axis.count("width", "features of input and output", width, high=LARGEST_SIZE),
            Axis.count("hidden", "features between the two products", hidden, high=LARGEST_SIZE),
            Axis.each("gated", "whether a second up product gates the first", "no", "yes"),
            Axis.choice(
                "cut",
                "linear: no norm; norm-linear, norm-mlp: an RMS norm first, which a backend may fuse with "
                "the first product, or with the whole block",
                _LINEAR_CUT,
                NORM_LINEAR,
                NORM_MLP,
                quiet=True,  # the default is left out of a case's parameters
            ),
            shared.PASS,
            VALUES,
        )

    def work(self, params: Scalars) -> Work:
        tokens, width, hidden = read_integers(params, "tokens", "width", "hidden")
        weight_count = width * hidden * (3 if params["gated"] == "yes" else 2)
        # The least memory: weights in fp32, and two bytes for each input, output and intermediate value.
        least_memory_bytes = 4.0 * weight_count + 2.0 * tokens * (2 * width + hidden)
        # The backward pass has two products for each product of the forward pass.
        passes = 3 if shared.is_training(params) else 1
        return Work(flops=2.0 * tokens * weight_count * passes, tokens=tokens, least_memory=least_memory_bytes)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        support = precision.support(facts)
        # Unit scaling has constants only for a block without a norm.
        if precision.unit_scaled and params.get("cut", _LINEAR_CUT) != _LINEAR_CUT:
            return refused(f"{precision.mode} scales a block without its norm: choose cut={_LINEAR_CUT}")
        tokens, width, hidden = read_integers(params, "tokens", "width", "hidden")
        size_text = f"tokens={tokens}, width={width}, hidden={hidden}"
        return shared.refuse_unfit_sizes(
            support, precision, tokens, (width, hidden), shared.is_training(params), size_text
        )

    def layer_support(self, kind: str, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        if params.get("cut") == NORM_MLP:
            return refused("a precision map cannot divide the one layer of cut=norm-mlp: choose cut=norm-linear")
        return super().layer_support(kind, params, precision, facts)

    def prepare(self, setup: Setup) -> LayerExercise:
        """Makes the block and its inputs. If the precision uses unit scaling, the block gets constants for it."""
        state = super().prepare(setup)
        if precisions.get(setup.case.precision).unit_scaled:
            from fp8bench.nn.unit_scaling import scale_to_unit

            scale_to_unit(state.layer)
        return state

    def layer(self, params: Scalars, choose: ChooseArithmetic) -> nn.Module:
        from fp8bench.nn import parts

        width, hidden = read_integers(params, "width", "hidden")
        is_gated = params["gated"] == "yes"
        cut = params.get("cut", _LINEAR_CUT)
        if cut == _LINEAR_CUT:
            return parts.FeedForward(width, hidden, is_gated, gain=1.0, choose=choose)
        return parts.NormedFeedForward(width, hidden, is_gated, choose, both_products=cut == NORM_MLP)

    def shapes(self, params: Scalars) -> list[tuple[int, ...]]:
        return [(int(params["tokens"]), int(params["width"]))]
