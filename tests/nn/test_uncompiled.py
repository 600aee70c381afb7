"""Optimizers and references without torch's compiler: the same bits, and nobody imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fp8bench.nn.attention import recomputed
from fp8bench.nn.training_step import eager
from suites.trials import ran

STEPS = """
import pathlib, sys, tempfile, torch
from fp8bench.nn.attention import recomputed
from fp8bench.nn.training_step import eager
weight = torch.nn.Parameter(torch.ones(4, 4))
optimizer = eager(torch.optim.AdamW)([weight], lr=0.1, fused=True)
for _ in range(2):
    recomputed(lambda x: (x @ weight).tanh(), torch.ones(2, 4, requires_grad=True)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
loaded = {"torch._dynamo", "torch._inductor", "sympy"} & {*sys.modules}
import fp8bench.nn.training_step as module
from fp8bench.plan.corpus import prepare_corpus
module.TRAINING_STEPS = module.CAPTURED_STEPS = 2
module.captured(prepare_corpus(None, pathlib.Path(tempfile.mkdtemp())).path, 0)
sys.exit(" ".join(sorted(loaded | {"torch._dynamo"} & {*sys.modules})) or 0)
"""


@pytest.mark.slow
def test_nobody_imports_the_compiler() -> None:
    """Its many objects would slow down every later garbage collection."""
    ran((sys.executable, "-c", STEPS))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam])
def test_steps_are_torchs_to_the_bit(kind: type[torch.optim.Optimizer]) -> None:
    found = []
    for made in (kind, eager(kind)):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        optimizer = made(layer.parameters(), lr=0.1, weight_decay=0.1)  # type: ignore[call-arg]
        heard: list[object] = []
        optimizer.register_step_pre_hook(lambda *given, heard=heard: heard.append(given))
        for _ in range(3):
            layer(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(heard) == 3 and isinstance(optimizer, kind) and type(optimizer).__name__ == kind.__name__
        found.append([*layer.parameters(), *(one for kept in optimizer.state.values() for one in kept.values())])
    assert all(torch.equal(torch.as_tensor(one), torch.as_tensor(other)) for one, other in zip(*found, strict=True))


def test_what_is_computed_again_has_the_same_gradients() -> None:
    def gradients(computed: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(8, 8, dtype=torch.float64)
        x, y = (torch.randn(4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
        inner = computed(lambda a, b: computed(lambda c: layer(c).tanh() * 3, a * b) - b, x, y)
        (inner.square().mean() / 7).backward()
        return [one.grad for one in (x, y, *layer.parameters()) if one.grad is not None]

    plain, again = gradients(lambda run, *inputs: run(*inputs)), gradients(recomputed)
    assert len(plain) == 4 and all(map(torch.equal, plain, again))
