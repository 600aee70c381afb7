"""Computes the product of a converted layer, exactly and with emulated casts, and measures how far a result is from
it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.features.audit.operands import PromisedCasts, round_operand
from fp8bench.formats.recipes import Treatment
from fp8bench.nn.holders import CONV1D_KIND, CONV2D_KIND, classify_module

# A result matches another one if they differ by less than _NEGLIGIBLE over all elements, and by less than
# _NEGLIGIBLE_IN_LINE in every row and column.
_NEGLIGIBLE, _NEGLIGIBLE_IN_LINE = 2.0**-7, 0.2
# How many rows, or images of a convolution, are multiplied at most.
ROWS, IMAGES = 512, 8


class RelativeResultDifferences(NamedTuple):
    """Differences of a result, as root mean squares over all elements, over each row, and over each column. The unit is
    the typical size of a sum of products with random signs. `worst` is the largest value of any row or column, less
    what chance explains.
    """

    level: float
    worst: float
    rows: Tensor
    columns: Tensor

    @property
    def is_negligible(self) -> bool:
        return self.level < _NEGLIGIBLE and self.worst < _NEGLIGIBLE_IN_LINE


def measure_differences(difference: Tensor, size: Tensor) -> RelativeResultDifferences:
    squared_relative_differences = (
        # NaN counts as an infinite difference.
        (difference / size.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(math.inf).square()
    )
    rows, columns = (squared_relative_differences.mean(side).sqrt() for side in (1, 0))
    # The mean of a row or column with few elements differs more from the overall mean by chance.
    column_allowance, row_allowance = (1 + 3 / math.sqrt(count) for count in squared_relative_differences.shape)
    return RelativeResultDifferences(
        float(squared_relative_differences.mean().sqrt()),
        max(float(rows.max()) / row_allowance, float(columns.max()) / column_allowance),
        rows,
        columns,
    )


def fit_gain(result: Tensor, exact: Tensor) -> float:
    return float((result * exact).sum() / exact.square().sum().clamp(min=1e-30))


@dataclass
class LayerProduct:
    """The product of a layer's float32 input and weight. It has one row for each row of the output, or for each pixel
    of an image.
    """

    module: nn.Module
    x: Tensor
    weight: Tensor
    casts_weight: bool

    @cached_property
    def kind(self) -> str:
        return classify_module(self.module)[0]

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.kind == CONV2D_KIND:
            # Apply the padding, stride and groups of the layer to other operands, without its bias.
            result: Tensor = nn.Conv2d._conv_forward(self.module, x, weight, None)  # type: ignore[arg-type]
            return result
        return x @ weight if self.kind == CONV1D_KIND else F.linear(x, weight)

    def flatten_rows(self, output: Tensor) -> Tensor:
        channel_dimension = 1 if self.kind == CONV2D_KIND else -1
        return output.movedim(channel_dimension, -1).reshape(-1, output.shape[channel_dimension])

    @cached_property
    def sampled_rows(self) -> Tensor:
        count = len(self.x)
        max_sample_count = IMAGES if self.kind == CONV2D_KIND else ROWS
        # The seed depends only on the size, so every call samples the same rows.
        return torch.randperm(count, generator=torch.Generator().manual_seed(count))[:max_sample_count].sort().values

    def sample_output(self, output: Tensor) -> Tensor:
        float_output = output.detach().cpu().float()
        return self.flatten_rows(
            float_output.reshape(len(self.x), *float_output.shape[-3 if self.kind == CONV2D_KIND else -1 :])[
                self.sampled_rows
            ]
        )

    def multiply_rows(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.flatten_rows(self.multiply(x[self.sampled_rows], weight))

    @cached_property
    def exact_result(self) -> Tensor:
        return self.multiply_rows(self.x, self.weight)

    @cached_property
    def typical_magnitudes(self) -> Tensor:
        return self.multiply_rows(self.x.square(), self.weight.square()).sqrt()

    def multiply_rounded(self, dtype: torch.dtype) -> Tensor:
        return self.multiply_rows(self.x.to(dtype).float(), self.weight.to(dtype).float())

    def iterate_cast_results(self, promised_casts: PromisedCasts, casts_inputs: bool = True) -> Iterator[Tensor]:
        """Yields the product of the layer's operands after the promised casts. Without `casts_inputs`, only the weight
        is cast. If rounding to bf16 changes an operand, also yields the products of which one or both operands were
        rounded to bf16 before the cast.
        """
        input_treatment, weight_treatment, _ = promised_casts.treatments
        for carriers in self._carrier_dtype_pairs:
            x, weight = (side.to(dtype).float() for side, dtype in zip((self.x, self.weight), carriers, strict=True))
            if self.casts_weight and self.kind == CONV1D_KIND:
                weight = round_operand(weight.t().contiguous(), weight_treatment).values.t()
            elif self.casts_weight:
                weight = round_operand(weight.flatten(1).contiguous(), weight_treatment).values.reshape(weight.shape)
            yield self.multiply_rows(self._cast_input(x, input_treatment) if casts_inputs else x, weight)

    @cached_property
    def _carrier_dtype_pairs(self) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
        fp32 = torch.float32
        bf16 = torch.bfloat16
        is_exact_in_bf16 = all(torch.equal(side, side.to(bf16).float()) for side in (self.x, self.weight))
        return ((fp32, fp32),) if is_exact_in_bf16 else ((fp32, fp32), (bf16, bf16), (bf16, fp32), (fp32, bf16))

    def _cast_input(self, x: Tensor, treatment: Treatment | None) -> Tensor:
        if self.kind != CONV2D_KIND:
            return round_operand(x, treatment).values
        # Blocks that share a scale run along channels, so each pixel becomes a row.
        pixels = x.movedim(1, -1)
        return (
            round_operand(pixels.reshape(-1, pixels.shape[-1]), treatment).values.reshape(pixels.shape).movedim(-1, 1)
        )

    def compute_gradients(self, gradient: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            x, weight = (tensor.detach().requires_grad_() for tensor in (self.x, self.weight))
            output = self.multiply(x, weight)
            product_gradients = torch.autograd.grad(output, (x, weight), gradient.reshape(output.shape))
        return {
            "input": product_gradients[0],
            "weight": product_gradients[1],
            "bias": self.flatten_rows(gradient.reshape(output.shape)).sum(0),
        }

    def compute_cast_gradients(self, gradient: Tensor, promised_casts: PromisedCasts) -> dict[str, Tensor]:
        """Returns the gradients of the input and weight of a linear layer, computed with all operands cast. Returns
        {} for convolutions and for transformers' Conv1D, which is a linear layer too.
        """
        if self.kind in (CONV1D_KIND, CONV2D_KIND):
            return {}
        input_treatment, weight_treatment, gradient_treatment = promised_casts.treatments
        rows = gradient.reshape(-1, len(self.weight))
        rounded_rows, rounded_columns = (
            round_operand(tensor.contiguous(), gradient_treatment).values for tensor in (rows, rows.t())
        )
        weight, x = (
            round_operand(tensor.t().contiguous(), cast).values
            for tensor, cast in ((self.weight, weight_treatment), (self.x, input_treatment))
        )
        return {"input": rounded_rows @ weight.t(), "weight": rounded_columns @ x.t()}

    def square_operands(self) -> LayerProduct:
        return LayerProduct(self.module, self.x.square(), self.weight.square(), self.casts_weight)
