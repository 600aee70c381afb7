"""Digests, copies and sketches of tensors' memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fp8bench.worker.finite import converts

# The number of elements, or words, processed at a time.
_PIECE = 1 << 18
# Odd multipliers without a pattern.
_PIECE_FACTOR, _WORD_FACTOR = 0x9E3779B97F4A7C15, 0x2545F4914F6CDD1D
_NUMBERS = 1 << 64
# The number of sums in a sketch, and of elements that share one table of signs.
_SUMS, _SIGNED = 4, 1 << 16


def digest(tensor: Any) -> int:
    """Returns a number that is equal for equal bits; for different bits it is equal with a chance of one in 2**63."""
    number = 0
    for piece in _flat(tensor, torch.uint8).split(8 * _PIECE):
        in_words = piece.numel() // 8 * 8
        for words in (piece[:in_words].view(torch.int64), piece[in_words:].to(torch.int64)):
            mixed = words * _WORD_FACTOR  # mixes the upper bits of a word down, or two changed signs would cancel
            mixed ^= mixed >> 32
            weighed = int((mixed * _weights(words.device, _PIECE)[: words.numel()]).sum())
            number = (number * _PIECE_FACTOR + weighed) % _NUMBERS
    return number


def sketch(tensor: Any, original: Any = None) -> Any:
    """Sums a tensor's numbers, or their differences from an `original`, with random signs. The distance between the
    sums of two tensors is about that of the tensors."""
    dtype, sums = _numbers_as(tensor.dtype), torch.zeros(_SUMS, dtype=torch.float64, device=tensor.device)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    signs, end = _signs(tensor.device, wide), _signs(tensor.device, torch.float64)
    for number, piece in enumerate(_flat(tensor, dtype).split(_SIGNED)):
        numbers = piece.to(wide).nan_to_num(0.0, 0.0, 0.0)
        if original is not None:  # one by one, or rounding the sums would hide a small step
            old = _flat(original, dtype)[number * _SIGNED :][: piece.numel()]
            numbers = numbers - old.to(wide).nan_to_num(0.0, 0.0, 0.0)
        sums += (numbers @ signs[: piece.numel()]) * end[number % _SIGNED]
    return sums


def copy_bytes(tensor: Any) -> Any:
    return _flat(tensor, torch.uint8).clone()


def put_back(tensor: Any, copy: Any) -> None:
    _flat(tensor, torch.uint8).copy_(copy)


@contextmanager
def other_numbers(tensor: Any, seed: int) -> Iterator[None]:
    """Replaces a tensor's numbers in the body, and restores all after it, because the tensor may be shared.

    Floating-point numbers become random ones between the smallest and the largest, others are drawn from the existing
    ones. Values that are not finite stay: a mask needs its infinities.
    """
    with same_after(tensor):
        _replace_numbers(tensor, seed)
        yield


@contextmanager
def same_after(tensor: Any) -> Iterator[None]:
    original = copy_bytes(tensor)
    try:
        yield
    finally:
        put_back(tensor, original)


def _replace_numbers(tensor: Any, seed: int) -> None:
    random = torch.Generator(tensor.device).manual_seed(seed)
    dtype = _numbers_as(tensor.dtype)
    with torch.no_grad():
        for piece in _flat(tensor, dtype).split(_PIECE):
            if dtype.is_floating_point:
                piece.copy_(_within_range(piece, random))
            else:
                piece.copy_(piece[torch.randint(piece.numel(), piece.shape, generator=random, device=piece.device)])


def _numbers_as(dtype: Any) -> Any:
    """Returns the dtype to read numbers in: integers of the same size if torch cannot convert them."""
    if dtype.is_floating_point and (dtype.itemsize > 1 or converts(dtype)):
        return dtype
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(dtype.itemsize, torch.int64)


def _within_range(piece: Any, random: Any) -> Any:
    numbers = piece if piece.dtype is torch.float64 else piece.to(torch.float32)
    finite = numbers.isfinite()
    if not bool(finite.any()):
        return piece
    low, high = (float(end) for end in torch.aminmax(numbers[finite]))
    if low == high:  # constants stay about constant
        low, high = (low / 2, high) if high else (0.0, 1.0)
    drawn = torch.rand(numbers.shape, generator=random, device=numbers.device, dtype=numbers.dtype)
    return torch.where(finite, low + (high - low) * drawn, numbers)


def _flat(tensor: Any, dtype: Any) -> Any:
    """Views the whole memory of a tensor as elements of a dtype; the view has a separate version counter."""
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())


@functools.lru_cache(maxsize=1)
def _weights(device: Any, count: int) -> Any:
    """Weights words by their position: a plain sum would not depend on their order."""
    return torch.arange(1, 2 * count, 2, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=2)
def _signs(device: Any, dtype: Any) -> Any:
    random = torch.Generator().manual_seed(2)
    return (torch.randint(2, (_SIGNED, _SUMS), generator=random) * 2 - 1).to(device, dtype)
