"""What becomes of every product of some layers, in some modes, on some classes of devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fp8bench.errors import UsageError
from fp8bench.formats.device_classes import DeviceClass
from fp8bench.formats.product_rules import missing, objections
from fp8bench.formats.recipes import Recipe, Treatment
from fp8bench.formats.scaled_products import Objection, Product, Sides
from fp8bench.formats.te_rules import te_objections
from fp8bench.linting.shapes import LinearShape
from fp8bench.nn.layer_sizes import PRODUCTS, sides_of
from fp8bench.nn.recipe_precision import RecipePrecision
from fp8bench.protocols import Role
from fp8bench.registry import precisions

# One mode of each kind of product; the others multiply as one of these does.
USUAL_MODES = ("fp8", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp6", "mxfp4", "nvfp4")


class Outcome(StrEnum):
    """What a device makes of a product."""

    FITS = "fits"
    PAD = "pad"
    REFUSED = "refused"
    MISSING = "missing"


@dataclass(frozen=True)
class Judgement:
    """An outcome and why. `padded` are the sides that would do, and what they cost more, as shares."""

    outcome: Outcome
    objections: tuple[Objection, ...] = ()
    padded: Sides | None = None
    more_flops: float = 0.0
    more_bytes: float = 0.0


@dataclass(frozen=True)
class Finding:
    """One product of one layer in one mode on one class of devices: what torch says, and Transformer Engine.

    `te` is None where it has no recipe for it, or nothing to do with the device.
    """

    shape: LinearShape
    kind: str
    mode: str
    device: DeviceClass
    product: Product
    torch: Judgement
    te: Judgement | None


@dataclass(frozen=True)
class Mode:
    """A mode by its one word, and its recipe."""

    word: str
    recipe: Recipe


def modes_of(words: Sequence[str], devices: Sequence[DeviceClass]) -> list[Mode]:
    """The modes of some words; without any, the usual ones that some device has (all of them if none has any)."""
    if words:
        return list(dict.fromkeys(_mode(word) for word in words))
    usual = [_mode(word) for word in USUAL_MODES]
    there = [mode for mode in usual if any(_is_there(mode, device) for device in devices)]
    return there or usual


def examine(
    shapes: Sequence[LinearShape], kinds: Sequence[str], modes: Sequence[Mode], devices: Sequence[DeviceClass]
) -> list[Finding]:
    """Every combination, layer by layer. A product that a recipe leaves in bf16 is none of these."""
    return [
        Finding(shape, kind, mode.word, device, product, judge(product, device), judge_by_te(product, device))
        for shape in shapes
        for kind, mode, product in _products(shape, kinds, modes)
        for device in devices
    ]


def judge(product: Product, device: DeviceClass) -> Judgement:
    """What torch and the hardware make of it."""
    lacking = missing(product, device)
    if lacking is not None:
        return Judgement(Outcome.MISSING, (lacking,))
    return _judged(product, objections(product, device))


def judge_by_te(product: Product, device: DeviceClass) -> Judgement | None:
    """What Transformer Engine makes of it."""
    found = te_objections(product, device)
    return None if found is None else _judged(product, found)


def homeless(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for each product and mode that fits on none of the devices as it is."""
    first: dict[tuple[LinearShape, str, str], Finding] = {}
    housed = set()
    for one in findings:
        key = (one.shape, one.kind, one.mode)
        first.setdefault(key, one)
        if one.torch.outcome is Outcome.FITS:
            housed.add(key)
    return [one for key, one in first.items() if key not in housed]


def _products(shape: LinearShape, kinds: Sequence[str], modes: Sequence[Mode]) -> Iterator[tuple[str, Mode, Product]]:
    for kind in kinds:
        m, n, k = sides_of(kind, shape.tokens, shape.outputs, shape.inputs)
        for mode in modes:
            if kind == "weight-gradient" and mode.recipe.high_weight_gradient:
                continue
            a, b = (_treatment(mode.recipe, role) for role in PRODUCTS[kind])
            yield kind, mode, Product(m, n, k, a, b, shape.output, shape.row_major)


def _treatment(recipe: Recipe, role: Role) -> Treatment:
    return {Role.INPUT: recipe.input, Role.WEIGHT: recipe.weight, Role.GRADIENT: recipe.gradient}[role]


def _judged(product: Product, found: tuple[Objection, ...]) -> Judgement:
    if not found:
        return Judgement(Outcome.FITS)
    multiples = [one.multiples for one in found if one.multiples is not None]
    if len(multiples) < len(found):
        return Judgement(Outcome.REFUSED, found)
    m, n, k = (_up(length, math.lcm(*(one[place] for one in multiples))) for place, length in enumerate(product.sides))
    more_flops = (m * n * k) / (product.m * product.n * product.k) - 1
    more_bytes = product.bytes_of((m, n, k)) / product.bytes_of(product.sides) - 1
    return Judgement(Outcome.PAD, found, (m, n, k), more_flops, more_bytes)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _mode(word: str) -> Mode:
    precision = precisions.get(word)
    if not isinstance(precision, RecipePrecision):
        scaled = ", ".join(name for name in precisions.names() if isinstance(precisions.get(name), RecipePrecision))
        raise UsageError(f"{word} scales nothing, and its products take every shape. Give one of {scaled}.")
    return Mode(precision.mode, precision.recipe)


def _is_there(mode: Mode, device: DeviceClass) -> bool:
    a, b = mode.recipe.input, mode.recipe.weight
    return missing(Product(512, 512, 512, a, b), device) is None
