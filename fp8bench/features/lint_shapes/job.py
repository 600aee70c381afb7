"""Checks the products of linear layers against what devices can run; layers come from a model or a file."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fp8bench.errors import UnknownName, UsageError
from fp8bench.formats.hardware import CLASSES, DeviceClass, device_class
from fp8bench.formats.product_rules import OUTPUTS, Objection, Product, Sides, missing, objections, te_objections
from fp8bench.formats.recipe_support import in_formats_of
from fp8bench.formats.recipes import Recipe
from fp8bench.measure.handle import claimed
from fp8bench.measure.limits import Limits
from fp8bench.model import Request
from fp8bench.model.words import UNTOUCHED
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.nn.sizes import PRODUCTS, features_of, models, sides_of, usual_tokens
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Role
from fp8bench.registry import precisions
from fp8bench.report.elements import printable
from fp8bench.workloads.model import Model


@dataclass(frozen=True)
class LinearShape:
    """A linear layer. `output` is the dtype of its products; `row_major`: their second operands lie row by row."""

    name: str
    tokens: int
    outputs: int
    inputs: int
    output: str = "bf16"
    row_major: bool = False


class ShapeOutcome(StrEnum):
    """What a device makes of a product."""

    FITS = "fits"
    PAD = "pad"
    REFUSED = "refused"
    MISSING = "missing"


@dataclass(frozen=True)
class Judgement:
    """An outcome and why. `padded` are sides that would fit; what they cost more is a share."""

    outcome: ShapeOutcome
    objections: tuple[Objection, ...] = ()
    padded: Sides | None = None
    more_flops: float = 0.0
    more_bytes: float = 0.0


@dataclass(frozen=True)
class ShapeFinding:
    """One product of one layer in one mode on one class of devices, as torch and Transformer Engine judge it.

    `te` is None where Transformer Engine has no recipe for it, or no support of the device.
    """

    shape: LinearShape
    kind: str
    mode: str
    device: DeviceClass
    product: Product
    torch: Judgement
    te: Judgement | None


LARGEST = (1 << 31) - 1
MOST_SHAPES = 10_000
_LAYOUTS = ("column", "row")
# Kinds of weights whose products are scaled matrix products; convolutions are none.
_LINEAR_KINDS = ("linear", "conv1d", "experts", "head")
_NAMES = ("m", "n", "k", "name", "output", "layout")
_SIZE = re.compile(r"(\S+?)[xX*](\S+?)[xX*](\S+)")


def shapes_of_model(model: str, tokens: int | None) -> list[LinearShape]:
    if ":" in model or model.endswith(".py"):
        if tokens is not None:
            raise UsageError("--tokens goes with known models: the batch of your own says its rows. Leave it out.")
        return shapes_of_own_model(model)
    if model not in models():
        raise UnknownName("model", model, models())
    rows = tokens or usual_tokens(model)
    return [LinearShape(layer, rows, *features) for layer, features in features_of(model).items()]


def shapes_of_own_model(maker: str) -> list[LinearShape]:
    """Runs one step of the user's model on a CPU, and returns the linear layers that it called."""
    # Here, because they import numpy, which --help does without.
    from fp8bench.jobs.profile import function_named
    from fp8bench.pipeline import examine, worker_for

    request = Request(Model.name, ("fp8",), ("cpu",), UNTOUCHED, axes=(("make", (function_named(maker),)),))
    with claimed(True), worker_for(request, None) as worker:
        facts = worker.probe()
        plan, limits = make_plan(request, facts, None), Limits()
        examine(plan, facts, worker, limits)
        (planned,) = (planned for planned in plan.groups[0].cases if planned.case.precision == "fp8")
        (device,) = (fact for fact in facts if fact.key == "cpu")
        coverage = worker.within(limits.numbers(planned.work)).coverage(planned.case, device)
    shapes = [
        LinearShape(holder.name, product.m, product.n, product.k)
        for holder in (coverage.holders if coverage else ())
        if holder.kind in _LINEAR_KINDS
        for product in holder.products
        if not product.backward
    ]
    if not shapes:
        raise UsageError(f"{maker} calls no linear layer. `fp8bench profile {maker}` lists its products.")
    return list(dict.fromkeys(shapes))


def shapes_of_file(path: Path) -> list[LinearShape]:
    """Reads CSV where the file ends in .csv, else lines of 'MxNxK' with or without a name."""
    text = _text(path)
    shapes: list[LinearShape] = []
    for number, given in (_of_csv if path.suffix.lower() == ".csv" else _of_lines)(text, str(path)):
        place = f"{path}:{number}"
        if len(shapes) == MOST_SHAPES:
            raise UsageError(f"{place}: more than {MOST_SHAPES} shapes. Give the others in another file.")
        shapes.append(_shape(given, place))
    if not shapes:
        raise UsageError(f"{path} has no shape in it. Give lines like '8192x4096x4096 out', or CSV.")
    return shapes


# The line's number and what it says, by the names of _NAMES.
Given = Iterator[tuple[int, Mapping[str, str]]]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}). Give a file of shapes, or --model NAME.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text in UTF-8. Give lines of MxNxK, or CSV.") from None


def _of_lines(text: str, path: str) -> Given:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split(None, 1)
        if words:
            yield number, {"shape": words[0], "name": words[1].strip() if len(words) == 2 else ""}


def _of_csv(text: str, path: str) -> Given:
    reader = csv.reader(io.StringIO(text), strict=True)
    titles: list[str] | None = None
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            if titles is None:
                titles = [cell.lower() for cell in cells]
                _check_columns(titles, f"{path}:{reader.line_num}")
                continue
            if len(cells) > len(titles):
                raise UsageError(f"{path}:{reader.line_num}: {len(cells)} cells under {len(titles)} columns.")
            yield reader.line_num, dict(zip(titles, cells, strict=False))
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: this is no CSV ({error}).") from None


def _check_columns(names: list[str], place: str) -> None:
    for name in names:
        if name not in _NAMES:
            raise UsageError(f"{place}: {UnknownName('column', name, _NAMES)}")
    if len(set(names)) != len(names):
        raise UsageError(f"{place}: a column stands there twice. Keep one of each.")
    lacking = [side for side in "mnk" if side not in names]
    if lacking:
        raise UsageError(f"{place}: there is no column {lacking[0]}. Give m, n and k, perhaps name, output and layout.")


def _shape(given: Mapping[str, str], place: str) -> LinearShape:
    if "shape" in given:
        match = _SIZE.fullmatch(given["shape"])
        if match is None:
            raise UsageError(f"{place}: {given['shape']!r:.80} is no shape. Expected MxNxK, like 8192x4096x4096.")
        sides = match.groups()
    else:
        sides = tuple(given.get(side, "") for side in "mnk")
    m, n, k = (_side(letter, text, place) for letter, text in zip("MNK", sides, strict=True))
    output = given.get("output") or OUTPUTS[0]
    layout = given.get("layout") or _LAYOUTS[0]
    if output not in OUTPUTS:
        raise UsageError(f"{place}: {UnknownName('output', output, OUTPUTS)}")
    if layout not in _LAYOUTS:
        raise UsageError(f"{place}: {UnknownName('layout of the second operand', layout, _LAYOUTS)}")
    name = printable(given.get("name", "")).strip()
    return LinearShape(name or f"{m}x{n}x{k}", m, n, k, output, layout == "row")


def _side(letter: str, text: str, place: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= LARGEST):
        raise UsageError(f"{place}: {letter} is {text!r:.40}. Expected a whole number from 1 to {LARGEST}.")
    return int(text)


# One mode of each kind of product; the others multiply as one of these does.
USUAL_MODES = ("fp8", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp6", "mxfp4", "nvfp4")


@dataclass(frozen=True)
class ShapeLint:
    """All findings; `source` is the model or the file."""

    source: str
    title: str
    findings: tuple[ShapeFinding, ...]


def lint_shapes(
    model: str | None,
    file: Path | None,
    tokens: int | None,
    products: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    devices: Sequence[str] = (),
) -> ShapeLint:
    """Checks each product of a model's or a file's layers, in each mode on each class of devices."""
    classes = list(dict.fromkeys(device_class(word) for word in devices)) or list(CLASSES)
    for word in products:
        if word not in PRODUCTS:
            raise UnknownName("product", word, PRODUCTS)
    modes = modes_of(dtypes, classes)
    source, shapes = _shapes(model, file, tokens)
    findings = judge_all(shapes, list(dict.fromkeys(products)) or list(PRODUCTS), modes, classes)
    if not findings:
        raise UsageError(
            "weight gradients stay in bf16 in these modes, and nothing else was asked for: widen --products."
        )
    return ShapeLint(source, _title(source, shapes, findings), tuple(findings))


def _shapes(model: str | None, file: Path | None, tokens: int | None) -> tuple[str, list[LinearShape]]:
    if model is not None and file is None:
        return model, shapes_of_model(model, tokens)
    if file is None or model is not None:
        given = "both --model and --shapes were" if file is not None else "neither --model nor --shapes was"
        raise UsageError(f"{given} given. Give --model NAME for the layers of a model, or --shapes FILE.")
    if tokens is not None:
        raise UsageError("--tokens goes with --model: in a file each shape has its own M. Leave it out.")
    return str(file), shapes_of_file(file)


def _title(source: str, shapes: Sequence[LinearShape], findings: Sequence[ShapeFinding]) -> str:
    """Writes a title like 'gpt2 with 8192 tokens: 15 products of 5 layers'."""
    tokens = {shape.tokens for shape in shapes}
    rows = f" with {tokens.pop()} tokens" if len(tokens) == 1 else ""
    products = len({(finding.shape, finding.kind) for finding in findings})
    names = {shape.name for shape in shapes}  # a layer may be called with several sizes
    layers = f"{len(names)} layer{'s' * (len(names) != 1)}"
    return f"{source}{rows}: {products} product{'s' * (products != 1)} of {layers}, as torch's scaled_mm takes them"


def modes_of(words: Sequence[str], devices: Sequence[DeviceClass]) -> list[RecipePrecision]:
    """Parses modes; without any, returns the usual ones that some device has, or all if none has any."""
    modes = {mode.mode: mode for mode in map(_scaled, words or USUAL_MODES)}
    native = [mode for mode in modes.values() if words or any(_has(device, mode) for device in devices)]
    return native or list(modes.values())


def judge_all(
    shapes: Sequence[LinearShape],
    kinds: Sequence[str],
    modes: Sequence[RecipePrecision],
    devices: Sequence[DeviceClass],
) -> list[ShapeFinding]:
    """Judges every combination, layer by layer, but for weight gradients that a recipe leaves in bf16."""
    return [
        ShapeFinding(shape, kind, mode.mode, device, product, judge(product, device), judge_by_te(product, device))
        for shape in shapes
        for kind in kinds
        for mode in modes
        if kind != "weight-gradient" or not mode.recipe.high_weight_gradient
        for device in devices
        for product in (_product(shape, kind, in_formats_of(device, mode.recipe)),)
    ]


def judge(product: Product, device: DeviceClass) -> Judgement:
    lacking = missing(product, device)
    if lacking is not None:
        return Judgement(ShapeOutcome.MISSING, (lacking,))
    return _judged(product, objections(product, device))


def judge_by_te(product: Product, device: DeviceClass) -> Judgement | None:
    against = te_objections(product, device)
    return None if against is None else _judged(product, against)


def _product(shape: LinearShape, kind: str, recipe: Recipe) -> Product:
    m, n, k = sides_of(kind, shape.tokens, shape.outputs, shape.inputs)
    treatments = {Role.INPUT: recipe.input, Role.WEIGHT: recipe.weight, Role.GRADIENT: recipe.gradient}
    a, b = (treatments[role] for role in PRODUCTS[kind])
    return Product(m, n, k, a, b, shape.output, shape.row_major)


def _judged(product: Product, against: tuple[Objection, ...]) -> Judgement:
    if not against:
        return Judgement(ShapeOutcome.FITS)
    multiples = [objection.multiples for objection in against if objection.multiples is not None]
    if len(multiples) < len(against):
        return Judgement(ShapeOutcome.REFUSED, against)
    grains = [math.lcm(*(multiple[place] for multiple in multiples)) for place in range(3)]
    m, n, k = (-(-length // grain) * grain for length, grain in zip(product.sides, grains, strict=True))
    more_flops = (m * n * k) / (product.m * product.n * product.k) - 1
    more_bytes = product.bytes_of((m, n, k)) / product.bytes_of(product.sides) - 1
    return Judgement(ShapeOutcome.PAD, against, (m, n, k), more_flops, more_bytes)


def _scaled(word: str) -> RecipePrecision:
    precision = precisions.get(word)
    if not isinstance(precision, RecipePrecision):
        scaled = ", ".join(name for name in precisions.names() if isinstance(precisions.get(name), RecipePrecision))
        raise UsageError(f"{word} scales nothing, and its products take every shape. Give one of {scaled}.")
    return precision


def _has(device: DeviceClass, mode: RecipePrecision) -> bool:
    recipe = in_formats_of(device, mode.recipe)
    return missing(Product(512, 512, 512, recipe.input, recipe.weight), device) is None
