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
        """The windows of a micro-batch: rows `micro_batch` x `batch` and on of the step's.

        Drawn by a counter: numpy promises the words that Philox makes for a key, whatever its version.
        """
        blocks, rest = divmod(micro_batch * batch, _WORDS)
        generator = np.random.Philox(key=seed, counter=(step << _DRAWS_BITS) + blocks)
        words = generator.random_raw(rest + batch)[rest:]
        return self._batch(words % np.uint64(self._places))

    def in_order(self, batch: int, most: int) -> list[Batch]:
        """At most so many windows that do not overlap, from all parts of the text alike, as batches."""
        every = (self._places - 1) // self._length + 1
        count = min(most, every)
        starts = np.arange(count, dtype=np.uint64) * np.uint64(every) // np.uint64(count) * np.uint64(self._length)
        return [self._batch(starts[first : first + batch]) for first in range(0, count, batch)]

    def _batch(self, starts: NDArray[np.uint64]) -> Batch:
        ids = np.stack([self._tokens[start : start + self._length + 1] for start in starts.tolist()]).astype(np.int64)
        if int(ids.max()) >= self._vocabulary:
            raise ValueError(f"the text has token {int(ids.max())}; the model knows those below {self._vocabulary}")
        host = torch.from_numpy(ids)
        if self._device != "cpu":
            host = host.pin_memory().to(self._device, non_blocking=True)
        return host[:, :-1].contiguous(), host[:, 1:].contiguous()
