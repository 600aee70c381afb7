"""`fp8bench lint-shapes`: which products native low precision would refuse, before anybody has the device."""

from __future__ import annotations

import argparse
from functools import partial

from fp8bench.cli import option_types as types
from fp8bench.cli.options import shared
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.errors import EXIT_FAILED, EXIT_OK
from fp8bench.features.lint_shapes.job import look
from fp8bench.features.lint_shapes.view import as_csv, as_json, homeless, page_of
from fp8bench.model.request import whole_number


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.description = (
        "Which products of linear layers native FP8, MX and NVFP4 would refuse on each class of devices, why, and what "
        "padding would cost. Needs no device, and measures nothing."
    )
    parser.epilog = (
        "Exit codes: 0 every product fits as it is on some of the devices, in every mode; 2 wrong usage; 3 some "
        "product fits on none."
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help="gpt2, llama3-8b, llama3-70b, deepseek-v3, or a size of the suite transformer")
    words = "layers instead: lines of MxNxK and a name, CSV, or a YAML list; M tokens, N features out, K in"
    add("--shapes", type=types.path, metavar="FILE", help=words)
    words = "rows of a model's activations; default 8192, or what a step of a transformer has"
    add("--tokens", type=types.whole(whole_number(1)), metavar="N", help=words)
    words = "forward, input-gradient, weight-gradient; default all three of every layer"
    add("--products", type=types.words, default=(), metavar="A,B", help=words)
    words = "modes, as in suite; default those of fp8, fp8-rowwise, fp8-block, mxfp8, mxfp4 and nvfp4 that a device has"
    shared(parser, "--dtypes", help=words)
    words = "classes: a100, l40s, h100, b200, rtx5090, mi300x, mi350x, cpu (or hopper, sm90, gfx950, ...); default all"
    shared(parser, "--devices", help=words)
    shared(parser, "--json", help="print the findings as JSON instead")
    words = "also write them there as rows, one a product, mode and device; '-' prints them instead"
    shared(parser, "--csv", help=words)


def run(arguments: argparse.Namespace) -> int:
    """Look, tell, and end with 3 where some product fits nowhere as it is."""
    check_outputs(arguments)
    found = look(
        arguments.model, arguments.shapes, arguments.tokens, arguments.products, arguments.dtypes, arguments.devices
    )
    tell(
        arguments, partial(page_of, found.title, found.findings),
        partial(as_json, found.source, found.findings), partial(as_csv, found.findings),
    )  # fmt: skip
    return EXIT_FAILED if homeless(found.findings) else EXIT_OK
