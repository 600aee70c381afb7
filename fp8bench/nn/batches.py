"""Batches of the text: windows of tokens, and records as data loaders find them (compressed) or keep them (decoded).

A record stands for an image: bytes that become normalised floats. The caller chooses the records of a batch.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Operand, Setup

BYTES = 256


def loader_for(setup: Setup, batch: int, config: GPTConfig, draw: int = 0) -> TokenLoader:
    assert setup.corpus is not None
    return TokenLoader(setup.corpus, batch, config.sequence, setup.facts.key, setup.seed + draw, config.vocabulary)


class TokenLoader:
    """Random windows of the token file, the same for the same seed. Each batch is copied to the device at once.

    A token of the file is a byte. Where a vocabulary has more than bytes, an id combines a byte with the one after it,
    so that some thousand ids occur: with 256 of 50304, nearly all gradients of an embedding would be zero, and the
    others would all be added up in a few rows.
    """

    def __init__(self, path: str, batch: int, length: int, device: str, seed: int, vocabulary: int) -> None:
        self._tokens = np.memmap(path, dtype=np.uint16, mode="r")
        # Bytes in one id.
        self._span = 2 if vocabulary > BYTES else 1
        if len(self._tokens) < length + self._span:
            raise ValueError(f"the token file has {len(self._tokens)} tokens; a sequence of {length} needs more")
        self._batch = batch
        self._length = length
        self._device = device
        self._random = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        self._pin = device != "cpu"
        self._ahead: list[Tensor] = []
        self._turns: Iterator[Tensor] = iter(())

    def next(self) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens that follow them, (batch, length) each, on the device. Takes turns through the batches
        that were loaded ahead, if any were."""
        if self._ahead:
            ids = next(self._turns)
        else:
            ids = self._draw()
            ids = ids.pin_memory().to(self._device, non_blocking=True) if self._pin else ids
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def load_ahead(self, batches: int) -> None:
        """Loads this many batches, each into the memory of its predecessor; `next` then takes turns."""
        for place in range(batches):
            host = self._draw()
            if place == len(self._ahead):
                self._ahead.append(torch.empty_like(host, device=self._device))
            self._ahead[place].copy_(host.pin_memory() if self._pin else host, non_blocking=self._pin)
        self._turns = cycle(self._ahead)

    def _draw(self) -> Tensor:
        size = self._length + self._span
        starts = self._random.integers(0, len(self._tokens) - size + 1, self._batch)
        ids = np.stack([self._tokens[start : start + size] for start in starts]).astype(np.int64)
        if self._span == 2:
            ids = ids[:, :-1] * BYTES + ids[:, 1:]
        return torch.from_numpy(ids % self._vocabulary)


# PNG writers' default compression.
_LEVEL = 6
# Images are normalised by the middle of a byte's range and a quarter of it.
_MEAN = 127.5
_DEVIATION = 63.75

SINGLE = np.dtype(np.float32)
DOUBLE = np.dtype(np.float64)
Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]


def text_records(path: str, count: int, size: int, random: np.random.Generator) -> Bytes:
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    if len(tokens) < size:
        raise ValueError(f"the token file has {len(tokens)} bytes of text; a record of {size} needs more")
    starts = random.integers(0, len(tokens) - size + 1, count)
    return np.stack([tokens[start : start + size] for start in starts]).astype(np.uint8)


def normalise_bytes(values: Bytes, dtype: np.dtype[np.floating] = SINGLE) -> NDArray[np.floating]:
    result = values.astype(dtype)
    result -= _MEAN
    result /= _DEVIATION
    return result


class CompressedRecords:
    """Records in an unnamed temporary file, each compressed by itself as PNG does it.

    A batch holds the records of the given numbers as normalised fp32 on the host, (batch, size).
    """

    def __init__(self, records: Bytes) -> None:
        packed = [zlib.compress(record.tobytes(), _LEVEL) for record in records]
        ends = np.cumsum([len(content) for content in packed])
        self._places = [slice(end - len(content), end) for end, content in zip(ends.tolist(), packed, strict=True)]
        self._size = records.shape[1]
        with tempfile.TemporaryFile() as file:
            file.write(b"".join(packed))
            file.flush()
            # The mapping keeps the file, which was unlinked when it was made, until the array goes.
            self._file = np.memmap(file, dtype=np.uint8, mode="r")

    def batch(self, indices: Indices, into: Tensor | None = None) -> Tensor:
        """Writes to `into`, an earlier batch of the same size, if given."""
        batch = torch.empty(len(indices), self._size) if into is None else into
        for row, index in zip(batch.numpy(), indices, strict=True):
            record = zlib.decompress(self._file[self._places[index]], bufsize=self._size)
            row[:] = np.frombuffer(record, dtype=np.uint8)
        batch.numpy()[:] -= _MEAN
        batch.numpy()[:] /= _DEVIATION
        return batch


class DecodedRecords:
    """Records kept decoded in memory."""

    def __init__(self, records: Bytes) -> None:
        self._values = torch.from_numpy(normalise_bytes(records))

    def batch(self, indices: Indices) -> Tensor:
        return self._values.index_select(0, torch.from_numpy(indices))


Records = CompressedRecords | DecodedRecords


class Destination:
    """Buffers on a device that take one batch, and its scale if it has one.

    A batch goes to a GPU from pinned memory, so that the host need not wait.
    """

    def __init__(self, like: Operand, device: str) -> None:
        self._pin = device != "cpu"
        self.buffers = [torch.empty_like(part, device=device) for part in like.tensors]

    def take(self, operand: Operand) -> None:
        for buffer, part in zip(self.buffers, operand.tensors, strict=True):
            buffer.copy_(part.pin_memory() if self._pin else part, non_blocking=self._pin)
