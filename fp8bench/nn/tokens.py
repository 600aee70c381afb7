"""Batches of tokens from a memory-mapped file: decode, batch, pin, copy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BYTES = 256


class TokenLoader:
    """Random windows of the file, the same for the same seed. Each batch is one copy to the device.

    A token of the file is a byte. Where a vocabulary has more than bytes, an id stands for a byte and the one after it,
    so that some thousand ids occur: with 256 of 50304 nearly all gradients of an embedding would be zero, and those
    that are not would all be added up in a few rows.
    """

    def __init__(self, path: str, batch: int, length: int, device: str, seed: int, vocabulary: int) -> None:
        self._tokens = np.memmap(path, dtype=np.uint16, mode="r")
        # Bytes that an id is made of.
        self._span = 2 if vocabulary > BYTES else 1
        if len(self._tokens) < length + self._span:
            raise ValueError(f"the token file has {len(self._tokens)} tokens; a sequence of {length} needs more")
        self._batch, self._length, self._device = batch, length, device
        self._random = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        self._pin = device != "cpu"

    def next(self) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens that follow them, (batch, length) each, on the device."""
        size = self._length + self._span
        starts = self._random.integers(0, len(self._tokens) - size + 1, self._batch)
        ids = np.stack([self._tokens[start : start + size] for start in starts]).astype(np.int64)
        if self._span == 2:
            ids = ids[:, :-1] * BYTES + ids[:, 1:]
        host = torch.from_numpy(ids % self._vocabulary)
        if self._pin:
            host = host.pin_memory().to(self._device, non_blocking=True)
        return host[:, :-1].contiguous(), host[:, 1:].contiguous()
