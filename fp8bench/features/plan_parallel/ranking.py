"""Ranks all layouts of a training on GPUs: those that fit, the fastest first.

Memory's band is the error of the formulas on the published trainings that they were fitted to; pace's is their error on
held-out machines (reports/plan_parallel/published.toml).

Products within a training are slower than alone, by an amount that differs between machines. So paces without a
calibrating training only order layouts, and have no band. One training sets both rates: FP8's is bf16's times the ratio
that its recipe reached in published trainings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.features.plan_parallel.formulas import (
    Checkpointing,
    DecoderModel,
    GpuMemory,
    Load,
    ParallelLayout,
    StepPace,
    Topology,
    memory_of,
    pace_of,
    tokens_a_second,
)

# Narrower products utilize a GPU less than its rates suggest.
_NARROW = 1024
# FP8's rate over bf16's in whole trainings, casts included: the median of published machines.
RECIPES = {"tensorwise": 1.38, "rowwise": 1.09, "mxfp8": 1.29}
DEFAULT_RECIPE = "tensorwise"
_LEAST_RATE, _MOST_RATE, _HALVINGS = 1e9, 1e18, 60


class LayoutKind(StrEnum):
    """Kinds of layouts; within one kind, errors of paces were similar."""

    DATA = "DDP or FSDP"
    MODEL = "TP or PP"
    CONTEXT = "CP"
    NARROW = "TP on products narrower than 1024"


def kind_of(model: DecoderModel, layout: ParallelLayout) -> LayoutKind:
    if layout.tensor > 1 and model.width / layout.tensor < _NARROW:
        return LayoutKind.NARROW
    if layout.context > 1:
        return LayoutKind.CONTEXT
    return LayoutKind.MODEL if layout.tensor > 1 or layout.pipeline > 1 else LayoutKind.DATA


# The largest error of a pace predicted from another training on the same machine, leaving out each of 8 published
# machines in turn: by the kind of that training, the predicted kind, and whether their dtypes agree. Other pairs have
# too few machines for a band.
HELD_OUT = {
    (LayoutKind.DATA, LayoutKind.DATA, True): 0.24,
    (LayoutKind.DATA, LayoutKind.DATA, False): 0.28,
    (LayoutKind.DATA, LayoutKind.MODEL, True): 0.20,
    (LayoutKind.DATA, LayoutKind.CONTEXT, True): 0.29,
    (LayoutKind.MODEL, LayoutKind.DATA, True): 0.26,
    (LayoutKind.CONTEXT, LayoutKind.DATA, True): 0.40,
}
HELD_OUT_WORDS = (
    "622 paces told from one training of the same machine, each of 8 machines left out in turn, were off by 11.1% in "
    "the middle; of 132 of kinds that others have, 88 were within the band that those set (26 of 26 on seven machines, "
    "62 of 106 on the one that has long sequences)"
)
UNCALIBRATED_WORDS = "25% to 396% too fast in 44 published trainings, by 87% in the middle"
# Published for a single machine, so that none could be held out.
_ALONE = "mxfp8"


@dataclass(frozen=True)
class MeasuredTraining:
    """One whole training on such GPUs; `pace` in tokens per second per GPU."""

    model: DecoderModel
    layout: ParallelLayout
    load: Load
    pace: float


def calibrate(topology: Topology, training: MeasuredTraining, recipe: str = DEFAULT_RECIPE) -> Topology:
    """Sets the rates for which the formulas give the measured pace. Raises UsageError if no rates do."""
    least, most = _LEAST_RATE, _MOST_RATE
    for _ in range(_HALVINGS):
        rate = math.sqrt(least * most)
        if pace_with(with_rate(topology, rate, recipe), training) < training.pace:
            least = rate
        else:
            most = rate
    rated = with_rate(topology, least, recipe)
    if not math.isclose(pace_with(rated, training), training.pace, rel_tol=1e-3):
        raise UsageError(
            f"--calibrate: {training.pace:g} tokens/s of a GPU is more than these links carry for "
            f"{training.layout.words}, however fast products are. Check the pace (of one GPU), and --topology."
        )
    return rated


def with_rate(topology: Topology, bf16: float, recipe: str) -> Topology:
    return replace(topology, bf16=bf16, fp8=bf16 * RECIPES[recipe])


def pace_with(topology: Topology, training: MeasuredTraining) -> float:
    pace = pace_of(training.model, training.layout, training.load, topology)
    return tokens_a_second(training.layout, training.load, pace)


def pace_band(
    by: MeasuredTraining | None, model: DecoderModel, layout: ParallelLayout, load: Load, recipe: str
) -> float | None:
    """Returns the largest error of such paces on held-out machines; None if none could be held out."""
    if by is None:
        return None
    same = by.load.precision == load.precision
    if recipe == _ALONE and not same:
        return None
    return HELD_OUT.get((kind_of(by.model, by.layout), kind_of(model, layout), same))


# The share of a GPU's memory that a plan may use: the rest is for the driver and libraries.
USABLE = 0.97
# With shorter pieces of a sequence, attention kernels are less efficient than the formulas assume.
_SHORTEST = 4096
# From this length on, context parallelism is worthwhile.
_LONG = 32768
# Paces within this ratio count as equal: the simpler layout comes first.
_ALIKE = 1.02
# Models with published trainings, the ranges of those, and the error of the memory formulas on them.
MODELS = {
    model.name: model
    for model in (
        DecoderModel("llama3-8b", 128256, 4096, 32, 32, 8, 14336),
        DecoderModel("llama3-70b", 128256, 8192, 80, 64, 8, 28672),
        DecoderModel("llama3-405b", 128256, 16384, 126, 128, 8, 53248),
    )
}
PUBLISHED_GPUS, PUBLISHED_WEIGHTS, PUBLISHED_SEQUENCES = (8, 1024), (8030261248, 405853388800), (8192, 262144)
MEMORY_ERROR = "12.1%"


@dataclass(frozen=True)
class ParallelQuestion:
    """A training with a global `batch` of sequences per step; `load` lacks the sizes that each layout sets.

    If a training is given in `by`, it has set the topology's rates.
    """

    model: DecoderModel
    gpus: int
    batch: int
    load: Load
    topology: Topology
    by: MeasuredTraining | None = None
    recipe: str = DEFAULT_RECIPE


@dataclass(frozen=True)
class Planned:
    """One layout of a training; `tokens` per second per GPU. A `tight` one does not fit at the upper end of its memory
    band."""

    layout: ParallelLayout
    load: Load
    memory: GpuMemory
    pace: StepPace
    tokens: float
    fits: bool
    tight: bool

    @property
    def kinds(self) -> int:
        """The number of kinds of division."""
        cut = self.layout
        return sum(count > 1 for count in (cut.copies, cut.shards, cut.tensor, cut.pipeline, cut.context))


def memory_band(layout: ParallelLayout) -> float:
    """Returns the relative error of the formulas on published trainings of that kind."""
    return 0.05 if layout.tensor == layout.pipeline == 1 else 0.15


def ranking(question: ParallelQuestion) -> tuple[Planned, ...]:
    """Returns all layouts that divide evenly: those that fit, the fastest first, then others by memory."""
    plans = [best for layout in layouts(question) if (best := _best(question, layout)) is not None]

    def place(plan: Planned) -> tuple[float, ...]:
        if not plan.fits:
            return 1, plan.memory.total
        return 0, -round(math.log(plan.tokens, _ALIKE)), plan.kinds, plan.memory.total

    return tuple(sorted(plans, key=place))


def layouts(question: ParallelQuestion) -> Iterator[ParallelLayout]:
    """Yields TP within a node, as far as heads divide; PP by whole layers; CP of the sequence. The remaining factor is
    copies, shards, or shards within a node with copies between nodes."""
    model, gpus = question.model, question.gpus
    for tensor in _divisors(min(question.topology.node, gpus)):
        if gpus % tensor or model.key_heads % tensor:
            continue
        for pipeline in _divisors(gpus // tensor):
            stages = [virtual for virtual in (1, 2) if _divide(model.layers, pipeline, virtual)]
            for context in _divisors(gpus // tensor // pipeline):
                ranks = gpus // tensor // pipeline // context
                piece = question.load.sequence / context
                if piece % tensor or question.batch % ranks or (context > 1 and piece < _SHORTEST):
                    continue
                inner = ParallelLayout(tensor=tensor, pipeline=pipeline, context=context)
                in_node = question.topology.node // (tensor * context)
                for shards in sorted({1, ranks, in_node if in_node > 1 and ranks % in_node == 0 else ranks}):
                    for virtual in stages:
                        yield replace(inner, shards=shards, copies=ranks // shards, virtual=virtual)


def _divide(layers: int, pipeline: int, virtual: int) -> bool:
    """Whether stages are equally long; the embedding and the head may each replace a layer."""
    stages = pipeline * virtual
    return stages == 1 or (pipeline > 1 and stages <= layers and -layers % stages <= 2)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _best(question: ParallelQuestion, layout: ParallelLayout) -> Planned | None:
    """Chooses the fastest number of micro-batches that fits; the largest if none does."""
    local = question.batch * layout.inner // question.gpus
    options = [_plan(question, layout, local, count) for count in _divisors(local)]
    fitting = [option for option in options if option.fits]
    return max(fitting, key=lambda plan: plan.tokens) if fitting else options[-1]


def _plan(question: ParallelQuestion, layout: ParallelLayout, local: int, count: int) -> Planned:
    load = replace(question.load, local=local, micro_batches=count)
    memory = memory_of(question.model, layout, load)
    pace = pace_of(question.model, layout, load, question.topology)
    usable = USABLE * question.topology.memory
    fits, tight = memory.total <= usable, memory.total * (1 + memory_band(layout)) > usable
    return Planned(layout, load, memory, pace, tokens_a_second(layout, load, pace), fits, fits and tight)


Answer = tuple[ParallelQuestion, Sequence[Planned]]


class Say(StrEnum):
    """Whether a kind of division is worthwhile."""

    YES = "yes"
    NO = "no"


@dataclass(frozen=True)
class Ruling:
    """Whether a kind of division is worthwhile for this training, and why."""

    kind: str
    say: Say
    why: str


def rulings(question: ParallelQuestion) -> tuple[Ruling, ...]:
    """Judges kinds of division by rules of thumb; the ranking has the figures."""
    model, topology, load = question.model, question.topology, question.load
    usable, gpus = USABLE * topology.memory, question.gpus
    alone = memory_of(model, ParallelLayout(copies=gpus), replace(load, local=1, micro_batches=1)).total
    sharded = memory_of(model, ParallelLayout(shards=gpus), replace(load, local=1, micro_batches=1)).total
    tokens = question.batch * load.sequence / gpus
    dealt = question.batch % gpus == 0
    undealt = "" if dealt else f"; but {question.batch} sequences cannot be dealt out evenly to {gpus} GPUs"
    all_layouts = list(layouts(question))
    by_tensor, by_stage = (
        any(layout.tensor > 1 for layout in all_layouts),
        any(layout.pipeline > 1 for layout in all_layouts),
    )
    uneven = f"; but {gpus} GPUs cannot divide this model evenly by it"
    # The tokens per micro-batch and GPU from which on products take as long as FSDP's traffic for it.
    sent = (2 * (1 if load.narrow_gather else load.kept_states.copy) + load.kept_states.gradient) * (gpus - 1) / gpus
    hidden = sent * (topology.fp8 if load.precision == "fp8" else topology.bf16) / (6 * topology.link(gpus))
    room = units.size(usable)
    rows = (
        (
            "DDP",
            alone <= usable and dealt,
            (
                f"{'a share of' if load.zero_one else 'all'} {load.kept_states.total} bytes a weight and one sequence "
                f"take {units.size(alone)} of {room} that a plan may use{undealt}"
            ),
        ),
        (
            "FSDP",
            gpus > 1 and sharded <= usable and tokens >= hidden and dealt,
            (
                f"shared by {gpus} GPUs it takes {units.size(sharded)} of {room}; {units.count(tokens)} tokens a "
                f"GPU and step, and computing takes as long as what it sends if a micro-batch has "
                f"{units.count(hidden)} or more{undealt}"
            ),
        ),
        (
            "TP",
            by_tensor and (sharded > usable or question.batch < gpus),
            (
                "worth it where FSDP does not fit, or there are fewer sequences than GPUs; within the "
                f"{topology.node} GPUs of a node alone, because products wait for what it sends"
                f"{uneven if gpus > 1 and not by_tensor else ''}"
            ),
        ),
        (
            "PP",
            by_stage and gpus > topology.node and (tokens < hidden or question.batch < gpus),
            (
                "worth it between nodes where a GPU has too few tokens for FSDP, or there are fewer sequences than "
                "GPUs; with 4 micro-batches a stage or more, because stages are idle at both ends of a step"
                f"{uneven if gpus > 1 and not by_stage else ''}"
            ),
        ),
        ("CP", load.sequence >= _LONG, f"worth it for sequences from {_LONG} tokens on; these have {load.sequence}"),
        ("EP", False, "worth it for experts; this model has none"),
    )
    return tuple(Ruling(kind, Say.YES if yes else Say.NO, reason) for kind, yes, reason in rows)


def with_least_checkpointing(question: ParallelQuestion) -> tuple[ParallelQuestion, tuple[Planned, ...]]:
    """Ranks with the least checkpointing that fits; with full checkpointing if nothing fits."""
    for level in Checkpointing:
        candidate = replace(question, load=replace(question.load, checkpointing=level))
        plans = ranking(candidate)
        if plans and plans[0].fits:
            break
    return candidate, plans


def outside(model: DecoderModel, gpus: int, sequence: int) -> tuple[str, ...]:
    """Names sizes outside the range of all published trainings, where bands are a guess."""
    aspects: tuple[tuple[str, Callable[[int], str], int, tuple[int, int]], ...] = (
        ("GPUs", str, gpus, PUBLISHED_GPUS),
        ("weights", units.count, model.weights, PUBLISHED_WEIGHTS),
        ("tokens a sequence", str, sequence, PUBLISHED_SEQUENCES),
    )
    return tuple(
        f"{show(value)} {aspect} (published: {show(least)} to {show(most)})"
        for aspect, show, value, (least, most) in aspects
        if not least <= value <= most
    )
