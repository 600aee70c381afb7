"""The classes with which precisions cast and multiply. They compute in one of torch's dtypes, emulate a precision on
rounded values, or run a recipe with native FP8 products.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from fp8bench.formats.native_codes import (
    cast_codes_with_transpose,
    casts_in_one_call,
    codes,
    compute_current_scale,
    current_codes,
    row_codes,
    row_codes_both,
    transpose_codes,
)
from fp8bench.formats.operators import values
from fp8bench.formats.quantise import Draw
from fp8bench.formats.recipes import Accumulator, Recipe
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.rotations import rotate
from fp8bench.nn.tensor_scales import DelayedScale, ScaleSource, StaticScale, backward_is_running, make_static_scales
from fp8bench.numerics.products import multiply_in_float32, short_product, to_dtype
from fp8bench.numerics.ranges import TallyLedger
from fp8bench.protocols import Arithmetic, Operand, Role, ScaleBook, WatchedArithmetic


class PlainArithmetic(Arithmetic):
    """Casts and multiplies in one of torch's dtypes."""

    plain = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.carrier = dtype
        self.casts = dtype != torch.float32  # master weights are fp32
        self.groups = 8 if dtype == torch.bfloat16 else 0  # on a GPU torch has grouped products for bfloat16 only

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(tensor.detach().to(self.carrier))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return to_dtype(torch.mm(a.data, b.data.t()), dtype)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        return Operand(operand.data.t())

    def multiply_groups(self, a: Operand, b: Operand, ends: Tensor) -> Tensor:
        return F.grouped_mm(a.data, b.data.transpose(-2, -1), offs=ends)


@dataclass(eq=False)
class EmulatedArithmetic(Arithmetic):
    """Emulates a precision: rounds values with `quantise` and multiplies them in float32. The results are those of
    the precision, but the speed is not.
    """

    carrier: torch.dtype
    quantise: Callable[[Tensor, Role], Tensor]
    keeps_source: bool = False

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(self.quantise(tensor, role))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return multiply_in_float32(a.data, b.data, dtype)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        if self.keeps_source:
            return self.cast(source.t(), role)
        return Operand(operand.data.t())


def count_casts(inner: Arithmetic, kind: str, ledger: TallyLedger) -> Arithmetic:
    """Returns an arithmetic that works like `inner`, and adds every tensor that it casts to the `ledger`, under the
    layer's `kind`. It is too slow for timed steps.
    """

    def record_cast(operand: Operand, source: Tensor | None, role: Role, earlier: Operand | None) -> None:
        assert source is not None
        ledger.add(kind, role.value, source)

    # Do not count transposed operands, because the same tensors were counted when they were cast.
    return WatchedArithmetic(inner, record_cast, turned=False)


class RecipeArithmetic(Arithmetic):
    """Emulates a recipe: rounds each operand by its role, with scales along the contraction of its product.

    Delayed scales and random seeds belong to one layer, so `layer` returns a separate instance for each. Seeds and
    rotations derive from the layer's `name`, so that a run can be repeated.
    """

    def __init__(
        self,
        recipe: Recipe,
        carrier: torch.dtype = torch.bfloat16,
        name: str = "",
        scales: Mapping[Role, ScaleSource] | None = None,
    ) -> None:
        self.recipe = recipe
        self.name = name
        self.carrier = carrier
        # A delayed scale does not depend on the tensor that is cast, so no caller computes its largest magnitude.
        self.takes_amax = self._cast_reads_amax and scales is None
        self.keeps_source = recipe.keeps_source
        self.settles = recipe.delayed is not None and scales is None
        self.explicit = recipe.hadamard or recipe.accumulator is not Accumulator.FP32
        self.treatments = dict(zip((Role.INPUT, Role.WEIGHT, Role.GRADIENT), recipe.treatments, strict=True))
        if scales is None and recipe.delayed is not None:
            delayed = recipe.delayed
            scales = {role: DelayedScale(delayed, treatment.fmt) for role, treatment in self.treatments.items()}
        self.scales: Mapping[Role, ScaleSource] = scales or {}
        # Each role of each layer has its own seeds. With shared seeds the rounding errors of different casts would be
        # correlated.
        self._seeds = {
            role: _SeedSequence(f"{name}/{role}") for role, treatment in self.treatments.items() if treatment.stochastic
        }
        self._signs = _hash_name(f"{name}/signs")

    @property
    def _cast_reads_amax(self) -> bool:
        """Returns whether a cast first computes the tensor's largest magnitude. If so, a caller that already has this
        number can pass it.
        """
        return False

    def layer(self, name: str) -> Arithmetic:
        # Without scales, seeds or rotations there is nothing that layers must not share.
        if not (self.scales or self._seeds or self.recipe.hadamard):
            return self
        return type(self)(self.recipe, self.carrier, name)

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        if not self.recipe.has_tensor_scales_only:
            return self
        return type(self)(self.recipe, self.carrier, name, make_static_scales(book, name, self.treatments))

    def memory(self) -> dict[str, Tensor]:
        tensor_by_name: dict[str, Tensor] = {}
        for role, stateful_part in self._list_scales_and_seeds().items():
            tensor_by_name |= {f"{role}.{name}": tensor for name, tensor in stateful_part.memory().items()}
        return tensor_by_name

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        for role, stateful_part in self._list_scales_and_seeds().items():
            prefix = f"{role}."
            stateful_part.recall(
                {name.removeprefix(prefix): memory[name] for name in memory if name.startswith(prefix)}
            )

    def _list_scales_and_seeds(self) -> dict[str, DelayedScale | StaticScale | _SeedSequence]:
        """Returns the scales and seeds that persist between casts, by role and kind."""
        scales_and_seeds: dict[str, DelayedScale | StaticScale | _SeedSequence] = {}
        for role, scale in self.scales.items():
            if isinstance(scale, DelayedScale | StaticScale):
                scales_and_seeds[f"{role}.scale"] = scale
        for role, draws in self._seeds.items():
            scales_and_seeds[f"{role}.draws"] = draws
        return scales_and_seeds

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return self.operand(tensor, role, _is_repeated_cast(role))

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        if role is not Role.WEIGHT and self.recipe.high_weight_gradient:
            return Operand(source.detach().to(self.carrier))
        if role is not Role.WEIGHT and self.recipe.hadamard:
            source = rotate(source, self._signs)
        return self.operand(source, role, repeat=False)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        return self.transpose(operand) if self._can_share_cast(role) else self.cast_transpose(source.t(), role)

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        operand = self.cast(tensor, role)
        return operand, self.transpose(operand) if self._can_share_cast(role) else None

    def last_scale(self, role: Role) -> Tensor | None:
        """Returns the scale of the role's last cast, or None if scales are computed from each tensor alone."""
        last_scale_pair = self.scales[role].last_pair if role in self.scales else None
        return last_scale_pair and last_scale_pair.scale

    def _can_share_cast(self, role: Role) -> bool:
        """Returns whether one cast of a tensor serves both products that use the tensor."""
        scaling = self.treatments[role].scaling
        return self._has_equal_casts(role) and (scaling is None or scaling.turns)

    def _has_equal_casts(self, role: Role) -> bool:
        """Returns whether both products that use a tensor need it rounded in the same way."""
        transpose_cast_differs = role is not Role.WEIGHT and (self.recipe.high_weight_gradient or self.recipe.hadamard)
        return not (transpose_cast_differs or self.treatments[role].stochastic)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        if a.data.dtype == b.data.dtype == self.carrier:  # a weight gradient that the recipe keeps in high precision
            return to_dtype(torch.mm(a.data, b.data.t()), dtype)
        if self.recipe.accumulator is Accumulator.FP32:
            return multiply_in_float32(a.data, b.data, dtype)
        return to_dtype(short_product(a.data, b.data, self.recipe.accumulator, self.recipe.accumulator_bits), dtype)

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(values(tensor, self.treatments[role].fmt))

    def operand(self, tensor: Tensor, role: Role, repeat: bool) -> Operand:
        treatment = self.treatments[role]
        seed = self._seeds[role].next(tensor.device, repeat) if role in self._seeds else None
        scale = self.scales[role].next(tensor, repeat).scale if role in self.scales else None
        return Operand(
            values(tensor, treatment.fmt, treatment.scaling, seed=seed, scale=scale), gradient=role is Role.GRADIENT
        )

    def transpose(self, operand: Operand) -> Operand:
        return Operand(operand.data.t(), operand.scale, operand.gradient)


def _is_repeated_cast(role: Role) -> bool:
    """Returns whether a cast repeats a cast of the forward pass. During backward, inputs and weights are cast only if
    their block is recomputed.
    """
    return role is not Role.GRADIENT and backward_is_running()


class _SeedSequence:
    """Random seeds, one for each cast, as a tensor on the device. They count up from a hash of a name."""

    def __init__(self, name: str) -> None:
        self._first_seed = _hash_name(name)
        self._seed: Tensor | None = None

    def next(self, device: torch.device, repeat: bool) -> Tensor:
        if self._seed is None:
            self._seed = torch.full((1,), self._first_seed, dtype=torch.int64, device=device)
        elif not repeat:
            self._seed = self._seed + 1
        return self._seed

    def reserve_seeds(self, device: torch.device, count: int, repeat: bool = False) -> Draw:
        """Reserves the next `count` seeds of the sequence for a kernel, which computes them from the last reserved
        seed. With `repeat` nothing is reserved, and the kernel uses the last seed again.
        """
        previous_seed = self._seed
        last_reserved_seed = (
            previous_seed
            if previous_seed is not None
            else torch.full((1,), self._first_seed - 1, dtype=torch.int64, device=device)  # the kernel adds 1
        )
        new_last_seed = torch.empty_like(last_reserved_seed)
        if repeat and previous_seed is not None:
            return Draw(last_reserved_seed, new_last_seed, (0,))
        self._seed = new_last_seed
        return Draw(last_reserved_seed, new_last_seed, tuple(range(1, count + 1)))

    def memory(self) -> dict[str, Tensor]:
        return {} if self._seed is None else {"seed": self._seed}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        self._seed = memory.get("seed")


def _hash_name(name: str) -> int:
    """Hashes a name to 63 bits. The result is the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1  # fits into an int64


class ScaledArithmetic(RecipeArithmetic):
    """Native FP8 products with float32 scales: one scale for each tensor (current or delayed), or one for each row.

    CUDA requires the first operand row-major and the second column-major. So both orientations of an operand are
    stored contiguously along the contraction. Forward products use fast accumulation. Products with a gradient do
    not, as in Transformer Engine and torchao.
    """

    # The only output dtype that products with row scales can have, or None if they can have any.
    row_output_dtype: ClassVar[torch.dtype | None] = torch.bfloat16

    @property
    def _cast_reads_amax(self) -> bool:
        return self.recipe.has_tensor_scales_only

    @property
    def _has_tensor_scales(self) -> bool:
        return self.recipe.has_tensor_scales_only or self.recipe.is_unscaled

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        treatment = self.treatments[role]
        # If the two products that use the tensor need different casts, cast for the first product only, unless a single
        # call can cast both by rows and by columns.
        if not self._can_share_cast(role):
            if treatment.scaling is None or not self._has_equal_casts(role):
                return self.cast(tensor, role), None
            row_and_column_casts = row_codes_both(tensor, treatment.fmt, treatment.scaling.rounding)
            return Operand(*row_and_column_casts[0], role is Role.GRADIENT), Operand(
                *row_and_column_casts[1], role is Role.GRADIENT
            )
        inverse, *codes_of_both = self._encode_tensor(tensor, role, _is_repeated_cast(role), both=True, amax=amax)
        operand, transposed_operand = (
            Operand(data, inverse, role is Role.GRADIENT) for data in codes_of_both if data is not None
        )
        return operand, transposed_operand

    def operand(self, tensor: Tensor, role: Role, repeat: bool) -> Operand:
        treatment = self.treatments[role]
        if self._has_tensor_scales:
            inverse, data, _ = self._encode_tensor(tensor, role, repeat, both=False)
        else:
            assert treatment.scaling is not None
            data, inverse = row_codes(tensor, treatment.fmt, treatment.scaling.rounding)
        return Operand(data, inverse, role is Role.GRADIENT)

    def _encode_tensor(
        self, tensor: Tensor, role: Role, repeat: bool, both: bool, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns three things: the scale that decodes the tensor's codes, these codes, and the codes of its
        transpose. The third is None without `both`.
        """
        treatment = self.treatments[role]
        next_scale = self.scales.get(role)
        # If nothing else needs the largest magnitude, a single call computes the scale and the codes.
        if casts_in_one_call(tensor):
            if isinstance(next_scale, DelayedScale) and (cast := next_scale.cast(tensor, repeat, both)):
                return cast.inverse_scale, cast.straight, cast.turned
            if next_scale is None and treatment.scaling is not None and amax is None:
                return current_codes(tensor, treatment.fmt, treatment.scaling.rounding, both)
        scale, inverse = self._compute_scale(tensor, role, repeat, amax)
        if both:
            return inverse, *cast_codes_with_transpose(tensor, treatment.fmt, scale)
        return inverse, codes(tensor, treatment.fmt, scale), None

    def _compute_scale(
        self, tensor: Tensor, role: Role, repeat: bool, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if role in self.scales:
            return self.scales[role].next(tensor, repeat, amax)
        treatment = self.treatments[role]
        if treatment.scaling is None:
            unit_scale = torch.ones((), dtype=torch.float32, device=tensor.device)
            return unit_scale, unit_scale
        amax = largest_magnitude(tensor) if amax is None else amax
        return compute_current_scale(amax, treatment.fmt, treatment.scaling.rounding)

    def transpose(self, operand: Operand) -> Operand:
        return Operand(transpose_codes(operand.data), operand.scale, operand.gradient)

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(codes(tensor, self.treatments[role].fmt))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        if a.data.dtype == b.data.dtype == self.carrier:
            return super().product(a, b, dtype)
        if a.data.dtype == b.data.dtype == torch.float8_e5m2 and torch.version.hip is None:
            raise ValueError("CUDA has no product of two E5M2 tensors: cast one of them to E4M3")
        if a.scale is None or b.scale is None:
            raise ValueError("a float8 operand has no scale: cast it with this arithmetic")
        has_tensor_scales = self._has_tensor_scales
        scaling_type = (ScalingType.TensorWise if has_tensor_scales else ScalingType.RowWise).value
        # The scales of the second operand's columns must be a row vector. torch also accepts a column vector, but
        # then computes a wrong product.
        second_operand_scale = b.scale if has_tensor_scales else b.scale.t()
        output_dtype = dtype if has_tensor_scales or self.row_output_dtype is None else self.row_output_dtype
        uses_fast_accumulation = not (a.gradient or b.gradient)
        # functional.scaled_mm calls this operator, but torch 2.11 cannot compile functional.scaled_mm.
        product: Tensor = torch.ops.aten._scaled_mm_v2.default(
            a.data,
            b.data.t(),
            [a.scale],
            [scaling_type],
            [],
            [second_operand_scale],
            [scaling_type],
            [],
            None,
            output_dtype,
            [],
            uses_fast_accumulation,
        )
        return to_dtype(product, dtype)

    def multiply_groups(self, a: Operand, b: Operand, ends: Tensor) -> Tensor:
        transposed_b_data = b.data.transpose(-2, -1)
        if a.scale is None or b.scale is None:
            return F.grouped_mm(a.data, transposed_b_data, offs=ends)
        # functional.scaled_grouped_mm calls another operator, which does not work on meta tensors. This operator takes
        # the scales as vectors.
        scales = (a.scale.squeeze(-1), b.scale.squeeze(-1))
        uses_fast_accumulation = not (a.gradient or b.gradient)
        return torch.ops.aten._scaled_grouped_mm.default(
            a.data, transposed_b_data, *scales, ends, None, None, self.carrier, uses_fast_accumulation
        )


class Float32RowScaledArithmetic(ScaledArithmetic):
    """ScaledArithmetic for devices whose products with row scales can return float32."""

    row_output_dtype = None
