"""Parts of many models: norms, the feed-forward part, the loss, and operations that are measured alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.around import cast_to, widen_dtype
from fp8bench.nn.linear import ChooseArithmetic, Linear, region
from fp8bench.protocols import Arithmetic, Fused, Phases, Role


class Norm(nn.Module):
    """Layer norm or RMS norm. It rounds x and the weight as `arithmetic` does. If `arithmetic` is None, it computes in
    fp32 or wider. The result has the dtype of x.

    In a unit-scaled model, `unit_scaling` rescales the weight.
    """

    arithmetic: Arithmetic | None = None
    epsilon = 1e-5
    unit_scaling: Callable[[Tensor], Tensor] | None = None

    def __init__(self, width: int, root_mean_square: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.root_mean_square = root_mean_square

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.unit_scaling is None else self.unit_scaling(self.weight)
        weight = cast_to(weight, self.arithmetic, Role.WEIGHT)
        cast_input = cast_to(x, self.arithmetic).to(weight.dtype)
        return apply_norm(cast_input, weight, self.root_mean_square, self.epsilon).to(x.dtype)


def apply_norm(x: Tensor, weight: Tensor, root_mean_square: bool, epsilon: float) -> Tensor:
    if root_mean_square:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return F.layer_norm(x, weight.shape, weight, None, epsilon)


class FeedForward(nn.Module):
    """A feed-forward part: two products with GELU between them, or Llama's gated form. In a unit-scaled model,
    `unit_scaling` replaces the forward pass.
    """

    unit_scaling: Callable[[FeedForward, Tensor, Phases], Tensor] | None = None

    def __init__(self, width: int, hidden: int, gated: bool, gain: float, choose: ChooseArithmetic) -> None:
        super().__init__()
        self.gated = gated
        self.up = Linear(width, hidden * (2 if gated else 1), choose("up"))
        self.down = Linear(hidden, width, choose("down"), gain)

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        if self.unit_scaling is not None:
            return self.unit_scaling(self, x, phase)
        return self.down(self.apply_activation(self.up(x, phase)), phase)

    def apply_activation(self, hidden: Tensor) -> Tensor:
        return silu_gate(*hidden.chunk(2, dim=-1)) if self.gated else gelu(hidden)


class NormedFeedForward(nn.Module):
    """RMS norm, up product, activation and down product. A backend may compute norm and up product as one layer. With
    `both_products` it may compute all four operations as one layer.
    """

    def __init__(self, width: int, hidden: int, gated: bool, choose: ChooseArithmetic, both_products: bool) -> None:
        super().__init__()
        self.norm = Norm(width, root_mean_square=True)
        self.block = FeedForward(width, hidden, gated, 1.0, choose)
        up = self.block.up
        down = self.block.down
        weights = (up.weight, down.weight) if both_products else (up.weight,)
        self._fuses_all = both_products
        # A library may fuse the norm and the first product. Some also fuse the activation and the second product.
        self._fused = up.arithmetic.fuse(Fused((self.norm.weight,), weights, gated))

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        if self._fused is None:
            return self.block(self.norm(x), phase)
        product = region(phase.gemm, self._fused, x)
        return product if self._fuses_all else self.block.down(self.block.apply_activation(product), phase)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Returns the loss of logits (batch, tokens, vocabulary), computed in fp32 or wider."""
    wide_logits = logits.reshape(-1, logits.shape[-1]).to(widen_dtype(logits.dtype))
    return F.cross_entropy(wide_logits, targets.reshape(-1), reduction=reduction)


def apply_dropout(x: Tensor, fraction: float) -> Tensor:
    return F.dropout(x, fraction) if fraction else x


def gelu(x: Tensor) -> Tensor:
    # GPT-2 uses the approximation by tanh.
    return F.gelu(x, approximate="tanh")


def silu_gate(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * value


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1, dtype=widen_dtype(x.dtype)).to(x.dtype)


class SummedCrossEntropy(nn.Module):
    """Summed cross entropy with random targets. It is a sum, because the gradients of a mean would vanish in fp16."""

    targets: Tensor

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.register_buffer("targets", torch.randint(width, (tokens,)))

    def forward(self, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.to(widen_dtype(logits.dtype)), self.targets, reduction="sum")


# Maps an operation's name to a function that makes it for inputs of (tokens, width).
OPERATIONS: dict[str, Callable[[int, int], Callable[..., Tensor]]] = {
    "layer_norm": lambda tokens, width: Norm(width, root_mean_square=False),
    "rms_norm": lambda tokens, width: Norm(width, root_mean_square=True),
    "gelu": lambda tokens, width: gelu,
    "silu_gate": lambda tokens, width: silu_gate,
    "softmax": lambda tokens, width: softmax,
    "residual": lambda tokens, width: torch.add,
    "cross_entropy": SummedCrossEntropy,
}


class Operation(nn.Module):
    """One of `OPERATIONS` as a layer. It accepts phase markers but does not use them."""

    def __init__(self, name: str, tokens: int, width: int) -> None:
        super().__init__()
        self.function = OPERATIONS[name](tokens, width)

    def forward(self, *inputs_and_phase: Tensor | Phases) -> Tensor:
        *inputs, _ = inputs_and_phase
        return self.function(*inputs)
