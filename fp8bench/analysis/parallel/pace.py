"""How long a step takes on many GPUs: products, what is sent in their way, and a pipeline's idle ends."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model.parallel import Checkpointing, Layout, Load, Topology, Transformer

# Attention's kernels reach so much of what products reach, and do their scores once more in backward.
_ATTENTION = 0.55
_ATTENTION_AGAIN = 0.5
_BF16, _FP8, _FP32 = 2, 1, 4


@dataclass(frozen=True)
class Pace:
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


def pace_of(model: Transformer, layout: Layout, load: Load, topology: Topology) -> Pace:
    tokens = load.local * load.sequence / layout.context
    layers = -(-model.layers // layout.pipeline)
    stage = (layers * model.block + model.ends * (2 if layout.pipeline == 1 else 1)) / layout.tensor
    return Pace(
        products=_products(model, layout, load, topology, tokens),
        tensor=_tensor(model, layout, load, topology, tokens * layers),
        context=_context(model, layout, load, topology, tokens * layers),
        shards=_shards(layout, load, topology, stage),
        copies=_copies(layout, topology, stage),
        bubble=(layout.pipeline - 1) / (layout.virtual * load.micro_batches),
    )


def tokens_a_second(layout: Layout, load: Load, pace: Pace) -> float:
    """Of each GPU."""
    return load.local * load.sequence / pace.step / layout.inner


def _products(model: Transformer, layout: Layout, load: Load, topology: Topology, tokens: float) -> float:
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


def _tensor(model: Transformer, layout: Layout, load: Load, topology: Topology, work: float) -> float:
    """Four gathers and four sums a layer, each of all activations; six where forward is done again."""
    times = 12 if load.checkpointing is Checkpointing.FULL else 8
    sent = times * _BF16 * work * model.width * (layout.tensor - 1) / layout.tensor
    return sent / topology.link(layout.tensor) * (0.5 if load.hidden_tensor else 1.0)


def _context(model: Transformer, layout: Layout, load: Load, topology: Topology, work: float) -> float:
    """Keys and values of the other GPUs, forward, and backward with their gradients: what attention does not hide."""
    if layout.context == 1:
        return 0.0
    sent = 3 * 2 * _BF16 * work * model.key_width * (layout.context - 1) / layout.tensor
    attention = (
        model.attention_flops(load.sequence) * work / model.layers / layout.tensor / (topology.bf16 * _ATTENTION)
    )
    return max(0.0, sent / topology.link(layout.tensor * layout.context) - attention)


def _shards(layout: Layout, load: Load, topology: Topology, stage: float) -> float:
    """Weights twice, in every micro-batch where there is no pipeline that keeps them; gradients once."""
    ranks = layout.shards * layout.context
    gathers = 2 * (load.micro_batches if layout.pipeline == 1 else 1)
    each = gathers * (_FP8 if load.narrow_gather else _BF16) + _FP32
    return each * stage * (ranks - 1) / ranks / topology.link(layout.tensor * ranks)


def _copies(layout: Layout, topology: Topology, stage: float) -> float:
    """Gradients of every copy, summed by a ring."""
    own = stage / (layout.shards * layout.context)
    return 2 * _FP32 * own * (layout.copies - 1) / layout.copies / topology.link(layout.gpus)
