"""Published trainings on many GPUs, which the formulas are held against."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8bench.features.plan_parallel.formulas import (
    Checkpointing,
    DecoderModel,
    Load,
    ParallelLayout,
    Topology,
    memory_of,
    pace_of,
    tokens_a_second,
)
from fp8bench.features.plan_parallel.ranking import MODELS

GIB = 1 << 30
TABLE = tomllib.loads((Path(__file__).parents[3] / "reports/plan_parallel/published.toml").read_text(encoding="utf-8"))
# What is compared: bytes of a GPU, tokens a second, model FLOPs a second.
FIGURES = ("memory", "pace", "flops")
_LOAD = ("sequence", "local", "micro_batches", "precision", "compiled", "hidden_tensor", "narrow_gather", "fused_loss")


@dataclass(frozen=True)
class Published:
    """A row: what was run on what, the figures that were told, and how far formulas may be from each of them."""

    name: str
    model: DecoderModel
    layout: ParallelLayout
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


def published() -> tuple[Published, ...]:
    return tuple(map(_row, TABLE["row"]))


def _row(entry: Mapping[str, Any]) -> Published:
    source = TABLE["source"][entry["source"]]
    load = {name: entry[name] for name in _LOAD if name in entry}
    gpus = TABLE["gpus"][entry.get("gpus", source.get("gpus"))]
    return Published(
        entry["name"], MODELS[entry["model"]], ParallelLayout(**entry["layout"]),
        Load(checkpointing=Checkpointing(entry["checkpointing"]), **load),
        Topology(gpus["node"], GIB * gpus["memory"], 1e9 * gpus["inside"], 1e9 * gpus["between"], 1e12 * gpus["bf16"],
                 1e12 * gpus["fp8"]),
        {name: entry[name] for name in FIGURES if name in entry}, entry["bands"],
    )  # fmt: skip


def held() -> Iterator[Held]:
    """Every figure of every row. FLOPs are those of the tokens that were told, whatever the formula's pace."""
    for row in published():
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
