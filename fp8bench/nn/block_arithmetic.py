"""Native products of recipes whose scales belong to blocks: FP8 in blocks of 128, MX and NVFP4."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from fp8bench.formats.codes import decode, unpack
from fp8bench.formats.grids import E2M1, E4M3, E8M0, Format
from fp8bench.formats.native_codes import codes, row_codes, row_codes_both, square_codes, transpose_codes
from fp8bench.formats.scale_layouts import TILE_ROWS, of_squares, squares, unswizzle
from fp8bench.formats.tiled_codes import FLOAT_BYTES, tiled_codes, tiled_codes_both, unscaled_codes
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.nn.rotations import rotation
from fp8bench.numerics.products import in_dtype
from fp8bench.protocols import Operand, Role

_ROWS = ScalingType.BlockWise1x128.value
_SQUARES = ScalingType.BlockWise128x128.value
_BLOCK = 128
_MX = 32
_NVFP4 = 16


class BlockArithmetic(RecipeArithmetic):
    """Codes along the contraction of each product, and scales laid out as its kernel wants them.

    An operand's scales are one tensor. Blocks of 128 have float32 scales, column-major, or turned for squares
    (scale_layouts.py). MX has swizzled bytes; so has NVFP4, with the tensor's own float32 scale in the last four.
    """

    # With parts of whole tiles, the scales of all rows are the scales of each part, one after the other.
    part_rows = TILE_ROWS

    @property
    def _looks_at_amax(self) -> bool:
        scaling = self.recipe.weight.scaling
        return scaling is not None and scaling.scale is E4M3

    def operand(self, tensor: Tensor, role: Role, repeat: bool) -> Operand:
        treatment = self.treatments[role]
        assert treatment.scaling is not None
        if treatment.scaling.scale is None:
            rounding = treatment.scaling.rounding
            if treatment.scaling.rows > 1:
                cast = square_codes(tensor, treatment.fmt, rounding)[0]
            else:
                cast = row_codes(tensor, treatment.fmt, rounding, _BLOCK)
            return Operand(*cast, role is Role.GRADIENT)
        return self._tile(tensor, role, repeat)

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        fmt = self.treatments[role].fmt
        return Operand(unscaled_codes(tensor) if fmt is E2M1 else codes(tensor, fmt), columns=tensor.shape[1])

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        if not self._rotates(role) or not self._in_tiles(role):
            return super().cast_transpose(source, role)
        rotated = rotation(source, self._signs)
        return self._tile(rotated.values, role, repeat=False, amaxes=rotated.amaxes)

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        treatment = self.treatments[role]
        # One launch where both casts share their kernel; else one after the other.
        if self._in_tiles(role) and self._can_cast_both_at_once(role):
            return self._tiled_both(tensor, role, amax)
        if treatment.scaling is None or treatment.scaling.scale is not None or not self._cast_alike(role):
            return super().cast_both(tensor, role, amax)
        if treatment.scaling.rows > 1:
            straight, turned = square_codes(tensor, treatment.fmt, treatment.scaling.rounding, both=True)
        else:
            straight, turned = row_codes_both(tensor, treatment.fmt, treatment.scaling.rounding, _BLOCK)
        return Operand(*straight, role is Role.GRADIENT), Operand(*turned, role is Role.GRADIENT)

    def _tile(self, tensor: Tensor, role: Role, repeat: bool, amaxes: Tensor | None = None) -> Operand:
        treatment = self.treatments[role]
        assert treatment.scaling is not None
        draw = self._draws[role].draw(tensor.device, 1, repeat) if role in self._draws else None
        codes_and_scale = tiled_codes(tensor, treatment.fmt, treatment.scaling, draw, amaxes)
        return Operand(*codes_and_scale, role is Role.GRADIENT, tensor.shape[1])

    def _tiled_both(self, tensor: Tensor, role: Role, amax: Tensor | None) -> tuple[Operand, Operand]:
        treatment = self.treatments[role]
        assert treatment.scaling is not None
        turned = tensor.t()
        amaxes = [] if amax is None else [amax]
        # A rotated transpose has a different largest magnitude than the matrix.
        if self._rotates(role):
            turned, *amaxes_found = rotation(turned, self._signs)
            amaxes = amaxes_found[::-1]
        draw = self._draws[role].draw(tensor.device, 2) if role in self._draws else None
        both = tiled_codes_both(tensor, turned, treatment.fmt, treatment.scaling, draw, amaxes)
        rows, columns = tensor.shape
        gradient = role is Role.GRADIENT
        return Operand(*both[0], gradient, columns), Operand(*both[1], gradient, rows)

    def _in_tiles(self, role: Role) -> bool:
        scaling = self.treatments[role].scaling
        return scaling is not None and scaling.scale is not None

    def _rotates(self, role: Role) -> bool:
        return role is not Role.WEIGHT and self.recipe.hadamard

    def _can_cast_both_at_once(self, role: Role) -> bool:
        """Whether casting both orientations together draws seeds in the same order as casting them one by one.

        The two casts of a gradient follow each other anyway; those of other operands do not.
        """
        high = role is not Role.WEIGHT and self.recipe.high_weight_gradient
        return not high and (role is Role.GRADIENT or not self.treatments[role].stochastic)

    def _cast_serves_both(self, role: Role) -> bool:
        # Two 4-bit codes share a byte, which no transposition takes apart.
        return self.treatments[role].fmt is not E2M1 and super()._cast_serves_both(role)

    def transpose(self, operand: Operand) -> Operand:
        assert operand.scale is not None
        across = -(-operand.data.shape[1] // _BLOCK)
        turned = squares(of_squares(operand.scale, across).t())
        return Operand(transpose_codes(operand.data), turned, operand.gradient)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        if a.data.dtype == b.data.dtype == self.carrier:
            return super().product(a, b, dtype)
        scales_a, kinds_a, swizzles = _scales_of(a)
        scales_b, kinds_b, _ = _scales_of(b)
        # Never fast accumulation: kernels with block scales refuse it, or add their parts in float32 anyway.
        product: Tensor = torch.ops.aten._scaled_mm_v2.default(
            a.data, b.data.t(), scales_a, kinds_a, swizzles, scales_b, kinds_b, swizzles, None, dtype, [], False
        )
        return in_dtype(product, dtype)

    def multiply_groups(self, a: Operand, b: Operand, ends: Tensor) -> Tensor:
        """MX only: the scales of each part are whole tiles, which follow those of the part before."""
        b_turned = b.data.transpose(-2, -1)
        if a.scale is None or b.scale is None:
            return F.grouped_mm(a.data, b_turned, offs=ends)
        scales = []
        for operand in (a, b):
            assert operand.scale is not None
            rows = len(operand.data)
            flat = operand.data.dim() == 2
            # A matrix of codes needs a matrix of scales; their order in memory does not change.
            scales.append(operand.scale.view(rows + -rows % TILE_ROWS, -1) if flat else operand.scale)
        return torch.ops.aten._scaled_grouped_mm.default(
            a.data, b_turned, *scales, ends, None, None, self.carrier, False
        )

    def restore(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        values = _elements(operand.data) if operand.scale is None else _values(operand.data, operand.scale)
        return values[:, : operand.columns].to(dtype)


class DeepGemmArithmetic(BlockArithmetic):
    """Products by DeepGEMM, on capability 9.0, of the same casts: rows of 1x128 times squares of 128x128, in bfloat16.

    Rows times rows, a weight gradient, are only added to a float32 sum there: to zeros.
    """

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        if a.scale is None or b.scale is None:
            return super().product(a, b, dtype)
        import deep_gemm

        shape = (len(a.data), len(b.data))
        device = a.data.device
        first = a.data, a.scale
        if _by_rows(b.data, b.scale):
            total = torch.zeros(shape, dtype=torch.float32, device=device)
            deep_gemm.fp8_gemm_nt(first, (b.data, b.scale), total, c=total, recipe=(1, 1, _BLOCK))
        else:
            across = -(-b.data.shape[1] // _BLOCK)
            total = torch.empty(shape, dtype=torch.bfloat16, device=device)
            second = b.data, of_squares(b.scale, across).contiguous()
            deep_gemm.fp8_gemm_nt(first, second, total, recipe=(1, _BLOCK, _BLOCK))
        return in_dtype(total, dtype)


def _scales_of(operand: Operand) -> tuple[list[Tensor], list[int], list[int]]:
    scale = operand.scale
    if scale is None:
        raise ValueError("codes with scales of blocks need their scales")
    # float32 scales are ordered by rows or squares, those of MX and NVFP4 by the tiles that units read.
    if scale.dtype == torch.float32:
        return [scale], [_ROWS if _by_rows(operand.data, scale) else _SQUARES], []
    tiles = SwizzleType.SWIZZLE_32_4_4.value
    if scale.dtype == torch.float8_e8m0fnu:
        return [scale], [ScalingType.BlockWise1x32.value], [tiles]
    of_blocks, of_tensor = _nvfp4_scales(scale)
    kinds = [ScalingType.BlockWise1x16.value, ScalingType.TensorWise.value]
    return [of_blocks.view(torch.float8_e4m3fn), of_tensor], kinds, [tiles, SwizzleType.NO_SWIZZLE.value]


def _nvfp4_scales(scale: Tensor) -> tuple[Tensor, Tensor]:
    return scale[:-FLOAT_BYTES], scale[-FLOAT_BYTES:].view(torch.float32)


def _by_rows(data: Tensor, scale: Tensor) -> bool:
    """Whether float32 scales are those of 1x128 blocks; squares have another shape wherever a product takes them."""
    return tuple(scale.shape) == (data.shape[0], -(-data.shape[1] // _BLOCK))


def _values(data: Tensor, scale: Tensor) -> Tensor:
    if scale.dtype == torch.float32:
        across = -(-data.shape[1] // _BLOCK)
        matrix = scale if _by_rows(data, scale) else of_squares(scale, across).repeat_interleave(_BLOCK, 0)
        return data.to(torch.float32) * _each(matrix, _BLOCK, data.shape)
    elements = _elements(data)
    if scale.dtype == torch.float8_e8m0fnu:
        matrix = _bytes(scale.view(torch.uint8), elements.shape, _MX, E8M0)
        block = _MX
    else:
        of_blocks, of_tensor = _nvfp4_scales(scale)
        matrix = _bytes(of_blocks, elements.shape, _NVFP4, E4M3) * of_tensor
        block = _NVFP4
    return elements * _each(matrix, block, elements.shape)


def _elements(data: Tensor) -> Tensor:
    packed = data.dtype == torch.float4_e2m1fn_x2
    return decode(unpack(data.view(torch.uint8), E2M1), E2M1, checked=False) if packed else data.to(torch.float32)


def _bytes(laid: Tensor, shape: torch.Size, block: int, fmt: Format) -> Tensor:
    return decode(unswizzle(laid, shape[0], -(-shape[1] // block)), fmt, checked=False)


def _each(scales: Tensor, block: int, shape: torch.Size) -> Tensor:
    return scales.repeat_interleave(block, 1)[: shape[0], : shape[1]]
