"""`fp8bench watch SCRIPT.py [ARGS]`: runs a script as Python does, and watches what it trains."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common
from fp8bench.cli.outputs import check_files
from fp8bench.cli.streams import complain
from fp8bench.errors import UsageError
from fp8bench.features.watch.script import Script, run_script
from fp8bench.files import make_store
from fp8bench.model.request import whole_number
from fp8bench.registry import precisions
from fp8bench.report.data.loggers import check_target

EXAMPLES = (
    "fp8bench watch train.py --lr 3e-4  # options before train.py are fp8bench's, those behind it the script's",
    "fp8bench watch --stream fp8.jsonl train.py --fp8  # then: fp8bench compare bf16.jsonl fp8.jsonl",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a training script unchanged, and watches each optimizer with the module that it trains, from the second "
        "step on: a row for each step, all tensors in one step per stride, alarms on stderr."
    )
    parser.epilog = "Exit codes: those of the script; 2 wrong usage, before the script begins."
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")
    words = "a new file for the lines; default watched/SCRIPT-N.jsonl. a second optimizer gets FILE.2.jsonl"
    parser.add_argument("--stream", type=types.path, metavar="FILE", help=words)
    words = "one step in every N is watched in full; default 10"
    parser.add_argument("--stride", type=types.whole(whole_number(1)), default=10, metavar="N", help=words)
    words = "what the script trains in: layers that only cast inside are measured in its recipe; default fp32"
    parser.add_argument("--precision", default="fp32", metavar="PRECISION", help=words)
    words = "run watched steps of compiled modules without compilation, to see inside; their numbers differ slightly"
    parser.add_argument("--eager", action="store_true", help=words)
    words = "run a command of the shell for each alarm, with FP8BENCH_ALARM, _RULE, _ARM and _STEP in its environment"
    parser.add_argument("--on-alarm", default="", metavar="COMMAND", help=words)
    add_common(parser, "--log", help="log curves as they come, to tensorboard[:DIR] or wandb[:PROJECT]; repeatable")
    add_common(parser, "--store", help="where streams are kept; default .fp8bench")


def run(arguments: argparse.Namespace) -> Callable[[], int]:
    path = Path(arguments.script)
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{path} is a notebook, which Python cannot run. In a cell, put the training loop into "
            "`with fp8bench.watch(model, optimizer):`, or convert it by `jupyter nbconvert --to script`."
        )
    if not path.is_file():
        raise UsageError(f"there is no file {path}. Give the script first, then its arguments.")
    options = {
        "stride": arguments.stride,
        "eager": arguments.eager,
        "precision": precisions.canonical(arguments.precision),
        "on_alarm": arguments.on_alarm,
        "log": tuple(map(str, arguments.log)),
    }
    for target in arguments.log:
        check_target(target)
    # Launchers such as torchrun start a process per rank; only the first writes. Others may set RANK to anything.
    number = os.environ.get("RANK", "")
    rank = int(number) if number.isdecimal() else 0
    stream = arguments.stream.absolute() if arguments.stream else _new_stream(arguments.store, path.stem, rank)
    if rank == 0:
        check_files({"stream": stream})
        if stream.exists():
            raise UsageError(f"{stream} exists, and streams are never overwritten. Give another --stream FILE.")
    store, words = arguments.store.absolute(), tuple(arguments.arguments)
    script = Script(str(path.absolute()), arguments.script, words, stream, store, options, rank == 0)
    return partial(run_script, script, complain)


def _new_stream(store: Path, stem: str, rank: int) -> Path:
    folder = store.absolute() / "watched"
    if rank == 0:
        make_store(store)
        folder.mkdir(exist_ok=True)
    return next(path for number in itertools.count(1) if not (path := folder / f"{stem}-{number}.jsonl").exists())
