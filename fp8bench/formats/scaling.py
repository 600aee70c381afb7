"""Scalings: how a tensor is moved into a format's range and back.

Block scalings run along the last dimension, which is a product's contraction; a last block that is too short is
filled with zeros. Scales that no value can give (of zero tensors and of non-finite ones) never make NaN of numbers.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8bench.formats.grids import E2M1, E4M3, E5M2, E8M0_BIAS, E8M0_LARGEST_CODE, FP16, Format
from fp8bench.formats.quantise import round_to

MX_BLOCK = 32
NVFP4_BLOCK = 16
CODE_DTYPES: dict[str, torch.dtype] = {
    E4M3.name: torch.float8_e4m3fn,
    E5M2.name: torch.float8_e5m2,
    FP16.name: torch.float16,
}

# Bounds that keep a scale and its inverse normal float32 numbers.
_LARGEST_SCALE = 2.0**126
_SMALLEST_SCALE = 2.0**-126


class ScaleRounding(StrEnum):
    """How an MX block's scale becomes a power of two.

    FLOOR is the OCP specification's: values near the block's largest may saturate. RCEIL is what NVIDIA's training
    recipes use: rounded up, so that nothing saturates.
    """

    FLOOR = "floor"
    RCEIL = "rceil"


def per_tensor_scale(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Current scaling: the factor that takes the largest magnitude to the format's, and its inverse.

    Both are float32 tensors without dimensions, on the tensor's device: no value is read by the host. 1 where the
    tensor is empty, zero or not finite.
    """
    if x.numel() == 0:
        one = torch.ones((), dtype=torch.float32, device=x.device)
        return one, one
    # aminmax reads the tensor once and allocates nothing of its size; abs().amax() is 12 times slower on a CPU.
    low, high = torch.aminmax(x.detach())
    amax = torch.maximum(-low, high).to(torch.float32)
    scale = torch.where(amax.isfinite() & (amax > 0), fmt.largest / amax, 1.0).clamp(max=_LARGEST_SCALE)
    return scale, scale.reciprocal()


def per_tensor_values(x: Tensor, fmt: Format) -> Tensor:
    """`x` as the values that current scaling and `fmt` leave of it, float32."""
    scale, inverse = per_tensor_scale(x, fmt)
    return round_to(x.detach().to(torch.float32) * scale, fmt).mul_(inverse)


def per_tensor_codes(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """`x` as contiguous codes (float8, or scaled fp16), and the inverse scale that gives the values back."""
    scale, inverse = per_tensor_scale(x, fmt)
    scaled = (x.detach().to(torch.float32) * scale).clamp_(-fmt.largest, fmt.largest)
    return scaled.to(CODE_DTYPES[fmt.name]).contiguous(), inverse


def element_codes(x: Tensor, fmt: Format) -> Tensor:
    """`x` as contiguous float8 codes without a scale: what is too large becomes the largest value."""
    clamped = x.detach().to(torch.float32).clamp(-fmt.largest, fmt.largest)
    return clamped.to(CODE_DTYPES[fmt.name]).contiguous()


def mx_values(x: Tensor, fmt: Format, rounding: ScaleRounding = ScaleRounding.RCEIL) -> Tensor:
    """`x` (2-D) as the values that the MX format of `fmt` elements leaves of it: blocks of 32, E8M0 scales, float32.

    A NaN makes its whole block NaN.
    """
    blocks = _blocks(x, MX_BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True)
    code = _e8m0_code(amax, fmt, rounding)
    scale = torch.where(amax.isnan(), amax, _power_of_two(code))
    inverse = _power_of_two(E8M0_LARGEST_CODE - code)
    return _unblocked(round_to(blocks * inverse, fmt).mul_(scale), x)


def nvfp4_values(x: Tensor) -> Tensor:
    """`x` (2-D) as the values that NVFP4 leaves of it: E2M1 in blocks of 16, E4M3 block scales under one float32
    tensor scale, everything rounded to nearest even, float32.

    A NaN makes its whole block NaN. A block whose scale rounds to zero becomes zero.
    """
    blocks = _blocks(x, NVFP4_BLOCK)
    block_amax = blocks.abs().amax(-1, keepdim=True)
    tensor_scale = _nvfp4_tensor_scale(block_amax)
    scale = round_to(block_amax / E2M1.largest / tensor_scale, E4M3).mul_(tensor_scale)
    divisor = torch.where(scale == 0, 1.0, scale)
    return _unblocked(round_to(blocks / divisor, E2M1).mul_(scale), x)


def _nvfp4_tensor_scale(block_amax: Tensor) -> Tensor:
    """The scale that takes the tensor's largest magnitude to the largest block scale times the largest element."""
    if block_amax.numel() == 0:
        return torch.ones((), dtype=torch.float32, device=block_amax.device)
    scale = block_amax.amax() / (E4M3.largest * E2M1.largest)
    return torch.where(scale.isfinite(), scale, 1.0).clamp(min=_SMALLEST_SCALE)


def _e8m0_code(amax: Tensor, fmt: Format, rounding: ScaleRounding) -> Tensor:
    """The scale's code for blocks of that largest magnitude, by the bits: a logarithm would round.

    The quotient amax / largest lies above a power of two when amax has the greater mantissa.
    """
    bits = amax.view(torch.int32)
    largest = torch.tensor(fmt.largest, dtype=torch.float32).view(torch.int32).item()
    code = bits.bitwise_right_shift(23) - (int(largest) >> 23) + E8M0_BIAS
    if rounding is ScaleRounding.RCEIL:
        code += bits.bitwise_and(0x7FFFFF) > (int(largest) & 0x7FFFFF)
    return code.clamp_(0, E8M0_LARGEST_CODE)


def _power_of_two(code: Tensor) -> Tensor:
    """2^(code - 127) as float32; code 0 is a subnormal."""
    return code.bitwise_left_shift(23).clamp_(min=0x400000).view(torch.float32)


def _blocks(x: Tensor, size: int) -> Tensor:
    """(M, K) as float32 (M, blocks, size), the last block filled with zeros."""
    if x.dim() != 2:
        raise ValueError(f"block scaling wants two dimensions, not {x.dim()}")
    values = x.detach().to(torch.float32)
    missing = -x.shape[1] % size
    filled = pad(values, (0, missing)) if missing else values
    return filled.reshape(x.shape[0], filled.shape[1] // size, size)


def _unblocked(blocks: Tensor, like: Tensor) -> Tensor:
    """Blocks as (M, K) again, without the filling."""
    return blocks.reshape(blocks.shape[0], blocks.shape[1] * blocks.shape[2])[:, : like.shape[1]]
