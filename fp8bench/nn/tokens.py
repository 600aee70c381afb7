"""Batches of tokens from a memory-mapped file: decode, batch, pin, copy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class TokenLoader:
    """Random windows of the file, the same for the same seed. Each batch is one copy to the device."""

    def __init__(self, path: str, batch: int, length: int, device: str, seed: int, vocabulary: int) -> None:
        self._tokens = np.memmap(path, dtype=np.uint16, mode="r")
        if len(self._tokens) <= length:
            raise ValueError(f"the token file has {len(self._tokens)} tokens; a sequence of {length} needs more")
        self._batch, self._length, self._device = batch, length, device
        self._random = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        self._pin = device != "cpu"

    def next(self) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens that follow them, (batch, length) each, on the device."""
        starts = self._random.integers(0, len(self._tokens) - self._length, self._batch)
        windows = np.stack([self._tokens[start : start + self._length + 1] for start in starts])
        host = torch.from_numpy(windows.astype(np.int64) % self._vocabulary)
        if self._pin:
            host = host.pin_memory().to(self._device, non_blocking=True)
        return host[:, :-1].contiguous(), host[:, 1:].contiguous()
