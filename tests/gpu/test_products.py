"""Products that torch or a library claims for this GPU, tried as a run tries them before timing."""

from __future__ import annotations

import pytest
import torch

from fp8bench.model import Case, Level
from fp8bench.model.raw import Settings
from fp8bench.nn.linear import Linear
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import SilentPhases
from fp8bench.registry import backends, precisions
from fp8bench.worker.bench import Bench

pytestmark = pytest.mark.gpu

MODES = [name for name in precisions.names() if isinstance(precisions.get(name), RecipePrecision)]


@pytest.mark.parametrize("backend", ["auto", *backends.names()])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_claimed_is_right(mode: str, backend: str) -> None:
    bench = Bench(Settings())
    facts = next(item for item in bench.probe() if item.kind == "cuda")
    word = f"{mode}:backend={backend}"
    support = precisions.get(word).support(facts)
    if support.level is not Level.NATIVE:
        pytest.skip(f"{support.level}: {support.reason}")
    if why := "" if backend == "auto" else bench.backend(backend):
        pytest.skip(why)
    assert bench.trial(Case("mlp", (), precisions.find_canonical_name(word), facts.key), facts) == ""


@pytest.mark.parametrize("mode", MODES)
def test_native_layers_are_the_emulated_ones(mode: str) -> None:
    facts = next(item for item in Bench(Settings()).probe() if item.kind == "cuda")
    precision = precisions.get(mode)
    if precision.support(facts).level is not Level.NATIVE or precision.remembers:
        pytest.skip(f"{mode}: {precision.support(facts).reason}")
    outcomes = []
    for word in (mode, f"{mode}:backend=emulated"):
        with torch.device("cuda"):
            torch.manual_seed(1)
            layer = Linear(512, 384, precisions.get(word).arithmetic(facts).layer("one"))
            x = torch.randn(256, 512).to(torch.bfloat16).requires_grad_()
            pulled = torch.randn(256, 384).to(torch.bfloat16)
        y = layer(x, SilentPhases())
        outcomes.append([y, *torch.autograd.grad(y, (x, layer.weight), pulled)])
    for native, emulated in zip(*outcomes, strict=True):
        assert relative_frobenius(native.double(), emulated.double()) < 1e-2
