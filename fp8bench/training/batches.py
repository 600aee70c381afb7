"""Windows of a text: those to train on as a pure function of seed and step, those to validate on in their order.

Nothing of a position in the text has to be kept: after a resume the same step reads the same windows, and so do all
arms of a seed. However a step is cut into micro-batches, its windows are the same.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8bench.model.training import TokenSpan

Batch = tuple[Tensor, Tensor]
# Digests are below this.
DIGESTS = 1 << 63
# Of the counter's 256 bits those that count a step's draws, and how many words it has for each count.
_DRAWS_BITS, _WORDS = 192, 4


class Windows:
    """Windows of so many tokens of a text, each with the tokens that follow, on a device."""

    def __init__(self, text: TokenSpan, length: int, device: str, vocabulary: int) -> None:
        self._tokens = np.memmap(text.path, dtype=np.uint16, mode="r")[text.start : text.stop]
        self._places = len(self._tokens) - length
        self._length, self._device, self._vocabulary = length, device, vocabulary
        if self._places < 1:
            raise ValueError(f"{text.path} has {len(self._tokens)} tokens here; a window of {length} needs one more")

    def drawn(self, seed: int, step: int, micro_batch: int, batch: int) -> Batch:
        """The windows of a micro-batch: rows `micro_batch` x `batch` and on of the step's."""
        return self._batch(self._ids(self._starts(seed, step, micro_batch, batch)))

    def digest(self, seed: int, step: int, micro_batch: int, batch: int) -> int:
        """A number of what `drawn` reads; those of parts of a step add up to that of the step, modulo 2^63."""
        ids = self._ids(self._starts(seed, step, micro_batch, batch)).astype(np.uint64)
        rows = (ids * np.arange(1, ids.shape[1] + 1, dtype=np.uint64)).sum(1, dtype=np.uint64)
        places = np.arange(micro_batch * batch + 1, (micro_batch + 1) * batch + 1, dtype=np.uint64)
        return int((rows * places).sum(dtype=np.uint64)) % DIGESTS

    def _starts(self, seed: int, step: int, micro_batch: int, batch: int) -> NDArray[np.uint64]:
        """Drawn by a counter: numpy promises the words that Philox makes for a key, whatever its version."""
        blocks, rest = divmod(micro_batch * batch, _WORDS)
        generator = np.random.Philox(key=seed, counter=(step << _DRAWS_BITS) + blocks)
        words = generator.random_raw(rest + batch)[rest:]
        return words % np.uint64(self._places)

    def in_order(self, batch: int, most: int) -> list[Batch]:
        """At most so many windows that do not overlap, from all parts of the text alike, as batches."""
        every = (self._places - 1) // self._length + 1
        count = min(most, every)
        starts = np.arange(count, dtype=np.uint64) * np.uint64(every) // np.uint64(count) * np.uint64(self._length)
        return [self._batch(self._ids(starts[first : first + batch])) for first in range(0, count, batch)]

    def _ids(self, starts: NDArray[np.uint64]) -> NDArray[np.uint16]:
        return np.stack([self._tokens[start : start + self._length + 1] for start in starts.tolist()])

    def _batch(self, tokens: NDArray[np.uint16]) -> Batch:
        ids = tokens.astype(np.int64)
        if int(ids.max()) >= self._vocabulary:
            raise ValueError(f"the text has token {int(ids.max())}; the model knows those below {self._vocabulary}")
        host = torch.from_numpy(ids)
        if self._device != "cpu":
            host = host.pin_memory().to(self._device, non_blocking=True)
        return host[:, :-1].contiguous(), host[:, 1:].contiguous()
