"""Checks which backends are installed, and whether the products that they promise are right.

Some versions of libraries claim a format for a device but multiply wrongly, so a product is run before they are used.
Three products of one layer are compared with products of the same codes in fp64 or, if a library exposes no codes, with
fp8bench's emulation of the recipe. Sizes of rows and columns vary widely, so that a misplaced scale is noticed.
"""

from __future__ import annotations

import contextlib
import math
import os
from importlib import metadata

import torch
from torch import Tensor

from fp8bench.errors import BackendMissing
from fp8bench.formats.recipe_support import on_device
from fp8bench.formats.recipes import Recipe
from fp8bench.model import Case, DeviceFacts
from fp8bench.model.raw import PRODUCTS_VARIABLE
from fp8bench.nn.shared_precisions import recipe_of
from fp8bench.protocols import Arithmetic, Operand, Precision, Role, SilentPhases
from fp8bench.registry import backends, precisions, workloads

_TOKENS, _INPUTS, _OUTPUTS = 512, 256, 384
# Allowed error, as a share of the sum of magnitudes: bfloat16's rounding and sums in 14 bits cause 0.3%, a wrong scale
# of an operand much more.
_MOST = 0.01
# Allowed error of whole layers, as a share of the product: with four bits, random rounding and rotations leave 3%.
_MOST_OF_WHOLE = 0.08
_BY_ACCELERATE = ("accelerate", "msamp")


def installed_packages() -> tuple[tuple[str, str], ...]:
    """Returns names and versions of the packages of backends and Accelerate, except torch. Nothing is imported."""
    versions = []
    for package in sorted({*(backends.get(name).package for name in backends.names()), *_BY_ACCELERATE} - {"torch"}):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append((package, metadata.version(package)))
    return tuple(versions)


def why_not(name: str) -> str:
    try:
        backends.get(name).imported()
    except BackendMissing as error:
        return str(error)
    return ""


class Trials:
    """Tries each precision on each device once; a library's single products apart from its layers."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, bool], str] = {}

    def wrong(self, case: Case, facts: DeviceFacts) -> str:
        for mode in (case.precision, *(word for _, word in case.precision_map)):
            single = workloads.get(case.workload).single_products
            key = mode, facts.key, single
            if key not in self._known:
                self._known[key] = _try_precision(precisions.get(mode), facts, single)
            if self._known[key]:
                return self._known[key]
        return ""


def _try_precision(precision: Precision, facts: DeviceFacts, single: bool) -> str:
    native = precision.support(facts).is_native
    if not precision.takes_backend or not (native or precision.whole_layers):
        return ""
    unchecked = os.environ.get(PRODUCTS_VARIABLE) == "unchecked"
    try:
        arithmetic = precision.arithmetic(facts)
        if single:
            arithmetic = arithmetic.separate()
        with precision.scope():
            wrong = "" if unchecked else wrong_product(arithmetic, precision, facts)
    except BackendMissing as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - it is foreign code, and its words are the reason
        return f"{precision.mode}: a product of {_TOKENS}x{_OUTPUTS}x{_INPUTS} fails: {type(error).__name__}: {error}"
    return f"{precision.mode}: {wrong}" if wrong else ""


def wrong_product(arithmetic: Arithmetic, precision: Precision, facts: DeviceFacts) -> str:
    """Compares the three products of one layer with fp64; returns the error with the largest difference, or ''."""
    random = torch.Generator(facts.key).manual_seed(0)

    is_whole = arithmetic.whole(torch.nn.Parameter(torch.zeros(_OUTPUTS, _INPUTS, device=facts.key))) is not None
    # Random rounding may legitimately lose the small ends of a wide range.
    decades = 0.5 if is_whole else 2.0

    def draw(rows: int, columns: int, down: float, across: float) -> Tensor:
        """Draws numbers whose rows and columns vary in size by powers of ten: `down` and `across` times the decades."""
        ends = [decades * value for value in (down, across)]
        sizes = torch.logspace(-ends[0], ends[0], rows, device=facts.key)[:, None]
        sizes = sizes * torch.logspace(-ends[1], ends[1], columns, device=facts.key)
        # Mostly of one sign: terms that cancel would hide an error.
        return (torch.rand(rows, columns, generator=random, device=facts.key) - 0.1) * sizes

    # Along a contraction one operand grows as the other falls, so that every part of the sum counts.
    x, weight, gradient = (
        draw(_TOKENS, _INPUTS, 1, 0.5),
        draw(_OUTPUTS, _INPUTS, 1, -0.5),
        draw(_TOKENS, _OUTPUTS, -1, -1),
    )
    sources = (x.to(arithmetic.carrier), weight, gradient.to(arithmetic.carrier))
    if is_whole:
        errors, most = _of_whole(arithmetic, on_device(recipe_of(precision), facts), *sources), _MOST_OF_WHOLE
        against, share = "fp8bench's emulation of it", "that"
    else:
        errors, most = _of_operands(arithmetic, *sources), _MOST
        against, share = "the same product in fp64", "the sum of its magnitudes"
    for name, error in errors.items():
        if not error <= most:  # NaN too
            return (
                f"its {name} product is wrong on {facts.key}: it differs from {against} by {error:.3g} of {share}, "
                f"where {most:g} is the most that is expected. Nothing is measured with it "
                f"({PRODUCTS_VARIABLE}=unchecked does so all the same)"
            )
    return ""


def _of_operands(arithmetic: Arithmetic, x: Tensor, weight: Tensor, gradient: Tensor) -> dict[str, float]:
    """Returns each product's largest difference from the product of the same codes in fp64."""
    a, b, g = (
        arithmetic.cast(tensor, role)
        for tensor, role in ((x, Role.INPUT), (weight, Role.WEIGHT), (gradient, Role.GRADIENT))
    )
    pairs = {
        "forward": (a, b),
        "input gradient's": (g, arithmetic.turn(b, weight, Role.WEIGHT)),
        "weight gradient's": (arithmetic.turn(g, gradient, Role.GRADIENT), arithmetic.turn(a, x, Role.INPUT)),
    }
    errors = {}
    for name, (first, second) in pairs.items():
        first_values, second_values = (arithmetic.restore(operand, torch.float64) for operand in (first, second))
        product = arithmetic.product(first, second, arithmetic.carrier)
        errors[name] = _largest(product, *_exact_product(first_values, second_values))
    return {**errors, **_of_parts(arithmetic, a, g, (x, weight, gradient))} if arithmetic.groups else errors


def _of_parts(
    arithmetic: Arithmetic, a: Operand, g: Operand, sources: tuple[Tensor, Tensor, Tensor]
) -> dict[str, float]:
    from fp8bench.nn.linear import stack_operands, turn_parts

    def exact(operand: Operand) -> Tensor:
        return arithmetic.restore(operand, torch.float64)

    def columns(source: Tensor, role: Role) -> list[Tensor]:
        parts = torch.split_with_sizes(source, sizes)
        return [exact(arithmetic.turn(arithmetic.cast(part, role), part, role)) for part in parts]

    # 1. Use two unequal parts: equal ones would hide a wrong end.
    x, weight, gradient = sources
    sizes = [_TOKENS // 4, _TOKENS - _TOKENS // 4]
    ends = torch.tensor(sizes, device=x.device).cumsum(0).to(torch.int32)
    # 2. Compute exact products of each part, of the same operands.
    both = [arithmetic.cast(tensor, Role.WEIGHT) for tensor in (weight, weight.flip(0))]
    rows = zip(torch.split_with_sizes(exact(a), sizes), map(exact, both), strict=True)
    turned = zip(columns(gradient, Role.GRADIENT), columns(x, Role.INPUT), strict=True)
    # 3. The same by grouped products, forward and for weights.
    forward = torch.split_with_sizes(arithmetic.multiply_groups(a, stack_operands(both), ends), sizes)
    gradients = arithmetic.multiply_groups(
        turn_parts(arithmetic, g, gradient, Role.GRADIENT, sizes),
        turn_parts(arithmetic, a, x, Role.INPUT, sizes),
        ends,
    ).unbind()
    # 4. Report the larger error of the two parts.
    errors = {}
    for name, parts, pairs in (("forward", forward, rows), ("weight gradient's", gradients, turned)):
        of_parts = [_largest(part, *_exact_product(*pair)) for part, pair in zip(parts, pairs, strict=True)]
        errors[f"grouped {name}"] = max(of_parts)
    return errors


def _exact_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the product of two matrices of rows, and the sums of its magnitudes."""
    return a @ b.t(), a.abs() @ b.abs().t()


def _of_whole(arithmetic: Arithmetic, recipe: Recipe, x: Tensor, weight: Tensor, gradient: Tensor) -> dict[str, float]:
    from fp8bench.nn.arithmetics import RecipeArithmetic
    from fp8bench.nn.linear import linear

    ours = RecipeArithmetic(recipe, arithmetic.carrier)
    outcomes = []
    for is_emulated in (False, True):
        inputs, parameter = x.detach().clone().requires_grad_(), torch.nn.Parameter(weight.detach().clone())
        layer_function = None if is_emulated else arithmetic.whole(parameter)
        y = linear(inputs, parameter, ours, SilentPhases()) if layer_function is None else layer_function(inputs)
        outcomes.append((y, *torch.autograd.grad(y, (inputs, parameter), gradient)))
    pairs = zip(("forward", "input gradient's", "weight gradient's"), zip(*outcomes, strict=True), strict=True)
    return {name: _relative(theirs, expected) for name, (theirs, expected) in pairs}


def _relative(product: Tensor, expected: Tensor) -> float:
    """Returns the difference of two matrices as a share of the second; NaN if that is zero."""
    exact = expected.detach().to(torch.float64)
    norm = float(exact.norm())
    return float((product.detach().to(torch.float64) - exact).norm()) / norm if norm > 0 else math.nan


def _largest(product: Tensor, exact: Tensor, magnitudes: Tensor) -> float:
    """Returns the largest difference as a share of the magnitudes summed; NaN if all are zero."""
    if not bool(magnitudes.max() > 0):
        return math.nan
    return float(((product.detach().to(exact.dtype) - exact.detach()).abs() / magnitudes.clamp(min=1e-300)).max())
