"""Random gradients: their stream, and how far their magnitudes spread."""

from __future__ import annotations

import torch

from fp8bench.numerics.distributions import GradientSource

SHAPES = [(300, 64)] * 40


def source(seed: int = 0) -> GradientSource:
    return GradientSource(SHAPES, torch.Generator().manual_seed(seed))


def test_the_same_seed_gives_the_same_stream() -> None:
    """And each set differs from the one before."""
    one, other, different = source(1), source(1), source(2)
    for _ in range(2):
        drawn = one.draw()
        assert all(torch.equal(a, b) for a, b in zip(drawn, other.draw(), strict=True))
        assert not torch.equal(drawn[0], different.draw()[0])
    assert not torch.equal(drawn[0], one.draw()[0])
    assert [tuple(tensor.shape) for tensor in drawn] == SHAPES
    assert {tensor.dtype for tensor in drawn} == {torch.float32}


def test_rows_and_tensors_have_magnitudes_of_their_own() -> None:
    """Three orders of magnitude by row, four by tensor; within a row a plain Gaussian."""
    gradients = source()
    drawn = gradients.draw()
    rows = torch.stack([one.square().mean(1).sqrt() for one in drawn])
    scales = torch.cat(gradients.scales, dim=1).t()
    assert ((rows / scales).log().abs() < 0.6).all()
    spread = rows.log10()
    assert 2.5 < (spread.amax(1) - spread.amin(1)).min() < (spread.amax(1) - spread.amin(1)).max() < 3.5
    assert 3 < spread.median(1).values.max() - spread.median(1).values.min() < 5
    standard = torch.cat([one / scale for one, scale in zip(drawn, gradients.scales, strict=True)])
    assert abs(standard.mean()) < 0.01 and abs(standard.std() - 1) < 0.01
