"""Every way to cut a training for so many GPUs, those that fit the fastest first, and what speaks for each kind.

A figure has the band within which formulas described published trainings of its kind: rows of published.toml.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

from fp8bench import units
from fp8bench.features.plan_parallel.formulas import (
    STATES,
    Checkpointing,
    Layout,
    Load,
    Memory,
    Pace,
    Topology,
    Transformer,
    memory_of,
    pace_of,
    tokens_a_second,
)

# So much of a GPU's memory a plan may take: the rest is the driver's and the libraries'.
USABLE = 0.97
# In shorter pieces of a sequence attention's kernels are less busy than formulas say.
_SHORTEST = 4096
# From here on a sequence is long enough to be cut.
_LONG = 32768
# Paces within so much of each other are one: the simpler layout comes first.
_ALIKE = 1.02
# Narrower products than these keep a GPU less busy than its rates say.
_NARROW = 1024


@dataclass(frozen=True)
class Asked:
    """A training: `batch` sequences a step in all. `load` says how a step is done; its sizes are each layout's."""

    model: Transformer
    gpus: int
    batch: int
    load: Load
    topology: Topology


@dataclass(frozen=True)
class Planned:
    """One way, with what it takes; `tokens` are those a second and GPU. A `tight` one fits unless its memory is at the
    upper end of its band."""

    layout: Layout
    load: Load
    memory: Memory
    pace: Pace
    tokens: float
    fits: bool
    tight: bool

    @property
    def kinds(self) -> int:
        """Ways that it is cut, whatever their number."""
        one = self.layout
        return sum(count > 1 for count in (one.copies, one.shards, one.tensor, one.pipeline, one.context))


def memory_band(layout: Layout) -> float:
    """How far the formulas were from published trainings of that kind, as a share."""
    return 0.05 if layout.tensor == layout.pipeline == 1 else 0.15


def pace_band(model: Transformer, layout: Layout) -> float:
    """The same of their pace."""
    if layout.tensor > 1 and model.width / layout.tensor < _NARROW:
        return 0.4
    return 0.3 if layout.context > 1 else 0.15


def ranking(asked: Asked) -> tuple[Planned, ...]:
    """All ways that divide evenly: those that fit first, the fastest of them first; others by what they lack."""
    found = [best for layout in layouts(asked) if (best := _best(asked, layout)) is not None]

    def place(one: Planned) -> tuple[float, ...]:
        if not one.fits:
            return 1, one.memory.total
        return 0, -round(math.log(one.tokens, _ALIKE)), one.kinds, one.memory.total

    return tuple(sorted(found, key=place))


def layouts(asked: Asked) -> Iterator[Layout]:
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
                inner = Layout(tensor=tensor, pipeline=pipeline, context=context)
                for shards in sorted({1, ranks, _within_a_node(asked.topology, inner, ranks)}):
                    for virtual in (1, 2) if 1 < pipeline <= model.layers // 2 else (1,):
                        yield replace(inner, shards=shards, copies=ranks // shards, virtual=virtual)


def _within_a_node(topology: Topology, inner: Layout, ranks: int) -> int:
    """Shards that stay within a node: a whole number of them, or all."""
    room = topology.node // (inner.tensor * inner.context)
    return room if room > 1 and ranks % room == 0 else ranks


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _best(asked: Asked, layout: Layout) -> Planned | None:
    """With the micro-batches that are fastest among those that fit; with the most where none does."""
    local = asked.batch * layout.inner // asked.gpus
    options = [_planned(asked, layout, local, count) for count in _divisors(local)]
    fitting = [one for one in options if one.fits]
    return max(fitting, key=lambda one: one.tokens) if fitting else options[-1]


def _planned(asked: Asked, layout: Layout, local: int, count: int) -> Planned:
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


def rulings(asked: Asked) -> tuple[Ruling, ...]:
    """When each kind is worth it: rules of thumb, of which the ranking knows the figures."""
    model, topology, load = asked.model, asked.topology, asked.load
    usable, gpus = USABLE * topology.memory, asked.gpus
    alone = memory_of(model, Layout(copies=gpus), replace(load, local=1, micro_batches=1)).total
    sharded = memory_of(model, Layout(shards=gpus), replace(load, local=1, micro_batches=1)).total
    tokens = asked.batch * load.sequence / gpus
    dealt = asked.batch % gpus == 0
    undealt = "" if dealt else f"; but {asked.batch} sequences cannot be dealt out evenly to {gpus} GPUs"
    hidden = _tokens_that_hide(asked)
    room = units.size(usable)
    rows = (
        ("DDP", alone <= usable and dealt,
         (f"all {STATES} bytes a weight and one sequence take {units.size(alone)} of {room} that a plan may "
          f"use{undealt}")),
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


def _tokens_that_hide(asked: Asked) -> float:
    """Tokens of a GPU's step from which on products take as long as what FSDP sends."""
    sent = (2 * (1 if asked.load.narrow_gather else 2) + 4) * (asked.gpus - 1) / asked.gpus
    rate = asked.topology.fp8 if asked.load.precision == "fp8" else asked.topology.bf16
    return sent * rate / (6 * asked.topology.link(asked.gpus))


def checkpointed(asked: Asked) -> tuple[Asked, tuple[Planned, ...]]:
    """With the least that is computed again with which something fits; with all of it where nothing does."""
    for level in Checkpointing:
        other = replace(asked, load=replace(asked.load, checkpointing=level))
        plans = ranking(other)
        if plans and plans[0].fits:
            break
    return other, plans


GIB = 1 << 30
# What is compared: bytes of a GPU, tokens a second, model FLOPs a second.
FIGURES = ("memory", "pace", "flops")
_LOAD = ("sequence", "local", "micro_batches", "precision", "compiled", "hidden_tensor", "narrow_gather", "fused_loss")


@dataclass(frozen=True)
class Published:
    """A row: what was run on what, the figures that were told, and how far formulas may be from each of them."""

    name: str
    source: str
    model: Transformer
    layout: Layout
    load: Load
    topology: Topology
    figures: Mapping[str, float]
    bands: Mapping[str, float]


@dataclass(frozen=True)
class Held:
    """A figure beside the formula's. `band` is None where the formula was fitted to it."""

    row: Published
    figure: str
    published: float
    found: float
    band: float | None

    @property
    def error(self) -> float:
        return self.found / self.published - 1

    @property
    def inside(self) -> bool:
        return self.band is None or abs(self.error) <= self.band


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(files(__package__).joinpath("published.toml").read_text(encoding="utf-8"))


def models() -> dict[str, Transformer]:
    return {name: Transformer(name, **fields) for name, fields in _table()["model"].items()}


def published() -> tuple[Published, ...]:
    return tuple(_row(entry) for entry in _table()["row"])


def outside(model: Transformer, gpus: int, sequence: int) -> tuple[str, ...]:
    """What of a training no row is like, each with what rows have: there the bands are no more than a guess."""
    rows = published()
    found: tuple[tuple[str, Callable[[int], str], int, list[int]], ...] = (
        ("GPUs", str, gpus, [row.layout.gpus for row in rows]),
        ("weights", units.count, model.weights, [row.model.weights for row in rows]),
        ("tokens a sequence", str, sequence, [row.load.sequence for row in rows]),
    )
    return tuple(
        f"{show(asked)} {what} (published: {show(min(known))} to {show(max(known))})"
        for what, show, asked, known in found
        if not min(known) <= asked <= max(known)
    )


def _row(entry: Mapping[str, Any]) -> Published:
    source = _table()["source"][entry["source"]]
    known = models()[entry["model"]]
    load = {name: entry[name] for name in _LOAD if name in entry}
    gpus = _table()["gpus"][entry.get("gpus", source.get("gpus"))]
    return Published(
        entry["name"], source["address"], known, Layout(**entry["layout"]),
        Load(checkpointing=Checkpointing(entry["checkpointing"]), **load),
        Topology(gpus["node"], GIB * gpus["memory"], 1e9 * gpus["inside"], 1e9 * gpus["between"], 1e12 * gpus["bf16"],
                 1e12 * gpus["fp8"]),
        {name: entry[name] for name in FIGURES if name in entry}, entry["bands"],
    )  # fmt: skip


def held(rows: tuple[Published, ...]) -> Iterator[Held]:
    """Every figure of every row. FLOPs are those of the tokens that were told, whatever the formula's pace."""
    for row in rows:
        for figure, told in row.figures.items():
            if figure == "memory":
                found = memory_of(row.model, row.layout, row.load).total / GIB
            elif figure == "pace":
                if not row.load.compiled:
                    continue  # how much slower kernels are without a compiler is no matter of formulas
                found = tokens_a_second(row.layout, row.load, pace_of(row.model, row.layout, row.load, row.topology))
            else:
                found = row.figures["pace"] * row.model.token_flops(row.load.sequence) / 1e12
            yield Held(row, figure, told, found, row.bands.get(figure))


def worst_errors(rows: Sequence[Held]) -> dict[str, float]:
    """By figure, of the rows that formulas were not fitted to."""
    known = [row for row in rows if row.band is not None]
    return {name: max(abs(row.error) for row in known if row.figure == name) for name in FIGURES}
