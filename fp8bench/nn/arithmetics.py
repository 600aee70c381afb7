"""Arithmetics that precisions share: torch's own dtypes, emulation by rounded values, recipes emulated or native."""

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
    casts_in_one_call,
    codes,
    codes_both,
    current_codes,
    current_scale,
    row_codes,
    row_codes_both,
    transpose_codes,
)
from fp8bench.formats.operators import values
from fp8bench.formats.quantise import Draw
from fp8bench.formats.recipes import Accumulator, Recipe
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.rotations import rotate
from fp8bench.nn.tensor_scales import DelayedScale, NextScale, StaticScale, backward_is_running, kept_scales
from fp8bench.numerics.products import in_dtype, short_product, values_product
from fp8bench.numerics.ranges import Ledger
from fp8bench.protocols import Arithmetic, Operand, Role, ScaleBook, WatchedArithmetic


class PlainArithmetic(Arithmetic):
    """Products by torch in one dtype."""

    plain = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.carrier = dtype
        self.casts = dtype != torch.float32
        self.groups = 8 if dtype == torch.bfloat16 else 0  # on a GPU torch groups products in bfloat16 alone

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(tensor.detach().to(self.carrier))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return in_dtype(torch.mm(a.data, b.data.t()), dtype)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        return Operand(operand.data.t())

    def multiply_groups(self, a: Operand, b: Operand, ends: Tensor) -> Tensor:
        return F.grouped_mm(a.data, b.data.transpose(-2, -1), offs=ends)


@dataclass(eq=False)
class EmulatedArithmetic(Arithmetic):
    """Values rounded by `quantise` and multiplied in float32. The numbers are right; the speed means nothing."""

    carrier: torch.dtype
    quantise: Callable[[Tensor, Role], Tensor]
    keeps_source: bool = False

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(self.quantise(tensor, role))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return values_product(a.data, b.data, dtype)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        if self.keeps_source:
            return self.cast(source.t(), role)
        return Operand(operand.data.t())


def count_casts(inner: Arithmetic, kind: str, ledger: Ledger) -> Arithmetic:
    """Returns `inner` with every operand that it casts entered into `ledger` under `kind`. Not for timing."""

    def count(operand: Operand, source: Tensor | None, role: Role, earlier: Operand | None) -> None:
        assert source is not None
        ledger.add(kind, role.value, source)

    return WatchedArithmetic(inner, count, turned=False)  # a turned operand was counted when it was cast


class RecipeArithmetic(Arithmetic):
    """Emulates a recipe: casts by role, each operand along the contraction of its product.

    Delayed scales and the next random seeds belong to one layer, so `layer` makes an instance for each. Seeds and
    rotations derive from the layer's `name`, so that a run can be repeated.
    """

    def __init__(
        self,
        recipe: Recipe,
        carrier: torch.dtype = torch.bfloat16,
        name: str = "",
        scales: Mapping[Role, NextScale] | None = None,
    ) -> None:
        self.recipe = recipe
        self.name = name
        self.carrier = carrier
        # A delayed scale is known before the cast, so that nobody has to find the largest magnitude first.
        self.takes_amax = self._looks_at_amax and scales is None
        self.keeps_source = recipe.keeps_source
        self.settles = recipe.delayed is not None and scales is None
        self.explicit = recipe.hadamard or recipe.accumulator is not Accumulator.FP32
        self.treatments = dict(zip((Role.INPUT, Role.WEIGHT, Role.GRADIENT), recipe.treatments, strict=True))
        if scales is None and recipe.delayed is not None:
            delayed = recipe.delayed
            scales = {role: DelayedScale(delayed, treatment.fmt) for role, treatment in self.treatments.items()}
        self.scales: Mapping[Role, NextScale] = scales or {}
        # Each role of each layer draws its own numbers, or errors of different casts would be correlated.
        self._draws = {
            role: _Draws(f"{name}/{role}") for role, treatment in self.treatments.items() if treatment.stochastic
        }
        self._signs = _stable_number(f"{name}/signs")

    @property
    def _looks_at_amax(self) -> bool:
        """Whether a weight's cast begins with its largest magnitude, which the caller may know already."""
        return False

    def layer(self, name: str) -> Arithmetic:
        if not (self.scales or self._draws or self.recipe.hadamard):
            return self
        return type(self)(self.recipe, self.carrier, name)

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        if not self.recipe.per_tensor:
            return self
        return type(self)(self.recipe, self.carrier, name, kept_scales(book, name, self.treatments))

    def memory(self) -> dict[str, Tensor]:
        memory: dict[str, Tensor] = {}
        for role, stateful in self._stateful().items():
            memory |= {f"{role}.{name}": tensor for name, tensor in stateful.memory().items()}
        return memory

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        for role, stateful in self._stateful().items():
            prefix = f"{role}."
            stateful.recall({name.removeprefix(prefix): memory[name] for name in memory if name.startswith(prefix)})

    def _stateful(self) -> dict[str, DelayedScale | StaticScale | _Draws]:
        """Returns the scales and seeds that last from cast to cast, by role."""
        stateful: dict[str, DelayedScale | StaticScale | _Draws] = {}
        for role, scale in self.scales.items():
            if isinstance(scale, DelayedScale | StaticScale):
                stateful[f"{role}.scale"] = scale
        for role, draws in self._draws.items():
            stateful[f"{role}.draws"] = draws
        return stateful

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return self.operand(tensor, role, _is_recast(role))

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        if role is not Role.WEIGHT and self.recipe.high_weight_gradient:
            return Operand(source.detach().to(self.carrier))
        if role is not Role.WEIGHT and self.recipe.hadamard:
            source = rotate(source, self._signs)
        return self.operand(source, role, repeat=False)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        return self.transpose(operand) if self._cast_serves_both(role) else self.cast_transpose(source.t(), role)

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        operand = self.cast(tensor, role)
        return operand, self.transpose(operand) if self._cast_serves_both(role) else None

    def last_scale(self, role: Role) -> Tensor | None:
        """Returns the scale of the last cast of a role; None where scales come from the tensor alone."""
        used = self.scales[role].last if role in self.scales else None
        return used and used.scale

    def _cast_serves_both(self, role: Role) -> bool:
        """Whether one cast of a tensor serves both of its products."""
        scaling = self.treatments[role].scaling
        return self._cast_alike(role) and (scaling is None or scaling.turns)

    def _cast_alike(self, role: Role) -> bool:
        """Whether both products take the same tensor, cast in the same way."""
        differs = role is not Role.WEIGHT and (self.recipe.high_weight_gradient or self.recipe.hadamard)
        return not (differs or self.treatments[role].stochastic)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        if a.data.dtype == b.data.dtype == self.carrier:  # a weight gradient in high precision
            return in_dtype(torch.mm(a.data, b.data.t()), dtype)
        if self.recipe.accumulator is Accumulator.FP32:
            return values_product(a.data, b.data, dtype)
        return in_dtype(short_product(a.data, b.data, self.recipe.accumulator, self.recipe.accumulator_bits), dtype)

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(values(tensor, self.treatments[role].fmt))

    def operand(self, tensor: Tensor, role: Role, repeat: bool) -> Operand:
        treatment = self.treatments[role]
        seed = self._draws[role].next(tensor.device, repeat) if role in self._draws else None
        scale = self.scales[role].next(tensor, repeat).scale if role in self.scales else None
        return Operand(
            values(tensor, treatment.fmt, treatment.scaling, seed=seed, scale=scale), gradient=role is Role.GRADIENT
        )

    def transpose(self, operand: Operand) -> Operand:
        return Operand(operand.data.t(), operand.scale, operand.gradient)


def _is_recast(role: Role) -> bool:
    """In backward, inputs and weights are cast only where a block is recomputed: others are turned there."""
    return role is not Role.GRADIENT and backward_is_running()


class _Draws:
    """Seeds on the device, one for each cast, derived from a name."""

    def __init__(self, name: str) -> None:
        self._first = _stable_number(name)
        self._seed: Tensor | None = None

    def next(self, device: torch.device, repeat: bool) -> Tensor:
        if self._seed is None:
            self._seed = torch.full((1,), self._first, dtype=torch.int64, device=device)
        elif not repeat:
            self._seed = self._seed + 1
        return self._seed

    def draw(self, device: torch.device, count: int, repeat: bool = False) -> Draw:
        """`count` seeds, which the kernel that takes them computes; with `repeat` the last seed again."""
        previous = self._seed
        last = previous if previous is not None else torch.full((1,), self._first - 1, dtype=torch.int64, device=device)
        new_last = torch.empty_like(last)
        if repeat and previous is not None:
            return Draw(last, new_last, (0,))
        self._seed = new_last
        return Draw(last, new_last, tuple(range(1, count + 1)))

    def memory(self) -> dict[str, Tensor]:
        return {} if self._seed is None else {"seed": self._seed}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        self._seed = memory.get("seed")


def _stable_number(name: str) -> int:
    """Hashes a name to 63 bits, the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


class ScaledArithmetic(RecipeArithmetic):
    """Native FP8 products: one float32 scale a tensor, current or delayed, or one a row.

    CUDA wants the first operand row-major and the second column-major, so both orientations of an operand are stored
    contiguous along the contraction. Forward products accumulate fast; those with a gradient do not, as in
    Transformer Engine and torchao.
    """

    # The dtype of products with a scale a row, whatever is asked for; None where any dtype can be had.
    row_dtype: ClassVar[torch.dtype | None] = torch.bfloat16

    @property
    def _looks_at_amax(self) -> bool:
        return self.recipe.per_tensor

    @property
    def _one_scale_each(self) -> bool:
        return self.recipe.per_tensor or self.recipe.is_unscaled

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        treatment = self.treatments[role]
        # One cast cannot serve both products: cast for this one only, or by rows and by columns in one call.
        if not self._cast_serves_both(role):
            if treatment.scaling is None or not self._cast_alike(role):
                return self.cast(tensor, role), None
            both = row_codes_both(tensor, treatment.fmt, treatment.scaling.rounding)
            return Operand(*both[0], role is Role.GRADIENT), Operand(*both[1], role is Role.GRADIENT)
        inverse, *data_of_both = self._tensor_codes(tensor, role, _is_recast(role), both=True, amax=amax)
        straight, turned = (Operand(data, inverse, role is Role.GRADIENT) for data in data_of_both if data is not None)
        return straight, turned

    def operand(self, tensor: Tensor, role: Role, repeat: bool) -> Operand:
        treatment = self.treatments[role]
        if self._one_scale_each:
            inverse, data, _ = self._tensor_codes(tensor, role, repeat, both=False)
        else:
            assert treatment.scaling is not None
            data, inverse = row_codes(tensor, treatment.fmt, treatment.scaling.rounding)
        return Operand(data, inverse, role is Role.GRADIENT)

    def _tensor_codes(
        self, tensor: Tensor, role: Role, repeat: bool, both: bool, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the scale that decodes, codes, and with `both` those of the transpose."""
        treatment = self.treatments[role]
        next_scale = self.scales.get(role)
        # One call casts and computes the scale where nothing else has to know the largest magnitude.
        if casts_in_one_call(tensor):
            if isinstance(next_scale, DelayedScale) and (cast := next_scale.cast(tensor, repeat, both)):
                return cast.inverse, cast.straight, cast.turned
            if next_scale is None and treatment.scaling is not None and amax is None:
                return current_codes(tensor, treatment.fmt, treatment.scaling.rounding, both)
        scale, inverse = self._scale(tensor, role, repeat, amax)
        if both:
            return inverse, *codes_both(tensor, treatment.fmt, scale)
        return inverse, codes(tensor, treatment.fmt, scale), None

    def _scale(self, tensor: Tensor, role: Role, repeat: bool, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if role in self.scales:
            return self.scales[role].next(tensor, repeat, amax)
        treatment = self.treatments[role]
        if treatment.scaling is None:
            unit = torch.ones((), dtype=torch.float32, device=tensor.device)
            return unit, unit
        amax = largest_magnitude(tensor) if amax is None else amax
        return current_scale(amax, treatment.fmt, treatment.scaling.rounding)

    def transpose(self, operand: Operand) -> Operand:
        return Operand(transpose_codes(operand.data), operand.scale, operand.gradient)

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(codes(tensor, self.treatments[role].fmt))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        if a.data.dtype == b.data.dtype == self.carrier:
            return super().product(a, b, dtype)
        if a.data.dtype == b.data.dtype == torch.float8_e5m2 and torch.version.hip is None:
            raise ValueError("CUDA has no product of two E5M2 tensors; one of them must not be a gradient")
        if a.scale is None or b.scale is None:
            raise ValueError("float8 operands need their scales")
        tensor_wise = self._one_scale_each
        kind = (ScalingType.TensorWise if tensor_wise else ScalingType.RowWise).value
        # The second operand's scales, one a column, must form a row: torch takes a column too, and multiplies wrongly.
        scale_b = b.scale if tensor_wise else b.scale.t()
        output = dtype if tensor_wise or self.row_dtype is None else self.row_dtype
        fast = not (a.gradient or b.gradient)
        # functional.scaled_mm calls this operator, but torch 2.11 cannot compile that function.
        product: Tensor = torch.ops.aten._scaled_mm_v2.default(
            a.data, b.data.t(), [a.scale], [kind], [], [scale_b], [kind], [], None, output, [], fast
        )
        return in_dtype(product, dtype)

    def multiply_groups(self, a: Operand, b: Operand, ends: Tensor) -> Tensor:
        b_turned = b.data.transpose(-2, -1)
        if a.scale is None or b.scale is None:
            return F.grouped_mm(a.data, b_turned, offs=ends)
        # The operator of functional.scaled_grouped_mm has no shapes for meta tensors. Scales are in rows here.
        scales = (a.scale.squeeze(-1), b.scale.squeeze(-1))
        fast = not (a.gradient or b.gradient)
        return torch.ops.aten._scaled_grouped_mm.default(
            a.data, b_turned, *scales, ends, None, None, self.carrier, fast
        )


class WideScaledArithmetic(ScaledArithmetic):
    """For devices whose products with a scale a row give float32 too."""

    row_dtype = None
