"""Runs every cast and product of a precision with the device's own kernels and with the emulation, and compares."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fp8bench.formats.grids import E2M1, FORMATS, Format, Overflow
from fp8bench.formats.hardware import has_hopper_units, is_amd, is_nvidia
from fp8bench.formats.recipe_support import on_device
from fp8bench.formats.recipes import Accumulator, Recipe
from fp8bench.model import DeviceFacts
from fp8bench.model.promises import Conformity, Difference, FirstElement
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.nn.sizes import PRODUCTS, TURNED
from fp8bench.protocols import Arithmetic, Operand, Precision, Role

# M, N, K: a square, where a transposition is detected as such, and a long sum. Multiples of every block.
SHAPES = ((128, 128, 128), (128, 256, 2048))
# Layers remember scales by name; both sides are the same layer.
_LAYER = "conform"
_LINE = 300


def conformities(precision: Precision, facts: DeviceFacts, seed: int) -> tuple[Conformity, ...]:
    try:
        native, emulated = _native_arithmetic(precision, facts), _emulation(precision, facts)
    except (NotImplementedError, KeyError) as error:
        return (Conformity(precision.mode, "all of it", "", why=str(error.args[0])),)
    compared = _Compared(precision, native, emulated, facts, seed)
    return (*compared.casts(), *compared.products())


def _native_arithmetic(precision: Precision, facts: DeviceFacts) -> Callable[[], Arithmetic]:
    if precision.whole_layers:
        raise NotImplementedError("its layers have their own casts and products")
    if precision.support(facts).is_native:
        return lambda: precision.arithmetic(facts).layer(_LAYER)
    if not isinstance(precision, RecipePrecision) or precision.backend is not None:
        raise NotImplementedError(f"not native here: {precision.support(facts).reason}")
    from fp8bench.formats.codes import DTYPES

    for treatment in precision.recipe.treatments:
        if treatment.fmt.name not in DTYPES and treatment.fmt is not E2M1:
            raise NotImplementedError(f"torch has no kernel that takes {treatment.fmt.name}")
    return lambda: precision.native(facts).layer(_LAYER)


def _emulation(precision: Precision, facts: DeviceFacts) -> Callable[[], Arithmetic]:
    from fp8bench.formats.operators import values
    from fp8bench.nn.arithmetics import EmulatedArithmetic, RecipeArithmetic

    recipe = getattr(precision, "recipe", None)
    if isinstance(recipe, Recipe):
        return lambda: RecipeArithmetic(on_device(recipe, facts)).layer(_LAYER)
    fmt = FORMATS.get(precision.name)
    carrier = precision.arithmetic(facts).carrier
    if fmt is None and precision.arithmetic(facts).casts:
        raise NotImplementedError(f"{precision.mode} has no emulation: it is not a recipe, and no format has its name")

    def round_plain(tensor: Tensor, role: Role) -> Tensor:
        return tensor.to(torch.float32) if fmt is None else values(tensor, fmt, overflow=Overflow.INFINITY)

    return lambda: EmulatedArithmetic(carrier, round_plain)


class _Compared:
    """Compares the results of both arithmetics of a precision on the same tensors. The emulation and the comparison run
    on the CPU: no device may judge itself."""

    def __init__(
        self,
        precision: Precision,
        native: Callable[[], Arithmetic],
        emulated: Callable[[], Arithmetic],
        facts: DeviceFacts,
        seed: int,
    ) -> None:
        self.mode, self._native, self._emulated = precision.mode, native, emulated
        self._device, self._seed = facts.key, seed
        self._hopper = has_hopper_units(facts)
        self._has_unknown_units = (is_nvidia(facts) or is_amd(facts)) and not self._hopper
        recipe = getattr(precision, "recipe", None)
        treatments = recipe.treatments if isinstance(recipe, Recipe) else ()
        plain = FORMATS.get(precision.name, FORMATS["tf32"])  # a precision without a format casts nothing
        self._formats: dict[Role, Format] = dict.fromkeys(Role, plain)
        self._formats.update(
            zip((Role.INPUT, Role.WEIGHT, Role.GRADIENT), (treatment.fmt for treatment in treatments), strict=False)
        )
        self._bits = 24
        if isinstance(recipe, Recipe) and recipe.accumulator is not Accumulator.FP32:
            self._bits = recipe.accumulator_bits

    def casts(self) -> Iterator[Conformity]:
        rows, _, columns = SHAPES[1]
        if not self._native().casts:
            return
        for role in Role:
            x = self._draw(f"cast {role}", rows, columns)
            for how in ("cast", "cast_transpose"):
                yield self._cast(f"{role}, {how}", role, x, how)
            yield self._cast(f"{role}, beyond its range", role, x * 2.0**20, "cast_without_scale")

    def products(self) -> Iterator[Conformity]:
        for product in PRODUCTS:
            for m, n, k in SHAPES:
                yield from self._product(product, m, n, k)

    def _draw(self, name: str, rows: int, columns: int) -> Tensor:
        """Draws a Gaussian whose rows differ in magnitude, in the carrier dtype; reproducible for a name and seed."""
        generator = torch.Generator("cpu").manual_seed(self._seed + zlib.crc32(f"{name} {rows}x{columns}".encode()))
        sizes = torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator))
        drawn = torch.randn(rows, columns, generator=generator) * sizes
        return drawn.to(self._native().carrier)

    def _cast(self, words: str, role: Role, x: Tensor, how: str) -> Conformity:
        from fp8bench.numerics.conformity import differing_bits, explain_cast, most_steps

        subject, shape, fmt = f"cast of {words}", f"{x.shape[0]}x{x.shape[1]}", self._formats[role]
        native, emulated = self._native(), self._emulated()
        try:
            native_values, emulated_values = (
                arithmetic.restore(getattr(arithmetic, how)(x.to(device), role), torch.float32).cpu().contiguous()
                for arithmetic, device in ((native, self._device), (emulated, "cpu"))
            )
        except Exception as error:  # noqa: BLE001 - whatever torch raises where a device has no such kernel
            return Conformity(self.mode, subject, shape, why=_refusal(error))
        differ = differing_bits(native_values, emulated_values)
        if not bool(differ.any()):
            return Conformity(self.mode, subject, shape, Difference.NONE, total=x.numel())
        difference, reason = explain_cast(native_values, emulated_values, x.to(torch.float32), fmt)
        largest = float(emulated_values.abs().nan_to_num(0.0, 0.0).max())
        steps = (native_values - emulated_values).abs().to(torch.float64) / most_steps(
            emulated_values.to(torch.float64), fmt, largest
        )
        return _add_details(
            Conformity(self.mode, subject, shape, difference, reason), differ, steps, native_values, emulated_values
        )

    def _product(self, product: str, m: int, n: int, k: int) -> Iterator[Conformity]:
        native, emulated = self._native(), self._emulated()
        subject, shape = f"{product} product", f"{m}x{n}x{k}"
        try:
            operands = self._operands(native, self._device, product, m, n, k)
            # The device rounds this operand while loading it, so round it here before emulating.
            sources = operands if native.casts else self._operands(emulated, "cpu", product, m, n, k)
            holder = native if native.casts else emulated
            values = [holder.restore(operand, torch.float32).cpu() for operand in sources]
            a, b = (Operand(value, gradient=operand.gradient) for value, operand in zip(values, operands, strict=True))
            results = [
                (dtype, native.product(operands[0], operands[1], dtype).cpu(), emulated.product(a, b, dtype))
                for dtype in (native.carrier, torch.float32)
            ]
        except Exception as error:  # noqa: BLE001 - as above
            yield Conformity(self.mode, subject, shape, why=_refusal(error))
            return
        for number, (dtype, native_result, emulated_result) in enumerate(results):
            if number and torch.equal(native_result, native_result.to(native.carrier).to(dtype)):
                continue  # it returns no more than the carrier
            held = self._held(
                f"{subject}, {str(dtype).removeprefix('torch.')} out", shape, native_result, emulated_result, values
            )
            if held.difference is not None and not held.difference.conforms:
                held = self._excused_by_units(held, native_result, operands, values)
            yield held

    def _operands(self, arithmetic: Arithmetic, device: str, product: str, m: int, n: int, k: int) -> list[Operand]:
        roles, operands = PRODUCTS[product], []
        for name, role, rows in zip("ab", roles, (m, n), strict=True):
            cast = arithmetic.cast_transpose if role in TURNED[product] else arithmetic.cast
            operands.append(cast(self._draw(f"{product} {name}", rows, k).to(device), role))
        return operands

    def _excused_by_units(
        self, held: Conformity, result: Tensor, operands: list[Operand], values: list[Tensor]
    ) -> Conformity:
        """Returns the comparison as one that conforms if this GPU's units for 8 bits or fewer sum like this."""
        from fp8bench.numerics.conformity import ConformitySums, are_short_sums

        if any(operand.scale is None or operand.data.element_size() != 1 for operand in operands):
            return held
        if self._hopper and (reason := self._hopper_sums(result, operands)):
            return replace(held, difference=Difference.UNITS, why=reason)
        is_wrong = held.difference in (Difference.LAYOUT, Difference.SCALE, Difference.OVERFLOW)
        if not self._has_unknown_units or is_wrong:
            return held
        a, b = (value.to(torch.float64) for value in values)
        if not are_short_sums(result, ConformitySums(a, b, result.dtype)):
            return held
        reason = f"no further off than sums of 14 bits; how this GPU's units sum is not known ({held.difference})"
        return replace(held, difference=Difference.SHORT_SUMS, why=reason)

    def _hopper_sums(self, result: Tensor, operands: list[Operand]) -> str:
        """Returns a sentence if Hopper's FP8 units sum the same bits; '' if they do not."""
        from fp8bench.numerics.conformity import match_units

        native = self._native()
        first, second = (operand.data.to(torch.float32).cpu() for operand in operands)
        of_ones = [
            replace(operand, data=torch.ones_like(operand.data, dtype=torch.float32).to(operand.data.dtype))
            for operand in operands
        ]
        down, across = (native.restore(operand, torch.float32).cpu() for operand in of_ones)
        for promoted, words in ((True, "added to a float32 sum every 128"), (False, "all along")):
            if match_units(result, (first, second), (down, across), promoted):
                return f"as Hopper's FP8 units sum: 14 bits are kept after every 32 products, {words}"
        return ""

    def _held(self, subject: str, shape: str, native: Tensor, emulated: Tensor, values: list[Tensor]) -> Conformity:
        from fp8bench.numerics.conformity import ConformitySums, differing_bits, explain_product, steps_between

        differ = differing_bits(native, emulated)
        if not bool(differ.any()):
            return Conformity(self.mode, subject, shape, Difference.NONE, total=native.numel())
        a, b = (value.to(torch.float64) for value in values)
        difference, reason = explain_product(native, ConformitySums(a, b, native.dtype, self._bits))
        return _add_details(
            Conformity(self.mode, subject, shape, difference, reason),
            differ,
            steps_between(native, emulated),
            native,
            emulated,
        )


def _add_details(conformity: Conformity, differ: Tensor, steps: Tensor, native: Tensor, emulated: Tensor) -> Conformity:
    place = tuple(int(index) for index in differ.nonzero()[0])
    first = FirstElement(place, float(native[place]), float(emulated[place]))
    return replace(
        conformity, count=int(differ.sum()), total=differ.numel(), largest=float(steps[differ].max()), first=first
    )


def _refusal(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:_LINE]
