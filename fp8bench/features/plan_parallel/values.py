"""What is known of a training on many GPUs before it runs: the model, how it is cut, and what joins the GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Checkpointing(StrEnum):
    """What backward computes again: nothing, every other product of a block, or all of it."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True)
class Transformer:
    """A dense decoder in Llama's manner (three products a feed-forward block) or, not `gated`, in GPT's (two)."""

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    gated: bool = True

    @property
    def key_width(self) -> int:
        """Features of all keys, or of all values."""
        return self.width * self.key_heads // self.heads

    @property
    def block_products(self) -> int:
        """Weights of the linear layers of a block."""
        return self.width * (2 * self.width + 2 * self.key_width + (3 if self.gated else 2) * self.hidden)

    @property
    def block(self) -> int:
        """Those, and its norms'."""
        return self.block_products + 2 * self.width

    @property
    def ends(self) -> int:
        """Weights of the embedding, and as many of the head."""
        return self.vocabulary * self.width

    @property
    def weights(self) -> int:
        return self.layers * self.block + 2 * self.ends + self.width

    def token_flops(self, sequence: int) -> float:
        """Forward and backward: 6 a weight, the embedding left out, and the half of attention that is not masked."""
        return 6.0 * (self.weights - self.ends) + self.attention_flops(sequence)

    def attention_flops(self, sequence: int) -> float:
        """Of a token's scores and their product with the values, in all layers."""
        return 6.0 * self.layers * self.width * sequence


@dataclass(frozen=True)
class Layout:
    """How many ways a training is cut: whole copies, copies whose states are sharded, and within a copy.

    `copies` have all states each (DDP), `shards` share them (FSDP, ZeRO-3). `tensor` cuts every layer, and activations
    between products along the sequence; `pipeline` cuts the layers, into `virtual` stages a GPU; `context` cuts the
    sequence.
    """

    copies: int = 1
    shards: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    virtual: int = 1

    @property
    def gpus(self) -> int:
        return self.copies * self.shards * self.inner

    @property
    def inner(self) -> int:
        """GPUs that work on the same sequences."""
        return self.tensor * self.pipeline * self.context

    @property
    def words(self) -> str:
        """'FSDP 8, TP 4'; 'one GPU'."""
        parts = (("DDP", self.copies), ("FSDP", self.shards), ("TP", self.tensor), ("PP", self.pipeline),
                 ("CP", self.context), ("VP", self.virtual))  # fmt: skip
        return ", ".join(f"{name} {count}" for name, count in parts if count > 1) or "one GPU"


@dataclass(frozen=True)
class Load:
    """What a step of it is: `local` sequences for the GPUs that work on the same ones, in `micro_batches`.

    `narrow_gather`: FSDP gathers weights in FP8. `hidden_tensor`: half of what TP sends hides behind its products
    (async TP). `fused_loss`: the loss is compiled, so that nothing of it is written in fp32.
    """

    sequence: int
    local: int
    micro_batches: int = 1
    checkpointing: Checkpointing = Checkpointing.NONE
    precision: str = "bf16"
    compiled: bool = True
    narrow_gather: bool = False
    hidden_tensor: bool = False
    fused_loss: bool = False


@dataclass(frozen=True)
class Topology:
    """GPUs and what joins them: bytes a second that each sends within a node and beyond it, bytes of memory.

    `bf16` and `fp8` are FLOPs a second that products reach, not those of a datasheet.
    """

    node: int
    memory: float
    inside: float
    between: float
    bf16: float
    fp8: float

    def link(self, gpus: int) -> float:
        """What joins so many neighbours."""
        return self.inside if gpus <= self.node else self.between
