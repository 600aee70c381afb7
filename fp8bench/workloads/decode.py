"""A step of decoding: one token a sequence through a model with a static cache, at a fixed context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fp8bench.model import DeviceFacts, Params, Scalar, Support, Work
from fp8bench.nn.served import (
    arm_of,
    checked_sizes,
    forward_flops,
    served_axes,
    served_layers,
    served_memory,
    served_support,
)
from fp8bench.nn.sizes import SERVED_SIZES
from fp8bench.protocols import Grid, Layer, Phases, Precision, Setup, Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import precisions, workloads

if TYPE_CHECKING:
    from fp8bench.nn.serving import ServedState


@workloads.register("decode")
class Decode(Workload):
    """The cache is filled from the seed before anything is timed, with values like a trained model's, not by a prompt.
    Each step is the same one: its token stands at the last position of the context, and sees all of it. Token ids go
    straight in: no sampler, no tokeniser, no server. So a step's time is TPOT at that context, and batch / time is
    output tokens/s. The embedding, norms and the head stay in the carrier.
    """

    name = "decode"
    summary = "one token a sequence through a GPT with a static cache of keys and values, at a fixed context"
    dtypes = ("fp32", "bf16")
    layer_kinds = ("attn", "mlp", "head")
    fused = False
    batch_axis = "batch"
    history = Grid(
        cpu={"size": ("nano",), "context": ("512",)}, gpu={"size": ("llama-1b",), "context": ("8192",)},
        phases=("gemm", "attention", "elementwise"), errors=("logits_error",), per="tokens",
    )  # fmt: skip

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        size, context = ("llama-1b", "8192") if facts.accelerated else ("nano", "512")
        return served_axes(context, "positions that the step's token sees, its own included", ("1",), size)

    def expand(self, params: Mapping[str, Scalar]) -> tuple[Params, ...]:
        checked_sizes(params)
        return super().expand(params)

    def work(self, params: Mapping[str, Scalar]) -> Work:
        config, batch, context = SERVED_SIZES[str(params["size"])], int(params["batch"]), int(params["context"])
        flops = forward_flops(config, batch, 1, context)
        return Work(flops, batch, least_memory=served_memory(config, batch, context))

    def support(self, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts) -> Support:
        return served_support(params, precision, facts)

    def layer_support(
        self, kind: str, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts
    ) -> Support:
        return precision.support(facts)

    def layers(self, params: Mapping[str, Scalar]) -> tuple[Layer, ...]:
        return served_layers(params)

    def prepare(self, setup: Setup) -> ServedState:
        from fp8bench.nn.serving import served_state

        params = dict(setup.case.params)
        return served_state(setup, arm_of(params, precisions.get(setup.case.precision)), self.layers(params), 1)

    def step(self, state: ServedState, phase: Phases) -> None:
        state.step(phase)

    def error(self, setup: Setup) -> dict[str, float]:
        from fp8bench.nn.serving import logits_error

        params = dict(setup.case.params)
        return logits_error(setup, arm_of(params, precisions.get(setup.case.precision)), self.layers(params), 1)
