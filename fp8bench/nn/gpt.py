"""A decoder-only transformer like GPT-2 or Llama, which marks the phases of its parts. It has experts if its config
has experts.

The caller chooses each layer's arithmetic by its path in the model: `blocks.0.attn.qkv`, `blocks.0.attn.out`,
`blocks.0.mlp.up`, `blocks.0.mlp.down` and so on to `head`. Attention scores, softmax and loss stay in high precision.
Embedding, norms, logits and the residual stream stay in high precision too, unless `around` gives them another
arithmetic. The stream has the carrier's dtype. Norms and loss are computed in fp32, or in fp64 for the reference.

`fuse_gpt_blocks` replaces whole blocks by a backend's layers.
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
from fp8bench.nn.attention import AttentionCore, FusedCore, make_rotary_table, recompute
from fp8bench.nn.block import Block, build_blocks
from fp8bench.nn.experts import Experts, attach_balancing_loss
from fp8bench.nn.linear import ChooseArithmetic, Linear
from fp8bench.nn.parts import FeedForward, Norm, apply_dropout, cross_entropy
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Arithmetic, Fused, Phases, Role


class ResidualStreamScaling(Protocol):
    """The constants that unit scaling applies at the start and the end of a model's residual stream."""

    def set_token_count(self, tokens: int) -> None:
        """Sets the number of tokens in the next batch, on which the scale of the loss gradient depends."""

    def scale_embedding(self, x: Tensor) -> Tensor: ...
    def scale_logits(self, logits: Tensor) -> Tensor: ...


class LanguageModel(nn.Module):
    """Maps tokens and targets to the mean loss. With reduction 'none' it returns the loss of each token (batch x
    tokens).

    `around` has the arithmetic of the embedding, the logits and the residual sums, which are not modules. None means
    high precision. `dropout` is the fraction of values that training sets to zero.
    """

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("embedding", "logits", "residual"))
    unit_scaling: ResidualStreamScaling | None = None

    def __init__(self, config: GPTConfig, carrier: torch.dtype, dropout: float) -> None:
        super().__init__()
        self.carrier = carrier
        self.dropout = dropout
        # Embeddings start small, so that the first logits are nearly the same for all tokens.
        self.embedding = nn.Parameter(torch.randn(config.vocabulary, config.width) * 0.02)

    def apply_dropout(self, x: Tensor) -> Tensor:
        return apply_dropout(x, self.dropout if self.training else 0.0)

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases, reduction: str = "mean") -> Tensor:
        if self.unit_scaling is not None:
            self.unit_scaling.set_token_count(tokens.numel())
        return self.compute_loss(self.logits(tokens, phase), targets, reduction)

    def compute_loss(self, logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        logits = (
            cast_to(logits, self.around["logits"])
            if self.unit_scaling is None
            else self.unit_scaling.scale_logits(logits)
        )
        return cross_entropy(logits, targets, reduction)

    def look_up_embedding(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns the start of the residual stream: the rows of the embedding for these tokens. If `positions` are
        given, each token's position is added.
        """
        arithmetic = self.around["embedding"]
        x = F.embedding(tokens, cast_to(self.embedding, arithmetic, Role.WEIGHT))
        if positions is not None:
            x = x + cast_to(positions[: tokens.shape[1]], arithmetic, Role.WEIGHT)
        return start_stream(x, self.carrier, self.around["residual"])

    def logits(self, tokens: Tensor, phase: Phases) -> Tensor:
        """Returns the logits of each next token, as (batch, tokens, vocabulary)."""
        raise NotImplementedError


class GPT(LanguageModel):
    """A GPT. With `checkpointing` each block keeps only its input. Backward then computes the block again, and marks
    its phases again.

    `core` computes attention from queries, keys and values, by default with torch's scaled dot-product attention.
    Dropout applies to the embedding, and to each layer's output before it is added to the stream. Experts have a
    balancing loss, which changes the gradients but not the value of the loss.
    """

    rotation: Tensor | None

    def __init__(
        self,
        config: GPTConfig,
        choose: ChooseArithmetic,
        carrier: torch.dtype,
        checkpointing: bool = False,
        core: AttentionCore | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(config, carrier, dropout)
        self.checkpointing = checkpointing
        self.positions = (
            None if config.is_llama_like else nn.Parameter(torch.randn(config.sequence, config.width) * 0.01)
        )
        self.blocks = build_blocks(config, choose, core or FusedCore(), dropout)
        self.norm = Norm(config.width, config.is_llama_like)
        # A tied head multiplies by the embedding itself, so that both gradients are summed in one tensor.
        tied_weight = self.embedding if config.tied else None
        self.head = Linear(config.width, config.vocabulary, choose("head"), weight=tied_weight)
        self.register_buffer(
            "rotation", make_rotary_table(config.sequence, config.head_width) if config.is_llama_like else None
        )
        self.has_experts = config.experts > 0

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases, reduction: str = "mean") -> Tensor:
        loss = LanguageModel.forward(self, tokens, targets, phase, reduction)
        if not self.has_experts:
            return loss
        expert_layers = [block.mlp for block in self.blocks if isinstance(block.mlp, Experts)]
        return attach_balancing_loss(loss, expert_layers, self.training and reduction == "mean")

    def logits(self, tokens: Tensor, phase: Phases) -> Tensor:
        return self.read_logits(self.run_blocks(self.embed_tokens(tokens), phase, tokens.shape[1]), phase)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        x = self.look_up_embedding(tokens, self.positions)
        return self.apply_dropout(x if self.unit_scaling is None else self.unit_scaling.scale_embedding(x))

    def run_blocks(self, x: Tensor, phase: Phases, length: int) -> Tensor:
        rotary_table_rows = None if self.rotation is None else self.rotation[:length].to(self.carrier)
        # `checkpoint` imports torch's compiler, so fp64 references use `recompute` instead. However, `recompute`
        # restores neither dropout's random states nor the experts' balancing losses.
        recomputes = self.checkpointing and self.carrier is torch.float64 and not (self.dropout or self.has_experts)
        for block in self.blocks:
            if recomputes:
                x = recompute(partial(block, phase=phase, rotation=rotary_table_rows), x)
            elif self.checkpointing:
                # Random states must be restored only for dropout.
                x = checkpoint(
                    block, x, phase, rotary_table_rows, use_reentrant=False, preserve_rng_state=self.dropout > 0
                )
            else:
                x = block(x, phase, rotary_table_rows)
        return x

    def read_logits(self, x: Tensor, phase: Phases) -> Tensor:
        return self.head(self.norm(x), phase)


def fuse_gpt_blocks(model: GPT, heads: int) -> None:
    """Lets a backend compute each block as one layer, if the backend has such a layer."""
    for block in model.blocks:
        assert isinstance(block, Block)
        _fuse_block(block, heads)


def _fuse_block(block: Block, heads: int) -> None:
    assert isinstance(block.mlp, FeedForward)
    assert isinstance(block.norm_attn, Norm) and isinstance(block.norm_mlp, Norm)
    weights = (block.attn.qkv.weight, block.attn.out.weight, block.mlp.up.weight, block.mlp.down.weight)
    norms = (block.norm_attn.weight, block.norm_mlp.weight)
    # All layers of a fused block have the same arithmetic, because precision maps cannot divide the block.
    layer = block.attn.qkv.arithmetic.fuse(Fused(norms, weights, heads=heads))
    if layer is None:
        return

    # The backend's layer needs neither phases nor a rotary table.
    def forward(x: Tensor, phase: Phases, rotation: Tensor | None) -> Tensor:
        return layer(x)

    vars(block)["forward"] = forward


def has_fused_blocks(model: GPT) -> bool:
    return any("forward" in vars(block) for block in model.blocks)
