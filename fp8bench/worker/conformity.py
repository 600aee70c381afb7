"""Runs the casts and products of a precision both with the device's kernels and with the emulation, and compares the
results.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fp8bench.formats.grids import E2M1, FORMATS, Format, Overflow
from fp8bench.formats.hardware import has_hopper_units, is_amd, is_nvidia
from fp8bench.formats.recipe_support import recipe_on_device
from fp8bench.formats.recipes import Accumulator, Recipe
from fp8bench.model import DeviceFacts
from fp8bench.model.promises import Conformity, Difference, FirstDifferingElement
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.nn.sizes import OPERAND_ROLES, TRANSPOSED_ROLES
from fp8bench.protocols import Arithmetic, Operand, Precision, Role

# M, N and K of two products. In the square one, a transposed operand or result has a valid shape, so only the numbers
# can show it. The other one has a long sum. All sizes are multiples of every block size.
PRODUCT_SHAPES = ((128, 128, 128), (128, 256, 2048))
# Scales are stored for a layer's name, so native kernels and emulation must use the same name.
_PLACEHOLDER_LAYER_NAME = "conform"
_MAX_LINE_LENGTH = 300


def compare_arithmetics(precision: Precision, facts: DeviceFacts, seed: int) -> tuple[Conformity, ...]:
    try:
        make_native_arithmetic = _make_native_arithmetic(precision, facts)
        make_emulated_arithmetic = _make_emulated_arithmetic(precision, facts)
    except (NotImplementedError, KeyError) as error:
        return (Conformity(precision.mode, "all of it", "", why=str(error.args[0])),)
    compared_precision = _ComparedPrecision(precision, make_native_arithmetic, make_emulated_arithmetic, facts, seed)
    return (*compared_precision.compare_casts(), *compared_precision.compare_products())


def _make_native_arithmetic(precision: Precision, facts: DeviceFacts) -> Callable[[], Arithmetic]:
    if precision.whole_layers:
        raise NotImplementedError("its layers have their own casts and products")
    if precision.support(facts).is_native:
        return lambda: precision.arithmetic(facts).layer(_PLACEHOLDER_LAYER_NAME)
    if not isinstance(precision, RecipePrecision) or precision.backend is not None:
        raise NotImplementedError(f"not native here: {precision.support(facts).reason}")
    from fp8bench.formats.codes import CODE_DTYPES

    for treatment in precision.recipe.treatments:
        if treatment.fmt.name not in CODE_DTYPES and treatment.fmt is not E2M1:
            raise NotImplementedError(f"torch has no kernel that takes {treatment.fmt.name}")
    return lambda: precision.native(facts).layer(_PLACEHOLDER_LAYER_NAME)


def _make_emulated_arithmetic(precision: Precision, facts: DeviceFacts) -> Callable[[], Arithmetic]:
    from fp8bench.formats.operators import values
    from fp8bench.nn.arithmetics import EmulatedArithmetic, RecipeArithmetic

    recipe = getattr(precision, "recipe", None)
    if isinstance(recipe, Recipe):
        return lambda: RecipeArithmetic(recipe_on_device(recipe, facts)).layer(_PLACEHOLDER_LAYER_NAME)
    fmt = FORMATS.get(precision.name)
    carrier = precision.arithmetic(facts).carrier
    if fmt is None and precision.arithmetic(facts).casts:
        raise NotImplementedError(f"{precision.mode} has no emulation: it is not a recipe, and no format has its name")

    def round_to_format(tensor: Tensor, role: Role) -> Tensor:
        return tensor.to(torch.float32) if fmt is None else values(tensor, fmt, overflow=Overflow.INFINITY)

    return lambda: EmulatedArithmetic(carrier, round_to_format)


class _ComparedPrecision:
    """Compares a precision's native and emulated results on the same tensors.

    The emulation and the comparison run on the CPU, so that a faulty device cannot hide its errors.
    """

    def __init__(
        self,
        precision: Precision,
        native: Callable[[], Arithmetic],
        emulated: Callable[[], Arithmetic],
        facts: DeviceFacts,
        seed: int,
    ) -> None:
        self.mode = precision.mode
        self._native = native
        self._emulated = emulated
        self._device = facts.key
        self._seed = seed
        self._hopper = has_hopper_units(facts)
        self._has_unknown_units = (is_nvidia(facts) or is_amd(facts)) and not self._hopper
        # if no format has the precision's name, the precision does not cast
        self._formats: dict[Role, Format] = dict.fromkeys(Role, FORMATS.get(precision.name, FORMATS["tf32"]))
        self._bits = 24  # the significant bits of float32
        recipe = getattr(precision, "recipe", None)
        if isinstance(recipe, Recipe):
            self._formats = {role: treatment.fmt for role, treatment in zip(Role, recipe.treatments, strict=True)}
            if recipe.accumulator is not Accumulator.FP32:
                self._bits = recipe.accumulator_bits

    def compare_casts(self) -> Iterator[Conformity]:
        rows, _, columns = PRODUCT_SHAPES[1]
        if not self._native().casts:
            return
        for role in Role:
            x = self._draw_tensor(f"cast {role}", rows, columns)
            for method_name in ("cast", "cast_transpose"):
                yield self._compare_cast(f"{role}, {method_name}", role, x, method_name)
            yield self._compare_cast(f"{role}, beyond its range", role, x * 2.0**20, "cast_without_scale")

    def compare_products(self) -> Iterator[Conformity]:
        for product in OPERAND_ROLES:
            for m, n, k in PRODUCT_SHAPES:
                yield from self._compare_product(product, m, n, k)

    def _draw_tensor(self, name: str, rows: int, columns: int) -> Tensor:
        """Draws normal numbers in the carrier (the high-precision dtype that is cast), with rows of different
        magnitude. The seed and the name determine them.
        """
        # Use crc32, because Python's hash of a text differs from process to process.
        generator = torch.Generator("cpu").manual_seed(self._seed + zlib.crc32(f"{name} {rows}x{columns}".encode()))
        row_magnitudes = torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator))
        gaussian_numbers = torch.randn(rows, columns, generator=generator) * row_magnitudes
        return gaussian_numbers.to(self._native().carrier)

    def _compare_cast(self, cast_name: str, role: Role, x: Tensor, method_name: str) -> Conformity:
        from fp8bench.numerics.conformity import explain_cast_difference, find_largest_grid_steps

        subject = f"cast of {cast_name}"
        shape = f"{x.shape[0]}x{x.shape[1]}"
        fmt = self._formats[role]
        native_arithmetic = self._native()
        emulated_arithmetic = self._emulated()
        try:
            native_values, emulated_values = (
                arithmetic.restore(getattr(arithmetic, method_name)(x.to(device), role), torch.float32)
                .cpu()
                .contiguous()
                for arithmetic, device in ((native_arithmetic, self._device), (emulated_arithmetic, "cpu"))
            )
        except Exception as error:  # noqa: BLE001 - whatever torch raises where a device has no such kernel
            return Conformity(self.mode, subject, shape, why=_describe_refusal(error))

        def count_steps(native_values: Tensor, emulated_values: Tensor) -> Tensor:
            largest_value = float(emulated_values.abs().nan_to_num(0.0, 0.0).max())
            steps = find_largest_grid_steps(emulated_values.to(torch.float64), fmt, largest_value)
            return (native_values - emulated_values).abs().to(torch.float64) / steps

        return _compare_elements(
            Conformity(self.mode, subject, shape, Difference.NONE),
            native_values,
            emulated_values,
            lambda: explain_cast_difference(native_values, emulated_values, x.to(torch.float32), fmt),
            count_steps,
        )

    def _compare_product(self, product: str, m: int, n: int, k: int) -> Iterator[Conformity]:
        native_arithmetic = self._native()
        emulated_arithmetic = self._emulated()
        subject = f"{product} product"
        shape = f"{m}x{n}x{k}"
        try:
            operands = self._cast_operands(native_arithmetic, self._device, product, m, n, k)
            # If the device rounds operands when it loads them, round them here before they are given to the
            # emulation.
            sources = (
                operands
                if native_arithmetic.casts
                else self._cast_operands(emulated_arithmetic, "cpu", product, m, n, k)
            )
            operand_cast_arithmetic = native_arithmetic if native_arithmetic.casts else emulated_arithmetic
            operand_values = [operand_cast_arithmetic.restore(operand, torch.float32).cpu() for operand in sources]
            a, b = (
                Operand(value, gradient=operand.gradient)
                for value, operand in zip(operand_values, operands, strict=True)
            )
            results = [
                (
                    dtype,
                    native_arithmetic.product(operands[0], operands[1], dtype).cpu(),
                    emulated_arithmetic.product(a, b, dtype),
                )
                for dtype in (native_arithmetic.carrier, torch.float32)
            ]
        except Exception as error:  # noqa: BLE001 - as above
            yield Conformity(self.mode, subject, shape, why=_describe_refusal(error))
            return
        for index, (dtype, native_result, emulated_result) in enumerate(results):
            if index and torch.equal(native_result, native_result.to(native_arithmetic.carrier).to(dtype)):
                continue  # this float32 result is rounded to the carrier, so it repeats the first result
            conformity = self._compare_results(
                f"{subject}, {str(dtype).removeprefix('torch.')} out",
                shape,
                native_result,
                emulated_result,
                operand_values,
            )
            if conformity.difference is not None and not conformity.difference.conforms:
                conformity = self._explain_by_matrix_units(conformity, native_result, operands, operand_values)
            yield conformity

    def _cast_operands(
        self, arithmetic: Arithmetic, device: str, product: str, m: int, n: int, k: int
    ) -> list[Operand]:
        roles = OPERAND_ROLES[product]
        operands = []
        for name, role, rows in zip("ab", roles, (m, n), strict=True):
            cast_function = arithmetic.cast_transpose if role in TRANSPOSED_ROLES[product] else arithmetic.cast
            operands.append(cast_function(self._draw_tensor(f"{product} {name}", rows, k).to(device), role))
        return operands

    def _explain_by_matrix_units(
        self, conformity: Conformity, result: Tensor, operands: list[Operand], values: list[Tensor]
    ) -> Conformity:
        """Marks the comparison as conforming if this GPU's matrix units explain the result: for formats of 8 bits or
        fewer, they keep fewer bits of a sum than float32 has.

        How they sum is known for Hopper only. On other GPUs, the result must be at least as exact as sums of 14 bits.
        """
        from fp8bench.numerics.conformity import ConformitySums, matches_14_bit_sums

        if any(operand.scale is None or operand.data.element_size() != 1 for operand in operands):
            return conformity
        if self._hopper and (reason := self._explain_by_hopper_units(result, operands)):
            return replace(conformity, difference=Difference.UNITS, why=reason)
        is_wrong = conformity.difference in (Difference.LAYOUT, Difference.SCALE, Difference.OVERFLOW)
        if not self._has_unknown_units or is_wrong:
            return conformity
        a, b = (value.to(torch.float64) for value in values)
        if not matches_14_bit_sums(result, ConformitySums(a, b, result.dtype)):
            return conformity
        reason = f"as exact as sums of 14 bits; how this GPU's units sum is unknown ({conformity.difference})"
        return replace(conformity, difference=Difference.SHORT_SUMS, why=reason)

    def _explain_by_hopper_units(self, result: Tensor, operands: list[Operand]) -> str:
        """Returns a sentence if a model of Hopper's FP8 units computes the same bits as `result`, else ''."""
        from fp8bench.numerics.conformity import matches_hopper_units

        native_arithmetic = self._native()
        first_operand, second_operand = (operand.data.to(torch.float32).cpu() for operand in operands)
        # If all codes are 1, the restored values are the scales.
        ones_operands = [
            replace(operand, data=torch.ones_like(operand.data, dtype=torch.float32).to(operand.data.dtype))
            for operand in operands
        ]
        row_scales, column_scales = (
            native_arithmetic.restore(operand, torch.float32).cpu() for operand in ones_operands
        )
        for promoted, sum_words in ((True, "and added to a float32 sum after every 128"), (False, "all along")):
            if matches_hopper_units(result, (first_operand, second_operand), (row_scales, column_scales), promoted):
                return f"as Hopper's FP8 units sum: 14 bits are kept after every 32 products, {sum_words}"
        return ""

    def _compare_results(
        self, subject: str, shape: str, native: Tensor, emulated: Tensor, values: list[Tensor]
    ) -> Conformity:
        from fp8bench.numerics.conformity import ConformitySums, count_ulps_between, explain_product_difference

        def explain() -> tuple[Difference, str]:
            a, b = (value.to(torch.float64) for value in values)
            return explain_product_difference(native, ConformitySums(a, b, native.dtype, self._bits))

        conformity = Conformity(self.mode, subject, shape, Difference.NONE)
        return _compare_elements(conformity, native, emulated, explain, count_ulps_between)


def _compare_elements(
    conformity: Conformity,
    native: Tensor,
    emulated: Tensor,
    explain: Callable[[], tuple[Difference, str]],
    count_steps: Callable[[Tensor, Tensor], Tensor],
) -> Conformity:
    """Adds to `conformity` how many elements differ, why, and how many steps of the format they are apart at most.
    `explain` and `count_steps` are called only if some elements differ.
    """
    from fp8bench.numerics.conformity import have_different_bits

    has_different_bits = have_different_bits(native, emulated)
    conformity = replace(conformity, total=has_different_bits.numel())
    if not bool(has_different_bits.any()):
        return conformity
    difference, reason = explain()
    first_different_index = tuple(int(index) for index in has_different_bits.nonzero()[0])
    return replace(
        conformity,
        difference=difference,
        why=reason,
        count=int(has_different_bits.sum()),
        largest=float(count_steps(native, emulated)[has_different_bits].max()),
        first=FirstDifferingElement(
            first_different_index, float(native[first_different_index]), float(emulated[first_different_index])
        ),
    )


def _describe_refusal(error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"[:_MAX_LINE_LENGTH]
