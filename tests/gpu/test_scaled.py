"""Scalings give the same bits on a GPU as on the CPU, where they are held against their definitions."""

from __future__ import annotations

import pytest
import torch

from fp8bench.formats.grids import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, Format
from fp8bench.formats.recipes import (
    BLOCK,
    BLOCK_POWER_OF_TWO,
    NVFP4,
    NVFP4_ROUNDED_UP,
    NVFP4_SQUARE,
    ROW,
    SQUARE,
    TENSOR,
    ScaleRounding,
    Scaling,
)
from fp8bench.formats.scaled import quantise, values
from fp8bench.nn.rotations import rotate
from tests.formats.scaling_definitions import a_million, differing
from tests.formats.test_scaled import dequantised

pytestmark = pytest.mark.gpu

MX = [Scaling(1, 32, E8M0, mode) for mode in (ScaleRounding.FLOOR, ScaleRounding.CEIL, ScaleRounding.EVEN)]
SCALINGS = (TENSOR, ROW, BLOCK, BLOCK_POWER_OF_TWO, SQUARE)
PAIRS = [(E4M3, scaling) for scaling in SCALINGS] + [(E5M2, scaling) for scaling in SCALINGS]
PAIRS += [(fmt, Scaling(1, 32, E8M0, ScaleRounding.RCEIL)) for fmt in (E4M3, E5M2, E3M2, E2M3, E2M1)]
PAIRS += [(E4M3, scaling) for scaling in MX] + [(E2M1, scaling) for scaling in (NVFP4, NVFP4_ROUNDED_UP, NVFP4_SQUARE)]


@pytest.mark.parametrize(("fmt", "scaling"), PAIRS, ids=[f"{fmt.name} {scaling.name}" for fmt, scaling in PAIRS])
def test_the_same_bits_as_on_the_cpu(fmt: Format, scaling: Scaling) -> None:
    for kind, x in a_million().items():
        for source in (x, x.to(torch.bfloat16), x[:100, :333]):
            for seed in (None, torch.tensor([3])):
                on_gpu = source.cuda()
                gpu_seed = None if seed is None else seed.cuda()
                left = values(on_gpu, fmt, scaling, seed=gpu_seed)
                assert differing(left.cpu(), values(source, fmt, scaling, seed=seed)) == 0, kind
                stored, wanted = (
                    quantise(on_gpu, fmt, scaling, seed=gpu_seed),
                    quantise(source, fmt, scaling, seed=seed),
                )
                assert torch.equal(stored.codes.cpu(), wanted.codes)
                assert stored.scales is not None and wanted.scales is not None
                assert torch.equal(stored.scales.cpu(), wanted.scales)
                again = dequantised(stored)
                apart = (again != left) & ~(again.isnan() & left.isnan())
                assert differing(again, left) == 0, (kind, source.shape, apart.nonzero()[:3], again[apart], left[apart])


def test_turned_the_same() -> None:
    for kind in ("gaussian", "outliers", "octaves"):
        x = a_million()[kind]
        assert torch.equal(rotate(x.cuda(), 5).cpu(), rotate(x, 5))
