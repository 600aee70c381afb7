"""Modes on a GPU: values as on a CPU, native products close to emulated ones, and no waiting for casts."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from fp8bench.devices.cuda import Cuda
from fp8bench.model import DeviceFacts, Level
from fp8bench.nn.linear import Linear
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Arithmetic, Role, SilentPhases
from fp8bench.registry import precisions
from tests.facts import CPU
from tests.gpu.waits import none_may_wait

pytestmark = pytest.mark.gpu

MODES = (
    "fp8", "fp8:scale=pow2:gw=bf16", "fp8-delayed:history=2", "fp8-delayed:margin=1:interval=2", "fp8-rowwise",
    "fp8-rowwise:formats=hybrid:scale=exact", "fp8-block", "fp8-block:accumulator=promoted", "fp8-e4m3", "fp8-e5m2",
    "mxfp8", "mxfp6:formats=hybrid", "nvfp4", "nvfp4:weights=1d:hadamard=off", "mxfp4:stochastic=on:hadamard=on",
    "custom:format=e3m2:scaling=row",
)  # fmt: skip


@pytest.fixture
def facts() -> DeviceFacts:
    return Cuda().available()[0]


def on_cpu(*shape: int, seed: int = 0) -> Tensor:
    rows = torch.logspace(-3, 3, shape[0])[:, None]
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * rows


def of(mode: str, facts: DeviceFacts) -> Arithmetic:
    return precisions.get(mode).arithmetic(facts).layer("one")


@pytest.mark.parametrize("mode", MODES)
def test_casts_have_the_values_that_they_have_on_a_processor(mode: str, facts: DeviceFacts) -> None:
    here, there = of(mode, facts), of(mode, CPU)
    for step in range(3):
        source = on_cpu(96, 160, seed=step) * 4.0**step
        for role in Role:
            ours, theirs = here.cast(source.cuda(), role), there.cast(source, role)
            assert torch.equal(here.restore(ours, torch.float32).cpu(), there.restore(theirs, torch.float32))
            ours, theirs = here.turn(ours, source.cuda(), role), there.turn(theirs, source, role)
            assert torch.equal(here.restore(ours, torch.float32).cpu(), there.restore(theirs, torch.float32))


@pytest.mark.parametrize("mode", MODES)
def test_layers_are_close_to_those_on_a_processor(mode: str, facts: DeviceFacts) -> None:
    outcomes: list[list[Tensor]] = []
    for place, chosen in (("cuda", facts), ("cpu", CPU)):
        torch.manual_seed(1)
        layer, result = Linear(160, 96, of(mode, chosen)).to(place), []
        for step in range(2):
            x = on_cpu(64, 160, seed=step).to(place).requires_grad_()
            y = layer(x, SilentPhases())
            pull = on_cpu(64, 96, seed=9).to(place, y.dtype)
            result += [gradient.cpu() for gradient in (y, *torch.autograd.grad(y, (x, layer.weight), pull))]
        outcomes.append(result)
    native = precisions.get(mode).support(facts).level is Level.NATIVE
    for ours, theirs in zip(*outcomes, strict=True):
        assert relative_frobenius(ours, theirs) < (1e-2 if native else 5e-3)


@pytest.mark.parametrize("mode", MODES)
def test_the_host_never_waits_for_a_cast(mode: str, facts: DeviceFacts) -> None:
    arithmetic, source = of(mode, facts), on_cpu(64, 96).cuda()
    for step in range(4):
        with none_may_wait() if step else nullcontext():
            for role in Role:
                arithmetic.turn(arithmetic.cast(source, role), source, role)
