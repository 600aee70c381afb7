"""Attention's cores against each other and against plain formulas, and the casts of emulated attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.attention import EmulatedAttentionCore, FusedCore
from fp8bench.protocols import Operand, Role
from tests.counts import for_each
from tests.nn.layers import arithmetic_of

BATCH, HEADS, KEY_HEADS, TOKENS, WIDTH = 2, 4, 2, 24, 16


def heads(dtype: torch.dtype = torch.float32, key_heads: int = KEY_HEADS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    counts = (HEADS, key_heads, key_heads, HEADS)
    made = [torch.randn(BATCH, count, TOKENS, WIDTH, generator=generator).to(dtype) for count in counts]
    return [item.requires_grad_(index < 3) for index, item in enumerate(made)]


def outcome(core: Callable[[Tensor, Tensor, Tensor], Tensor], *tensors: Tensor) -> list[Tensor]:
    *inputs, pull = tensors
    output = core(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, pull)]


def by_hand(
    rounded: Callable[[Tensor], Tensor], onto_the_grid: Callable[[Tensor], Tensor], prescaled: bool, causal: bool
) -> list[Tensor]:
    q, k, v, pull = (item.detach() for item in heads())
    group, scale = HEADS // KEY_HEADS, WIDTH**-0.5
    q_low, k_low, v_low = rounded(q * scale if prescaled else q), rounded(k), rounded(v.mT).mT
    scores = torch.stack([q_low[:, head] @ k_low[:, head // group].mT for head in range(HEADS)], 1)
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() if causal else torch.ones(TOKENS, TOKENS).bool()
    scores = onto_the_grid(scores) * (1.0 if prescaled else scale)
    exact = torch.where(seen, scores, -math.inf).softmax(-1)
    low = rounded(exact)
    outputs, dq, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
    for head in range(HEADS):
        key = head // group
        outputs.append(low[:, head] @ v_low[:, key])
        dv[:, key] += low[:, head].mT @ pull[:, head]
        dp = pull[:, head] @ v_low[:, key].mT
        ds = exact[:, head] * (dp - (exact[:, head] * dp).sum(-1, keepdim=True)) * scale
        dq.append(ds @ k_low[:, key])
        dk[:, key] += ds.mT @ (q_low[:, head] / scale if prescaled else q_low[:, head])
    return [torch.stack(outputs, 1), torch.stack(dq, 1), dk, dv]


@for_each("causal", [True, False])
@for_each("prescaled", [True, False])
@for_each("precision", ["fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"])
def test_low_scores_are_the_formulas_on_rounded_values(precision: str, prescaled: bool, causal: bool) -> None:
    arithmetic = arithmetic_of(precision)

    def by(cast: Callable[[Tensor, Role], Operand]) -> Callable[[Tensor], Tensor]:
        return lambda x: arithmetic.restore(cast(x.reshape(-1, x.shape[-1]), Role.INPUT), torch.float32).view(x.shape)

    result = outcome(EmulatedAttentionCore(arithmetic, prescaled, causal), *heads())
    # A product summed in another order may round differently, by one step of one score.
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    for tensor, expected in zip(
        result, by_hand(by(arithmetic.cast), by(arithmetic.cast_without_scale), prescaled, causal), strict=True
    ):
        assert float(torch.linalg.vector_norm(tensor - expected) / torch.linalg.vector_norm(expected)) < tolerance


@for_each("causal", [True, False])
@for_each("prescaled", [True, False])
def test_rounding_nothing_gives_torchs_own_attention(prescaled: bool, causal: bool) -> None:
    emulated = outcome(EmulatedAttentionCore(arithmetic_of("fp32"), prescaled, causal), *heads())
    for tensor, expected in zip(emulated, outcome(FusedCore(causal), *heads()), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)


@for_each(
    ("device", "dtype", "repeated"),
    [
        ("cuda", torch.float32, True),
        ("cuda", torch.bfloat16, False),
        ("cuda", torch.float64, False),
        ("cpu", torch.float32, False),
    ],
)
def test_a_gpu_in_fp32_gets_a_key_head_for_each_head(
    device: str, dtype: torch.dtype, repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only kernel that stores no scores takes no grouped queries in fp32."""
    seen: list[tuple[int, int, int, bool]] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: None, is_causal: bool, enable_gqa: bool) -> Tensor:
        seen.append((q.shape[1], k.shape[1], v.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, count, TOKENS, WIDTH, device=device, dtype=dtype) for count in (4, 2, 2))
        FusedCore()(q, k, v)
    assert seen == [(4, 4, 4, False) if repeated else (4, 2, 2, True)]


class Recording(PlainArithmetic):
    """Records what it casts."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)
        self.seen: list[Tensor] = []
        self.unscaled_seen: list[Tensor] = []

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        self.seen.append(tensor.detach().clone())
        return super().cast(tensor, role)

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        self.unscaled_seen.append(tensor.detach().clone())
        return super().cast(tensor, role)


def test_operands_are_cast_along_their_contractions() -> None:
    recording = Recording()
    q, k, v, _ = heads()
    EmulatedAttentionCore(recording)(q, k, v)
    assert [tuple(call.shape) for call in recording.seen] == [
        (BATCH * HEADS * TOKENS, WIDTH),
        (BATCH * KEY_HEADS * TOKENS, WIDTH),
        (BATCH * HEADS * TOKENS, TOKENS),
        (BATCH * KEY_HEADS * WIDTH, TOKENS),
    ]
    (scores,) = recording.unscaled_seen
    assert scores.shape == (BATCH * HEADS * TOKENS, TOKENS)
    probabilities = recording.seen[2].view(BATCH, HEADS, TOKENS, TOKENS)
    assert scores.dtype == torch.float32, "cast from the product's fp32, not rounded to the carrier before"
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(BATCH, HEADS, TOKENS))
