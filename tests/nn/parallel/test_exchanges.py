"""What several ranks make of vectors in FP8, all of them simulated in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8bench.nn.parallel.exchanges import FP8Wire, OfRank
from fp8bench.numerics.rank_programs import simulated
from tests.nn.parallel.ranks import Board, Place

RANKS = 3
ROUNDING = 2**-4


def of_all(program: str, values: list[Tensor]) -> list[Tensor]:
    programs = []
    for rank, own in enumerate(values):
        place: Any = Place(Board(RANKS), rank)
        of_rank: OfRank = getattr(FP8Wire(place), program)
        programs.append(of_rank(own, rank))
    return simulated(programs)


def test_a_mean_is_everybodys_whatever_its_length() -> None:
    values = [torch.randn(100, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
    found, wanted = of_all("mean_of", values), torch.stack(values).mean(0)
    for one in found:
        assert torch.equal(one, found[0]) and len(one) == 100
        assert (one - wanted).norm() < ROUNDING * wanted.norm()


def test_parts_of_a_mean_are_the_ranks_own() -> None:
    values = [torch.randn(99, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
    wanted = torch.stack(values).mean(0)
    for one, part in zip(of_all("_part_of", values), wanted.chunk(RANKS), strict=True):
        assert (one - part).norm() < ROUNDING * part.norm()


def test_what_is_joined_has_a_scale_for_each_part() -> None:
    """Parts of very different sizes lose no more than one of them would."""
    values = [torch.randn(33, generator=torch.Generator().manual_seed(rank)) * 1e4**rank for rank in range(RANKS)]
    for found in of_all("_joined_of", values):
        for one, part in zip(found.chunk(RANKS), values, strict=True):
            assert (one - part).norm() < ROUNDING * part.norm()
