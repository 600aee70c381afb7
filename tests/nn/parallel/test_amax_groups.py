"""Scales of tensors of which several ranks hold parts: as of the whole tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.parallel.amax_groups import scaled_together
from fp8bench.nn.recipe_arithmetic import RecipeArithmetic, ScaledArithmetic
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.protocols import Role
from fp8bench.registry import precisions


@pytest.mark.parametrize("kind", [RecipeArithmetic, ScaledArithmetic])
@pytest.mark.parametrize("mode", ["fp8", "fp8:scale=pow2", "fp8-delayed:history=2"])
def test_parts_are_cast_as_the_whole_tensor_is(kind: type[RecipeArithmetic], mode: str) -> None:
    """Bit by bit, cast after cast, by a magnitude that each rank is told; by its own they are not."""
    precision = precisions.get(mode)
    assert isinstance(precision, RecipePrecision)
    torch.manual_seed(0)
    steps = [torch.cat([torch.randn(8, 32), 7 * torch.randn(8, 32)]) for _ in range(3)]
    amax = iter(())

    def largest(own: Tensor) -> Tensor:
        assert own.dim() == 0 and own.dtype == torch.float32
        return next(amax)

    for role in Role:
        whole, own = (kind(precision.recipe).layer("a") for _ in range(2))
        ranks = [scaled_together(kind(precision.recipe).layer("a"), Role, largest) for _ in range(2)]
        alike = []
        for step in steps:
            straight, turned = whole.cast_both(step, role)
            for place, (rank, part) in enumerate(zip(ranks, step.chunk(2), strict=True)):
                amax = iter([largest_magnitude(step)])
                found, other = rank.cast_both(part, role)
                rows = slice(8 * place, 8 * place + 8)
                assert torch.equal(found.data.float(), straight.data[rows].float())
                assert turned is not None and other is not None
                assert torch.equal(other.data.float(), turned.data[:, rows].float())
            alike.append(torch.equal(own.cast(step[:8], role).data.float(), straight.data[:8].float()))
        assert not all(alike) or "pow2" in mode  # by powers of two values are rounded alike


def test_a_cast_that_is_done_again_asks_nobody() -> None:
    """A block that is computed once more in backward is cast with the scale that it had."""
    precision = precisions.get("fp8")
    assert isinstance(precision, RecipePrecision)
    asked = []
    arithmetic = scaled_together(
        RecipeArithmetic(precision.recipe).layer("a"), Role, lambda amax: asked.append(amax) or amax * 2
    )
    assert isinstance(arithmetic, RecipeArithmetic)
    x = torch.randn(4, 16)
    first, again = (arithmetic.operand(x, Role.INPUT, again=again) for again in (False, True))
    assert len(asked) == 1 and torch.equal(first.data, again.data)
    scale = arithmetic.last_scale(Role.INPUT)
    assert scale is not None and float(scale) == pytest.approx(448 / (2 * float(x.abs().max())))


def test_scales_of_rows_and_blocks_are_of_one_ranks_values() -> None:
    for mode in ("fp8-rowwise", "mxfp8", "nvfp4"):
        precision = precisions.get(mode)
        assert isinstance(precision, RecipePrecision)
        arithmetic = RecipeArithmetic(precision.recipe)
        assert scaled_together(arithmetic, Role, lambda amax: amax) is arithmetic
