"""Bytes that a GPU holds at the highest point of a training step, by what they are for.

Weights, gradients and two moments in fp32 are 16 bytes a weight, sharded by FSDP; products read bf16 copies. FP8 saves
none of it: its codes last as long as a product. Activations are bf16, cut by TP along the sequence between products.

Every way to cut a training for so many GPUs, those that fit the fastest first, and what speaks for each kind.

A figure has the band within which formulas described published trainings of its kind (published.toml).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from fp8bench import units
from fp8bench.features.plan_parallel.values import Checkpointing, Layout, Load, Topology, Transformer

STATES = 16
_BF16, _FP8, _FP32 = 2, 1, 4
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


# Attention's kernels reach so much of what products reach, and do their scores once more in backward.
_ATTENTION = 0.55
_ATTENTION_AGAIN = 0.5


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


# So much of a GPU's memory a plan may take: the rest is the driver's and the libraries'.
USABLE = 0.97
# In shorter pieces of a sequence attention's kernels are less busy than formulas say.
_SHORTEST = 4096
# From here on a sequence is long enough to be cut.
_LONG = 32768
# Paces within so much of each other are one: the simpler layout comes first.
_ALIKE = 1.02
# Narrower products than these keep a GPU less busy than its rates say.
_NARROW = 1024


@dataclass(frozen=True)
class Asked:
    """A training: `batch` sequences a step in all. `load` says how a step is done; its sizes are each layout's."""

    model: Transformer
    gpus: int
    batch: int
    load: Load
    topology: Topology


@dataclass(frozen=True)
class Planned:
    """One way, with what it takes; `tokens` are those a second and GPU. A `tight` one fits unless its memory is at the
    upper end of its band."""

    layout: Layout
    load: Load
    memory: Memory
    pace: Pace
    tokens: float
    fits: bool
    tight: bool

    @property
    def kinds(self) -> int:
        """Ways that it is cut, whatever their number."""
        one = self.layout
        return sum(count > 1 for count in (one.copies, one.shards, one.tensor, one.pipeline, one.context))


def memory_band(layout: Layout) -> float:
    """How far the formulas were from published trainings of that kind, as a share."""
    return 0.05 if layout.tensor == layout.pipeline == 1 else 0.15


def pace_band(model: Transformer, layout: Layout) -> float:
    """The same of their pace."""
    if layout.tensor > 1 and model.width / layout.tensor < _NARROW:
        return 0.4
    return 0.3 if layout.context > 1 else 0.15


def ranking(asked: Asked) -> tuple[Planned, ...]:
    """All ways that divide evenly: those that fit first, the fastest of them first; others by what they lack."""
    found = [best for layout in layouts(asked) if (best := _best(asked, layout)) is not None]

    def place(one: Planned) -> tuple[float, ...]:
        if not one.fits:
            return 1, one.memory.total
        return 0, -round(math.log(one.tokens, _ALIKE)), one.kinds, one.memory.total

    return tuple(sorted(found, key=place))


def layouts(asked: Asked) -> Iterator[Layout]:
    """TP up to a node, as many as heads allow; PP by whole layers; CP by whole sequences; the rest are copies, or
    shards, or shards within a node that are copied."""
    model, gpus = asked.model, asked.gpus
    for tensor in _divisors(min(asked.topology.node, gpus)):
        if gpus % tensor or model.key_heads % tensor:
            continue
        for pipeline in _divisors(gpus // tensor):
            if pipeline > model.layers:
                continue
            for context in _divisors(gpus // tensor // pipeline):
                ranks = gpus // tensor // pipeline // context
                piece = asked.load.sequence / context
                if piece % tensor or asked.batch % ranks or (context > 1 and piece < _SHORTEST):
                    continue
                inner = Layout(tensor=tensor, pipeline=pipeline, context=context)
                for shards in sorted({1, ranks, _within_a_node(asked.topology, inner, ranks)}):
                    for virtual in (1, 2) if 1 < pipeline <= model.layers // 2 else (1,):
                        yield replace(inner, shards=shards, copies=ranks // shards, virtual=virtual)


def _within_a_node(topology: Topology, inner: Layout, ranks: int) -> int:
    """Shards that stay within a node: a whole number of them, or all."""
    room = topology.node // (inner.tensor * inner.context)
    return room if room > 1 and ranks % room == 0 else ranks


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _best(asked: Asked, layout: Layout) -> Planned | None:
    """With the micro-batches that are fastest among those that fit; with the most where none does."""
    local = asked.batch * layout.inner // asked.gpus
    options = [_planned(asked, layout, local, count) for count in _divisors(local)]
    fitting = [one for one in options if one.fits]
    return max(fitting, key=lambda one: one.tokens) if fitting else options[-1]


def _planned(asked: Asked, layout: Layout, local: int, count: int) -> Planned:
    load = replace(asked.load, local=local, micro_batches=count)
    memory = memory_of(asked.model, layout, load)
    pace = pace_of(asked.model, layout, load, asked.topology)
    usable = USABLE * asked.topology.memory
    fits, tight = memory.total <= usable, memory.total * (1 + memory_band(layout)) > usable
    return Planned(layout, load, memory, pace, tokens_a_second(layout, load, pace), fits, fits and tight)


class Say(StrEnum):
    """What the model and the GPUs say to a way of cutting."""

    YES = "yes"
    NO = "no"


@dataclass(frozen=True)
class Ruling:
    """One row of the matrix that guides to parallelism have, with the figures of this training."""

    kind: str
    say: Say
    why: str


def rulings(asked: Asked) -> tuple[Ruling, ...]:
    """When each kind is worth it: rules of thumb, of which the ranking knows the figures."""
    model, topology, load = asked.model, asked.topology, asked.load
    usable, gpus = USABLE * topology.memory, asked.gpus
    alone = memory_of(model, Layout(copies=gpus), replace(load, local=1, micro_batches=1)).total
    sharded = memory_of(model, Layout(shards=gpus), replace(load, local=1, micro_batches=1)).total
    tokens = asked.batch * load.sequence / gpus
    dealt = asked.batch % gpus == 0
    undealt = "" if dealt else f"; but {asked.batch} sequences cannot be dealt out evenly to {gpus} GPUs"
    hidden = _tokens_that_hide(asked)
    room = units.size(usable)
    why = {
        "DDP": f"all {STATES} bytes a weight and one sequence take {units.size(alone)} of {room} that a plan may "
        f"use{undealt}",
        "FSDP": f"shared by {gpus} GPUs it takes {units.size(sharded)} of {room}; {units.count(tokens)} tokens a "
        f"GPU and step, and computing takes as long as what it sends from {units.count(hidden)} on{undealt}",
        "TP": "worth it where FSDP does not fit, or there are fewer sequences than GPUs; within the "
        f"{topology.node} GPUs of a node alone, because products wait for what it sends",
        "PP": "worth it between nodes where a GPU has too few tokens for FSDP, or there are fewer sequences than GPUs; "
        "with 4 micro-batches a stage or more, because stages are idle at both ends of a step",
        "CP": f"worth it for sequences from {_LONG} tokens on; these have {load.sequence}",
        "EP": "worth it for experts; this model has none",
    }
    yes = {
        "DDP": alone <= usable and dealt,
        "FSDP": gpus > 1 and sharded <= usable and tokens >= hidden and dealt,
        "TP": gpus > 1 and (sharded > usable or asked.batch < gpus),
        "PP": gpus > topology.node and (tokens < hidden or asked.batch < gpus),
        "CP": load.sequence >= _LONG,
        "EP": False,
    }
    return tuple(Ruling(kind, Say.YES if yes[kind] else Say.NO, words) for kind, words in why.items())


def _tokens_that_hide(asked: Asked) -> float:
    """Tokens of a GPU's step from which on products take as long as what FSDP sends."""
    sent = (2 * (1 if asked.load.narrow_gather else 2) + 4) * (asked.gpus - 1) / asked.gpus
    rate = asked.topology.fp8 if asked.load.precision == "fp8" else asked.topology.bf16
    return sent * rate / (6 * asked.topology.link(asked.gpus))


def checkpointed(asked: Asked) -> tuple[Asked, tuple[Planned, ...]]:
    """With the least that is computed again with which something fits; with all of it where nothing does."""
    for level in Checkpointing:
        other = replace(asked, load=replace(asked.load, checkpointing=level))
        plans = ranking(other)
        if plans and plans[0].fits:
            break
    return other, plans
