"""`fp8bench plan-parallel`: how to cut a training for many GPUs, by formulas held against what is published."""

from __future__ import annotations

import argparse
from functools import partial

from fp8bench.analysis.parallel.published import held, models, published
from fp8bench.analysis.parallel.ranking import Asked, checkpointed, ranking, rulings
from fp8bench.cli import option_types as types
from fp8bench.cli.grammar import shared
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.cli.topology_file import read_topology
from fp8bench.errors import EXIT_FAILED, EXIT_OK, UnknownName, UsageError
from fp8bench.model.parallel import Checkpointing, Load, Transformer
from fp8bench.model.request import whole_number
from fp8bench.nn.sizes import SIZES
from fp8bench.report.data.parallel import as_csv, as_json, held_as_csv, held_as_json
from fp8bench.report.terminal.parallel import page_of, page_of_held

_AUTO = "auto"
_SEQUENCE = 8192


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.description = (
        "Every way to divide a training among N GPUs (DDP, FSDP, TP with sequence parallelism, PP, CP): memory and "
        "tokens a second of each GPU by formulas, each with the band in which they describe published trainings. "
        "Measures nothing."
    )
    parser.epilog = (
        "Exit codes: 0 fine; 2 wrong usage; 3 no way fits, or with --check a published row is out of its band."
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help=f"one of {', '.join((*models(), *SIZES))}")
    add("--gpus", type=types.whole(whole_number(1, 1 << 20)), metavar="N", help="how many GPUs")
    words = "YAML that describes the GPUs: node, memory, inside, between, bf16, fp8 (docs/plan-parallel.md)"
    add("--topology", type=types.path, metavar="FILE", help=words)
    words = "sequences of a step, of all GPUs together; default 8 times --gpus"
    add("--batch", type=types.whole(whole_number(1)), metavar="N", help=words)
    words = f"tokens of a sequence; default {_SEQUENCE}, or a size's own"
    add("--sequence", type=types.whole(whole_number(1, 1 << 24)), metavar="N", help=words)
    add("--dtype", choices=("bf16", "fp8"), default="bf16", help="dtype of the products in blocks; default bf16")
    words = "which activations backward computes again; default auto: the least with which something fits"
    add("--checkpointing", choices=(_AUTO, *Checkpointing), default=_AUTO, help=words)
    add("--top", type=types.whole(whole_number(1)), default=10, metavar="N", help="how many ways are shown; default 10")
    words = "hold the formulas against published trainings, row by row, instead"
    add("--check", action="store_true", help=words)
    shared(parser, "--json", help="print all ways as JSON instead")
    shared(parser, "--explain")
    shared(parser, "--csv", help="also write a row for each way to this file; '-' prints them instead")


def run(arguments: argparse.Namespace) -> int:
    """Rank, or check; ends with 3 where nothing fits, or a row has left its band."""
    check_outputs(arguments)
    if arguments.check:
        _check_alone(arguments)
        rows = tuple(held(published()))
        tell(arguments, partial(page_of_held, rows), partial(held_as_json, rows), partial(held_as_csv, rows))
        return EXIT_OK if all(one.inside for one in rows) else EXIT_FAILED
    asked = _asked(arguments)
    if arguments.checkpointing == _AUTO:
        asked, plans = checkpointed(asked)
    else:
        plans = ranking(asked)
    if not plans:
        raise UsageError(
            f"{asked.batch} sequences cannot be dealt out evenly to {asked.gpus} GPUs in any way. Give --batch a "
            "multiple of them."
        )
    page = partial(page_of, asked, plans[: arguments.top], rulings(asked))
    tell(arguments, page, partial(as_json, asked, plans, rulings(asked)), partial(as_csv, asked, plans))
    return EXIT_OK if plans[0].fits else EXIT_FAILED


def _check_alone(arguments: argparse.Namespace) -> None:
    """The published trainings have settings of their own."""
    for name in ("model", "gpus", "topology", "batch", "sequence"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--check is about published trainings, and --{name} was given too. Leave one out.")


def _asked(arguments: argparse.Namespace) -> Asked:
    for name in ("model", "gpus", "topology"):
        if getattr(arguments, name) is None:
            raise UsageError(f"--{name} is missing: a plan needs --model, --gpus and --topology. Or give --check.")
    model = _model(arguments.model)
    own = SIZES[model.name].sequence if model.name in SIZES else _SEQUENCE
    level = Checkpointing.NONE if arguments.checkpointing == _AUTO else Checkpointing(arguments.checkpointing)
    load = Load(arguments.sequence or own, 1, checkpointing=level, precision=arguments.dtype)
    batch = arguments.batch or 8 * arguments.gpus
    return Asked(model, arguments.gpus, batch, load, read_topology(arguments.topology))


def _model(name: str) -> Transformer:
    known = models()
    if name in known:
        return known[name]
    if name not in SIZES:
        raise UnknownName("model", name, [*known, *SIZES])
    size = SIZES[name]
    return Transformer(
        name, size.vocabulary, size.width, size.layers, size.heads, size.key_heads, size.hidden, size.modern
    )
