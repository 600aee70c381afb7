"""Native products of recipes with block scales: FP8 in blocks of 128, MX and NVFP4."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from fp8bench.formats.codes import decode, unpack_codes
from fp8bench.formats.grids import E2M1, E4M3, E8M0, Format
from fp8bench.formats.native_codes import codes, row_codes, row_codes_both, square_codes, transpose_codes
from fp8bench.formats.recipes import count_blocks, round_up
from fp8bench.formats.scale_layouts import TILE_ROWS, read_square_scales, store_square_scales, unswizzle_scales
from fp8bench.formats.tiled_codes import FLOAT32_BYTES, tiled_codes, tiled_codes_both, unscaled_codes
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.nn.rotations import rotate_and_find_amaxes
from fp8bench.numerics.products import to_dtype
from fp8bench.protocols import Operand, Role

_ROW_BLOCK_SCALING = ScalingType.BlockWise1x128.value
_SQUARE_BLOCK_SCALING = ScalingType.BlockWise128x128.value
_FP8_BLOCK_SIZE = 128
_MX_BLOCK = 32
_NVFP4_BLOCK = 16


class BlockArithmetic(RecipeArithmetic):
    """Casts operands to codes along the contraction of each product, with block scales in the layout that the kernel
    requires.

    All scales of an operand are in one tensor. Blocks of 128 elements have float32 scales, stored column by column.
    Scales of 128x128 squares are transposed as well (scale_layouts.py). MX has bytes as scales, in swizzled order.
    NVFP4 has such bytes too, and the tensor's float32 scale in the last four bytes.
    """

    # In a grouped product, the rows of each group must fill whole tiles of scales. Then the scales of all groups simply
    # follow each other.
    part_rows = TILE_ROWS

    @property
    def _cast_reads_amax(self) -> bool:
        scaling = self.recipe.weight.scaling
        return scaling is not None and scaling.scale is E4M3

    def operand(self, tensor: Tensor, role: Role, repeat: bool) -> Operand:
        treatment = self.treatments[role]
        assert treatment.scaling is not None
        if treatment.scaling.scale is None:
            scale_rounding = treatment.scaling.rounding
            if treatment.scaling.rows > 1:
                cast = square_codes(tensor, treatment.fmt, scale_rounding)[0]
            else:
                cast = row_codes(tensor, treatment.fmt, scale_rounding, _FP8_BLOCK_SIZE)
            return Operand(*cast, role is Role.GRADIENT)
        return self._cast_to_tiles(tensor, role, repeat)

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        fmt = self.treatments[role].fmt
        return Operand(unscaled_codes(tensor) if fmt is E2M1 else codes(tensor, fmt), columns=tensor.shape[1])

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        if not self._is_rotated(role) or not self._is_tiled(role):
            return super().cast_transpose(source, role)
        rotated_tensor = rotate_and_find_amaxes(source, self._signs)
        return self._cast_to_tiles(rotated_tensor.values, role, repeat=False, amaxes=rotated_tensor.amaxes)

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        treatment = self.treatments[role]
        # Cast both orientations in one launch if they share a kernel, otherwise one after the other.
        if self._is_tiled(role) and self._can_cast_both_at_once(role):
            return self._cast_with_transpose_to_tiles(tensor, role, amax)
        if treatment.scaling is None or treatment.scaling.scale is not None or not self._has_equal_casts(role):
            return super().cast_both(tensor, role, amax)
        if treatment.scaling.rows > 1:
            straight, transposed_cast = square_codes(tensor, treatment.fmt, treatment.scaling.rounding, both=True)
        else:
            straight, transposed_cast = row_codes_both(
                tensor, treatment.fmt, treatment.scaling.rounding, _FP8_BLOCK_SIZE
            )
        return Operand(*straight, role is Role.GRADIENT), Operand(*transposed_cast, role is Role.GRADIENT)

    def _cast_to_tiles(self, tensor: Tensor, role: Role, repeat: bool, amaxes: Tensor | None = None) -> Operand:
        treatment = self.treatments[role]
        assert treatment.scaling is not None
        seeds = self._seeds[role].reserve_seeds(tensor.device, 1, repeat) if role in self._seeds else None
        codes_and_scale = tiled_codes(tensor, treatment.fmt, treatment.scaling, seeds, amaxes)
        return Operand(*codes_and_scale, role is Role.GRADIENT, tensor.shape[1])

    def _cast_with_transpose_to_tiles(self, tensor: Tensor, role: Role, amax: Tensor | None) -> tuple[Operand, Operand]:
        treatment = self.treatments[role]
        assert treatment.scaling is not None
        transposed_tensor = tensor.t()
        amaxes = [] if amax is None else [amax]
        # The transpose is rotated before its cast, so its largest magnitude is not that of `tensor`.
        if self._is_rotated(role):
            transposed_tensor, *amaxes_found = rotate_and_find_amaxes(transposed_tensor, self._signs)
            # First the largest magnitude of `tensor`, then that of its rotated transpose.
            amaxes = amaxes_found[::-1]
        seeds = self._seeds[role].reserve_seeds(tensor.device, 2) if role in self._seeds else None
        row_and_column_casts = tiled_codes_both(
            tensor, transposed_tensor, treatment.fmt, treatment.scaling, seeds, amaxes
        )
        rows, columns = tensor.shape
        gradient = role is Role.GRADIENT
        return Operand(*row_and_column_casts[0], gradient, columns), Operand(*row_and_column_casts[1], gradient, rows)

    def _is_tiled(self, role: Role) -> bool:
        scaling = self.treatments[role].scaling
        return scaling is not None and scaling.scale is not None

    def _is_rotated(self, role: Role) -> bool:
        return role is not Role.WEIGHT and self.recipe.hadamard

    def _can_cast_both_at_once(self, role: Role) -> bool:
        """Returns whether one call can cast both orientations with the same random numbers (if any) as two calls. It
        can for gradients, whose two casts always follow each other directly. Between the two casts of an input or a
        weight, further tensors may be cast.
        """
        keeps_operand_in_carrier = role is not Role.WEIGHT and self.recipe.high_weight_gradient
        return not keeps_operand_in_carrier and (role is Role.GRADIENT or not self.treatments[role].stochastic)

    def _can_share_cast(self, role: Role) -> bool:
        # Two 4-bit codes share a byte, so codes cannot be transposed.
        return self.treatments[role].fmt is not E2M1 and super()._can_share_cast(role)

    def transpose(self, operand: Operand) -> Operand:
        assert operand.scale is not None
        column_block_count = count_blocks(operand.data.shape[1], _FP8_BLOCK_SIZE)
        column_scales = store_square_scales(read_square_scales(operand.scale, column_block_count).t())
        return Operand(transpose_codes(operand.data), column_scales, operand.gradient)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        if a.data.dtype == b.data.dtype == self.carrier:
            return super().product(a, b, dtype)
        scales_a, kinds_a, swizzles = _unpack_scales(a)
        scales_b, kinds_b, _ = _unpack_scales(b)
        # Do not ask for fast accumulation: kernels with block scales refuse it, or add blocks in float32 anyway.
        product: Tensor = torch.ops.aten._scaled_mm_v2.default(
            a.data, b.data.t(), scales_a, kinds_a, swizzles, scales_b, kinds_b, swizzles, None, dtype, [], False
        )
        return to_dtype(product, dtype)

    def multiply_groups(self, a: Operand, b: Operand, ends: Tensor) -> Tensor:
        """Multiplies each group of rows of `a` by its matrix in `b`. Each of `ends` is the row at which a group ends.
        Operands are MX codes, or tensors in the carrier's dtype. The scales of each group fill whole tiles, directly
        after the scales of the previous group.
        """
        transposed_b_data = b.data.transpose(-2, -1)
        if a.scale is None or b.scale is None:
            return F.grouped_mm(a.data, transposed_b_data, offs=ends)
        scales = []
        for operand in (a, b):
            assert operand.scale is not None
            rows = len(operand.data)
            is_matrix = operand.data.dim() == 2
            # torch wants a matrix of scales for a matrix of codes. `view` does not change the order of the scales in
            # memory.
            scales.append(operand.scale.view(round_up(rows, TILE_ROWS), -1) if is_matrix else operand.scale)
        return torch.ops.aten._scaled_grouped_mm.default(
            a.data, transposed_b_data, *scales, ends, None, None, self.carrier, False
        )

    def restore(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        values = (
            _decode_codes(operand.data) if operand.scale is None else _decode_and_scale(operand.data, operand.scale)
        )
        return values[:, : operand.columns].to(dtype)  # 4-bit codes come in pairs


class DeepGemmArithmetic(BlockArithmetic):
    """Makes the same casts as BlockArithmetic, and multiplies them with DeepGEMM on compute capability 9.0. The first
    operand has scales of 1x128 blocks and the second of 128x128 squares. Results are bfloat16.

    In the weight gradient both operands have 1x128 blocks. For such products DeepGEMM can only add to a float32 sum,
    so the sum starts at zero.
    """

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        if a.scale is None or b.scale is None:
            return super().product(a, b, dtype)
        import deep_gemm

        shape = (len(a.data), len(b.data))
        device = a.data.device
        first_operand = a.data, a.scale
        # Only in a weight gradient both operands have 1x128 blocks. DeepGEMM then adds to a float32 sum.
        if _has_row_scales(b.data, b.scale):
            output = torch.zeros(shape, dtype=torch.float32, device=device)
            deep_gemm.fp8_gemm_nt(first_operand, (b.data, b.scale), output, c=output, recipe=(1, 1, _FP8_BLOCK_SIZE))
        else:
            column_block_count = count_blocks(b.data.shape[1], _FP8_BLOCK_SIZE)
            output = torch.empty(shape, dtype=torch.bfloat16, device=device)
            second_operand = b.data, read_square_scales(b.scale, column_block_count).contiguous()
            deep_gemm.fp8_gemm_nt(first_operand, second_operand, output, recipe=(1, _FP8_BLOCK_SIZE, _FP8_BLOCK_SIZE))
        return to_dtype(output, dtype)


def _unpack_scales(operand: Operand) -> tuple[list[Tensor], list[int], list[int]]:
    scale = operand.scale
    if scale is None:
        raise ValueError("an operand has codes but no block scales: cast it with this arithmetic")
    # float32 scales are stored by rows or squares, and those of MX and NVFP4 in the tiles that the tensor cores read.
    if scale.dtype == torch.float32:
        return [scale], [_ROW_BLOCK_SCALING if _has_row_scales(operand.data, scale) else _SQUARE_BLOCK_SCALING], []
    tiles = SwizzleType.SWIZZLE_32_4_4.value
    if scale.dtype == torch.float8_e8m0fnu:
        return [scale], [ScalingType.BlockWise1x32.value], [tiles]
    block_scales, tensor_scale = _split_nvfp4_scales(scale)
    kinds = [ScalingType.BlockWise1x16.value, ScalingType.TensorWise.value]
    return [block_scales.view(torch.float8_e4m3fn), tensor_scale], kinds, [tiles, SwizzleType.NO_SWIZZLE.value]


def _split_nvfp4_scales(scale: Tensor) -> tuple[Tensor, Tensor]:
    return scale[:-FLOAT32_BYTES], scale[-FLOAT32_BYTES:].view(torch.float32)


def _has_row_scales(data: Tensor, scale: Tensor) -> bool:
    """Returns whether float32 scales belong to 1x128 blocks. Otherwise they belong to 128x128 squares, and have
    another shape.
    """
    return tuple(scale.shape) == (data.shape[0], count_blocks(data.shape[1], _FP8_BLOCK_SIZE))


def _decode_and_scale(data: Tensor, scale: Tensor) -> Tensor:
    if scale.dtype == torch.float32:
        column_block_count = count_blocks(data.shape[1], _FP8_BLOCK_SIZE)
        matrix = (
            scale
            if _has_row_scales(data, scale)
            else read_square_scales(scale, column_block_count).repeat_interleave(_FP8_BLOCK_SIZE, 0)
        )
        return data.to(torch.float32) * _expand_block_scales(matrix, _FP8_BLOCK_SIZE, data.shape)
    elements = _decode_codes(data)
    if scale.dtype == torch.float8_e8m0fnu:
        matrix = _decode_block_scales(scale.view(torch.uint8), elements.shape, _MX_BLOCK, E8M0)
        block = _MX_BLOCK
    else:
        block_scales, tensor_scale = _split_nvfp4_scales(scale)
        matrix = _decode_block_scales(block_scales, elements.shape, _NVFP4_BLOCK, E4M3) * tensor_scale
        block = _NVFP4_BLOCK
    return elements * _expand_block_scales(matrix, block, elements.shape)


def _decode_codes(data: Tensor) -> Tensor:
    is_packed_fp4 = data.dtype == torch.float4_e2m1fn_x2
    return decode(unpack_codes(data.view(torch.uint8), E2M1), E2M1) if is_packed_fp4 else data.to(torch.float32)


def _decode_block_scales(swizzled: Tensor, shape: torch.Size, block: int, fmt: Format) -> Tensor:
    return decode(unswizzle_scales(swizzled, shape[0], count_blocks(shape[1], block)), fmt)


def _expand_block_scales(scales: Tensor, block: int, shape: torch.Size) -> Tensor:
    return scales.repeat_interleave(block, 1)[: shape[0], : shape[1]]
