"""Delayed scaling: a tensor's scale comes from the largest magnitudes of its earlier casts.

The host reads none of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8bench.formats.grids import Format
from fp8bench.formats.recipes import Amax, Delayed
from fp8bench.formats.scales import float_factor
from fp8bench.formats.scalings import ScaleRounding


class DelayedScale:
    """The scale of one role's tensor in one layer, and the history that it comes from.

    As in Transformer Engine a cast takes the scale that stands, then enters its own largest magnitude. The scale starts
    at 1; a history of zeros leaves it as it is, and so does a cast with infinities or NaN, which enters a 0.
    """

    def __init__(self, delayed: Delayed, fmt: Format) -> None:
        self._delayed = delayed
        self._fmt = fmt
        self._casts = 0
        self._scale: Tensor | None = None
        self._history: Tensor | None = None
        self._used: Tensor | None = None

    @property
    def scale(self) -> Tensor | None:
        """What the next cast will be multiplied by, float32 on the device; None before the first."""
        return self._scale

    @property
    def history(self) -> Tensor | None:
        """Largest magnitudes, a ring that is filled from its front; None before the first cast."""
        return self._history

    def next(self, x: Tensor, again: bool = False) -> Tensor:
        """The scale for a cast of `x`, a float32 tensor without dimensions on its device.

        `again`: the cast before is done once more (a block is computed again in backward). It gets the scale that it
        had, and is not entered twice.
        """
        if again and self._used is not None:
            return self._used
        if self._scale is None or self._history is None:
            self._scale = torch.ones((), dtype=torch.float32, device=x.device)
            self._history = torch.zeros(self._delayed.history, dtype=torch.float32, device=x.device)
        self._used = self._scale
        self._enter(largest_magnitude(x), self._scale, self._history)
        return self._used

    def _enter(self, amax: Tensor, scale: Tensor, history: Tensor) -> None:
        entry = torch.where(amax.isfinite(), amax, 0.0)
        history[self._casts % len(history)] = entry
        self._casts += 1
        if self._casts % self._delayed.interval:
            return
        found = history.amax() if self._delayed.algorithm is Amax.MAX else entry
        wanted = float_factor(found, self._fmt, ScaleRounding.EXACT) / 2.0**self._delayed.margin
        self._scale = torch.where(amax.isfinite() & (found > 0), wanted, scale)


def backward_is_running() -> bool:
    """Whether this thread is inside autograd's backward, where a forward pass is one that is computed again.

    Never while a graph is compiled, whose backward is traced apart.
    """
    return not torch.compiler.is_compiling() and bool(torch._C._current_graph_task_id() != -1)


def largest_magnitude(x: Tensor) -> Tensor:
    """As float32 on its device; 0 for a tensor without elements, NaN where one is among them."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    # aminmax reads the tensor once and allocates nothing of its size; abs().amax() is 12 times slower on a CPU.
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).to(torch.float32)
