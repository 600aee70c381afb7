"""Optimizers that lie, each as somebody's did, and some that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8bench.formats.grids import E4M3, FP16
from fp8bench.formats.recipes import ScaleRounding
from fp8bench.nn.moments import scaled
from fp8bench.user_code.named import signed
from suites.audit_kernels import Kernel, same

_FP8LM = scaled(E4M3), scaled(FP16)


class _AdamW:
    """Moments as FP8-LM keeps them unless `keep` says otherwise; one `lie`, or none."""

    def __init__(self, parameters: Iterable[Tensor], lie: str = "", keep: Sequence[Any] = _FP8LM) -> None:
        group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
        self.param_groups: list[dict[str, Any]] = [group | {"params": list(parameters)}]
        self.state: dict[Tensor, dict[str, Any]] = {}
        self._lie, self._keep = lie, keep

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        for weights in group["params"]:
            self._one(weights, group)

    def _one(self, weights: Tensor, group: dict[str, Any]) -> None:
        lie, (one, other), rate, epsilon = self._lie, group["betas"], group["lr"], group["eps"]
        state = self.state.setdefault(weights, {"step": 0})
        zero = torch.zeros(weights.shape)
        first, second = (
            keep.restore(state[name]) if name in state else zero
            for name, keep in zip(("first", "second"), self._keep, strict=True)
        )
        values, gradient = state.get("master", weights).float(), weights.grad.float()  # type: ignore[union-attr]
        if lie == "coupled":
            gradient = gradient + group["weight_decay"] * values
        else:
            values = values * (1 - rate * group["weight_decay"])
        state["step"] = min(state["step"] + 1, 256 if lie == "bf16 count" else 1 << 30)
        count = state["step"]
        first, second = first.lerp(gradient, 1 - one), second.lerp(gradient.square(), 1 - other)
        if lie != "reset":
            state |= {"first": self._keep[0].keep(first), "second": self._keep[1].keep(second)}
        upper = first if lie == "no bias" else first / (1 - one**count)
        fair = 1.0 if lie == "no bias" else 1 - other**count
        lower = (second / fair + epsilon).sqrt() if lie == "inside" else (second / fair).sqrt() + epsilon
        if lie == "early":
            lower = (second.sqrt() + epsilon) / fair**0.5
        values = values - rate * upper / lower
        if lie == "master":
            state["master"] = values
        weights.copy_(_ROUNDED.get(lie, same)(values))


def _drawn(x: Tensor, least: int = 0, most: int = 1 << 16) -> Tensor:
    """bfloat16, rounded at random."""
    up = torch.randint(least, most, x.shape, dtype=torch.int32)
    return ((x.view(torch.int32) + up) & ~0xFFFF).view(torch.float32)


_ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "at random": _drawn, "leaning": partial(_drawn, least=1 << 14), "cut": partial(_drawn, most=1),
}  # fmt: skip


class _Plain:
    """float32 moments, or those of a dtype without a scale."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def keep(self, x: Tensor) -> Tensor:
        return x.to(self._dtype)

    def restore(self, x: Tensor) -> Tensor:
        return x.float()


class _Linear:
    """Equal steps of eight bits, under the largest of each run of 256."""

    def __init__(self, most: int) -> None:
        self._most = most

    def keep(self, x: Tensor) -> tuple[Tensor, Tensor, torch.Size]:
        runs = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 256)).view(-1, 256)
        scales = runs.abs().amax(1, keepdim=True).clamp(min=1e-12) / self._most
        return (runs / scales).round(), scales, x.shape

    def restore(self, kept: tuple[Tensor, Tensor, torch.Size]) -> Tensor:
        codes, scales, shape = kept
        return (codes * scales).flatten()[: shape.numel()].view(shape)


class _Eager:
    """torchao's, whose steps are compiled otherwise."""

    def __init__(self, name: str, parameters: Sequence[Tensor], **options: Any) -> None:
        import torchao.optim

        self._own = getattr(torchao.optim, name)(parameters, **options)
        self.param_groups, self.state = self._own.param_groups, self._own.state

    def step(self) -> None:
        with torch.compiler.set_stance("force_eager"):
            self._own.step()


def _made(lie: str = "", *keep: Any) -> Callable[..., Any]:
    return partial(_AdamW, lie=lie, keep=keep or _FP8LM)


def _torch(name: str, **options: Any) -> Callable[..., Any]:
    return partial(getattr(torch.optim, name), **options)


_FP8, _WIDE, _ADAM = (
    signed("optimizer", "fp8"), signed("optimizer", "fp32"), signed("optimizer", "fp32", rule="adam"),
)  # fmt: skip
_SGD, _LOW = signed("optimizer", "fp32", rule="sgd"), signed("optimizer", "bf16", weights="bf16")
_DYNAMIC, _BLOCKS = signed("optimizer", "dynamic8-256"), signed("optimizer", "e4m3-256")
_RANDOM = signed("optimizer", "fp32", weights="bf16-stochastic")
_MASTER = signed("optimizer", "fp8", weights="bf16-master")
_FLOAT, _UP = _Plain(), (scaled(E4M3, ScaleRounding.POWER_OF_TWO), scaled(FP16))

LIES: tuple[Kernel, ...] = (
    Kernel("no bias is corrected", _FP8, _made("no bias"), "bias-correction", "oxiglade/mlx-rs #301"),
    Kernel("epsilon before the bias is corrected", _FP8, _made("early"), "epsilon", "huggingface/transformers #35504"),
    Kernel("epsilon under the root", _FP8, _made("inside"), "epsilon", "goodfire-ai/spd #760"),
    Kernel("decay by the gradient in AdamW", _FP8, _made("coupled"), "decay", "nntrainer/nntrainer #3565"),
    Kernel("decay by itself in Adam", _ADAM, _torch("AdamW", weight_decay=0.1), "decay", "flagos-ai/FlagGems #4988"),
    Kernel("moments that are never kept", _FP8, _made("reset"), "state-lost", "raskr/rust-autograd #16"),
    Kernel("float32 moments for fp8", _FP8, _made("", _FLOAT, _FLOAT), "not-cast", "ooples/AiDotNet #1238"),
    Kernel("float32 moments for 8 bits", _DYNAMIC, _torch("AdamW"), "not-cast", "unslothai/unsloth-zoo #962"),
    Kernel("a float32 second moment", _FP8, _made("", _FP8LM[0], _FLOAT), "not-cast", "unslothai/unsloth-zoo #962"),
    Kernel("linear codes for dynamic ones", _DYNAMIC, _made("", _Linear(127), _Linear(255)),
           "other-precision", "inclusionAI/AReno #541"),
    Kernel("moments under scales rounded up", _FP8, _made("", *_UP),
           "scale-rounding", "huggingface/transformers #47030"),
    Kernel("a second moment flushed to zero", _FP8, _made("", _FP8LM[0], _Plain(torch.float16)),
           "flushed", "ultralytics/ultralytics #24085"),
    Kernel("a count of steps in bf16", _FP8, _made("bf16 count"), "step-count", "pytorch/ao #4915"),
    Kernel("rounding at random that leans", _RANDOM, _made("leaning", _FLOAT, _FLOAT),
           "biased", "graphcore-research/gfloat #36"),
    Kernel("cut and not rounded at random", _RANDOM, _made("cut", _FLOAT, _FLOAT), "biased", "pytorch/ao #1124"),
    Kernel("updates lost for want of a master", _MASTER, _made(), "update-lost", "NVIDIA/apex #1731"),
)  # fmt: skip

HONEST: tuple[Kernel, ...] = (
    Kernel("torch's AdamW", _WIDE, _torch("AdamW")),
    Kernel("torch's fused AdamW", _WIDE, _torch("AdamW", fused=True)),
    Kernel("torch's Adam", _ADAM, _torch("Adam", weight_decay=0.1)),
    Kernel("torch's SGD", _SGD, _torch("SGD", lr=0.1, momentum=0.9, weight_decay=0.01)),
    Kernel("torch's SGD, Nesterov's", _SGD, _torch("SGD", lr=0.1, momentum=0.9, nesterov=True)),
    Kernel("torch's AdamW in bf16", _LOW, _torch("AdamW")),
    Kernel("torch's fused AdamW in bf16", _LOW, _torch("AdamW", fused=True)),
    Kernel("FP8-LM's moments", _FP8, _made()),
    Kernel("FP8-LM's moments and a master", _MASTER, _made("master")),
    Kernel("weights rounded at random", _RANDOM, _made("at random", _FLOAT, _FLOAT)),
    Kernel("torchao's 8-bit AdamW", _DYNAMIC, partial(_Eager, "AdamW8bit")),
    Kernel("torchao's 4-bit AdamW", signed("optimizer", "dynamic4-128"), partial(_Eager, "AdamW4bit")),
    Kernel("torchao's fp8 AdamW", _BLOCKS, partial(_Eager, "AdamWFp8")),
    Kernel(
        "torchao's 8-bit AdamW, rounding at random",
        signed("optimizer", "dynamic8-256", weights="bf16-stochastic"),
        partial(_Eager, "AdamW8bit", bf16_stochastic_round=True),
    ),
)
