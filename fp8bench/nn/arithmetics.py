"""The arithmetics that precisions share: torch's own products, rounded values, and recipes, as values and as codes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from fp8bench.formats.native_codes import codes, codes_both, codes_turned, current_scale, row_codes, row_codes_both
from fp8bench.formats.operators import values
from fp8bench.formats.quantise import Draw
from fp8bench.formats.recipes import Accumulator, Recipe
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.rotations import rotated
from fp8bench.nn.tensor_scales import DelayedScale, NextScale, backward_is_running, kept_scales
from fp8bench.numerics.products import in_dtype, short_product, values_product
from fp8bench.numerics.ranges import Ledger
from fp8bench.protocols import Arithmetic, Operand, Role, ScaleBook, WatchedArithmetic

Quantise = Callable[[Tensor, Role], Tensor]


class PlainArithmetic(Arithmetic):
    """torch's own products of one dtype."""

    plain = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.carrier = dtype
        self.casts = dtype != torch.float32
        self.groups = 8 if dtype == torch.bfloat16 else 0  # torch has no other on a GPU

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(tensor.detach().to(self.carrier))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return in_dtype(torch.mm(a.data, b.data.t()), dtype)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        return Operand(operand.data.t())

    def grouped(self, a: Operand, b: Operand, ends: Tensor) -> Tensor:
        return F.grouped_mm(a.data, b.data.transpose(-2, -1), offs=ends)


class EmulatedArithmetic(Arithmetic):
    """Values rounded by `quantise` and multiplied in float32: right in numbers, and its speed means nothing."""

    def __init__(self, carrier: torch.dtype, quantise: Quantise, keeps_source: bool = False) -> None:
        self.carrier = carrier
        self.keeps_source = keeps_source
        self._quantise = quantise

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(self._quantise(tensor, role))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return values_product(a.data, b.data, dtype)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        if self.keeps_source:
            return self.cast(source.t(), role)
        return Operand(operand.data.t())


def counted(inner: Arithmetic, kind: str, ledger: Ledger) -> Arithmetic:
    """Another arithmetic, whose operands are entered into a ledger under a layer kind. Never for timing."""

    def count(operand: Operand, source: Tensor | None, role: Role, before: Operand | None) -> None:
        assert source is not None
        ledger.add(kind, role.value, source)

    return WatchedArithmetic(inner, count, turned=False)  # what is turned was counted already


class RecipeArithmetic(Arithmetic):
    """Casts by role, each along the contraction of its product. Right in numbers, and its speed means nothing.

    What a recipe remembers (delayed scales, which random numbers come next) belongs to a layer, and `layer` gives each
    its own. `name` is the layer's: seeds and rotations come from it, so that a run can be had again.
    """

    def __init__(
        self,
        recipe: Recipe,
        carrier: torch.dtype = torch.bfloat16,
        name: str = "",
        scales: Mapping[Role, NextScale] | None = None,
    ) -> None:
        """`scales` take the place of those that the recipe would have, by role."""
        self.recipe = recipe
        self.name = name
        self.carrier = carrier
        self.takes_amax = self._looks_at_amax and scales is None
        self.keeps_source = recipe.keeps_source
        self.settles = recipe.delayed is not None and scales is None
        self.explicit = recipe.hadamard or recipe.accumulator is not Accumulator.FP32
        self.treatments = dict(zip((Role.INPUT, Role.WEIGHT, Role.GRADIENT), recipe.treatments, strict=True))
        if scales is None:
            delayed = recipe.delayed
            scales = (
                {role: DelayedScale(delayed, treatment.fmt) for role, treatment in self.treatments.items()}
                if delayed
                else {}
            )
        self.scales = scales
        self._draws = {
            role: _Draws(f"{name}/{role}") for role, treatment in self.treatments.items() if treatment.stochastic
        }
        self._signs = _number(f"{name}/signs")

    @property
    def _looks_at_amax(self) -> bool:
        """Whether a weight's cast begins with its largest magnitude, which somebody may have found already."""
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
        kept = {role: remembering.memory() for role, remembering in self._remembering().items()}
        return {f"{role}.{name}": tensor for role, some in kept.items() for name, tensor in some.items()}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        for role, remembering in self._remembering().items():
            own = f"{role}."
            remembering.recall({name.removeprefix(own): memory[name] for name in memory if name.startswith(own)})

    def _remembering(self) -> dict[str, DelayedScale | _Draws]:
        """By role. Scales from data belong to their book."""
        scales = {f"{role}.scale": scale for role, scale in self.scales.items() if isinstance(scale, DelayedScale)}
        return {**scales, **{f"{role}.draws": draw for role, draw in self._draws.items()}}

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return self.operand(tensor, role, _again(role))

    def turned(self, source: Tensor, role: Role) -> Operand:
        if role is not Role.WEIGHT and self.recipe.high_weight_gradient:
            return Operand(source.detach().to(self.carrier))
        if role is not Role.WEIGHT and self.recipe.hadamard:
            source = rotated(source, self._signs)
        return self.operand(source, role, again=False)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        return self.transposed(operand) if self._turns(role) else self.turned(source.t(), role)

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        operand = self.cast(tensor, role)
        return operand, self.transposed(operand) if self._turns(role) else None

    def last_scale(self, role: Role) -> Tensor | None:
        """What the last cast of a role was multiplied by, where that does not come from the tensor alone."""
        used = self.scales[role].last if role in self.scales else None
        return None if used is None else used.scale

    def _turns(self, role: Role) -> bool:
        """Whether one cast of a tensor serves both of its products."""
        treatment = self.treatments[role]
        return self._twice(role) and (treatment.scaling is None or treatment.scaling.turns)

    def _twice(self, role: Role) -> bool:
        """Whether both products take the same tensor, cast in the same way."""
        other = role is not Role.WEIGHT and (self.recipe.high_weight_gradient or self.recipe.hadamard)
        return not (other or self.treatments[role].stochastic)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        if a.data.dtype == b.data.dtype == self.carrier:  # the weight gradient, where it is left alone
            return in_dtype(torch.mm(a.data, b.data.t()), dtype)
        if self.recipe.accumulator is Accumulator.FP32:
            return values_product(a.data, b.data, dtype)
        return in_dtype(short_product(a.data, b.data, self.recipe.accumulator, self.recipe.accumulator_bits), dtype)

    def unscaled(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(values(tensor, self.treatments[role].fmt))

    def operand(self, tensor: Tensor, role: Role, again: bool) -> Operand:
        treatment = self.treatments[role]
        seed = self._draws[role].next(tensor.device, again) if role in self._draws else None
        scale = self.scales[role].next(tensor, again).scale if role in self.scales else None
        return Operand(
            values(tensor, treatment.fmt, treatment.scaling, seed=seed, scale=scale), gradient=role is Role.GRADIENT
        )

    def transposed(self, operand: Operand) -> Operand:
        return Operand(operand.data.t(), operand.scale, operand.gradient)


def _again(role: Role) -> bool:
    """In backward only a block that is computed again casts inputs and weights: others are turned there."""
    return role is not Role.GRADIENT and backward_is_running()


class _Draws:
    """Seeds on the device, one for every cast, from a name alone."""

    def __init__(self, name: str) -> None:
        self._first = _number(name)
        self._seed: Tensor | None = None

    def next(self, device: torch.device, again: bool) -> Tensor:
        if self._seed is None:
            self._seed = torch.full((1,), self._first, dtype=torch.int64, device=device)
        elif not again:
            self._seed = self._seed + 1
        return self._seed

    def draw(self, device: torch.device, count: int, again: bool = False) -> Draw:
        """So many of them, that whoever takes them makes; `again` the last one, once more."""
        before = self._seed
        last = before if before is not None else torch.full((1,), self._first - 1, dtype=torch.int64, device=device)
        after = torch.empty_like(last)
        if again and before is not None:
            return Draw(last, after, (0,))
        self._seed = after
        return Draw(last, after, tuple(range(1, count + 1)))

    def memory(self) -> dict[str, Tensor]:
        """The seed of the last cast; nothing before the first."""
        return {} if self._seed is None else {"seed": self._seed}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        self._seed = memory.get("seed")


def _number(name: str) -> int:
    """A number of 63 bits that a name stands for, on every machine the same."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


class ScaledArithmetic(RecipeArithmetic):
    """One float32 scale a tensor, current or delayed, or one a row.

    CUDA wants the first operand row-major and the second column-major, so both orientations of an operand are kept
    contiguous along the contraction. Forward products accumulate fast; those with a gradient do not, as in
    Transformer Engine and torchao.
    """

    # What products with a scale a row give, whatever is asked for.
    of_rows: ClassVar[torch.dtype | None] = torch.bfloat16

    @property
    def _looks_at_amax(self) -> bool:
        return self.recipe.per_tensor

    @property
    def _of_tensors(self) -> bool:
        """Whether a product takes one scale of each operand; without any it takes ones."""
        return self.recipe.per_tensor or self.recipe.unscaled

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        treatment = self.treatments[role]
        if not self._turns(role):
            if treatment.scaling is None or not self._twice(role):
                return self.cast(tensor, role), None
            both = row_codes_both(tensor, treatment.fmt, treatment.scaling.rounding)
            return Operand(*both[0], role is Role.GRADIENT), Operand(*both[1], role is Role.GRADIENT)
        scale, inverse = self._scale(tensor, role, _again(role), amax)
        codes = codes_both(tensor, treatment.fmt, scale)
        straight, turned = (Operand(data, inverse, role is Role.GRADIENT) for data in codes)
        return straight, turned

    def operand(self, tensor: Tensor, role: Role, again: bool) -> Operand:
        treatment = self.treatments[role]
        if self._of_tensors:
            scale, inverse = self._scale(tensor, role, again)
            data = codes(tensor, treatment.fmt, scale)
        else:
            assert treatment.scaling is not None
            data, inverse = row_codes(tensor, treatment.fmt, treatment.scaling.rounding)
        return Operand(data, inverse, role is Role.GRADIENT)

    def _scale(self, tensor: Tensor, role: Role, again: bool, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if role in self.scales:
            return self.scales[role].next(tensor, again, amax)
        treatment = self.treatments[role]
        if treatment.scaling is None:
            unit = torch.ones((), dtype=torch.float32, device=tensor.device)
            return unit, unit
        return current_scale(
            largest_magnitude(tensor) if amax is None else amax, treatment.fmt, treatment.scaling.rounding
        )

    def transposed(self, operand: Operand) -> Operand:
        return Operand(codes_turned(operand.data), operand.scale, operand.gradient)

    def unscaled(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(codes(tensor, self.treatments[role].fmt))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        if a.data.dtype == b.data.dtype == self.carrier:
            return super().product(a, b, dtype)
        if a.data.dtype == b.data.dtype == torch.float8_e5m2 and torch.version.hip is None:
            raise ValueError("CUDA has no product of two E5M2 tensors; one of them must not be a gradient")
        if a.scale is None or b.scale is None:
            raise ValueError("float8 operands need their scales")
        tensor_wise = self._of_tensors
        kind = (ScalingType.TensorWise if tensor_wise else ScalingType.RowWise).value
        # A scale for every column of the second operand lies in a row; as a column it is taken, and is wrong.
        scale_b = b.scale if tensor_wise else b.scale.t()
        output = dtype if tensor_wise or self.of_rows is None else self.of_rows
        fast = not (a.gradient or b.gradient)
        # What functional.scaled_mm calls, which torch 2.11 cannot compile. Lists: scales, their kinds, no swizzles.
        product: Tensor = torch.ops.aten._scaled_mm_v2.default(
            a.data, b.data.t(), [a.scale], [kind], [], [scale_b], [kind], [], None, output, [], fast
        )
        return in_dtype(product, dtype)

    def grouped(self, a: Operand, b: Operand, ends: Tensor) -> Tensor:
        b_turned = b.data.transpose(-2, -1)
        if a.scale is None or b.scale is None:
            return F.grouped_mm(a.data, b_turned, offs=ends)
        # Not functional.scaled_grouped_mm: what that calls has no shape for tensors without memory. Scales lie in rows.
        scales, fast = (a.scale.squeeze(-1), b.scale.squeeze(-1)), not (a.gradient or b.gradient)
        product: Tensor = torch.ops.aten._scaled_grouped_mm.default(
            a.data, b_turned, *scales, ends, None, None, self.carrier, fast
        )
        return product


class WideScaledArithmetic(ScaledArithmetic):
    """The same where products with a scale a row give float32 too."""

    of_rows = None
