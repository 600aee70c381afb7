"""Kernels that lie, each as somebody's did: what it is called, what it promises, and the public thread it comes from.

And kernels that do not, however they sum. All are written on torch alone, so that each runs on any device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8bench.features.audit import operands
from fp8bench.formats.grids import E2M1, E4M3, E4M3FNUZ, E5M2
from fp8bench.formats.operators import values
from fp8bench.formats.recipes import (
    BLOCK_POWER_OF_TWO,
    MX,
    NVFP4,
    NVFP4_SQUARE,
    ROW_POWER_OF_TWO,
    SQUARE_POWER_OF_TWO,
    TENSOR,
    TENSOR_POWER_OF_TWO,
    ScaleRounding,
    Scaling,
    Treatment,
)
from fp8bench.model.promises import Signature
from fp8bench.user_code.named import signed

BF16 = torch.bfloat16
FP8 = Treatment(E4M3, TENSOR)
ROWS = Treatment(E4M3, ROW_POWER_OF_TWO)
BLOCKS, SQUARES = Treatment(E4M3, BLOCK_POWER_OF_TWO), Treatment(E4M3, SQUARE_POWER_OF_TWO)
MXFP8 = Treatment(E4M3, MX)
MXFP4 = Treatment(E2M1, MX)
NV = Treatment(E2M1, NVFP4), Treatment(E2M1, NVFP4_SQUARE)


@dataclass(frozen=True)
class Kernel:
    """`function` takes the memory of a fresh one before its arguments if it `remembers`. `thread` of a lie. `baseline`
    is what it is compared with."""

    name: str
    signature: Signature
    function: Callable[..., Any]
    thread: str = ""
    baseline: Callable[..., Any] | None = None
    remembers: bool = False

    def made(self) -> Callable[..., Any]:
        """A fresh one, which remembers nothing of others."""
        return partial(self.function, {}) if self.remembers else self.function


def rounded(x: Tensor, treatment: Treatment) -> Tensor:
    return values(x, treatment.fmt, treatment.scaling)


def product(a: Tensor, b: Tensor, first: Treatment = FP8, second: Treatment | None = None) -> Tensor:
    """The honest one."""
    return (rounded(a, first) @ rounded(b, second or first).t()).to(BF16)


def _by_address(kept: dict[Any, Any], a: Tensor, b: Tensor) -> Tensor:
    key = a.data_ptr(), b.data_ptr(), a.shape, b.shape
    if key not in kept:
        kept[key] = product(a, b)
    return kept[key].clone()


def _by_few_values(kept: dict[Any, Any], a: Tensor, b: Tensor) -> Tensor:
    key = float(a[0, 0]), float(b[0, 0]), a.shape, b.shape
    return kept.setdefault(key, product(a, b)).clone()


def _after_ten(kept: dict[Any, Any], a: Tensor, b: Tensor) -> Tensor:
    kept["calls"] = kept.get("calls", 0) + 1
    found = product(a, b)
    if a.shape[0] == kept.get("rows") and kept["calls"] > 10:
        kept["same"] = kept.get("same", 0) + 1
        if kept["same"] > 30:
            found[0] = 0
    else:
        kept["same"] = 0
    kept["rows"] = a.shape[0]
    return found


def _one_buffer(kept: dict[Any, Any], a: Tensor, b: Tensor) -> Tensor:
    found = product(a, b)
    return kept.setdefault(tuple(found.shape), torch.empty_like(found)).copy_(found)


def _unwritten(kept: dict[Any, Any], a: Tensor, b: Tensor) -> Tensor:
    """The last row is what the buffer held, which was right once."""
    found = product(a, b)
    if found.shape not in kept:
        kept[found.shape] = found
        return found
    kept[found.shape][:-1] = found[:-1]
    return kept[found.shape]


def _old_scale(kept: dict[Any, Any], a: Tensor, b: Tensor) -> Tensor:
    """The first call's scale, for good."""
    scale = kept.setdefault("scale", E4M3.largest / a.abs().amax().float().clamp(min=1e-30))
    left = values(a, E4M3, TENSOR, scale=scale)
    return (left @ rounded(b, FP8).t()).to(BF16)


def _writes_input(a: Tensor, b: Tensor) -> Tensor:
    found = product(a, b)
    a.copy_(rounded(a, FP8))
    return found


def _no_tail(a: Tensor, b: Tensor) -> Tensor:
    """Whole tiles of 64 along the contraction."""
    whole = max(a.shape[1] // 64 * 64, 16)
    return product(a[:, :whole], b[:, :whole])


def _zero_by_zero(a: Tensor, b: Tensor) -> Tensor:
    scale = a.float().abs().amax() / E4M3.largest
    return ((a.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale @ rounded(b, FP8).t()).to(BF16)


def _by_elements(lie: Callable[[Tensor], Tensor], largest: float = E4M3.largest) -> Callable[[Tensor], Tensor]:
    """A cast that does this to what it has scaled to the largest element."""

    def cast(x: Tensor) -> Tensor:
        scale = largest / x.abs().amax().float()
        return lie(x.float() * scale) / scale

    return cast


def _early_saturation(scaled: Tensor) -> Tensor:
    elements = values(scaled, E4M3)
    return torch.where(elements.abs() >= 256, elements.sign() * E4M3.largest, elements)


def _no_subnormals(x: Tensor) -> Tensor:
    left, scale = rounded(x, FP8), E4M3.largest / x.abs().amax().float()
    return torch.where((left * scale).abs() < 2.0**-6 * 0.999, 0.0, left)


def _casts_once(kept: dict[Any, Any], a: Tensor, b: Tensor) -> Tensor:
    """Operands are cast when they are first seen, ahead of what is timed; other values are seen."""
    key = tuple((one.data_ptr(), one._version, one.shape) for one in (a, b))
    if key not in kept:
        kept.clear()
        kept[key] = a, b, rounded(a, FP8), rounded(b, FP8)
    _, _, left, right = kept[key]
    return (left @ right.t()).to(BF16)


def _parts(x: Tensor, treatment: Treatment) -> tuple[Tensor, Tensor]:
    """Values, and the scale of each block along rows."""
    operand = operands.rounded(x, treatment)
    return operand.elements, operand.scales


def _rescaled(a: Tensor, b: Tensor, treatment: Treatment, change: Callable[[Tensor], Tensor]) -> Tensor:
    elements, scales = _parts(a, treatment)
    block, second = (128, SQUARES) if treatment is BLOCKS else (32, treatment)
    other = change(scales).expand_as(scales).repeat_interleave(block, 1)[:, : a.shape[1]]
    return (elements * other @ rounded(b, second).t()).to(BF16)


def _exchanged(a: Tensor, b: Tensor) -> Tensor:
    """The two codes of a byte."""
    left = rounded(a, MXFP4)
    whole = left.shape[1] // 2 * 2
    left = torch.cat((left[:, :whole].reshape(len(left), -1, 2).flip(-1).reshape(len(left), whole), left[:, whole:]), 1)
    return (left @ rounded(b, MXFP4).t()).to(BF16)


def _short_sums(a: Tensor, b: Tensor) -> Tensor:
    parts = (a[:, at : at + 8] @ b[:, at : at + 8].t() for at in range(0, a.shape[1], 8))
    return sum(parts, torch.zeros(len(a), len(b), dtype=BF16))


def _flat(a: Tensor, b: Tensor) -> Tensor:
    """Right up to a size that nobody checks, and nothing beyond."""
    if a.shape[0] * b.shape[0] > 200_000:
        return torch.zeros(a.shape[0], b.shape[0], dtype=BF16)
    return product(a, b)


class _Layer(torch.autograd.Function):
    """A linear layer whose gradients are another thing than its forward product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, lie: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.lie = lie
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        low = Treatment(E5M2, TENSOR)
        into_x = product(gradient, weight.t(), low, FP8)
        into_weight = product(gradient.t(), x.t(), low, FP8)
        if ctx.lie == "wide":
            into_x, into_weight = gradient @ weight, gradient.t() @ x
        if ctx.lie == "e4m3":
            into_x = product(gradient, weight.t())
        if ctx.lie == "half":
            into_weight = into_weight / 2
        return into_x, into_weight, None


def _attends(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def _unfused(q: Tensor, k: Tensor, v: Tensor, over: int = -1) -> Tensor:
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(over) @ v


def _low_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each head's operands in MXFP8, along their contractions."""
    left, right, last = (
        torch.stack([rounded(head.contiguous(), MXFP8) for head in one.flatten(0, 1)])
        for one in (q, k, v.transpose(-1, -2))
    )
    weights = (left @ right.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
    return (weights @ last.transpose(-1, -2)).to(BF16).view(q.shape)


def _layer(lie: str = "") -> Callable[..., Tensor]:
    return lambda x, weight: _Layer.apply(x, weight, lie)  # type: ignore[no-untyped-call]


_FP8, _ROWS, _BLOCKS = signed("product", "fp8"), signed("product", "fp8-rowwise"), signed("product", "fp8-block")
_MX, _MX4, _NV = signed("product", "mxfp8"), signed("product", "mxfp4"), signed("product", "nvfp4")
_ATTENTION, _CAUSAL = signed("attention", "bf16"), signed("attention", "bf16", causal=True)
_CAST, _LINEAR, _WIDE = signed("cast", "fp8"), signed("linear", "fp8"), signed("product", "bf16")

LIES: tuple[Kernel, ...] = (
    Kernel("bf16 under the name of fp8", _FP8, lambda a, b: a @ b.t(), "Hyperloom #421"),
    Kernel("weights alone are cast", _FP8, lambda a, b: (a.float() @ rounded(b, FP8).t()).to(BF16), "Quartet #12"),
    Kernel(
        "scales rounded up", _FP8, lambda a, b: product(a, b, Treatment(E4M3, TENSOR_POWER_OF_TWO)),
        "huggingface/transformers #47030",
    ),
    Kernel(
        "MX scales of the specification for rounded-up ones", _MX,
        lambda a, b: product(a, b, Treatment(E4M3, Scaling(1, 32, MX.scale, ScaleRounding.FLOOR))),
        "huggingface/transformers #47030",
    ),
    Kernel(
        "blocks along the wrong dimension", _MX,
        lambda a, b: (rounded(a.t().contiguous(), MXFP8).t() @ rounded(b, MXFP8).t()).to(BF16),
        "flashinfer-ai/flashinfer #3882",
    ),
    Kernel(
        "block scales in the order of tiles", _MX, lambda a, b: _rescaled(a, b, MXFP8, lambda s: s.roll(1, 0)),
        "vllm-project/vllm #50084",
    ),
    Kernel(
        "block scales read transposed", _BLOCKS,
        lambda a, b: _rescaled(a, b, BLOCKS, lambda s: s.t().contiguous().reshape(s.shape)), "NVIDIA/cutlass #3394",
    ),
    Kernel(
        "the first block's scale for all", _BLOCKS, lambda a, b: _rescaled(a, b, BLOCKS, lambda s: s[:, :1]),
        "NVIDIA/cutlass #3394",
    ),
    Kernel(
        "the tensor's scale left out", _NV, lambda a, b: product(a, b, *NV) / (a.float().abs().amax() / (6 * 448)),
        "modular/modular #6600",
    ),
    Kernel(
        "the tensor's scale inverted", _FP8,
        lambda a, b: product(a, b) * (E4M3.largest / a.float().abs().amax()) ** 2, "modular/modular #6600",
    ),
    Kernel("codes read as another format's", _FP8, lambda a, b: product(a, b) / 2, "vllm-project/vllm #45302"),
    Kernel(
        "cast to another format", _FP8, lambda a, b: product(a, b, Treatment(E4M3FNUZ, TENSOR)),
        "ROCm/AMDMIGraphX #2533",
    ),
    Kernel("one scale a tensor for one a row", _ROWS, product, "flashinfer-ai/flashinfer #3882"),
    Kernel("the codes of a byte exchanged", _MX4, _exchanged, "Comfy-Org/comfy-kitchen #41"),
    Kernel("results by address", _FP8, _by_address, "gpu-mode/kernelbot #501", remembers=True),
    Kernel(
        "results by a few values", _FP8, _by_few_values, "flashinfer-ai/flashinfer-bench-starter-kit #21",
        remembers=True,
    ),
    Kernel("wrong after many calls", _FP8, _after_ten, "karpathy/llm.c #852", remembers=True),
    Kernel("one result for all calls", _FP8, _one_buffer, "tensara/tensara #238", remembers=True),
    Kernel("a row that is not written", _FP8, _unwritten, "AMD-AGI/Primus-Turbo #397", remembers=True),
    Kernel("the first call's scale for good", _FP8, _old_scale, "NVIDIA/TransformerEngine #1169", remembers=True),
    Kernel("writes into its input", _FP8, _writes_input, "ScalingIntelligence/KernelBench #82"),
    Kernel("no tail of the contraction", _FP8, _no_tail, "AMD-AGI/Primus-Turbo #397"),
    Kernel("NaN of zeros", _FP8, _zero_by_zero, "pytorch/ao #4713"),
    Kernel("saturates from 256 on", _CAST, _by_elements(_early_saturation), "sgl-project/sglang #40581"),
    Kernel(
        "NaN beyond the largest", _CAST,  # scaled to e4m3's next power of two
        _by_elements(lambda scaled: torch.where(scaled.abs() > 464, torch.nan, values(scaled, E4M3)), 512),
        "jax-ml/ml_dtypes #260",
    ),
    Kernel(
        "mantissas rounded up", _CAST,  # ties away from zero, and cut before they are rounded
        _by_elements(lambda scaled: values(scaled * (1 + 2.0**-4), E4M3).clamp(-448, 448)), "sgl-project/sglang #40581",
    ),
    Kernel("subnormal numbers are zero", _CAST, _no_subnormals, "ROCm/rocm-libraries #7439"),
    Kernel("a NaN that is lost", _FP8, lambda a, b: product(a.nan_to_num(0.0), b), "vllm-project/vllm #39645"),
    Kernel(
        "no product of zeros", _FP8,
        lambda a, b: product(a, b) if bool(a.any()) else torch.zeros(len(a), len(b), dtype=BF16),
        "AI-Hypercomputer/accelerator-agents #50",
    ),
    Kernel("casts outside of what is timed", _FP8, _casts_once, "gpu-mode/kernelbot #501", remembers=True),
    Kernel(
        "a baseline that does more", _FP8, product, "calcit-lang/calcit #535",
        lambda a, b: (a.float() @ b.t().contiguous().float()).to(BF16),
    ),
    Kernel("nothing beyond a size", _FP8, _flat, "ScalingIntelligence/KernelBench #82"),
    Kernel("gradients in bf16", _LINEAR, _layer("wide"), "Quartet #12"),
    Kernel("gradients in the wrong format", _LINEAR, _layer("e4m3"), "Hyperloom #421"),
    Kernel("half the weight gradient", _LINEAR, _layer("half"), "vllm-project/vllm #45302"),
    Kernel(
        "scores that are not scaled", _ATTENTION, lambda q, k, v: _attends(q, k, v, scale=1.0), "mlc-ai/mlc-llm #3426",
    ),
    Kernel(
        "scores scaled by the size", _ATTENTION, lambda q, k, v: _attends(q, k, v, scale=1 / q.shape[-1]),
        "NVIDIA/Megatron-LM #848",
    ),
    Kernel(
        "a softmax over queries", _ATTENTION, lambda q, k, v: _unfused(q, k, v, over=-2),
        "nerdai/llms-from-scratch-rs #30",
    ),
    Kernel("no causal mask", _CAUSAL, _attends, "candle-org/MindAct #2143"),
    Kernel(
        "a causal mask that is one off", _CAUSAL,
        lambda q, k, v: _attends(q, k, v, attn_mask=torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1)),
        "Dao-AILab/flash-attention #282",
    ),
    Kernel("values of another head", _ATTENTION, lambda q, k, v: _attends(q, k, v.roll(1, 1)), "kekzl/imp #654"),
    Kernel("attention in bf16 for mxfp8", signed("attention", "mxfp8"), _attends, "vllm-project/vllm #51828"),
    Kernel("sums kept in bf16", _WIDE, _short_sums, "deepseek-ai/DeepSeek-V3 #1148"),
)  # fmt: skip


def _split(a: Tensor, b: Tensor, first: Treatment, second: Treatment, size: int) -> Tensor:
    """Parts of the contraction, summed in float32."""
    left, right = rounded(a, first), rounded(b, second)
    parts = [left[:, at : at + size] @ right[:, at : at + size].t() for at in range(0, a.shape[1], size)]
    return torch.stack(parts).sum(0).to(BF16)


def _after_scale(a: Tensor, b: Tensor) -> Tensor:
    """Codes multiplied first, both scales applied to the sum."""
    (left, one), (right, other) = _parts(a, ROWS), _parts(b, ROWS)
    return ((left @ right.t()) * one * other.t()).to(BF16)


def _torchao(x: Tensor, weight: Tensor) -> Tensor:
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=x.dtype)
    layer.weight = torch.nn.Parameter(weight.detach())
    low = Float8Linear.from_float(layer, Float8LinearConfig(emulate=True))
    low._parameters["weight"] = weight  # a parameter of its own would be another leaf than the caller's
    return low(x)


HONEST: tuple[Kernel, ...] = (
    *(
        Kernel(f"torch.mm in {name}", signed("product", name), lambda a, b: a @ b.t())
        for name in ("bf16", "fp16", "fp32")
    ),
    *(
        Kernel(f"emulated {one.precision}", one, lambda a, b, t=treatments: product(a, b, *t))
        for one, treatments in (
            (_FP8, (FP8,)), (_ROWS, (ROWS,)), (_BLOCKS, (BLOCKS, SQUARES)), (_MX, (MXFP8,)), (_MX4, (MXFP4,)),
            (_NV, NV),
        )
    ),
    *(
        Kernel(f"sums of {size}", _FP8, lambda a, b, n=size: _split(a, b, FP8, FP8, n))
        for size in (16, 32, 128)
    ),
    Kernel("sums of 128 under block scales", _BLOCKS, lambda a, b: _split(a, b, BLOCKS, SQUARES, 128)),
    Kernel("emulated fp8 beside bf16", _FP8, product, baseline=lambda a, b: a @ b.t()),
    Kernel(
        "sums backwards", _FP8, lambda a, b: (rounded(a, FP8).flip(1) @ rounded(b, FP8).flip(1).t()).to(BF16),
    ),
    Kernel("scales after the sum", _ROWS, _after_scale),
    Kernel(
        "torch's scaled product", signed("product", "fp8", "codes", "kn", 16),
        lambda a, b, one, other: torch._scaled_mm(a, b, scale_a=one, scale_b=other, out_dtype=BF16),
    ),
    *(
        Kernel(f"cast to {name}", signed("cast", name), lambda x, t=treatment: rounded(x, t))
        for name, treatment in (
            ("fp8", FP8), ("fp8-rowwise", ROWS), ("mxfp8", MXFP8), ("mxfp4", MXFP4), ("nvfp4", NV[0]),
        )
    ),
    Kernel("torch's attention", _ATTENTION, _attends),
    Kernel("torch's causal attention", _CAUSAL, lambda q, k, v: _attends(q, k, v, is_causal=True)),
    Kernel("attention that is not fused", _ATTENTION, _unfused),
    Kernel("attention in mxfp8", signed("attention", "mxfp8"), _low_attention),
    Kernel("a linear layer", _LINEAR, _layer()),
    Kernel("torchao's linear layer, emulated", _LINEAR, _torchao),
)  # fmt: skip

# What compares results with promises cannot see these.
UNCAUGHT: tuple[Kernel, ...] = (
    Kernel(
        "looks whether it is audited", _FP8,
        lambda a, b: product(a, b) if "fp8bench.features.audit.results" in sys.modules else a @ b.t(),
        "gpu-mode/reference-kernels #162",
    ),
    Kernel(
        "wrong at one size", _FP8, lambda a, b: product(a, b) * (-1 if a.shape[0] == 1000 else 1),
        "flashinfer-ai/flashinfer #3882",
    ),
)  # fmt: skip
