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
        "Says how much of a model's products could be in low precision, and what not and why; then measures a step of "
        "the model as it came beside steps of copies whose layers multiply in other precisions."
    )
    parser.epilog = "Exit codes: 0 fine, 2 wrong usage, 3 a case failed or nothing was measured, 130 interrupted."
    parser.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that gives (model, batch), or (model, batch, loss); file.py:function, "
        "too. A batch is a tensor, a tuple of what the model takes by position, or a mapping by name",
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
        help="what stays unchanged: kinds of layers (head, linear, conv2d), or paths of modules with * and ?",
    )
    add(
        "--precision-map",
        type=types.precision_map,
        default=(),
        metavar="LAYER=DTYPE,...",
        help="layers that take another precision than their copy's: a kind, a path of a module "
        "(model.layers.0.mlp.up_proj) "
        "or a prefix of paths; or a file with one on each line. untouched: it stays unchanged",
    )
    add("--forward", action="store_true", help="forward alone, without gradients; else a training step")
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default=OPTIMIZERS[0],
        metavar="NAME",
        help=f"of the training step: {', '.join(OPTIMIZERS)}; default {OPTIMIZERS[0]}",
    )
    add("--compile", action="store_true", help="torch.compile the model, both unchanged and converted")
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
