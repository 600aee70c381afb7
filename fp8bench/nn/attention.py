"""Self-attention: several forms of its core, and the layer with the products around the core.

A core takes queries (batch, heads, tokens, head width), and keys and values (batch, key heads, tokens, head width).
It returns the mixed values in the shape and dtype of the queries. If there are fewer key heads than heads,
neighbouring heads share a key head.
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

from fp8bench.nn.linear import ChooseArithmetic, Linear, region
from fp8bench.numerics.operands import OperatorWatch
from fp8bench.protocols import Arithmetic, Operand, Phases, Role

AttentionCore = Callable[[Tensor, Tensor, Tensor], Tensor]


class KeyValueCache(Protocol):
    """The cache of one layer: stores keys and values of all tokens up to the current ones, and computes attention
    over them.
    """

    def store(self, k: Tensor, v: Tensor, phase: Phases) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of new tokens. Returns the keys and values of all tokens up to these, rounded to
        the format of the cache.
        """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


def select_attention_kernel(name: str) -> AbstractContextManager[None]:
    """Returns a context in which torch uses the named attention kernel. The `with` block must include the backward
    pass, because recomputed blocks choose a kernel there.
    """
    if name == "auto":
        return nullcontext()
    return sdpa_kernel(SDPBackend.MATH if name == "math" else getattr(SDPBackend, f"{name.upper()}_ATTENTION"))


@dataclass(frozen=True)
class FusedCore:
    """torch's scaled dot-product attention in the dtype of its inputs.

    In fp32 on a GPU, only one kernel avoids storing the scores, and that kernel needs as many key heads as query heads.
    So keys and values are repeated, which needs memory of their size. Stored scores of 16384 tokens would need 1 GiB
    for each head.
    """

    causal: bool = True
    kernel: str = "auto"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with select_attention_kernel(self.kernel):
            return compute_fused_attention(q, k, v, self.causal)


def compute_fused_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
    has_shared_key_heads = q.shape[1] != k.shape[1]
    # Repeat the key heads, so that torch can use the kernel that does not store the scores.
    if has_shared_key_heads and q.dtype == torch.float32 and q.device.type != "cpu":
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        has_shared_key_heads = False
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=has_shared_key_heads)


class StoredScores(OperatorWatch):  # type: ignore[no-untyped-call]
    """Detects attention kernels that store their scores. Only such kernels run a separate softmax. `largest_bytes` is
    the size in bytes of the largest scores, or 0 if no scores were stored.
    """

    largest_bytes = 0

    def watch_operator(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        result = func(*args, **named)
        if func._schema.name in ("aten::_softmax", "aten::_safe_softmax"):
            self.largest_bytes = max(self.largest_bytes, result.nbytes)
        return result


class _BackwardRecomputation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            # This gives the same bits as backward(gradient), which would import sympy to inspect the gradient. It also
            # computes the gradients of parameters that `run` uses.
            (ctx.run(*inputs) * gradient.detach()).sum().backward()
        return None, *(leaf.grad for leaf in inputs)


def recompute(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Returns run(*inputs), but keeps only the inputs for backward, which calls `run` again. `run` must be
    deterministic.

    Untimed references use this function. Timed steps use torch's checkpoints, which import the compiler.
    """
    return _BackwardRecomputation.apply(run, *inputs)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class HeadwiseAttentionCore:
    """Runs another attention core for one query head of one sequence at a time, and computes it again in backward.

    fp64 references use this core, because no fused GPU kernel computes fp64, and because the fp64 scores of all heads
    together would not fit into memory.
    """

    single_head_core: AttentionCore

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_per_key_head = q.shape[1] // k.shape[1]
        head_outputs = []
        for i in range(q.shape[0]):
            for j in range(q.shape[1]):
                head_slice = slice(j, j + 1)
                key_head_slice = slice(j // heads_per_key_head, j // heads_per_key_head + 1)
                sequence_slice = slice(i, i + 1)
                head_inputs = (
                    q[sequence_slice, head_slice],
                    k[sequence_slice, key_head_slice],
                    v[sequence_slice, key_head_slice],
                )
                head_outputs.append(recompute(self.single_head_core, *head_inputs))
        return torch.cat(head_outputs).view(q.shape)


@dataclass(frozen=True)
class EmulatedAttentionCore:
    """Attention in separate operations, which rounds the scores and the operands of both products to a precision.

    Queries and keys are cast along the head width, probabilities and values along the keys, with the precision's
    scales. Sums, mask and softmax are fp32. Scores have no scale, because a kernel computes them tile by tile and
    cannot know their largest magnitude. So scores beyond the format's range are lost: they saturate, or in fp16
    become infinite. For the same reason results depend on where the factor 1 / sqrt(head width) is applied: to the
    scores or, if `scales_queries`, to the queries.

    A value's scale may depend on later tokens. Backward rounds nothing: gradients stay fp32.
    """

    arithmetic: Arithmetic
    scales_queries: bool = False
    causal: bool = True
    # Each tensor has its own arithmetic, because delayed scales belong to one tensor.
    parts: dict[str, Arithmetic] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tensor_names = ("queries", "keys", "scores", "probabilities", "values")
        object.__setattr__(self, "parts", {part: self.arithmetic.layer(f"core.{part}") for part in tensor_names})

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        softmax_scale = 1 / math.sqrt(q.shape[-1])
        scores = self._round_attention_part(self.compute_scores(q, k), "scores", scaled=False)
        if not self.scales_queries:
            scores = scores * softmax_scale
        # The mask is applied after rounding, because not every format of scores has infinities.
        if self.causal:
            causal_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(causal_mask, -math.inf)
        probabilities = self._round_attention_part(scores.softmax(-1), "probabilities")
        values = self._round_attention_part(v.transpose(-1, -2), "values")
        attention_output = _join_heads(probabilities, values) @ values.transpose(-1, -2)
        return attention_output.view(q.shape).to(q.dtype)

    def compute_scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns the fp32 product of rounded queries and keys, before the scores are rounded or masked."""
        if self.scales_queries:
            q = q.to(torch.float32) / math.sqrt(q.shape[-1])
        queries = self._round_attention_part(q, "queries")
        keys = self._round_attention_part(k, "keys")
        return (_join_heads(queries, keys) @ keys.transpose(-1, -2)).view(*q.shape[:-1], k.shape[-2])

    def _round_attention_part(self, x: Tensor, part: str, scaled: bool = True) -> Tensor:
        arithmetic = self.parts[part]
        cast = arithmetic.cast if scaled else arithmetic.cast_without_scale
        return _StraightThrough.apply(x, arithmetic, cast)  # type: ignore[no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    """Returns the rounded values of a tensor in fp32. The gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arithmetic: Arithmetic, cast: Callable[[Tensor, Role], Operand]) -> Tensor:
        ctx.dtype = x.dtype
        operand = cast(x.reshape(-1, x.shape[-1]), Role.INPUT)
        return arithmetic.restore(operand, torch.float32).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].to(ctx.dtype), None, None


def _join_heads(x: Tensor, keys: Tensor) -> Tensor:
    """Joins the query heads that share a key head into one matrix, one after the other along the tokens. `x` is
    (batch, heads, tokens, n). The second dimension of `keys` is the number of key heads.
    """
    return x.reshape(*keys.shape[:2], -1, x.shape[-1])


class BareAttention(nn.Module):
    """Runs an attention core alone, in the attention phase."""

    def __init__(self, core: AttentionCore) -> None:
        super().__init__()
        self.core = core

    def forward(self, q: Tensor, k: Tensor, v: Tensor, phase: Phases) -> Tensor:
        return region(phase.attention, self.core, q, k, v)


class SelfAttention(nn.Module):
    """Self-attention with one product for queries, keys and values, the core, and the output product."""

    def __init__(
        self, width: int, heads: int, key_heads: int, gain: float, choose: ChooseArithmetic, core: AttentionCore
    ) -> None:
        super().__init__()
        self.head_width = width // heads
        self.sizes = (width, key_heads * self.head_width, key_heads * self.head_width)
        self.core = core
        self.qkv = Linear(width, sum(self.sizes), choose("qkv"))
        self.out = Linear(width, width, choose("out"), gain)

    def forward(
        self, x: Tensor, phase: Phases, rotation: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        q, k, v = self.project_heads(x, phase)
        if rotation is not None:
            rotation = rotation.to(q.dtype)  # the residual stream, and so q, may have another dtype than the model
            q = apply_rotary(q, rotation)
            k = apply_rotary(k, rotation)
        if cache is not None:
            k, v = cache.store(k, v, phase)
        attention_output = region(phase.attention, cache or self.core, q, k, v)
        y: Tensor = self.out(attention_output.transpose(1, 2).flatten(2), phase)
        return y.to(x.dtype)

    def project_heads(self, x: Tensor, phase: Phases) -> list[Tensor]:
        """Returns queries, keys and values of (batch, tokens, width), each as (batch, heads, tokens, head width)."""
        # The result of the product may have a different dtype. Attention computes in the dtype of the residual stream.
        projections = self.qkv(x, phase).to(x.dtype).split(self.sizes, dim=-1)
        return [part.view(*part.shape[:2], -1, self.head_width).transpose(1, 2) for part in projections]


def make_rotary_table(context: int, head_width: int) -> Tensor:
    """Returns the cosines and sines of rotary positions, as (context, 2, head_width / 2)."""
    frequencies = 1.0 / 500000.0 ** (torch.arange(0, head_width, 2) / head_width)  # the base of Llama 3
    rotary_angles = torch.outer(torch.arange(context), frequencies)
    return torch.stack((rotary_angles.cos(), rotary_angles.sin()), dim=1)


def apply_rotary(x: Tensor, rotation: Tensor) -> Tensor:
    cosine = rotation[:, 0]
    sine = rotation[:, 1]
    first_half, second_half = x.chunk(2, dim=-1)
    return torch.cat((first_half * cosine - second_half * sine, second_half * cosine + first_half * sine), dim=-1)
