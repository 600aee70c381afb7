"""`fp8bench ablate`: measures what each option of a step saves: alone, added to others, and left out of all."""

from __future__ import annotations

import argparse
from dataclasses import replace

from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common_options, make_request
from fp8bench.cli.outputs import CommandResult, check_outputs
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.errors import EXIT_FAILED, EXIT_OK, UsageError
from fp8bench.features.ablate.kind import AblationKind
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.interrupts import interrupt_only_once
from fp8bench.model.words import UNTOUCHED
from fp8bench.workloads.model import Model

EXAMPLES = (
    "fp8bench ablate transformer --options bf16,compile,cached-weights",
    "fp8bench ablate net.py:make --options bf16,compile --set pass=forward",
)
FIRST_OPTIONS = "--options --reference --set --quick --budget --device --store --json --csv --md"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures a step without options, with each option alone, with each added to the earlier "
        "ones, and with each left "
        "out, all in the same rounds. Reports what each option saves, and whether options need one another or overlap."
    )
    parser.epilog = "Exit codes: 0 fine, 2 wrong usage, 3 the step without options failed, 130 interrupted."
    add = parser.add_argument
    target_help_text = "a suite, a .py file with your suite, or MODULE:FUNCTION of a model, as in profile"
    add("target", metavar="SUITE", help=target_help_text)
    option_names = "compile, checkpointing, cached-weights, fused-optimizer, static-kv, channels_last, or AXIS=VALUE"
    add(
        "--options",
        required=True,
        type=types.words,
        metavar="A,B",
        help=f"precisions, {option_names}, in the order in which they are added",
    )
    add(
        "--reference",
        metavar="DTYPE",
        help="the precision of the step without options; default fp32, or your model unchanged",
    )
    add_common_options(parser, "--set", help="a value of an axis, for all arms")
    add_common_options(parser, "--quick")
    add_common_options(parser, "--budget")
    add_common_options(parser, "--rounds")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    for option in ("--data", "--import", "--seed", "--threads", "--case-timeout", "--no-isolation"):
        add_common_options(parser, option)
    add_common_options(parser, "--store", help="as in suite")
    add_common_options(parser, "--explain")
    add_common_options(parser, "--json", help="print all results, with every round, as JSON instead of tables")
    add_common_options(parser, "--md", help="also write the result to PATH as Markdown")
    add_common_options(
        parser, "--csv", help="also write a row for each arm to PATH; '-' prints the rows instead of tables"
    )


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    with interrupt_only_once():
        return answer(arguments, TERMINAL_JOB_OBSERVER).print_result(arguments)


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    from fp8bench.features.ablate.run import ablate, store_ablation

    # 1. A user's model is measured by the suite `model`; the reference is its unchanged copy.
    is_user_model = ":" in arguments.target
    axes = dict(arguments.axes)
    if is_user_model and "make" in axes:
        raise UsageError(f"--set make={axes['make'][0]} names a second model. Omit it.")
    if is_user_model:
        axes["make"] = (arguments.target,)
    # 2. The arm without options is an ordinary run, so an ablation accepts the options of a suite.
    arguments.suite = arguments.target
    request = replace(
        make_request(arguments),
        suite=Model.name if is_user_model else arguments.target,
        dtypes=(arguments.reference or (UNTOUCHED if is_user_model else "fp32"),),
        devices=(arguments.device,) if arguments.device else (),
        reference=None,
        axes=tuple(axes.items()),
    )
    # 3. Store before printing, so that a closed pipe loses no measurement.
    stored_ablation = store_ablation(ablate(request, arguments.options, arguments.store, observer), arguments.store)
    exit_code = EXIT_OK if stored_ablation.arms[0].rounds else EXIT_FAILED
    return CommandResult(stored_ablation, *AblationKind().view(stored_ablation), code=exit_code)
