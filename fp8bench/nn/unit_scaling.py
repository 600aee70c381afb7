"""Unit scaling (Blake et al., 2023): constants that depend on a model's shapes keep its tensors' standard deviation
near 1.

The result of every operation is multiplied by a constant, and its gradient by another. So activations, weights and
gradients have a deviation near 1 when a training starts, for any widths, and casts to FP8 need no scale. A product over
n inputs is divided by root(n), and its input gradient by the root of the number of outputs. GELU is divided by its
deviation for Gaussian inputs. In a residual sum the squares of both factors add up to 1. The gradient of the loss is
multiplied by tokens x vocabulary / root(vocabulary - 1).

The model is still the same function of the same weights. Weights are stored as in every other precision, and are
multiplied just before their cast to get a deviation of 1. Each weight gets its true gradient. Under AdamW this equals a
training of weights with a deviation of 1, with learning rates divided by the initial deviations. So all arms have the
same weights, rates, clipping and checkpoints, and differ only in rounding.

`gradient_factor` is the ratio of an output's scaled gradient to its true gradient. It excludes the factor of the loss,
which depends on the batch.
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
from fp8bench.nn.linear import Linear, choose_cast_marker, linear
from fp8bench.nn.parts import FeedForward
from fp8bench.protocols import Phases

# For Gaussian inputs: the standard deviations of GELU and of Llama's gate, and the root mean squares of their
# derivatives.
GELU_DEVIATION = 0.588
GELU_SLOPE = 0.675
GATED_DEVIATION = 0.596
GATED_SLOPE = 0.606
# The initial standard deviations of a GPT's embeddings and positions.
_INITIAL_EMBEDDING_DEVIATION = 0.02
_POSITION_EMBEDDING_DEVIATION = 0.01
_NORM_EPSILON = 1e-5


class _RescaledTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.factor = backward
        return x.view_as(x) if forward == 1.0 else x * forward

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] if ctx.factor == 1.0 else gradients[0] * ctx.factor, None, None


def rescale(x: Tensor, forward: float, backward: float) -> Tensor:
    """Multiplies x by `forward`, and its gradient by `backward`."""
    if forward == backward == 1.0:
        return x
    return _RescaledTensor.apply(x, forward, backward)  # type: ignore[no-untyped-call]


@dataclass
class LossGradient:
    """The factor by which the gradient of the loss is multiplied. It depends on the number of tokens in the current
    batch.
    """

    vocabulary: int
    factor: float = 1.0

    def set_token_count(self, tokens: int) -> None:
        # A vocabulary of one token must not cause a division by 0.
        self.factor = tokens * self.vocabulary / math.sqrt(max(1, self.vocabulary - 1))


@dataclass
class UnitScaledNormWeight:
    """Returns a norm's weight unchanged. In backward it turns the scaled gradient of the weight into the true one."""

    gradient_factor: float
    loss: LossGradient

    def __call__(self, weight: Tensor) -> Tensor:
        return rescale(weight, 1.0, 1 / (self.gradient_factor * self.loss.factor))


@dataclass
class UnitScaledProduct:
    """Computes the unit-scaled product of a linear layer. `deviation` is the initial standard deviation of its
    weight.
    """

    deviation: float
    gradient_factor: float
    loss: LossGradient

    def __call__(self, layer: Linear, x: Tensor, phase: Phases) -> Tensor:
        outputs, inputs = layer.weight.shape
        sqrt_of_input_count = math.sqrt(inputs)
        total_gradient_factor = self.gradient_factor * sqrt_of_input_count * self.loss.factor
        # If `operands` has the weight that was cast earlier, the factor was applied before that cast.
        weight_scale = 1.0 if layer.operands is not None else layer.weight_factor
        # Time this multiplication as part of the weight's cast, as if the cast were done once for all micro-batches.
        with choose_cast_marker(layer.arithmetic, phase):
            weight = rescale(layer.weight, weight_scale, 1 / (self.deviation * total_gradient_factor))
        y = linear(rescale(x, 1.0, outputs**-0.5), weight, layer.arithmetic, phase, layer.operands)
        return rescale(y, 1 / sqrt_of_input_count, 1.0)


def make_layer_unit_scaled(layer: Linear, gain: float, gradient_factor: float, loss: LossGradient) -> float:
    """Makes a linear layer unit-scaled. Returns the ratio of the input gradient that the layer then computes to the
    true input gradient.
    """
    outputs, inputs = layer.weight.shape
    deviation = gain / math.sqrt(inputs)
    layer.unit_scaling = UnitScaledProduct(deviation, gradient_factor, loss)
    layer.weight_factor = 1 / deviation
    return gradient_factor * math.sqrt(inputs / outputs)


@dataclass
class UnitScaledFeedForward:
    """The forward pass of a unit-scaled feed-forward part. For Gaussian inputs, `deviation` is the standard deviation
    of the activation function, and `slope` the root mean square of its derivative. `input_factors` and `output_factors`
    multiply the part's input and output: one factor in forward, one in backward.
    """

    deviation: float
    slope: float
    input_factors: tuple[float, float] = (1.0, 1.0)
    output_factors: tuple[float, float] = (1.0, 1.0)

    def __call__(self, feed_forward: FeedForward, x: Tensor, phase: Phases) -> Tensor:
        hidden = rescale(feed_forward.up(rescale(x, *self.input_factors), phase), 1.0, 1 / self.slope)
        y: Tensor = feed_forward.down(rescale(feed_forward.apply_activation(hidden), 1 / self.deviation, 1.0), phase)
        return rescale(y, *self.output_factors)


def scale_feed_forward(feed_forward: FeedForward, gain: float, gradient_factor: float, loss: LossGradient) -> float:
    feed_forward.unit_scaling = unit = (
        UnitScaledFeedForward(GATED_DEVIATION, GATED_SLOPE)
        if feed_forward.gated
        else UnitScaledFeedForward(GELU_DEVIATION, GELU_SLOPE)
    )
    hidden_gradient_factor = (
        make_layer_unit_scaled(feed_forward.down, gain, gradient_factor, loss) * unit.deviation / unit.slope
    )
    return make_layer_unit_scaled(feed_forward.up, 1.0, hidden_gradient_factor, loss)


@dataclass(frozen=True)
class UnitScaledAttention:
    """Divides the result of an attention core by its standard deviation. The gradients of queries, keys and values
    are divided by the same number.
    """

    inner_attention_core: Callable[[Tensor, Tensor, Tensor], Tensor]
    deviation: float

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.inner_attention_core(q, k, v) * (1 / self.deviation)


def compute_attention_deviation(tokens: int) -> float:
    """Returns the standard deviation of the output of causal attention, for random scores and values with standard
    deviation 1. Token t then averages about 1 + (t - 1) / e values.
    """
    return math.sqrt(sum(1 / (1 + position / math.e) for position in range(tokens)) / tokens)


class ResidualSumFactors(NamedTuple):
    """The factors of a residual sum in a unit-scaled block: of the residual stream (`skip`), of the branch's output,
    and of the gradient of the branch's input (`backward`).
    """

    skip: float
    branch: float
    backward: float


@dataclass(frozen=True)
class UnitScaledResidual:
    """The forward pass of a unit-scaled block. `attn` and `mlp` have the factors of its two residual sums."""

    attn: ResidualSumFactors
    mlp: ResidualSumFactors

    def __call__(self, block: Block, x: Tensor, phase: Phases, rotation: Tensor | None) -> Tensor:
        change = block.attn(block.norm_attn(rescale(x, 1.0, self.attn.backward)), phase, rotation)
        x = x * self.attn.skip + rescale(block.convert_change(change, x.dtype), self.attn.branch, 1.0)
        change = block.mlp(block.norm_mlp(rescale(x, 1.0, self.mlp.backward)), phase)
        return x * self.mlp.skip + rescale(block.convert_change(change, x.dtype), self.mlp.branch, 1.0)


@dataclass
class EmbeddingLogitScaling:
    """Scales a model's embedding and logits, and their gradients. `gain` is the factor of the logits."""

    deviation: float
    gradient_factor: float
    loss: LossGradient
    gain: float

    def set_token_count(self, tokens: int) -> None:
        self.loss.set_token_count(tokens)

    def scale_embedding(self, x: Tensor) -> Tensor:
        return rescale(x, 1 / self.deviation, 1 / (self.deviation * self.gradient_factor * self.loss.factor))

    def scale_logits(self, logits: Tensor) -> Tensor:
        return rescale(logits, self.gain, self.loss.factor)


def scale_to_unit(model: nn.Module, tokens: int = 0) -> None:
    """Makes a model unit-scaled, for sequences of `tokens` tokens. Raises UsageError, before it changes anything, if
    this module has no constants for this kind of model.
    """
    if type(model) is FeedForward:
        # A feed-forward part alone is assumed to have inputs and output gradients with a standard deviation of 1.
        deviation = GATED_DEVIATION if model.gated else GELU_DEVIATION
        # Without a loss, the factor of LossGradient stays 1, whatever its vocabulary is.
        feed_forward_factor = scale_feed_forward(model, 1.0, 1 / deviation, LossGradient(2))
        assert isinstance(model.unit_scaling, UnitScaledFeedForward)
        model.unit_scaling.input_factors = (1.0, 1 / feed_forward_factor)
        model.unit_scaling.output_factors = (deviation, 1.0)
    elif type(model) is GPT and all(type(block.mlp) is FeedForward for block in model.blocks):
        _scale_gpt_to_unit(model, tokens)
    else:
        name = "a GPT with experts" if type(model) is GPT else type(model).__name__
        raise UsageError(
            f"unit scaling has constants for a GPT and for a feed-forward block, but none for {name}: "
            "choose fp8, whose scales come from the tensors."
        )


def _scale_gpt_to_unit(model: GPT, tokens: int) -> None:
    # 1. Scale the head. The initial weights of a tied head have the standard deviation of the embedding.
    loss = LossGradient(model.head.weight.shape[0])
    output_head_gain = (
        _INITIAL_EMBEDDING_DEVIATION * math.sqrt(model.embedding.shape[1])
        if model.head.weight is model.embedding
        else 1.0
    )
    gradient_factor = make_layer_unit_scaled(model.head, output_head_gain, 1 / output_head_gain, loss)

    # 2. Scale both branches of each block. Each branch increases the deviation of the residual stream.
    # `residual_stream_deviation` is the deviation before the next branch.
    gain = 1 / math.sqrt(2 * len(model.blocks))
    initial_residual_deviation = (
        _INITIAL_EMBEDDING_DEVIATION
        if model.positions is None
        else math.hypot(_INITIAL_EMBEDDING_DEVIATION, _POSITION_EMBEDDING_DEVIATION)
    )
    residual_stream_deviation = initial_residual_deviation
    attention_deviation = compute_attention_deviation(tokens)
    for block in model.blocks:
        assert isinstance(block, Block) and isinstance(block.mlp, FeedForward)
        feed_forward_deviation = GATED_DEVIATION if block.mlp.gated else GELU_DEVIATION
        sums = []
        for norm, deviation in ((block.norm_attn, attention_deviation), (block.norm_mlp, feed_forward_deviation)):
            next_residual_stream_deviation = math.hypot(residual_stream_deviation, gain * deviation)
            skip = residual_stream_deviation / next_residual_stream_deviation
            branch_output_factor = gain * deviation / next_residual_stream_deviation
            branch_gradient_factor = gradient_factor / branch_output_factor
            if norm is block.norm_mlp:
                branch_gradient_factor = scale_feed_forward(block.mlp, gain, branch_gradient_factor, loss)
            else:
                branch_gradient_factor = make_layer_unit_scaled(block.attn.out, gain, branch_gradient_factor, loss)
                branch_gradient_factor = make_layer_unit_scaled(block.attn.qkv, 1.0, branch_gradient_factor, loss)
            norm.unit_scaling = UnitScaledNormWeight(branch_gradient_factor, loss)
            # The norm's input is divided by this deviation. Divide epsilon by its square, so that the result is
            # unchanged.
            norm.epsilon = _NORM_EPSILON / residual_stream_deviation**2
            sums.append(ResidualSumFactors(skip, branch_output_factor, gradient_factor / branch_gradient_factor))
            residual_stream_deviation = next_residual_stream_deviation
        block.attn.core = UnitScaledAttention(block.attn.core, attention_deviation)
        block.unit_scaling = UnitScaledResidual(*sums)

    # 3. Scale the last norm, the embedding and the logits.
    model.norm.unit_scaling = UnitScaledNormWeight(gradient_factor, loss)
    model.norm.epsilon = _NORM_EPSILON / residual_stream_deviation**2
    model.unit_scaling = EmbeddingLogitScaling(initial_residual_deviation, gradient_factor, loss, output_head_gain)
