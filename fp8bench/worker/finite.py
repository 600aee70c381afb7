"""Tests whether a state's numbers are still finite after its steps: other numbers may take another time.

Infinities and NaNs may exist from the start: attention masks hold -inf, and uninitialized memory may hold anything. So
an element counts as lost only if it was finite when the state had been prepared, or if its tensor was made by a step.
Three kinds of tensors that steps made are exempt: one made before the first timed step and not written again is an
input; -inf next to finite numbers is a mask, or masked scores; and if a prepared tensor held -inf, a mask may move, so
that more -inf may appear.

Tensors that cannot be read within SECONDS are not judged.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from fp8bench.worker.state_tensors import View, tensors_of, version_of, view_of

# CPU time for reading a whole state once.
SECONDS = 0.5
# How many elements are converted at a time.
_PIECE = 1 << 22


class Lost(NamedTuple):
    """Counts checked elements that are not finite; `where` describes the first tensor that has some."""

    lost: int = 0
    looked: int = 0
    where: str = ""

    @property
    def share(self) -> float:
        return self.lost / self.looked if self.looked else 0.0

    def __str__(self) -> str:
        if not self.lost:
            return ""
        return f"its state is not finite: {self.lost} of {self.looked} numbers, the first in {self.where}"


class _NotFiniteBefore(NamedTuple):
    strange: Any
    masks: bool


class FiniteState:
    """Remembers a prepared state, to detect what its steps have spoiled."""

    def __init__(self, state: object) -> None:
        self._prepared: dict[View, _NotFiniteBefore | None] = {}
        self._made: dict[View, int] = {}
        # False if time ran out: then an unknown tensor may have existed before.
        self._whole = True
        for tensor in self._looked_at(state):
            strange = _not_finite(tensor)
            masks = strange is not None and bool(_below_all(tensor).any())
            self._prepared[view_of(tensor)] = None if strange is None else _NotFiniteBefore(strange, masks)

    @property
    def inputs(self) -> set[int]:
        return {view[0] for view in self._prepared}

    def begin(self, state: object) -> None:
        """Marks the start of timed steps: what was made until now, and is not written again, is an input."""
        for tensor in self._looked_at(state):
            if (view := view_of(tensor)) not in self._prepared and _not_finite(tensor) is not None:
                self._made[view] = version_of(tensor)

    def lost(self, state: object) -> Lost:
        count, looked, where = 0, 0, ""
        read_all = self._whole
        for tensor in self._looked_at(state):
            if view_of(tensor) not in self._prepared and not read_all:
                continue
            looked += tensor.numel()
            number = self._lost_of(tensor)
            if number and not where:
                shape = " x ".join(map(str, tensor.shape)) or "one number"
                where = f"a tensor of {shape} ({str(tensor.dtype).removeprefix('torch.')})"
            count += number
        return Lost(count, looked, where)

    def _looked_at(self, state: object) -> Iterator[Any]:
        end = time.thread_time() + SECONDS
        for tensor in _numbers_of(state, end):
            if time.thread_time() > end:
                break
            yield tensor
        self._whole = self._whole and time.thread_time() <= end

    def _lost_of(self, tensor: Any) -> int:
        strange = _not_finite(tensor)
        if strange is None:
            return 0
        view = view_of(tensor)
        if view not in self._prepared:
            is_input = self._made.get(view) == version_of(tensor)
            is_mask = bool((_below_all(tensor) == strange).all()) and not bool(strange.all())
            return 0 if is_input or is_mask else int(strange.sum())
        prepared = self._prepared[view]
        if prepared is not None:
            strange = strange & ~prepared.strange
            if prepared.masks:
                strange = strange & ~_below_all(tensor)
        return int(strange.sum())


def _numbers_of(state: object, until: float) -> Iterator[Any]:
    import torch

    for tensor in tensors_of(state, until=until):
        dtype = tensor.dtype
        if dtype.is_complex and not tensor.is_conj():
            yield torch.view_as_real(tensor.detach())
        elif dtype.is_floating_point and tensor.numel() and (dtype.itemsize > 1 or converts(dtype)):
            yield tensor.detach()


@functools.cache
def converts(dtype: Any) -> bool:
    """Whether torch can convert single elements of a dtype; packed pairs it cannot."""
    import torch

    try:
        return torch.empty(1, dtype=dtype).to(torch.float32).numel() == 1
    except NotImplementedError:
        return False


def _not_finite(tensor: Any) -> Any:
    """Returns a mask of the elements that are not finite, None if all are. It computes the smallest and largest first,
    which takes a fiftieth of the time."""
    import torch

    if tensor.dtype.itemsize > 1:
        ends = torch.stack(torch.aminmax(tensor))
        return None if bool(ends.isfinite().all()) else ~tensor.isfinite()
    # torch has no arithmetic for one-byte dtypes, so pieces are converted one by one.
    pieces = [~piece.to(torch.float32).isfinite() for piece in tensor.reshape(-1).split(_PIECE)]
    return torch.cat(pieces).reshape(tensor.shape) if any(bool(piece.any()) for piece in pieces) else None


def _below_all(tensor: Any) -> Any:
    import torch

    return (tensor if tensor.dtype.itemsize > 1 else tensor.to(torch.float32)) == float("-inf")
