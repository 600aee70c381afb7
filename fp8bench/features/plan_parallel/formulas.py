"""Predicts by formulas what memory and time a training takes on many GPUs, before it runs.

Weights, gradients and two moments in fp32 are 16 bytes per weight, which FSDP shards; products read bf16 copies. FP8
products save none of it, because their codes last only as long as the product. FP8-LM's states do: 6 bytes per weight
and copies of one byte. Activations are bf16; TP divides them along the sequence between products.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Checkpointing(StrEnum):
    """How much backward recomputes: nothing, every other product of a block, or the whole block."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True)
class DecoderModel:
    """A dense decoder like Llama (three products in a feed-forward block) or, not `gated`, like GPT (two).

    A `tied` head multiplies with the embedding's weights.
    """

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    gated: bool = True
    tied: bool = False

    @property
    def key_width(self) -> int:
        """Features of all keys together; values have equally many."""
        return self.width * self.key_heads // self.heads

    @property
    def block_products(self) -> int:
        """The number of weights in a block's linear layers."""
        return self.width * (2 * self.width + 2 * self.key_width + (3 if self.gated else 2) * self.hidden)

    @property
    def block(self) -> int:
        return self.block_products + 2 * self.width

    @property
    def ends(self) -> int:
        """The number of weights of the embedding; the head has equally many."""
        return self.vocabulary * self.width

    @property
    def weights(self) -> int:
        return self.layers * self.block + (1 if self.tied else 2) * self.ends + self.width

    def stage_weights(self, pipeline: int) -> int:
        """Returns the weights of the largest stage of a `pipeline`. Embedding and head are in different stages, each
        with a copy."""
        ends = 1 if self.tied or pipeline > 1 else 2
        return -(-self.layers // pipeline) * self.block + ends * self.ends

    def attention_flops(self, sequence: int) -> float:
        """Returns FLOPs per token of scores and their product with the values, in all layers."""
        return 6.0 * self.layers * self.width * sequence


@dataclass(frozen=True)
class ParallelLayout:
    """The number of parts into which each kind of division cuts a training.

    `copies` keep all states each (DDP), `shards` share them (FSDP, ZeRO-3). `tensor` divides every layer, and the
    sequence between products; `pipeline` divides the layers, into `virtual` stages per GPU; `context` the sequence.
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
        """The number of GPUs that work on the same sequences."""
        return self.tensor * self.pipeline * self.context

    @property
    def words(self) -> str:
        parts = (
            ("DDP", self.copies),
            ("FSDP", self.shards),
            ("TP", self.tensor),
            ("PP", self.pipeline),
            ("CP", self.context),
            ("VP", self.virtual),
        )
        return ", ".join(f"{name} {count}" for name, count in parts if count > 1) or "one GPU"


@dataclass(frozen=True)
class Load:
    """The work of one step: `local` sequences for the GPUs that share them, in `micro_batches`.

    `narrow_gather`: FSDP gathers weights in FP8. `hidden_tensor`: half of TP's traffic overlaps with products (async
    TP). `fused_loss`: the loss is compiled, and writes nothing in fp32. `states` is one of STATES. `rlhf`: memory holds
    three more models of this size: a trained critic, a reference and a reward model. `zero_one`: copies shard the
    optimizer's states (ZeRO-1).
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
    def kept_states(self) -> KeptStates:
        return STATES[self.states]


@dataclass(frozen=True)
class KeptStates:
    """Bytes that a training stores per weight. `copy` is the operand of products when sent; `lying` the same in memory,
    which is more in FP8, because Hopper multiplies codes in one orientation only."""

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


# FP8-LM (arXiv 2310.18313): fp16 master weights and second moments, FP8 gradients and first moments, one scale per
# tensor. Weights and gradients are sent in FP8.
STATES = {"fp32": KeptStates(4, 4, 4, 4, copy=2, lying=2), "fp8-lm": KeptStates(2, 1, 1, 2, copy=1, lying=2)}


@dataclass(frozen=True)
class Topology:
    """GPUs and their links: bytes of memory, bytes per second that each sends inside a node and between nodes.

    `bf16` and `fp8` are FLOPs per second that products reach, not a datasheet's.
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
# The reference and the reward model, which keep only what products read.
_FROZEN = 2
# Bytes per logit: bf16 plus fp32 with its logarithm and gradient; eager code keeps one more copy; a compiled loss keeps
# only the logit and its gradient, both in bf16.
_LOGIT, _EAGER_LOGIT, _FUSED_LOGIT = 12, 16, 4


@dataclass(frozen=True)
class GpuMemory:
    """Bytes by use. `gathered` are unsharded weights and gradients, `kept` activations for backward, `block` those of
    the running block; `critic` and `frozen` are RLHF's other models."""

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
    """Returns an upper bound over GPUs: in a pipeline, the first stage's activations with the last stage's logits."""
    tokens = load.sequence * load.local / load.micro_batches / layout.context
    layers = -(-model.layers // layout.pipeline)
    stage = model.stage_weights(layout.pipeline) / layout.tensor
    in_flight = min(layout.pipeline, load.micro_batches)
    ranks, shared = layout.shards * layout.context, load.zero_one and layout.copies > 1
    gathered = (
        load.kept_states.lying * stage
        if shared and ranks == 1
        else _gathered_bytes(model, layout, load.kept_states, stage)
    )
    optimizer = load.kept_states.optimizer / (layout.copies if shared else 1)
    states = (load.kept_states.gradient + optimizer) * stage / ranks
    stays = gathered if layout.pipeline > 1 or ranks == 1 else 0.0  # otherwise one model is gathered at a time
    logit = _FUSED_LOGIT if load.fused_loss else _LOGIT if load.compiled else _EAGER_LOGIT
    return GpuMemory(
        states,
        gathered,
        kept=_activation_bytes(model, load) * tokens * layers * in_flight / layout.tensor,
        block=_block_bytes(model, layout) * tokens,
        logits=logit * tokens * model.vocabulary / layout.tensor,
        critic=(states + stays) * load.rlhf,
        frozen=_FROZEN * load.kept_states.copy * stage / ranks * load.rlhf,
    )


def _gathered_bytes(model: DecoderModel, layout: ParallelLayout, states: KeptStates, stage: float) -> float:
    if layout.pipeline > 1:  # weights stay gathered between micro-batches, and gradients are summed unsharded
        return (states.lying + states.gradient) * stage
    if layout.shards * layout.context == 1:
        return states.lying * stage
    # Two blocks, one of them prefetched; the head; one block's gradients, in bf16 and in the format they are sent in.
    return (
        2 * states.lying * model.block + _BF16 * model.ends + (_BF16 + states.gradient) * model.block
    ) / layout.tensor


def _activation_bytes(model: DecoderModel, load: Load) -> float:
    """Returns bytes per token and layer."""
    width, keys, hidden = model.width, model.key_width, model.hidden
    if load.checkpointing is Checkpointing.FULL:
        return _BF16 * width
    if load.checkpointing is Checkpointing.SELECTIVE:  # its input, every other product, and attention's output
        return _BF16 * (4 * width + keys + hidden * (1 if model.gated else 0.5))
    return _BF16 * (8 * width + 2 * keys + (4 if model.gated else 2) * hidden)


def _block_bytes(model: DecoderModel, layout: ParallelLayout) -> float:
    """Returns bytes per token while a block is recomputed: all its activations, two gradients of its widest part, and
    with TP its gathered inputs, forward and backward."""
    width, keys, hidden = model.width, model.key_width, model.hidden
    activations = _BF16 * (8 * width + 4 * keys + (6 if model.gated else 4) * hidden) / layout.tensor
    return activations + (4 * _BF16 * width * (layout.tensor - 1) / layout.tensor)


# Attention kernels reach this share of the products' rate, and recompute this share of the scores in backward.
_ATTENTION = 0.55
_ATTENTION_AGAIN = 0.5


@dataclass(frozen=True)
class StepPace:
    """Seconds of a step. Products (with attention) wait for the traffic of `tensor` and `context`; that of `shards` and
    `copies` overlaps with them, except for `exposed` seconds. A pipeline idles for the share `bubble` of its work."""

    products: float
    tensor: float
    context: float
    shards: float
    copies: float
    bubble: float
    exposed: float

    @property
    def work(self) -> float:
        return (self.products + self.tensor + self.context) * (1 + self.bubble)

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
    stage = model.stage_weights(layout.pipeline) / layout.tensor
    forward, backward = _product_seconds(model, layout, load, topology, tokens)
    gather, scatter = _sharding_seconds(layout, load, topology, stage)
    copied = _copy_seconds(layout, load, topology, stage)
    pieces = load.micro_batches
    # In a pipeline weights stay gathered, and gradients are summed unsharded, until the end of the step.
    sendings = 1 if layout.pipeline > 1 else pieces
    gathers = 1 if layout.pipeline > 1 else 2 * pieces
    return StepPace(
        products=forward + backward,
        tensor=_tensor_seconds(model, layout, load, topology, tokens * layers),
        context=_context_seconds(model, layout, load, topology, tokens * layers),
        shards=gathers * gather + sendings * scatter,
        copies=sum(copied),
        bubble=(layout.pipeline - 1) / (layout.virtual * pieces),
        exposed=_exposed_seconds(
            layout, topology, pieces, forward / pieces, backward / pieces, (gather, scatter), copied
        ),
    )


def _exposed_seconds(
    layout: ParallelLayout,
    topology: Topology,
    pieces: int,
    forward: float,
    backward: float,
    sharded: tuple[float, float],
    copied: tuple[float, float],
) -> float:
    """Returns seconds that products wait for weights and gradients, per pass of the micro-batches.

    The traffic of one micro-batch's pass only overlaps with that pass. Copies sum their gradients once, during the last
    backward; ZeRO-1 sends weights during the first forward.
    """
    gather, scatter = sharded
    summed, returned = copied
    # Stages of a pipeline keep gathered weights for all pieces.
    regather = 0.0 if layout.pipeline > 1 else gather
    # On one link messages wait for each other; on two they overlap.
    one_link = topology.link(layout.tensor * layout.shards * layout.context) == topology.link(layout.gpus)
    together = sum if one_link else max
    first, last = together((gather, returned)), together((regather + scatter, summed))
    exposed = max(0.0, first - forward) + max(0.0, last - backward)
    if layout.pipeline == 1:
        per_piece = max(0.0, gather - forward) + max(0.0, regather + scatter - backward)
        exposed += (pieces - 1) * per_piece
    return exposed


def tokens_a_second(layout: ParallelLayout, load: Load, pace: StepPace) -> float:
    return load.local * load.sequence / pace.step / layout.inner


def _product_seconds(
    model: DecoderModel, layout: ParallelLayout, load: Load, topology: Topology, tokens: float
) -> tuple[float, float]:
    """Returns seconds of all forward passes of a step, and of all backward ones with their recomputation."""
    recomputed = {
        Checkpointing.NONE: 0.0,
        Checkpointing.SELECTIVE: model.width * (model.key_width + model.width + model.hidden) / model.block_products,
        Checkpointing.FULL: 1.0,
    }[load.checkpointing]
    narrow = topology.fp8 if load.precision == "fp8" else topology.bf16
    blocks = 2.0 * model.layers * model.block_products / narrow
    head = 2.0 * model.ends / topology.bf16
    attention = model.attention_flops(load.sequence) / 3 / (topology.bf16 * _ATTENTION)
    scores_again = _ATTENTION_AGAIN + (load.checkpointing is Checkpointing.FULL)
    share = tokens / (layout.tensor * layout.pipeline)
    forward = blocks + head + attention
    backward = (2 + recomputed) * blocks + 2 * head + (2 + scores_again) * attention
    return forward * share, backward * share


def _tensor_seconds(model: DecoderModel, layout: ParallelLayout, load: Load, topology: Topology, work: float) -> float:
    """Returns seconds of tensor parallelism: four gathers and four sums of all activations per layer; six each if
    forward is recomputed."""
    times = 12 if load.checkpointing is Checkpointing.FULL else 8
    sent = times * _BF16 * work * model.width * (layout.tensor - 1) / layout.tensor
    return sent / topology.link(layout.tensor) * (0.5 if load.hidden_tensor else 1.0)


def _context_seconds(model: DecoderModel, layout: ParallelLayout, load: Load, topology: Topology, work: float) -> float:
    """Sends keys and values forward, and with their gradients backward; returns the seconds that attention does not
    hide."""
    if layout.context == 1:
        return 0.0
    sent = 3 * 2 * _BF16 * work * model.key_width * (layout.context - 1) / layout.tensor
    attention = (
        model.attention_flops(load.sequence) * work / model.layers / layout.tensor / (topology.bf16 * _ATTENTION)
    )
    return max(0.0, sent / topology.link(layout.tensor * layout.context) - attention)


def _sharding_seconds(layout: ParallelLayout, load: Load, topology: Topology, stage: float) -> tuple[float, float]:
    """Returns seconds for gathering a stage's weights once, and for sending its gradients to their owners once."""
    ranks = layout.shards * layout.context
    share = stage * (ranks - 1) / ranks / topology.link(layout.tensor * ranks)
    return (_FP8 if load.narrow_gather else load.kept_states.copy) * share, load.kept_states.gradient * share


def _copy_seconds(layout: ParallelLayout, load: Load, topology: Topology, stage: float) -> tuple[float, float]:
    """Returns seconds of the copies' traffic during backward, and during forward.

    A ring sums gradients over copies; with ZeRO-1 they go to their owners, and weights come back.
    """
    shard = stage / (layout.shards * layout.context)
    share = shard * (layout.copies - 1) / layout.copies / topology.link(layout.gpus)
    if load.zero_one:
        return load.kept_states.gradient * share, load.kept_states.copy * share
    return 2 * load.kept_states.gradient * share, 0.0
