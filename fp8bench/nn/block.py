"""The transformer block of every model here. Switches choose its form; a GPT, a served model, a ViT and a DiT have one.

    x += attention(norm(x))         in the stream's dtype, each change dropped out in training if asked to
    x += feed_forward(norm(x))      or experts in its place

| switch               | what it changes                                                                           |
|----------------------|-------------------------------------------------------------------------------------------|
| `core`               | causal attention or not, and by which kernel                                              |
| `config.modern`      | Llama's manner: RMS norm, gated feed-forward part, rotary positions                       |
| `config.experts`     | experts in place of one feed-forward part                                                 |
| `adaptive` (adaLN)   | time and condition shift and scale both norms, and gate both changes, as in a DiT         |
| `cache` of a pass    | attention reads keys and values as a cache keeps them, as in a served model               |
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.around import cast_to, wide_dtype
from fp8bench.nn.attention import Cache, Core, SelfAttention
from fp8bench.nn.experts import Experts
from fp8bench.nn.linear import Choose, Linear, prefix_names
from fp8bench.nn.parts import FeedForward, Norm, drop
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Arithmetic, Phases


def build_blocks(
    config: GPTConfig, choose: Choose, core: Core, dropout: float = 0.0, adaptive: bool = False
) -> nn.ModuleList:
    """Build the blocks of a model, whose layers are named `blocks.N...`."""
    scopes = [prefix_names(choose, f"blocks.{number}") for number in range(config.layers)]
    return nn.ModuleList(Block(config, scope, core, dropout, adaptive) for scope in scopes)


class Block(nn.Module):
    """See the module. `residual` rounds the stream; `unit` replaces the pass of a unit-scaled block."""

    residual: Arithmetic | None = None
    unit: Callable[[Block, Tensor, Phases, Tensor | None], Tensor] | None = None

    def __init__(
        self, config: GPTConfig, choose: Choose, core: Core, dropout: float = 0.0, adaptive: bool = False
    ) -> None:
        super().__init__()
        self.dropout = dropout
        # Modulation draws its weights before attention does: seeds give the weights that they always gave.
        self.modulation = Modulation(config.width, 6, choose) if adaptive else None
        self.norm_attn, self.norm_mlp = (
            ModulatedNorm() if adaptive else Norm(config.width, config.modern) for _ in range(2)
        )
        # Without gates the residual stream grows with each block, so later weights begin smaller, as in GPT-2.
        gain = 1.0 if adaptive else 1 / math.sqrt(2 * config.layers)
        self.attn = SelfAttention(
            config.width, config.heads, config.key_heads, gain, prefix_names(choose, "attn"), core
        )
        feed = (config.width, config.hidden, config.modern, gain)
        mlp = prefix_names(choose, "mlp")
        self.mlp = Experts(config.experts, *feed, mlp) if config.experts else FeedForward(*feed, mlp)

    def forward(
        self,
        x: Tensor,
        phase: Phases,
        rotation: Tensor | None = None,
        *,
        time: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        if self.unit is not None:
            return self.unit(self, x, phase, rotation)
        # Without modulation it is a GPT's block; with it the time shifts, scales and gates both branches.
        if self.modulation is None:
            x = self.add(x, self.attn(self.norm_attn(x), phase, rotation, cache))
            return self.add(x, self.mlp(self.norm_mlp(x), phase))
        assert time is not None
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(time, phase, x.dtype)
        x = self.add(x, self.attn(self.norm_attn(x, shift, scale), phase), gate)
        return self.add(x, self.mlp(self.norm_mlp(x, shift_mlp, scale_mlp), phase), gate_mlp)

    def add(self, x: Tensor, change: Tensor, gate: Tensor | None = None) -> Tensor:
        change = self.in_stream(change, x.dtype)
        return cast_to(x + (change if gate is None else gate * change), self.residual)

    def in_stream(self, change: Tensor, dtype: torch.dtype) -> Tensor:
        """Converts a change to the stream's dtype: the layer that made it may have a different carrier."""
        return drop(change.to(dtype), self.dropout if self.training else 0.0)


class Modulation(nn.Module):
    """`count` vectors from an image's time and condition, each (batch, 1, width)."""

    def __init__(self, width: int, count: int, choose: Choose) -> None:
        super().__init__()
        self.count = count
        self.product = Linear(width, count * width, choose("modulation"))

    def forward(self, time: Tensor, phase: Phases, dtype: torch.dtype) -> tuple[Tensor, ...]:
        vectors: Tensor = self.product(time, phase).to(dtype)[:, None]
        return vectors.chunk(self.count, dim=-1)


class ModulatedNorm(nn.Module):
    """Layer norm without weights in at least fp32, or in its arithmetic, then shifted and scaled in the input's
    dtype."""

    arithmetic: Arithmetic | None = None

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        wide = cast_to(x, self.arithmetic)
        if self.arithmetic is None or not self.arithmetic.plain:
            wide = wide.to(wide_dtype(x.dtype))
        return F.layer_norm(wide, x.shape[-1:], eps=1e-6).to(x.dtype) * (1 + scale) + shift
