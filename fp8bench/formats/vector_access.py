"""How fused quantisers read and write: values one by one, or bfloat16 values by twos, as halves of a word.

A loop over numbers of 16 and of 32 bits vectorises badly on a CPU (a tenth of the speed of a copy), one over words of
32 bits does not, unless it is shorter than a vector of them: that over blocks of 16 is read one by one. The halves of a
word are two lanes: float32 tensors of the words' shape, that of the first values and that of the second. Bytes lie in
little-endian order, as on all devices of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8bench.formats.grids import BF16, Overflow
from fp8bench.formats.quantise import quantised

_HALF = 16
_LOW_HALF = 0xFFFF
_HIGH_HALF = -0x10000
_MAGNITUDE = 0x7FFFFFFF
_HIGH_MAGNITUDE = 0x7FFF0000
_LARGEST_NAN = 0x7FFF0000
_SIGN = -0x80000000
_BOTH_SIGNS = -0x7FFF8000
_WORD = 32
_LOW_WORD = 0xFFFFFFFF


def words(x: Tensor, twos: bool) -> Tensor:
    """A contiguous tensor as words: half as many columns where two bfloat16 values share one."""
    return x.view(torch.int32) if twos else x


def result_words(out: Tensor, twos: bool) -> Tensor:
    """A contiguous tensor as what the lanes of words are joined to, in the shape of those words."""
    if twos:
        return out.view(torch.int32 if out.dtype is torch.bfloat16 else torch.int64)
    return out


def lanes(given: Tensor) -> list[Tensor]:
    """The values of words as float32."""
    if given.dtype is not torch.int32:
        return [given.to(torch.float32)]
    return [half.view(torch.float32) for half in (given.bitwise_left_shift(_HALF), given.bitwise_and(_HIGH_HALF))]


def magnitudes(given: Tensor) -> list[Tensor]:
    """The same without their signs."""
    if given.dtype is not torch.int32:
        return [given.to(torch.float32).abs()]
    halves = given.bitwise_left_shift(_HALF).bitwise_and(_MAGNITUDE), given.bitwise_and(_HIGH_MAGNITUDE)
    return [half.view(torch.float32) for half in halves]


def float_lanes(given: Tensor) -> list[Tensor]:
    """The lanes of float32 numbers, one or two of which stand in a word (of 64 bits)."""
    if given.dtype is torch.float32:
        return [given]
    halves = given.to(torch.int32), given.bitwise_right_shift(_WORD).to(torch.int32)
    return [half.view(torch.float32) for half in halves]


def joined(values: Sequence[Tensor], target: torch.dtype, exact: bool = False) -> Tensor:
    """Two lanes as words of values of the dtype `target`, which has them all if `exact`; one as it is."""
    if len(values) == 1:
        return values[0]
    if target is torch.float32:
        return _joined_floats([one.view(torch.int32) for one in values])
    kept = values if exact else [quantised(one, BF16, overflow=Overflow.INFINITY) for one in values]
    low, high = (one.view(torch.int32) for one in kept)
    return low.bitwise_right_shift(_HALF).bitwise_and(_LOW_HALF).bitwise_or(high.bitwise_and(_HIGH_HALF))


def joined_magnitudes(values: Sequence[Tensor], given: Tensor, target: torch.dtype, exact: bool = False) -> Tensor:
    """The same of magnitudes, which get the signs of the words that they come from."""
    bits = [one.view(torch.int32) for one in values]
    if len(values) == 1:
        return bits[0].bitwise_or(given.to(torch.float32).view(torch.int32).bitwise_and(_SIGN)).view(torch.float32)
    if target is torch.float32:
        signs = given.bitwise_left_shift(_HALF), given
        return _joined_floats([one.bitwise_or(by.bitwise_and(_SIGN)) for one, by in zip(bits, signs, strict=True)])
    low, high = bits if exact else map(_nearest_bf16, bits)
    low = low.bitwise_right_shift(_HALF).bitwise_and(_LOW_HALF)
    return low.bitwise_or(high.bitwise_and(_HIGH_HALF)).bitwise_or(given.bitwise_and(_BOTH_SIGNS))


def _joined_floats(bits: list[Tensor]) -> Tensor:
    low, high = (one.to(torch.int64) for one in bits)
    return low.bitwise_and(_LOW_WORD).bitwise_or(high.bitwise_left_shift(_WORD))


def _nearest_bf16(bits: Tensor) -> Tensor:
    """Magnitudes of which the upper half is to be taken, rounded for it. A NaN, all bits of which may be set, stays."""
    kept = bits.bitwise_and(_MAGNITUDE).clamp(max=_LARGEST_NAN)
    return kept + kept.bitwise_right_shift(_HALF).bitwise_and(1) + (_LOW_HALF >> 1)
