"""Where scales of blocks lie, number by number, and as torchao lays them."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from fp8bench.formats.scale_layouts import by_columns, of_squares, squares, swizzled, unswizzled
from tests.counts import for_each

SHAPES = [(1, 1), (1, 7), (9, 1), (128, 4), (33, 7), (129, 5), (300, 12), (256, 8)]


def numbered(down: int, across: int) -> torch.Tensor:
    """No two alike within a tile, none zero."""
    return (torch.arange(down * across) % 251 + 1).to(torch.uint8).view(down, across)


@for_each(("down", "across"), SHAPES)
def test_a_scale_lies_where_its_tile_says(down: int, across: int) -> None:
    """By the formula of cuBLAS: tiles of 128 x 4 one after the other, row after row of them; the rest is zero."""
    scales = numbered(down, across)
    laid = swizzled(scales)
    wide = -(-across // 4)
    wanted = torch.zeros(-(-down // 128) * wide * 512, dtype=torch.uint8)
    for row in range(down):
        for column in range(across):
            tile = (row // 128) * wide + column // 4
            wanted[tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4] = scales[row, column]
    assert laid.is_contiguous() and torch.equal(laid, wanted)
    assert torch.equal(unswizzled(laid, down, across), scales)


@pytest.mark.parametrize(("down", "across"), SHAPES)
def test_torchao_lays_them_so_too(down: int, across: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torchao").setLevel(logging.CRITICAL)
        pytest.importorskip("torchao", reason="needs torchao, whose layout this is held against")
        from torchao.prototype.mx_formats.utils import to_blocked
    assert torch.equal(
        to_blocked(numbered(down, across), use_triton_kernel=False).flatten(), swizzled(numbered(down, across))
    )


@for_each(("down", "across"), SHAPES)
def test_float_scales_lie_by_columns(down: int, across: int) -> None:
    """The shapes and strides that torch asks for on compute capability 9.0; what fills squares up is zero."""
    scales = numbered(down, across).float()
    laid, turned, filled = by_columns(scales), squares(scales), -(-across // 4) * 4
    assert torch.equal(laid, scales) and laid.shape == (down, across)
    assert laid.stride() == (1, down)
    assert turned.shape == (filled, down) and turned.stride() == (1, filled)
    assert torch.equal(turned[:across].t(), scales) and not turned[across:].any()
    assert torch.equal(of_squares(turned, across), scales)
