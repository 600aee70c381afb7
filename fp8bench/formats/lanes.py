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
from fp8bench.formats.rounding import nearest

_HALF = 16
_LOW_HALF = 0xFFFF
_HIGH_HALF = -0x10000
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
    halves = given.bitwise_left_shift(_HALF), given.bitwise_and(_HIGH_HALF)
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
        low, high = (one.view(torch.int32).to(torch.int64) for one in values)
        return low.bitwise_and(_LOW_WORD).bitwise_or(high.bitwise_left_shift(_WORD))
    kept = values if exact else [nearest(one, BF16, Overflow.INFINITY) for one in values]
    low, high = (one.view(torch.int32) for one in kept)
    return low.bitwise_right_shift(_HALF).bitwise_and(_LOW_HALF).bitwise_or(high.bitwise_and(_HIGH_HALF))
