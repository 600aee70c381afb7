"""Native casts to MX and NVFP4. They write codes along the contraction, and scales in the tiles that products read.

Products of compute capability 10.0 read scales in tiles of 128 x 4 (scale_layouts.py). If a matrix fills its tiles,
one kernel writes codes and scales in place. Otherwise scales are written row by row and copied into tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8bench.formats import operators
from fp8bench.formats.blocks import block_elements, mx_scale, nvfp4_tensor_scale
from fp8bench.formats.code_kernels import FUSED_SCALAR_OPTIONS, OPERAND_ORDER_CONFIG
from fp8bench.formats.codes import CODE_DTYPES, cast_elements, encode_values
from fp8bench.formats.compiling import ONE_LAUNCH_OPTIONS, Kernel, draw_example
from fp8bench.formats.grids import E2M1, E4M3, FORMATS, Format
from fp8bench.formats.matrix_codes import as_row_major, pad_to_complete_blocks
from fp8bench.formats.memory_layout import MAX_INDEXED_ELEMENTS
from fp8bench.formats.native_codes import Launch, PreparedCall, register_cast_operator, run_cast, run_kernel
from fp8bench.formats.quantise import Draw, check_input, compute_element_random_bits, compute_seed_key, round_values
from fp8bench.formats.recipes import ScaleRounding, Scaling, count_blocks
from fp8bench.formats.scale_layouts import TILE_COLUMNS, TILE_ROWS, count_tile_bytes, swizzle, swizzle_into
from fp8bench.formats.scaled import largest_magnitude, quantise

_QUARTER_ROWS = TILE_ROWS // TILE_COLUMNS
# The sizes of example matrices, in tiles or blocks. A transposed matrix has other sizes, because one kernel may handle
# both, and torch treats equal sizes as one size.
_EXAMPLE_DOWN, _EXAMPLE_ACROSS = 9, 10
_TURNED_DOWN, _TURNED_ACROSS = 11, 13
_SCALES_PER_TILE = TILE_ROWS * TILE_COLUMNS
# The last two dimensions of the views that `TileViews` makes: the rows and the columns of a block.
_BLOCK_DIMENSION_INDICES = (5, 6)


@dataclass(frozen=True)
class TileViews:
    """Makes views of a matrix, its codes and its scales. All views have the same order of dimensions.

    The order is (tiles down, quarters, blocks down, tiles across, blocks across, rows of a block, columns of a block).
    A quarter is 32 of the 128 rows of a tile. Without `is_tiled`, a block counts as a tile. If the matrix is `turned`,
    its transpose is row-major, and tiles across come first, so that neighbours in memory are read together.
    """

    scaling: Scaling
    is_tiled: bool
    turned: bool

    @property
    def smallest_shape(self) -> tuple[int, int]:
        return (TILE_ROWS, TILE_COLUMNS * self.scaling.columns) if self.is_tiled else self.block

    @property
    def block(self) -> tuple[int, int]:
        return self.scaling.rows, self.scaling.columns

    @property
    def free(self) -> tuple[int, int]:
        return (0, 2) if self.turned else (0, 3)

    def matrix(self, memory: Tensor) -> Tensor:
        """Views an operand as tiles and blocks. It is row-major in memory, or its transpose is if `turned`."""
        return self._view_blocks(memory.t() if self.turned else memory, self.scaling.columns)

    def codes(self, memory: Tensor, codes_per_byte: int) -> Tensor:
        return self._view_blocks(memory, self.scaling.columns // codes_per_byte)

    @property
    def writes_by_index(self) -> bool:
        """Whether a kernel writes scales by an index in memory, and not through a view. Square blocks need it, because
        each of their rows gets a copy of the scale.
        """
        return self.scaling.rows > 1

    def scales(self, memory: Tensor, row_count: int) -> Tensor:
        """Returns a view of `memory` for scales, in tiles or row by row. `row_count` is the number of rows of the
        codes. Returns `memory` unchanged if kernels write scales by index (`writes_by_index`).
        """
        if self.writes_by_index:
            return memory
        if not self.is_tiled:
            return self._view_blocks(memory.view(row_count, -1), 1)
        scale_tiles = memory.view(row_count // TILE_ROWS, -1, _QUARTER_ROWS, 1, TILE_COLUMNS, TILE_COLUMNS, 1)
        return self.permute_to_view(scale_tiles.permute(0, 4, 2, 3, 1, 5, 6))

    def scale_indices(self, parts: Tensor) -> Tensor:
        """Returns the int32 index in memory of the scale of each row of a block. `parts`, a view of the matrix or of
        its codes, gives the sizes.
        """
        # Each of these tensors has the indices along one dimension, and is broadcast along the others.
        order = (2, 3, 4, 5, 0, 1, 6) if self.turned else (0, 1, 2, 5, 3, 4, 6)
        down, quarter, line, row, across, block, _ = (
            torch.arange(parts.shape[place], dtype=torch.int32, device=parts.device).view(
                *(-1 if number == place else 1 for number in range(parts.dim()))
            )
            for place in order
        )
        tiles_across, tile_row = parts.shape[order[4]], line * self.scaling.rows + row
        # Without tiles, scales are row-major. With tiles, 16 consecutive scales belong to four rows, four to each.
        # These rows are in different quarters of the tile.
        if not self.is_tiled:
            return (down * self.scaling.rows + row) * tiles_across + across
        tile_index = down * tiles_across + across
        return tile_index * _SCALES_PER_TILE + tile_row * TILE_COLUMNS**2 + quarter * TILE_COLUMNS + block

    def _view_blocks(self, matrix: Tensor, length: int) -> Tensor:
        """Returns a matrix as a view of tiles and blocks. Each block has `length` columns."""
        rows = self.scaling.rows
        quarters, lines, columns = (TILE_COLUMNS, _QUARTER_ROWS // rows, TILE_COLUMNS) if self.is_tiled else (1, 1, 1)
        horizontal_tile_count = matrix.shape[1] // (columns * length)
        return self.permute_to_view(matrix.view(-1, quarters, lines, rows, horizontal_tile_count, columns, length))

    def permute_to_view(self, parts: Tensor) -> Tensor:
        """Permutes dimensions from (tiles down, quarters, blocks down, rows, tiles across, blocks across, columns) to
        the order of this class's views.
        """
        return parts.permute((4, 5, 0, 1, 2, 3, 6) if self.turned else (0, 1, 2, 4, 5, 3, 6))


@dataclass(frozen=True)
class TiledCodesKernel(Kernel):
    """Writes the codes of blocks, and the bytes of their scales. Each row of a block gets a scale.

    The arguments are the operand, memory for codes and memory for scales, all in the views that TileViews makes. For
    NVFP4 the tensor scale follows, and for `stochastic` rounding the key of the seed. Two E2M1 codes share a byte.
    """

    fmt: Format
    places: TileViews
    source: torch.dtype
    device: str
    stochastic: bool = False

    @property
    def codes_per_byte(self) -> int:
        return 2 if self.fmt is E2M1 else 1

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        source, out, scales, *optional_tensors = tensors
        scaling = self.places.scaling
        assert scaling.scale is not None
        random_lanes = self._draw_random_bits(source, optional_tensors.pop()) if self.stochastic else None
        # torch's cast rounds to nearest even, so it can be used here
        if self.codes_per_byte == 1 and not self.stochastic:
            amax = source.abs().amax(_BLOCK_DIMENSION_INDICES, keepdim=True).to(torch.float32)
            block_scales, inverse = mx_scale(amax, self.fmt, scaling.rounding)
            codes = [cast_elements(torch.where(block_scales.isnan(), 0.0, source), self.fmt, inverse).view(torch.uint8)]
        else:
            value_lanes = [lane.to(torch.float32) for lane in self._split_lanes(source)]
            tensor_scale = optional_tensors[0] if optional_tensors else None
            rounded_lanes, block_scales, _ = block_elements(
                value_lanes, self.fmt, scaling, tensor_scale, random_lanes, _BLOCK_DIMENSION_INDICES
            )
            codes = [
                encode_values(torch.where(block_scales.isnan(), 0.0, tensor), self.fmt) for tensor in rounded_lanes
            ]
        out.copy_(codes[0] if len(codes) == 1 else codes[0].bitwise_or(codes[1].bitwise_left_shift(4)))
        block_scales = encode_values(block_scales, scaling.scale)
        # A block in one row has one scale, so copy the scales in order. A square has a copy of its scale for each row.
        if not self.places.writes_by_index:
            scales.copy_(block_scales)
        # Every element of a block's row writes the row's scale. To write it only once would need a second kernel.
        else:
            scales.index_put_((self.places.scale_indices(out).expand(out.shape),), block_scales.expand(out.shape))
        return ()

    def _split_lanes(self, source: Tensor) -> list[Tensor]:
        return [source[..., first :: self.codes_per_byte] for first in range(self.codes_per_byte)]

    def _draw_random_bits(self, source: Tensor, key: Tensor) -> list[Tensor]:
        order = (2, 3, 4, 0, 1) if self.places.turned else (0, 1, 2, 3, 4)
        down_sizes = [source.shape[place] for place in order[:3]]
        across_sizes = [source.shape[place] for place in order[3:]]
        # Random numbers are counted along the rows of the operand, whatever the operand's order in memory is.
        rows, columns = prod(down_sizes) * source.shape[5], prod(across_sizes) * source.shape[6]
        row_index, column_index = (
            torch.arange(number, dtype=torch.int32, device=key.device) for number in (rows, columns)
        )
        indices = row_index.view(*down_sizes, source.shape[5], 1, 1, 1) * columns + column_index.view(*across_sizes, -1)
        return [
            compute_element_random_bits(lane, key) for lane in self._split_lanes(self.places.permute_to_view(indices))
        ]

    def examples(self) -> list[Tensor]:
        min_rows, min_columns = self.places.smallest_shape
        down, across = (_TURNED_DOWN, _TURNED_ACROSS) if self.places.turned else (_EXAMPLE_DOWN, _EXAMPLE_ACROSS)
        rows, columns = down * min_rows, across * min_columns
        shape = (columns, rows) if self.places.turned else (rows, columns)
        x = draw_example(shape, self.source, self.device)
        out = torch.empty(rows, columns // self.codes_per_byte, dtype=torch.uint8, device=self.device)
        scales = torch.empty(rows * (columns // self.places.scaling.columns), dtype=torch.uint8, device=self.device)
        tensor_scale = [torch.full((), 0.75, device=self.device)] if self.places.scaling.scale is E4M3 else []
        key = [torch.zeros((), dtype=torch.int32, device=self.device)] if self.stochastic else []
        example_views = (
            self.places.matrix(x),
            self.places.codes(out, self.codes_per_byte),
            self.places.scales(scales, rows),
        )
        return [*example_views, *tensor_scale, *key]

    def free(self) -> list[Sequence[int]]:
        scalar_argument_count = (self.places.scaling.scale is E4M3) + self.stochastic
        scales: Sequence[int] = (0,) if self.places.writes_by_index else self.places.free
        return [self.places.free, self.places.free, scales, *[()] * scalar_argument_count]

    def options(self) -> Mapping[str, object]:
        return OPERAND_ORDER_CONFIG


@dataclass(frozen=True)
class CodePairsKernel(Kernel):
    """Writes E2M1 codes without a scale, two in a byte. The arguments are a matrix viewed as (rows, pairs, 2) and
    memory for (rows, pairs) bytes. If `turned`, the transpose of the matrix is row-major.
    """

    source: torch.dtype
    device: str
    turned: bool

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        pairs, out = tensors
        # E2M1 has no NaN. So NaN becomes the largest value, as in a GPU's saturating conversions.
        values = pairs.to(torch.float32).nan_to_num(E2M1.largest, torch.inf, -torch.inf)
        first_codes, second_codes = (encode_values(round_values(values[..., number], E2M1), E2M1) for number in (0, 1))
        out.copy_(first_codes.bitwise_or(second_codes.bitwise_left_shift(4)))
        return ()

    def examples(self) -> list[Tensor]:
        shape = (2 * _TURNED_ACROSS, TILE_ROWS) if self.turned else (TILE_ROWS, 2 * _EXAMPLE_ACROSS)
        x = draw_example(shape, self.source, self.device)
        pairs = _view_element_pairs(x, self.turned)
        return [pairs, torch.empty(pairs.shape[:2], dtype=torch.uint8, device=self.device)]

    def free(self) -> list[Sequence[int]]:
        return [(0, 1), (0, 1)]


def _view_element_pairs(matrix: Tensor, turned: bool) -> Tensor:
    rows, columns = matrix.shape
    return matrix.view(rows // 2, 2, columns).permute(2, 0, 1) if turned else matrix.view(rows, columns // 2, 2)


@dataclass(frozen=True)
class TensorScalesKernel(Kernel):
    """Computes NVFP4's tensor scales, and the keys of seeds.

    The arguments begin with partial largest magnitudes, one argument for each of `tensors` tensors, and memory for
    `copies` scales. If there is only one tensor, all copies get its scale. With `steps` (quantise.Draw), these follow:
    the last seed, memory for the new seed, and memory for each key.
    """

    device: str
    tensors: int
    copies: int
    steps: tuple[int, ...] = ()

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        amaxes, outputs = tensors[: self.tensors], tensors[self.tensors : self.tensors + self.copies]
        for number, out in enumerate(outputs):
            out.copy_(nvfp4_tensor_scale(amaxes[number % self.tensors].amax()))
        if self.steps:
            last, new_last, *keys = tensors[self.tensors + self.copies :]
            # The new seed is computed as a sum, because a sum can share a launch with the other reductions.
            first = torch.arange(2, device=last.device) == 0
            new_last.copy_(torch.where(first, last + self.steps[-1], 0).sum(0, keepdim=True))
            for key, step in zip(keys, self.steps, strict=True):
                key.copy_(compute_seed_key(last + step))
        return ()

    def examples(self) -> list[Tensor]:
        amaxes = [torch.ones(number, device=self.device) for number in (_EXAMPLE_DOWN, _EXAMPLE_ACROSS)[: self.tensors]]
        seeds = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(2 * bool(self.steps))]
        keys = [torch.zeros((), dtype=torch.int32, device=self.device) for _ in self.steps]
        return [*amaxes, *(torch.ones((), device=self.device) for _ in range(self.copies)), *seeds, *keys]

    def free(self) -> list[Sequence[int]]:
        scalar_argument_count = self.copies + (2 + len(self.steps) if self.steps else 0)
        return [*[(0,)] * self.tensors, *[()] * scalar_argument_count]

    def options(self) -> Mapping[str, object]:
        return {**OPERAND_ORDER_CONFIG, **FUSED_SCALAR_OPTIONS, **ONE_LAUNCH_OPTIONS, "unroll_reductions_threshold": 1}


FLOAT32_BYTES = 4
_ALL_CODE_DTYPES = {**CODE_DTYPES, E2M1.name: torch.float4_e2m1fn_x2}


def tiled_codes(
    x: Tensor, fmt: Format, scaling: Scaling, draw: Draw | None = None, amaxes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the codes of a matrix, and its scales in tiles (scale_layouts.py). Two e2m1 codes share a byte.

    Every row has separate scales. NVFP4's scales of squares are repeated for each row, because no product accepts
    squares. MX scales are float8_e8m0fnu. NVFP4's scales are bytes, and the last four bytes are the tensor scale in
    float32. The tensor scale is computed from `amaxes`, the largest magnitudes of the matrix's parts, or else from the
    matrix. With a `draw`, which has one seed, rounding is stochastic.
    """
    check_input(x)
    if not _can_use_kernel(x):
        return _cast_by_operations(x, fmt, scaling, *_draw_seeds(draw, 1))
    tiled_cast = _TiledCast.of(x, fmt, scaling, draw is not None)
    _write_scales_and_keys([tiled_cast], x, draw, () if amaxes is None else (amaxes,))
    run_cast(
        "tiled_codes", None, tiled_cast.arguments, (tiled_cast.is_tiled, *_operator_arguments(fmt, scaling)), tuple
    )
    return tiled_cast.result()


def tiled_codes_both(
    x: Tensor, turned: Tensor, fmt: Format, scaling: Scaling, draw: Draw | None = None, amaxes: Sequence[Tensor] = ()
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns codes and scales of a matrix, and those of `turned`: its transpose, or the transpose after a Hadamard
    rotation. With two `amaxes`, the first is for the matrix and the second for the transpose. Otherwise both use the
    largest magnitude of the matrix. With a `draw`, which has two seeds, rounding is stochastic.
    """
    check_input(x)
    if not (_can_use_kernel(x) and _can_use_kernel(turned)):
        first_seed, second_seed = _draw_seeds(draw, 2)
        return _cast_by_operations(x, fmt, scaling, first_seed), _cast_by_operations(turned, fmt, scaling, second_seed)
    straight_cast, transpose = (_TiledCast.of(tensor, fmt, scaling, draw is not None) for tensor in (x, turned))
    _write_scales_and_keys([straight_cast, transpose], x, draw, amaxes)
    non_tensor_arguments = (straight_cast.is_tiled, transpose.is_tiled, *_operator_arguments(fmt, scaling))
    run_cast("tiled_codes_both", None, (*straight_cast.arguments, *transpose.arguments), non_tensor_arguments, tuple)
    return straight_cast.result(), transpose.result()


def unscaled_codes(x: Tensor) -> Tensor:
    """Returns the e2m1 codes of a matrix that is rounded without a scale. Two codes share a byte. A row with an odd
    number of elements is extended by a zero.
    """
    check_input(x)
    matrix, _ = pad_to_complete_blocks(x.detach(), 1, 2)
    out = torch.empty(len(matrix), matrix.shape[1] // 2, dtype=torch.uint8, device=x.device)
    if torch.compiler.is_compiling():
        CodePairsKernel(x.dtype, str(x.device), False)(_view_element_pairs(matrix, False), out)
    else:
        torch.ops.fp8bench.unscaled_codes(matrix, out)
    return out.view(torch.float4_e2m1fn_x2)


def _write_scales_and_keys(targets: list[_TiledCast], x: Tensor, draw: Draw | None, amaxes: Sequence[Tensor]) -> None:
    tensor_scales = [tiled_cast.tensor_scale for tiled_cast in targets if tiled_cast.tensor_scale is not None]
    keys = [tiled_cast.key for tiled_cast in targets if tiled_cast.key is not None]
    if tensor_scales and not amaxes:
        amaxes = [largest_magnitude(x)]
    parts = [amax.view(-1) for amax in amaxes] if tensor_scales else []
    # One launch writes everything: the scales of one or two tensors, and the keys of their seeds.
    if parts or draw is not None:
        last, new_last, steps = (None, None, ()) if draw is None else draw
        torch.ops.fp8bench.tensor_scales(parts, tensor_scales, last, new_last, keys, steps)


def _draw_seeds(draw: Draw | None, count: int) -> list[Tensor | None]:
    """Returns `count` seeds for casts that run without the fused kernel. Writes the last of them to `draw.after`."""
    if draw is None:
        return [None] * count
    seeds = [draw.last + step for step in draw.steps]
    draw.after.copy_(seeds[-1])
    return [*seeds]


def _can_use_kernel(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and 0 < x.numel() <= MAX_INDEXED_ELEMENTS


def _operator_arguments(fmt: Format, scaling: Scaling) -> tuple[str, int, int, str, str]:
    assert scaling.scale is not None
    return fmt.name, scaling.rows, scaling.columns, scaling.scale.name, scaling.rounding.value


class _TiledCast(NamedTuple):
    """The arguments of a cast. `matrix` is extended to complete blocks. `key` is computed from the seed of stochastic
    rounding. If scales fill complete tiles (`is_tiled`), the cast writes them to `memory`; otherwise `result` does.
    """

    matrix: Tensor
    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    key: Tensor | None
    is_tiled: bool
    memory: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, fmt: Format, scaling: Scaling, stochastic: bool) -> _TiledCast:
        is_nvfp4, rows = scaling.scale is E4M3, len(x)
        # Kernels see only complete blocks. `result` cuts off the elements that complete them.
        matrix, _ = pad_to_complete_blocks(x.detach(), scaling.rows, scaling.columns)
        down, across = len(matrix), matrix.shape[1] // scaling.columns
        # Scales and NVFP4's tensor scale are in the same memory, because products expect that.
        tile_bytes, codes_per_byte = count_tile_bytes(rows, across), 2 if fmt is E2M1 else 1
        memory = torch.empty(tile_bytes + is_nvfp4 * FLOAT32_BYTES, dtype=torch.uint8, device=x.device)
        tensor_scale = memory[tile_bytes:].view(torch.float32).view(()) if is_nvfp4 else None
        key = torch.empty((), dtype=torch.int32, device=x.device) if stochastic else None
        # Only complete tiles are written directly. Other scales are written row by row, then copied into tiles.
        fills_tiles = not rows % TILE_ROWS and not across % TILE_COLUMNS
        scales = memory[:tile_bytes] if fills_tiles else torch.empty(down * across, dtype=torch.uint8, device=x.device)
        codes = torch.empty(down, matrix.shape[1] // codes_per_byte, dtype=torch.uint8, device=x.device)
        shape = rows, count_blocks(x.shape[1], codes_per_byte)
        return cls(matrix, codes, scales, tensor_scale, key, fills_tiles, memory, shape, _ALL_CODE_DTYPES[fmt.name])

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.matrix, self.codes, self.scales, self.tensor_scale, self.key

    def result(self) -> tuple[Tensor, Tensor]:
        codes, tensor_scale = self.codes, self.tensor_scale
        if not self.is_tiled:
            size = len(self.memory) - (FLOAT32_BYTES if tensor_scale is not None else 0)
            swizzle_into(self.memory[:size], self.scales.view(len(codes), -1)[: self.shape[0]])
        if codes.shape != self.shape:
            codes = codes[: self.shape[0], : self.shape[1]].contiguous()
        scale_bytes = self.memory if tensor_scale is not None else self.memory.view(torch.float8_e8m0fnu)
        return codes.view(self.dtype), scale_bytes


def _cast_by_operations(x: Tensor, fmt: Format, scaling: Scaling, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    scaled_tensor = quantise(x, fmt, scaling, seed=seed)
    scales = scaled_tensor.scales
    assert scales is not None
    row_scales = scales.repeat_interleave(scaling.rows, 0)[: len(x)]
    scale_memory, codes = swizzle(row_scales), scaled_tensor.codes.view(_ALL_CODE_DTYPES[fmt.name])
    if scaled_tensor.tensor_scale is None:
        return codes, scale_memory.view(torch.float8_e8m0fnu)
    return codes, torch.cat((scale_memory, scaled_tensor.tensor_scale.reshape(1).view(torch.uint8)))


def _run_tiled_codes(*arguments: Any) -> Launch | None:
    return _prepare_tiled_cast(*arguments).run()


def _run_tiled_codes_both(*arguments: Any) -> Launch | None:
    # Five arguments for each of two matrices, then for each whether its scales are tiled, then the recipe.
    tensors, second_tensors, (first_tiled, second_tiled, *recipe) = arguments[:5], arguments[5:10], arguments[10:]
    first_arguments, second_arguments = [*tensors, first_tiled, *recipe], [*second_tensors, second_tiled, *recipe]
    return _prepare_tiled_cast(*first_arguments).run_together_with(_prepare_tiled_cast(*second_arguments))


def _prepare_tiled_cast(
    x: Tensor,
    out: Tensor,
    scales: Tensor,
    tensor_scale: Tensor | None,
    key: Tensor | None,
    is_tiled: bool,
    fmt: str,
    rows: int,
    columns: int,
    scale_format: str,
    rounding: str,
) -> PreparedCall:
    matrix, is_transposed = as_row_major(x)
    places = TileViews(Scaling(rows, columns, FORMATS[scale_format], ScaleRounding(rounding)), is_tiled, is_transposed)
    kernel = TiledCodesKernel(FORMATS[fmt], places, x.dtype, str(x.device), key is not None)
    kernel_views = places.matrix(matrix), places.codes(out, kernel.codes_per_byte), places.scales(scales, len(out))
    return PreparedCall(
        kernel, (*kernel_views, *(tensor for tensor in (tensor_scale, key) if tensor is not None)), is_transposed
    )


def _run_unscaled_codes(x: Tensor, out: Tensor) -> None:
    if x.numel():
        matrix, is_turned = as_row_major(x)
        run_kernel(CodePairsKernel(x.dtype, str(x.device), is_turned), _view_element_pairs(matrix, is_turned), out)


def _run_tensor_scales(
    amaxes: list[Tensor],
    tensor_scales: list[Tensor],
    last: Tensor | None,
    new_last: Tensor | None,
    keys: list[Tensor],
    steps: list[int],
) -> None:
    tensors = [*amaxes, *tensor_scales, *(tensor for tensor in (last, new_last) if tensor is not None), *keys]
    run_kernel(TensorScalesKernel(str(tensors[0].device), len(amaxes), len(tensor_scales), tuple(steps)), *tensors)


_CAST_SCHEMA = "Tensor x, Tensor(a!) out, Tensor(b!) scales, Tensor? tensor_scale, Tensor? key"
_TRANSPOSE_SCHEMA = "Tensor y, Tensor(c!) out_of_y, Tensor(d!) scales_of_y, Tensor? tensor_scale_of_y, Tensor? key_of_y"
_RECIPE_SCHEMA = "str fmt, int rows, int columns, str scale_format, str rounding"
_SCALES_SCHEMA = (
    "Tensor[] amaxes, Tensor(a!)[] tensor_scales, Tensor? last, Tensor(b!)? new_last, Tensor(c!)[] keys, int[] steps"
)
register_cast_operator("tiled_codes", f"({_CAST_SCHEMA}, bool tiled, {_RECIPE_SCHEMA}) -> ()", _run_tiled_codes)
register_cast_operator(
    "tiled_codes_both",
    f"({_CAST_SCHEMA}, {_TRANSPOSE_SCHEMA}, bool tiled, bool tiled_y, {_RECIPE_SCHEMA}) -> ()",
    _run_tiled_codes_both,
)
operators.define_operator("tensor_scales", f"({_SCALES_SCHEMA}) -> ()", _run_tensor_scales)
operators.define_operator("unscaled_codes", "(Tensor x, Tensor(a!) out) -> ()", _run_unscaled_codes)
