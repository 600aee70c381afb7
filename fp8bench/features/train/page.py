"""A training as a page: the table that people ask for, curves, tensors by layer, and what happened."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from fp8bench import units
from fp8bench.features.train import page_curves as drawn
from fp8bench.features.train import words
from fp8bench.features.train.values import ArmCost, ArmRole, KeptTraining, LayerReading, TrainingEvent
from fp8bench.features.train.verdicts.curves import curves_of
from fp8bench.features.train.verdicts.summary import ArmSummary, summaries_of
from fp8bench.features.train.verdicts.verdicts import Verdicts
from fp8bench.features.train.view import bands_of, facts_of, looks_of, notes_of, row_of, title_of
from fp8bench.model import MemoryRole
from fp8bench.model.codec import SCHEMA
from fp8bench.protocols import Role
from fp8bench.report.capacities import show_batch
from fp8bench.report.elements import (
    Axis,
    Chart,
    Column,
    Element,
    Field,
    Heat,
    Lines,
    Page,
    Part,
    Point,
    Scatter,
    Table,
    Text,
    Tone,
)
from fp8bench.report.page.charts import worth_drawing
from fp8bench.report.words.legend import MEMORY_WORDS
from fp8bench.report.words.naming import listed
from fp8bench.report.words.run_facts import many

_MOST_EVENTS = 300
_ARMS = (
    Column("arm"), Column("how", hint="native: the device multiplies in it"),
    Column("loss", number=True, hint="of training, the mean over seeds and the last tenth of the steps"),
    Column("held-out", number=True, hint="the loss on text that was never trained on"),
    Column("loss gap", hint="to the reference of the same seed, with the 95% interval over seeds"),
    Column("verdict", hint="by the 99% interval"),
    Column("tokens/s", number=True, hint="by the median step; of native arms"),
    Column("to the same loss", hint="speed times steps: how much sooner the arm is as good; of native arms"),
    Column("J/step", number=True, hint="by windows of steps of the arm alone"),
    Column("energy to the same loss", hint="times the reference's: joules of a step times steps; of native arms"),
    Column("B/param", number=True, hint="bytes kept between two steps for each parameter, as counted"),
    Column("largest batch", number=True, hint="sequences that fit, by runs of them; --max-batch looks for it"),
    Column("memory", number=True, hint="tensors at the highest point of a step, with no other arm in memory"),
)  # fmt: skip


def page_of(kept: KeptTraining, found: Verdicts) -> Page:
    """The whole report; nothing in it tells of the machine or the time at which it is rendered."""
    training = kept.training
    curves = curves_of(kept.lines, training.request.steps)
    parts = (
        Part("verdict", "Does it still learn?", tuple(_verdicts(kept, found, curves)), _LEAD),
        Part("curves", "Losses", (
            *drawn.gap_curves(kept, curves), *drawn.loss_curves(kept, curves), *drawn.held_out_curves(kept),
            *drawn.loss_by_time(kept, curves),
        )),
        Part("memory", "Memory by what it is for", tuple(_memory(kept))),
        Part("texts", "Other looks at the trained model", tuple(_looks(kept))),
        Part("health", "What happened", tuple(_events(kept))),
        Part("tensors", "Tensors by layer", (*worst_readings(kept), *maps(kept))),
        Part("figures", "Gradients, updates and rates", tuple(drawn.figure_curves(kept, curves))),
    )  # fmt: skip
    settled = (Part(one.name, one.title, tuple(_drawable(one.elements)), one.lead) for one in parts)
    footer = (f"Training {training.id}, {training.started[:16]}, `{training.command}`, schema {SCHEMA}.",)
    return Page(
        title_of(training), f"on {training.device.name}", tuple(one for one in settled if one.elements), footer,
        tuple(facts_of(training)),
    )  # fmt: skip


_LEAD = (
    "Each arm trained the same model on the same batches from the same weights; gaps are paired over seeds. A verdict "
    "is of this model, text and number of steps: it does not transfer to a model of another size."
)


def _drawable(elements: Sequence[Element]) -> Iterator[Element]:
    """Charts of next to nothing are left out: their numbers stand in the first table."""
    for one in elements:
        if not isinstance(one, Chart) or (worth_drawing(one) and not (isinstance(one, Lines) and not one.series)):
            yield one


def _verdicts(kept: KeptTraining, found: Verdicts, curves: drawn.Curves) -> Iterator[Element]:
    rows = []
    for summary in summaries_of(kept, found, curves):
        arm, said = summary.arm, summary.said
        if arm.role not in (ArmRole.REFERENCE, ArmRole.CANDIDATE):
            continue
        name, how, loss, held_out, gap, speed, size, memory, _, verdict = row_of(summary, found)
        sooner = words.speed(said.speed, arm.native) if said is not None and said.speed is not None else units.NONE
        largest = Field(show_batch(summary.capacity) if summary.capacity else units.NONE)
        rows.append(
            (name, how, loss, held_out, gap, verdict, speed, Field(sooner), *_energy(summary), size, largest, memory)
        )
    yield Table("arms", "Arms", _ARMS, tuple(rows), main=True)
    yield from (Text(one) for one in (*bands_of(found), *notes_of(kept, found)))
    if not kept.training.request.max_batch:
        yield Text("No largest batch was looked for: `fp8bench train --max-batch` does, within --memory-limit SIZE.")


def _energy(summary: ArmSummary) -> tuple[Field, Field]:
    energy = summary.energy
    joules = energy.joules.middle if energy and energy.joules else None
    step = Field(units.NONE) if joules is None else Field(units.joules(joules), joules)
    if energy is None or energy.to_loss is None:
        return step, Field(units.NONE)
    return step, Field(words.energy_to_loss(energy.to_loss, energy.at_least), energy.to_loss.point)


def _memory(kept: KeptTraining) -> Iterator[Element]:
    """What the tensors of each arm were for at the highest point of a step."""
    uses = {one.arm: one.memory for one in kept.of(ArmCost) if one.memory is not None}
    known = {name: dict(use.roles) for name, use in uses.items() if use.roles}
    shown = [role for role in MemoryRole if any(role.value in roles for roles in known.values())]
    columns = (Column("arm"), *(Column(MEMORY_WORDS[role], number=True) for role in shown))
    rows = tuple(
        (Field(name), *(Field(units.size(size), size) if (size := roles.get(role.value)) else Field(units.NONE)
                        for role in shown))
        for name, roles in known.items()
    )  # fmt: skip
    if rows:
        yield Table("memory", "Tensors at the highest point of a step, each arm alone in memory", columns, rows)


def _looks(kept: KeptTraining) -> Iterator[Element]:
    """What was seen after the last step, and the loss by place in the context."""
    for part in looks_of(kept):
        yield from (replace(one, caption=part.title) if isinstance(one, Table) else one for one in part.elements)
    yield from drawn.loss_by_place(kept)


def _events(kept: KeptTraining) -> Iterator[Element]:
    events = [one for one in kept.of(TrainingEvent) if one.arm]
    if not kept.finished:
        yield Text("The training was cut off: what is said is of what was kept.", Tone.DOUBT)
    if not events:
        yield Text("Nothing: no alarm, and no value that was not finite.")
        return
    points = tuple(
        Point(one.arm, one.kind, float(one.step), float(one.seed), Tone.BAD if one.kind == "alarm" else Tone.PLAIN,
              one.words)
        for one in events
    )  # fmt: skip
    yield Scatter(
        "timeline", "Events over steps", "Each is a step of an arm in a seed.", Axis("step"), Axis("seed"),
        points,
    )  # fmt: skip
    columns = (
        Column("arm"), Column("seed", number=True), Column("step", number=True), Column("what"), Column("where"),
        Column("words"), Column("remedy"),
    )  # fmt: skip
    rows = tuple(
        (Field(one.arm), Field(str(one.seed), one.seed), Field(str(one.step), one.step), Field(one.kind),
         Field(f"{one.layer} {one.tensor}".strip()), Field(one.words), Field(one.remedy))
        for one in events[:_MOST_EVENTS]
    )  # fmt: skip
    yield Table("events", "Events", columns, rows, main=True)
    if len(events) > _MOST_EVENTS:
        yield Text(f"{many(len(events) - _MOST_EVENTS, 'more event')} are in the training's CSV.")


# Steps of a map, and arms that have maps.
_PLACES, _MOST_ARMS = 20, 3
_Told = tuple[tuple[str, float, str], ...]
_MAPS: tuple[tuple[str, str, Callable[[LayerReading], float]], ...] = (
    ("amax", "largest magnitudes", lambda one: one.amax),
    ("scale", "scales", lambda one: one.scale),
)
_COLUMNS = (
    Column("arm"), Column("tensors"),
    Column("least SNR", number=True, hint="of what was rounded, against the same unrounded", unit="dB"),
    Column("where"),
    Column("most underflow", number=True, hint="values that became zero", unit="%"), Column("where"),
    Column("most saturated", number=True, hint="values that were clipped", unit="%"), Column("where"),
    Column("largest lag", number=True, hint="octaves above (+) or below the format's largest value"), Column("where"),
)  # fmt: skip


def worst_readings(kept: KeptTraining) -> Iterator[Element]:
    """For each arm and role the layer and step with the worst figure, over all seeds."""
    rows = []
    for arm in kept.training.arms:
        if arm.role is not ArmRole.CANDIDATE:
            continue
        for role in Role:
            own = [one for one in kept.of(LayerReading) if one.arm == arm.name and one.role == role]
            figures = (
                _worst(own, lambda one: one.signal_to_noise, units.decibels, least=True),
                _worst(own, lambda one: one.underflow, units.percent),
                _worst(own, lambda one: one.saturated, units.percent),
                _worst(own, lambda one: one.lag, lambda value: f"{value:+.2f}"),
            )
            if any(figures):
                fields = [field for figure in figures for field in figure or (Field(units.NONE), Field(""))]
                rows.append((Field(arm.name), Field(role.value), *fields))
    if rows:
        yield Table("worst", "Where each arm's format does worst", _COLUMNS, tuple(rows))


def _worst(
    readings: Sequence[LayerReading], value: Callable[[LayerReading], float | None], show: Callable[[float], str],
    least: bool = False,
) -> tuple[Field, Field] | None:  # fmt: skip
    known = [(found, one) for one in readings if (found := value(one)) is not None and math.isfinite(found)]
    if not known:
        return None
    found, one = min(known, key=lambda pair: pair[0] if least else -pair[0])
    if not least and found == 0:
        return Field(show(found), found), Field("")
    return Field(show(found), found), Field(f"{one.layer}, step {one.step}")


def maps(kept: KeptTraining) -> Iterator[Element]:
    """Magnitudes and scales of the first seed, each relative to its own middle over the steps."""
    seed = kept.training.request.seed
    candidates = [arm.name for arm in kept.training.arms if arm.role is ArmRole.CANDIDATE and not arm.skip]
    readings = [one for one in kept.of(LayerReading) if one.seed == seed]
    drawn = [name for name in candidates if any(one.arm == name for one in readings)]
    for number, name in enumerate(drawn[:_MOST_ARMS], 1):
        for role in Role:
            own = [one for one in readings if one.arm == name and one.role == role]
            for word, title, value in _MAPS:
                yield from _map(f"{word}-{number}-{role.value}", f"{name}: {title} of {role.value}s", own, value)
    if drawn[_MOST_ARMS:]:
        yield Text(
            f"No maps are drawn of {listed(drawn[_MOST_ARMS:])}: `fp8bench show {kept.training.id} --csv FILE` has "
            "their readings."
        )


def _map(
    name: str, title: str, readings: Sequence[LayerReading], value: Callable[[LayerReading], float]
) -> Iterator[Element]:
    steps = sorted({one.step for one in readings})
    steps = (
        sorted({steps[round(place * (len(steps) - 1) / (_PLACES - 1))] for place in range(_PLACES)}) if steps else []
    )
    known = {(one.layer, one.step): value(one) for one in readings}
    rows, values, hints = [], [], []
    for layer in dict.fromkeys(one.layer for one in readings):
        own = [known.get((layer, step)) for step in steps]
        good = [one for one in own if one is not None and 0 < one < math.inf]
        if good and min(good) < max(good):
            middle = median(good)
            rows.append(f"{layer} ({units.significant(middle)})")
            values.append(tuple(one / middle if one is not None and 0 < one < math.inf else None for one in own))
            hints.append(tuple("" if one is None else units.significant(one) for one in own))
    if rows:
        yield Heat(
            name, title,
            "Each relative to its own middle over the steps, which stands in brackets; the first seed.",
            tuple(rows), tuple(map(units.whole, steps)), tuple(values), Axis("times the middle, by step", "x"),
            tuple(hints), folded=True,
        )  # fmt: skip
