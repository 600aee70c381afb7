"""The product of a converted layer, exact and as casts make it, and the distances of a result from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.features.audit.operands import Promised, round_operand
from fp8bench.formats.recipes import Treatment
from fp8bench.nn.holders import CONV1D, CONV2D, kind_of

# How far off results may be if the casts are known: overall, and in one row or column.
_SAME, _SAME_IN_LINE = 2.0**-7, 0.2
# At most this many rows, or images, are multiplied.
ROWS, IMAGES = 512, 8


class Misses(NamedTuple):
    """Differences relative to the size of a random sum: the root mean square over all, per row and column, and of the
    worst row or column beyond chance."""

    level: float
    worst: float
    rows: Tensor
    columns: Tensor

    @property
    def none(self) -> bool:
        return self.level < _SAME and self.worst < _SAME_IN_LINE


def misses(difference: Tensor, size: Tensor) -> Misses:
    shares = (difference / size.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(math.inf).square()
    rows, columns = (shares.mean(side).sqrt() for side in (1, 0))
    # The fewer differences a line has, the further its mean may be from that of all.
    down, across = (1 + 3 / math.sqrt(count) for count in shares.shape)
    return Misses(
        float(shares.mean().sqrt()), max(float(rows.max()) / across, float(columns.max()) / down), rows, columns
    )


def gain_of(result: Tensor, exact: Tensor) -> float:
    return float((result * exact).sum() / exact.square().sum().clamp(min=1e-30))


@dataclass
class LayerProduct:
    """The product of a float32 input and weight, with a row for each row, or pixel, of the result."""

    module: nn.Module
    x: Tensor
    weight: Tensor
    casts_weight: bool

    @cached_property
    def kind(self) -> str:
        return kind_of(self.module)[0]

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.kind == CONV2D:
            result: Tensor = nn.Conv2d._conv_forward(self.module, x, weight, None)  # type: ignore[arg-type]
            return result
        return x @ weight if self.kind == CONV1D else F.linear(x, weight)

    def lines(self, output: Tensor) -> Tensor:
        channels = 1 if self.kind == CONV2D else -1
        return output.movedim(channels, -1).reshape(-1, output.shape[channels])

    @cached_property
    def looked_at(self) -> Tensor:
        count, most = len(self.x), IMAGES if self.kind == CONV2D else ROWS
        return torch.randperm(count, generator=torch.Generator().manual_seed(count))[:most].sort().values

    def sample(self, output: Tensor) -> Tensor:
        wide = output.detach().cpu().float()
        return self.lines(wide.reshape(len(self.x), *wide.shape[-3 if self.kind == CONV2D else -1 :])[self.looked_at])

    def multiply_rows(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.lines(self.multiply(x[self.looked_at], weight))

    @cached_property
    def exact(self) -> Tensor:
        return self.multiply_rows(self.x, self.weight)

    @cached_property
    def size(self) -> Tensor:
        return self.multiply_rows(self.x.square(), self.weight.square()).sqrt()

    def kept_in(self, dtype: torch.dtype) -> Tensor:
        return self.multiply_rows(self.x.to(dtype).float(), self.weight.to(dtype).float())

    def casts(self, promised: Promised, inputs: bool = True) -> Iterator[Tensor]:
        """Yields it with both operands, or only the weight, cast; then with one or both first rounded to bf16."""
        first, second, _ = promised.treatments
        for carriers in self._carriers:
            x, weight = (side.to(dtype).float() for side, dtype in zip((self.x, self.weight), carriers, strict=True))
            if self.casts_weight and self.kind == CONV1D:
                weight = round_operand(weight.t().contiguous(), second).values.t()
            elif self.casts_weight:
                weight = round_operand(weight.flatten(1).contiguous(), second).values.reshape(weight.shape)
            yield self.multiply_rows(self._cast_input(x, first) if inputs else x, weight)

    @cached_property
    def _carriers(self) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
        wide, short = torch.float32, torch.bfloat16
        is_carried = all(torch.equal(side, side.to(short).float()) for side in (self.x, self.weight))
        return ((wide, wide),) if is_carried else ((wide, wide), (short, short), (short, wide), (wide, short))

    def _cast_input(self, x: Tensor, treatment: Treatment | None) -> Tensor:
        if self.kind != CONV2D:
            return round_operand(x, treatment).values
        pixels = x.movedim(1, -1)
        return (
            round_operand(pixels.reshape(-1, pixels.shape[-1]), treatment).values.reshape(pixels.shape).movedim(-1, 1)
        )

    def gradients(self, gradient: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            x, weight = (tensor.detach().requires_grad_() for tensor in (self.x, self.weight))
            output = self.multiply(x, weight)
            into = torch.autograd.grad(output, (x, weight), gradient.reshape(output.shape))
        return {"input": into[0], "weight": into[1], "bias": self.lines(gradient.reshape(output.shape)).sum(0)}

    def cast_gradients(self, gradient: Tensor, promised: Promised) -> dict[str, Tensor]:
        """Returns both gradients of a linear layer's product with all operands cast; empty for other layers."""
        if self.kind in (CONV1D, CONV2D):
            return {}
        first, second, third = promised.treatments
        rows = gradient.reshape(-1, len(self.weight))
        down, across = (round_operand(tensor.contiguous(), third).values for tensor in (rows, rows.t()))
        weight, x = (
            round_operand(tensor.t().contiguous(), cast).values
            for tensor, cast in ((self.weight, second), (self.x, first))
        )
        return {"input": down @ weight.t(), "weight": across @ x.t()}

    def square_sides(self) -> LayerProduct:
        return LayerProduct(self.module, self.x.square(), self.weight.square(), self.casts_weight)
