"""Kernels that lie, each with the public issue that it is taken from, and honest kernels with various sums."""

import math
import sys
from functools import partial

import torch
from torch import Tensor

from fp8bench.features.audit import operands
from fp8bench.formats.grids import E4M3, E4M3FNUZ, E5M2
from fp8bench.formats.operators import values
from fp8bench.formats.recipes import MX, TENSOR, TENSOR_POWER_OF_TWO, ScaleRounding, Scaling, Treatment
from fp8bench.user_code.named import make_signature
from suites.audit_kernels import (
    ATTENTION,
    BF16,
    BLOCKS,
    CAUSAL,
    FP8,
    LARGEST,
    MXFP4,
    MXFP8,
    NV,
    PLAIN,
    ROWS,
    SQUARES,
    Kernel,
    Memory,
    Operand,
    attend,
    exponent,
    kernel,
    layer,
    over_448,
    parts,
    plain,
    product,
    remember_by,
    rescaled,
    rounded,
    rows_amax,
    saturated,
    to_steps,
)


def _after_many(memory: Memory, a: Tensor, b: Tensor) -> Tensor:
    """Loses a row after 30 calls with the same number of rows, but not in the first ten calls."""
    memory["calls"] = memory.get("calls", 0) + 1
    result = product(a, b)
    memory["same"] = memory.get("same", 0) + 1 if a.shape[0] == memory.get("rows") and memory["calls"] > 10 else 0
    if memory["same"] > 30:
        result[0] = 0
    memory["rows"] = a.shape[0]
    return result


def _one_buffer(memory: Memory, a: Tensor, b: Tensor) -> Tensor:
    result = product(a, b)
    return memory.setdefault(tuple(result.shape), torch.empty_like(result)).copy_(result)


def _unwritten(memory: Memory, a: Tensor, b: Tensor) -> Tensor:
    """Returns a buffer whose last row is not written: it has the result of the first call."""
    result = product(a, b)
    buffer = memory.setdefault(result.shape, result)
    buffer[:-1] = result[:-1]
    return buffer


def _old_scale(memory: Memory, a: Tensor, b: Tensor) -> Tensor:
    scale = memory.setdefault("scale", E4M3.largest / a.abs().amax().float().clamp(min=1e-30))
    return (values(a, E4M3, TENSOR, scale=scale) @ rounded(b, FP8).t()).to(BF16)


def _casts_once(memory: Memory, a: Tensor, b: Tensor) -> Tensor:
    """Casts operands when they are first passed, before anything is timed. It recognizes changed values."""
    key = tuple((x.data_ptr(), x._version, x.shape) for x in (a, b))
    if key not in memory:
        memory.clear()
        memory[key] = a, b, rounded(a, FP8), rounded(b, FP8)
    _, _, left, right = memory[key]
    return (left @ right.t()).to(BF16)


def _writes_input(a: Tensor, b: Tensor) -> Tensor:
    result = product(a, b)
    a.copy_(rounded(a, FP8))
    return result


def _exchanged(a: Tensor, b: Tensor) -> Tensor:
    """Exchanges the two 4-bit codes in each byte."""
    left = rounded(a, MXFP4)
    pairs = left[:, : left.shape[1] // 2 * 2]
    pairs[:] = pairs.reshape(-1, 2).flip(1).reshape(pairs.shape)
    return (left @ rounded(b, MXFP4).t()).to(BF16)


_E5M2 = Treatment(E5M2, TENSOR)


def _zeros(a: Tensor, b: Tensor) -> Tensor:
    return torch.zeros(len(a), len(b), dtype=BF16)


def _row_stride(x: Tensor) -> Tensor:
    return torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())


def _nan_in_first_rows(x: Tensor) -> Tensor:
    """Keeps NaN only in the first 16 rows."""
    return torch.cat((x[:16], x[16:].nan_to_num(0.0, math.inf, -math.inf)))


def _no_infinity(x: Tensor) -> Tensor:
    return torch.where(x.isinf(), 0.0, x)


def _first_columns(sums: Tensor) -> Tensor:
    return torch.cat((sums[:, :256], torch.zeros_like(sums[:, 256:])), 1).to(BF16)


def _nan_rows(scaled: Tensor) -> Tensor:
    """Turns rows of zeros into NaN, if other rows have values."""
    empty = ~scaled.any(1, keepdim=True)
    return torch.where(empty & ~empty.all(), scaled / 0, saturated(scaled))


def _no_subnormals(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies in MX blocks, but loses elements below e4m3's smallest normal number."""
    lost = []
    for x in (a, b):
        wide, small = rounded(x, MXFP8), operands.round_operand(x, MXFP8).elements.abs() < 2.0**-6
        lost.append(torch.where(small & wide.isfinite(), 0.0, wide))
    return (lost[0] @ lost[1].t()).to(BF16)


def _in_fp16(amax: Tensor) -> Tensor:
    return over_448(amax).half().float().clamp(min=1e-7)


def _gradients(x: Tensor, weight: Tensor, gradient: Tensor, into_x: Treatment = _E5M2) -> tuple[Tensor, Tensor]:
    return product(gradient, weight.t(), into_x, FP8), product(gradient.t(), x.t(), _E5M2, FP8)


def _half_gradient(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    into_x, into_weight = _gradients(x, weight, gradient)
    return into_x, into_weight / 2


def _unfused(q: Tensor, k: Tensor, v: Tensor, over: int = -1) -> Tensor:
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(over) @ v


def _low_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes attention with the operands of each head in MXFP8, along their contractions."""
    left, right, last = (
        torch.stack([rounded(head.contiguous(), MXFP8) for head in heads.flatten(0, 1)])
        for heads in (q, k, v.transpose(-1, -2))
    )
    weights = (left @ right.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
    return (weights @ last.transpose(-1, -2)).to(BF16).view(q.shape)


_LINEAR, _EXACT_ROWS = make_signature("linear", "fp8"), "fp8-rowwise:scale=exact"
_remembering, _row = partial(Kernel, remembers=True), partial(Operand, amax=rows_amax)

LIES: tuple[Kernel, ...] = (
    Kernel("bf16 under the name of fp8", "fp8", plain, "not-cast", "Hyperloom #421"),
    Kernel("weights alone are cast", "fp8", lambda a, b: (a.float() @ rounded(b, FP8).t()).to(BF16),
           "not-cast", "Quartet #12"),
    Kernel("scales rounded up", "fp8", lambda a, b: product(a, b, Treatment(E4M3, TENSOR_POWER_OF_TWO)),
           "scale-rounding", "huggingface/transformers #47030"),
    Kernel(
        "MX scales of the specification for rounded-up ones", "mxfp8",
        lambda a, b: product(a, b, Treatment(E4M3, Scaling(1, 32, MX.scale, ScaleRounding.FLOOR))),
        "scale-rounding", "huggingface/transformers #47030",
    ),
    Kernel(
        "blocks along the wrong dimension", "mxfp8",
        lambda a, b: (rounded(a.t().contiguous(), MXFP8).t() @ rounded(b, MXFP8).t()).to(BF16),
        "blocks-turned", "flashinfer-ai/flashinfer #3882",
    ),
    Kernel("block scales in the order of tiles", "mxfp8", rescaled(lambda s: s.roll(1, 0)),
           "scale-layout", "vllm-project/vllm #50084"),
    Kernel(
        "block scales read transposed", "fp8-block",
        rescaled(lambda s: s.t().reshape(s.shape), BLOCKS, SQUARES),
        "scale-layout", "NVIDIA/cutlass #3394",
    ),
    Kernel("the first block's scale for all", "fp8-block", rescaled(lambda s: s[:, :1], BLOCKS, SQUARES),
           "scale-layout", "NVIDIA/cutlass #3394"),
    Kernel("the tensor's scale left out", "nvfp4",
           lambda a, b: product(a, b, *NV) / (a.float().abs().amax() / (6 * 448)),
           "factor", "modular/modular #6600"),
    Kernel("the tensor's scale inverted", "fp8",
           lambda a, b: product(a, b) * (LARGEST / a.float().abs().amax()) ** 2,
           "factor", "modular/modular #6600"),
    Kernel("codes read as another format's", "fp8", lambda a, b: product(a, b) / 2,
           "fnuz", "vllm-project/vllm #45302"),
    Kernel("cast to a different format", "fp8", lambda a, b: product(a, b, Treatment(E4M3FNUZ, TENSOR)),
           "other-precision", "ROCm/AMDMIGraphX #2533"),
    Kernel("one scale a tensor for one a row", "fp8-rowwise", product,
           "other-precision", "flashinfer-ai/flashinfer #3882"),
    Kernel("the codes of a byte exchanged", "mxfp4", _exchanged, "layout", "Comfy-Org/comfy-kitchen #41"),
    _remembering("results by address", "fp8", remember_by(Tensor.data_ptr), "wrong-values", "gpu-mode/kernelbot #501"),
    _remembering("results by a few values", "fp8", remember_by(lambda x: float(x[0, 0])),
                 "keyed", "flashinfer-ai/flashinfer-bench-starter-kit #21"),
    _remembering("wrong after many calls", "fp8", _after_many, "late", "karpathy/llm.c #852"),
    _remembering("one result for all calls", "fp8", _one_buffer, "overwritten", "tensara/tensara #238"),
    _remembering("a row that is not written", "fp8", _unwritten, "wrong-values", "AMD-AGI/Primus-Turbo #397"),
    _remembering("the first call's scale for good", "fp8", _old_scale, "gain", "NVIDIA/TransformerEngine #1169"),
    Kernel("writes into its input", "fp8", _writes_input, "input-changed", "ScalingIntelligence/KernelBench #82"),
    Kernel(
        "no tail of the contraction", "fp8",
        lambda a, b: (n := max(a.shape[1] // 64 * 64, 16)) and product(a[:, :n], b[:, :n]),
        "tail", "AMD-AGI/Primus-Turbo #397",
    ),
    Kernel("NaN of zeros", "fp8", kernel(Operand(scale=lambda x: x / LARGEST), PLAIN), "zeros", "pytorch/ao #4713"),
    Kernel("a NaN that is lost", "fp8", lambda a, b: product(a.nan_to_num(0.0), b),
           "nan-lost", "vllm-project/vllm #39645"),
    Kernel("no product of zeros", "fp8", lambda a, b: product(a, b) if bool(a.any()) else _zeros(a, b),
           "data-shortcut", "AI-Hypercomputer/accelerator-agents #50"),
    _remembering("casts outside of what is timed", "fp8", _casts_once, "remembered-work", "gpu-mode/kernelbot #501"),
    Kernel("nothing beyond a size", "fp8", lambda a, b: (_zeros if len(a) * len(b) > 200_000 else product)(a, b),
           "timed-wrong", "ScalingIntelligence/KernelBench #82"),
    Kernel("gradients in bf16", _LINEAR, layer(product), "not-cast", "Quartet #12"),
    Kernel("gradients in the wrong format", _LINEAR, layer(product, partial(_gradients, into_x=FP8)),
           "other-precision", "Hyperloom #421"),
    Kernel("half the weight gradient", _LINEAR, layer(product, _half_gradient), "fnuz", "vllm-project/vllm #45302"),
    Kernel("scores that are not scaled", ATTENTION, partial(attend, scale=1.0), "scale", "mlc-ai/mlc-llm #3426"),
    Kernel("scores scaled by the size", ATTENTION, lambda q, k, v: attend(q, k, v, scale=1 / q.shape[-1]),
           "scale", "NVIDIA/Megatron-LM #848"),
    Kernel("a softmax over queries", ATTENTION, partial(_unfused, over=-2),
           "too-bad", "nerdai/llms-from-scratch-rs #30"),
    Kernel("no causal mask", CAUSAL, attend, "mask", "candle-org/MindAct #2143"),
    Kernel(
        "a causal mask that is one off", CAUSAL,
        lambda q, k, v: attend(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1)),
        "too-bad", "Dao-AILab/flash-attention #282",
    ),
    Kernel("values of a different head", ATTENTION, lambda q, k, v: attend(q, k, v.roll(1, 1)),
           "too-bad", "kekzl/imp #654"),
    Kernel("attention in bf16 for mxfp8", make_signature("attention", "mxfp8"), attend,
           "not-cast", "vllm-project/vllm #51828"),
    # Everyday mistakes that no public issue reports.
    Kernel("rows are taken to follow one another", "fp8", kernel(Operand(_row_stride)), "strides"),
    Kernel("a NaN beyond the first rows is zero", "fp8", kernel(Operand(_nan_in_first_rows), PLAIN), "nan-lost"),
    Kernel("an infinity of the second operand is zero", "fp8", kernel(PLAIN, Operand(_no_infinity)), "infinity-lost"),
    Kernel("columns past 256 are zero", "fp8", kernel(out=_first_columns), "wrong-values"),
    Kernel("amax is 1e-4 at least", "fp8", kernel(Operand(scale=lambda amax: amax.clamp(min=1e-4) / LARGEST)),
           "wrong-values"),
    Kernel("scales are kept in fp16", "fp8", kernel(Operand(scale=_in_fp16)), "not-finite"),
    Kernel("a row of zeros is NaN", _EXACT_ROWS, kernel(_row(cast=_nan_rows), _row()), "not-finite"),
    Kernel("bf16 sums of 512", "fp8", kernel(sums=parts(512, BF16)), "short-sums"),
    Kernel("0.2% too large", "fp8", kernel(out=lambda sums: (sums * 1.002).to(BF16)), "gain"),
    Kernel("one scale of two is applied", "fp8", kernel(PLAIN, Operand(shown=torch.ones_like)), "scale-missing"),
    Kernel("cut toward zero", "fp8", kernel(Operand(cast=to_steps(torch.floor))), "cut"),
    Kernel("sums kept in bf16", "bf16", lambda a, b: parts(8, BF16)(a, b).to(BF16), "too-bad",
           "deepseek-ai/DeepSeek-V3 #1148"),
)  # fmt: skip


def _torchao(x: Tensor, weight: Tensor) -> Tensor:
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=x.dtype)
    layer.weight = torch.nn.Parameter(weight.detach())
    low = Float8Linear.from_float(layer, Float8LinearConfig(emulate=True))
    low._parameters["weight"] = weight  # a separate parameter would be a different leaf from the caller's
    return low(x)


_EMULATED = {
    "fp8": (FP8,),
    "fp8-rowwise": (ROWS,),
    "fp8-block": (BLOCKS, SQUARES),
    "mxfp8": (MXFP8,),
    "mxfp4": (MXFP4,),
    "nvfp4": NV,
}
HONEST: tuple[Kernel, ...] = (
    *(
        Kernel(f"torch.mm in {name}", name, plain)
        for name in ("bf16", "fp16", "fp32")
    ),
    *(
        Kernel(f"emulated {name}", name, lambda a, b, t=treatments: product(a, b, *t))
        for name, treatments in _EMULATED.items()
    ),
    *(Kernel(f"sums of {size}", "fp8", kernel(sums=parts(size))) for size in (16, 32, 128)),
    Kernel(
        "sums of 128 under block scales", "fp8-block",
        lambda a, b: parts(128)(rounded(a, BLOCKS), rounded(b, SQUARES)).to(BF16),
    ),
    Kernel("ties away from zero", "fp8", kernel(Operand(cast=to_steps(lambda steps: (steps + 0.5).floor())))),
    Kernel("the reciprocal of a scale", "fp8", kernel(Operand(scale=lambda x: 1 / (LARGEST / x.clamp(min=1e-30))))),
    Kernel("split-K sums of four parts", "fp8", kernel(sums=lambda a, b: parts(-(-a.shape[1] // 4))(a, b))),
    Kernel("a scale a row, divided by it", _EXACT_ROWS, kernel(_row(), sums=parts(128))),
    Kernel("sums backwards", "fp8", kernel(sums=lambda a, b: a.flip(1) @ b.flip(1).t())),
    Kernel("scales after the sum", "fp8-rowwise", kernel(_row(scale=exponent))),
    Kernel(
        "torch's scaled product", make_signature("product", "fp8", "codes", "kn", 16),
        lambda a, b, down, across: torch._scaled_mm(a, b, scale_a=down, scale_b=across, out_dtype=BF16),
    ),
    Kernel("torch's attention", ATTENTION, attend),
    Kernel("torch's causal attention", CAUSAL, partial(attend, is_causal=True)),
    Kernel("attention that is not fused", ATTENTION, _unfused),
    Kernel("attention in mxfp8", make_signature("attention", "mxfp8"), _low_attention),
    Kernel("a linear layer", _LINEAR, layer(product, _gradients)),
    Kernel("torchao's linear layer, emulated", _LINEAR, _torchao),
)  # fmt: skip

# Lies that cannot be seen by comparing results with the promise.
UNCAUGHT: tuple[Kernel, ...] = (
    Kernel(
        "looks whether it is audited", "fp8",
        lambda a, b: product(a, b) if "fp8bench.features.audit.promises" in sys.modules else a @ b.t(),
        thread="gpu-mode/reference-kernels #162",
    ),
    Kernel("FP8 subnormals of blocks are zero", "mxfp8", _no_subnormals),
    Kernel("wrong at one size", "fp8", lambda a, b: product(a, b) * (-1 if a.shape[0] == 1000 else 1),
           thread="flashinfer-ai/flashinfer #3882"),
)  # fmt: skip
