"""Native casts to MX and NVFP4: codes along the contraction, and scales in the tiles where products look for them."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8bench.formats import operators
from fp8bench.formats.codes import DTYPES
from fp8bench.formats.grids import E2M1, E4M3, FORMATS, Format
from fp8bench.formats.memory_layout import MOST_ELEMENTS
from fp8bench.formats.native_codes import call, laid, whole_blocks
from fp8bench.formats.quantise import check_input
from fp8bench.formats.random_bits import key_of
from fp8bench.formats.scale_layouts import TILE_COLUMNS, TILE_ROWS, bytes_in_tiles, swizzled, swizzled_into
from fp8bench.formats.scaled import largest_magnitude, quantise
from fp8bench.formats.scalings import ScaleRounding, Scaling
from fp8bench.formats.tiled_kernels import Places, TensorScaleKernel, TiledCodesKernel

FLOAT_BYTES = 4
_DTYPES = {**DTYPES, E2M1.name: torch.float4_e2m1fn_x2}


def tiled_codes(
    x: Tensor, fmt: Format, scaling: Scaling, seed: Tensor | None = None, amaxes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes of a matrix, two e2m1 ones in a byte, and the bytes of its blocks' scales in tiles (scale_layouts.py).

    Every row has scales of its own, those of NVFP4's squares repeated: no product takes squares as such. MX's are
    float8_e8m0fnu; NVFP4's are bytes, the four of the tensor's own float32 scale behind them: `amaxes` are the largest
    magnitudes of all parts of the tensor, if they are known.
    """
    check_input(x)
    if torch.compiler.is_compiling() or not 0 < x.numel() <= MOST_ELEMENTS:
        return _plain(x, fmt, scaling, seed)
    nvfp4, (rows, columns) = scaling.scale is E4M3, x.shape
    matrix, whole = whole_blocks(x.detach(), scaling.rows, scaling.columns)
    down, across = len(matrix), matrix.shape[1] // scaling.columns
    size, in_byte = bytes_in_tiles(rows, across), 2 if fmt is E2M1 else 1
    memory = torch.empty(size + nvfp4 * FLOAT_BYTES, dtype=torch.uint8, device=x.device)
    above = memory[size:].view(torch.float32).view(()) if nvfp4 else None
    key = None if seed is None else torch.empty((), dtype=torch.int32, device=x.device)
    if above is not None:
        amaxes = largest_magnitude(x) if amaxes is None else amaxes
        torch.ops.fp8bench.tensor_scale(amaxes.view(-1), above, seed, key)
    elif seed is not None and key is not None:
        key.copy_(key_of(seed))
    tiled = not rows % TILE_ROWS and not across % TILE_COLUMNS
    scales = memory[:size] if tiled else torch.empty(down * across, dtype=torch.uint8, device=x.device)
    codes = torch.empty(down, matrix.shape[1] // in_byte, dtype=torch.uint8, device=x.device)
    kept = scaling.scale.name if scaling.scale else ""
    written = fmt.name, scaling.rows, scaling.columns, kept, scaling.rounding.value, tiled
    torch.ops.fp8bench.tiled_codes(matrix, codes, scales, above, key, *written)
    if not tiled:
        swizzled_into(memory[:size], scales.view(down, across)[:rows])
    if not whole:
        codes = codes[:rows, : -(-columns // in_byte)].contiguous()
    return codes.view(_DTYPES[fmt.name]), memory if nvfp4 else memory.view(torch.float8_e8m0fnu)


def _plain(x: Tensor, fmt: Format, scaling: Scaling, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same, one operation after the other."""
    stored = quantise(x, fmt, scaling, seed=seed, checked=False)
    scales = stored.scales
    assert scales is not None
    each = scales.repeat_interleave(scaling.rows, 0)[: len(x)]
    memory, codes = swizzled(each), stored.codes.view(_DTYPES[fmt.name])
    if stored.tensor_scale is None:
        return codes, memory.view(torch.float8_e8m0fnu)
    return codes, torch.cat((memory, stored.tensor_scale.reshape(1).view(torch.uint8)))


def _run_tiled_codes(
    x: Tensor, out: Tensor, scales: Tensor, above: Tensor | None, key: Tensor | None,
    fmt: str, rows: int, columns: int, kept: str, rounding: str, tiled: bool,
) -> None:  # fmt: skip
    matrix, turned = laid(x)
    scaling = Scaling(rows, columns, FORMATS[kept], ScaleRounding(rounding))
    places = Places(scaling, tiled, turned)
    kernel = TiledCodesKernel(FORMATS[fmt], places, x.dtype, str(x.device), key is not None)
    seen = places.matrix(matrix), places.codes(out, kernel.in_byte), places.scales(scales, len(out))
    call(kernel, *seen, *(one for one in (above, key) if one is not None))


def _run_tensor_scale(amaxes: Tensor, out: Tensor, seed: Tensor | None, key: Tensor | None) -> None:
    others = [one for one in (seed, key) if one is not None]
    call(TensorScaleKernel(str(out.device), bool(others)), amaxes, out, *others)


_TILED = (
    "Tensor x, Tensor(a!) out, Tensor(b!) scales, Tensor? above, Tensor? key, "
    "str fmt, int rows, int columns, str kept, str rounding, bool tiled"
)
operators.define("tiled_codes", f"({_TILED}) -> ()", _run_tiled_codes)
operators.define(
    "tensor_scale", "(Tensor amaxes, Tensor(a!) out, Tensor? seed, Tensor(b!)? key) -> ()", _run_tensor_scale
)
