"""What each scaling multiplies elements by: the values that are left lie on the grid of its multiples."""

from __future__ import annotations

import pytest
import torch

from fp8bench.formats.grids import E2M1, E4M3, E5M2, E8M0, Format
from fp8bench.formats.quantise import round_to
from fp8bench.formats.scaled import values
from fp8bench.formats.scalings import (
    BLOCK,
    MX,
    NVFP4,
    NVFP4_SQUARE,
    NVFP4_UP,
    ROW,
    SQUARE,
    TENSOR,
    ScaleRounding,
    Scaling,
)
from fp8bench.numerics.tensor_error import Factors, factors_of, in_blocks, tensor_error
from tests.formats.scaling_definitions import gaussian

FLOOR = Scaling(1, 32, E8M0, ScaleRounding.FLOOR)
SCALINGS = [
    (E4M3, None), (E4M3, TENSOR), (E5M2, ROW), (E4M3, BLOCK), (E4M3, SQUARE), (E4M3, MX), (E2M1, FLOOR),
    (E2M1, NVFP4), (E2M1, NVFP4_UP), (E2M1, NVFP4_SQUARE),
]  # fmt: skip


@pytest.mark.parametrize("shape", [(20, 200), (129, 33), (1, 7)])
@pytest.mark.parametrize(("fmt", "scaling"), SCALINGS, ids=lambda one: getattr(one, "name", "none"))
def test_values_are_elements_times_their_factors(fmt: Format, scaling: Scaling | None, shape: tuple[int, int]) -> None:
    """So that what is left, over its factor, is a value of the format; uneven ends included."""
    x = gaussian(*shape, seed=3)
    factors = factors_of(x, fmt, scaling)
    left = values(x, fmt, scaling)
    steps = factors.over((slice(0, shape[0]), slice(0, shape[1]))).expand(shape)
    elements = (left.double() / steps).to(torch.float32)
    torch.testing.assert_close(elements, round_to(elements, fmt), rtol=2**-22, atol=0)
    found = tensor_error(x, left, fmt, factors)
    assert found.max_ulp is not None and 0.3 < found.max_ulp < 0.5 + 2**-18
    saturates = scaling in (FLOOR, NVFP4, NVFP4_SQUARE) and shape != (1, 7)
    assert bool(found.saturated) == saturates


def test_a_given_scale_takes_the_place_of_the_current_one() -> None:
    """One of earlier steps: an octave too large, and the largest values saturate."""
    x = gaussian(8, 64, seed=3)
    scale = 2 * E4M3.largest / x.abs().max()
    found = tensor_error(x, values(x, E4M3, TENSOR, scale=scale), E4M3, factors_of(x, E4M3, TENSOR, scale))
    assert found.utilisation == pytest.approx(2) and found.saturated
    assert found.saturated == int((x.abs() > x.abs().max() / 2).sum())


def test_pieces_of_a_tensor_have_the_factors_of_the_whole() -> None:
    """Rows and columns of a piece find their blocks, also where it cuts them."""
    factors = Factors(torch.arange(6.0).view(2, 3), 4, 2)
    whole = factors.over((slice(0, 7), slice(0, 5)))
    assert whole.tolist()[3:5] == [[0, 0, 1, 1, 2], [3, 3, 4, 4, 5]]
    assert torch.equal(factors.over((slice(2, 6), slice(1, 4))), whole[2:6, 1:4])
    assert factors.over((slice(2, 6), slice(1, 4))).dtype == torch.float64


def test_peaks_are_the_largest_of_each_block_over_all_pieces() -> None:
    """Blocks that pieces cut gather theirs."""
    x = gaussian(10, 12, seed=3).abs().double()
    factors = Factors(torch.ones(3, 3), 4, 4)
    peaks = factors.none()
    for top in range(0, 10, 3):
        for left in range(0, 12, 8):
            place = slice(top, min(top + 3, 10)), slice(left, min(left + 8, 12))
            factors.raise_to_peaks(peaks, x[place], place)
    wanted = [[float(x[r : r + 4, c : c + 4].max()) for c in range(0, 12, 4)] for r in range(0, 10, 4)]
    assert peaks.tolist() == wanted


def test_blocks_of_columns_are_filled_with_zeros() -> None:
    """And all columns are one block if none are asked for."""
    x = torch.ones(2, 5)
    assert in_blocks(x, 4).tolist()[0] == [[1, 1, 1, 1], [1, 0, 0, 0]] and in_blocks(x, 0).shape == (2, 1, 5)
