"""Loads batches of a text: windows of tokens, and records that stand for images.

A record is a piece of the text whose bytes become normalised floats, like the pixels of an image. Records are stored
compressed, as on a disk, or decoded in memory. The caller chooses the records of a batch.
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

BYTE_VALUES = 256


def make_loader(setup: Setup, batch: int, config: GPTConfig, draw: int = 0) -> TokenLoader:
    assert setup.corpus is not None
    return TokenLoader(setup.corpus, batch, config.sequence, setup.facts.key, setup.seed + draw, config.vocabulary)


class TokenLoader:
    """Loads batches of random windows of the token file. The seed determines the windows. Each batch is copied to the
    device immediately.

    A token of the file is a byte. For a vocabulary of more than 256 ids, an id combines a byte with the next one, so
    that some thousand ids occur. With only 256 of 50304 ids nearly all rows of an embedding's gradient would be zero.
    """

    def __init__(self, path: str, batch: int, length: int, device: str, seed: int, vocabulary: int) -> None:
        self._tokens = np.memmap(path, dtype=np.uint16, mode="r")
        # The number of bytes that make up one token id.
        self._tokens_per_id = 2 if vocabulary > BYTE_VALUES else 1
        if len(self._tokens) < length + self._tokens_per_id:
            raise ValueError(f"the token file has {len(self._tokens)} tokens; a sequence of {length} needs more")
        self._batch = batch
        self._length = length
        self._device = device
        self._random = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        self._pin = device != "cpu"
        self._loaded: list[Tensor] = []
        self._loaded_cycle: Iterator[Tensor] = iter(())

    def next(self) -> tuple[Tensor, Tensor]:
        """Returns the tokens of a batch, and the same tokens shifted by one as targets. Each result is (batch,
        length) on the device. If batches were loaded ahead, `next` returns them in turn.
        """
        if self._loaded:
            ids = next(self._loaded_cycle)
        else:
            ids = self._draw_token_windows()
            ids = ids.pin_memory().to(self._device, non_blocking=True) if self._pin else ids
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def preload_batches(self, batches: int) -> None:
        """Copies this many batches to the device, in place of those that were loaded before. `next` then returns these
        batches again and again.
        """
        for index in range(batches):
            batch_on_host = self._draw_token_windows()
            if index == len(self._loaded):
                self._loaded.append(torch.empty_like(batch_on_host, device=self._device))
            self._loaded[index].copy_(
                batch_on_host.pin_memory() if self._pin else batch_on_host, non_blocking=self._pin
            )
        self._loaded_cycle = cycle(self._loaded)

    def _draw_token_windows(self) -> Tensor:
        window_length = self._length + self._tokens_per_id
        window_starts = self._random.integers(0, len(self._tokens) - window_length + 1, self._batch)
        ids = np.stack([self._tokens[start : start + window_length] for start in window_starts]).astype(np.int64)
        if self._tokens_per_id == 2:
            ids = ids[:, :-1] * BYTE_VALUES + ids[:, 1:]
        # Two bytes give ids up to 65,535, which may exceed the vocabulary.
        return torch.from_numpy(ids % self._vocabulary)


# zlib's default compression level, which PNG writers use.
_ZLIB_LEVEL = 6
# The normalisation of bytes: the middle of their range becomes 0, and a distance of 63.75 becomes 1.
_BYTE_RANGE_MIDDLE = 127.5
_BYTE_UNIT_DISTANCE = 63.75

FLOAT32_DTYPE = np.dtype(np.float32)
FLOAT64_DTYPE = np.dtype(np.float64)
ByteArray = NDArray[np.uint8]
IndexArray = NDArray[np.int64]


def draw_text_records(path: str, count: int, size: int, random: np.random.Generator) -> ByteArray:
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    if len(tokens) < size:
        raise ValueError(f"the token file has {len(tokens)} bytes of text; a record of {size} needs more")
    record_start_indices = random.integers(0, len(tokens) - size + 1, count)
    return np.stack([tokens[start : start + size] for start in record_start_indices]).astype(np.uint8)


def normalise_bytes(values: ByteArray, dtype: np.dtype[np.floating] = FLOAT32_DTYPE) -> NDArray[np.floating]:
    result = values.astype(dtype)
    result -= _BYTE_RANGE_MIDDLE
    result /= _BYTE_UNIT_DISTANCE
    return result


class CompressedDataRecords:
    """Records in an unnamed temporary file. Each record is compressed separately, like an image in a PNG file.

    A batch is a tensor (batch, size) of normalised fp32 numbers on the host.
    """

    def __init__(self, records: ByteArray) -> None:
        compressed_records = [zlib.compress(record.tobytes(), _ZLIB_LEVEL) for record in records]
        compressed_end_offsets = np.cumsum([len(compressed_record) for compressed_record in compressed_records])
        self._record_slices = [
            slice(record_end - len(compressed_record), record_end)
            for record_end, compressed_record in zip(compressed_end_offsets.tolist(), compressed_records, strict=True)
        ]
        self._size = records.shape[1]
        with tempfile.TemporaryFile() as file:
            file.write(b"".join(compressed_records))
            file.flush()
            # The file has no name. It exists as long as this mapping.
            self._file = np.memmap(file, dtype=np.uint8, mode="r")

    def read_batch(self, indices: IndexArray, into: Tensor | None = None) -> Tensor:
        """Returns the decoded records with these indices. With `into`, an earlier batch of the same size, they are
        written to that batch.
        """
        batch = torch.empty(len(indices), self._size) if into is None else into
        for row, index in zip(batch.numpy(), indices, strict=True):
            record = zlib.decompress(self._file[self._record_slices[index]], bufsize=self._size)
            row[:] = np.frombuffer(record, dtype=np.uint8)
        batch.numpy()[:] -= _BYTE_RANGE_MIDDLE
        batch.numpy()[:] /= _BYTE_UNIT_DISTANCE
        return batch


class DecodedRecords:
    """Records that are stored decoded in memory."""

    def __init__(self, records: ByteArray) -> None:
        self._values = torch.from_numpy(normalise_bytes(records))

    def read_batch(self, indices: IndexArray) -> Tensor:
        return self._values.index_select(0, torch.from_numpy(indices))


StoredRecords = CompressedDataRecords | DecodedRecords


class DeviceBuffers:
    """Buffers on a device for one batch, and for the batch's scale if it has one.

    Copies to a GPU come from pinned memory, so that the host need not wait.
    """

    def __init__(self, example: Operand, device: str) -> None:
        self._pin = device != "cpu"
        self.buffers = [torch.empty_like(part, device=device) for part in example.tensors]

    def copy_operand(self, operand: Operand) -> None:
        for buffer, part in zip(self.buffers, operand.tensors, strict=True):
            buffer.copy_(part.pin_memory() if self._pin else part, non_blocking=self._pin)
