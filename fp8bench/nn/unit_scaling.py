"""Unit scaling (Blake et al., 2023): constants derived from a model's shapes keep its tensors near a deviation of 1.

Every operation is followed by one constant in forward and another in backward, so that activations, weights and
gradients have a deviation near 1 when a training begins, whatever the widths: casts to FP8 then need no scale. A
product over n inputs is divided by root(n), its input gradient by the root of its outputs, GELU by its deviation for a
Gaussian; a residual is a sum whose weights' squares add up to 1; the gradient of the loss is multiplied by tokens x
vocabulary / root(vocabulary - 1).

The constants leave the model the same function of the same weights: weights are stored as in every other precision and
scaled to unit just before their cast, and each weight gets its true gradient. Under AdamW this equals training unit
weights at rates divided by the initial deviations. So arms share weights, rates, clipping and checkpoints, and differ
only in what is rounded.

`behind` is the factor between the gradient of an output as it comes back and the true one, without the factor of the
loss, which depends on a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.nn.block import Block
from fp8bench.nn.gpt import GPT
from fp8bench.nn.linear import Linear, cast_marker, linear
from fp8bench.nn.parts import FeedForward
from fp8bench.protocols import Phases

# The deviation of GELU and of Llama's gate for a Gaussian, and the root mean square of their slopes.
GELU = 0.588
GELU_SLOPE = 0.675
GATED = 0.596
GATED_SLOPE = 0.606
# Initial deviations of a GPT's embeddings and positions.
_EMBEDDING = 0.02
_PLACES = 0.01
_NORM_EPSILON = 1e-5


class _Rescaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.factor = backward
        return x.view_as(x) if forward == 1.0 else x * forward

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] if ctx.factor == 1.0 else gradients[0] * ctx.factor, None, None


def rescale(x: Tensor, forward: float, backward: float) -> Tensor:
    """`forward` times x; its gradient is `backward` times that of the result."""
    if forward == backward == 1.0:
        return x
    return _Rescaled.apply(x, forward, backward)  # type: ignore[no-untyped-call]


@dataclass
class LossGradient:
    """The factor of the loss's gradient, for the number of tokens in the current batch."""

    vocabulary: int
    factor: float = 1.0

    def begin(self, tokens: int) -> None:
        self.factor = tokens * self.vocabulary / math.sqrt(max(1, self.vocabulary - 1))


@dataclass
class UnitWeight:
    """A norm's weight, whose gradient becomes the true one."""

    behind: float
    loss: LossGradient

    def __call__(self, weight: Tensor) -> Tensor:
        return rescale(weight, 1.0, 1 / (self.behind * self.loss.factor))


@dataclass
class UnitProduct:
    """The product of a linear layer whose weight begins with this deviation."""

    deviation: float
    behind: float
    loss: LossGradient

    def __call__(self, layer: Linear, x: Tensor, phase: Phases) -> Tensor:
        outputs, inputs = layer.weight.shape
        root = math.sqrt(inputs)
        total = self.behind * root * self.loss.factor
        # A weight that was cast already is not read again.
        ahead = 1.0 if layer.operands is not None else layer.factor
        with cast_marker(layer.arithmetic, phase):  # the phase that casts weights for all micro-batches
            weight = rescale(layer.weight, ahead, 1 / (self.deviation * total))
        y = linear(rescale(x, 1.0, outputs**-0.5), weight, layer.arithmetic, phase, layer.operands)
        return rescale(y, 1 / root, 1.0)


def make_layer_unit(layer: Linear, gain: float, behind: float, loss: LossGradient) -> float:
    """Makes a layer's product unit-scaled; returns the factor of its input's gradient against the true one."""
    outputs, inputs = layer.weight.shape
    deviation = gain / math.sqrt(inputs)
    layer.unit = UnitProduct(deviation, behind, loss)
    layer.factor = 1 / deviation
    return behind * math.sqrt(inputs / outputs)


@dataclass
class UnitFeed:
    """A feed-forward block: deviation and slope of its activation for a Gaussian, and factors at both ends."""

    deviation: float
    slope: float
    enter: tuple[float, float] = (1.0, 1.0)
    leave: tuple[float, float] = (1.0, 1.0)

    def __call__(self, feed: FeedForward, x: Tensor, phase: Phases) -> Tensor:
        hidden = rescale(feed.up(rescale(x, *self.enter), phase), 1.0, 1 / self.slope)
        y: Tensor = feed.down(rescale(feed.activate(hidden), 1 / self.deviation, 1.0), phase)
        return rescale(y, *self.leave)


def make_feed_unit(feed: FeedForward, gain: float, behind: float, loss: LossGradient) -> float:
    feed.unit = unit = UnitFeed(GATED, GATED_SLOPE) if feed.gated else UnitFeed(GELU, GELU_SLOPE)
    between = make_layer_unit(feed.down, gain, behind, loss) * unit.deviation / unit.slope
    return make_layer_unit(feed.up, 1.0, between, loss)


@dataclass(frozen=True)
class UnitCore:
    """Divides attention's core by the deviation of its result; gradients of queries, keys and values shrink alike."""

    inner: Callable[[Tensor, Tensor, Tensor], Tensor]
    deviation: float

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.inner(q, k, v) * (1 / self.deviation)


def attention_deviation(tokens: int) -> float:
    """The deviation of causal attention with random scores of deviation 1: token t mixes 1 + (t - 1) / e values."""
    return math.sqrt(sum(1 / (1 + place / math.e) for place in range(tokens)) / tokens)


class UnitSum(NamedTuple):
    """The weights of stream and branch in one of a block's sums, and the factor that ends the branch's gradient."""

    skip: float
    branch: float
    backward: float


@dataclass(frozen=True)
class UnitResidual:
    """A unit-scaled block's pass: both sums."""

    attn: UnitSum
    mlp: UnitSum

    def __call__(self, block: Block, x: Tensor, phase: Phases, rotation: Tensor | None) -> Tensor:
        change = block.attn(block.norm_attn(rescale(x, 1.0, self.attn.backward)), phase, rotation)
        x = x * self.attn.skip + rescale(block.in_stream(change, x.dtype), self.attn.branch, 1.0)
        change = block.mlp(block.norm_mlp(rescale(x, 1.0, self.mlp.backward)), phase)
        return x * self.mlp.skip + rescale(block.in_stream(change, x.dtype), self.mlp.branch, 1.0)


@dataclass
class UnitStream:
    """Scales a model's stream at its beginning and at the loss, where logits get the head's `gain`."""

    deviation: float
    behind: float
    loss: LossGradient
    gain: float

    def begin(self, tokens: int) -> None:
        self.loss.begin(tokens)

    def scale_embedding(self, x: Tensor) -> Tensor:
        return rescale(x, 1 / self.deviation, 1 / (self.deviation * self.behind * self.loss.factor))

    def scale_logits(self, logits: Tensor) -> Tensor:
        return rescale(logits, self.gain, self.loss.factor)


def scale_to_unit(model: nn.Module, tokens: int = 0) -> None:
    """Makes a built model unit-scaled, for sequences of this length. Raises UsageError for other kinds of models before
    it changes anything."""
    if type(model) is FeedForward:
        # Its inputs and incoming gradients have a deviation of 1 already.
        deviation = GATED if model.gated else GELU
        factor = make_feed_unit(model, 1.0, 1 / deviation, LossGradient(2))
        assert isinstance(model.unit, UnitFeed)
        model.unit.enter = (1.0, 1 / factor)
        model.unit.leave = (deviation, 1.0)
    elif type(model) is GPT and all(type(block.mlp) is FeedForward for block in model.blocks):
        _scale_gpt(model, tokens)
    else:
        name = "a GPT with experts" if type(model) is GPT else type(model).__name__
        raise UsageError(
            f"unit scaling has constants for a GPT and for a feed-forward block, and none for {name}: "
            "choose fp8, whose scales come from the tensors."
        )


def _scale_gpt(model: GPT, tokens: int) -> None:
    # 1. The head; a tied one begins with the embedding's deviation.
    loss = LossGradient(model.head.weight.shape[0])
    head = _EMBEDDING * math.sqrt(model.embedding.shape[1]) if model.head.weight is model.embedding else 1.0
    behind = make_layer_unit(model.head, head, 1 / head, loss)

    # 2. Both parts of each block. The stream grows with each: `size` is its deviation before the next part.
    gain = 1 / math.sqrt(2 * len(model.blocks))
    first = _EMBEDDING if model.positions is None else math.hypot(_EMBEDDING, _PLACES)
    size = first
    mixed = attention_deviation(tokens)
    for block in model.blocks:
        assert isinstance(block, Block) and isinstance(block.mlp, FeedForward)
        feed_deviation = GATED if block.mlp.gated else GELU
        sums = []
        for norm, deviation in ((block.norm_attn, mixed), (block.norm_mlp, feed_deviation)):
            next_size = math.hypot(size, gain * deviation)
            skip = size / next_size
            branch = gain * deviation / next_size
            inside = behind / branch
            if norm is block.norm_mlp:
                inside = make_feed_unit(block.mlp, gain, inside, loss)
            else:
                inside = make_layer_unit(block.attn.qkv, 1.0, make_layer_unit(block.attn.out, gain, inside, loss), loss)
            norm.unit = UnitWeight(inside, loss)
            norm.epsilon = _NORM_EPSILON / size**2
            sums.append(UnitSum(skip, branch, behind / inside))
            size = next_size
        block.attn.core = UnitCore(block.attn.core, mixed)
        block.unit = UnitResidual(*sums)

    # 3. The last norm, and both ends of the stream.
    model.norm.unit = UnitWeight(behind, loss)
    model.norm.epsilon = _NORM_EPSILON / size**2
    model.unit = UnitStream(first, behind, loss, head)
