"""`fp8bench lint-shapes`: finds products that native low precision would refuse or pad, without the device."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from fp8bench import units
from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.errors import EXIT_FAILED, EXIT_OK, UnknownName, UsageError
from fp8bench.formats.hardware import CLASSES, DeviceClass, device_class
from fp8bench.formats.product_rules import Product, Sides, missing, objections
from fp8bench.formats.recipe_support import in_formats_of
from fp8bench.model.codec import encode
from fp8bench.model.request import whole_number
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.nn.sizes import PRODUCTS, features_of, models, sides_of, usual_tokens
from fp8bench.protocols import Role
from fp8bench.registry import precisions
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Field, Items, Page, Part, Text, Tone
from fp8bench.report.panels import together
from fp8bench.report.words.naming import join_words


@dataclass(frozen=True)
class LinearShape:
    """A linear layer: rows of its activations, output and input features."""

    name: str
    tokens: int
    outputs: int
    inputs: int


@dataclass(frozen=True)
class ShapeFinding:
    """One product of one layer in one mode on one class of devices. `exists` is False if the class has no such product
    in any shape; it fits if `why` is empty. `padded` are sides that would fit, None if none would."""

    layer: str
    product: str
    sides: Sides
    mode: str
    device: str
    exists: bool = True
    why: str = ""
    padded: Sides | None = None

    @property
    def fits(self) -> bool:
        return not self.why


# One mode of each kind of product; the others multiply like one of these.
USUAL_MODES = ("fp8", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp4", "nvfp4")
# Kinds of weights whose products are scaled matrix products; convolutions are not.
_LINEAR_KINDS = ("linear", "conv1d", "experts", "head")


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists the products of linear layers whose shapes native FP8, MX or NVFP4 would refuse on each class "
        "of devices, the reason, and the sizes to pad them to. Needs no device and times nothing."
    )
    parser.epilog = (
        "Exit codes: 0 every product fits unpadded on some of the devices, in every mode; 2 wrong usage; 3 some "
        "product fits on none."
    )
    words = f"{', '.join(models())}, or your MODULE:FUNCTION"
    parser.add_argument("name", metavar="MODEL", help=words)
    words = "rows of a known model's activations; default 8192, or those of a transformer's step"
    parser.add_argument("--tokens", type=types.whole(whole_number(1)), metavar="N", help=words)
    add_common(parser, "--dtypes", help=f"as in suite; default {', '.join(USUAL_MODES)}")
    words = "classes: a100, l40s, h100, b200, rtx5090, mi300x, mi350x, cpu (or hopper, sm90, gfx950, ...); default all"
    add_common(parser, "--devices", help=words)
    add_common(parser, "--json", help="print the findings as JSON instead")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    classes = list(dict.fromkeys(map(device_class, arguments.devices))) or list(CLASSES)
    modes = [_recipe_of(word) for word in arguments.dtypes or USUAL_MODES]
    findings = judge_all(shapes_of(arguments.name, arguments.tokens), modes, classes)
    tell(arguments, partial(page_of, arguments.name, findings), partial(encode, findings))
    return EXIT_FAILED if fitting_nowhere(findings) else EXIT_OK


def _recipe_of(word: str) -> RecipePrecision:
    precision = precisions.get(word)
    if not isinstance(precision, RecipePrecision):
        scaled = ", ".join(name for name in precisions.names() if isinstance(precisions.get(name), RecipePrecision))
        raise UsageError(f"{word} has no scales, and its products take every shape. Give one of {scaled}.")
    return precision


def shapes_of(model: str, tokens: int | None) -> list[LinearShape]:
    """Returns the layers of a known model, or those that a step of a user's model calls on a CPU."""
    if ":" in model or model.endswith(".py"):
        if tokens is not None:
            raise UsageError(
                "--tokens only works with known models: your model's batch determines its rows. Leave it out."
            )
        from fp8bench.jobs.profile import coverage_of  # heavy

        shapes: dict[LinearShape, None] = {}
        for holder in coverage_of(model).holders:
            forward = [product for product in holder.products if not product.backward]
            for product in forward if holder.kind in _LINEAR_KINDS else ():
                shapes[LinearShape(holder.name, product.m, product.n, product.k)] = None
        if not shapes:
            raise UsageError(f"{model} calls no linear layer. `fp8bench profile {model}` lists its products.")
        return list(shapes)
    if model not in models():
        raise UnknownName("model", model, models())
    rows = tokens or usual_tokens(model)
    return [LinearShape(layer, rows, *features) for layer, features in features_of(model).items()]


def judge_all(
    shapes: Sequence[LinearShape], modes: Sequence[RecipePrecision], devices: Sequence[DeviceClass]
) -> list[ShapeFinding]:
    """Judges every product of every layer, except weight gradients that a recipe leaves in bf16."""
    findings: list[ShapeFinding] = []
    for shape, kind, mode in itertools.product(shapes, PRODUCTS, modes):
        if kind != "weight-gradient" or not mode.recipe.high_weight_gradient:
            findings += [judge(shape, kind, mode, device) for device in devices]
    return findings


def judge(shape: LinearShape, kind: str, mode: RecipePrecision, device: DeviceClass) -> ShapeFinding:
    recipe = in_formats_of(device, mode.recipe)
    treatments = {Role.INPUT: recipe.input, Role.WEIGHT: recipe.weight, Role.GRADIENT: recipe.gradient}
    first, second = PRODUCTS[kind]
    sides = sides_of(kind, shape.tokens, shape.outputs, shape.inputs)
    product = Product(*sides, treatments[first], treatments[second])
    finding = partial(ShapeFinding, shape.name, kind, sides, mode.mode, device.name)
    if reason := missing(product, device):
        return finding(exists=False, why=reason)
    against = objections(product, device)
    multiples = [objection.multiples for objection in against if objection.multiples is not None]
    if len(multiples) < len(against):  # no padding satisfies all of them
        return finding(why="; ".join(objection.why for objection in against if objection.multiples is None))
    # Each side is padded to a multiple that satisfies all objections.
    grains = map(math.lcm, (1, 1, 1), *multiples)
    m, n, k = (-(-length // grain) * grain for length, grain in zip(sides, grains, strict=True))
    return finding(why="; ".join(objection.why for objection in against), padded=(m, n, k) if against else None)


def fitting_nowhere(findings: Sequence[ShapeFinding]) -> dict[str, list[str]]:
    """Returns the products that fit unpadded on none of the devices, each with its modes."""
    fits = together(((f"{finding.layer} {finding.product}", finding.mode), finding.fits) for finding in findings)
    return together(key for key, some in fits.items() if not any(some))


def page_of(model: str, findings: Sequence[ShapeFinding]) -> Page:
    # 1. How many products fit, by device and mode.
    counts = together(((finding.device, finding.mode), finding.fits) for finding in findings if finding.exists)

    def count(mode: str, device: str) -> Field:
        fits = counts.get((device, mode), [])
        words = "all" if all(fits) else f"{sum(fits)} of {len(fits)}"
        return Field(words if fits else units.NONE, tone=Tone.PLAIN if all(fits) else Tone.DOUBT)

    modes = dict.fromkeys(finding.mode for finding in findings)
    cols = [Col("device", str), *(Col(mode, partial(count, mode), number=True) for mode in modes)]
    fitting = table("fitting", "", cols, dict.fromkeys(finding.device for finding in findings))
    parts = [Part("fitting", "products that fit unpadded; -: does not exist", (fitting,))]
    # 2. Each refused product once, with every device and mode that refuses it.
    if refused := together(
        ((finding.layer, finding.product, finding.sides, finding.padded, finding.why), (finding.mode, finding.device))
        for finding in findings
        if finding.exists and not finding.fits
    ):
        rows = table("refused", "", _REFUSED, refused.items())
        parts.append(Part("refused", "refused unpadded, and the size to pad to", (rows,)))
    # 3. Modes without such a product, for which padding does not help.
    if lacking := together((finding.why, (finding.mode, finding.device)) for finding in findings if not finding.exists):
        items = Items(tuple(Text(f"{reason}: {_places(places)}") for reason, places in lacking.items()))
        parts.append(Part("missing", "why it does not exist", (items,)))
    # 4. Products that no device takes: change these first.
    lost = fitting_nowhere(findings)
    names = join_words([f"{name} in {', '.join(modes)}" for name, modes in lost.items()])
    words = f"Refused unpadded by all of these devices: {names}."
    every = "Every product fits unpadded on some of these devices, in every mode."
    parts.append(Part("conclusion", "", (Text(words if lost else every),)))
    return Page(f"{model}: products of linear layers, as torch's scaled_mm takes them", "", tuple(parts))


Refused = tuple[tuple[str, str, Sides, Sides | None, str], list[tuple[str, str]]]
_REFUSED: tuple[Col[Refused], ...] = (
    Col("product", lambda row: f"{row[0][0]} {row[0][1]}"),
    Col("M x N x K", lambda row: " x ".join(map(str, row[0][2])), number=True),
    Col("pad to", lambda row: " x ".join(map(str, row[0][3])) if row[0][3] else "no padding helps", number=True),
    Col("why", lambda row: f"{row[0][4]}: {_places(row[1])}", below=True),
)


def _places(places: Iterable[tuple[str, str]]) -> str:
    """Formats modes and devices like 'fp8, fp8-rowwise on l40s, h100; fp8-block on h100'."""
    devices = together(dict.fromkeys(places))
    modes = together((tuple(names), mode) for mode, names in devices.items())
    return "; ".join(f"{', '.join(same)} on {', '.join(names)}" for names, same in modes.items())
