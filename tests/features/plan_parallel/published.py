"""Published trainings on many GPUs, which the formulas are held against.

Pace is told of machines that are held out: what formulas have of published rows (the share that attention reaches, what
recipes give) is found by the others, one training of the machine itself calibrates it, and its other rows are judged.
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
    Load,
    ParallelLayout,
    Topology,
    memory_of,
)
from fp8bench.features.plan_parallel.ranking import MODELS, LayoutKind, MeasuredTraining, calibrated, kind_of, pace_with

GIB = 1 << 30
TABLE = tomllib.loads((Path(__file__).parents[3] / "reports/plan_parallel/published.toml").read_text(encoding="utf-8"))
# What formulas are held against by bands: bytes of a GPU, model FLOPs a second.
FIGURES = ("memory", "flops")
_LOAD = ("sequence", "local", "micro_batches", "precision", "compiled", "hidden_tensor", "narrow_gather", "fused_loss")
# Shares that attention's kernels may reach of what products reach: what is chosen among.
_SHARES = (0.35, 0.45, 0.55, 0.65, 0.75)
Kinds = tuple[LayoutKind, LayoutKind, bool]
# A band is told of a pair of kinds that so many machines have.
LEAST_MACHINES = 3


@dataclass(frozen=True)
class Published:
    """A row: what was run on what, the figures that were told, and how far formulas may be from each of them."""

    name: str
    machine: str
    recipe: str
    model: DecoderModel
    layout: ParallelLayout
    load: Load
    topology: Topology
    figures: Mapping[str, float]
    bands: Mapping[str, float]


class Held(NamedTuple):
    """A figure beside the formula's, by how much that is off and may be."""

    row: Published
    figure: str
    error: float
    band: float

    @property
    def inside(self) -> bool:
        return abs(self.error) <= self.band


def _row(entry: Mapping[str, Any]) -> Published:
    source = TABLE["source"][entry["source"]]
    load = {name: entry[name] for name in _LOAD if name in entry}
    gpus = TABLE["gpus"][entry.get("gpus", source.get("gpus"))]
    return Published(
        entry["name"], entry.get("gpus", source.get("gpus")), entry.get("recipe", ranking.DEFAULT_RECIPE),
        MODELS[entry["model"]], ParallelLayout(**entry["layout"]),
        Load(checkpointing=Checkpointing(entry["checkpointing"]), **load),
        Topology(gpus["node"], GIB * gpus["memory"], 1e9 * gpus["inside"], 1e9 * gpus["between"],
                 *(1e12 * rate for rate in gpus.get("ceilings", (0, 0)))),
        {name: entry[name] for name in (*FIGURES, "pace") if name in entry}, entry.get("bands", {}),
    )  # fmt: skip


def published() -> tuple[Published, ...]:
    return tuple(map(_row, TABLE["row"]))


def held() -> Iterator[Held]:
    """Memory and FLOPs of every row. FLOPs are those of the tokens that were told, whatever the formula's pace."""
    for row in published():
        told = {
            "memory": memory_of(row.model, row.layout, row.load).total / GIB,
            "flops": row.figures.get("pace", 0.0) * row.model.token_flops(row.load.sequence) / 1e12,
        }
        for figure in told.keys() & row.figures.keys():
            yield Held(row, figure, told[figure] / row.figures[figure] - 1, row.bands[figure])


def trainings() -> tuple[Published, ...]:
    """Those of which formulas tell the pace: how much slower kernels are without a compiler is no matter of them."""
    return tuple(row for row in published() if "pace" in row.figures and row.load.compiled)


def measured(row: Published) -> MeasuredTraining:
    return MeasuredTraining(row.model, row.layout, row.load, row.figures["pace"])


def uncalibrated() -> list[float]:
    """Errors of paces by the ceilings of products alone, of the machines of which these are published."""
    rows = (row for row in trainings() if row.topology.bf16)
    return [pace_with(row.topology, measured(row)) / row.figures["pace"] - 1 for row in rows]


class HeldOut(NamedTuple):
    """A pace told by another training of a machine, of which nothing else was known; its kind, and that one's."""

    machine: str
    by: Published
    row: Published
    error: float

    @property
    def kinds(self) -> Kinds:
        kinds = kind_of(self.by.model, self.by.layout), kind_of(self.row.model, self.row.layout)
        return *kinds, self.by.load.precision == self.row.load.precision


def _ratios(rows: Sequence[Published]) -> Iterator[tuple[str, str, float]]:
    """What FP8 gave: machine, recipe, and rate over bf16's, of each FP8 row that differs in nothing else from one in
    bf16."""
    for row in rows:
        for plain in rows:
            alike = replace(row.load, precision="bf16") == plain.load and row.layout == plain.layout
            if row.load.precision == "fp8" and alike and (row.machine, row.model) == (plain.machine, plain.model):
                topology = calibrated(row.topology, measured(plain))
                least, most = 0.1, 10.0
                for _ in range(40):
                    ratio = math.sqrt(least * most)
                    slow = pace_with(replace(topology, fp8=topology.bf16 * ratio), measured(row)) < row.figures["pace"]
                    least, most = (ratio, most) if slow else (least, ratio)
                yield row.machine, row.recipe, least


def recipes_of(rows: Sequence[Published]) -> dict[str, float]:
    """The middle over machines of the middle of each."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for machine, recipe, ratio in _ratios(rows):
        ratios.setdefault(recipe, {}).setdefault(machine, []).append(ratio)
    return {recipe: median(map(median, by_machine.values())) for recipe, by_machine in ratios.items()}


def _pairs(rows: Sequence[Published], recipes: Mapping[str, float]) -> Iterator[HeldOut]:
    """Of one recipe, as a plan has one; of those that `recipes` has."""
    for by in rows:
        told: dict[str, Topology] = {}
        for row in rows:
            narrow = {each.recipe for each in (by, row) if each.load.precision == "fp8"} or {ranking.DEFAULT_RECIPE}
            if row is by or row.machine != by.machine or len(narrow) > 1 or not narrow <= recipes.keys():
                continue
            (recipe,) = narrow
            if recipe not in told:
                told[recipe] = calibrated(by.topology, measured(by), recipe)
            yield HeldOut(by.machine, by, row, pace_with(told[recipe], measured(row)) / row.figures["pace"] - 1)


def _fitted(rows: Sequence[Published], patch: pytest.MonkeyPatch) -> None:
    """What formulas have of published rows, found by these."""
    misses: dict[float, float] = {}
    for share in _SHARES:
        patch.setattr(formulas, "_ATTENTION", share)
        recipes = recipes_of(rows)
        patch.setattr(ranking, "RECIPES", recipes)
        misses[share] = sum(math.log1p(pair.error) ** 2 for pair in _pairs(rows, recipes))
    patch.setattr(formulas, "_ATTENTION", min(misses, key=lambda share: misses[share]))
    patch.setattr(ranking, "RECIPES", recipes_of(rows))


@cache
def held_out() -> tuple[HeldOut, ...]:
    """One machine left out after the other."""
    rows = trainings()
    pairs: list[HeldOut] = []
    for machine in dict.fromkeys(row.machine for row in rows):
        with pytest.MonkeyPatch.context() as patch:
            _fitted([row for row in rows if row.machine != machine], patch)
            pairs += _pairs([row for row in rows if row.machine == machine], ranking.RECIPES)
    return tuple(pairs)


def bands(pairs: Sequence[HeldOut], least: int = LEAST_MACHINES) -> dict[Kinds, float]:
    """By the kinds of a pair, of those that so many machines have: the largest error."""
    alike: dict[Kinds, list[HeldOut]] = {}
    for pair in pairs:
        alike.setdefault(pair.kinds, []).append(pair)
    return {
        kinds: max(abs(pair.error) for pair in several)
        for kinds, several in alike.items()
        if len({pair.machine for pair in several}) >= least
    }


def within(pairs: Sequence[HeldOut], machines: Collection[str] = ()) -> tuple[int, int]:
    """Of how many pairs the bands that the other machines set say something, and how many are within these."""
    inside: list[bool] = []
    for machine in machines or {pair.machine for pair in pairs}:
        others = bands([pair for pair in pairs if pair.machine != machine], LEAST_MACHINES - 1)
        own = [pair for pair in pairs if pair.machine == machine and pair.kinds in others]
        inside += [abs(pair.error) <= others[pair.kinds] for pair in own]
    return len(inside), sum(inside)
