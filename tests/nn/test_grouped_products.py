"""One FP8 product for all experts, against the emulation of one for each, and what torch has such products for."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from fp8bench.model import DeviceFacts
from fp8bench.nn.experts import Experts
from fp8bench.nn.gpt import FeedForward
from fp8bench.nn.whole_layers import CachedWeights
from fp8bench.protocols import Arithmetic, SilentPhases
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import B200, CPU, H200, MI300X
from tests.nn.grouped_kernel import GroupedKernel
from tests.nn.layers import given

MODES = (
    *(("fp8-rowwise" + options, H200) for options in ("", ":scale=exact", ":weight-gradient=bf16")),
    *(("mxfp8" + options, B200) for options in ("", ":weight-gradient=bf16")),
)


def experts(arithmetic: Arithmetic, gated: bool, hidden: int = 48) -> Experts:
    torch.manual_seed(1)
    block = Experts(32, 4, lambda choose: FeedForward(32, hidden, gated, 1.0, choose), lambda name: arithmetic)
    with torch.no_grad():
        block.router.mul_(20)
        block.router[2] = -9 * block.router.sum(0)  # no token chooses it
    return block


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("mode", "gpu"), MODES)
def test_outputs_and_gradients_are_those_of_one_product_for_each(
    mode: str, gpu: DeviceFacts, cached: bool, grouped_kernel: GroupedKernel
) -> None:
    """Bit for bit: every code and every scale is where the product looks for it, whoever cast the weights."""
    found = []
    for facts in (gpu, CPU):
        block = experts(precisions.get(mode).arithmetic(facts), gated=cached, hidden=160)
        x = (given(200, 32).abs() * torch.logspace(-2, 2, 200)[:, None]).to(torch.bfloat16).requires_grad_()
        with CachedWeights(block).cast(SilentPhases()) if cached else nullcontext():
            y = block(x, SilentPhases())
            (y * given(200, 32, seed=5)).sum().backward()
        found.append([y, x.grad, *(one.grad for one in block.parameters())])
    products = 2 if "gradient" in mode else 3  # the weight gradient's in bf16 is torch's own
    assert grouped_kernel.calls == 2 * products
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    y, of_x, router, *of_weights = (one is not None and float(one.detach().abs().max()) > 0 for one in found[0])
    assert y and of_x and router and of_weights.count(True) >= 4 and of_weights.count(False) >= 2


def test_sides_that_do_not_fit_are_multiplied_one_by_one(grouped_kernel: GroupedKernel) -> None:
    """As are recipes that torch has no grouped product for."""
    for mode, hidden in (("fp8-rowwise", 40), ("bf16", 48)):
        block = experts(precisions.get(mode).arithmetic(H200), gated=False, hidden=hidden)
        assert block._may_be_grouped() is (mode == "bf16")
    assert grouped_kernel.calls == 0


@for_each(
    ("mode", "facts", "groups"),
    [
        ("fp8-rowwise", H200, 16),
        ("fp8-rowwise", B200, 16),
        ("fp8-rowwise", replace(B200, capability=(10, 3)), 16),
        ("fp8-rowwise", replace(H200, capability=(8, 9)), 0),
        ("fp8-rowwise", replace(H200, capability=(12, 0)), 0),
        ("fp8-rowwise", MI300X, 0),
        ("fp8-rowwise", CPU, 0),
        ("fp8-rowwise:formats=hybrid", H200, 0),  # E5M2
        ("fp8-e4m3", H200, 0),  # a scale a tensor
        ("mxfp8", B200, 32),
        ("mxfp8", replace(B200, capability=(10, 3)), 0),
        ("mxfp8", H200, 0),
        ("mxfp8:formats=hybrid", B200, 0),
        ("mxfp4", B200, 0),
        ("nvfp4", B200, 0),
        ("bf16", CPU, 8),
        ("fp16", H200, 0),
    ],
)
def test_what_is_grouped(mode: str, facts: DeviceFacts, groups: int) -> None:
    """As torch 2.13 and 2.11 for CUDA answered on a runtime that computes nothing, for 8.9, 9.0, 10.0, 10.3, 12.0."""
    assert precisions.get(mode).arithmetic(facts).groups == groups
