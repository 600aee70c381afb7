"""What is published of trainings on many GPUs, read from published.toml, and how far the formulas are from it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fp8bench import units
from fp8bench.features.plan_parallel.formulas import memory_of, pace_of, tokens_a_second
from fp8bench.features.plan_parallel.values import Checkpointing, Layout, Load, Topology, Transformer

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
    """By name."""
    return {name: Transformer(name, **fields) for name, fields in _table()["model"].items()}


def published() -> tuple[Published, ...]:
    """All rows."""
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
    return Published(
        entry["name"],
        source["address"],
        known,
        Layout(**entry["layout"]),
        Load(checkpointing=Checkpointing(entry["checkpointing"]), **load),
        _topology(_table()["gpus"][entry.get("gpus", source.get("gpus"))]),
        {name: entry[name] for name in FIGURES if name in entry},
        entry["bands"],
    )


def _topology(entry: Mapping[str, Any]) -> Topology:
    return Topology(
        entry["node"], GIB * entry["memory"], 1e9 * entry["inside"], 1e9 * entry["between"], 1e12 * entry["bf16"],
        1e12 * entry["fp8"],
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
