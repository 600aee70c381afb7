"""A training on many GPUs before it runs: the model, how it is cut, what joins the GPUs; what it takes, by formulas.

Weights, gradients and two moments in fp32 are 16 bytes a weight, sharded by FSDP; products read bf16 copies. FP8
products save none of it: their codes last as long as a product. What FP8-LM keeps does: 6 bytes a weight, and copies of
one byte. Activations are bf16, cut by TP along the sequence between products.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Checkpointing(StrEnum):
    """What backward computes again: nothing, every other product of a block, or all of it."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True)
class DecoderModel:
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
class ParallelLayout:
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
        parts = (("DDP", self.copies), ("FSDP", self.shards), ("TP", self.tensor), ("PP", self.pipeline),
                 ("CP", self.context), ("VP", self.virtual))  # fmt: skip
        return ", ".join(f"{name} {count}" for name, count in parts if count > 1) or "one GPU"


@dataclass(frozen=True)
class Load:
    """What a step of it is: `local` sequences for the GPUs that work on the same ones, in `micro_batches`.

    `narrow_gather`: FSDP gathers weights in FP8. `hidden_tensor`: half of what TP sends hides behind its products
    (async TP). `fused_loss`: the loss is compiled, so that nothing of it is written in fp32. `states` is one of STATES.
    `rlhf`: three more models as large lie in memory: a critic, which is trained too, a reference and a reward model.
    `zero_one`: copies keep weights and gradients whole, and share out what the optimizer keeps (ZeRO-1).
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
    states: str = "fp32"
    rlhf: bool = False
    zero_one: bool = False

    @property
    def kept(self) -> KeptStates:
        return STATES[self.states]


@dataclass(frozen=True)
class KeptStates:
    """Bytes that a training keeps of each weight: what is updated, its gradient, both moments; those of the copy that
    products read, as it is sent and as it lies in memory: Hopper multiplies FP8 codes in one orientation alone."""

    weight: int
    gradient: int
    first: int
    second: int
    copy: int
    lying: int

    @property
    def optimizer(self) -> int:
        return self.weight + self.first + self.second

    @property
    def total(self) -> int:
        return self.optimizer + self.gradient


# FP8-LM (arXiv 2310.18313): fp16 master weights, FP8 gradients and first moments, fp16 second moments, each tensor with
# one scale; weights and gradients travel in FP8.
STATES = {"fp32": KeptStates(4, 4, 4, 4, copy=2, lying=2), "fp8-lm": KeptStates(2, 1, 1, 2, copy=1, lying=2)}


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
        return self.inside if gpus <= self.node else self.between


_BF16, _FP8 = 2, 1
# A reference and a reward model, of which only what products read is kept.
_FROZEN = 2
# Of a number that the head gives: bf16, fp32 with its logarithms' and their gradient; eagerly one copy more; by a
# compiled loss itself and its gradient, both bf16.
_LOGIT, _EAGER_LOGIT, _FUSED_LOGIT = 12, 16, 4


@dataclass(frozen=True)
class GpuMemory:
    """`gathered` are weights and gradients that are not sharded, `kept` activations for backward, `block` those of the
    block at work, `logits` what the head and the loss take; `critic` and `frozen` what other models of RLHF keep."""

    states: float
    gathered: float
    kept: float
    block: float
    logits: float
    critic: float = 0.0
    frozen: float = 0.0

    @property
    def total(self) -> float:
        return self.states + self.gathered + self.kept + self.block + self.logits + self.critic + self.frozen


def memory_of(model: DecoderModel, layout: ParallelLayout, load: Load) -> GpuMemory:
    """Of the GPU that holds most: in a pipeline the first one's activations, and the last one's logits."""
    tokens = load.sequence * load.local / load.micro_batches / layout.context
    layers = -(-model.layers // layout.pipeline)
    stage = (layers * model.block + model.ends * (2 if layout.pipeline == 1 else 1)) / layout.tensor
    in_flight = min(layout.pipeline, load.micro_batches)
    ranks, shared = layout.shards * layout.context, load.zero_one and layout.copies > 1
    gathered = load.kept.lying * stage if shared and ranks == 1 else _gathered(model, layout, load.kept, stage)
    optimizer = load.kept.optimizer / (layout.copies if shared else 1)
    states = (load.kept.gradient + optimizer) * stage / ranks
    stays = gathered if layout.pipeline > 1 or ranks == 1 else 0.0  # else one model is gathered at a time
    logit = _FUSED_LOGIT if load.fused_loss else _LOGIT if load.compiled else _EAGER_LOGIT
    return GpuMemory(
        states=states,
        gathered=gathered,
        kept=_kept(model, load) * tokens * layers * in_flight / layout.tensor,
        block=_block(model, layout) * tokens,
        logits=logit * tokens * model.vocabulary / layout.tensor,
        critic=(states + stays) * load.rlhf,
        frozen=_FROZEN * load.kept.copy * stage / ranks * load.rlhf,
    )


def _gathered(model: DecoderModel, layout: ParallelLayout, kept: KeptStates, stage: float) -> float:
    if layout.pipeline > 1:  # nothing is sharded again between micro-batches, gradients are summed as they are kept
        return (kept.lying + kept.gradient) * stage
    if layout.shards * layout.context == 1:
        return kept.lying * stage
    # Two blocks, one ahead of its time; the head; the gradients of one block, in bf16 and as they are sent.
    return (2 * kept.lying * model.block + _BF16 * model.ends + (_BF16 + kept.gradient) * model.block) / layout.tensor


def _kept(model: DecoderModel, load: Load) -> float:
    """Bytes of a token in one layer."""
    width, keys, hidden = model.width, model.key_width, model.hidden
    if load.checkpointing is Checkpointing.FULL:
        return _BF16 * width
    if load.checkpointing is Checkpointing.SELECTIVE:  # its input, every other product, and attention's output
        return _BF16 * (4 * width + keys + hidden * (1 if model.gated else 0.5))
    return _BF16 * (8 * width + 2 * keys + (4 if model.gated else 2) * hidden)


def _block(model: DecoderModel, layout: ParallelLayout) -> float:
    """Bytes of a token while a block is computed again: all that it makes, two gradients of its widest part, and with
    TP its inputs as they are gathered, forward and backward."""
    width, keys, hidden = model.width, model.key_width, model.hidden
    own = _BF16 * (8 * width + 4 * keys + (6 if model.gated else 4) * hidden) / layout.tensor
    return own + (4 * _BF16 * width * (layout.tensor - 1) / layout.tensor)


# Attention's kernels reach so much of what products reach, and do their scores once more in backward.
_ATTENTION = 0.55
_ATTENTION_AGAIN = 0.5


@dataclass(frozen=True)
class StepPace:
    """Seconds of a step: `products` (attention among them), `tensor` and `context` stand in their way, `shards` and
    `copies` run beside them and count where they take longer. A pipeline is idle for the share `bubble` of its work."""

    products: float
    tensor: float
    context: float
    shards: float
    copies: float
    bubble: float

    @property
    def work(self) -> float:
        return (self.products + self.tensor + self.context) * (1 + self.bubble)

    @property
    def exposed(self) -> float:
        """Seconds that products wait for weights and gradients. Gradients of copies are sent during backward."""
        return max(0.0, self.shards - self.products) + max(0.0, self.copies - self.products * 2 / 3)

    @property
    def step(self) -> float:
        return self.work + self.exposed

    @property
    def waits(self) -> float:
        return ((self.tensor + self.context) * (1 + self.bubble) + self.exposed) / self.step

    @property
    def idle(self) -> float:
        return (self.work - self.work / (1 + self.bubble)) / self.step


def pace_of(model: DecoderModel, layout: ParallelLayout, load: Load, topology: Topology) -> StepPace:
    tokens = load.local * load.sequence / layout.context
    layers = -(-model.layers // layout.pipeline)
    stage = (layers * model.block + model.ends * (2 if layout.pipeline == 1 else 1)) / layout.tensor
    return StepPace(
        products=_products(model, layout, load, topology, tokens),
        tensor=_tensor(model, layout, load, topology, tokens * layers),
        context=_context(model, layout, load, topology, tokens * layers),
        shards=_shards(layout, load, topology, stage),
        copies=_copies(layout, load, topology, stage),
        bubble=(layout.pipeline - 1) / (layout.virtual * load.micro_batches),
    )


def tokens_a_second(layout: ParallelLayout, load: Load, pace: StepPace) -> float:
    return load.local * load.sequence / pace.step / layout.inner


def _products(model: DecoderModel, layout: ParallelLayout, load: Load, topology: Topology, tokens: float) -> float:
    again = {
        Checkpointing.NONE: 0.0,
        Checkpointing.SELECTIVE: model.width * (model.key_width + model.width + model.hidden) / model.block_products,
        Checkpointing.FULL: 1.0,
    }[load.checkpointing]
    linear = 6.0 * model.layers * model.block_products * (1 + again / 3)
    attention = model.attention_flops(load.sequence) / 3
    attention *= 3 + _ATTENTION_AGAIN + (load.checkpointing is Checkpointing.FULL)
    narrow = topology.fp8 if load.precision == "fp8" else topology.bf16
    seconds = linear / narrow + 6.0 * model.ends / topology.bf16 + attention / (topology.bf16 * _ATTENTION)
    return seconds * tokens / (layout.tensor * layout.pipeline)


def _tensor(model: DecoderModel, layout: ParallelLayout, load: Load, topology: Topology, work: float) -> float:
    """Four gathers and four sums a layer, each of all activations; six where forward is done again."""
    times = 12 if load.checkpointing is Checkpointing.FULL else 8
    sent = times * _BF16 * work * model.width * (layout.tensor - 1) / layout.tensor
    return sent / topology.link(layout.tensor) * (0.5 if load.hidden_tensor else 1.0)


def _context(model: DecoderModel, layout: ParallelLayout, load: Load, topology: Topology, work: float) -> float:
    """Keys and values of the other GPUs, forward, and backward with their gradients: what attention does not hide."""
    if layout.context == 1:
        return 0.0
    sent = 3 * 2 * _BF16 * work * model.key_width * (layout.context - 1) / layout.tensor
    attention = (
        model.attention_flops(load.sequence) * work / model.layers / layout.tensor / (topology.bf16 * _ATTENTION)
    )
    return max(0.0, sent / topology.link(layout.tensor * layout.context) - attention)


def _shards(layout: ParallelLayout, load: Load, topology: Topology, stage: float) -> float:
    """Weights twice, in every micro-batch where there is no pipeline that keeps them; gradients once."""
    ranks = layout.shards * layout.context
    gathers = 2 * (load.micro_batches if layout.pipeline == 1 else 1)
    each = gathers * (_FP8 if load.narrow_gather else load.kept.copy) + load.kept.gradient
    return each * stage * (ranks - 1) / ranks / topology.link(layout.tensor * ranks)


def _copies(layout: ParallelLayout, load: Load, topology: Topology, stage: float) -> float:
    """Gradients of every copy, summed by a ring; by ZeRO-1 they go to owners, and weights come back."""
    own = stage / (layout.shards * layout.context)
    each = load.kept.gradient + (load.kept.copy if load.zero_one else load.kept.gradient)
    return each * own * (layout.copies - 1) / layout.copies / topology.link(layout.gpus)
