"""Prefill: a whole prompt through a model into an empty cache, at once."""

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


@workloads.register("prefill")
class Prefill(Workload):
    """`context` tokens of each sequence at once, ids straight in, and the logits of the last. Attention reads keys and
    values as the cache keeps them, as later tokens will. A step's time is TTFT without queue and tokeniser, and
    batch x context / time is input tokens/s. Scales of a tensor or of heads come from the prompt itself.
    """

    name = "prefill"
    summary = "a whole prompt through a GPT into an empty cache of keys and values, at once"
    dtypes = ("fp32", "bf16")
    layer_kinds = ("attn", "mlp", "head")
    fused = False
    batch_axis = "batch"
    history = Grid(
        cpu={"size": ("nano",), "context": ("128",)}, gpu={"size": ("llama-1b",), "context": ("2048",)},
        phases=("gemm", "attention", "elementwise"), errors=("logits_error",), per="tokens",
    )  # fmt: skip

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        size, context = ("llama-1b", "2048") if facts.accelerated else ("nano", "128")
        return served_axes(context, "tokens of each prompt", ("1",), size)

    def expand(self, params: Mapping[str, Scalar]) -> tuple[Params, ...]:
        checked_sizes(params)
        return super().expand(params)

    def work(self, params: Mapping[str, Scalar]) -> Work:
        config, batch, context = SERVED_SIZES[str(params["size"])], int(params["batch"]), int(params["context"])
        flops = forward_flops(config, batch, context, context)
        return Work(flops, batch * context, least_memory=served_memory(config, batch, context))

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
        return served_state(
            setup, arm_of(params, precisions.get(setup.case.precision)), self.layers(params), int(params["context"])
        )

    def step(self, state: ServedState, phase: Phases) -> None:
        state.step(phase)

    def error(self, setup: Setup) -> dict[str, float]:
        from fp8bench.nn.serving import logits_error

        params = dict(setup.case.params)
        return logits_error(
            setup, arm_of(params, precisions.get(setup.case.precision)), self.layers(params), int(params["context"])
        )
