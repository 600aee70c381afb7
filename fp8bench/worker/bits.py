"""Computes digests and sketches of the memory of tensors, and copies or replaces its contents."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fp8bench.worker.finite import can_convert_dtype

# A tensor is processed in pieces of this many elements, or of this many 8-byte words.
_ELEMENTS_PER_PIECE = 1 << 18
# Odd multipliers of the digest. Their bits have no pattern, so that they mix the bits of the tensor well.
_PIECE_FACTOR, _WORD_FACTOR = 0x9E3779B97F4A7C15, 0x2545F4914F6CDD1D
_DIGEST_MODULUS = 1 << 64
# The number of sums in a sketch, and the number of elements that share one table of random signs.
_SKETCH_SUMS, _SIGN_TABLE_ROWS = 4, 1 << 16


def digest(tensor: Any) -> int:
    """Returns a number that is equal for tensors with equal bits. Tensors with different bits have equal numbers with a
    probability of 1 in 2**63.
    """
    digest_value = 0
    for piece in _view_storage(tensor, torch.uint8).split(8 * _ELEMENTS_PER_PIECE):
        complete_word_bytes = piece.numel() // 8 * 8
        for words in (piece[:complete_word_bytes].view(torch.int64), piece[complete_word_bytes:].to(torch.int64)):
            # mix the upper bits of a word into its lower bits; otherwise two changed signs would cancel
            mixed_words = words * _WORD_FACTOR
            mixed_words ^= mixed_words >> 32
            mixed_words *= _make_position_weights(words.device)[: words.numel()]
            digest_value = (digest_value * _PIECE_FACTOR + int(mixed_words.sum())) % _DIGEST_MODULUS
    return digest_value


def sketch_tensor(tensor: Any, original: Any = None) -> Any:
    """Returns a few sums of a tensor's numbers, each sum with other random signs. With an `original` tensor, sums the
    differences from it instead.

    The distance between the sketches of two tensors is about the distance between the tensors.
    """
    dtype = _choose_readable_dtype(tensor.dtype)
    sketch_sums = torch.zeros(_SKETCH_SUMS, dtype=torch.float64, device=tensor.device)
    computing_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    element_sign_table = _make_random_sign_table(tensor.device, computing_dtype)
    piece_sign_table = _make_random_sign_table(tensor.device, torch.float64)
    for piece_number, piece in enumerate(_view_storage(tensor, dtype).split(_SIGN_TABLE_ROWS)):
        # Replace infinity and NaN, which would hide all other numbers of a sum.
        numbers = piece.to(computing_dtype).nan_to_num(0.0, 0.0, 0.0)
        # subtract element by element, because rounding errors of the sums would hide a small step
        if original is not None:
            original_piece = _view_storage(original, dtype)[piece_number * _SIGN_TABLE_ROWS :][: piece.numel()]
            numbers = numbers - original_piece.to(computing_dtype).nan_to_num(0.0, 0.0, 0.0)
        piece_signs = piece_sign_table[piece_number % _SIGN_TABLE_ROWS]
        sketch_sums += (numbers @ element_sign_table[: piece.numel()]) * piece_signs
    return sketch_sums


def count_subnormals(tensor: Any) -> int:
    return int(((tensor.abs() < torch.finfo(tensor.dtype).tiny) & (tensor != 0)).sum())


def copy_bytes(tensor: Any) -> Any:
    return _view_storage(tensor, torch.uint8).clone()


def restore_bytes(tensor: Any, copy: Any) -> None:
    _view_storage(tensor, torch.uint8).copy_(copy)


@contextmanager
def replace_numbers(tensor: Any, seed: int) -> Iterator[None]:
    """Replaces a tensor's numbers within the `with` block. Restores the tensor's whole memory afterwards, because other
    tensors may use the same memory.

    Floating-point numbers become random numbers between the smallest and the largest number of a piece. Integers are
    drawn from the existing integers. Infinities and NaN remain, because a mask needs its infinities.
    """
    generator = torch.Generator(tensor.device).manual_seed(seed)
    dtype = _choose_readable_dtype(tensor.dtype)
    with restore_afterwards(tensor):
        for piece in _view_storage(tensor, dtype).split(_ELEMENTS_PER_PIECE):
            if dtype.is_floating_point:
                piece.copy_(_draw_within_range(piece, generator))
            else:
                piece.copy_(piece[torch.randint(piece.numel(), piece.shape, generator=generator, device=piece.device)])
        yield


@contextmanager
def restore_afterwards(tensor: Any) -> Iterator[None]:
    original_bytes = copy_bytes(tensor)
    try:
        yield
    finally:
        restore_bytes(tensor, original_bytes)


def _choose_readable_dtype(dtype: Any) -> Any:
    """Returns the dtype in which a tensor's memory is read: the tensor's dtype, or an integer of the same size if torch
    cannot convert that dtype.
    """
    if dtype.is_floating_point and (dtype.itemsize > 1 or can_convert_dtype(dtype)):
        return dtype
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(dtype.itemsize, torch.int64)


def _draw_within_range(piece: Any, random: Any) -> Any:
    numbers = piece if piece.dtype is torch.float64 else piece.to(torch.float32)
    is_finite = numbers.isfinite()
    if not bool(is_finite.any()):
        return piece
    low, high = (float(end) for end in torch.aminmax(numbers[is_finite]))
    if low == high:  # if all numbers are x, draw between x/2 and x
        low, high = (low / 2, high) if high else (0.0, 1.0)
    random_numbers = torch.rand(numbers.shape, generator=random, device=numbers.device, dtype=numbers.dtype)
    return torch.where(is_finite, low + (high - low) * random_numbers, numbers)


def _view_storage(tensor: Any, dtype: Any) -> Any:
    """Views the whole memory of a tensor as elements of `dtype`. The view has a separate version counter."""
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())


@functools.lru_cache(maxsize=1)
def _make_position_weights(device: Any) -> Any:
    """Returns a weight for each position of an 8-byte word, so that the digest depends on the order of the words."""
    # The weights are odd, because multiplying by an even number would lose the highest bit of a word.
    return torch.arange(1, 2 * _ELEMENTS_PER_PIECE, 2, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=2)
def _make_random_sign_table(device: Any, dtype: Any) -> Any:
    # The seed is fixed, because only sketches with the same signs can be compared.
    generator = torch.Generator().manual_seed(2)
    return (torch.randint(2, (_SIGN_TABLE_ROWS, _SKETCH_SUMS), generator=generator) * 2 - 1).to(device, dtype)
