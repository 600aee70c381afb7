"""What a state is given, in sums by shape: the same numbers in every precision, up to rounding.

They are those of the tensors that a step does not write, or trains: what else lies there may be memory without numbers.
"""

from __future__ import annotations

import time
from typing import Any

from fp8bench.model import GivenTensors
from fp8bench.worker.state_tensors import tensors_of, version_of

# Of processor time; of a state that takes longer nothing is said.
SECONDS = 0.5
_PIECE = 1 << 20
# The largest shapes, which take the time.
_MOST = 32


class Given:
    """A state that has been prepared; a step of it follows."""

    def __init__(self, state: object) -> None:
        self._end = time.thread_time() + SECONDS
        tensors = [one for one in tensors_of(state, until=self._end) if _has_numbers(one)]
        self._before = [(one, version_of(one), sums) for one in tensors if (sums := self._sums(one))]
        self._left = self._end - time.thread_time()

    def after_step(self) -> tuple[GivenTensors, ...]:
        """Its tensors by shape, the largest first."""
        found: dict[tuple[int, ...], GivenTensors] = {}
        self._end = time.thread_time() + self._left
        for tensor, version, sums in self._before:
            trained = tensor.is_leaf and tensor.requires_grad
            if trained or (version_of(tensor) == version and self._sums(tensor) == sums):
                shape = tuple(tensor.shape)
                old = found.get(shape, GivenTensors(shape))
                total, squares, subnormals = (a + b for a, b in zip(old.sums, sums, strict=True))
                found[shape] = GivenTensors(shape, old.tensors + 1, total, squares, int(subnormals))
        late = time.thread_time() > self._end
        return () if late else tuple(sorted(found.values(), key=lambda one: -one.elements)[:_MOST])

    def _sums(self, tensor: Any) -> tuple[float, float, int] | None:
        """Of numbers, of their squares, and how many are subnormal; None where not all are finite, or time is out."""
        import torch

        total, squares, subnormals = 0.0, 0.0, 0
        for piece in tensor.detach().reshape(-1).split(_PIECE):
            if time.thread_time() > self._end:
                return None
            total += float(piece.sum(dtype=torch.float64))
            squares += float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2
            if tensor.dtype is not torch.float16:  # which no processor multiplies in
                subnormals += int(((piece.abs() < torch.finfo(piece.dtype).tiny) & (piece != 0)).sum())
        return (total, squares, subnormals) if squares < float("inf") else None


def _has_numbers(tensor: Any) -> bool:
    """Numbers of two bytes or more, and not a view that has some of them more than once."""
    wide = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and tensor.numel() > 1
    return bool(wide and tensor.numel() * tensor.dtype.itemsize <= tensor.untyped_storage().nbytes())
