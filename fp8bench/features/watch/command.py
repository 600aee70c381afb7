"""`fp8bench watch SCRIPT.py [ARGS]`: runs a training script as Python does, and watches what it trains."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common_options
from fp8bench.cli.outputs import check_output_files
from fp8bench.cli.streams import write_sentence_to_stderr
from fp8bench.errors import UsageError
from fp8bench.features.watch.script import Script, run_script
from fp8bench.files import make_store
from fp8bench.model.request import whole_number
from fp8bench.registry import precisions
from fp8bench.report.data.loggers import check_log_target

EXAMPLES = (
    "fp8bench watch train.py --lr 3e-4  # options after train.py are passed to the script",
    "fp8bench watch --stream fp8.jsonl train.py --fp8  # then: fp8bench compare bf16.jsonl fp8.jsonl",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a training script unchanged, and watches each optimizer with its module, from the second "
        "step on. Writes a row for each step, measures all tensors once per stride, and prints alarms to stderr."
    )
    parser.epilog = "Exit codes: those of the script; 2 wrong usage, before the script starts."
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the arguments of the script")
    parser.add_argument(
        "--stream",
        type=types.path,
        metavar="FILE",
        help="the new file for the rows; default watched/SCRIPT-N.jsonl. A second optimizer gets FILE.2.jsonl",
    )
    parser.add_argument(
        "--stride",
        type=types.whole(whole_number(1)),
        default=10,
        metavar="N",
        help="measure all tensors in one of every N steps; default 10",
    )
    parser.add_argument(
        "--precision",
        default="fp32",
        metavar="PRECISION",
        help="the precision in which the script trains, or that you consider, such as fp8: measures what casting each "
        "layer to it loses; default fp32",
    )
    parser.add_argument(
        "--eager",
        action="store_true",
        help="run measured steps of compiled modules without compilation, to see their tensors; numbers differ "
        "slightly",
    )
    parser.add_argument(
        "--live",
        type=types.path,
        metavar="FILE",
        help="write the page there while the script runs, for a browser. A second optimizer gets FILE.2.html",
    )
    parser.add_argument(
        "--on-alarm",
        default="",
        metavar="COMMAND",
        help="run a shell command for each alarm, with FP8BENCH_ALARM, _RULE, _ARM and _STEP in its environment",
    )
    add_common_options(
        parser, "--log", help="log curves during training to tensorboard[:DIR] or wandb[:PROJECT]; repeatable"
    )
    add_common_options(parser, "--store", help="the folder for streams; default .fp8bench")


def run(arguments: argparse.Namespace) -> Callable[[], int]:
    path = Path(arguments.script)
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{path} is a notebook, which Python cannot run. In a cell, put the training loop into "
            "`with fp8bench.watch(model, optimizer):`, or convert it by `jupyter nbconvert --to script`."
        )
    if not path.is_file():
        raise UsageError(f"the file {path} does not exist. Give the script first, then its arguments.")
    options = {
        "stride": arguments.stride,
        "eager": arguments.eager,
        "precision": precisions.find_canonical_name(arguments.precision),
        "on_alarm": arguments.on_alarm,
        "log": tuple(map(str, arguments.log)),
        "live": arguments.live and arguments.live.absolute(),
    }
    for target in arguments.log:
        check_log_target(target)
    # Launchers such as torchrun start one process per rank and set RANK. Only rank 0 writes. Other programs may set
    # RANK to any text.
    rank_text = os.environ.get("RANK", "")
    rank = int(rank_text) if rank_text.isdecimal() else 0
    stream = arguments.stream.absolute() if arguments.stream else _choose_stream_file(arguments.store, path.stem, rank)
    if rank == 0:
        check_output_files({"stream": stream, "live": arguments.live})
        if stream.exists():
            raise UsageError(f"{stream} exists, and streams are never overwritten. Give another --stream FILE.")
    store, script_arguments = arguments.store.absolute(), tuple(arguments.arguments)
    script = Script(str(path.absolute()), arguments.script, script_arguments, stream, store, options, rank == 0)
    return partial(run_script, script, write_sentence_to_stderr)


def _choose_stream_file(store: Path, stem: str, rank: int) -> Path:
    folder = store.absolute() / "watched"
    if rank == 0:
        make_store(store)
        folder.mkdir(exist_ok=True)
    return next(path for number in itertools.count(1) if not (path := folder / f"{stem}-{number}.jsonl").exists())
