"""The bits of a tensor's memory as one number, its numbers as a few, and other numbers in their place.

All of the memory that a tensor is a view of, past torch's count of versions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fp8bench.worker.finite import converts

# Elements, or words, at a time.
_PIECE = 1 << 18
# Odd numbers without a pattern.
_OF_PIECES, _OF_WORDS = 0x9E3779B97F4A7C15, 0x2545F4914F6CDD1D
_NUMBERS = 1 << 64
# Sums under signs, and elements at a time of which they are.
_SUMS, _SIGNED = 4, 1 << 16


def digest(tensor: Any) -> int:
    """The same for the same bits; for others by a chance of one in 2**63."""
    found = 0
    for piece in _flat(tensor, torch.uint8).split(8 * _PIECE):
        whole = piece.numel() // 8 * 8
        for words in (piece[:whole].view(torch.int64), piece[whole:].to(torch.int64)):
            mixed = words * _OF_WORDS  # the upper bits of a word come down, else two signs that change were none
            mixed ^= mixed >> 32
            weighed = int((mixed * _weights(words.device, _PIECE)[: words.numel()]).sum())
            found = (found * _OF_PIECES + weighed) % _NUMBERS
    return found


def sketch(tensor: Any, before: Any = None) -> Any:
    """Sums of the memory's numbers under random signs, or of what they are beyond those of a copy of it from `before`:
    of two tensors they are as far apart as these, about.
    """
    dtype, found = _numbers_as(tensor.dtype), torch.zeros(_SUMS, dtype=torch.float64, device=tensor.device)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    signs, end = _signs(tensor.device, wide), _signs(tensor.device, torch.float64)
    for number, piece in enumerate(_flat(tensor, dtype).split(_SIGNED)):
        numbers = piece.to(wide).nan_to_num(0.0, 0.0, 0.0)
        if before is not None:  # one by one, or rounding the sums would hide a small step
            old = _flat(before, dtype)[number * _SIGNED :][: piece.numel()]
            numbers = numbers - old.to(wide).nan_to_num(0.0, 0.0, 0.0)
        found += (numbers @ signs[: piece.numel()]) * end[number % _SIGNED]
    return found


def copied(tensor: Any) -> Any:
    """All of its memory, to be put back."""
    return _flat(tensor, torch.uint8).clone()


def put_back(tensor: Any, copy: Any) -> None:
    _flat(tensor, torch.uint8).copy_(copy)


@contextmanager
def other_numbers(tensor: Any, others: bool = True) -> Iterator[None]:
    """In the body floating-point numbers are any between the smallest and the largest, others drawn from themselves.

    What is not finite stays: a mask is none without its infinities. All is put back: others may hold the same tensor.
    Without `others` that is all there is to it.
    """
    before = copied(tensor)
    try:
        if others:
            _replace_numbers(tensor)
        yield
    finally:
        put_back(tensor, before)


def _replace_numbers(tensor: Any) -> None:
    random = torch.Generator(tensor.device).manual_seed(1)
    dtype = _numbers_as(tensor.dtype)
    with torch.no_grad():
        for piece in _flat(tensor, dtype).split(_PIECE):
            if dtype.is_floating_point:
                piece.copy_(_within_range(piece, random))
            else:
                piece.copy_(piece[torch.randint(piece.numel(), piece.shape, generator=random, device=piece.device)])


def _numbers_as(dtype: Any) -> Any:
    """The dtype to read numbers in: whole numbers of the same size where torch converts no others."""
    if dtype.is_floating_point and (dtype.itemsize > 1 or converts(dtype)):
        return dtype
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(dtype.itemsize, torch.int64)


def _within_range(piece: Any, random: Any) -> Any:
    numbers = piece if piece.dtype is torch.float64 else piece.to(torch.float32)
    finite = numbers.isfinite()
    if not bool(finite.any()):
        return piece
    low, high = (float(end) for end in torch.aminmax(numbers[finite]))
    if low == high:  # ones stay about ones
        low, high = (low / 2, high) if high else (0.0, 1.0)
    drawn = torch.rand(numbers.shape, generator=random, device=numbers.device, dtype=numbers.dtype)
    return torch.where(finite, low + (high - low) * drawn, numbers)


def _flat(tensor: Any, dtype: Any) -> Any:
    """All of the memory, in elements of that dtype, with a version of its own."""
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())


@functools.lru_cache(maxsize=1)
def _weights(device: Any, count: int) -> Any:
    """A sum of words alone would not tell in which order they lie."""
    return torch.arange(1, 2 * count, 2, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=2)
def _signs(device: Any, dtype: Any) -> Any:
    random = torch.Generator().manual_seed(2)
    return (torch.randint(2, (_SIGNED, _SUMS), generator=random) * 2 - 1).to(device, dtype)
