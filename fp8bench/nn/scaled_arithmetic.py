"""The arithmetic of a recipe on hardware: float8 codes with their scales, multiplied by torch's scaled product."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fp8bench.formats.scaled import factor
from fp8bench.formats.torch_codes import torch_codes
from fp8bench.nn.recipe_arithmetic import RecipeArithmetic
from fp8bench.protocols import Operand, Role


class ScaledArithmetic(RecipeArithmetic):
    """One float32 scale a tensor, current or delayed, or one a row.

    CUDA wants the first operand row-major and the second column-major, so both orientations of an operand are kept
    contiguous along the contraction. Forward products accumulate fast; those with a gradient do not, as in
    Transformer Engine and torchao.
    """

    def operand(self, tensor: Tensor, role: Role, again: bool) -> Operand:
        one = self.treatments[role]
        assert one.scaling is not None
        if role in self.scales:
            scale = self.scales[role].next(tensor, again)
            inverse = scale.reciprocal()
        else:
            scale, inverse = factor(tensor, one.fmt, one.scaling)
        return Operand(torch_codes(tensor, one.fmt, scale), inverse, role is Role.GRADIENT)

    def transposed(self, operand: Operand) -> Operand:
        return Operand(operand.data.t().contiguous(), operand.scale, operand.gradient)

    def unscaled(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(torch_codes(tensor, self.treatments[role].fmt))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        if a.data.dtype == b.data.dtype == self.carrier:
            return super().product(a, b, dtype)
        if a.data.dtype == b.data.dtype == torch.float8_e5m2:
            raise ValueError("CUDA has no product of two E5M2 tensors; one of them must not be a gradient")
        if a.scale is None or b.scale is None:
            raise ValueError("float8 operands need their scales")
        kind = functional.ScalingType.TensorWise if self.recipe.per_tensor else functional.ScalingType.RowWise
        found: Tensor = functional.scaled_mm(
            a.data,
            b.data.t(),
            a.scale,
            kind,
            # A scale for every column of the second operand lies in a row; as a column it is taken, and is wrong.
            b.scale if self.recipe.per_tensor else b.scale.t(),
            kind,
            # With a scale a row CUDA gives bfloat16 only.
            output_dtype=dtype if self.recipe.per_tensor else torch.bfloat16,
            use_fast_accum=not (a.gradient or b.gradient),
        )
        return found.to(dtype)
