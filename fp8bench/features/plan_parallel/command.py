"""`fp8bench plan-parallel`: ranks layouts that divide a training among GPUs, by formulas checked on published figures.

`--topology h100` names a shipped file. A topology file describes GPUs and their links; numbers may have units:

node: 8          # GPUs in each node
memory: 80 GiB   # of each GPU
inside: 450      # GB/s that a GPU sends to others in its node, one way
between: 50      # GB/s that it sends to other nodes
bf16: 660        # TFLOP/s that matrix products reach, measured by `fp8bench suite ceilings`
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
from fp8bench.cli.config_file import read_config_mapping
from fp8bench.cli.options import add_common_options
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.cli.streams import write_sentence_to_stderr
from fp8bench.errors import EXIT_FAILED, EXIT_OK, UnknownName, UsageError
from fp8bench.features.plan_parallel.formulas import (
    STATE_BYTES,
    Checkpointing,
    ParallelLayout,
    StepLoad,
    Topology,
)
from fp8bench.features.plan_parallel.models import (
    DEFAULT_SEQUENCE,
    MODEL_KEYS,
    MODEL_NAMES,
    default_sequence,
    parse_model,
)
from fp8bench.features.plan_parallel.ranking import (
    FP8_RATE_RATIOS,
    LayoutRankingQuestion,
    MeasuredTraining,
    RankedLayouts,
    calibrate_topology,
    rank_layouts,
    rank_with_least_checkpointing,
    set_product_rate,
)
from fp8bench.features.plan_parallel.view import (
    encode_plan_answers,
    encode_plans,
    render_gpu_counts_page,
    render_page,
    table_rows,
)
from fp8bench.files import read_file
from fp8bench.model.request import whole_number

_AUTOMATIC_CHECKPOINTING = "auto"
EXAMPLES = (
    "fp8bench plan-parallel llama3-8b --gpus 8,64,512 --topology h100",
    "fp8bench plan-parallel layers=48,width=6144,heads=48 --gpus 64 --topology h100",
)
FIRST_OPTIONS = "--gpus --topology --batch --sequence --dtype --calibrate --recipe --top --json --csv --explain"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists every layout of a training on N GPUs (DDP, FSDP, TP with sequence parallelism, PP, CP),"
        " with memory and tokens per second of each GPU from formulas. --calibrate adds a band to the pace: "
        "the error of the formulas on held-out published machines. Measures nothing."
    )
    parser.epilog = "Exit codes: 0 fine; 2 wrong usage; 3 no layout fits."
    add = parser.add_argument
    help_text = "sizes like layers=32,width=4096,heads=32, or your model like net.py:make,heads=32"
    add("model", metavar="MODEL", help=f"one of {', '.join(MODEL_NAMES)}; {help_text}")
    add(
        "--gpus",
        type=_parse_gpu_counts,
        required=True,
        metavar="N,N",
        help="how many GPUs; several counts are compared: 8,64,512",
    )
    names = ", ".join(_list_topology_names())
    help_text = f"{names}, or YAML that describes the GPUs: node, memory, inside, between, bf16, fp8"
    add("--topology", type=types.path, required=True, metavar="FILE", help=help_text)
    help_text = "sequences per step on all GPUs together; default 8 times --gpus"
    add("--batch", type=types.whole(whole_number(1)), metavar="N", help=help_text)
    help_text = f"tokens per sequence; default that of the model, or {DEFAULT_SEQUENCE}"
    add("--sequence", type=types.whole(whole_number(1, 1 << 24)), metavar="N", help=help_text)
    add("--dtype", choices=("bf16", "fp8"), default="bf16", help="dtype of the products in blocks; default bf16")
    help_text = "stored states: fp32 takes 16 bytes per weight, fp8-lm 6 (fp16 weights and second moments, rest FP8)"
    add("--states", choices=[*STATE_BYTES], default="fp32", help=help_text)
    help_text = (
        "add RLHF's memory: besides the model (actor) a trained critic, a reference and a reward model of its size"
    )
    add("--rlhf", action="store_true", help=help_text)
    help_text = "ZeRO-1: DDP copies shard master weights and moments, and keep all weights and gradients"
    add("--zero-1", action="store_true", help=help_text)
    help_text = "a training measured on such GPUs, in tokens/s per GPU: llama3-8b,FSDP8,6667,dtype=bf16,batch=16"
    add("--calibrate", metavar="MODEL,LAYOUT,PACE", help=help_text)
    help_text = "scaling of FP8 products, which sets FP8's rate from bf16's; default: the file's rate, else tensorwise"
    add("--recipe", choices=[*FP8_RATE_RATIOS], help=help_text)
    help_text = "the loss is compiled and takes a third of the memory, as in torchtitan since April 2025"
    add("--compiled-loss", action="store_true", help=help_text)
    help_text = "how many activations backward recomputes; default auto: the fewest with which a layout fits"
    add(
        "--checkpointing",
        choices=(_AUTOMATIC_CHECKPOINTING, *Checkpointing),
        default=_AUTOMATIC_CHECKPOINTING,
        help=help_text,
    )
    add(
        "--top",
        type=types.whole(whole_number(1)),
        default=10,
        metavar="N",
        help="number of layouts to show; default 10",
    )
    add_common_options(parser, "--json", help="print all layouts as JSON instead")
    add_common_options(parser, "--explain")
    add_common_options(
        parser, "--csv", help="also write a CSV row for each layout to this file; '-' prints the rows instead"
    )


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    question_plan_pairs = [
        _rank_layouts_or_raise(question, arguments.checkpointing)
        for question in _make_layout_ranking_questions(arguments)
    ]
    if len(question_plan_pairs) == 1:
        ((question, plans),) = question_plan_pairs
        page = partial(render_page, question, plans[: arguments.top])
        value: Callable[[], object] = partial(encode_plans, question, plans)
    else:
        page = partial(render_gpu_counts_page, question_plan_pairs)
        value = partial(encode_plan_answers, question_plan_pairs)
    tell(arguments, page, value, partial(table_rows, question_plan_pairs))
    return EXIT_OK if any(plans[0].fits for _, plans in question_plan_pairs) else EXIT_FAILED


def _rank_layouts_or_raise(question: LayoutRankingQuestion, checkpointing: str) -> RankedLayouts:
    """Returns the question with the chosen checkpointing, and its ranked layouts. Raises UsageError if the batch
    divides evenly in no layout.
    """
    answer = (
        rank_with_least_checkpointing(question)
        if checkpointing == _AUTOMATIC_CHECKPOINTING
        else (question, rank_layouts(question))
    )
    if not answer[1]:
        raise UsageError(
            f"{question.batch} sequences cannot be divided evenly among {question.gpus} GPUs. Give --batch a "
            "multiple of them."
        )
    return answer


def _parse_gpu_counts(text: str) -> tuple[int, ...]:
    counts = tuple(map(types.whole(whole_number(1, 1 << 20)), types.words(text)))
    return tuple(dict.fromkeys(counts))


def _make_layout_ranking_questions(arguments: argparse.Namespace) -> list[LayoutRankingQuestion]:
    """Returns a question for each requested number of GPUs: which parallel layouts make a step of the model fastest?"""
    # 1. Describe the work of a step before it is divided among GPUs.
    model = parse_model(arguments.model)
    level = (
        Checkpointing.NONE
        if arguments.checkpointing == _AUTOMATIC_CHECKPOINTING
        else Checkpointing(arguments.checkpointing)
    )
    if arguments.states != "fp32" and arguments.dtype != "fp8":
        raise UsageError(f"--states {arguments.states} goes with FP8 products: give --dtype fp8 too.")
    sequence = arguments.sequence or default_sequence(model)
    step_load = StepLoad(
        sequence,
        1,
        checkpointing=level,
        precision=arguments.dtype,
        states=arguments.states,
        fused_loss=arguments.compiled_loss,
        rlhf=arguments.rlhf,
        zero_one=arguments.zero_1,
    )
    # 2. Take the speeds of products from the topology file, or calibrate them by a measured training.
    topology = read_topology(arguments.topology)
    training = _parse_training(arguments.calibrate, step_load) if arguments.calibrate is not None else None
    if arguments.recipe and "fp8" not in (step_load.precision, training.load.precision if training is not None else ""):
        raise UsageError(
            "--recipe sets how FP8 products are scaled, and this plan has no FP8 products. Add --dtype fp8."
        )
    recipe = arguments.recipe or next(iter(FP8_RATE_RATIOS))
    if training is not None:
        topology = calibrate_topology(topology, training, recipe)
    elif arguments.recipe:
        topology = set_product_rate(topology, topology.bf16, recipe)
    # 3. Make one `LayoutRankingQuestion` for each number of GPUs. The default batch is eight sequences per GPU.
    return [
        LayoutRankingQuestion(model, gpus, arguments.batch or 8 * gpus, step_load, topology, training, recipe)
        for gpus in arguments.gpus
    ]


_LAYOUT_FIELDS = {"ddp": "copies", "fsdp": "shards", "tp": "tensor", "pp": "pipeline", "cp": "context", "vp": "virtual"}
_TRAINING_SYNTAX = (
    "Expected MODEL,LAYOUT,PACE like llama3-8b,FSDP8,6667 or llama3-70b,FSDP32+TP8,597, then differences from the "
    "plan: dtype=, sequence=, checkpointing=, batch= (sequences per step on all GPUs), micro-batches="
)


def _parse_training(text: str, planned_load: StepLoad) -> MeasuredTraining:
    # 1. Commas separate both the parts of the text and the sizes of a model. So all leading parts with a key of
    # `MODEL_KEYS` belong to the model.
    model_text, *parts = (part.strip() for part in text.split(","))
    while parts and parts[0].partition("=")[0] in MODEL_KEYS:
        model_text += f",{parts.pop(0)}"
    parts.insert(0, model_text)
    if len(parts) < 3:
        raise UsageError(f"--calibrate {text!r:.80} is too short. {_TRAINING_SYNTAX}.")
    # 2. Parse the layout, in which each kind of division occurs at most once.
    layout_fields: dict[str, int] = {}
    for layout_part in parts[1].split("+"):
        match = re.fullmatch(r"([a-z]+) ?([1-9]\d{0,5})", layout_part.strip().lower(), re.ASCII)
        if match is None or match[1] not in _LAYOUT_FIELDS or _LAYOUT_FIELDS[match[1]] in layout_fields:
            raise UsageError(f"--calibrate: {layout_part!r:.80} is not a part of a layout. {_TRAINING_SYNTAX}.")
        layout_fields[_LAYOUT_FIELDS[match[1]]] = int(match[2])
    layout, options = ParallelLayout(**layout_fields), dict(part.partition("=")[::2] for part in parts[3:])
    # 3. Parse the pace (tokens/s per GPU) and the sizes. The batch must divide evenly, because rounded sizes would
    # describe another training.
    sizes = {"sequence": planned_load.sequence, "batch": 8 * layout.gpus, "micro-batches": 0}
    try:
        pace = float(parts[2])
        for name in sizes.keys() & options.keys():
            sizes[name] = types.whole(whole_number(1, 1 << 30))(options.pop(name))
        precision = options.pop("dtype", planned_load.precision)
        checkpointing = Checkpointing(options.pop("checkpointing", planned_load.checkpointing))
        local_sequences = sizes["batch"] * layout.gpus_per_sequence / layout.gpus
        micro_batches = sizes["micro-batches"] or (int(local_sequences) if layout.pipeline > 1 else 1)
        divides_evenly = local_sequences == int(local_sequences) > 0 and not local_sequences % micro_batches
        if options or not divides_evenly or precision not in ("bf16", "fp8") or not 0 < pace < math.inf:
            raise ValueError
    except (ValueError, argparse.ArgumentTypeError):
        raise UsageError(
            f"--calibrate {text!r:.200} cannot be read, or does not divide evenly. {_TRAINING_SYNTAX}."
        ) from None
    step_load = replace(
        planned_load,
        sequence=sizes["sequence"],
        local=int(local_sequences),
        micro_batches=micro_batches,
        precision=precision,
        # The syntax describes no other states, and no RLHF.
        states="fp32",
        rlhf=False,
        checkpointing=checkpointing,
    )
    return MeasuredTraining(parse_model(parts[0]), layout, step_load, pace)


def _list_topology_names() -> list[str]:
    return sorted(file.stem for file in (Path(__file__).parent / "topologies").glob("*.yaml"))


_TOPOLOGY_FILE_SYNTAX = "six lines: node, memory, inside, between, bf16 and fp8, like `node: 8` and `memory: 80 GiB`"
# The factor and the unit of each line of a topology file. `node` and `memory` are parsed differently.
_UNIT_FACTORS = {"inside": 1e9, "between": 1e9, "bf16": 1e12, "fp8": 1e12}
_UNIT_NAMES = {"inside": "GB/s", "between": "GB/s", "bf16": "TFLOP/s", "fp8": "TFLOP/s"}
# Less memory than this means that the user forgot the unit.
_MIN_GPU_MEMORY_BYTES = 1 << 30
_TOPOLOGY_KEYS = ("node", "memory", *_UNIT_FACTORS)


def read_topology(file: Path) -> Topology:
    """Reads a topology file, or the shipped file of that name. Raises UsageError for unknown, missing or invalid
    lines.
    """
    # 1. A name without a suffix is that of a shipped file, unless a file of this name exists.
    if not file.suffix and not file.exists():
        if file.name not in _list_topology_names():
            raise UnknownName(
                "topology",
                str(file)[:80],
                _list_topology_names(),
                f"{', '.join(_list_topology_names())}, or a YAML file",
            )
        name, file = file.name, Path(__file__).parent / "topologies" / f"{file.name}.yaml"
        write_sentence_to_stderr(
            f"--topology {name}: {read_file(file).decode().splitlines()[0].removeprefix('# ')} ({file})"
        )
    # 2. Parse each line, with its unit.
    values: dict[str, float] = {}
    for name, value in read_config_mapping("--topology", file, _TOPOLOGY_FILE_SYNTAX).items():
        if name not in _TOPOLOGY_KEYS:
            raise UsageError(f"{file}: unknown key {name!r:.80}. Known: {', '.join(_TOPOLOGY_KEYS)}.")
        values[name] = _parse_value(file, name, value)
    # 3. Require all lines.
    missing_topology_keys = [name for name in _TOPOLOGY_KEYS if name not in values]
    if missing_topology_keys:
        raise UsageError(
            f"{file}: {', '.join(missing_topology_keys)} {'is' if len(missing_topology_keys) == 1 else 'are'} missing. "
            f"Give {_TOPOLOGY_FILE_SYNTAX}."
        )
    return Topology(node=int(values.pop("node")), **values)


def _parse_value(file: Path, name: str, raw_value: Any) -> float:
    text = raw_value.strip() if isinstance(raw_value, str) else ""
    try:
        if name == "memory":
            if (size := float(units.parse_size(text))) >= _MIN_GPU_MEMORY_BYTES:
                return size
            raise ValueError(text)
        value = float(text.removesuffix(_UNIT_NAMES.get(name, "")))
        if math.isfinite(value) and value > 0 and (name != "node" or value == int(value) <= 1 << 20):
            return value * _UNIT_FACTORS.get(name, 1)
    except ValueError:
        pass
    expected_text = {"node": "a whole number of GPUs from 1 on", "memory": "a size like 80 GiB, 1 GiB or more"}.get(
        name, f"a number above 0, in {_UNIT_NAMES.get(name)}"
    )
    raise UsageError(f"{file}: {name}: expected {expected_text}, got {raw_value!r:.80}.")
