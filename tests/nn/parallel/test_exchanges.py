"""FP8 exchanges of several ranks, simulated in this process."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from fp8bench.nn.parallel.exchanges import FP8Wire, RankProgram
from fp8bench.numerics.collectives import RankTensors, average_tensors, gather_tensors
from fp8bench.numerics.rank_programs import simulate
from tests.nn.parallel.ranks import Board, Place

RANKS = 3
ROUNDING = 2**-4


def of_all(program: str, values: list[Tensor]) -> list[Tensor]:
    programs = []
    for rank, own in enumerate(values):
        place: Any = Place(Board(RANKS), rank)
        of_rank: RankProgram = getattr(FP8Wire(place), program)
        programs.append(of_rank(own, rank))
    return simulate(programs)


def test_a_mean_is_everybodys_whatever_its_length() -> None:
    values = [torch.randn(100, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
    result, expected = of_all("average_over_ranks", values), torch.stack(values).mean(0)
    for tensor in result:
        assert torch.equal(tensor, result[0]) and len(tensor) == 100
        assert (tensor - expected).norm() < ROUNDING * expected.norm()


def test_what_is_joined_has_a_scale_for_each_part() -> None:
    values = [torch.randn(33, generator=torch.Generator().manual_seed(rank)) * 1e4**rank for rank in range(RANKS)]
    for result in of_all("join_parts", values):
        for tensor, part in zip(result.chunk(RANKS), values, strict=True):
            assert (tensor - part).norm() < ROUNDING * part.norm()


# Tensors of three owners, with very different sizes.
LENGTHS = ((5, 7, 21), (30, 3), (1, 1, 1, 2))
PIECES = [RankTensors(some, 4) for some in LENGTHS]
WIDE = [10.0**number for number in (-6, 4, 0, 2, -3, 5, -5, 1, 3)]


def tensors_of(seed: int) -> list[list[Tensor]]:
    draw, sizes = torch.Generator().manual_seed(seed), iter(WIDE)
    return [[torch.randn(length, generator=draw) * next(sizes) for length in some] for some in LENGTHS]


def as_sent(values: np.ndarray, amax: float) -> np.ndarray:
    scale = 2.0 ** np.floor(np.log2(448 / amax)) if amax else 1.0
    return (values * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / scale


def test_each_tensor_is_sent_with_a_scale_of_its_own() -> None:
    owned = tensors_of(0)
    programs = [gather_tensors(torch.cat(some), rank, PIECES) for rank, some in enumerate(owned)]
    expected = np.concatenate([as_sent(item.numpy(), float(item.abs().max())) for some in owned for item in some])
    for result in simulate(programs):
        assert np.array_equal(result.double().numpy(), expected)


def test_each_gradient_is_a_mean_with_a_scale_of_its_own() -> None:
    brought = [tensors_of(rank) for rank in range(RANKS)]
    programs = [
        average_tensors(torch.cat([item for some in own for item in some]), rank, PIECES)
        for rank, own in enumerate(brought)
    ]
    for rank, result in enumerate(simulate(programs)):
        expected = []
        for place in range(len(LENGTHS[rank])):
            own = [brought[other][rank][place].numpy() for other in range(RANKS)]
            amax = max(float(np.abs(item).max()) for item in own)
            expected.append(sum(as_sent(item, amax) for item in own) / RANKS)
        assert result.double().numpy() == pytest.approx(np.concatenate(expected), rel=1e-6)


def test_a_tensor_that_is_not_finite_spoils_no_other() -> None:
    own = tensors_of(0)
    own[0][0][2] = float("nan")
    every = torch.cat([item for some in own for item in some])
    first, *others = simulate([average_tensors(every, rank, PIECES) for rank in range(RANKS)])
    assert first[:5].isnan().any() and first[5:].isfinite().all() and all(item.isfinite().all() for item in others)
