"""The suite norm_act: norms, activations and other elementwise operations. Low-precision recipes leave these in high
precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Scalars, Support, Work
from fp8bench.nn import shared_workloads as shared
from fp8bench.nn.layer_workloads import LayerWorkload
from fp8bench.protocols import Grid, Precision
from fp8bench.protocols.axes import VALUES, Axis, one_of, read_integers
from fp8bench.registry import workloads

if TYPE_CHECKING:
    from torch import nn

    from fp8bench.nn.linear import ChooseArithmetic

# For each operation, the number of its inputs that have the shape (tokens, width).
INPUT_COUNT_BY_OPERATION = {
    "layer_norm": 1,
    "rms_norm": 1,
    "gelu": 1,
    "silu_gate": 2,
    "softmax": 1,
    "residual": 2,
    "cross_entropy": 1,
}
_GPT2_OPERATIONS = ("layer_norm", "gelu", "softmax", "residual", "cross_entropy")
# Operations whose backward pass reads no incoming gradient of shape (tokens, width). A residual sum only passes its
# gradient on, and the gradient of a loss is a single number.
OPERATIONS_NOT_READING_GRADIENT = ("residual", "cross_entropy")


@workloads.register("norm_act")
class NormAct(LayerWorkload):
    """Times one elementwise operation. The precision is the dtype of values between products. In every precision,
    norms, softmax and the loss compute in fp32, as in training.
    """

    name = "norm_act"
    summary = "norms, activations, softmax, residual and loss, which low-precision recipes leave in high precision"
    dtypes = ("fp32", "bf16", "fp16")
    batch_axis = "tokens"
    history = Grid(
        cpu={"operation": ("layer_norm", "gelu"), "tokens": ("512",)},
        gpu={"operation": ("layer_norm", "gelu"), "tokens": ("16384",)},
        dtypes=("fp32", "bf16", "fp16"),
        errors=("output_error", "gradient_error"),
        per="bytes",
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        tokens, width = ("16384", "4096") if facts.accelerated else ("512", "768")
        return (
            Axis(
                "operation",
                ", ".join(INPUT_COUNT_BY_OPERATION),
                tuple(INPUT_COUNT_BY_OPERATION) if facts.accelerated else _GPT2_OPERATIONS,
                one_of(*INPUT_COUNT_BY_OPERATION),
            ),
            Axis.count("tokens", "rows", tokens, high=1 << 20),
            Axis.count("width", "features of a row", width, high=1 << 18),
            shared.PASS,
            VALUES,
        )

    def work(self, params: Scalars) -> Work:
        """Counts four bytes for each value of the inputs, and in training for each value of the incoming gradient if
        the operation reads it.
        """
        tokens, width = read_integers(params, "tokens", "width")
        input_tensor_count = INPUT_COUNT_BY_OPERATION[str(params["operation"])]
        moved_tensor_count = input_tensor_count + (
            shared.is_training(params) and params["operation"] not in OPERATIONS_NOT_READING_GRADIENT
        )
        return Work(
            bytes=4.0 * moved_tensor_count * tokens * width, least_memory=2.0 * input_tensor_count * tokens * width
        )

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        if precision.carried_by:
            return refused(
                f"in {precision.name} only products have low precision, and {precision.carried_by} computes everything "
                f"else: measure {precision.carried_by}"
            )
        return precision.support(facts)

    def layer(self, params: Scalars, choose: ChooseArithmetic) -> nn.Module:
        from fp8bench.nn.parts import Operation

        return Operation(str(params["operation"]), int(params["tokens"]), int(params["width"]))

    def shapes(self, params: Scalars) -> list[tuple[int, ...]]:
        return [(int(params["tokens"]), int(params["width"]))] * INPUT_COUNT_BY_OPERATION[str(params["operation"])]
