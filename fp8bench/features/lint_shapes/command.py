"""`fp8bench lint-shapes`: lists matrix products whose shapes native low precision would refuse, without needing the
device.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fp8bench import units
from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common_options
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.errors import EXIT_FAILED, EXIT_OK, UnknownName, UsageError
from fp8bench.formats.hardware import DEVICE_CLASSES, DeviceClass, find_device_class
from fp8bench.formats.product_rules import Product, Sides, explain_missing_product_kind, list_product_objections
from fp8bench.formats.recipe_support import use_device_formats
from fp8bench.model.codec import encode
from fp8bench.model.request import whole_number
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.nn.sizes import OPERAND_ROLES, get_default_token_count, get_product_sides, list_model_features, models
from fp8bench.protocols import Role
from fp8bench.registry import precisions
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Field, Page, Part, Text, TextList, Tone
from fp8bench.report.panels import together
from fp8bench.report.words.naming import join_words


@dataclass(frozen=True)
class LinearShape:
    """The sizes of a linear layer: the rows of its activations, and its numbers of output and input features."""

    name: str
    tokens: int
    outputs: int
    inputs: int


@dataclass(frozen=True)
class ShapeFinding:
    """Whether the shape of one product of a layer fits, in one mode on one class of devices. `exists` is False if these
    devices have no such product for any shape. `why` is '' if the shape fits, else the reason. `padded` is a
    padded shape that fits; None if no padding helps or none is needed.
    """

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


# The default modes, one for each kind of product. Products in all other modes are of one of these kinds.
USUAL_MODES = ("fp8", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp4", "nvfp4")
# Kinds of layers whose products are scaled matrix products. Convolutions are not such products.
_LINEAR_KINDS = ("linear", "conv1d", "experts", "head")


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists the products of linear layers whose shapes native FP8, MX or NVFP4 would refuse on each class "
        "of devices, with the reason and the size to pad to. Needs no device and measures no time."
    )
    parser.epilog = (
        "Exit codes: 0 every product fits unpadded on some of the devices, in every mode; 2 wrong usage; 3 some "
        "product fits on none of them."
    )
    help_text = f"{', '.join(models())}, or your MODULE:FUNCTION"
    parser.add_argument("name", metavar="MODEL", help=help_text)
    help_text = "rows of the activations of a named model; default 8192, or those of a transformer's step"
    parser.add_argument("--tokens", type=types.whole(whole_number(1)), metavar="N", help=help_text)
    add_common_options(parser, "--dtypes", help=f"as in suite; default {', '.join(USUAL_MODES)}")
    help_text = (
        "device classes: a100, l40s, h100, b200, rtx5090, mi300x, mi350x, cpu (or hopper, sm90, "
        "gfx950, ...); default all"
    )
    add_common_options(parser, "--devices", help=help_text)
    add_common_options(parser, "--json", help="print the findings as JSON instead")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    device_classes = list(dict.fromkeys(map(find_device_class, arguments.devices))) or list(DEVICE_CLASSES)
    modes = [_get_recipe_precision(word) for word in arguments.dtypes or USUAL_MODES]
    findings = judge_all_products(find_layer_shapes(arguments.name, arguments.tokens), modes, device_classes)
    tell(arguments, partial(render_page, arguments.name, findings), partial(encode, findings))
    return EXIT_FAILED if find_unfit_products(findings) else EXIT_OK


def _get_recipe_precision(word: str) -> RecipePrecision:
    precision = precisions.get(word)
    if not isinstance(precision, RecipePrecision):
        scaled_names = ", ".join(
            name for name in precisions.names() if isinstance(precisions.get(name), RecipePrecision)
        )
        raise UsageError(f"{word} has no scales, so its products take every shape. Give one of {scaled_names}.")
    return precision


def find_layer_shapes(model: str, tokens: int | None) -> list[LinearShape]:
    """Returns the layers of a model that fp8bench knows. For a user's model, returns the linear layers that a step
    calls on a CPU.
    """
    if ":" in model or model.endswith(".py"):
        if tokens is not None:
            raise UsageError(
                "--tokens only works with named models: the batch of your model determines its rows. Omit it."
            )
        from fp8bench.jobs.profile import find_model_coverage  # this import is slow

        shapes: dict[LinearShape, None] = {}
        for weight_holder in find_model_coverage(model).holders:
            forward_products = [product for product in weight_holder.products if not product.backward]
            for product in forward_products if weight_holder.kind in _LINEAR_KINDS else ():
                shapes[LinearShape(weight_holder.name, product.m, product.n, product.k)] = None
        if not shapes:
            raise UsageError(f"{model} calls no linear layer. `fp8bench profile {model}` lists its products.")
        return list(shapes)
    if model not in models():
        raise UnknownName("model", model, models())
    rows = tokens or get_default_token_count(model)
    return [LinearShape(layer, rows, *features) for layer, features in list_model_features(model).items()]


def judge_all_products(
    shapes: Sequence[LinearShape], modes: Sequence[RecipePrecision], devices: Sequence[DeviceClass]
) -> list[ShapeFinding]:
    """Checks whether each product of each layer fits each mode and device. Omits weight gradients that stay in bf16."""
    findings: list[ShapeFinding] = []
    for shape, kind, mode in itertools.product(shapes, OPERAND_ROLES, modes):
        if kind != "weight-gradient" or not mode.recipe.high_weight_gradient:
            findings += [judge_product_shape(shape, kind, mode, device) for device in devices]
    return findings


def judge_product_shape(shape: LinearShape, kind: str, mode: RecipePrecision, device: DeviceClass) -> ShapeFinding:
    recipe = use_device_formats(device, mode.recipe)
    treatment_by_role = {Role.INPUT: recipe.input, Role.WEIGHT: recipe.weight, Role.GRADIENT: recipe.gradient}
    first_role, second_role = OPERAND_ROLES[kind]
    product_sides = get_product_sides(kind, shape.tokens, shape.outputs, shape.inputs)
    product = Product(*product_sides, treatment_by_role[first_role], treatment_by_role[second_role])
    make_finding = partial(ShapeFinding, shape.name, kind, product_sides, mode.mode, device.name)
    if reason := explain_missing_product_kind(product, device):
        return make_finding(exists=False, why=reason)
    product_objections = list_product_objections(product, device)
    unfixable_shape_objections = [objection for objection in product_objections if objection.multiples is None]
    reason = "; ".join(objection.why for objection in unfixable_shape_objections or product_objections)
    if unfixable_shape_objections or not product_objections:
        return make_finding(why=reason)
    # Pad each side to the next common multiple of the numbers that the objections require.
    required_side_multiples = map(math.lcm, (1, 1, 1), *(objection.multiples or () for objection in product_objections))
    m, n, k = (
        -(-length // grain) * grain for length, grain in zip(product_sides, required_side_multiples, strict=True)
    )
    return make_finding(why=reason, padded=(m, n, k))


def find_unfit_products(findings: Sequence[ShapeFinding]) -> dict[str, list[str]]:
    """Returns the products whose shapes no device accepts without padding, each with the modes for which this holds."""
    fits_by_product_and_mode = together(
        ((f"{finding.layer} {finding.product}", finding.mode), finding.fits) for finding in findings
    )
    return together(key for key, fits_by_mode in fits_by_product_and_mode.items() if not any(fits_by_mode))


def render_page(model: str, findings: Sequence[ShapeFinding]) -> Page:
    # 1. Count the products that need no padding, by device and mode.
    fits_by_device_and_mode = together(
        ((finding.device, finding.mode), finding.fits) for finding in findings if finding.exists
    )

    def count_fits(mode: str, device: str) -> Field:
        product_fits = fits_by_device_and_mode.get((device, mode), [])
        count_text = "all" if all(product_fits) else f"{sum(product_fits)} of {len(product_fits)}"
        return Field(count_text if product_fits else units.NONE, tone=Tone.PLAIN if all(product_fits) else Tone.DOUBT)

    modes = dict.fromkeys(finding.mode for finding in findings)
    columns = [Col("device", str), *(Col(mode, partial(count_fits, mode), number=True) for mode in modes)]
    fitting_shapes_table = table("fitting", "", columns, dict.fromkeys(finding.device for finding in findings))
    parts = [Part("fitting", "products that fit unpadded; -: the device has no such product", (fitting_shapes_table,))]
    # 2. List each refused product once, with the devices and modes that refuse it.
    if refused_products := together(
        (replace(finding, mode="", device=""), (finding.mode, finding.device))
        for finding in findings
        if finding.exists and not finding.fits
    ):
        rows = table("refused", "", _REFUSED_PRODUCT_COLUMNS, refused_products.items())
        parts.append(Part("refused", "products that a device refuses without padding, and the size to pad to", (rows,)))
    # 3. List the modes without a matrix product on a device: padding does not help.
    if missing_products := together(
        (finding.why, (finding.mode, finding.device)) for finding in findings if not finding.exists
    ):
        items = TextList(
            tuple(Text(f"{reason}: {_format_modes_and_devices(places)}") for reason, places in missing_products.items())
        )
        parts.append(Part("missing", "why a device has no such product", (items,)))
    # 4. Name the products that no device accepts without padding, which should be changed first.
    unfit_products = find_unfit_products(findings)
    conclusion = "Every product fits unpadded on some of these devices, in every mode."
    if unfit_products:
        names = join_words([f"{name} in {', '.join(modes)}" for name, modes in unfit_products.items()])
        conclusion = f"All of these devices refuse, unpadded: {names}."
    parts.append(Part("conclusion", "", (Text(conclusion),)))
    return Page(f"{model}: products of linear layers, as torch's scaled_mm takes them", "", tuple(parts))


def _format_product_sides(sides: Sides | None) -> str:
    return " x ".join(map(str, sides or ())) or "no padding helps"


# A row of the table of refused products: a finding, and the pairs of mode and device for which it is the same.
RefusedRow = tuple[ShapeFinding, list[tuple[str, str]]]
_REFUSED_PRODUCT_COLUMNS: tuple[Col[RefusedRow], ...] = (
    Col("product", lambda row: f"{row[0].layer} {row[0].product}"),
    Col("M x N x K", lambda row: _format_product_sides(row[0].sides), number=True),
    Col("pad to", lambda row: _format_product_sides(row[0].padded), number=True),
    Col("why", lambda row: f"{row[0].why}: {_format_modes_and_devices(row[1])}", below=True),
)


def _format_modes_and_devices(modes_and_devices: Sequence[tuple[str, str]]) -> str:
    """Formats pairs of mode and device, such as 'fp8, fp8-rowwise on l40s, h100; fp8-block on h100'."""
    devices = together(dict.fromkeys(modes_and_devices))
    modes = together((tuple(names), mode) for mode, names in devices.items())
    return "; ".join(f"{', '.join(same_modes)} on {', '.join(names)}" for names, same_modes in modes.items())
