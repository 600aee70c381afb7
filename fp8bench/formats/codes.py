"""Encodes and decodes values of a format exactly, with plain torch operations on any device.

A code has the bits of the format. From the lowest bit on, these are mantissa, exponent and sign. A format of up to
eight bits has one code in each byte of a uint8 tensor. Codes of six bits leave two bits of the byte unused. Codes of
bf16 and fp16 are int16. The nineteen bits of tf32 are in an int32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from fp8bench.formats.grids import BF16, E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FP16, TF32, Format
from fp8bench.formats.quantise import check_input

_HALF_DTYPES = {BF16: torch.bfloat16, FP16: torch.float16}
_BYTE_DTYPES = {E4M3: torch.float8_e4m3fn, E4M3FNUZ: torch.float8_e4m3fnuz, E5M2FNUZ: torch.float8_e5m2fnuz}
_FLOAT32_MANTISSA_BITS = 23
_TF32_DROPPED_BITS = _FLOAT32_MANTISSA_BITS - TF32.mantissa_bits
_BITS_PER_BYTE = 8
# A CPU encodes this many elements at a time, so that intermediate results stay in its cache.
_PIECE_ELEMENTS = 1 << 16


def code_dtype(fmt: Format) -> torch.dtype:
    if fmt.bits <= _BITS_PER_BYTE:
        return torch.uint8
    return torch.int16 if fmt in _HALF_DTYPES else torch.int32


def encode(values: Tensor, fmt: Format) -> Tensor:
    """Returns the codes of `values`, which must be on the format's grid. Other values get arbitrary codes.

    fnuz formats have a single zero, which zeros of both signs become. All NaNs get the same code.
    """
    check_input(values)
    codes = torch.empty(values.shape, dtype=code_dtype(fmt), device=values.device)
    for part, target_part in _split_into_pieces(values.detach(), codes):
        target_part.copy_(encode_values(part, fmt))
    return codes


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Returns the float32 values of codes."""
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for part, target_part in _split_into_pieces(codes, values):
        target_part.copy_(_decode_codes(part, fmt))
    return values


def pack_codes(codes: Tensor, fmt: Format) -> Tensor:
    """Packs two e2m1 codes into a byte along the last dimension. Returns codes of other formats unchanged.

    The first of two codes is in the lower half of the byte, as in torch's float4_e2m1fn_x2. The upper half of the
    last byte is zero if the number of codes is odd.
    """
    if fmt is not E2M1:
        return codes
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | codes[..., 1::2].bitwise_left_shift(4)


def unpack_codes(packed: Tensor, fmt: Format, columns: int | None = None) -> Tensor:
    """Returns packed codes as one code in each byte. A row gets `columns` codes, by default two for each of its packed
    bytes. If the number of columns is odd, the second half of the last packed byte is unused.
    """
    if fmt is not E2M1:
        return packed
    codes = torch.stack((packed.bitwise_and(0xF), packed.bitwise_right_shift(4)), dim=-1)
    return codes.flatten(-2)[..., :columns]


@lru_cache(maxsize=64)
def _make_decoding_table(fmt: Format, device: torch.device) -> Tensor:
    """Returns the float32 value of each of the 256 possible bytes. Bytes that the format does not use become NaN."""
    codes = range(1 << fmt.bits)
    values = [_decode_single_code(code, fmt) for code in codes] + [float("nan")] * ((1 << _BITS_PER_BYTE) - len(codes))
    return torch.tensor(values, dtype=torch.float32, device=device)


def _decode_single_code(code: int, fmt: Format) -> float:
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    exponent_field = (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    is_negative = fmt.signed and bool(code >> (fmt.bits - 1))
    # e8m0 is the only format without zeros, and it has no subnormals either.
    if exponent_field or not fmt.zeros:
        magnitude = 2.0 ** (exponent_field - fmt.bias) * (1 + mantissa / (1 << fmt.mantissa_bits))
    else:
        magnitude = mantissa * fmt.smallest_subnormal
    # A code above the largest value means infinity if its mantissa is 0 and the format has infinities. Otherwise it
    # means NaN.
    if magnitude > fmt.largest:
        magnitude = float("inf") if fmt.has_infinity and not mantissa else float("nan")
    if is_negative and not magnitude and not fmt.signed_zero:
        return float("nan")
    return -magnitude if is_negative else magnitude


def encode_values(values: Tensor, fmt: Format) -> Tensor:
    """Returns the codes of `values` as `encode` does, but without dividing a long tensor into pieces. The result does
    not depend on how torch's casts overflow.
    """
    values = values.to(torch.float32)
    if fmt.has_nan:  # make all NaNs equal, because casts of NaN differ between devices and between tensor lengths
        values = values.nan_to_num(torch.nan, torch.inf, -torch.inf)
    if fmt is BF16:  # torch's cast to bf16 turns equal NaNs into different ones
        return values.view(torch.int32).bitwise_right_shift(16).to(torch.int16)
    if fmt is FP16:
        return values.to(torch.float16).view(torch.int16)
    if fmt in _BYTE_DTYPES:
        return values.to(_BYTE_DTYPES[fmt]).view(torch.uint8)
    if fmt is E5M2:  # e5m2 is the upper half of fp16, whose cast keeps infinities on every device
        return values.to(torch.float16).view(torch.int16).bitwise_right_shift(8).to(torch.uint8)
    if fmt is E8M0:
        return values.view(torch.int32).bitwise_right_shift(_FLOAT32_MANTISSA_BITS).to(torch.uint8)
    if fmt is TF32:
        return values.view(torch.int32).bitwise_right_shift(_TF32_DROPPED_BITS).bitwise_and((1 << TF32.bits) - 1)
    # Multiplied by a power of two, every value of a small format is a value of e4m3fn. The power of two makes the
    # smallest normal numbers of the formats equal.
    e4m3_codes = (values * 2.0 ** (E4M3.min_exponent - fmt.min_exponent)).to(torch.float8_e4m3fn).view(torch.uint8)
    magnitude_codes = e4m3_codes.bitwise_and(0x7F).bitwise_right_shift(E4M3.mantissa_bits - fmt.mantissa_bits)
    return magnitude_codes | e4m3_codes.bitwise_right_shift(7).bitwise_left_shift(fmt.bits - 1)


def _decode_codes(codes: Tensor, fmt: Format) -> Tensor:
    if fmt in _HALF_DTYPES:
        return codes.view(_HALF_DTYPES[fmt]).to(torch.float32)
    if fmt is TF32:
        return codes.bitwise_left_shift(_TF32_DROPPED_BITS).view(torch.float32)
    return _make_decoding_table(fmt, codes.device).index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def _split_into_pieces(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    flat_tensors = source.flatten(), target.flatten()
    if source.device.type != "cpu":
        # Only a CPU profits from pieces that fit into its caches. A GPU handles all elements in one launch.
        return iter([flat_tensors])
    return zip(*(torch.split(tensor, _PIECE_ELEMENTS) for tensor in flat_tensors), strict=True)


CODE_DTYPES: dict[str, torch.dtype] = {
    E4M3.name: torch.float8_e4m3fn,
    E5M2.name: torch.float8_e5m2,
    E4M3FNUZ.name: torch.float8_e4m3fnuz,
    E5M2FNUZ.name: torch.float8_e5m2fnuz,
    FP16.name: torch.float16,
}


def encode_with_torch(x: Tensor, fmt: Format, scale: Tensor | None = None) -> Tensor:
    """Returns the codes of `x` in torch's dtype, contiguous. If a `scale` is given, `x` is multiplied by it first.
    Values above the format's largest become the largest.
    """
    return cast_elements(x.detach(), fmt, scale).contiguous()


def cast_elements(x: Tensor, fmt: Format, scale: Tensor | None = None) -> Tensor:
    """Returns the codes that `encode_with_torch` returns, but in the memory layout of `x`."""
    values = x.to(torch.float32)
    # Do not clamp in place yet: if `x` is float32, `values` is `x` itself.
    scaled_values = values.clamp(-fmt.largest, fmt.largest) if scale is None else (values * scale)
    return scaled_values.clamp_(-fmt.largest, fmt.largest).to(CODE_DTYPES[fmt.name])
