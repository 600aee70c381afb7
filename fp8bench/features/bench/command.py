"""`fp8bench bench`: compares your functions with a reference, on the same inputs in the same rounds."""

from __future__ import annotations

import argparse
from pathlib import Path

from fp8bench.cli.commands.suite import measure_and_print
from fp8bench.cli.options import add_common_options, make_request
from fp8bench.cli.outputs import check_outputs
from fp8bench.errors import EXIT_OK, EXIT_REGRESSION
from fp8bench.features.bench.job import WORKLOAD_MODULE, check_callable_names, choose_axes
from fp8bench.features.bench.values import DTYPES
from fp8bench.model import Request, Run
from fp8bench.model.run import BENCH
from fp8bench.model.specs import BEYOND_ROUNDING_ERROR
from fp8bench.protocols import Observer
from fp8bench.protocols.axes import COLD, HOT, ROTATING

_OUTPUT_OPTIONS = ("--explain", "--json", "--no-report")
EXAMPLES = (
    "fp8bench bench mine.py:gelu --against torch.nn.functional:gelu --shape 4096x4096 --dtype bf16",
    "fp8bench bench mine.py:fast --against ref.py:attention  # inputs(device, seed) in mine.py",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Calls your functions and a reference with the same inputs, interleaved in the same rounds. Reports "
        "for each function whether it is faster, by how much, its errors against the reference and float64, "
        "and its memory."
    )
    parser.epilog = (
        "Exit codes: 0 fine, 1 a result is wrong, 2 wrong usage, 3 a case failed or nothing was measured, "
        "130 interrupted."
    )
    add = parser.add_argument
    help_text = "the callables: file.py:function, or module:function like torch.nn.functional:silu"
    add("targets", metavar="CALLABLE", nargs="+", help=help_text)
    add("--against", required=True, metavar="CALLABLE", help="the reference that the callables are compared with")
    add(
        "--shape",
        action="append",
        default=[],
        metavar="AxB,C",
        help="shapes of random input tensors: 1024x4096,4096x1024; repeatable",
    )
    add(
        "--dtype",
        choices=DTYPES,
        metavar="NAME",
        help=f"dtype of the random tensors: {', '.join(DTYPES)}; default fp32",
    )
    add(
        "--inputs",
        metavar="SOURCE",
        help=(
            "inputs that are not random: file.py:function, which is called with the device and the seed, or a .pt, "
            ".pth or .safetensors file of tensors; default the function `inputs` in the file of a callable"
        ),
    )
    add_common_options(parser, "--devices")
    help_text = f"state of the last-level cache when a call begins: {HOT} (default), {COLD} or {ROTATING} (over copies)"
    add("--cache", choices=(HOT, COLD, ROTATING), default=HOT, metavar="STATE", help=help_text)
    for option in ("--quick", "--budget", "--seed", "--threads", "--store", *_OUTPUT_OPTIONS):
        add_common_options(parser, option)


def run(arguments: argparse.Namespace) -> int:
    from fp8bench.pipeline import execute

    check_outputs(arguments)
    # 1. Build the request of a run in which callables take the place of precisions.
    callables = check_callable_names(arguments.targets, arguments.against)
    axes = choose_axes(callables, arguments.shape, arguments.dtype, arguments.inputs, arguments.cache)
    option_values = {
        **vars(arguments),
        "suite": BENCH,
        "imports": (WORKLOAD_MODULE,),
        "reference": callables[0],
        "dtypes": callables[1:],
    }
    request = make_request(argparse.Namespace(**{**option_values, "axes": axes}))
    # 2. Measure, and keep the run to read its records afterwards.
    runs = []

    def execute_bench(request: Request, store: Path, observer: Observer, command: str) -> Run:
        runs.append(execute(request, store, observer, command, origin=BENCH))
        return runs[0]

    exit_code = measure_and_print(request, arguments, execute_bench)
    # 3. A wrong result changes the exit code only if nothing else went wrong.
    are_results_wrong = any(record.measurement(BEYOND_ROUNDING_ERROR) for run in runs for record in run.records)
    return EXIT_REGRESSION if are_results_wrong and exit_code == EXIT_OK else exit_code
