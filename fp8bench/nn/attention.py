"""Self-attention: the core in several forms, and the layer of products around it.

A core takes queries (batch, heads, tokens, head width), keys and values (batch, key heads, tokens, head width), and
returns the mixed values in the queries' shape and dtype. Where there are fewer key heads, neighbouring heads share one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8bench.nn.linear import Choose, Linear, region
from fp8bench.numerics.operands import OperatorWatch
from fp8bench.protocols import Arithmetic, Operand, Phases, Role

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


class Cache(Protocol):
    """Keys and values of all tokens up to the current ones, and the core that attends to them, for one layer."""

    def store(self, k: Tensor, v: Tensor, phase: Phases) -> tuple[Tensor, Tensor]:
        """Add keys and values of new tokens; return those of all tokens, as the cache keeps them."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


def attention_by(name: str) -> AbstractContextManager[None]:
    """Selects attention's kernel in the body, which has to include backward: recomputed blocks choose again there."""
    if name == "auto":
        return nullcontext()
    return sdpa_kernel(SDPBackend.MATH if name == "math" else getattr(SDPBackend, f"{name.upper()}_ATTENTION"))


@dataclass(frozen=True)
class FusedCore:
    """torch's scaled dot-product attention, in the dtype of its inputs.

    In fp32 the one GPU kernel that does not store the scores takes no grouped queries. Keys and values are repeated for
    it, which costs their size; the scores of 16384 tokens would take 1 GiB a head.
    """

    causal: bool = True
    kernel: str = "auto"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with attention_by(self.kernel):
            return fused_attention(q, k, v, self.causal)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.dtype == torch.float32 and q.device.type != "cpu":
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)


class WrittenScores(OperatorWatch):  # type: ignore[no-untyped-call]
    """Detects attention kernels that store their scores: only these run a separate softmax. `most` is the size of the
    largest in bytes, 0 without any."""

    most = 0

    def see(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        result = func(*args, **named)
        if func._schema.name in ("aten::_softmax", "aten::_safe_softmax"):
            self.most = max(self.most, result.nbytes)
        return result


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            # Bit-identical to backward(gradient), which would import sympy to inspect the gradient. Parameters that
            # `run` holds get their gradients.
            (ctx.run(*inputs) * gradient.detach()).sum().backward()
        return None, *(leaf.grad for leaf in inputs)


def recompute(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Returns run(*inputs), keeping only the inputs for backward, which runs it again. Nothing in `run` may be random.

    For references, which nobody times: torch's checkpoints, which timed steps take, import the compiler.
    """
    return _Recomputed.apply(run, *inputs)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class HeadwiseCore:
    """Runs another core one head of queries of one sequence at a time, recomputed in backward.

    For fp64 references, which no fused GPU kernel computes: all scores at once would not fit into memory, nor would
    those of all heads that share a key head.
    """

    inner: Core

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        mixed = []
        for i in range(q.shape[0]):
            for j in range(q.shape[1]):
                head = slice(j, j + 1)
                key_head = slice(j // group, j // group + 1)
                sequence = slice(i, i + 1)
                parts = q[sequence, head], k[sequence, key_head], v[sequence, key_head]
                mixed.append(recompute(self.inner, *parts))
        return torch.cat(mixed).view(q.shape)


@dataclass(frozen=True)
class EmulatedCore:
    """Attention written out, with operands and scores of both products rounded to the arithmetic's precision.

    Queries and keys are cast along the head width, probabilities and values along the keys, with the precision's
    scales; sums, mask and softmax are fp32. Scores are rounded without a scale: a kernel makes them tile by tile, and
    their largest magnitude is not known when the first is written. So scores beyond the format's range are lost, and it
    matters whether the factor 1 / sqrt(head width) is applied to the rounded scores or, `prescaled`, to the queries; a
    scale would cancel that factor. A value's scale may depend on later tokens.
    Backward ignores all rounding: it multiplies the rounded values by fp32 gradients.
    """

    arithmetic: Arithmetic
    prescaled: bool = False
    causal: bool = True
    # Each tensor that is cast has its own arithmetic, because remembered scales belong to one tensor.
    parts: dict[str, Arithmetic] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = ("queries", "keys", "scores", "probabilities", "values")
        object.__setattr__(self, "parts", {part: self.arithmetic.layer(f"core.{part}") for part in parts})

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        factor = 1 / math.sqrt(q.shape[-1])
        scores = self._round(self.scores(q, k), "scores", scaled=False)
        if not self.prescaled:
            scores = scores * factor
        # The mask comes after rounding: no format of scores needs an infinity.
        if self.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        probabilities = self._round(scores.softmax(-1), "probabilities")
        values = self._round(v.transpose(-1, -2), "values")
        mixed = _join_heads(probabilities, values) @ values.transpose(-1, -2)
        return mixed.view(q.shape).to(q.dtype)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """The product of queries and keys in fp32, not yet rounded, masked entries included."""
        if self.prescaled:
            q = q.to(torch.float32) / math.sqrt(q.shape[-1])
        queries = self._round(q, "queries")
        keys = self._round(k, "keys")
        return (_join_heads(queries, keys) @ keys.transpose(-1, -2)).view(*q.shape[:-1], k.shape[-2])

    def _round(self, x: Tensor, part: str, scaled: bool = True) -> Tensor:
        arithmetic = self.parts[part]
        cast = arithmetic.cast if scaled else arithmetic.cast_without_scale
        return _StraightThrough.apply(x, arithmetic, cast)  # type: ignore[no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    """The fp32 values that a cast leaves of a tensor; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arithmetic: Arithmetic, cast: Callable[[Tensor, Role], Operand]) -> Tensor:
        ctx.dtype = x.dtype
        operand = cast(x.reshape(-1, x.shape[-1]), Role.INPUT)
        return arithmetic.restore(operand, torch.float32).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].to(ctx.dtype), None, None


def _join_heads(x: Tensor, shared: Tensor) -> Tensor:
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

    def forward(self, x: Tensor, phase: Phases, rotation: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        q, k, v = self.heads(x, phase)
        if rotation is not None:
            rotation = rotation.to(q.dtype)  # the stream's dtype may differ from the model's
            q = rotate(q, rotation)
            k = rotate(k, rotation)
        if cache is not None:
            k, v = cache.store(k, v, phase)
        mixed = region(phase.attention, cache or self.core, q, k, v)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2), phase)
        return y.to(x.dtype)

    def heads(self, x: Tensor, phase: Phases) -> list[Tensor]:
        """Queries, keys and values of (batch, tokens, width), each (batch, heads, tokens, head width)."""
        # Layers may return different carriers; the core works in the dtype of the stream.
        parts = self.qkv(x, phase).to(x.dtype).split(self.sizes, dim=-1)
        return [part.view(*part.shape[:2], -1, self.head_width).transpose(1, 2) for part in parts]


def rotations(context: int, head_width: int) -> Tensor:
    """Cosines and sines of rotary positions, (context, 2, head_width / 2)."""
    frequencies = 1.0 / 500000.0 ** (torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(context), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    cosine = rotation[:, 0]
    sine = rotation[:, 1]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
