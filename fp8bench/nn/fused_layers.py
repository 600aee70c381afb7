"""What a backend may take into one layer: a norm with the product behind it, a feed-forward block, a whole block."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fp8bench.nn.gpt import GPT, Block, FeedForward, Norm, gelu, silu_gate
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
        self._fused = up.arithmetic.fused(Fused((self.norm.weight,), weights, gated))

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


def take_blocks(model: GPT, heads: int) -> None:
    """Have every block of a model in GPT-2's manner be one layer, where its arithmetic has such a layer."""
    for block in model.blocks:
        assert isinstance(block, Block) and isinstance(block.mlp, FeedForward)
        weights = (block.attn.qkv.weight, block.attn.out.weight, block.mlp.up.weight, block.mlp.down.weight)
        norms = (block.norm_attn.weight, block.norm_mlp.weight)
        taken = block.attn.qkv.arithmetic.fused(Fused(norms, weights, heads=heads))
        if taken is not None:
            vars(block)["forward"] = _called(taken)


def blocks_are_taken(model: GPT) -> bool:
    """Whether its blocks are layers that mark no phase."""
    return any("forward" in vars(block) for block in model.blocks)


def _called(layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Phases, Tensor | None], Tensor]:
    return lambda x, phase, rotation: layer(x)
