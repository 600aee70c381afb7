"""`fp8bench bench`: your callables and a reference, on the same inputs in the same rounds."""

from __future__ import annotations

import argparse
from functools import partial

from fp8bench.cli.commands.suite import measure_and_tell
from fp8bench.cli.options import add_common, request_of
from fp8bench.cli.outputs import check_outputs
from fp8bench.features.bench.job import IMPORTED, check_targets, choose_axes
from fp8bench.features.bench.values import DTYPES
from fp8bench.model.run import BENCH
from fp8bench.protocols.axes import COLD, HOT, ROTATING

_OUTPUTS = ("--explain", "--json", "--no-report")
EXAMPLES = (
    "fp8bench bench mine.py:gelu --against torch.nn.functional:gelu --shape 4096x4096 --dtype bf16",
    "fp8bench bench mine.py:fast --against ref.py:attention  # inputs(device, seed) in mine.py",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Calls your functions and a reference with the same inputs, interleaved in the same rounds, and "
        "reports for each whether it is faster, by how much, its errors against the reference and float64, "
        "and its memory."
    )
    parser.epilog = "Exit codes: 0 fine, 2 wrong usage, 3 a case failed or nothing was measured, 130 interrupted."
    add = parser.add_argument
    words = "the callables: file.py:function, or module:function like torch.nn.functional:silu"
    add("targets", metavar="CALLABLE", nargs="+", help=words)
    add("--against", required=True, metavar="CALLABLE", help="the reference that they are compared with")
    add(
        "--shape",
        action="append",
        default=[],
        metavar="AxB,C",
        help="shapes of random input tensors: 1024x4096,4096x1024; repeatable",
    )
    add("--dtype", choices=DTYPES, metavar="NAME", help=f"of these tensors: {', '.join(DTYPES)}; default fp32")
    add(
        "--inputs",
        metavar="SOURCE",
        help=(
            "other inputs: file.py:function, called with the device and the seed, or a .pt or .safetensors file "
            "of tensors; default the function `inputs` in a callable's file"
        ),
    )
    add_common(parser, "--devices")
    words = f"state of the last-level cache when a call begins: {HOT} (default), {COLD} or {ROTATING} (over copies)"
    add("--cache", choices=(HOT, COLD, ROTATING), default=HOT, metavar="STATE", help=words)
    for option in ("--quick", "--budget", "--seed", "--threads", "--store", *_OUTPUTS):
        add_common(parser, option)


def run(arguments: argparse.Namespace) -> int:
    from fp8bench.pipeline import execute

    check_outputs(arguments)
    names = check_targets(arguments.targets, arguments.against)
    axes = choose_axes(names, arguments.shape, arguments.dtype, arguments.inputs, arguments.cache)
    given = {**vars(arguments), "suite": BENCH, "imports": (IMPORTED,), "reference": names[0], "dtypes": names[1:]}
    request = request_of(argparse.Namespace(**{**given, "axes": axes}))
    return measure_and_tell(request, arguments, partial(execute, origin=BENCH))
