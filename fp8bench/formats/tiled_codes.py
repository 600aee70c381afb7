"""Native casts to MX and NVFP4: codes along the contraction, and scales in the tiles where products look for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.formats import operators
from fp8bench.formats.codes import DTYPES
from fp8bench.formats.grids import E2M1, E4M3, FORMATS, Format
from fp8bench.formats.memory_layout import MOST_ELEMENTS
from fp8bench.formats.native_codes import Called, call, laid, whole_blocks
from fp8bench.formats.quantise import check_input
from fp8bench.formats.random_bits import Draw
from fp8bench.formats.scale_layouts import TILE_COLUMNS, TILE_ROWS, bytes_in_tiles, swizzled, swizzled_into
from fp8bench.formats.scaled import largest_magnitude, quantise
from fp8bench.formats.scalings import ScaleRounding, Scaling
from fp8bench.formats.tiled_kernels import Places, TensorScalesKernel, TiledCodesKernel

FLOAT_BYTES = 4
_DTYPES = {**DTYPES, E2M1.name: torch.float4_e2m1fn_x2}


def tiled_codes(
    x: Tensor, fmt: Format, scaling: Scaling, draw: Draw | None = None, amaxes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes of a matrix, two e2m1 ones in a byte, and the bytes of its blocks' scales in tiles (scale_layouts.py).

    Every row has scales of its own, those of NVFP4's squares repeated: no product takes squares as such. MX's are
    float8_e8m0fnu; NVFP4's are bytes, the four of the tensor's own float32 scale behind them: `amaxes` are the largest
    magnitudes of all parts of the tensor, if they are known. With a `draw` of one seed rounding is stochastic.
    """
    check_input(x)
    if not _fused(x):
        return _plain(x, fmt, scaling, *_seeds(draw, 1))
    made = _Tiled.of(x, fmt, scaling, draw is not None)
    _scale_tensors([made], [x], draw, () if amaxes is None else (amaxes,))
    torch.ops.fp8bench.tiled_codes(*made.given, *_written(fmt, scaling))
    return made.result()


def tiled_codes_both(
    x: Tensor, turned: Tensor, fmt: Format, scaling: Scaling, draw: Draw | None = None, amaxes: Sequence[Tensor] = ()
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The same of a matrix, and of its transpose, which may have been rotated.

    Without `amaxes` both have those of the matrix; with two of them each has its own. A draw is of two seeds.
    """
    check_input(x)
    if not (_fused(x) and _fused(turned)):
        first, second = _seeds(draw, 2)
        return _plain(x, fmt, scaling, first), _plain(turned, fmt, scaling, second)
    straight, other = (_Tiled.of(one, fmt, scaling, draw is not None) for one in (x, turned))
    _scale_tensors([straight, other], [x], draw, amaxes)
    torch.ops.fp8bench.tiled_codes_both(*straight.given, *other.given, *_written(fmt, scaling))
    return straight.result(), other.result()


def _scale_tensors(made: list[_Tiled], sources: list[Tensor], draw: Draw | None, amaxes: Sequence[Tensor]) -> None:
    """The scales of tensors, where they have one, and the keys of seeds: in one kernel."""
    above = [one.above for one in made if one.above is not None]
    keys = [one.key for one in made if one.key is not None]
    if above and not amaxes:
        amaxes = [largest_magnitude(one) for one in sources]
    parts = [one.view(-1) for one in amaxes] if above else []
    if parts or draw is not None:
        last, after, steps = (None, None, ()) if draw is None else draw
        torch.ops.fp8bench.tensor_scales(parts, above, last, after, keys, steps)


def _seeds(draw: Draw | None, count: int) -> list[Tensor | None]:
    """The same one operation after the other."""
    if draw is None:
        return [None] * count
    seeds = [draw.last + step for step in draw.steps]
    draw.after.copy_(seeds[-1])
    return [*seeds]


def _fused(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and 0 < x.numel() <= MOST_ELEMENTS


def _written(fmt: Format, scaling: Scaling) -> tuple[str, int, int, str, str]:
    """A format and a scaling as an operator's arguments, which are numbers and words."""
    assert scaling.scale is not None
    return fmt.name, scaling.rows, scaling.columns, scaling.scale.name, scaling.rounding.value


class _Tiled(NamedTuple):
    """What a matrix is cast with and into: itself, filled to whole blocks, memory, the tensor's scale, the seed's key.

    Scales are written to where they are kept if they fill tiles.
    """

    matrix: Tensor
    codes: Tensor
    scales: Tensor
    above: Tensor | None
    key: Tensor | None
    tiled: bool
    memory: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, fmt: Format, scaling: Scaling, stochastic: bool) -> _Tiled:
        nvfp4, rows = scaling.scale is E4M3, len(x)
        matrix, _ = whole_blocks(x.detach(), scaling.rows, scaling.columns)
        down, across = len(matrix), matrix.shape[1] // scaling.columns
        size, in_byte = bytes_in_tiles(rows, across), 2 if fmt is E2M1 else 1
        memory = torch.empty(size + nvfp4 * FLOAT_BYTES, dtype=torch.uint8, device=x.device)
        above = memory[size:].view(torch.float32).view(()) if nvfp4 else None
        key = torch.empty((), dtype=torch.int32, device=x.device) if stochastic else None
        tiled = not rows % TILE_ROWS and not across % TILE_COLUMNS
        scales = memory[:size] if tiled else torch.empty(down * across, dtype=torch.uint8, device=x.device)
        codes = torch.empty(down, matrix.shape[1] // in_byte, dtype=torch.uint8, device=x.device)
        shape = rows, -(-x.shape[1] // in_byte)
        return cls(matrix, codes, scales, above, key, tiled, memory, shape, _DTYPES[fmt.name])

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool]:
        """What an operator is given of it."""
        return self.matrix, self.codes, self.scales, self.above, self.key, self.tiled

    def result(self) -> tuple[Tensor, Tensor]:
        """Codes, and the bytes of scales."""
        codes, above = self.codes, self.above
        if not self.tiled:
            size = len(self.memory) - (FLOAT_BYTES if above is not None else 0)
            swizzled_into(self.memory[:size], self.scales.view(len(codes), -1)[: self.shape[0]])
        if codes.shape != self.shape:
            codes = codes[: self.shape[0], : self.shape[1]].contiguous()
        kept = self.memory if above is not None else self.memory.view(torch.float8_e8m0fnu)
        return codes.view(self.dtype), kept


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
    x: Tensor, out: Tensor, scales: Tensor, above: Tensor | None, key: Tensor | None, tiled: bool,
    fmt: str, rows: int, columns: int, kept: str, rounding: str,
) -> None:  # fmt: skip
    written = fmt, rows, columns, kept, rounding
    kernel, tensors, _ = _called(x, out, scales, above, key, tiled, *written)
    call(kernel, *tensors)


def _run_tiled_codes_both(
    x: Tensor, out: Tensor, scales: Tensor, above: Tensor | None, key: Tensor | None, tiled: bool,
    y: Tensor, out_of_y: Tensor, scales_of_y: Tensor, above_y: Tensor | None, key_of_y: Tensor | None, tiled_y: bool,
    fmt: str, rows: int, columns: int, kept: str, rounding: str,
) -> None:  # fmt: skip
    written = fmt, rows, columns, kept, rounding
    turned = _called(y, out_of_y, scales_of_y, above_y, key_of_y, tiled_y, *written)
    _called(x, out, scales, above, key, tiled, *written).beside(turned)


def _called(
    x: Tensor, out: Tensor, scales: Tensor, above: Tensor | None, key: Tensor | None, tiled: bool,
    fmt: str, rows: int, columns: int, kept: str, rounding: str,
) -> Called:  # fmt: skip
    matrix, turned = laid(x)
    scaling = Scaling(rows, columns, FORMATS[kept], ScaleRounding(rounding))
    places = Places(scaling, tiled, turned)
    kernel = TiledCodesKernel(FORMATS[fmt], places, x.dtype, str(x.device), key is not None)
    seen = places.matrix(matrix), places.codes(out, kernel.in_byte), places.scales(scales, len(out))
    return Called(kernel, (*seen, *(one for one in (above, key) if one is not None)), turned)


def _run_tensor_scales(
    amaxes: list[Tensor], above: list[Tensor], last: Tensor | None, after: Tensor | None, keys: list[Tensor],
    steps: list[int],
) -> None:  # fmt: skip
    tensors = [*amaxes, *above, *(one for one in (last, after) if one is not None), *keys]
    call(TensorScalesKernel(str(tensors[0].device), len(amaxes), len(above), tuple(steps)), *tensors)


_TILED = "Tensor x, Tensor(a!) out, Tensor(b!) scales, Tensor? above, Tensor? key, bool tiled"
_OF_Y = "Tensor y, Tensor(c!) out_of_y, Tensor(d!) scales_of_y, Tensor? above_y, Tensor? key_of_y, bool tiled_y"
_WRITTEN = "str fmt, int rows, int columns, str kept, str rounding"
_ABOVE = "Tensor[] amaxes, Tensor(a!)[] above, Tensor? last, Tensor(b!)? after, Tensor(c!)[] keys, int[] steps"
operators.define("tiled_codes", f"({_TILED}, {_WRITTEN}) -> ()", _run_tiled_codes)
operators.define("tiled_codes_both", f"({_TILED}, {_OF_Y}, {_WRITTEN}) -> ()", _run_tiled_codes_both)
operators.define("tensor_scales", f"({_ABOVE}) -> ()", _run_tensor_scales)
