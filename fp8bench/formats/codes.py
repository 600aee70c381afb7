"""Encodes and decodes a format's values exactly, in the layout in memory. Any device, plain torch operations.

A code is the format's bits, lowest first: mantissa, exponent, sign. Formats of up to eight bits have one in each byte
of a uint8 tensor (six-bit codes too: two bits stay zero), bf16 and fp16 are int16, tf32's nineteen bits are int32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from fp8bench.errors import UsageError
from fp8bench.formats.grids import BF16, E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FP16, TF32, Format
from fp8bench.formats.quantise import check_input

_HALVES = {BF16: torch.bfloat16, FP16: torch.float16}
_BYTES = {E4M3: torch.float8_e4m3fn, E4M3FNUZ: torch.float8_e4m3fnuz, E5M2FNUZ: torch.float8_e5m2fnuz}
_FLOAT32_MANTISSA_BITS = 23
_TF32_DROPPED = _FLOAT32_MANTISSA_BITS - TF32.mantissa_bits
_BYTE = 8
_PIECE = 1 << 16
"""Elements that a processor works on at a time, so that intermediate results stay in its cache."""


def code_dtype(fmt: Format) -> torch.dtype:
    if fmt.bits <= _BYTE:
        return torch.uint8
    return torch.int16 if fmt in _HALVES else torch.int32


def encode(values: Tensor, fmt: Format, *, checked: bool = True) -> Tensor:
    """Returns the codes of `values`. Raises UsageError for a value that is not on the format's grid.

    Zero of either sign is the one zero of fnuz formats. Every NaN gets the same code. If not `checked`, the values must
    be on the grid, and the host does not wait for the device.
    """
    check_input(values)
    codes = torch.empty(values.shape, dtype=code_dtype(fmt), device=values.device)
    for part, filled in _pieces(values.detach(), codes):
        filled.copy_(encode_values(part, fmt))
        if not checked:
            continue
        # Decoded codes show in one comparison whether every value was on the grid; the slow look follows only if not.
        decoded = _decode(filled, fmt)
        if not torch.equal(decoded, part.to(torch.float32)) and _wrong(decoded, part, fmt).any():
            raise UsageError(_off_grid(values, fmt))
    return codes


def decode(codes: Tensor, fmt: Format, *, checked: bool = True) -> Tensor:
    """The float32 values of codes; UsageError for a code with more bits than the format.

    If not `checked`, the codes are known to be the format's, and no device is waited for.
    """
    if codes.dtype != code_dtype(fmt):
        raise TypeError(f"codes of {fmt.name} are {code_dtype(fmt)}, not {codes.dtype}.")
    # Formats whose bits fill their bytes have a value for every code.
    if checked and codes.numel() and fmt.bits < codes.element_size() * _BYTE:
        least, most = (int(end) for end in codes.aminmax())
        if least < 0 or most >= 1 << fmt.bits:
            wrong = least if least < 0 else most
            raise UsageError(f"{fmt.name} has codes from 0 to {(1 << fmt.bits) - 1}, and {wrong} is not one of them.")
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for part, filled in _pieces(codes, values):
        filled.copy_(_decode(part, fmt))
    return values


def pack(codes: Tensor, fmt: Format) -> Tensor:
    """Packs two e2m1 codes into a byte along the last dimension; returns other codes unchanged.

    The first of two is the lower half, as in torch's float4_e2m1fn_x2; an odd end has zero above it.
    """
    if fmt is not E2M1:
        return codes
    if codes.dtype != torch.uint8 or not codes.ndim:
        raise TypeError(f"cannot pack {codes.dtype} codes of {codes.ndim} dimensions: give uint8 codes of one or more.")
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | codes[..., 1::2].bitwise_left_shift(4)


def unpack(packed: Tensor, fmt: Format, columns: int | None = None) -> Tensor:
    """The codes that were packed, one in each byte; `columns` of them in a row, by default an even number."""
    if fmt is not E2M1:
        return packed
    if packed.dtype != torch.uint8 or not packed.ndim:
        raise TypeError(f"cannot unpack {packed.dtype} of {packed.ndim} dimensions: give uint8 of one or more.")
    # Two codes share a byte, so an odd row has half a byte to spare.
    room = 2 * packed.shape[-1]
    columns = room if columns is None else columns
    if columns not in (room, room - 1) or columns < 0:
        raise UsageError(f"{packed.shape[-1]} bytes hold {max(room - 1, 0)} or {room} e2m1 codes, not {columns}.")
    codes = torch.stack((packed.bitwise_and(0xF), packed.bitwise_right_shift(4)), dim=-1)
    return codes.view(*packed.shape[:-1], room)[..., :columns]


@lru_cache(maxsize=64)
def _table(fmt: Format, device: torch.device) -> Tensor:
    """The float32 value of each of the 256 bytes; NaN for bytes that are not codes."""
    codes = range(1 << fmt.bits)
    values = [_value(code, fmt) for code in codes] + [float("nan")] * ((1 << _BYTE) - len(codes))
    return torch.tensor(values, dtype=torch.float32, device=device)


def _value(code: int, fmt: Format) -> float:
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    exponent = (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    negative = fmt.signed and bool(code >> (fmt.bits - 1))
    # A format without zeros, e8m0, has no subnormals either.
    if exponent or not fmt.zeros:
        magnitude = 2.0 ** (exponent - fmt.bias) * (1 + mantissa / (1 << fmt.mantissa_bits))
    else:
        magnitude = mantissa * fmt.smallest_subnormal
    # Codes above the largest value are infinity, without a mantissa, or NaN.
    if magnitude > fmt.largest:
        magnitude = float("inf") if fmt.has_infinity and not mantissa else float("nan")
    if negative and not magnitude and not fmt.signed_zero:
        return float("nan")
    return -magnitude if negative else magnitude


def encode_values(values: Tensor, fmt: Format) -> Tensor:
    """Codes of values on the grid, and arbitrary codes for others. Independent of how torch's casts overflow."""
    values = values.to(torch.float32)
    if fmt.has_nan:  # one NaN for all: casts of NaN differ between devices, and between lengths
        values = values.nan_to_num(torch.nan, torch.inf, -torch.inf)
    if fmt is BF16:  # its cast makes several NaNs of one
        return values.view(torch.int32).bitwise_right_shift(16).to(torch.int16)
    if fmt is FP16:
        return values.to(torch.float16).view(torch.int16)
    if fmt in _BYTES:
        return values.to(_BYTES[fmt]).view(torch.uint8)
    if fmt is E5M2:  # the upper half of fp16, whose cast keeps infinities wherever it runs
        return values.to(torch.float16).view(torch.int16).bitwise_right_shift(8).to(torch.uint8)
    if fmt is E8M0:
        return values.view(torch.int32).bitwise_right_shift(_FLOAT32_MANTISSA_BITS).to(torch.uint8)
    if fmt is TF32:
        return values.view(torch.int32).bitwise_right_shift(_TF32_DROPPED).bitwise_and((1 << TF32.bits) - 1)
    # Their grids lie within e4m3fn's, once the smallest normals are the same.
    wider = (values * 2.0 ** (E4M3.min_exponent - fmt.min_exponent)).to(torch.float8_e4m3fn).view(torch.uint8)
    magnitude = wider.bitwise_and(0x7F).bitwise_right_shift(E4M3.mantissa_bits - fmt.mantissa_bits)
    return magnitude | wider.bitwise_right_shift(7).bitwise_left_shift(fmt.bits - 1)


def _decode(codes: Tensor, fmt: Format) -> Tensor:
    if fmt in _HALVES:
        return codes.view(_HALVES[fmt]).to(torch.float32)
    if fmt is TF32:
        return codes.bitwise_left_shift(_TF32_DROPPED).view(torch.float32)
    return _table(fmt, codes.device).index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def _wrong(decoded: Tensor, values: Tensor, fmt: Format) -> Tensor:
    wrong = decoded != values.to(torch.float32)
    return wrong & ~(decoded.isnan() & values.isnan()) if fmt.has_nan else wrong


def _pieces(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    flat = source.flatten(), target.flatten()
    if source.device.type != "cpu":
        # In pieces that stay in a CPU's caches; a GPU takes everything in one launch.
        return iter([flat])
    return zip(*(torch.split(tensor, _PIECE) for tensor in flat), strict=True)


def _off_grid(values: Tensor, fmt: Format) -> str:
    flat = values.detach().to(torch.float32).flatten()
    wrong = _wrong(_decode(encode_values(flat, fmt), fmt), flat, fmt)
    count, first = int(wrong.sum()), float(flat[wrong][0])
    # NaN first: rounding again would not help there.
    nans = int(flat.isnan().sum())
    if nans and not fmt.has_nan:
        verb = "is" if nans == 1 else "are"
        return f"{fmt.name} has no NaN, and {nans} of {flat.numel()} values {verb} NaN: keep them out."
    verb = "is no number" if count == 1 else "are no numbers"
    return f"{count} of {flat.numel()} values {verb} of {fmt.name}, {first:g} the first: round them to it."


DTYPES: dict[str, torch.dtype] = {
    E4M3.name: torch.float8_e4m3fn,
    E5M2.name: torch.float8_e5m2,
    E4M3FNUZ.name: torch.float8_e4m3fnuz,
    E5M2FNUZ.name: torch.float8_e5m2fnuz,
    FP16.name: torch.float16,
}


def torch_codes(x: Tensor, fmt: Format, scale: Tensor | None = None) -> Tensor:
    """`x`, times a float32 scale if there is one, as contiguous codes; larger values saturate."""
    return elements(x.detach(), fmt, scale).contiguous()


def elements(x: Tensor, fmt: Format, scale: Tensor | None = None) -> Tensor:
    """Like `torch_codes`, without making the codes contiguous."""
    values = x.to(torch.float32)
    # Out of place at first: a float32 tensor without a scale is the caller's own.
    scaled = values.clamp(-fmt.largest, fmt.largest) if scale is None else (values * scale)
    return scaled.clamp_(-fmt.largest, fmt.largest).to(DTYPES[fmt.name])
