"""`fp8bench lint-shapes`: which products native low precision would refuse, before anybody has the device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fp8bench.errors import EXIT_FAILED, EXIT_OK, UnknownName, UsageError
from fp8bench.formats.device_classes import CLASSES, device_class
from fp8bench.linting.findings import Finding, examine, homeless, modes_of
from fp8bench.linting.rows import as_csv, as_json
from fp8bench.linting.shapes import LinearShape, shapes_of_file, shapes_of_model
from fp8bench.linting.text import render
from fp8bench.nn.layer_sizes import PRODUCTS
from fp8bench.outputs import check_outputs, in_color
from fp8bench.streams import say


def lint_shapes(arguments: argparse.Namespace) -> int:
    """Look, tell, and end with 3 where some product fits nowhere as it is."""
    check_outputs(arguments)
    devices = list(dict.fromkeys(device_class(word) for word in arguments.devices)) or list(CLASSES)
    kinds = list(dict.fromkeys(_kind(word) for word in arguments.products)) or list(PRODUCTS)
    modes = modes_of(arguments.dtypes, devices)
    source, shapes = _shapes(arguments)
    findings = examine(shapes, kinds, modes, devices)
    if not findings:
        raise UsageError(
            "weight gradients stay in bf16 in these modes, and nothing else was asked for: widen --products."
        )
    _tell(source, shapes, findings, arguments)
    return EXIT_FAILED if homeless(findings) else EXIT_OK


def _shapes(arguments: argparse.Namespace) -> tuple[str, list[LinearShape]]:
    """What is looked at, in a word, and its layers."""
    if (arguments.model is None) == (arguments.shapes is None):
        given = "both --model and --shapes were" if arguments.model is not None else "neither --model nor --shapes was"
        raise UsageError(f"{given} given. Give --model NAME for the layers of a known model, or --shapes FILE.")
    if arguments.model is not None:
        return arguments.model, shapes_of_model(arguments.model, arguments.tokens)
    if arguments.tokens is not None:
        raise UsageError("--tokens goes with --model: in a file every shape says its own M. Leave it out.")
    return str(arguments.shapes), shapes_of_file(arguments.shapes)


def _kind(word: str) -> str:
    if word not in PRODUCTS:
        raise UnknownName("product", word, PRODUCTS)
    return word


def _tell(
    source: str, shapes: Sequence[LinearShape], findings: Sequence[Finding], arguments: argparse.Namespace
) -> None:
    rows = as_csv(findings) if arguments.csv is not None else ""
    if arguments.csv not in (None, "-"):
        try:
            Path(arguments.csv).write_text(rows, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise UsageError(f"--csv {arguments.csv} could not be written ({error.strerror}).") from None
    if arguments.csv == "-":
        say(rows)
    elif arguments.json:
        say(as_json(source, findings))
    else:
        say(render(_title(source, shapes, findings), findings, color=in_color()))


def _title(source: str, shapes: Sequence[LinearShape], findings: Sequence[Finding]) -> str:
    """'gpt2 with 8192 tokens: 15 products of 5 layers'."""
    tokens = {one.tokens for one in shapes}
    rows = f" with {tokens.pop()} tokens" if len(tokens) == 1 else ""
    products = len({(one.shape, one.kind) for one in findings})
    layers = f"{len(shapes)} layer{'s' * (len(shapes) != 1)}"
    return f"{source}{rows}: {products} product{'s' * (products != 1)} of {layers}, as torch's scaled_mm takes them"
