"""Native casts to MX and NVFP4: codes along the contraction, and scales in the tiles where products look for them.

Products of compute capability 10.0 read scales in tiles of 128 x 4 (scale_layouts.py). Where a matrix fills its tiles,
one kernel writes codes and scales in place; else scales are written row by row, and copied into tiles afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.formats import operators
from fp8bench.formats.blocks import block_elements, mx_scale, nvfp4_tensor_scale
from fp8bench.formats.code_kernels import IN_ORDER, TOGETHER
from fp8bench.formats.codes import DTYPES, elements, encode_values
from fp8bench.formats.compiling import ONE_LAUNCH, Kernel
from fp8bench.formats.grids import E2M1, E4M3, FORMATS, Format
from fp8bench.formats.matrix_codes import laid, whole_blocks
from fp8bench.formats.memory_layout import MOST_ELEMENTS
from fp8bench.formats.native_codes import Called, Launched, call, cast, define_cast
from fp8bench.formats.quantise import Draw, check_input, drawn_bits, key_of, round_values
from fp8bench.formats.recipes import ScaleRounding, Scaling
from fp8bench.formats.scale_layouts import TILE_COLUMNS, TILE_ROWS, bytes_in_tiles, swizzle, swizzled_into
from fp8bench.formats.scaled import largest_magnitude, quantise

_QUARTER = TILE_ROWS // TILE_COLUMNS
# Free sizes of examples, in tiles or blocks. Transposed ones differ, because a pair of kernels may have both.
_DOWN, _ACROSS = 9, 10
_TURNED_DOWN, _TURNED_ACROSS = 11, 13
_TILE = TILE_ROWS * TILE_COLUMNS
# The rows and columns of a block in the views of `Places`.
_INSIDE = (5, 6)


@dataclass(frozen=True)
class Places:
    """Views of a matrix, its codes and its scales, all in one order of dimensions.

    (tiles down, quarters, blocks down, tiles across, blocks across, rows of a block, its columns); if not `tiled`, a
    block is a tile. For a matrix that lies `turned`, tiles across come first, so that neighbours in memory are read
    together.
    """

    scaling: Scaling
    tiled: bool
    turned: bool

    @property
    def least(self) -> tuple[int, int]:
        return (TILE_ROWS, TILE_COLUMNS * self.scaling.columns) if self.tiled else self.block

    @property
    def block(self) -> tuple[int, int]:
        return self.scaling.rows, self.scaling.columns

    @property
    def free(self) -> tuple[int, int]:
        return (0, 2) if self.turned else (0, 3)

    def matrix(self, memory: Tensor) -> Tensor:
        """Returns the operand, which is stored row by row, or whose transpose is."""
        return self._view(memory.t() if self.turned else memory, self.scaling.columns)

    def codes(self, memory: Tensor, in_byte: int) -> Tensor:
        return self._view(memory, self.scaling.columns // in_byte)

    @property
    def writes_by_index(self) -> bool:
        """Whether bytes of scales are written by index: a square's scale belongs to each of its rows."""
        return self.scaling.rows > 1

    def scales(self, memory: Tensor, down: int) -> Tensor:
        """Views the bytes of scales in tiles or in rows; unchanged where scales are written by index."""
        if self.writes_by_index:
            return memory
        if not self.tiled:
            return self._view(memory.view(down, -1), 1)
        tiles = memory.view(down // TILE_ROWS, -1, _QUARTER, 1, TILE_COLUMNS, TILE_COLUMNS, 1)
        return self.put_in_order(tiles.permute(0, 4, 2, 3, 1, 5, 6))

    def numbers(self, parts: Tensor) -> Tensor:
        """The index in memory of each row's scale, int32, for a matrix viewed as `parts`."""
        # Each index counts along its own dimension and broadcasts over the others.
        order = (2, 3, 4, 5, 0, 1, 6) if self.turned else (0, 1, 2, 5, 3, 4, 6)
        down, quarter, line, row, across, block, _ = (
            torch.arange(parts.shape[place], dtype=torch.int32, device=parts.device).view(
                *(-1 if number == place else 1 for number in range(parts.dim()))
            )
            for place in order
        )
        wide, inside = parts.shape[order[4]], line * self.scaling.rows + row
        # Plain scales lie row by row. A line of a tile holds four rows, one of each quarter of its 128.
        if not self.tiled:
            return (down * self.scaling.rows + row) * wide + across
        return (down * wide + across) * _TILE + inside * (TILE_COLUMNS**2) + quarter * TILE_COLUMNS + block

    def _view(self, matrix: Tensor, length: int) -> Tensor:
        """Views a matrix in which a block has `length` columns."""
        rows = self.scaling.rows
        quarters, lines, columns = (TILE_COLUMNS, _QUARTER // rows, TILE_COLUMNS) if self.tiled else (1, 1, 1)
        across = matrix.shape[1] // (columns * length)
        return self.put_in_order(matrix.view(-1, quarters, lines, rows, across, columns, length))

    def put_in_order(self, parts: Tensor) -> Tensor:
        """Permutes (tiles down, quarters, blocks down, rows, tiles across, blocks across, columns) to the order of the
        class."""
        return parts.permute((4, 5, 0, 1, 2, 3, 6) if self.turned else (0, 1, 2, 4, 5, 3, 6))


@dataclass(frozen=True)
class TiledCodesKernel(Kernel):
    """Writes the codes of blocks, and the bytes of their scales, one for each row of a block.

    Takes views by `Places` of the operand and of memory for both, NVFP4's tensor scale, and the key of `stochastic`
    rounding's seed. A byte has two E2M1 codes.
    """

    fmt: Format
    places: Places
    source: torch.dtype
    device: str
    stochastic: bool = False

    @property
    def in_byte(self) -> int:
        return 2 if self.fmt is E2M1 else 1

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        source, out, scales, *optional = tensors
        scaling = self.places.scaling
        assert scaling.scale is not None
        drawn = self._draw_bits(source, optional.pop()) if self.stochastic else None
        if self.in_byte == 1 and not self.stochastic:  # torch's cast rounds to nearest even
            amax = source.abs().amax(_INSIDE, keepdim=True).to(torch.float32)
            block_scales, inverse = mx_scale(amax, self.fmt, scaling.rounding)
            codes = [elements(torch.where(block_scales.isnan(), 0.0, source), self.fmt, inverse).view(torch.uint8)]
        else:
            lanes = [lane.to(torch.float32) for lane in self._lanes(source)]
            above = optional[0] if optional else None
            rounded, block_scales, _ = block_elements(lanes, self.fmt, scaling, above, drawn, _INSIDE)
            codes = [encode_values(torch.where(block_scales.isnan(), 0.0, tensor), self.fmt) for tensor in rounded]
        out.copy_(codes[0] if len(codes) == 1 else codes[0].bitwise_or(codes[1].bitwise_left_shift(4)))
        block_scales = encode_values(block_scales, scaling.scale)
        # Scales of single rows have the order of the codes; those of squares are repeated over their rows.
        if not self.places.writes_by_index:
            scales.copy_(block_scales)
        else:  # by every element, though once a row would do: a smaller shape would need a separate kernel
            scales.index_put_((self.places.numbers(out).expand(out.shape),), block_scales.expand(out.shape))
        return ()

    def _lanes(self, source: Tensor) -> list[Tensor]:
        return [source[..., first :: self.in_byte] for first in range(self.in_byte)]

    def _draw_bits(self, source: Tensor, key: Tensor) -> list[Tensor]:
        order = (2, 3, 4, 0, 1) if self.places.turned else (0, 1, 2, 3, 4)
        down = [source.shape[place] for place in order[:3]]
        across = [source.shape[place] for place in order[3:]]
        # Random numbers are counted along the rows of the operand, in whatever order its memory lies.
        rows, columns = prod(down) * source.shape[5], prod(across) * source.shape[6]
        every = (torch.arange(number, dtype=torch.int32, device=key.device) for number in (rows, columns))
        numbered = next(every).view(*down, source.shape[5], 1, 1, 1) * columns + next(every).view(*across, -1)
        index = self.places.put_in_order(numbered)
        return [drawn_bits(lane, key) for lane in self._lanes(index)]

    def examples(self) -> list[Tensor]:
        (high, wide), device = self.places.least, torch.device(self.device)
        down, across = (_TURNED_DOWN, _TURNED_ACROSS) if self.places.turned else (_DOWN, _ACROSS)
        rows, columns = down * high, across * wide
        shape = (columns, rows) if self.places.turned else (rows, columns)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, self.source)
        out = torch.empty(rows, columns // self.in_byte, dtype=torch.uint8, device=device)
        scales = torch.empty(rows * (columns // self.places.scaling.columns), dtype=torch.uint8, device=device)
        above = [torch.full((), 0.75, device=device)] if self.places.scaling.scale is E4M3 else []
        key = [torch.zeros((), dtype=torch.int32, device=device)] if self.stochastic else []
        views = self.places.matrix(x), self.places.codes(out, self.in_byte), self.places.scales(scales, rows)
        return [*views, *above, *key]

    def free(self) -> list[Sequence[int]]:
        scalars = (self.places.scaling.scale is E4M3) + self.stochastic
        scales: Sequence[int] = (0,) if self.places.writes_by_index else self.places.free
        return [self.places.free, self.places.free, scales, *[()] * scalars]

    def options(self) -> Mapping[str, object]:
        return IN_ORDER


@dataclass(frozen=True)
class PairsKernel(Kernel):
    """E2M1 codes without a scale, two in a byte. Takes a matrix, which may lie `turned`, as (rows, pairs, 2), and
    memory for (rows, pairs) bytes."""

    source: torch.dtype
    device: str
    turned: bool

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        pairs, out = tensors
        # No code is NaN: it becomes the largest, as by a GPU's saturating conversions.
        values = pairs.to(torch.float32).nan_to_num(E2M1.largest, torch.inf, -torch.inf)
        first, second = (encode_values(round_values(values[..., number], E2M1), E2M1) for number in (0, 1))
        out.copy_(first.bitwise_or(second.bitwise_left_shift(4)))
        return ()

    def examples(self) -> list[Tensor]:
        shape = (2 * _TURNED_ACROSS, TILE_ROWS) if self.turned else (TILE_ROWS, 2 * _ACROSS)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.device(self.device), self.source)
        pairs = _pairs(x, self.turned)
        return [pairs, torch.empty(pairs.shape[:2], dtype=torch.uint8, device=self.device)]

    def free(self) -> list[Sequence[int]]:
        return [(0, 1), (0, 1)]


def _pairs(matrix: Tensor, turned: bool) -> Tensor:
    rows, columns = matrix.shape
    return matrix.view(rows // 2, 2, columns).permute(2, 0, 1) if turned else matrix.view(rows, columns // 2, 2)


@dataclass(frozen=True)
class TensorScalesKernel(Kernel):
    """NVFP4's tensor scales, each from the largest magnitudes of its tensor's parts; and keys of seeds.

    Takes the magnitudes of each of `tensors`; memory for the scales, `copies` of one tensor's or one of each; and if
    there are `steps` (quantise.Draw) the last seed, memory for the new one, and for the keys.
    """

    device: str
    tensors: int
    copies: int
    steps: tuple[int, ...] = ()

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        amaxes, above = tensors[: self.tensors], tensors[self.tensors : self.tensors + self.copies]
        for number, out in enumerate(above):
            out.copy_(nvfp4_tensor_scale(amaxes[number % self.tensors].amax()))
        if self.steps:
            last, new_last, *keys = tensors[self.tensors + self.copies :]
            # Written as a sum, which shares the launch of the other sums.
            first = torch.arange(2, device=last.device) == 0
            new_last.copy_(torch.where(first, last + self.steps[-1], 0).sum(0, keepdim=True))
            for key, step in zip(keys, self.steps, strict=True):
                key.copy_(key_of(last + step))
        return ()

    def examples(self) -> list[Tensor]:
        amaxes = [torch.ones(number, device=self.device) for number in (_DOWN, _ACROSS)[: self.tensors]]
        seeds = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(2 * bool(self.steps))]
        keys = [torch.zeros((), dtype=torch.int32, device=self.device) for _ in self.steps]
        return [*amaxes, *(torch.ones((), device=self.device) for _ in range(self.copies)), *seeds, *keys]

    def free(self) -> list[Sequence[int]]:
        scalars = self.copies + (2 + len(self.steps) if self.steps else 0)
        return [*[(0,)] * self.tensors, *[()] * scalars]

    def options(self) -> Mapping[str, object]:
        return {**IN_ORDER, **TOGETHER, **ONE_LAUNCH, "unroll_reductions_threshold": 1}


FLOAT_BYTES = 4
_DTYPES = {**DTYPES, E2M1.name: torch.float4_e2m1fn_x2}


def tiled_codes(
    x: Tensor, fmt: Format, scaling: Scaling, draw: Draw | None = None, amaxes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes of a matrix, two e2m1 ones in a byte, and the bytes of its blocks' scales in tiles (scale_layouts.py).

    Every row has separate scales, and those of NVFP4's squares are repeated, because no product takes squares as such.
    MX's are float8_e8m0fnu; NVFP4's are bytes, followed by the four of the tensor's own float32 scale: `amaxes` are the
    largest magnitudes of all parts of the tensor, if known. With a `draw` of one seed rounding is stochastic.
    """
    check_input(x)
    if not _takes_kernel(x):
        return _plain(x, fmt, scaling, *_seeds(draw, 1))
    target = _Tiled.of(x, fmt, scaling, draw is not None)
    _scale_tensors([target], [x], draw, () if amaxes is None else (amaxes,))
    cast("tiled_codes", None, target.arguments, (target.tiled, *_operator_arguments(fmt, scaling)), tuple)
    return target.result()


def tiled_codes_both(
    x: Tensor, turned: Tensor, fmt: Format, scaling: Scaling, draw: Draw | None = None, amaxes: Sequence[Tensor] = ()
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The codes and scales of a matrix, and of its transpose, which may have been rotated.

    Without `amaxes` both use those of the matrix; with two of them each uses its own. A draw has two seeds.
    """
    check_input(x)
    if not (_takes_kernel(x) and _takes_kernel(turned)):
        first, second = _seeds(draw, 2)
        return _plain(x, fmt, scaling, first), _plain(turned, fmt, scaling, second)
    straight, transpose = (_Tiled.of(tensor, fmt, scaling, draw is not None) for tensor in (x, turned))
    _scale_tensors([straight, transpose], [x], draw, amaxes)
    written = straight.tiled, transpose.tiled, *_operator_arguments(fmt, scaling)
    cast("tiled_codes_both", None, (*straight.arguments, *transpose.arguments), written, tuple)
    return straight.result(), transpose.result()


def unscaled_codes(x: Tensor) -> Tensor:
    """The e2m1 codes of a matrix without a scale, two in a byte; an odd row ends with a zero."""
    check_input(x)
    matrix, _ = whole_blocks(x.detach(), 1, 2)
    out = torch.empty(len(matrix), matrix.shape[1] // 2, dtype=torch.uint8, device=x.device)
    if torch.compiler.is_compiling():
        PairsKernel(x.dtype, str(x.device), False)(_pairs(matrix, False), out)
    else:
        torch.ops.fp8bench.unscaled_codes(matrix, out)
    return out.view(torch.float4_e2m1fn_x2)


def _scale_tensors(targets: list[_Tiled], sources: list[Tensor], draw: Draw | None, amaxes: Sequence[Tensor]) -> None:
    above = [tiled.above for tiled in targets if tiled.above is not None]
    keys = [tiled.key for tiled in targets if tiled.key is not None]
    if above and not amaxes:
        amaxes = [largest_magnitude(source) for source in sources]
    parts = [amax.view(-1) for amax in amaxes] if above else []
    # One launch writes the scales of both tensors and their seeds.
    if parts or draw is not None:
        last, new_last, steps = (None, None, ()) if draw is None else draw
        torch.ops.fp8bench.tensor_scales(parts, above, last, new_last, keys, steps)


def _seeds(draw: Draw | None, count: int) -> list[Tensor | None]:
    """Seeds without the fused kernel: advances the draw."""
    if draw is None:
        return [None] * count
    seeds = [draw.last + step for step in draw.steps]
    draw.after.copy_(seeds[-1])
    return [*seeds]


def _takes_kernel(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and 0 < x.numel() <= MOST_ELEMENTS


def _operator_arguments(fmt: Format, scaling: Scaling) -> tuple[str, int, int, str, str]:
    assert scaling.scale is not None
    return fmt.name, scaling.rows, scaling.columns, scaling.scale.name, scaling.rounding.value


class _Tiled(NamedTuple):
    """The arguments of a cast: the matrix filled to whole blocks, memory, the tensor's scale, the seed's key.

    Scales are written to their final place if they fill tiles.
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
        # Kernels see whole blocks; what is filled up is cut off when codes are taken.
        matrix, _ = whole_blocks(x.detach(), scaling.rows, scaling.columns)
        down, across = len(matrix), matrix.shape[1] // scaling.columns
        # Scales and NVFP4's tensor scale share one memory, which is what a product takes.
        size, in_byte = bytes_in_tiles(rows, across), 2 if fmt is E2M1 else 1
        memory = torch.empty(size + nvfp4 * FLOAT_BYTES, dtype=torch.uint8, device=x.device)
        above = memory[size:].view(torch.float32).view(()) if nvfp4 else None
        key = torch.empty((), dtype=torch.int32, device=x.device) if stochastic else None
        # Only whole tiles can be written directly; other scales are put into tiles afterwards.
        tiled = not rows % TILE_ROWS and not across % TILE_COLUMNS
        scales = memory[:size] if tiled else torch.empty(down * across, dtype=torch.uint8, device=x.device)
        codes = torch.empty(down, matrix.shape[1] // in_byte, dtype=torch.uint8, device=x.device)
        shape = rows, -(-x.shape[1] // in_byte)
        return cls(matrix, codes, scales, above, key, tiled, memory, shape, _DTYPES[fmt.name])

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.matrix, self.codes, self.scales, self.above, self.key

    def result(self) -> tuple[Tensor, Tensor]:
        codes, above = self.codes, self.above
        if not self.tiled:
            size = len(self.memory) - (FLOAT_BYTES if above is not None else 0)
            swizzled_into(self.memory[:size], self.scales.view(len(codes), -1)[: self.shape[0]])
        if codes.shape != self.shape:
            codes = codes[: self.shape[0], : self.shape[1]].contiguous()
        scale_bytes = self.memory if above is not None else self.memory.view(torch.float8_e8m0fnu)
        return codes.view(self.dtype), scale_bytes


def _plain(x: Tensor, fmt: Format, scaling: Scaling, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    stored = quantise(x, fmt, scaling, seed=seed, checked=False)
    scales = stored.scales
    assert scales is not None
    by_row = scales.repeat_interleave(scaling.rows, 0)[: len(x)]
    memory, codes = swizzle(by_row), stored.codes.view(_DTYPES[fmt.name])
    if stored.tensor_scale is None:
        return codes, memory.view(torch.float8_e8m0fnu)
    return codes, torch.cat((memory, stored.tensor_scale.reshape(1).view(torch.uint8)))


def _run_tiled_codes(
    x: Tensor,
    out: Tensor,
    scales: Tensor,
    above: Tensor | None,
    key: Tensor | None,
    tiled: bool,
    fmt: str,
    rows: int,
    columns: int,
    scale_format: str,
    rounding: str,
) -> Launched | None:
    kernel, places, _ = _prepare_call(x, out, scales, above, key, tiled, fmt, rows, columns, scale_format, rounding)
    return call(kernel, *places)


def _run_tiled_codes_both(
    x: Tensor,
    out: Tensor,
    scales: Tensor,
    above: Tensor | None,
    key: Tensor | None,
    y: Tensor,
    out_of_y: Tensor,
    scales_of_y: Tensor,
    above_y: Tensor | None,
    key_of_y: Tensor | None,
    tiled: bool,
    tiled_y: bool,
    fmt: str,
    rows: int,
    columns: int,
    scale_format: str,
    rounding: str,
) -> Launched | None:
    written = fmt, rows, columns, scale_format, rounding
    turned = _prepare_call(y, out_of_y, scales_of_y, above_y, key_of_y, tiled_y, *written)
    return _prepare_call(x, out, scales, above, key, tiled, *written).beside(turned)


def _prepare_call(
    x: Tensor,
    out: Tensor,
    scales: Tensor,
    above: Tensor | None,
    key: Tensor | None,
    tiled: bool,
    fmt: str,
    rows: int,
    columns: int,
    scale_format: str,
    rounding: str,
) -> Called:
    matrix, turned = laid(x)
    scaling = Scaling(rows, columns, FORMATS[scale_format], ScaleRounding(rounding))
    places = Places(scaling, tiled, turned)
    kernel = TiledCodesKernel(FORMATS[fmt], places, x.dtype, str(x.device), key is not None)
    views = places.matrix(matrix), places.codes(out, kernel.in_byte), places.scales(scales, len(out))
    return Called(kernel, (*views, *(tensor for tensor in (above, key) if tensor is not None)), turned)


def _run_unscaled_codes(x: Tensor, out: Tensor) -> None:
    if x.numel():
        matrix, turned = laid(x)
        call(PairsKernel(x.dtype, str(x.device), turned), _pairs(matrix, turned), out)


def _run_tensor_scales(
    amaxes: list[Tensor],
    above: list[Tensor],
    last: Tensor | None,
    new_last: Tensor | None,
    keys: list[Tensor],
    steps: list[int],
) -> None:
    tensors = [*amaxes, *above, *(tensor for tensor in (last, new_last) if tensor is not None), *keys]
    call(TensorScalesKernel(str(tensors[0].device), len(amaxes), len(above), tuple(steps)), *tensors)


_TILED = "Tensor x, Tensor(a!) out, Tensor(b!) scales, Tensor? above, Tensor? key"
_OF_Y = "Tensor y, Tensor(c!) out_of_y, Tensor(d!) scales_of_y, Tensor? above_y, Tensor? key_of_y"
_WRITTEN = "str fmt, int rows, int columns, str kept, str rounding"
_ABOVE = "Tensor[] amaxes, Tensor(a!)[] above, Tensor? last, Tensor(b!)? after, Tensor(c!)[] keys, int[] steps"
define_cast("tiled_codes", f"({_TILED}, bool tiled, {_WRITTEN}) -> ()", _run_tiled_codes)
define_cast(
    "tiled_codes_both", f"({_TILED}, {_OF_Y}, bool tiled, bool tiled_y, {_WRITTEN}) -> ()", _run_tiled_codes_both
)
operators.define("tensor_scales", f"({_ABOVE}) -> ()", _run_tensor_scales)
operators.define("unscaled_codes", "(Tensor x, Tensor(a!) out) -> ()", _run_unscaled_codes)
