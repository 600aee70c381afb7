"""`fp8bench plan-parallel`: how to cut a training for many GPUs, by formulas held against what is published.

A file that says what joins GPUs: one number a line.

node: 8          # GPUs of a node
memory: 80 GiB   # of each of them
inside: 450      # GB/s that a GPU sends to others of its node, one way
between: 50      # GB/s that it sends to other nodes
bf16: 660        # TFLOP/s that products reach: fp8bench doctor --ceilings measures them
fp8: 980
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path

import yaml

from fp8bench import units
from fp8bench.cli import option_types as types
from fp8bench.cli.config_file import Kind, items, place, read_mapping, scalar, shown
from fp8bench.cli.options import shared
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.errors import EXIT_FAILED, EXIT_OK, UnknownName, UsageError
from fp8bench.features.plan_parallel.formulas import Checkpointing, Load, Topology, Transformer
from fp8bench.features.plan_parallel.ranking import Asked, checkpointed, models, ranking, rulings
from fp8bench.features.plan_parallel.view import as_csv, as_json, page_of
from fp8bench.model.request import whole_number
from fp8bench.nn.sizes import SIZES

_AUTO = "auto"
_SEQUENCE = 8192


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Every way to divide a training among N GPUs (DDP, FSDP, TP with sequence parallelism, PP, CP): memory and "
        "tokens a second of each GPU by formulas, each with the band in which they describe published trainings. "
        "Measures nothing."
    )
    parser.epilog = "Exit codes: 0 fine; 2 wrong usage; 3 no way fits."
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
    shared(parser, "--json", help="print all ways as JSON instead")
    shared(parser, "--explain")
    shared(parser, "--csv", help="also write a row for each way to this file; '-' prints them instead")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
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


def _asked(arguments: argparse.Namespace) -> Asked:
    for name in ("model", "gpus", "topology"):
        if getattr(arguments, name) is None:
            raise UsageError(f"--{name} is missing: a plan needs --model, --gpus and --topology.")
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


_FORM = "Expected six lines: node, memory, inside, between, bf16 and fp8, like `node: 8` and `memory: 80 GiB`."
_KIND = Kind("--topology", "description of GPUs", _FORM)
# What a number of each line is multiplied by; node and memory are read otherwise.
_FACTORS = {"inside": 1e9, "between": 1e9, "bf16": 1e12, "fp8": 1e12}
# Less is a number without its unit.
_LEAST_MEMORY = 1 << 30
_NAMES = ("node", "memory", *_FACTORS)


def read_topology(file: Path) -> Topology:
    """Raises UsageError with file and line."""
    found: dict[str, float] = {}
    for name, key, node in items(file, read_mapping(file, _KIND), _KIND):
        if name not in _NAMES:
            raise UsageError(f"{place(file, key)}: unknown key {name!r:.80}. Known: {', '.join(_NAMES)}.")
        found[name] = _value(file, name, node)
    missing = [name for name in _NAMES if name not in found]
    if missing:
        raise UsageError(f"{file}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. {_FORM}")
    return Topology(node=int(found.pop("node")), **found)


def _value(file: Path, name: str, node: yaml.Node) -> float:
    text = scalar(file, node).strip() if isinstance(node, yaml.ScalarNode) else ""
    try:
        if name == "memory":
            if (size := float(units.bytes_of(text))) >= _LEAST_MEMORY:
                return size
            raise ValueError(text)
        value = float(text)
        if math.isfinite(value) and value > 0 and (name != "node" or value == int(value) <= 1 << 20):
            return value * _FACTORS.get(name, 1)
    except ValueError:
        pass
    expected = {"node": "a whole number of GPUs from 1 on", "memory": "a size like 80 GiB, 1 GiB or more"}.get(
        name, "a number above 0"
    )
    raise UsageError(f"{place(file, node)}: {name}: expected {expected}, got {shown(node)}.")
