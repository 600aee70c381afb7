"""Random numbers that depend on a seed and an element's index alone, in integer torch operations.

The same ones come out eagerly and fused, on a CPU and on a GPU, however a tensor lies in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

RANDOM_BITS = 24

_GOLDEN = -0x61C88647
_WORD = 32
_INDICES = (1 << 31) - 1


class Draw(NamedTuple):
    """Seeds of casts to come: each is so many `steps` after `last`. What makes them leaves the last one in `after`."""

    last: Tensor
    after: Tensor
    steps: tuple[int, ...]


def random_bits(shape: Sequence[int], seed: Tensor) -> Tensor:
    """int32 numbers uniform below 2^24, one for each element in row-major order.

    `seed` is an int64 tensor of one element. Elements 2^32 apart have keys of their own, so that nothing repeats.
    """
    check_seed(seed)
    if prod(shape) <= _INDICES:
        return drawn_bits(torch.arange(prod(shape), dtype=torch.int32, device=seed.device).view(shape), key_of(seed))
    index = torch.arange(prod(shape), dtype=torch.int64, device=seed.device).view(shape)
    return drawn_bits(_low(index), key_of(seed, index.bitwise_right_shift(_WORD)))


def key_of(seed: Tensor, stretch: Tensor | None = None) -> Tensor:
    """The int32 key of a seed, without dimensions; that of each stretch of 2^32 elements where their numbers stand."""
    seed = seed.reshape(())
    high = _low(seed.bitwise_right_shift(_WORD))
    first = high if stretch is None else _low(stretch) * _GOLDEN + high
    return _mixed(_mixed(first) + _low(seed))


def drawn_bits(index: Tensor, key: Tensor) -> Tensor:
    """The numbers of elements whose index in their stretch is given, int32: what a kernel is traced with."""
    return _shifted(_mixed(_mixed(index + key) + key * _GOLDEN), _WORD - RANDOM_BITS)


def check_seed(seed: object) -> None:
    """Raise where a seed is none: shifts of a narrower one would give anything."""
    if not isinstance(seed, Tensor) or seed.dtype is not torch.int64 or seed.numel() != 1:
        raise TypeError("a seed is an int64 tensor of one element, on the device of what is rounded.")


def _low(wide: Tensor) -> Tensor:
    """The lower 32 bits of int64 numbers."""
    return wide.to(torch.int32)


def _shifted(word: Tensor, by: int) -> Tensor:
    """Shifted to the right as if unsigned."""
    return word.bitwise_right_shift(by).bitwise_and((1 << (_WORD - by)) - 1)


def _mixed(word: Tensor) -> Tensor:
    """A bijection of 32 bits in which every bit depends on every other: C. Wellons' low-bias constants, 2018."""
    word = (word ^ _shifted(word, 16)) * 0x7FEB352D
    word = (word ^ _shifted(word, 15)) * -0x7B935975
    return word ^ _shifted(word, 16)
