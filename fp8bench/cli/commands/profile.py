"""`fp8bench profile`: measures a user's model, unchanged and with its products in other precisions."""

from __future__ import annotations

import argparse

from fp8bench.cli import option_types as types
from fp8bench.cli.commands.suite import OUTPUT_OPTIONS, PASS_OPTIONS, measure_and_print
from fp8bench.cli.options import add_common_options, make_request
from fp8bench.cli.outputs import check_outputs
from fp8bench.workloads.model import OPTIMIZERS

EXAMPLES = ("fp8bench profile net.py:make --dtypes bf16,fp8  # make() gives (model, batch)",)
# --help shows only these options, and --help-all shows every option.
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
    _add_model_options(parser.add_argument_group("what to measure"))
    measurement_options_group = parser.add_argument_group("how")
    add_common_options(
        measurement_options_group,
        "--quick",
        "--budget",
        "--rounds",
        "--seed",
        "--threads",
        "--case-timeout",
        *PASS_OPTIONS,
        "--no-isolation",
    )
    output_option_group = parser.add_argument_group("where")
    add_common_options(output_option_group, "--store", *OUTPUT_OPTIONS)


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    add_option = group.add_argument
    add_common_options(group, "--dtypes", help="precisions of the copies, also accelerate-fp8; default bf16,fp8")
    add_common_options(group, "--devices")
    add_common_options(
        group, "--reference", help="the precision to compare with; default untouched, the unchanged model"
    )
    add_common_options(group, "--backend")
    add_option(
        "--skip",
        type=types.words,
        default=(),
        metavar="A,B",
        help="layers to leave unchanged: kinds (head, linear, conv2d), or module paths with * and ?",
    )
    add_option(
        "--precision-map",
        type=types.precision_map,
        default=(),
        metavar="LAYER=DTYPE,...",
        help=(
            "layers whose precision differs from their copy's: a kind, a module path (model.layers.0.mlp.up_proj) "
            "or the beginning of paths; or a file with one per line. untouched leaves a layer unchanged"
        ),
    )
    add_option(
        "--forward", action="store_true", help="measure forward only, without gradients; default a training step"
    )
    add_option(
        "--optimizer",
        choices=OPTIMIZERS,
        default=OPTIMIZERS[0],
        metavar="NAME",
        help=f"the step's optimizer: {', '.join(OPTIMIZERS)}; default {OPTIMIZERS[0]}",
    )
    add_option("--compile", action="store_true", help="torch.compile both the unchanged and the converted models")
    add_common_options(group, "--import")


def run(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.profile import check_function_name, make_profile_axes, profile, profile_dtypes

    check_outputs(arguments)
    options = vars(arguments)
    axes = make_profile_axes(
        check_function_name(arguments.target), arguments.forward, arguments.optimizer, arguments.compile, arguments.skip
    )
    # The suite, the dtypes and the reference. Dtypes and reference replace the options, which may be empty.
    comparison_fields = profile_dtypes(arguments.dtypes, arguments.reference)
    request = make_request(argparse.Namespace(**{**options, "axes": axes, **comparison_fields}))
    return measure_and_print(request, arguments, profile)
