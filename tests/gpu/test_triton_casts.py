"""Casts by hand on a GPU: until they are compiled, launched by Triton, and repeated, they are those of a processor."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from fp8bench.formats import operators
from fp8bench.formats.grids import E4M3
from fp8bench.formats.native_codes import current_codes
from fp8bench.formats.recipes import ScaleRounding
from fp8bench.formats.triton_casts import explain_no_triton, uses_triton
from tests.formats.test_native_codes import same
from tests.formats.triton_casts.casts import FAMILIES, matrices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> operators.Kernels:
    device = torch.device("cuda", 0)
    if explain_no_triton(device):
        pytest.skip(explain_no_triton(device))
    assert uses_triton(device)
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    return operators.KERNELS


@pytest.mark.parametrize("family", FAMILIES)
def test_casts_by_hand_are_those_of_a_processor_bit_by_bit(family: str, kernels: operators.Kernels) -> None:
    make, casts = FAMILIES[family]
    for fmt, rounding, source in casts:
        cast = make(fmt, rounding)
        for here in matrices(source):
            there, expected = torch.empty_strided(here.shape, here.stride(), dtype=source, device="cuda"), cast(here)
            there.copy_(here)
            for _ in range(3):
                result = [tensor.cpu() for tensor in cast(there)]
                assert all(same(*pair) for pair in zip(result, expected, strict=True)), (
                    fmt.name,
                    here.shape,
                    here.stride(),
                )
                kernels.compile(*kernels.wanted)
    assert kernels.fused.total() and uses_triton(torch.device("cuda", 0))


def test_a_repeated_cast_leaves_its_counters_at_zero_and_can_be_captured(kernels: operators.Kernels) -> None:
    x = torch.randn(1024, 2048, device="cuda").bfloat16()
    for _ in range(3):
        expected = current_codes(x, E4M3, ScaleRounding.EXACT, both=True)
        kernels.compile(*kernels.wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = current_codes(x, E4M3, ScaleRounding.EXACT, both=True)
    for size in (1.0, 4.0, 0.5, 1.0):
        x.mul_(size)
        graph.replay()
        eager = current_codes(x, E4M3, ScaleRounding.EXACT, both=True)
        assert all(same(*pair) for pair in zip(captured, eager, strict=True))
    assert len(expected) == 3 and same(captured[1], eager[1])
