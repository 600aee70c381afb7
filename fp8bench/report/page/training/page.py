"""A training as a page: the table that people ask for, curves, tensors by layer, and what happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fp8bench import units
from fp8bench.analysis.learning.curves import curves_of
from fp8bench.analysis.learning.summary import ArmSummary, summaries_of
from fp8bench.analysis.learning.verdicts import Verdicts
from fp8bench.model import MemoryRole
from fp8bench.model.codec import SCHEMA
from fp8bench.model.training import ArmCost, ArmRole, KeptTraining, TrainingEvent
from fp8bench.report.capacities import show_batch
from fp8bench.report.elements import (
    Axis,
    Chart,
    Column,
    Element,
    Field,
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
from fp8bench.report.page.training import curves as drawn
from fp8bench.report.page.training.tensors import maps, worst_readings
from fp8bench.report.terminal.training import bands_of, facts_of, looks_of, notes_of, row_of, title_of
from fp8bench.report.words import learning as words
from fp8bench.report.words.legend import MEMORY_WORDS
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
