"""A decoder-only transformer in the manner of GPT-2 or Llama, its parts under their phases; with experts if asked to.

The caller chooses the arithmetic of each layer by its path in the model: `blocks.0.attn.qkv`, `blocks.0.attn.out`,
`blocks.0.mlp.up`, `blocks.0.mlp.down`, and so on to `head`. Attention scores, softmax and loss stay in high precision;
so do embedding, norms, logits and the residual stream unless `around` gives them another one. The stream has the
carrier's dtype; norms and loss are computed in fp32 (fp64 for the reference).

Also here: `take_blocks`, whole blocks by a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8bench.nn.around import cast_to, start_stream
from fp8bench.nn.attention import Core, FusedCore, recompute, rotations
from fp8bench.nn.block import Block, build_blocks
from fp8bench.nn.experts import Experts, add_balance
from fp8bench.nn.linear import Choose, Linear
from fp8bench.nn.parts import FeedForward, Norm, cross_entropy, drop
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Arithmetic, Fused, Phases, Role


class ScaledStream(Protocol):
    """The constants of unit scaling at the beginning and the end of a model's stream."""

    def begin(self, tokens: int) -> None:
        """Prepare for a batch with this number of tokens."""

    def scale_embedding(self, x: Tensor) -> Tensor: ...
    def scale_logits(self, logits: Tensor) -> Tensor: ...


class LanguageModel(nn.Module):
    """Tokens and targets in, mean loss out; with reduction 'none' the loss of each token, (batch x tokens).

    `around` has the arithmetics of what the model holds in addition to its modules; None is high precision. In
    training, `dropout` is the share of values that `drop` sets to zero.
    """

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("embedding", "logits", "residual"))
    unit: ScaledStream | None = None

    def __init__(self, config: GPTConfig, carrier: torch.dtype, dropout: float) -> None:
        super().__init__()
        self.carrier = carrier
        self.dropout = dropout
        # Learned tables begin small: the first logits are then nearly the same for all tokens.
        self.embedding = nn.Parameter(torch.randn(config.vocabulary, config.width) * 0.02)

    def drop(self, x: Tensor) -> Tensor:
        return drop(x, self.dropout if self.training else 0.0)

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases, reduction: str = "mean") -> Tensor:
        if self.unit is not None:
            self.unit.begin(tokens.numel())
        return self.loss_of(self.logits(tokens, phase), targets, reduction)

    def loss_of(self, logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        logits = cast_to(logits, self.around["logits"]) if self.unit is None else self.unit.scale_logits(logits)
        return cross_entropy(logits, targets, reduction)

    def look_up(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns the stream's first values: rows of the embedding, with the first of the positions added."""
        arithmetic = self.around["embedding"]
        x = F.embedding(tokens, cast_to(self.embedding, arithmetic, Role.WEIGHT))
        if positions is not None:
            x = x + cast_to(positions[: tokens.shape[1]], arithmetic, Role.WEIGHT)
        return start_stream(x, self.carrier, self.around["residual"])

    def logits(self, tokens: Tensor, phase: Phases) -> Tensor:
        """Logits of the token that follows each, (batch, tokens, vocabulary)."""
        raise NotImplementedError


class GPT(LanguageModel):
    """With `checkpointing` each block keeps only its input, and is computed again in backward, phases and all.

    In training, `dropout` is the share of what embedding and layers add to the stream that is dropped. With experts
    the balancing loss enters the gradients, not the value of the loss.
    """

    rotation: Tensor | None

    def __init__(
        self,
        config: GPTConfig,
        choose: Choose,
        carrier: torch.dtype,
        checkpointing: bool = False,
        core: Core | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(config, carrier, dropout)
        self.checkpointing = checkpointing
        self.positions = None if config.modern else nn.Parameter(torch.randn(config.sequence, config.width) * 0.01)
        self.blocks = build_blocks(config, choose, core or FusedCore(), dropout)
        self.norm = Norm(config.width, config.modern)
        # A tied head multiplies by the embedding itself, so that both gradients add up in one tensor.
        tied = self.embedding if config.tied else None
        self.head = Linear(config.width, config.vocabulary, choose("head"), weight=tied)
        self.register_buffer("rotation", rotations(config.sequence, config.head_width) if config.modern else None)
        self.has_experts = config.experts > 0

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases, reduction: str = "mean") -> Tensor:
        loss = LanguageModel.forward(self, tokens, targets, phase, reduction)
        if not self.has_experts:
            return loss
        experts = [block.mlp for block in self.blocks if isinstance(block.mlp, Experts)]
        return add_balance(loss, experts, self.training and reduction == "mean")

    def logits(self, tokens: Tensor, phase: Phases) -> Tensor:
        return self.read_logits(self.run_blocks(self.embed(tokens), phase, tokens.shape[1]), phase)

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.look_up(tokens, self.positions)
        return self.drop(x if self.unit is None else self.unit.scale_embedding(x))

    def run_blocks(self, x: Tensor, phase: Phases, length: int) -> Tensor:
        rotation = None if self.rotation is None else self.rotation[:length].to(self.carrier)
        # Recomputing without a record suits references; it forgets dropout's random states and what experts balance by.
        recomputes = self.checkpointing and self.carrier is torch.float64 and not (self.dropout or self.has_experts)
        for block in self.blocks:
            if recomputes:
                x = recompute(partial(block, phase=phase, rotation=rotation), x)
            elif self.checkpointing:
                # Random states need be kept only for dropout.
                x = checkpoint(block, x, phase, rotation, use_reentrant=False, preserve_rng_state=self.dropout > 0)
            else:
                x = block(x, phase, rotation)
        return x

    def read_logits(self, x: Tensor, phase: Phases) -> Tensor:
        return self.head(self.norm(x), phase)


def take_blocks(model: GPT, heads: int) -> None:
    """Let a backend compute each block as one layer, where it can."""
    for block in model.blocks:
        assert isinstance(block, Block) and isinstance(block.mlp, FeedForward)
        assert isinstance(block.norm_attn, Norm) and isinstance(block.norm_mlp, Norm)
        weights = (block.attn.qkv.weight, block.attn.out.weight, block.mlp.up.weight, block.mlp.down.weight)
        norms = (block.norm_attn.weight, block.norm_mlp.weight)
        layer = block.attn.qkv.arithmetic.fuse(Fused(norms, weights, heads=heads))
        if layer is not None:
            vars(block)["forward"] = lambda x, phase, rotation, layer=layer: layer(x)


def blocks_are_taken(model: GPT) -> bool:
    return any("forward" in vars(block) for block in model.blocks)
