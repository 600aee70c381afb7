"""`fp8bench profile`: your model, unchanged and with its products in other precisions."""

from __future__ import annotations

import argparse

from fp8bench.cli import option_types as types
from fp8bench.cli.commands.suite import OUTPUTS, PASSES, measure_and_tell
from fp8bench.cli.options import add_common, request_of
from fp8bench.cli.outputs import check_outputs
from fp8bench.workloads.model import OPTIMIZERS

EXAMPLES = ("fp8bench profile net.py:make --dtypes bf16,fp8  # make() gives (model, batch)",)
FIRST_OPTIONS = (
    "--dtypes --devices --skip --forward --optimizer --compile --import --quick --budget --store --csv --html"
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reports which of a model's products could run in low precision, which could not, and why; then "
        "measures a step of the unchanged model next to copies whose layers multiply in other precisions."
    )
    parser.epilog = "Exit codes: 0 fine, 2 wrong usage, 3 a case failed or nothing was measured, 130 interrupted."
    parser.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help=(
            "a function without arguments that returns (model, batch) or (model, batch, loss), also as "
            "file.py:function. A batch is a tensor, a tuple of positional arguments, or a mapping of named ones"
        ),
    )
    _add_what(parser.add_argument_group("what to measure"))
    how = parser.add_argument_group("how")
    add_common(
        how, "--quick", "--budget", "--rounds", "--seed", "--threads", "--case-timeout", *PASSES, "--no-isolation"
    )
    where = parser.add_argument_group("where")
    add_common(where, "--store", *OUTPUTS)


def _add_what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add_common(group, "--dtypes", help="precisions of the copies, accelerate-fp8 too; default bf16,fp8")
    add_common(group, "--devices")
    add_common(group, "--reference", help="what the others are compared with; default untouched, the unchanged model")
    add_common(group, "--backend")
    add(
        "--skip",
        type=types.words,
        default=(),
        metavar="A,B",
        help="layers to leave unchanged: kinds (head, linear, conv2d), or module paths with * and ?",
    )
    add(
        "--precision-map",
        type=types.precision_map,
        default=(),
        metavar="LAYER=DTYPE,...",
        help=(
            "layers with another precision than their copy's: a kind, a module path (model.layers.0.mlp.up_proj) "
            "or the beginning of paths; or a file with one per line. untouched leaves a layer unchanged"
        ),
    )
    add("--forward", action="store_true", help="measure forward only, without gradients; default a training step")
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default=OPTIMIZERS[0],
        metavar="NAME",
        help=f"of the training step: {', '.join(OPTIMIZERS)}; default {OPTIMIZERS[0]}",
    )
    add("--compile", action="store_true", help="torch.compile both the unchanged and the converted models")
    add_common(group, "--import")


def run(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.profile import function_named, profile, profile_axes, profile_dtypes

    check_outputs(arguments)
    options = vars(arguments)
    axes = profile_axes(
        function_named(arguments.target), arguments.forward, arguments.optimizer, arguments.compile, arguments.skip
    )
    modes = profile_dtypes(arguments.dtypes, arguments.reference)
    request = request_of(argparse.Namespace(**{**options, "axes": axes, **modes}))
    return measure_and_tell(request, arguments, profile)
