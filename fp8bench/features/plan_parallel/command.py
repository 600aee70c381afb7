"""`fp8bench plan-parallel`: ranks the ways to divide a training among GPUs, by formulas checked on published figures.

`--topology h100` names a shipped file. Such a file describes the GPUs and their links; units may follow the numbers.

node: 8          # GPUs of a node
memory: 80 GiB   # of each of them
inside: 450      # GB/s that a GPU sends to others of its node, one way
between: 50      # GB/s that it sends to other nodes
bf16: 660        # TFLOP/s that products reach: fp8bench suite ceilings measures them
fp8: 980
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fp8bench import units
from fp8bench.cli import option_types as types
from fp8bench.cli.config_file import read_mapping
from fp8bench.cli.options import add_common
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.cli.streams import complain
from fp8bench.errors import EXIT_FAILED, EXIT_OK, UnknownName, UsageError
from fp8bench.features.plan_parallel.formulas import (
    STATES,
    Checkpointing,
    Load,
    ParallelLayout,
    Topology,
)
from fp8bench.features.plan_parallel.models import DEFAULT_SEQUENCE, KEYS, NAMES, parse_model, usual_sequence
from fp8bench.features.plan_parallel.ranking import (
    RECIPES,
    Answer,
    MeasuredTraining,
    ParallelQuestion,
    calibrate,
    ranking,
    with_least_checkpointing,
    with_rate,
)
from fp8bench.features.plan_parallel.view import page_of, page_of_counts, rows_of, value_of, values_of
from fp8bench.files import read_file
from fp8bench.model.request import whole_number

_AUTO = "auto"
EXAMPLES = (
    "fp8bench plan-parallel llama3-8b --gpus 8,64,512 --topology h100",
    "fp8bench plan-parallel layers=48,width=6144,heads=48 --gpus 64 --topology h100",
)
FIRST_OPTIONS = "--gpus --topology --batch --sequence --dtype --calibrate --recipe --top --json --csv --explain"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists every way to divide a training among N GPUs (DDP, FSDP, TP with sequence parallelism, PP, CP),"
        " with each GPU's memory and tokens per second from formulas. --calibrate adds a band to the pace: "
        "the formulas' error on published machines that were held out. Measures nothing."
    )
    parser.epilog = "Exit codes: 0 fine; 2 wrong usage; 3 no way fits."
    add = parser.add_argument
    words = "sizes like layers=32,width=4096,heads=32 or a maker of yours like net.py:make,heads=32"
    add("model", metavar="MODEL", help=f"one of {', '.join(NAMES)}; {words}")
    add(
        "--gpus",
        type=_gpu_counts,
        required=True,
        metavar="N,N",
        help="how many GPUs; several counts are compared: 8,64,512",
    )
    words = f"{', '.join(_topology_names())}, or YAML that describes the GPUs: node, memory, inside, between, bf16, fp8"
    add("--topology", type=types.path, required=True, metavar="FILE", help=words)
    words = "sequences of a step, of all GPUs together; default 8 times --gpus"
    add("--batch", type=types.whole(whole_number(1)), metavar="N", help=words)
    words = f"tokens of a sequence; default {DEFAULT_SEQUENCE}, or the model's own"
    add("--sequence", type=types.whole(whole_number(1, 1 << 24)), metavar="N", help=words)
    add("--dtype", choices=("bf16", "fp8"), default="bf16", help="dtype of the products in blocks; default bf16")
    words = "bytes a weight: fp32 keeps 16, fp8-lm 6 (fp16 weights and second moments, FP8 gradients and first ones)"
    add("--states", choices=[*STATES], default="fp32", help=words)
    words = "memory of RLHF: next to the model (actor) a critic that trains, a reference and a reward model, as large"
    add("--rlhf", action="store_true", help=words)
    words = "copies (DDP) share out master weights and moments, and keep weights and gradients whole: ZeRO-1"
    add("--zero-1", action="store_true", help=words)
    words = "a whole training measured on such GPUs, in tokens/s of each: llama3-8b,FSDP8,6667,dtype=bf16,batch=16"
    add("--calibrate", metavar="MODEL,LAYOUT,PACE", help=words)
    words = "how FP8 products are scaled, which sets their rate from bf16's; default: the file's rate, else tensorwise"
    add("--recipe", choices=[*RECIPES], help=words)
    words = "the loss is compiled, and takes a third of the memory, as torchtitan's from April 2025 on"
    add("--compiled-loss", action="store_true", help=words)
    words = "which activations backward computes again; default auto: the least with which something fits"
    add("--checkpointing", choices=(_AUTO, *Checkpointing), default=_AUTO, help=words)
    add("--top", type=types.whole(whole_number(1)), default=10, metavar="N", help="number of ways to show; default 10")
    add_common(parser, "--json", help="print all ways as JSON instead")
    add_common(parser, "--explain")
    add_common(parser, "--csv", help="also write a row for each way to this file; '-' prints them instead")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    answers = [_answer(question, arguments.checkpointing) for question in _questions(arguments)]
    if len(answers) == 1:
        ((question, plans),) = answers
        page = partial(page_of, question, plans[: arguments.top])
        value: Callable[[], object] = partial(value_of, question, plans)
    else:
        page = partial(page_of_counts, answers)
        value = partial(values_of, answers)
    tell(arguments, page, value, partial(rows_of, answers))
    return EXIT_OK if any(plans[0].fits for _, plans in answers) else EXIT_FAILED


def _answer(question: ParallelQuestion, checkpointing: str) -> Answer:
    """Ranks the layouts, and returns them with the question's checkpointing. Raises UsageError if none divides
    evenly."""
    answer = with_least_checkpointing(question) if checkpointing == _AUTO else (question, ranking(question))
    if not answer[1]:
        raise UsageError(
            f"{question.batch} sequences cannot be divided evenly among {question.gpus} GPUs. Give --batch a "
            "multiple of them."
        )
    return answer


def _gpu_counts(text: str) -> tuple[int, ...]:
    counts = tuple(map(types.whole(whole_number(1, 1 << 20)), types.words(text)))
    return tuple(dict.fromkeys(counts))


def _questions(arguments: argparse.Namespace) -> list[ParallelQuestion]:
    # 1. The contents of a GPU, before anything is divided.
    model = parse_model(arguments.model)
    level = Checkpointing.NONE if arguments.checkpointing == _AUTO else Checkpointing(arguments.checkpointing)
    if arguments.states != "fp32" and arguments.dtype != "fp8":
        raise UsageError(f"--states {arguments.states} goes with FP8 products: give --dtype fp8 too.")
    sequence = arguments.sequence or usual_sequence(model)
    load = Load(
        sequence,
        1,
        checkpointing=level,
        precision=arguments.dtype,
        states=arguments.states,
        fused_loss=arguments.compiled_loss,
        rlhf=arguments.rlhf,
        zero_one=arguments.zero_1,
    )
    # 2. Speeds: published, or calibrated by a measured training.
    topology = read_topology(arguments.topology)
    by = _training(arguments.calibrate, load) if arguments.calibrate is not None else None
    if arguments.recipe and "fp8" not in (load.precision, by.load.precision if by is not None else ""):
        raise UsageError(
            "--recipe sets how FP8 products are scaled, and this plan has no FP8 products. Add --dtype fp8."
        )
    recipe = arguments.recipe or next(iter(RECIPES))
    if by is not None:
        topology = calibrate(topology, by, recipe)
    elif arguments.recipe:
        topology = with_rate(topology, topology.bf16, recipe)
    # 3. A question for each number of GPUs; eight sequences per GPU without an explicit batch.
    return [
        ParallelQuestion(model, gpus, arguments.batch or 8 * gpus, load, topology, by, recipe)
        for gpus in arguments.gpus
    ]


_CUTS = {"ddp": "copies", "fsdp": "shards", "tp": "tensor", "pp": "pipeline", "cp": "context", "vp": "virtual"}
_TRAINING = (
    "Expected MODEL,LAYOUT,PACE like llama3-8b,FSDP8,6667 or llama3-70b,FSDP32+TP8,597, then what differs from the "
    "plan: dtype=, sequence=, checkpointing=, batch= (sequences of a step in all), micro-batches="
)


def _training(text: str, planned: Load) -> MeasuredTraining:
    # 1. A custom model may contain commas: known keys of models belong to it.
    first, *words = (word.strip() for word in text.split(","))
    while words and words[0].partition("=")[0] in KEYS:
        first += f",{words.pop(0)}"
    words.insert(0, first)
    if len(words) < 3:
        raise UsageError(f"--calibrate {text!r:.80} is too short. {_TRAINING}.")
    # 2. The layout, with each part at most once.
    cuts: dict[str, int] = {}
    for cut in words[1].split("+"):
        match = re.fullmatch(r"([a-z]+) ?([1-9]\d{0,5})", cut.strip().lower(), re.ASCII)
        if match is None or match[1] not in _CUTS or _CUTS[match[1]] in cuts:
            raise UsageError(f"--calibrate: {cut!r:.80} is not a part of a layout. {_TRAINING}.")
        cuts[_CUTS[match[1]]] = int(match[2])
    layout, named = ParallelLayout(**cuts), dict(word.partition("=")[::2] for word in words[3:])
    # 3. Pace and sizes, which must divide evenly: a rounded one would describe another training.
    positive = types.whole(whole_number(1, 1 << 30))
    try:
        pace = float(words[2])
        if not (0 < pace < math.inf) or named.keys() - {"dtype", "sequence", "checkpointing", "batch", "micro-batches"}:
            raise ValueError
        local = positive(named.get("batch", str(8 * layout.gpus))) * layout.inner / layout.gpus
        pieces = positive(named.get("micro-batches", str(int(local) if layout.pipeline > 1 else 1)))
        precision = named.get("dtype", planned.precision)
        if local != int(local) or local % pieces or precision not in ("bf16", "fp8"):
            raise ValueError
        load = replace(
            planned,
            sequence=positive(named.get("sequence", str(planned.sequence))),
            local=int(local),
            micro_batches=pieces,
            precision=precision,
            states="fp32",
            rlhf=False,
            checkpointing=Checkpointing(named.get("checkpointing", planned.checkpointing)),
        )
    except (ValueError, argparse.ArgumentTypeError):
        raise UsageError(f"--calibrate {text!r:.200} cannot be read, or does not divide evenly. {_TRAINING}.") from None
    return MeasuredTraining(parse_model(words[0]), layout, load, pace)


def _topology_names() -> list[str]:
    return sorted(file.stem for file in (Path(__file__).parent / "topologies").glob("*.yaml"))


_FORM = "six lines: node, memory, inside, between, bf16 and fp8, like `node: 8` and `memory: 80 GiB`"
# The factor and the unit of each line; node and memory are parsed separately.
_FACTORS = {"inside": 1e9, "between": 1e9, "bf16": 1e12, "fp8": 1e12}
_UNIT = {"inside": "GB/s", "between": "GB/s", "bf16": "TFLOP/s", "fp8": "TFLOP/s"}
# Less memory than this means that the unit was forgotten.
_LEAST_MEMORY = 1 << 30
_NAMES = ("node", "memory", *_FACTORS)


def read_topology(file: Path) -> Topology:
    """Reads a file, or the shipped one with that name. Raises UsageError."""
    if not file.suffix and not file.exists():
        if file.name not in _topology_names():
            raise UnknownName(
                "topology", str(file)[:80], _topology_names(), f"{', '.join(_topology_names())}, or a YAML file"
            )
        name, file = file.name, Path(__file__).parent / "topologies" / f"{file.name}.yaml"
        complain(f"--topology {name}: {read_file(file).decode().splitlines()[0].removeprefix('# ')} ({file})")
    values: dict[str, float] = {}
    for name, value in read_mapping("--topology", file, _FORM).items():
        if name not in _NAMES:
            raise UsageError(f"{file}: unknown key {name!r:.80}. Known: {', '.join(_NAMES)}.")
        values[name] = _value(file, name, value)
    missing = [name for name in _NAMES if name not in values]
    if missing:
        raise UsageError(f"{file}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. Give {_FORM}.")
    return Topology(node=int(values.pop("node")), **values)


def _value(file: Path, name: str, value_given: Any) -> float:
    text = value_given.strip() if isinstance(value_given, str) else ""
    try:
        if name == "memory":
            if (size := float(units.bytes_of(text))) >= _LEAST_MEMORY:
                return size
            raise ValueError(text)
        value = float(text.removesuffix(_UNIT.get(name, "")))
        if math.isfinite(value) and value > 0 and (name != "node" or value == int(value) <= 1 << 20):
            return value * _FACTORS.get(name, 1)
    except ValueError:
        pass
    expected = {"node": "a whole number of GPUs from 1 on", "memory": "a size like 80 GiB, 1 GiB or more"}.get(
        name, f"a number above 0, in {_UNIT.get(name)}"
    )
    raise UsageError(f"{file}: {name}: expected {expected}, got {value_given!r:.80}.")
