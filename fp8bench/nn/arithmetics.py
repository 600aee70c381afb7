"""The arithmetics that several precisions share. Imports torch: precisions import it inside their methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from fp8bench.formats.grids import Format
from fp8bench.formats.scaling import element_codes, per_tensor_codes
from fp8bench.numerics.products import values_product
from fp8bench.protocols import Arithmetic, Operand, Role

Quantise = Callable[[Tensor, Role], Tensor]


class PlainArithmetic(Arithmetic):
    """torch's own products of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.carrier = dtype
        self.casts = dtype != torch.float32

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(tensor.detach().to(self.carrier))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return torch.mm(a.data, b.data.t()).to(dtype)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        return Operand(operand.data.t())


class EmulatedArithmetic(Arithmetic):
    """Values rounded by `quantise` and multiplied in float32: right in numbers, and its speed means nothing."""

    def __init__(
        self, carrier: torch.dtype, quantise: Quantise, keeps_source: bool = False, elements: Quantise | None = None
    ) -> None:
        """`elements` rounds to the elements' grid alone, where `quantise` scales too."""
        self.carrier = carrier
        self.keeps_source = keeps_source
        self._quantise = quantise
        self._elements = elements or quantise

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(self._quantise(tensor, role))

    def unscaled(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(self._elements(tensor, role))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return values_product(a.data, b.data, dtype)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        if self.keeps_source:
            return self.cast(source.t(), role)
        return Operand(operand.data.t())


class ScaledArithmetic(Arithmetic):
    """float8 codes with one current scale a tensor, multiplied by torch's scaled product.

    CUDA wants the first operand row-major and the second column-major, so both orientations of an operand are kept
    contiguous along the contraction. Forward products accumulate fast; those with a gradient do not, as in
    Transformer Engine and torchao.
    """

    def __init__(self, carrier: torch.dtype, formats: Mapping[Role, Format]) -> None:
        self.carrier = carrier
        self._formats = formats

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        codes, inverse_scale = per_tensor_codes(tensor, self._formats[role])
        return Operand(codes, inverse_scale)

    def unscaled(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(element_codes(tensor, self._formats[role]))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        gradients = [operand for operand in (a, b) if operand.data.dtype == torch.float8_e5m2]
        if len(gradients) == 2:
            raise ValueError("CUDA has no product of two E5M2 tensors; one of them must not be a gradient")
        if a.scale is None or b.scale is None:
            raise ValueError("float8 operands need their scales")
        return functional.scaled_mm(
            a.data,
            b.data.t(),
            a.scale,
            functional.ScalingType.TensorWise,
            b.scale,
            functional.ScalingType.TensorWise,
            output_dtype=dtype,
            use_fast_accum=not gradients,
        )

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        return Operand(operand.data.t().contiguous(), operand.scale)
