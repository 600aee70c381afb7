"""Self-attention: its core in one of several forms, and the layer of products around it.

A core takes queries (batch, heads, tokens, head width), keys and values (batch, key heads, tokens, head width) and
gives the mixed values in the queries' shape and dtype; where there are fewer key heads, neighbouring heads share one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.linear import Choose, Linear, region
from fp8bench.nn.shared_workloads import attention_by
from fp8bench.nn.uncompiled import recomputed
from fp8bench.numerics.operands import OperatorWatch
from fp8bench.protocols import Arithmetic, Operand, Phases, Role

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class FusedCore:
    """torch's own scaled dot-product attention, in the dtype of what it is given.

    In fp32 a GPU has one kernel that does not write the scores down, and it takes no grouped queries: there keys and
    values are repeated for it, which costs their size; the scores of 16384 tokens would take 1 GiB a head.
    """

    causal: bool = True
    kernel: str = "auto"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with attention_by(self.kernel):
            return self._mixed(q, k, v)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[1] != k.shape[1] and q.dtype == torch.float32 and q.device.type != "cpu":
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1])


class WrittenScores(OperatorWatch):  # type: ignore[no-untyped-call]
    """Sees what a kernel that writes its scores down does and no fused one: a softmax by itself. `most` are the bytes
    of the largest, 0 where there was none."""

    most = 0

    def see(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        result = func(*args, **named)
        if func._schema.name in ("aten::_softmax", "aten::_safe_softmax"):
            self.most = max(self.most, result.nbytes)
        return result


@dataclass(frozen=True)
class HeadwiseCore:
    """Another core, one head of queries of one sequence at a time and recomputed in backward.

    For references in fp64, which no fused kernel of a GPU computes: all scores at once would not fit into memory, nor
    would those of all heads that share a key head.
    """

    inner: Core

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        mixed = [
            recomputed(
                self.inner,
                q[i : i + 1, j : j + 1],
                *(tensor[i : i + 1, j // group : j // group + 1] for tensor in (k, v)),
            )
            for i in range(q.shape[0])
            for j in range(q.shape[1])
        ]
        return torch.cat(mixed).view(q.shape)


@dataclass(frozen=True)
class EmulatedCore:
    """The explicit form, both products of values in the arithmetic's precision, and the scores kept in it.

    Queries and keys are cast along the head width, probabilities and values along the keys, with the precision's
    scales; sums, mask and softmax are fp32. The scores go onto the elements' own grid without a scale: they are made
    tile by tile, and nobody knows their largest magnitude when the first of them is written. So what lies beyond the
    format's range is lost, and it matters whether scores are scaled by 1 / sqrt(head width) after they are rounded, or
    (`prescaled`) the queries before; a scale would cancel that factor. A value's scale may depend on later tokens.
    Backward goes straight through all rounding: it multiplies the rounded values by gradients in fp32.
    """

    arithmetic: Arithmetic
    prescaled: bool = False
    causal: bool = True
    # What is cast, each with its own arithmetic: scales that are remembered are those of one tensor.
    parts: dict[str, Arithmetic] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = ("queries", "keys", "scores", "probabilities", "values")
        object.__setattr__(self, "parts", {part: self.arithmetic.layer(f"core.{part}") for part in parts})

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        factor = 1 / math.sqrt(q.shape[-1])
        scores = self._rounded(self.scores(q, k), "scores", scaled=False)
        if not self.prescaled:
            scores = scores * factor
        if self.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        probabilities = self._rounded(scores.softmax(-1), "probabilities")
        values = self._rounded(v.transpose(-1, -2), "values")
        mixed = _grouped(probabilities, values) @ values.transpose(-1, -2)
        return mixed.view(q.shape).to(q.dtype)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """The product of queries and keys in fp32, before it is rounded itself, masked entries included."""
        if self.prescaled:
            q = q.to(torch.float32) / math.sqrt(q.shape[-1])
        queries, keys = self._rounded(q, "queries"), self._rounded(k, "keys")
        return (_grouped(queries, keys) @ keys.transpose(-1, -2)).view(*q.shape[:-1], k.shape[-2])

    def _rounded(self, x: Tensor, part: str, scaled: bool = True) -> Tensor:
        arithmetic = self.parts[part]
        cast = arithmetic.cast if scaled else arithmetic.unscaled
        rounded: Tensor = _StraightThrough.apply(x, arithmetic, cast)  # type: ignore[no-untyped-call]
        return rounded


class _StraightThrough(torch.autograd.Function):
    """A tensor as the fp32 values that a cast of an arithmetic leaves of it; its gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arithmetic: Arithmetic, cast: Callable[[Tensor, Role], Operand]) -> Tensor:
        ctx.dtype = x.dtype
        operand = cast(x.reshape(-1, x.shape[-1]), Role.INPUT)
        return arithmetic.restore(operand, torch.float32).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].to(ctx.dtype), None, None


def _grouped(x: Tensor, shared: Tensor) -> Tensor:
    """(batch, heads, tokens, n) with the heads that share a key head joined along the tokens."""
    return x.reshape(*shared.shape[:2], -1, x.shape[-1])


class BareAttention(nn.Module):
    """A core alone, under its phase."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core = core

    def forward(self, q: Tensor, k: Tensor, v: Tensor, phase: Phases) -> Tensor:
        return region(phase.attention, self.core, q, k, v)


class SelfAttention(nn.Module):
    """A fused input product, the core, and the output product."""

    def __init__(self, width: int, heads: int, key_heads: int, gain: float, choose: Choose, core: Core) -> None:
        super().__init__()
        self.head_width = width // heads
        self.sizes = (width, key_heads * self.head_width, key_heads * self.head_width)
        self.core = core
        self.qkv = Linear(width, sum(self.sizes), choose("qkv"))
        self.out = Linear(width, width, choose("out"), gain)

    def forward(self, x: Tensor, phase: Phases, rotation: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x, phase)
        if rotation is not None:
            own = rotation.to(q.dtype)  # a stream may have another dtype than the model
            q, k = rotate(q, own), rotate(k, own)
        mixed = region(phase.attention, self.core, q, k, v)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2), phase)
        return y.to(x.dtype)

    def heads(self, x: Tensor, phase: Phases) -> list[Tensor]:
        """Queries, keys and values of (batch, tokens, width), each (batch, heads, tokens, head width)."""
        # A product of another precision hands back its own carrier; the core works in what comes in.
        parts = self.qkv(x, phase).to(x.dtype).split(self.sizes, dim=-1)
        return [part.view(*part.shape[:2], -1, self.head_width).transpose(1, 2) for part in parts]


def rotations(context: int, head_width: int) -> Tensor:
    """Cosines and sines of rotary positions, (context, 2, head_width / 2)."""
    frequencies = 1.0 / 500000.0 ** (torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(context), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn pairs of features (first half with second half) by their position's angles."""
    cosine, sine = rotation[:, 0], rotation[:, 1]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
