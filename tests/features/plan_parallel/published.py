"""Published trainings on many GPUs, to compare the formulas with.

Paces are predicted for machines that are held out: the other machines' rows fit the formulas (attention's share, what
recipes give), one training of the machine itself calibrates them, and its other rows are judged.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from fp8bench.features.plan_parallel import formulas, ranking
from fp8bench.features.plan_parallel.formulas import (
    Checkpointing,
    DecoderModel,
    ParallelLayout,
    StepLoad,
    Topology,
    predict_memory,
)
from fp8bench.features.plan_parallel.ranking import (
    PUBLISHED_MODELS,
    LayoutKind,
    MeasuredTraining,
    calibrate_topology,
    layout_kind,
    predict_training_pace,
)

GIB = 1 << 30
TABLE = tomllib.loads((Path(__file__).parents[3] / "reports/plan_parallel/published.toml").read_text(encoding="utf-8"))
_LOAD = ("sequence", "local", "micro_batches", "precision", "compiled", "hidden_tensor", "narrow_gather", "fused_loss")
# Candidates for attention's share of the products' rate.
_SHARES = (0.35, 0.45, 0.55, 0.65, 0.75)
Kinds = tuple[LayoutKind, LayoutKind, bool]
# Number of machines that a pair of kinds needs to have a band.
LEAST_MACHINES = 3


@dataclass(frozen=True)
class Published:
    """A published training with its figures, and how far off the formula of memory may be."""

    name: str
    machine: str
    recipe: str
    model: DecoderModel
    layout: ParallelLayout
    load: StepLoad
    topology: Topology
    figures: Mapping[str, float]
    band: float


class Held(NamedTuple):
    """The relative error of the memory formula on a row."""

    row: Published
    error: float

    @property
    def inside(self) -> bool:
        return abs(self.error) <= self.row.band


def _row(entry: Mapping[str, Any]) -> Published:
    source = TABLE["source"][entry["source"]]
    load = {name: entry[name] for name in _LOAD if name in entry}
    gpus = TABLE["gpus"][entry.get("gpus", source.get("gpus"))]
    return Published(
        entry["name"],
        entry.get("gpus", source.get("gpus")),
        entry.get("recipe", ranking.DEFAULT_RECIPE),
        PUBLISHED_MODELS[entry["model"]],
        ParallelLayout(**entry["layout"]),
        StepLoad(checkpointing=Checkpointing(entry["checkpointing"]), **load),
        Topology(
            gpus["node"],
            GIB * gpus["memory"],
            1e9 * gpus["inside"],
            1e9 * gpus["between"],
            *(1e12 * rate for rate in gpus.get("ceilings", (0, 0))),
        ),
        {name: entry[name] for name in ("memory", "pace") if name in entry},
        entry.get("bands", {}).get("memory", 0.0),
    )


def published() -> tuple[Published, ...]:
    return tuple(map(_row, TABLE["row"]))


def held() -> list[Held]:
    """Compares memory in every row that has it."""
    rows = [row for row in published() if "memory" in row.figures]
    return [
        Held(row, predict_memory(row.model, row.layout, row.load).total / GIB / row.figures["memory"] - 1)
        for row in rows
    ]


def trainings() -> tuple[Published, ...]:
    """Compiled trainings with a pace; formulas do not model uncompiled kernels."""
    return tuple(row for row in published() if "pace" in row.figures and row.load.compiled)


def measured(row: Published) -> MeasuredTraining:
    return MeasuredTraining(row.model, row.layout, row.load, row.figures["pace"])


def uncalibrated() -> list[float]:
    """Errors of paces predicted only from published ceilings of products."""
    rows = (row for row in trainings() if row.topology.bf16)
    return [predict_training_pace(row.topology, measured(row)) / row.figures["pace"] - 1 for row in rows]


class HeldOut(NamedTuple):
    """The error of a row's pace, predicted from one other training of its machine."""

    machine: str
    by: Published
    row: Published
    error: float

    @property
    def kinds(self) -> Kinds:
        kinds = layout_kind(self.by.model, self.by.layout), layout_kind(self.row.model, self.row.layout)
        return *kinds, self.by.load.precision == self.row.load.precision


def _ratios(rows: Sequence[Published]) -> Iterator[tuple[str, str, float]]:
    """Yields machine, recipe, and FP8's rate relative to bf16's for pairs of otherwise equal rows."""
    for row in rows:
        for plain in rows:
            is_alike = replace(row.load, precision="bf16") == plain.load and row.layout == plain.layout
            if row.load.precision == "fp8" and is_alike and (row.machine, row.model) == (plain.machine, plain.model):
                topology = calibrate_topology(row.topology, measured(plain))
                least, most = 0.1, 10.0
                for _ in range(40):
                    ratio = math.sqrt(least * most)
                    slow = (
                        predict_training_pace(replace(topology, fp8=topology.bf16 * ratio), measured(row))
                        < row.figures["pace"]
                    )
                    least, most = (ratio, most) if slow else (least, ratio)
                yield row.machine, row.recipe, least


def recipes_of(rows: Sequence[Published]) -> dict[str, float]:
    """The median over machines of each machine's median."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for machine, recipe, ratio in _ratios(rows):
        ratios.setdefault(recipe, {}).setdefault(machine, []).append(ratio)
    return {recipe: median(map(median, by_machine.values())) for recipe, by_machine in ratios.items()}


def _pairs(rows: Sequence[Published], recipes: Mapping[str, float]) -> Iterator[HeldOut]:
    """Predicts each row from each other row of its machine and recipe."""
    for by in rows:
        topologies: dict[str, Topology] = {}
        for row in rows:
            narrow = {each.recipe for each in (by, row) if each.load.precision == "fp8"} or {ranking.DEFAULT_RECIPE}
            if row is by or row.machine != by.machine or len(narrow) > 1 or not narrow <= recipes.keys():
                continue
            (recipe,) = narrow
            if recipe not in topologies:
                topologies[recipe] = calibrate_topology(by.topology, measured(by), recipe)
            yield HeldOut(
                by.machine, by, row, predict_training_pace(topologies[recipe], measured(row)) / row.figures["pace"] - 1
            )


def _fitted(rows: Sequence[Published], patch: pytest.MonkeyPatch) -> None:
    """Fits attention's share and the recipes' ratios to these rows."""
    misses: dict[float, float] = {}
    for share in _SHARES:
        patch.setattr(formulas, "_ATTENTION_RATE_SHARE", share)
        recipes = recipes_of(rows)
        patch.setattr(ranking, "FP8_RATE_RATIOS", recipes)
        misses[share] = sum(math.log1p(pair.error) ** 2 for pair in _pairs(rows, recipes))
    patch.setattr(formulas, "_ATTENTION_RATE_SHARE", min(misses, key=lambda share: misses[share]))
    patch.setattr(ranking, "FP8_RATE_RATIOS", recipes_of(rows))


@cache
def held_out() -> tuple[HeldOut, ...]:
    """Leaves out one machine after the other."""
    rows = trainings()
    pairs: list[HeldOut] = []
    for machine in dict.fromkeys(row.machine for row in rows):
        with pytest.MonkeyPatch.context() as patch:
            _fitted([row for row in rows if row.machine != machine], patch)
            pairs += _pairs([row for row in rows if row.machine == machine], ranking.FP8_RATE_RATIOS)
    return tuple(pairs)


def bands(pairs: Sequence[HeldOut], least: int = LEAST_MACHINES) -> dict[Kinds, float]:
    """The largest error of each pair of kinds that enough machines have."""
    by_kinds: dict[Kinds, list[HeldOut]] = {}
    for pair in pairs:
        by_kinds.setdefault(pair.kinds, []).append(pair)
    largest = {}
    for kinds, several in by_kinds.items():
        if len({pair.machine for pair in several}) >= least:
            largest[kinds] = max(abs(pair.error) for pair in several)
    return largest


def within(pairs: Sequence[HeldOut], machines: Collection[str] = ()) -> tuple[int, int]:
    """The number of pairs with a band from the other machines, and how many are within it."""
    inside: list[bool] = []
    for machine in machines or {pair.machine for pair in pairs}:
        bands_of_others = bands([pair for pair in pairs if pair.machine != machine], LEAST_MACHINES - 1)
        pairs_of_machine = [pair for pair in pairs if pair.machine == machine and pair.kinds in bands_of_others]
        inside += [abs(pair.error) <= bands_of_others[pair.kinds] for pair in pairs_of_machine]
    return len(inside), sum(inside)
