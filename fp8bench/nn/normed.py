"""A feed-forward block behind a norm, of which a backend may take more than a product into one layer."""

from __future__ import annotations

from torch import Tensor, nn

from fp8bench.nn.gpt import FeedForward, Norm, gelu, silu_gate
from fp8bench.nn.linear import Choose, region
from fp8bench.protocols import Fused, Phases


class NormedFeedForward(nn.Module):
    """RMS norm, up, activation, down: the norm and up one layer, or `whole` all of it, where the arithmetic has such.

    Elsewhere these are operations one after the other.
    """

    def __init__(self, width: int, hidden: int, gated: bool, choose: Choose, whole: bool) -> None:
        super().__init__()
        self.norm = Norm(width, root_mean_square=True)
        self.block = FeedForward(width, hidden, gated, 1.0, choose)
        up, down = self.block.up, self.block.down
        weights = (up.weight, down.weight) if whole else (up.weight,)
        self._whole = whole
        self._fused = up.arithmetic.fused(Fused(self.norm.weight, weights, gated))

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        if self._fused is None:
            normed: Tensor = self.block(self.norm(x), phase)
            return normed
        found = region(phase.gemm, self._fused, x)
        if self._whole:
            return found
        hidden = silu_gate(*found.chunk(2, dim=-1)) if self.block.gated else gelu(found)
        y: Tensor = self.block.down(hidden, phase)
        return y
