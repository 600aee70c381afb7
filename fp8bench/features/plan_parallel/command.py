"""`fp8bench plan-parallel`: ranks the ways to divide a training among GPUs, by formulas checked on published figures.

`--topology h100` names a shipped file. Such a file describes the GPUs and their links; units may follow the numbers.

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
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from fp8bench import units
from fp8bench.cli import option_types as types
from fp8bench.cli.config_file import read_mapping
from fp8bench.cli.options import shared
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.cli.streams import complain
from fp8bench.errors import EXIT_FAILED, EXIT_OK, UnknownName, UsageError
from fp8bench.features.plan_parallel.formulas import (
    STATES,
    Checkpointing,
    DecoderModel,
    Load,
    ParallelLayout,
    Topology,
    memory_of,
)
from fp8bench.features.plan_parallel.ranking import (
    HELD_OUT_WORDS,
    MEMORY_ERROR,
    MODELS,
    POWER_EXPONENT,
    RECIPES,
    UNCALIBRATED_WORDS,
    MeasuredTraining,
    ParallelQuestion,
    Planned,
    Ruling,
    Say,
    calibrated,
    memory_band,
    outside,
    pace_band,
    ranking,
    rulings,
    with_least_checkpointing,
    with_rate,
)
from fp8bench.files import read_file
from fp8bench.model.codec import encode
from fp8bench.model.request import whole_number
from fp8bench.nn.parallel.ways import ScaleTraffic, scale_traffic_of_cuts
from fp8bench.nn.sizes import SIZES
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Field, Page, Part, Table, Text, Tone

_AUTO = "auto"
_SEQUENCE = 8192
EXAMPLES = ("fp8bench plan-parallel llama3-8b --gpus 64 --topology h100",)
FIRST_OPTIONS = "--gpus --topology --batch --sequence --dtype --calibrate --recipe --top --json --csv --explain"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Every way to divide a training among N GPUs (DDP, FSDP, TP with sequence parallelism, PP, CP): memory and "
        "tokens a second of each GPU by formulas. With --calibrate, paces have a band: how far off formulas were on "
        "published machines that were held out. Measures nothing."
    )
    parser.epilog = "Exit codes: 0 fine; 2 wrong usage; 3 no way fits."
    add = parser.add_argument
    add("name", nargs="?", metavar="MODEL", help="the same as --model NAME")
    add("--model", metavar="NAME", help=f"one of {', '.join((*MODELS, *SIZES))}")
    add("--gpus", type=types.whole(whole_number(1, 1 << 20)), metavar="N", help="how many GPUs")
    words = f"{', '.join(_shipped())}, or YAML that describes the GPUs: node, memory, inside, between, bf16, fp8"
    add("--topology", type=types.path, metavar="FILE", help=words)
    words = "sequences of a step, of all GPUs together; default 8 times --gpus"
    add("--batch", type=types.whole(whole_number(1)), metavar="N", help=words)
    words = f"tokens of a sequence; default {_SEQUENCE}, or a size's own"
    add("--sequence", type=types.whole(whole_number(1, 1 << 24)), metavar="N", help=words)
    add("--dtype", choices=("bf16", "fp8"), default="bf16", help="dtype of the products in blocks; default bf16")
    words = "bytes a weight: fp32 keeps 16, fp8-lm 6 (fp16 weights and second moments, FP8 gradients and first ones)"
    add("--states", choices=[*STATES], default="fp32", help=words)
    words = "memory of RLHF: beside the model (actor) a critic that trains, a reference and a reward model, as large"
    add("--rlhf", action="store_true", help=words)
    words = "copies (DDP) share out master weights and moments, and keep weights and gradients whole: ZeRO-1"
    add("--zero-1", action="store_true", help=words)
    words = "a whole training measured on such GPUs, in tokens/s of each: llama3-8b,FSDP8,6667,dtype=bf16,batch=16"
    add("--calibrate", metavar="MODEL,LAYOUT,PACE", help=words)
    words = "how FP8 products are scaled, which sets their rate from bf16's; default: the file's rate, else tensorwise"
    add("--recipe", choices=[*RECIPES], help=words)
    words = "the loss is compiled, and takes a third of the memory, as torchtitan's from April 2025 on"
    add("--compiled-loss", action="store_true", help=words)
    words = "a GPU's watts now, over its watts where rates or the training were measured: 500/700"
    add("--power-limit", type=_watts, metavar="W/W", help=words)
    words = "which activations backward computes again; default auto: the least with which something fits"
    add("--checkpointing", choices=(_AUTO, *Checkpointing), default=_AUTO, help=words)
    add("--top", type=types.whole(whole_number(1)), default=10, metavar="N", help="how many ways are shown; default 10")
    shared(parser, "--json", help="print all ways as JSON instead")
    shared(parser, "--explain")
    shared(parser, "--csv", help="also write a row for each way to this file; '-' prints them instead")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    question = _question(arguments)
    if arguments.checkpointing == _AUTO:
        question, plans = with_least_checkpointing(question)
    else:
        plans = ranking(question)
    if not plans:
        raise UsageError(
            f"{question.batch} sequences cannot be dealt out evenly to {question.gpus} GPUs in any way. Give --batch a "
            "multiple of them."
        )
    page = partial(page_of, question, plans[: arguments.top])
    tell(arguments, page, partial(value_of, question, plans), partial(rows_of, question, plans))
    return EXIT_OK if plans[0].fits else EXIT_FAILED


def _question(arguments: argparse.Namespace) -> ParallelQuestion:
    if arguments.model is None:
        arguments.model = arguments.name
    elif arguments.name is not None:
        raise UsageError(f"{arguments.name!r:.80} and --model {arguments.model!r:.80} both name a model. Give one.")
    for name in ("model", "gpus", "topology"):
        if getattr(arguments, name) is None:
            raise UsageError(f"--{name} is missing: a plan needs --model, --gpus and --topology.")
    model = _model(arguments.model)
    own = SIZES[model.name].sequence if model.name in SIZES else _SEQUENCE
    level = Checkpointing.NONE if arguments.checkpointing == _AUTO else Checkpointing(arguments.checkpointing)
    if arguments.states != "fp32" and arguments.dtype != "fp8":
        raise UsageError(f"--states {arguments.states} goes with FP8 products: give --dtype fp8 too.")
    load = Load(
        arguments.sequence or own, 1, checkpointing=level, precision=arguments.dtype, states=arguments.states,
        fused_loss=arguments.compiled_loss, rlhf=arguments.rlhf, zero_one=arguments.zero_1,
    )  # fmt: skip
    batch, topology = arguments.batch or 8 * arguments.gpus, read_topology(arguments.topology)
    by = _training(arguments.calibrate, load) if arguments.calibrate is not None else None
    if arguments.recipe and "fp8" not in (load.precision, by.load.precision if by is not None else ""):
        raise UsageError("--recipe says how products in FP8 are scaled, and there are none: add --dtype fp8.")
    recipe = arguments.recipe or next(iter(RECIPES))
    if by is not None:
        topology = calibrated(topology, by, recipe)
    elif arguments.recipe:
        topology = with_rate(topology, topology.bf16, recipe)
    if limit := arguments.power_limit:
        topology = replace(
            topology, bf16=topology.bf16 * limit**POWER_EXPONENT, fp8=topology.fp8 * limit**POWER_EXPONENT
        )
    return ParallelQuestion(model, arguments.gpus, batch, load, topology, by, recipe, bool(limit))


def _watts(text: str) -> float:
    try:
        limit, before = map(float, text.split("/"))
    except ValueError:
        limit = before = 0.0
    if not (0 < limit <= before < math.inf):
        raise argparse.ArgumentTypeError(
            f"expected two numbers of watts like 500/700, the lower first, got {text!r:.80}"
        )
    return limit / before


_CUTS = {"ddp": "copies", "fsdp": "shards", "tp": "tensor", "pp": "pipeline", "cp": "context", "vp": "virtual"}
_TRAINING = (
    "Expected MODEL,LAYOUT,PACE like llama3-8b,FSDP8,6667 or llama3-70b,FSDP32+TP8,597, then what differs from the "
    "plan: dtype=, sequence=, checkpointing=, batch= (sequences of a step in all), micro-batches="
)


def _training(text: str, planned: Load) -> MeasuredTraining:
    words = [word.strip() for word in text.split(",")]
    if len(words) < 3:
        raise UsageError(f"--calibrate {text!r:.80} is too short. {_TRAINING}.")
    cuts: dict[str, int] = {}
    for cut in words[1].split("+"):
        match = re.fullmatch(r"([a-z]+) ?([1-9]\d{0,5})", cut.strip().lower(), re.ASCII)
        if match is None or match[1] not in _CUTS or _CUTS[match[1]] in cuts:
            raise UsageError(f"--calibrate: {cut!r:.80} is no part of a layout. {_TRAINING}.")
        cuts[_CUTS[match[1]]] = int(match[2])
    layout, given = ParallelLayout(**cuts), dict(word.partition("=")[::2] for word in words[3:])
    positive = types.whole(whole_number(1, 1 << 30))
    try:
        pace = float(words[2])
        if not (0 < pace < math.inf) or given.keys() - {"dtype", "sequence", "checkpointing", "batch", "micro-batches"}:
            raise ValueError
        local = positive(given.get("batch", str(8 * layout.gpus))) * layout.inner / layout.gpus
        pieces = positive(given.get("micro-batches", str(int(local) if layout.pipeline > 1 else 1)))
        precision = given.get("dtype", planned.precision)
        if local != int(local) or local % pieces or precision not in ("bf16", "fp8"):
            raise ValueError
        load = replace(
            planned, sequence=positive(given.get("sequence", str(planned.sequence))), local=int(local),
            micro_batches=pieces, precision=precision, states="fp32", rlhf=False,
            checkpointing=Checkpointing(given.get("checkpointing", planned.checkpointing)),
        )  # fmt: skip
    except (ValueError, argparse.ArgumentTypeError):
        raise UsageError(f"--calibrate {text!r:.200} cannot be read, or divides nothing evenly. {_TRAINING}.") from None
    return MeasuredTraining(_model(words[0]), layout, load, pace)


def _model(name: str) -> DecoderModel:
    if name in MODELS:
        return MODELS[name]
    if name not in SIZES:
        raise UnknownName("model", name, [*MODELS, *SIZES])
    size = SIZES[name]
    return DecoderModel(
        name, size.vocabulary, size.width, size.layers, size.heads, size.key_heads, size.hidden, size.modern
    )


def _shipped() -> list[str]:
    return sorted(file.stem for file in (Path(__file__).parent / "topologies").glob("*.yaml"))


_FORM = "six lines: node, memory, inside, between, bf16 and fp8, like `node: 8` and `memory: 80 GiB`"
# The factor and the unit of each line; node and memory are read apart.
_FACTORS = {"inside": 1e9, "between": 1e9, "bf16": 1e12, "fp8": 1e12}
_UNIT = {"inside": "GB/s", "between": "GB/s", "bf16": "TFLOP/s", "fp8": "TFLOP/s"}
# Less memory than this is a number whose unit was forgotten.
_LEAST_MEMORY = 1 << 30
_NAMES = ("node", "memory", *_FACTORS)


def read_topology(file: Path) -> Topology:
    """Reads a file, or the shipped one of that name. Raises UsageError."""
    if not file.suffix and not file.exists():
        if file.name not in _shipped():
            raise UnknownName("topology", str(file)[:80], _shipped(), f"{', '.join(_shipped())}, or a YAML file")
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


def _value(file: Path, name: str, given: Any) -> float:
    text = given.strip() if isinstance(given, str) else ""
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
    raise UsageError(f"{file}: {name}: expected {expected}, got {given!r:.80}.")


_LEGEND = (
    "memory: of a GPU, by formulas; its band: how far off they are on the published trainings that they were fitted to",
    "tokens/s: of a GPU, by formulas; its band: the largest error on machines held out, '-' where none was",
    "waits: the share of a step in which products wait for TP, CP, FSDP or DDP; idle: a pipeline's ends",
    "tight: it fits unless memory is at the upper end of its band",
    "what a GPU has: DDP: the whole model, some of the sequences; FSDP: the same, its weights and moments shared out",
    "TP: a part of each product; PP: some layers, VP: in that many stretches; CP: a part of each sequence",
)
# Every answer says what the formulas are worth.
_ERRORS = (
    f"Pace, by leave-one-machine-out: {HELD_OUT_WORDS}. Without a training it was {UNCALIBRATED_WORDS}. Memory: "
    f"nothing was held out; on the 20 published figures that formulas were fitted to: off by {MEMORY_ERROR} at most."
)
# Seconds of a small message within a node: assumed, and printed as such.
_MESSAGE = 1e-5
# In shorter steps launches decide, which formulas leave out.
_SHORT = 0.02


def page_of(question: ParallelQuestion, plans: Sequence[Planned]) -> Page:
    load = question.load
    title = (
        f"{question.model.name} ({units.count(question.model.weights)} weights) on {question.gpus} "
        f"GPU{'' if question.gpus == 1 else 's'} of {units.size(question.topology.memory)}: {question.batch} sequences "
        f"of {load.sequence} tokens a step, {load.precision}, checkpointing {load.checkpointing}"
    )
    matrix = [Part("matrix", "each kind of division by itself", (_matrix(question),))] if question.gpus > 1 else []
    parts = [Part("ranking", "", (*map(Text, _remarks(question, plans)), _ranking(question, plans))), *matrix,
             Part("errors", "", (Text(_ERRORS),))]  # fmt: skip
    return Page(title, "", tuple(parts), _LEGEND)


def _remarks(question: ParallelQuestion, plans: Sequence[Planned]) -> Iterator[str]:
    if not plans[0].fits:
        level = "" if question.load.checkpointing is Checkpointing.FULL else ", or --checkpointing full"
        yield f"No way fits: more GPUs, a smaller batch, shorter sequences{level}."
    if plans[0].pace.step < _SHORT:
        yield (
            f"A step takes {units.seconds(plans[0].pace.step)} by these formulas, which leave out launches: in steps "
            f"below {units.seconds(_SHORT)} those decide, and the paces here mean nothing."
        )
    if question.by is None:
        yield (
            "No whole training has calibrated these rates: paces say which layout is faster, not how fast it is. By "
            f"ceilings of products they were {UNCALIBRATED_WORDS}. Give a measured training: --calibrate "
            "MODEL,LAYOUT,PACE."
        )
    else:
        yield (
            f"By {question.by.model.name} with {question.by.layout.words} at {question.by.pace:g} tokens/s of a GPU, "
            f"products reach {question.topology.bf16 / 1e12:.0f} TFLOP/s in bf16 and "
            f"{question.topology.fp8 / 1e12:.0f} in FP8."
        )
    if question.derated:
        yield "Rates are scaled by the 2/3 power of the power limit, which nothing confirms: paces have no band."
    if (kept := question.load.kept) != STATES["fp32"]:
        way = plans[0]
        wide = memory_of(question.model, way.layout, replace(way.load, states="fp32")).total
        yield (
            f"States take {kept.total} bytes a weight instead of {STATES['fp32'].total}: the first way takes "
            f"{units.percent(1 - way.memory.total / wide, 0)} less than with those in fp32 ({units.size(wide)}). "
            "FP8-LM reports 29%, 28% and 39% less for its GPT-7B, 13B and 175B on H100s, with --zero-1; these formulas "
            "give 33%, 37% and 43%, because they leave out 6 to 13 GiB that its trainings took besides."
        )
    if question.load.rlhf:
        memory = plans[0].memory
        models = ("actor", memory.states), ("critic", memory.critic), ("reference and reward", memory.frozen)
        sizes = ", ".join(f"{name} {units.size(size)}" for name, size in models)
        yield (
            f"RLHF: in the first way weights, gradients and moments take {sizes}; one model works at a time. tokens/s "
            "are of the actor's update alone, without rollouts and other models' passes. FP8-LM reports 62% less for "
            "states and 32% less for weights (LLaMA-7B); --states fp8-lm gives 62% and 50%, all copies in FP8. Only "
            "four small models were checked, by `fp8bench suite transformer --set models=rlhf`."
        )
    if count := _scale_traffic(question, plans[0]).messages:
        yield (
            f"Scales: with one for each whole tensor, a step of the first way waits for {count} messages of 4 bytes: "
            f"the largest magnitude over {plans[0].layout.tensor} GPUs before each cast of a tensor that TP cuts. "
            f"Paces leave that out: at {units.seconds(_MESSAGE)} each it is {units.seconds(count * _MESSAGE)} of "
            f"{units.seconds(plans[0].pace.step)}. Scales of rows and blocks need no messages."
        )
    if what := outside(question.model, question.gpus, question.load.sequence):
        yield f"No published training is like this: {'; '.join(what)}. Bands are a guess here."


def _scale_traffic(question: ParallelQuestion, way: Planned) -> ScaleTraffic:
    """Counts a GPU's messages in a step where TP cuts tensors that have one scale each; else none."""
    if way.layout.tensor == 1 or way.load.precision != "fp8" or question.recipe not in ("", "tensorwise"):
        return ScaleTraffic(0, 0.0)
    blocks = -(-question.model.layers // way.layout.pipeline)
    return scale_traffic_of_cuts(blocks * way.load.micro_batches, way.layout.tensor)


def _ranking(question: ParallelQuestion, plans: Sequence[Planned]) -> Table:
    def fits(way: Planned) -> Field:
        word = ("tight", Tone.DOUBT) if way.tight else ("yes", Tone.GOOD) if way.fits else ("no", Tone.BAD)
        return Field(word[0], tone=word[1])

    cols: list[Col[Planned]] = [
        Col("layout", lambda way: way.layout.words),
        Col("micro-batches", lambda way: str(way.load.micro_batches), number=True),
        Col("memory", lambda way: units.size(way.memory.total), number=True),
        Col("band", lambda way: f"±{units.percent(memory_band(way.layout), 0)}", number=True),
        Col("fits", fits),
        Col("tokens/s", lambda way: units.count(way.tokens), number=True),
        Col("band", lambda way: _band(question, way), number=True, show=lambda band: f"±{units.percent(band, 0)}"),
        Col("waits", lambda way: units.percent(way.pace.waits, 0), number=True),
        Col("idle", lambda way: units.percent(way.pace.idle, 0), number=True),
    ]
    return table("ranking", "", cols, plans)


def _band(question: ParallelQuestion, way: Planned) -> float | None:
    return None if question.derated else pace_band(question.by, question.model, way.layout, way.load, question.recipe)


def _matrix(question: ParallelQuestion) -> Table:
    cols: list[Col[Ruling]] = [
        Col("kind", lambda ruling: ruling.kind),
        Col("worth it", lambda ruling: ruling.say, tone=lambda row: Tone.GOOD if row.say is Say.YES else Tone.PLAIN),
        Col("why", lambda ruling: ruling.why, below=True),
    ]
    return table("matrix", "", cols, rulings(question))


def value_of(question: ParallelQuestion, plans: Sequence[Planned]) -> dict[str, object]:
    beyond, matrix = outside(question.model, question.gpus, question.load.sequence), encode(rulings(question))
    ways = rows_of(question, plans)[1]
    return {"asked": encode(question), "outside": beyond, "ways": ways, "matrix": matrix, "errors": _ERRORS}


def rows_of(question: ParallelQuestion, plans: Sequence[Planned]) -> Rows:
    rows: list[dict[str, object]] = []
    for way in plans:
        pace = asdict(way.pace)
        rows.append({
            **asdict(way.layout), "micro_batches": way.load.micro_batches, "fits": way.fits, "tight": way.tight,
            "memory_bytes": way.memory.total, **{f"{name}_bytes": size for name, size in asdict(way.memory).items()},
            "tokens_per_second": way.tokens, "step_seconds": way.pace.step, "bubble": pace.pop("bubble"),
            **{f"{name}_seconds": seconds for name, seconds in pace.items()},
            **{f"scale_{name}": number for name, number in _scale_traffic(question, way)._asdict().items()},
            "memory_band": memory_band(way.layout), "pace_band": _band(question, way),
        })  # fmt: skip
    return tuple(rows[0]), rows
