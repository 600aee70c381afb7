"""Lists the installed backends, and checks whether their products are right.

Some versions of libraries support a format on a device but multiply wrongly, so products are checked before a library
is used. The three products of a layer are compared with fp64 products of the same codes. If a library does not show
its codes, its products are compared with fp8bench's emulation of the recipe. Magnitudes of rows and columns vary
widely, so that a misplaced scale is noticed.
"""

from __future__ import annotations

import contextlib
import math
import os
from importlib import metadata

import torch
from torch import Tensor

from fp8bench.errors import BackendMissing
from fp8bench.formats.recipe_support import recipe_on_device
from fp8bench.formats.recipes import Recipe
from fp8bench.model import Case, DeviceFacts
from fp8bench.model.raw import PRODUCT_CHECKS_VARIABLE
from fp8bench.nn.shared_precisions import get_recipe
from fp8bench.protocols import Arithmetic, Operand, Precision, Role, SilentPhases
from fp8bench.registry import backends, precisions, workloads

_TOKENS, _INPUTS, _OUTPUTS = 512, 256, 384
# The largest allowed error, relative to the sum of magnitudes. Rounding to bfloat16 and sums in 14 bits cause 0.3%. A
# wrong scale of an operand causes much more.
_MAX_PRODUCT_ERROR = 0.01
# The largest allowed error of a library's whole layers, relative to the product. In four-bit formats, random rounding
# and rotated operands cause 3%.
_MAX_LAYER_ERROR = 0.08
_ACCELERATE_PACKAGES = ("accelerate", "msamp")


def list_installed_packages() -> tuple[tuple[str, str], ...]:
    """Returns names and versions of the installed packages of backends and of Accelerate, except torch. No package is
    imported.
    """
    package_versions = []
    for package in sorted(
        {*(backends.get(name).package for name in backends.names()), *_ACCELERATE_PACKAGES} - {"torch"}
    ):
        with contextlib.suppress(metadata.PackageNotFoundError):
            package_versions.append((package, metadata.version(package)))
    return tuple(package_versions)


def explain_missing_backend(name: str) -> str:
    try:
        backends.get(name).imported()
    except BackendMissing as error:
        return str(error)
    return ""


class ProductTrials:
    """Checks once per precision and device whether matrix products are correct. Single products and the whole layers of
    a library are checked separately.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[str, str, bool], str] = {}

    def find_error(self, case: Case, facts: DeviceFacts) -> str:
        for mode in (case.precision, *(word for _, word in case.precision_map)):
            is_single_product = workloads.get(case.workload).single_products
            key = mode, facts.key, is_single_product
            if key not in self._results:
                self._results[key] = _try_precision(precisions.get(mode), facts, is_single_product)
            if self._results[key]:
                return self._results[key]
        return ""


def _try_precision(precision: Precision, facts: DeviceFacts, single: bool) -> str:
    is_native = precision.support(facts).is_native
    if not precision.takes_backend or not (is_native or precision.whole_layers):
        return ""
    skips_check = os.environ.get(PRODUCT_CHECKS_VARIABLE) == "unchecked"
    try:
        arithmetic = precision.arithmetic(facts)
        if single:
            arithmetic = arithmetic.separate()
        with precision.scope():
            error_text = "" if skips_check else find_wrong_product(arithmetic, precision, facts)
    except BackendMissing as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - it is foreign code, and its words are the reason
        return f"{precision.mode}: a product of {_TOKENS}x{_OUTPUTS}x{_INPUTS} fails: {type(error).__name__}: {error}"
    return f"{precision.mode}: {error_text}" if error_text else ""


def find_wrong_product(arithmetic: Arithmetic, precision: Precision, facts: DeviceFacts) -> str:
    """Compares the three products of a layer with exact ones. Returns a sentence about a wrong product, or ''."""
    generator = torch.Generator(facts.key).manual_seed(0)

    has_whole_layers = (
        arithmetic.whole(torch.nn.Parameter(torch.zeros(_OUTPUTS, _INPUTS, device=facts.key))) is not None
    )
    # Use a narrower range for whole layers, because in a wide range random rounding may correctly round the smallest
    # numbers to zero.
    magnitude_decades = 0.5 if has_whole_layers else 2.0

    def draw(rows: int, columns: int, down: float, across: float) -> Tensor:
        """Draws numbers whose magnitudes grow exponentially from the first row to the last, and from the first column
        to the last. `down` and `across` multiply the decades of growth; if they are negative, magnitudes fall.
        """
        row_decades = magnitude_decades * down
        column_decades = magnitude_decades * across
        magnitudes = torch.logspace(-row_decades, row_decades, rows, device=facts.key)[:, None]
        magnitudes = magnitudes * torch.logspace(-column_decades, column_decades, columns, device=facts.key)
        # Most numbers have the same sign, because terms that cancel would hide an error.
        return (torch.rand(rows, columns, generator=generator, device=facts.key) - 0.1) * magnitudes

    # One operand grows along the summed dimension while the other one falls, so that all terms of a sum matter.
    x = draw(_TOKENS, _INPUTS, 1, 0.5)
    weight = draw(_OUTPUTS, _INPUTS, 1, -0.5)
    gradient = draw(_TOKENS, _OUTPUTS, -1, -1)
    sources = (x.to(arithmetic.carrier), weight, gradient.to(arithmetic.carrier))
    if has_whole_layers:
        errors = _compare_with_emulation(arithmetic, recipe_on_device(get_recipe(precision), facts), *sources)
        allowed_error = _MAX_LAYER_ERROR
        expected_text = "fp8bench's emulation of it"
        error_denominator_text = "that"
    else:
        errors = _compare_with_codes(arithmetic, *sources)
        allowed_error = _MAX_PRODUCT_ERROR
        expected_text = "the same product in fp64"
        error_denominator_text = "the sum of its magnitudes"
    for name, error in errors.items():
        if not error <= allowed_error:  # true for NaN as well
            return (
                f"its {name} product is wrong on {facts.key}: it differs from {expected_text} by {error:.3g} of "
                f"{error_denominator_text}, where at most {allowed_error:g} is expected. Nothing is measured with it "
                f"({PRODUCT_CHECKS_VARIABLE}=unchecked measures nevertheless)"
            )
    return ""


def _compare_with_codes(arithmetic: Arithmetic, x: Tensor, weight: Tensor, gradient: Tensor) -> dict[str, float]:
    """Returns the largest error of each of a layer's products (forward and both gradients), compared with fp64 products
    of the same low-precision operands.
    """
    a, b, g = (
        arithmetic.cast(tensor, role)
        for tensor, role in ((x, Role.INPUT), (weight, Role.WEIGHT), (gradient, Role.GRADIENT))
    )
    operand_pairs = {
        "forward": (a, b),
        "input gradient's": (g, arithmetic.turn(b, weight, Role.WEIGHT)),
        "weight gradient's": (arithmetic.turn(g, gradient, Role.GRADIENT), arithmetic.turn(a, x, Role.INPUT)),
    }
    errors = {}
    for name, (first, second) in operand_pairs.items():
        first_values, second_values = (arithmetic.restore(operand, torch.float64) for operand in (first, second))
        product = arithmetic.product(first, second, arithmetic.carrier)
        errors[name] = _find_largest_error(product, *_multiply_exactly(first_values, second_values))
    if arithmetic.groups:
        errors |= _measure_grouped_errors(arithmetic, a, g, (x, weight, gradient))
    return errors


def _measure_grouped_errors(
    arithmetic: Arithmetic, a: Operand, g: Operand, sources: tuple[Tensor, Tensor, Tensor]
) -> dict[str, float]:
    from fp8bench.nn.linear import stack_operands, transpose_row_groups

    def restore_in_fp64(operand: Operand) -> Tensor:
        return arithmetic.restore(operand, torch.float64)

    def cast_columns(source: Tensor, role: Role) -> list[Tensor]:
        parts = torch.split_with_sizes(source, part_token_counts)
        return [restore_in_fp64(arithmetic.turn(arithmetic.cast(part, role), part, role)) for part in parts]

    # 1. Split the tokens into two unequal parts, because equal parts would hide a wrong boundary.
    x, weight, gradient = sources
    part_token_counts = [_TOKENS // 4, _TOKENS - _TOKENS // 4]
    part_end_rows = torch.tensor(part_token_counts, device=x.device).cumsum(0).to(torch.int32)
    # 2. For each part of the tokens, restore the rounded operands of both products in fp64.
    cast_weights = [arithmetic.cast(tensor, Role.WEIGHT) for tensor in (weight, weight.flip(0))]
    forward_operand_pairs = zip(
        torch.split_with_sizes(restore_in_fp64(a), part_token_counts), map(restore_in_fp64, cast_weights), strict=True
    )
    gradient_operand_pairs = zip(cast_columns(gradient, Role.GRADIENT), cast_columns(x, Role.INPUT), strict=True)
    # 3. Compute the same products, forward and for the gradients of weights, by grouped kernels.
    forward_products = torch.split_with_sizes(
        arithmetic.multiply_groups(a, stack_operands(cast_weights), part_end_rows), part_token_counts
    )
    gradient_products = arithmetic.multiply_groups(
        transpose_row_groups(arithmetic, g, gradient, Role.GRADIENT, part_token_counts),
        transpose_row_groups(arithmetic, a, x, Role.INPUT, part_token_counts),
        part_end_rows,
    ).unbind()
    # 4. Return the larger error of the two parts, for each product.
    errors = {}
    for name, parts, pairs in (
        ("forward", forward_products, forward_operand_pairs),
        ("weight gradient's", gradient_products, gradient_operand_pairs),
    ):
        part_errors = [
            _find_largest_error(part, *_multiply_exactly(*pair)) for part, pair in zip(parts, pairs, strict=True)
        ]
        errors[f"grouped {name}"] = max(part_errors)
    return errors


def _multiply_exactly(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two matrices: the product of `a` and the transposed `b`, and for each element the sum of the magnitudes
    of its terms.
    """
    return a @ b.t(), a.abs() @ b.abs().t()


def _compare_with_emulation(
    arithmetic: Arithmetic, recipe: Recipe, x: Tensor, weight: Tensor, gradient: Tensor
) -> dict[str, float]:
    from fp8bench.nn.arithmetics import RecipeArithmetic
    from fp8bench.nn.linear import linear
    from fp8bench.numerics.norms import relative_frobenius

    emulated_arithmetic = RecipeArithmetic(recipe, arithmetic.carrier)
    results_by_arithmetic = []
    for is_emulated in (False, True):
        inputs = x.detach().clone().requires_grad_()
        parameter = torch.nn.Parameter(weight.detach().clone())
        layer_function = None if is_emulated else arithmetic.whole(parameter)
        if layer_function is None:
            outputs = linear(inputs, parameter, emulated_arithmetic, SilentPhases())
        else:
            outputs = layer_function(inputs)
        results_by_arithmetic.append((outputs, *torch.autograd.grad(outputs, (inputs, parameter), gradient)))
    names = ("forward", "input gradient's", "weight gradient's")
    errors = {}
    for name, result, expected in zip(names, *results_by_arithmetic, strict=True):
        # If all results should be zero, correct results prove nothing.
        errors[name] = relative_frobenius(result, expected) if bool(expected.any()) else math.nan
    return errors


def _find_largest_error(product: Tensor, exact: Tensor, magnitudes: Tensor) -> float:
    """Returns the largest difference of any element from the exact product, divided by the sum of the magnitudes of the
    element's terms; NaN if all magnitudes are zero.
    """
    if not bool(magnitudes.max() > 0):
        return math.nan
    # The clamp avoids 0 / 0 for elements whose terms are all zero.
    return float(((product.detach().to(exact.dtype) - exact.detach()).abs() / magnitudes.clamp(min=1e-300)).max())
