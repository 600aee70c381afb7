"""The operations between products: each against its definition, in the carriers' precisions only."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fp8bench.model import Level, Scalar
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Setup, SilentPhases
from fp8bench.registry import precisions
from fp8bench.workloads.norm_act import INPUT_COUNT_BY_OPERATION, NormAct
from tests.counts import for_each
from tests.workloads.steps import CPU, H200, SMALL, small

SIZES = SMALL["norm_act"]


def setup_for(precision: str = "fp32", **changes: Scalar) -> Setup:
    return small("norm_act", precision, **changes)


def spread(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).add(1e-5).sqrt()


# As their papers define them, in fp64.
WANTED: dict[str, Callable[..., Tensor]] = {
    "layer_norm": lambda x: spread(x - x.mean(-1, keepdim=True)),
    "rms_norm": spread,
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu_gate": lambda gate, value: gate / (1 + (-gate).exp()) * value,
    "softmax": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
    "residual": lambda x, y: x + y,
}


@for_each("operation", WANTED)
@for_each(("precision", "limit"), [("fp32", 1e-6), ("bf16", 1e-2), ("fp16", 1e-3)])
def test_operations_are_what_their_names_say(operation: str, precision: str, limit: float) -> None:
    state = NormAct().prepare(setup_for(precision, operation=operation))
    output = state.layer(*state.inputs, SilentPhases())
    assert output.dtype == state.inputs[0].dtype == precisions.get(precision).arithmetic(CPU).carrier
    assert relative_frobenius(output, WANTED[operation](*(one.detach().double() for one in state.inputs))) < limit
    assert len(state.inputs) == INPUT_COUNT_BY_OPERATION[operation]


def test_the_loss_is_summed_over_the_tokens() -> None:
    state = NormAct().prepare(setup_for("bf16", operation="cross_entropy"))
    (logits,) = state.inputs
    targets = next(state.layer.buffers())
    output, gradients = state.outcome()
    wanted = (logits.detach().double().logsumexp(-1) - logits.detach().double()[torch.arange(24), targets]).sum()
    assert output.dtype == torch.float32 and float(output) == pytest.approx(float(wanted), rel=1e-5)
    assert len(set(targets.tolist())) > 10 and int(targets.min()) >= 0 and int(targets.max()) < 32
    assert gradients[0].dtype == torch.bfloat16 and float(gradients[0].abs().max()) > 0.01


@for_each("operation", ["layer_norm", "rms_norm", "softmax"])
def test_what_sums_is_computed_in_fp32(operation: str) -> None:
    state = NormAct().prepare(setup_for("bf16", operation=operation, width=512))
    (x,) = (one.detach() for one in state.inputs)
    once = WANTED[operation](x.double()).to(torch.bfloat16)
    output = state.layer(x, SilentPhases()).detach()
    assert float((output != once).double().mean()) < 0.001


def test_bf16_is_measured_instead_of_what_it_carries() -> None:
    for precision, carrier in (("fp8", "bf16"), ("nvfp4", "bf16"), ("tf32", "fp32")):
        support = NormAct().support(SIZES, precisions.get(precision), H200)
        assert support.level is Level.REFUSED and f"measure {carrier}" in support.reason
    assert {NormAct().support(SIZES, precisions.get(name), CPU).level for name in NormAct.dtypes} == {Level.NATIVE}
