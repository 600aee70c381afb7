"""The transformer block of every model in this package: a GPT, a served model, a ViT or a DiT.

    x += attention(norm(x))         in the stream's dtype, with dropout in training if configured
    x += feed_forward(norm(x))      or experts in place of the feed-forward part

| switch                 | what it changes                                                                           |
|------------------------|-------------------------------------------------------------------------------------------|
| `core`                 | whether attention is causal, and its kernel                                               |
| `config.is_llama_like` | a block like Llama's: RMS norm, gated feed-forward part, rotary positions                 |
| `config.experts`       | experts in place of one feed-forward part                                                 |
| `adaptive` (adaLN)     | time and condition shift and scale both norms, and gate both branches, as in a DiT        |
| `cache` of a pass      | attention reads keys and values from a cache, as in a served model                        |
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.around import cast_to, widen_dtype
from fp8bench.nn.attention import AttentionCore, KeyValueCache, SelfAttention
from fp8bench.nn.experts import Experts
from fp8bench.nn.linear import ChooseArithmetic, Linear, make_part_chooser, number_layer_parts
from fp8bench.nn.parts import FeedForward, Norm, apply_dropout
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Arithmetic, Phases


def build_blocks(
    config: GPTConfig, choose: ChooseArithmetic, core: AttentionCore, dropout: float = 0.0, adaptive: bool = False
) -> nn.ModuleList:
    """Builds the blocks of a model, whose layers are named `blocks.N...`."""
    arithmetic_choosers = number_layer_parts(choose, "blocks", config.layers)
    return nn.ModuleList(
        Block(config, choose_in_block, core, dropout, adaptive) for choose_in_block in arithmetic_choosers
    )


class Block(nn.Module):
    """A transformer block. `residual_arithmetic` is the arithmetic that rounds the residual stream, if any.
    `unit_scaling` is a forward pass that replaces the block's own in a unit-scaled model.
    """

    residual_arithmetic: Arithmetic | None = None
    unit_scaling: Callable[[Block, Tensor, Phases, Tensor | None], Tensor] | None = None

    def __init__(
        self,
        config: GPTConfig,
        choose: ChooseArithmetic,
        core: AttentionCore,
        dropout: float = 0.0,
        adaptive: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        # Modulation draws its weights before attention does, so that a seed gives the same weights as in older
        # versions.
        self.modulation = Modulation(config.width, 6, choose) if adaptive else None
        self.norm_attn, self.norm_mlp = (
            ModulatedNorm() if adaptive else Norm(config.width, config.is_llama_like) for _ in range(2)
        )
        # Without gates the residual stream grows with each block. So the weights that write to the stream start
        # smaller in deeper models, as in GPT-2.
        gain = 1.0 if adaptive else 1 / math.sqrt(2 * config.layers)
        self.attn = SelfAttention(
            config.width, config.heads, config.key_heads, gain, make_part_chooser(choose, "attn"), core
        )
        mlp_sizes = (config.width, config.hidden, config.is_llama_like, gain)
        choose_mlp = make_part_chooser(choose, "mlp")
        self.mlp = (
            Experts(config.experts, *mlp_sizes, choose_mlp) if config.experts else FeedForward(*mlp_sizes, choose_mlp)
        )

    def forward(
        self,
        x: Tensor,
        phase: Phases,
        rotation: Tensor | None = None,
        *,
        time: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        if self.unit_scaling is not None:
            return self.unit_scaling(self, x, phase, rotation)
        # A GPT's block has no modulation. In a DiT's block the time shifts, scales and gates both branches.
        if self.modulation is None:
            x = self.add_change(x, self.attn(self.norm_attn(x), phase, rotation, cache))
            return self.add_change(x, self.mlp(self.norm_mlp(x), phase))
        assert time is not None
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(time, phase, x.dtype)
        x = self.add_change(x, self.attn(self.norm_attn(x, shift, scale), phase), gate)
        return self.add_change(x, self.mlp(self.norm_mlp(x, shift_mlp, scale_mlp), phase), gate_mlp)

    def add_change(self, x: Tensor, change: Tensor, gate: Tensor | None = None) -> Tensor:
        change = self.convert_change(change, x.dtype)
        return cast_to(x + (change if gate is None else gate * change), self.residual_arithmetic)

    def convert_change(self, change: Tensor, dtype: torch.dtype) -> Tensor:
        """Converts `change`, a branch's output, to the dtype of the stream, and applies dropout. The branch's last
        layer may have computed it in a different dtype.
        """
        return apply_dropout(change.to(dtype), self.dropout if self.training else 0.0)


class Modulation(nn.Module):
    """Computes `count` vectors for each image, to shift, scale and gate tensors. They depend on the embedding of the
    image's time step and condition, and each is (batch, 1, width).
    """

    def __init__(self, width: int, count: int, choose: ChooseArithmetic) -> None:
        super().__init__()
        self.count = count
        self.product = Linear(width, count * width, choose("modulation"))

    def forward(self, time: Tensor, phase: Phases, dtype: torch.dtype) -> tuple[Tensor, ...]:
        modulation_vectors: Tensor = self.product(time, phase).to(dtype)[:, None]
        return modulation_vectors.chunk(self.count, dim=-1)


class ModulatedNorm(nn.Module):
    """Layer norm without weights, computed in `arithmetic`, or without one in fp32 or wider. The result is shifted and
    scaled, in the input's dtype.
    """

    arithmetic: Arithmetic | None = None

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        cast_input = cast_to(x, self.arithmetic)
        if self.arithmetic is None or not self.arithmetic.plain:
            cast_input = cast_input.to(widen_dtype(x.dtype))
        return F.layer_norm(cast_input, x.shape[-1:], eps=1e-6).to(x.dtype) * (1 + scale) + shift
