"""Parts of the kernels that test the audit. A kernel of a table replaces one of these steps.

All steps use only torch, so that they run on any device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8bench.features.audit import operands
from fp8bench.formats.grids import E2M1, E4M3
from fp8bench.formats.operators import values
from fp8bench.formats.recipes import (
    BLOCK_POWER_OF_TWO,
    MX,
    NVFP4,
    NVFP4_SQUARE,
    ROW_POWER_OF_TWO,
    SQUARE_POWER_OF_TWO,
    TENSOR,
    Treatment,
)
from fp8bench.model.promises import CallablePromise
from fp8bench.user_code.named import make_signature

BF16 = torch.bfloat16
FP8, ROWS = Treatment(E4M3, TENSOR), Treatment(E4M3, ROW_POWER_OF_TWO)
BLOCKS, SQUARES = Treatment(E4M3, BLOCK_POWER_OF_TWO), Treatment(E4M3, SQUARE_POWER_OF_TWO)
MXFP8, MXFP4 = Treatment(E4M3, MX), Treatment(E2M1, MX)
NV = Treatment(E2M1, NVFP4), Treatment(E2M1, NVFP4_SQUARE)
Step = Callable[[Tensor], Tensor]
Product = Callable[[Tensor, Tensor], Tensor]
Memory = dict[Any, Any]
LARGEST, _LEAST = 448.0, 1e-30
ATTENTION, CAUSAL = make_signature("attention", "bf16"), make_signature("attention", "bf16", causal=True)


@dataclass(frozen=True)
class Kernel:
    """A kernel, its promise, and the `code` that an audit must find; '' if the kernel is honest.

    A promise that is only a precision is that of a product.
    If it `remembers`, its function takes a dict before the arguments, which is empty at first. `thread` is a public
    issue about the same mistake.
    """

    name: str
    promise: CallablePromise | str
    function: Callable[..., Any]
    code: str = ""
    thread: str = ""
    remembers: bool = False

    @property
    def signature(self) -> CallablePromise:
        return make_signature("product", self.promise) if isinstance(self.promise, str) else self.promise

    def made(self) -> Callable[..., Any]:
        """Returns the kernel's function with a new, empty memory."""
        return partial(self.function, {}) if self.remembers else self.function


def rounded(x: Tensor, treatment: Treatment) -> Tensor:
    return values(x, treatment.fmt, treatment.scaling)


def product(a: Tensor, b: Tensor, first: Treatment = FP8, second: Treatment | None = None) -> Tensor:
    """Multiplies honestly, with fp8bench's own emulation."""
    return (rounded(a, first) @ rounded(b, second or first).t()).to(BF16)


def plain(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies without any cast."""
    return a @ b.t()


def remember_by(key: Callable[[Tensor], object]) -> Callable[[Memory, Tensor, Tensor], Tensor]:
    """Returns a product that returns an earlier result if both operands have the keys and shapes of that call."""

    def run(memory: Memory, a: Tensor, b: Tensor) -> Tensor:
        keys = a.shape, b.shape, key(a), key(b)
        if keys not in memory:
            memory[keys] = product(a, b)
        return memory[keys].clone()

    return run


def rescaled(change: Step, first: Treatment = MXFP8, second: Treatment = MXFP8) -> Product:
    """Returns a product that applies changed scales to the blocks of its first operand."""
    block = 128 if first is BLOCKS else 32

    def run(a: Tensor, b: Tensor) -> Tensor:
        operand = operands.round_operand(a, first)
        scales = change(operand.scales).expand_as(operand.scales).repeat_interleave(block, 1)[:, : a.shape[1]]
        return (operand.elements * scales @ rounded(b, second).t()).to(BF16)

    return run


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, **options: Any) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, **options)


class LinearFunction(torch.autograd.Function):
    """A linear layer with a given product and given gradients; see `layer`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, multiply: Product, differentiate: Callable[..., Any]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.differentiate = differentiate
        return multiply(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return *ctx.differentiate(*ctx.saved_tensors, *gradients), None, None


def wide_gradients(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return gradient @ weight, gradient.t() @ x


def layer(multiply: Product = plain, differentiate: Callable[..., Any] = wide_gradients) -> Product:
    """Returns a linear layer. `differentiate` returns the gradients of input and weight from these two and the
    gradient of the result.
    """
    return lambda x, weight: LinearFunction.apply(  # type: ignore[no-untyped-call]
        x, weight, multiply, differentiate
    )


def rows_amax(x: Tensor) -> Tensor:
    return x.abs().amax(1, keepdim=True)


def over_448(amax: Tensor) -> Tensor:
    return amax.clamp(min=_LEAST) / LARGEST


def exponent(amax: Tensor) -> Tensor:
    """Returns the smallest power of two that, used as a scale, keeps all values within the largest number of the
    format.
    """
    mantissa, power = torch.frexp(over_448(amax))
    return torch.ldexp(torch.ones_like(mantissa), power - (mantissa == 0.5).to(power.dtype))


def saturated(scaled: Tensor) -> Tensor:
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()


def to_steps(round_steps: Step) -> Step:
    """Returns a cast to e4m3. `round_steps` rounds distances from zero, in steps of the format, to whole numbers."""

    def cast(scaled: Tensor) -> Tensor:
        steps = torch.exp2(scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
        return (round_steps(scaled.abs() / steps) * steps * scaled.sign()).clamp(-LARGEST, LARGEST)

    return cast


@dataclass(frozen=True)
class Operand:
    """Reads, scales and casts a matrix. `shown` changes the scale that the kernel reports."""

    read: Step = lambda x: x
    amax: Step = lambda x: x.abs().amax()
    scale: Step = over_448
    cast: Step = saturated
    shown: Step = lambda scale: scale

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.read(x).float()
        scale = self.scale(self.amax(x))
        return self.cast(x / scale), self.shown(scale)


PLAIN = Operand()


def kernel(
    first: Operand = PLAIN,
    second: Operand | None = None,
    sums: Product = plain,
    out: Step = lambda sums: sums.to(BF16),
) -> Product:
    """Returns a product of two operands that applies their scales to its sums. `second` defaults to `first`."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        (left, down), (right, across) = first(a), (second or first)(b)
        return out(sums(left, right) * (down * across.t()))

    return run


def parts(size: int, sum_dtype: torch.dtype = torch.float32) -> Product:
    """Returns a function that sums `size` products at a time. Partial sums and totals have the dtype `sum_dtype`."""

    def sums(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(len(a), len(b), dtype=sum_dtype)
        for at in range(0, a.shape[1], size):
            total = total + (a[:, at : at + size] @ b[:, at : at + size].t()).to(sum_dtype)
        return total.float()

    return sums
