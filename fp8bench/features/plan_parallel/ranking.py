"""Every way to cut a training for so many GPUs, those that fit the fastest first, and what speaks for each kind.

Memory has the band within which formulas describe the published trainings that they were set on, pace the one in which
it was told of machines that were held out, where a training calibrates it (reports/plan_parallel/published.toml).

Products of a training reach less than products by themselves, by how much differs between machines and their software:
so paces by rates that no whole training has calibrated are for an order of layouts, and carry no band. One training
sets both rates; FP8's is bf16's times what recipes gave in published trainings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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

# Narrower products than these keep a GPU less busy than its rates say.
_NARROW = 1024
# Rate of FP8 products over bf16's in whole trainings, casts included: the middle of published machines.
RECIPES = {"tensorwise": 1.38, "rowwise": 1.09, "mxfp8": 1.29}
DEFAULT_RECIPE = "tensorwise"
# Between the cube root (voltage falls with the clock) and the limit itself (it does not): no published training tells.
POWER_EXPONENT = 2 / 3
_LEAST_RATE, _MOST_RATE, _HALVINGS = 1e9, 1e18, 60


class LayoutKind(StrEnum):
    """What a pace was off by alike."""

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


# How far a pace told from another training of the same machine was off at most, each of 8 published machines left out
# in turn: by that one's kind, its own, and whether both are of one dtype. Other pairs have too few machines for a band.
HELD_OUT = {
    (LayoutKind.DATA, LayoutKind.DATA, True): 0.24, (LayoutKind.DATA, LayoutKind.DATA, False): 0.28,
    (LayoutKind.DATA, LayoutKind.MODEL, True): 0.20, (LayoutKind.DATA, LayoutKind.CONTEXT, True): 0.29,
    (LayoutKind.MODEL, LayoutKind.DATA, True): 0.26, (LayoutKind.CONTEXT, LayoutKind.DATA, True): 0.40,
}  # fmt: skip
HELD_OUT_WORDS = (
    "622 paces told from one training of the same machine, each of 8 machines left out in turn, were off by 11.1% in "
    "the middle; of 132 of kinds that others have, 85 were within the band that those set (26 of 26 on seven machines, "
    "59 of 106 on the one that has long sequences)"
)
UNCALIBRATED_WORDS = "34% to 396% too fast in 44 published trainings, by 89% in the middle"
# Of one published machine alone, so that nothing of it was held out.
_ALONE = "mxfp8"


@dataclass(frozen=True)
class MeasuredTraining:
    """Tokens a second of each GPU of one whole training, on the GPUs that are planned for."""

    model: DecoderModel
    layout: ParallelLayout
    load: Load
    pace: float


def calibrated(topology: Topology, training: MeasuredTraining, recipe: str = DEFAULT_RECIPE) -> Topology:
    """The GPUs, with rates by which the formulas come to what was measured. UsageError where none do."""
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
    """How far paces of that kind were off on machines that were held out; None where nothing was."""
    if by is None:
        return None
    same = by.load.precision == load.precision
    if recipe == _ALONE and not same:
        return None
    return HELD_OUT.get((kind_of(by.model, by.layout), kind_of(model, layout), same))


# So much of a GPU's memory a plan may take: the rest is the driver's and the libraries'.
USABLE = 0.97
# In shorter pieces of a sequence attention's kernels are less busy than formulas say.
_SHORTEST = 4096
# From here on a sequence is long enough to be cut.
_LONG = 32768
# Paces within so much of each other are one: the simpler layout comes first.
_ALIKE = 1.02
# Models that have published trainings; from what to what these go; by what formulas that were set on them are off.
MODELS = {
    model.name: model
    for model in (
        DecoderModel("llama3-8b", 128256, 4096, 32, 32, 8, 14336),
        DecoderModel("llama3-70b", 128256, 8192, 80, 64, 8, 28672),
        DecoderModel("llama3-405b", 128256, 16384, 126, 128, 8, 53248),
    )
}
PUBLISHED_GPUS, PUBLISHED_WEIGHTS, PUBLISHED_SEQUENCES = (8, 1024), (8030261248, 405853388800), (8192, 262144)
WORST_ERRORS = "memory by 12.1%, flops by 0.1%"


@dataclass(frozen=True)
class ParallelQuestion:
    """A training: `batch` sequences a step in all. `load` says how a step is done; its sizes are each layout's.

    Rates of the topology are those of the training `by`, where there is one; `derated`: of another power limit.
    """

    model: DecoderModel
    gpus: int
    batch: int
    load: Load
    topology: Topology
    by: MeasuredTraining | None = None
    recipe: str = DEFAULT_RECIPE
    derated: bool = False


@dataclass(frozen=True)
class Planned:
    """One way, with what it takes; `tokens` are those a second and GPU. A `tight` one fits unless its memory is at the
    upper end of its band."""

    layout: ParallelLayout
    load: Load
    memory: GpuMemory
    pace: StepPace
    tokens: float
    fits: bool
    tight: bool

    @property
    def kinds(self) -> int:
        layout = self.layout
        return sum(
            count > 1 for count in (layout.copies, layout.shards, layout.tensor, layout.pipeline, layout.context)
        )


def memory_band(layout: ParallelLayout) -> float:
    """How far the formulas are from the published trainings of that kind that they were set on, as a share."""
    return 0.05 if layout.tensor == layout.pipeline == 1 else 0.15


def ranking(asked: ParallelQuestion) -> tuple[Planned, ...]:
    """All ways that divide evenly: those that fit first, the fastest of them first; others by what they lack."""
    plans = [best for layout in layouts(asked) if (best := _best(asked, layout)) is not None]

    def place(way: Planned) -> tuple[float, ...]:
        if not way.fits:
            return 1, way.memory.total
        return 0, -round(math.log(way.tokens, _ALIKE)), way.kinds, way.memory.total

    return tuple(sorted(plans, key=place))


def layouts(asked: ParallelQuestion) -> Iterator[ParallelLayout]:
    """TP up to a node, as many as heads allow; PP by whole layers; CP by whole sequences; the rest are copies, or
    shards, or shards within a node that are copied."""
    model, gpus = asked.model, asked.gpus
    for tensor in _divisors(min(asked.topology.node, gpus)):
        if gpus % tensor or model.key_heads % tensor:
            continue
        for pipeline in _divisors(gpus // tensor):
            if pipeline > model.layers:
                continue
            for context in _divisors(gpus // tensor // pipeline):
                ranks = gpus // tensor // pipeline // context
                piece = asked.load.sequence / context
                if piece % tensor or asked.batch % ranks or (context > 1 and piece < _SHORTEST):
                    continue
                inner = ParallelLayout(tensor=tensor, pipeline=pipeline, context=context)
                for shards in sorted({1, ranks, _within_a_node(asked.topology, inner, ranks)}):
                    for virtual in (1, 2) if 1 < pipeline <= model.layers // 2 else (1,):
                        yield replace(inner, shards=shards, copies=ranks // shards, virtual=virtual)


def _within_a_node(topology: Topology, inner: ParallelLayout, ranks: int) -> int:
    room = topology.node // (inner.tensor * inner.context)
    return room if room > 1 and ranks % room == 0 else ranks


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _best(asked: ParallelQuestion, layout: ParallelLayout) -> Planned | None:
    """With the micro-batches that are fastest among those that fit; with the most where none does."""
    local = asked.batch * layout.inner // asked.gpus
    options = [_planned(asked, layout, local, count) for count in _divisors(local)]
    fitting = [option for option in options if option.fits]
    return max(fitting, key=lambda plan: plan.tokens) if fitting else options[-1]


def _planned(asked: ParallelQuestion, layout: ParallelLayout, local: int, count: int) -> Planned:
    load = replace(asked.load, local=local, micro_batches=count)
    memory = memory_of(asked.model, layout, load)
    pace = pace_of(asked.model, layout, load, asked.topology)
    usable = USABLE * asked.topology.memory
    fits, tight = memory.total <= usable, memory.total * (1 + memory_band(layout)) > usable
    return Planned(layout, load, memory, pace, tokens_a_second(layout, load, pace), fits, fits and tight)


class Say(StrEnum):
    """What the model and the GPUs say to a way of cutting."""

    YES = "yes"
    NO = "no"


@dataclass(frozen=True)
class Ruling:
    """One row of the matrix that guides to parallelism have, with the figures of this training."""

    kind: str
    say: Say
    why: str


def rulings(asked: ParallelQuestion) -> tuple[Ruling, ...]:
    """When each kind is worth it: rules of thumb, of which the ranking knows the figures."""
    model, topology, load = asked.model, asked.topology, asked.load
    usable, gpus = USABLE * topology.memory, asked.gpus
    alone = memory_of(model, ParallelLayout(copies=gpus), replace(load, local=1, micro_batches=1)).total
    sharded = memory_of(model, ParallelLayout(shards=gpus), replace(load, local=1, micro_batches=1)).total
    tokens = asked.batch * load.sequence / gpus
    dealt = asked.batch % gpus == 0
    undealt = "" if dealt else f"; but {asked.batch} sequences cannot be dealt out evenly to {gpus} GPUs"
    hidden = _tokens_that_hide(asked)
    room = units.size(usable)
    rows = (
        ("DDP", alone <= usable and dealt,
         (f"{'a share of' if load.zero_one else 'all'} {load.kept.total} bytes a weight and one sequence take "
          f"{units.size(alone)} of {room} that a plan may use{undealt}")),
        ("FSDP", gpus > 1 and sharded <= usable and tokens >= hidden and dealt,
         (f"shared by {gpus} GPUs it takes {units.size(sharded)} of {room}; {units.count(tokens)} tokens a "
          f"GPU and step, and computing takes as long as what it sends from {units.count(hidden)} on{undealt}")),
        ("TP", gpus > 1 and (sharded > usable or asked.batch < gpus),
         ("worth it where FSDP does not fit, or there are fewer sequences than GPUs; within the "
          f"{topology.node} GPUs of a node alone, because products wait for what it sends")),
        ("PP", gpus > topology.node and (tokens < hidden or asked.batch < gpus),
         ("worth it between nodes where a GPU has too few tokens for FSDP, or there are fewer sequences than GPUs; "
          "with 4 micro-batches a stage or more, because stages are idle at both ends of a step")),
        ("CP", load.sequence >= _LONG, f"worth it for sequences from {_LONG} tokens on; these have {load.sequence}"),
        ("EP", False, "worth it for experts; this model has none"),
    )  # fmt: skip
    return tuple(Ruling(kind, Say.YES if yes else Say.NO, why) for kind, yes, why in rows)


def _tokens_that_hide(asked: ParallelQuestion) -> float:
    """Tokens of a GPU's step from which on products take as long as what FSDP sends."""
    load, gpus = asked.load, asked.gpus
    sent = (2 * (1 if load.narrow_gather else load.kept.copy) + load.kept.gradient) * (gpus - 1) / gpus
    rate = asked.topology.fp8 if load.precision == "fp8" else asked.topology.bf16
    return sent * rate / (6 * asked.topology.link(gpus))


def checkpointed(asked: ParallelQuestion) -> tuple[ParallelQuestion, tuple[Planned, ...]]:
    """With the least that is computed again with which something fits; with all of it where nothing does."""
    for level in Checkpointing:
        other = replace(asked, load=replace(asked.load, checkpointing=level))
        plans = ranking(other)
        if plans and plans[0].fits:
            break
    return other, plans


def outside(model: DecoderModel, gpus: int, sequence: int) -> tuple[str, ...]:
    """What of a training no published one is like, each with what those have: there bands are no more than a guess."""
    aspects: tuple[tuple[str, Callable[[int], str], int, tuple[int, int]], ...] = (
        ("GPUs", str, gpus, PUBLISHED_GPUS),
        ("weights", units.count, model.weights, PUBLISHED_WEIGHTS),
        ("tokens a sequence", str, sequence, PUBLISHED_SEQUENCES),
    )
    return tuple(
        f"{show(asked)} {what} (published: {show(least)} to {show(most)})"
        for what, show, asked, (least, most) in aspects
        if not least <= asked <= most
    )
