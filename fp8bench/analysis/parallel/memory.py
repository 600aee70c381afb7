"""Bytes that a GPU holds at the highest point of a training step, by what they are for.

Weights, gradients and two moments in fp32 are 16 bytes a weight, sharded by FSDP; products read bf16 copies. FP8 saves
none of it: its codes last as long as a product. Activations are bf16, cut by TP along the sequence between products.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model.parallel import Checkpointing, Layout, Load, Transformer

STATES = 16
_BF16, _FP32 = 2, 4
# Of a number that the head gives: bf16, fp32 with its logarithms' and their gradient; eagerly one copy more; by a
# compiled loss itself and its gradient, both bf16.
_LOGIT, _EAGER_LOGIT, _FUSED_LOGIT = 12, 16, 4


@dataclass(frozen=True)
class Memory:
    """`gathered` are weights and gradients that are not sharded, `kept` activations for backward, `block` those of the
    block at work, `logits` what the head and the loss take."""

    states: float
    gathered: float
    kept: float
    block: float
    logits: float

    @property
    def total(self) -> float:
        return self.states + self.gathered + self.kept + self.block + self.logits


def memory_of(model: Transformer, layout: Layout, load: Load) -> Memory:
    """Of the GPU that holds most: in a pipeline the first one's activations, and the last one's logits."""
    tokens = load.sequence * load.local / load.micro_batches / layout.context
    layers = -(-model.layers // layout.pipeline)
    stage = (layers * model.block + model.ends * (2 if layout.pipeline == 1 else 1)) / layout.tensor
    in_flight = min(layout.pipeline, load.micro_batches)
    return Memory(
        states=STATES * stage / (layout.shards * layout.context),
        gathered=_gathered(model, layout, stage),
        kept=_kept(model, load) * tokens * layers * in_flight / layout.tensor,
        block=_block(model, layout) * tokens,
        logits=_logit(load) * tokens * model.vocabulary / layout.tensor,
    )


def _logit(load: Load) -> int:
    if load.fused_loss:
        return _FUSED_LOGIT
    return _LOGIT if load.compiled else _EAGER_LOGIT


def _gathered(model: Transformer, layout: Layout, stage: float) -> float:
    if layout.pipeline > 1:  # nothing is sharded again between micro-batches, gradients are summed in fp32
        return (_BF16 + _FP32) * stage
    if layout.shards * layout.context == 1:
        return _BF16 * stage
    # Two blocks, one ahead of its time; the head; the gradients of one block, in bf16 and as they are sent.
    return (2 * _BF16 * model.block + _BF16 * model.ends + (_BF16 + _FP32) * model.block) / layout.tensor


def _kept(model: Transformer, load: Load) -> float:
    """Bytes of a token in one layer."""
    width, keys, hidden = model.width, model.key_width, model.hidden
    if load.checkpointing is Checkpointing.FULL:
        return _BF16 * width
    if load.checkpointing is Checkpointing.SELECTIVE:  # its input, every other product, and attention's output
        return _BF16 * (4 * width + keys + hidden * (1 if model.gated else 0.5))
    return _BF16 * (8 * width + 2 * keys + (4 if model.gated else 2) * hidden)


def _block(model: Transformer, layout: Layout) -> float:
    """Bytes of a token while a block is computed again: all that it makes, two gradients of its widest part, and with
    TP its inputs as they are gathered, forward and backward."""
    width, keys, hidden = model.width, model.key_width, model.hidden
    own = _BF16 * (8 * width + 4 * keys + (6 if model.gated else 4) * hidden) / layout.tensor
    return own + (4 * _BF16 * width * (layout.tensor - 1) / layout.tensor)
