"""A training as an HTML page: the table of arms, curves, tensors by layer, and events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from statistics import median
from typing import Any

from fp8bench import units
from fp8bench.features.train import curve_charts, view
from fp8bench.features.train.values import ArmCost, ArmRole, KeptTraining, LayerReading
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.model import MemoryRole
from fp8bench.model.codec import SCHEMA
from fp8bench.protocols import Role
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import (
    Chart,
    ChartAxis,
    Column,
    Element,
    Field,
    Lines,
    Mark,
    Page,
    Part,
    Table,
    Text,
)
from fp8bench.report.page.charts import worth_drawing
from fp8bench.report.panels import together
from fp8bench.report.words.legend import MEMORY_WORDS
from fp8bench.report.words.naming import join_words

_MOST_EVENTS = 300


def page_of(judged: JudgedTraining) -> Page:
    """The terminal's page, with charts behind its tables."""
    kept, training, text = judged.kept, judged.training, view.whole_page(judged, _MOST_EVENTS)
    parts = (
        *(part for part in text.parts if part.name != "ending"),
        Part("curves", "Losses", tuple(curve_charts.losses(judged))),
        Part("memory", "Memory by what it is for", tuple(_memory(kept))),
        Part("tensors", "Tensors by layer", (*worst_readings(kept), *tensor_lines(kept))),
        Part("figures", "Gradients, updates and rates", tuple(curve_charts.figure_curves(judged))),
    )
    settled = (replace(part, elements=tuple(filter(_worth_showing, part.elements))) for part in parts)
    shown = tuple(part for part in settled if part.elements)
    footer = f"Training {training.id}, {training.started[:16]}, `{training.command}`, schema {SCHEMA}."
    return replace(text, subtitle=f"on {training.device.name}", parts=shown, footer=(*text.footer, footer))


def _worth_showing(element: Element) -> bool:
    empty = isinstance(element, Lines) and not element.series
    return not isinstance(element, Chart) or (worth_drawing(element) and not empty)


def _memory(kept: KeptTraining) -> Iterator[Element]:
    uses = {cost.arm: cost.memory for cost in kept.of(ArmCost) if cost.memory is not None}
    common = any(use.forward for use in uses.values())  # not kept of older trainings
    known = {name: dict(use.forward if common else use.roles) for name, use in uses.items()}
    shown = [role for role in MemoryRole if any(role.value in roles for roles in known.values())]

    def size(role: str, name: str) -> int | None:
        return known[name].get(role)

    cols: list[Col[str]] = [
        Col("arm", str),
        Col("highest point", lambda name: uses[name].peak, show=units.size),
        *(Col(MEMORY_WORDS[role], partial(size, role.value), show=units.size) for role in shown),
    ]
    if known:
        when = "when the first forward pass has ended" if common else "at the highest point of a step"
        yield table("memory", f"Tensors {when}, each arm alone in memory", cols, list(known))


# Points of a line, and at most so many arms have their tensors drawn.
_PLACES, _MOST_ARMS = 30, 3
# Figures of a reading: name, which value is the worst, its value and text.
_WORST: tuple[tuple[str, Any, Callable[[LayerReading], float | None], Callable[[float], str]], ...] = (
    ("least signal to noise", min, lambda reading: reading.signal_to_noise, units.decibels),
    ("most underflow", max, lambda reading: reading.underflow, units.percent),
    ("most saturated", max, lambda reading: reading.saturated, units.percent),
    ("largest lag, in octaves", max, lambda reading: reading.lag, lambda value: f"{value:+.2f}"),
)


def worst_readings(kept: KeptTraining) -> Iterator[Element]:
    """For each candidate and role, the layer and step with the worst figures over all seeds."""
    candidates = {arm.name for arm in kept.training.arms if arm.role is ArmRole.CANDIDATE}
    readings = together(((own.arm, own.role), own) for own in kept.of(LayerReading) if own.arm in candidates)
    rows = []
    for (arm, role), own in readings.items():
        for name, pick, value_of, show in _WORST:
            pairs = ((value_of(reading), reading) for reading in own)
            known = [(value, reading) for value, reading in pairs if value is not None and math.isfinite(value)]
            if known:
                value, worst = pick(known, key=itemgetter(0))
                where = f"{worst.layer}, step {worst.step}" if value else ""
                rows.append((Field(arm), Field(role), Field(name), Field(show(value), value), Field(where)))
    if rows:
        titles = Column("arm"), Column("tensors"), Column("figure"), Column("worst", number=True), Column("where")
        yield Table("worst", "Where each arm's format does worst", titles, tuple(rows))


def tensor_lines(kept: KeptTraining) -> Iterator[Element]:
    seed = kept.training.request.seed
    candidates = [arm.name for arm in kept.training.arms if arm.role is ArmRole.CANDIDATE and not arm.skip]
    readings = together((reading.arm, reading) for reading in kept.of(LayerReading) if reading.seed == seed)
    drawn = [name for name in candidates if name in readings]
    for number, name in enumerate(drawn[:_MOST_ARMS], 1):
        yield from _draw_magnitudes(f"tensors-{number}", name, readings[name])
    if drawn[_MOST_ARMS:]:
        yield Text(
            f"{join_words(drawn[_MOST_ARMS:])} are not drawn: `fp8bench show {kept.training.id} --csv FILE` has their "
            "readings."
        )


def _draw_magnitudes(name: str, arm: str, readings: Sequence[LayerReading]) -> Iterator[Lines]:
    """Yields a chart for each role of tensors with a line for each layer, those that move most first."""
    steps = sorted({reading.step for reading in readings})
    steps = sorted({steps[round(place * (len(steps) - 1) / (_PLACES - 1))] for place in range(_PLACES)})
    for role in Role:
        layers: dict[str, dict[int, float]] = {}
        for reading in readings:
            magnitude = (reading.amax or 0.0) * reading.scale
            if reading.role == role and reading.step in steps and 0 < magnitude < math.inf:
                layers.setdefault(reading.layer, {})[reading.step] = math.log2(magnitude)
        if not layers:
            continue
        series = []
        for layer in sorted(layers, key=lambda layer: min(layers[layer].values()) - max(layers[layer].values())):
            octaves, middle = layers[layer], median(layers[layer].values())
            marks = [Mark("", octaves[step] - middle) if step in octaves else None for step in steps]
            series.append((layer, tuple(marks)))
        yield Lines(
            f"{name}-{role}s",
            f"{arm}: largest magnitudes of {role}s by layer",
            "Watched steps of the first seed: the largest magnitude, times its scale where it has one, against the "
            "middle of its line. A scale that follows its tensor keeps the line flat.",
            tuple(map(units.whole, steps)),
            ChartAxis("octaves from its middle"),
            tuple(series),
        )
