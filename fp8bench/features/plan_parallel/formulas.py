"""Predicts the memory and time of a training on many GPUs by formulas.

Weights, gradients and two moments in fp32 take 16 bytes per weight, which FSDP shards. Products read bf16 copies of
the weights. FP8 products save none of this memory, because FP8 operands exist only during the product. The states of
FP8-LM do save memory: they take 6 bytes per weight, and its copies for products one byte. Activations are bf16.
Between products, TP divides activations along the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Checkpointing(StrEnum):
    """How much of the forward pass is recomputed during backward: nothing, every other product of a block, or the whole
    block.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True)
class DecoderModel:
    """A dense decoder like Llama (three products in a feed-forward block), or like GPT if not `gated` (two products).

    A `tied` head uses the weights of the embedding.
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
        """The number of features of all keys together. Values have the same number."""
        return self.width * self.key_heads // self.heads

    @property
    def block_products(self) -> int:
        """The number of weights in a block's linear layers."""
        return self.width * (2 * self.width + 2 * self.key_width + (3 if self.gated else 2) * self.hidden)

    @property
    def block(self) -> int:
        # A block has two norms, each with a weight for every feature.
        return self.block_products + 2 * self.width

    @property
    def embedding_weights(self) -> int:
        """The number of weights in the embedding. The head has the same number."""
        return self.vocabulary * self.width

    @property
    def weights(self) -> int:
        return self.layers * self.block + (1 if self.tied else 2) * self.embedding_weights + self.width

    def stage_weights(self, pipeline: int) -> int:
        """Returns the number of weights in the largest stage of a `pipeline`. Embedding and head are in different
        stages.
        """
        embedding_matrices_in_stage = 1 if self.tied or pipeline > 1 else 2
        return -(-self.layers // pipeline) * self.block + embedding_matrices_in_stage * self.embedding_weights

    def attention_flops(self, sequence: int) -> float:
        """Returns the FLOPs per token of attention's two products, in all layers: the scores, and the scores times
        the values.
        """
        return 6.0 * self.layers * self.width * sequence


@dataclass(frozen=True)
class ParallelLayout:
    """The number of parts into which each kind of parallelism divides a training.

    Each of the `copies` has all states (DDP). The `shards` share the states of one copy (FSDP, ZeRO-3). `tensor`
    divides each layer, and also the sequence between products. `pipeline` divides the layers, into `virtual` stages per
    GPU. `context` divides the sequence.
    """

    copies: int = 1
    shards: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    virtual: int = 1

    @property
    def gpus(self) -> int:
        return self.copies * self.shards * self.gpus_per_sequence

    @property
    def gpus_per_sequence(self) -> int:
        """The number of GPUs that work on the same sequences."""
        return self.tensor * self.pipeline * self.context

    @property
    def words(self) -> str:
        division_counts = (
            ("DDP", self.copies),
            ("FSDP", self.shards),
            ("TP", self.tensor),
            ("PP", self.pipeline),
            ("CP", self.context),
            ("VP", self.virtual),
        )
        return ", ".join(f"{name} {count}" for name, count in division_counts if count > 1) or "one GPU"


@dataclass(frozen=True)
class StepLoad:
    """The work of one step. GPUs that work on the same sequences process `local` sequences, in `micro_batches`.

    With `narrow_gather`, FSDP gathers weights in FP8. With `hidden_tensor`, half of TP's traffic overlaps with products
    (async TP). With `fused_loss`, the loss is compiled and writes no fp32 values. `states` is a key of STATE_BYTES.
    With `rlhf`, memory holds three more models of this size: a trained critic, a reference and a reward model. With
    `zero_one`, copies shard the optimizer's states (ZeRO-1).
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
    def state_bytes(self) -> BytesPerWeight:
        return STATE_BYTES[self.states]

    @property
    def gathered_state_bytes(self) -> int:
        """The bytes per weight that FSDP sends to gather weights."""
        return _FP8_BYTES if self.narrow_gather else self.state_bytes.weight_copy


@dataclass(frozen=True)
class BytesPerWeight:
    """The bytes per weight of each tensor that a training stores. `weight` is the master weight, and the two moments
    belong to the optimizer. `weight_copy` is the copy of the weight that products read, as sent between ranks.
    `resident_weight_copy` is the same copy in memory. In FP8 it takes two bytes: Hopper multiplies FP8 in only one
    orientation, so the copy is stored in both.
    """

    weight: int
    gradient: int
    first_moment: int
    second_moment: int
    weight_copy: int
    resident_weight_copy: int

    @property
    def optimizer(self) -> int:
        return self.weight + self.first_moment + self.second_moment

    @property
    def total(self) -> int:
        return self.optimizer + self.gradient


# FP8-LM (arXiv 2310.18313): fp16 master weights and second moments, FP8 gradients and first moments with one scale
# per tensor. Weights and gradients are sent in FP8.
STATE_BYTES = {
    "fp32": BytesPerWeight(4, 4, 4, 4, weight_copy=2, resident_weight_copy=2),
    "fp8-lm": BytesPerWeight(2, 1, 1, 2, weight_copy=1, resident_weight_copy=2),
}


@dataclass(frozen=True)
class Topology:
    """GPUs and their links: the GPUs of a `node`, the bytes of `memory` of each, and the bytes per second that a GPU
    sends `inside` a node and `between` nodes.

    `bf16` and `fp8` are the FLOPs per second that products reach, not those of a datasheet.
    """

    node: int
    memory: float
    inside: float
    between: float
    bf16: float
    fp8: float

    def link(self, gpus: int) -> float:
        return self.inside if gpus <= self.node else self.between

    def rate(self, precision: str) -> float:
        return self.fp8 if precision == "fp8" else self.bf16


_BF16_BYTES, _FP8_BYTES = 2, 1
# The number of RLHF's models that are not trained: the reference and the reward model. They store only the copy of
# the weights that products read.
_FROZEN_MODEL_COUNT = 2
# Bytes per logit in memory. A loss usually has the logits in bf16 and in fp32, and their logarithms and
# gradient: 12 in all. Eager code has one more copy. A compiled loss has only the logit and its gradient in bf16.
_LOGIT_BYTES, _EAGER_LOGIT_BYTES, _FUSED_LOGIT_BYTES = 12, 16, 4


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one GPU by use. `gathered` are unsharded weights and gradients, `kept` are activations that wait for
    backward, `block` are activations of the running block. `critic` and `frozen` are the other models of RLHF.
    """

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


def predict_memory(model: DecoderModel, layout: ParallelLayout, load: StepLoad) -> GpuMemory:
    """Returns an upper bound of the bytes on any GPU, by use. In a pipeline, the bound adds the activations of the
    first stage and the logits of the last stage.
    """
    tokens = load.sequence * load.local / load.micro_batches / layout.context
    layers = -(-model.layers // layout.pipeline)
    stage_weights = model.stage_weights(layout.pipeline) / layout.tensor
    batches_in_flight = min(layout.pipeline, load.micro_batches)
    ranks_of_shards, is_zero_one = layout.shards * layout.context, load.zero_one and layout.copies > 1
    # 1. Count the weight copies that matrix products use, and unsharded gradients.
    state_bytes = load.state_bytes
    if ranks_of_shards == 1 and (is_zero_one or layout.pipeline == 1):
        gathered_state_bytes = state_bytes.resident_weight_copy * stage_weights
    elif layout.pipeline > 1:
        # Weights stay gathered between micro-batches, and gradients are summed unsharded.
        gathered_state_bytes = (state_bytes.resident_weight_copy + state_bytes.gradient) * stage_weights
    else:
        # FSDP gathers the weights of two blocks at a time, one of them prefetched, and of the head. It also holds the
        # full gradients of one block twice: in bf16, and in the format in which they are sent.
        weight_bytes = 2 * state_bytes.resident_weight_copy * model.block + _BF16_BYTES * model.embedding_weights
        gathered_state_bytes = (weight_bytes + (_BF16_BYTES + state_bytes.gradient) * model.block) / layout.tensor
    # 2. Count master weights, gradients and moments.
    optimizer = state_bytes.optimizer / (layout.copies if is_zero_one else 1)
    gpu_state_bytes = (state_bytes.gradient + optimizer) * stage_weights / ranks_of_shards
    # 3. Add RLHF's critic and frozen models. Without a pipeline, the weights of one model are gathered at a time.
    resident_bytes = gathered_state_bytes if layout.pipeline > 1 or ranks_of_shards == 1 else 0.0
    logit_bytes = _FUSED_LOGIT_BYTES if load.fused_loss else _LOGIT_BYTES if load.compiled else _EAGER_LOGIT_BYTES
    return GpuMemory(
        gpu_state_bytes,
        gathered_state_bytes,
        kept=_predict_activation_bytes(model, load) * tokens * layers * batches_in_flight / layout.tensor,
        block=_predict_block_bytes(model, layout) * tokens,
        logits=logit_bytes * tokens * model.vocabulary / layout.tensor,
        critic=(gpu_state_bytes + resident_bytes) * load.rlhf,
        frozen=_FROZEN_MODEL_COUNT * state_bytes.weight_copy * stage_weights / ranks_of_shards * load.rlhf,
    )


def _predict_activation_bytes(model: DecoderModel, load: StepLoad) -> float:
    """Returns the bytes of the activations that are stored for backward, per token and layer."""
    width, keys, hidden = model.width, model.key_width, model.hidden
    if load.checkpointing is Checkpointing.FULL:
        return _BF16_BYTES * width
    # Selective checkpointing stores the input of a block, the output of attention, and the output of every second
    # matrix product.
    if load.checkpointing is Checkpointing.SELECTIVE:
        return _BF16_BYTES * (4 * width + keys + hidden * (1 if model.gated else 0.5))
    return _BF16_BYTES * (8 * width + 2 * keys + (4 if model.gated else 2) * hidden)


def _predict_block_bytes(model: DecoderModel, layout: ParallelLayout) -> float:
    """Returns how many bytes per token exist while backward recomputes a block. These are the bytes of all activations
    of the block, and of two gradients of its widest part. Tensor parallelism adds the gathered inputs of the block,
    forward and backward.
    """
    width, keys, hidden = model.width, model.key_width, model.hidden
    activation_bytes = _BF16_BYTES * (8 * width + 4 * keys + (6 if model.gated else 4) * hidden) / layout.tensor
    return activation_bytes + 4 * _BF16_BYTES * width * (layout.tensor - 1) / layout.tensor


# Attention kernels reach this share of the FLOP rate of matrix products.
_ATTENTION_RATE_SHARE = 0.55
# Backward of attention recomputes the scores, which are one of its two products.
_RECOMPUTED_SCORES = 0.5


@dataclass(frozen=True)
class PredictedStepTime:
    """The seconds of a step, by cause. `products` includes attention. Traffic of `tensor` and `context` parallelism
    delays products. Traffic of `shards` and `copies` overlaps with products; `exposed` is the part that does not.
    `bubble` is the idle time of a pipeline, divided by its working time.
    """

    products: float
    tensor: float
    context: float
    shards: float
    copies: float
    bubble: float
    exposed: float

    @property
    def working_seconds(self) -> float:
        return (self.products + self.tensor + self.context) * (1 + self.bubble)

    @property
    def step(self) -> float:
        return self.working_seconds + self.exposed

    @property
    def communication_wait_share(self) -> float:
        return ((self.tensor + self.context) * (1 + self.bubble) + self.exposed) / self.step

    @property
    def idle_share(self) -> float:
        return (self.working_seconds - self.working_seconds / (1 + self.bubble)) / self.step


def predict_pace(model: DecoderModel, layout: ParallelLayout, load: StepLoad, topology: Topology) -> PredictedStepTime:
    tokens = load.local * load.sequence / layout.context
    token_layer_count = tokens * -(-model.layers // layout.pipeline)
    stage_weights = model.stage_weights(layout.pipeline) / layout.tensor
    micro_batches, has_pipeline = load.micro_batches, layout.pipeline > 1
    forward, backward = _compute_product_seconds(model, layout, load, topology, tokens)

    # 1. TP: a layer takes four gathers and four sums of all activations, or six of each if forward is recomputed.
    transfers_per_layer = 12 if load.checkpointing is Checkpointing.FULL else 8
    sent_bytes = (
        transfers_per_layer * _BF16_BYTES * token_layer_count * model.width * (layout.tensor - 1) / layout.tensor
    )
    tensor = sent_bytes / topology.link(layout.tensor) * (0.5 if load.hidden_tensor else 1.0)

    # 2. CP: forward sends keys and values, backward also their gradients. Attention hides part of this traffic.
    sent_bytes = 3 * 2 * _BF16_BYTES * token_layer_count * model.key_width * (layout.context - 1) / layout.tensor
    attention_flops = model.attention_flops(load.sequence) * token_layer_count / model.layers / layout.tensor
    attention = attention_flops / (topology.bf16 * _ATTENTION_RATE_SHARE)
    context = max(0.0, sent_bytes / topology.link(layout.tensor * layout.context) - attention)

    # 3. FSDP: the weights of a stage are gathered once, and its gradients are sent to their owners once.
    ranks = layout.shards * layout.context
    seconds_per_byte = stage_weights * (ranks - 1) / ranks / topology.link(layout.tensor * ranks)
    gather_seconds = load.gathered_state_bytes * seconds_per_byte
    scatter_seconds = load.state_bytes.gradient * seconds_per_byte
    # Pipeline stages keep the gathered weights and the unsharded sums of gradients until the end of the step.
    gather_in_backward = 0.0 if has_pipeline else gather_seconds
    shard_traffic_seconds = (
        gather_seconds + scatter_seconds
        if has_pipeline
        else 2 * micro_batches * gather_seconds + micro_batches * scatter_seconds
    )

    # 4. DDP: in the last backward, a ring sums gradients over all copies. With ZeRO-1, backward sends gradients to
    # their owners, and the first forward sends weights back.
    seconds_per_byte = stage_weights / ranks * (layout.copies - 1) / layout.copies / topology.link(layout.gpus)
    gradient_sum_seconds = (1 if load.zero_one else 2) * load.state_bytes.gradient * seconds_per_byte
    weight_return_seconds = load.state_bytes.weight_copy * seconds_per_byte if load.zero_one else 0.0

    # 5. Compute waits for FSDP and DDP traffic that takes longer than the pass of its micro-batch. Messages on one link
    # wait for each other. Messages on different links overlap.
    is_one_link_shared = topology.link(layout.tensor * ranks) == topology.link(layout.gpus)
    combine_traffic_seconds = sum if is_one_link_shared else max
    forward_pass, backward_pass = forward / micro_batches, backward / micro_batches
    exposed_seconds = max(0.0, combine_traffic_seconds((gather_seconds, weight_return_seconds)) - forward_pass)
    exposed_seconds += max(
        0.0, combine_traffic_seconds((gather_in_backward + scatter_seconds, gradient_sum_seconds)) - backward_pass
    )
    if not has_pipeline:
        exposed_micro_batch_seconds = max(0.0, gather_seconds - forward_pass) + max(
            0.0, gather_in_backward + scatter_seconds - backward_pass
        )
        exposed_seconds += (micro_batches - 1) * exposed_micro_batch_seconds
    return PredictedStepTime(
        products=forward + backward,
        tensor=tensor,
        context=context,
        shards=shard_traffic_seconds,
        copies=gradient_sum_seconds + weight_return_seconds,
        bubble=(layout.pipeline - 1) / (layout.virtual * micro_batches),
        exposed=exposed_seconds,
    )


def tokens_per_second(layout: ParallelLayout, load: StepLoad, pace: PredictedStepTime) -> float:
    return load.local * load.sequence / pace.step / layout.gpus_per_sequence


def _compute_product_seconds(
    model: DecoderModel, layout: ParallelLayout, load: StepLoad, topology: Topology, tokens: float
) -> tuple[float, float]:
    """Returns the seconds of products in a step's forward passes, and in its backward passes with recomputation."""
    recomputed_share = {
        Checkpointing.NONE: 0.0,
        Checkpointing.SELECTIVE: model.width * (model.key_width + model.width + model.hidden) / model.block_products,
        Checkpointing.FULL: 1.0,
    }[load.checkpointing]
    blocks = 2.0 * model.layers * model.block_products / topology.rate(load.precision)
    output_head_seconds = 2.0 * model.embedding_weights / topology.bf16
    # A third of the FLOPs of attention belong to forward, and two thirds to backward.
    attention = model.attention_flops(load.sequence) / 3 / (topology.bf16 * _ATTENTION_RATE_SHARE)
    recomputed_scores = _RECOMPUTED_SCORES + (load.checkpointing is Checkpointing.FULL)
    tokens_per_gpu = tokens / (layout.tensor * layout.pipeline)
    forward = blocks + output_head_seconds + attention
    backward = (2 + recomputed_share) * blocks + 2 * output_head_seconds + (2 + recomputed_scores) * attention
    return forward * tokens_per_gpu, backward * tokens_per_gpu
