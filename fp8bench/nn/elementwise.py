"""The operations between products, which low-precision recipes leave in high precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.gpt import Norm
from fp8bench.protocols import Phases


class Between(nn.Module):
    """One of these operations by name, on (tokens, width), as a layer that takes the phases and marks none."""

    def __init__(self, operation: str, tokens: int, width: int) -> None:
        super().__init__()
        self.function = OPERATIONS[operation](tokens, width)

    def forward(self, *inputs_and_phase: Tensor | Phases) -> Tensor:
        *inputs, _ = inputs_and_phase
        return self.function(*inputs)


class CrossEntropy(nn.Module):
    """The loss of random targets, in at least fp32; summed, because gradients of a mean would vanish in fp16."""

    targets: Tensor

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.register_buffer("targets", torch.randint(width, (tokens,)))

    def forward(self, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.to(_wide(logits)), self.targets, reduction="sum")


def gelu(x: Tensor) -> Tensor:
    """GPT-2's activation."""
    return F.gelu(x, approximate="tanh")


def silu_gate(gate: Tensor, value: Tensor) -> Tensor:
    """Llama's activation."""
    return F.silu(gate) * value


def softmax(x: Tensor) -> Tensor:
    """Along the width, in at least fp32, handed back in the input's dtype."""
    return torch.softmax(x, -1, dtype=_wide(x)).to(x.dtype)


OPERATIONS: dict[str, Callable[[int, int], Callable[..., Tensor]]] = {
    "layer_norm": lambda tokens, width: Norm(width, root_mean_square=False),
    "rms_norm": lambda tokens, width: Norm(width, root_mean_square=True),
    "gelu": lambda tokens, width: gelu,
    "silu_gate": lambda tokens, width: silu_gate,
    "softmax": lambda tokens, width: softmax,
    "residual": lambda tokens, width: torch.add,
    "cross_entropy": CrossEntropy,
}


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
