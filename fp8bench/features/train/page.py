"""A training as a page: the table that people ask for, curves, tensors by layer, and what happened.

A value of a curve at a step is the mean over the window that ends there. A window is as long as the endpoint's, so that
the last one is the endpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean, median
from typing import Any, TypeVar

from fp8bench import units
from fp8bench.features.train.experiments import parts_of
from fp8bench.features.train.values import (
    ArmCost,
    ArmRole,
    KeptTraining,
    LayerReading,
    StepRow,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.curves import HELD_OUT, Curve, Key, curves_of, gap_of, last_of
from fp8bench.features.train.verdicts.summary import summaries_of
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts
from fp8bench.features.train.view import (
    POSITION,
    answers,
    arm_cols,
    bands_of,
    facts_of,
    looks_of,
    notes_of,
    reached_table,
    title_of,
)
from fp8bench.model import MemoryRole
from fp8bench.model.codec import SCHEMA
from fp8bench.protocols import Role
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import (
    Chart,
    ChartAxis,
    ChartPoint,
    Column,
    Element,
    Field,
    Heat,
    Items,
    Lines,
    Mark,
    Page,
    Part,
    Scatter,
    Table,
    Text,
    Tone,
)
from fp8bench.report.page.charts import worth_drawing
from fp8bench.report.words.legend import MEMORY_WORDS
from fp8bench.report.words.naming import listed, many

P = TypeVar("P", int, str)
Curves = Mapping[Key, Curve]
# Means of each curve before each end; marks of an arm.
Windows = dict[Key, list[float]]
Series = tuple[str, tuple[Mark | None, ...]]
_MOST_EVENTS = 300
_ARMS = (
    "arm", "how", "loss", "held-out", "loss gap", "verdict", "tokens/s", "to the same loss", "J/step",
    "energy to the same loss", "B/param", "largest batch", "memory",
)  # fmt: skip


def page_of(kept: KeptTraining, found: TrainingVerdicts) -> Page:
    """The whole report; nothing in it tells of the machine or the time at which it is rendered."""
    training = kept.training
    curves, ends = curves_of(kept.lines, training.request.steps), ends_of(training.request.steps)
    means = _windows(curves, ends)
    parts = (
        *parts_of(kept, found),
        Part("verdict", "Does it still learn?", tuple(_verdicts(kept, found, curves)), _LEAD),
        Part("curves", "Losses", (
            *gap_curves(kept, means, ends, found.reference), *loss_curves(kept, means, ends), *held_out_curves(kept),
            *loss_by_time(kept, curves, means, ends),
        )),
        Part("memory", "Memory by what it is for", tuple(_memory(kept))),
        Part("texts", "Other looks at the trained model", tuple(_looks(kept))),
        Part("health", "What happened", tuple(_events(kept))),
        Part("tensors", "Tensors by layer", (*worst_readings(kept), *maps(kept))),
        Part("figures", "Gradients, updates and rates", tuple(figure_curves(kept, curves, ends))),
    )  # fmt: skip
    settled = (replace(part, elements=tuple(filter(_worth_showing, part.elements))) for part in parts)
    shown = tuple(part for part in settled if part.elements)
    footer = (f"Training {training.id}, {training.started[:16]}, `{training.command}`, schema {SCHEMA}.",)
    return Page(title_of(training), f"on {training.device.name}", shown, footer, tuple(facts_of(training)))


_LEAD = (
    "Each arm trained the same model on the same batches from the same weights; gaps are paired over seeds. A verdict "
    "is of this model, text and number of steps: it does not transfer to a model of another size."
)


def _worth_showing(element: Element) -> bool:
    """Charts of next to nothing are left out: their numbers stand in the first table."""
    empty = isinstance(element, Lines) and not element.series
    return not isinstance(element, Chart) or (worth_drawing(element) and not empty)


def _verdicts(kept: KeptTraining, found: TrainingVerdicts, curves: Curves) -> Iterator[Element]:
    shown = [one for one in summaries_of(kept, found, curves) if not one.arm.is_band]
    if told := tuple(answers(found)):
        yield Items(told)
    yield table("arms", "Arms", arm_cols(found, _ARMS), shown, main=True)
    yield from reached_table(found)
    yield from (Text(one) for one in (*bands_of(found), *notes_of(kept, found)))
    if not (kept.training.request.max_batch or kept.training.request.settings.make):
        yield Text("No largest batch was looked for: `fp8bench train --max-batch` does, within --memory-limit SIZE.")


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
        yield from (
            replace(element, caption=f"{part.title}: {element.caption}") if isinstance(element, Table) else element
            for element in part.elements
        )
    yield from loss_by_place(kept)


def _events(kept: KeptTraining) -> Iterator[Element]:
    events = [one for one in kept.of(TrainingEvent) if one.arm]
    if not kept.finished:
        yield Text("The training was cut off: what is said is of what was kept.", Tone.DOUBT)
    if not events:
        yield Text("Nothing: no alarm, and no value that was not finite.")
        return
    points = tuple(
        ChartPoint(event.arm, event.kind, float(event.step), float(event.seed),
              Tone.BAD if event.kind == "alarm" else Tone.PLAIN, event.words)
        for event in events
    )  # fmt: skip
    yield Scatter(
        "timeline", "Events over steps", "Each is a step of an arm in a seed.", ChartAxis("step"), ChartAxis("seed"),
        points,
    )  # fmt: skip
    cols: list[Col[TrainingEvent]] = [
        Col("arm", lambda one: one.arm), Col("seed", lambda one: one.seed, number=True, show=str),
        Col("step", lambda one: one.step, number=True, show=str), Col("what", lambda one: one.kind),
        Col("where", lambda one: f"{one.layer} {one.tensor}".strip()), Col("words", lambda one: one.words),
        Col("remedy", lambda one: one.remedy),
    ]  # fmt: skip
    yield table("events", "Events", cols, events[:_MOST_EVENTS], main=True)
    if len(events) > _MOST_EVENTS:
        yield Text(f"{many(len(events) - _MOST_EVENTS, 'more event')} are in the training's CSV.")


# Steps of a map, and arms that have maps.
_MAPPED, _MOST_ARMS = 20, 3
_MAPS: tuple[tuple[str, str, Callable[[LayerReading], float]], ...] = (
    ("amax", "largest magnitudes", lambda one: one.amax),
    ("scale", "scales", lambda one: one.scale),
)
# Which figure is the worst, and what it is called, is, counts in and shows.
_WORST: tuple[tuple[Any, str, str, str, Callable[[LayerReading], float | None], Callable[[float], str]], ...] = (
    (min, "least SNR", "of what was rounded, against the same unrounded", "dB",
     lambda one: one.signal_to_noise, units.decibels),
    (max, "most underflow", "values that became zero", "%", lambda one: one.underflow, units.percent),
    (max, "most saturated", "values that were clipped", "%", lambda one: one.saturated, units.percent),
    (max, "largest lag", "octaves above (+) or below the format's largest value", "",
     lambda one: one.lag, lambda value: f"{value:+.2f}"),
)  # fmt: skip


def worst_readings(kept: KeptTraining) -> Iterator[Element]:
    """For each arm and role the layer and step with the worst figure, over all seeds."""
    rows = []
    for arm in kept.training.arms:
        for role in Role if arm.role is ArmRole.CANDIDATE else ():
            own = [one for one in kept.of(LayerReading) if one.arm == arm.name and one.role == role]
            figures = [_worst(own, pick, value, show) for pick, _, _, _, value, show in _WORST]
            if any(figures):
                fields = [field for figure in figures for field in figure or (Field(units.NONE), Field(""))]
                rows.append((Field(arm.name), Field(role.value), *fields))
    if rows:
        columns = [Column("arm"), Column("tensors")]
        for _, name, hint, unit, _, _ in _WORST:
            columns += [Column(name, number=True, hint=hint, unit=unit), Column("where")]
        yield Table("worst", "Where each arm's format does worst", tuple(columns), tuple(rows))


def _worst(
    readings: Sequence[LayerReading], pick: Any, value: Callable[[LayerReading], float | None],
    show: Callable[[float], str],
) -> tuple[Field, Field] | None:  # fmt: skip
    known = [(found, reading) for reading in readings if (found := value(reading)) is not None and math.isfinite(found)]
    if not known:
        return None
    found, one = pick(known, key=lambda pair: pair[0])
    where = "" if pick is max and found == 0 else f"{one.layer}, step {one.step}"
    return Field(show(found), found), Field(where)


def maps(kept: KeptTraining) -> Iterator[Element]:
    """Magnitudes and scales of the first seed, each relative to its own middle over the steps."""
    seed = kept.training.request.seed
    candidates = [arm.name for arm in kept.training.arms if arm.role is ArmRole.CANDIDATE and not arm.skip]
    readings = [one for one in kept.of(LayerReading) if one.seed == seed]
    drawn = [name for name in candidates if any(reading.arm == name for reading in readings)]
    for number, name in enumerate(drawn[:_MOST_ARMS], 1):
        for role in Role:
            own = [reading for reading in readings if reading.arm == name and reading.role == role]
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
    steps = sorted({reading.step for reading in readings})
    if steps:
        steps = sorted({steps[round(place * (len(steps) - 1) / (_MAPPED - 1))] for place in range(_MAPPED)})
    known = {(reading.layer, reading.step): value(reading) for reading in readings}
    rows, values, hints = [], [], []
    for layer in dict.fromkeys(reading.layer for reading in readings):
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
            tuple(rows), tuple(map(units.whole, steps)), tuple(values), ChartAxis("times the middle, by step", "x"),
            tuple(hints), folded=True,
        )  # fmt: skip


# So many places of a curve are drawn; every number is in the training's CSV.
_PLACES = 60
_FIGURES: tuple[tuple[str, str, Callable[[StepRow], float]], ...] = (
    ("gradient-norm", "norm of the gradients, before clipping", lambda row: row.gradient_norm),
    ("clipped", "share of the gradients' norm that clipping took", lambda row: row.clipped),
    ("update-ratio", "norm of the update over that of the weights", lambda row: row.update_ratio),
    ("loss-scale", "loss scale", lambda row: row.loss_scale),
    ("rate", "learning rate", lambda row: row.rate),
)


def ends_of(steps: int) -> tuple[int, ...]:
    """How many steps are done where windows end: at most so many as are drawn, all steps the last of them."""
    window = last_of(steps)
    count = min(_PLACES, steps - window + 1)
    return tuple(sorted({window + round(one * (steps - window) / max(1, count - 1)) for one in range(count)} | {steps}))


def loss_curves(kept: KeptTraining, means: Windows, ends: Sequence[int]) -> Iterator[Element]:
    """The mean over seeds of each arm, and between which values the reference lies under all seeds it was given."""
    steps, arms = kept.training.request.steps, kept.training.arms
    names = {arm.name for arm in arms if arm.role in (ArmRole.REFERENCE, ArmRole.OTHER_SEED)}
    band = [values for (name, _), values in means.items() if name in names]
    series = []
    for arm in arms:
        if not arm.is_band:
            own = [values for (name, _), values in means.items() if name == arm.name]
            beside = band if arm.role is ArmRole.REFERENCE else []
            series.append((arm.name, tuple(_loss(own, beside, place) for place in range(len(ends)))))
    words = (
        f"Means over seeds, each of the {many(last_of(steps), 'step')} before its place. The band is from the least to "
        "the largest of the reference under all its seeds: its own and the other ones."
    )
    yield Lines(
        "loss", "Training loss over steps", words, _places(ends), ChartAxis(f"{_unit(kept)}, by steps done"),
        _told(series),
    )  # fmt: skip


def gap_curves(kept: KeptTraining, means: Windows, ends: Sequence[int], reference: str) -> Iterator[Element]:
    """By what share each arm's loss lies above the reference's in the same seed, with the interval over seeds."""
    steps, arms = kept.training.request.steps, kept.training.arms
    base = {seed: values for (name, seed), values in means.items() if name == reference}
    series = []
    for arm in arms:
        if arm.role is ArmRole.CANDIDATE:
            both = [(own, base[seed]) for (name, seed), own in means.items() if name == arm.name and seed in base]
            series.append((arm.name, tuple(_gap(both, place) for place in range(len(ends)))))
    margin = units.percent(kept.training.request.margin)
    words = (
        f"Relative to {reference} in the same seed, of the {many(last_of(steps), 'step')} before each place: the last "
        f"one is the endpoint. The band is the 95% interval over seeds; the margin is {margin}."
    )
    yield Lines(
        "gap", "Gap to the reference over steps", words, _places(ends),
        ChartAxis("gap of the loss, by steps done", "%"), _told(series),
    )  # fmt: skip


def held_out_curves(kept: KeptTraining) -> Iterator[Element]:
    """The loss on held-out text at each look."""
    seen = [(one.arm, one.step, one.loss) for one in kept.of(Validation) if one.of == HELD_OUT]
    arms = [arm.name for arm in kept.training.arms if arm.role not in (ArmRole.REPEAT, ArmRole.CHAOS)]
    steps = sorted({step for _, step, loss in seen if math.isfinite(loss)})
    yield Lines(
        "held-out", "Loss on held-out text", "Means over seeds, of text that was never trained on.", _places(steps),
        ChartAxis(f"{_unit(kept)}, by steps done"), _told(_means(arms, seen, steps)),
    )  # fmt: skip


def loss_by_place(kept: KeptTraining) -> Iterator[Element]:
    """The loss of held-out text after the last step, by where in the context a token stands."""
    every = kept.of(Validation)
    seen = [(one.arm, one.of.removeprefix(POSITION), one.loss) for one in every if one.of.startswith(POSITION)]
    arms = [arm.name for arm in kept.training.arms if not arm.is_band]
    places = list(dict.fromkeys(place for _, place, loss in seen if math.isfinite(loss)))
    yield Lines(
        "places", "Loss by place in the context", "Means over seeds, of held-out text after the last step.",
        tuple(places), ChartAxis("loss in nats a token, by tokens from the beginning"),
        _told(_means(arms, seen, places)),
    )  # fmt: skip


def _means(arms: Iterable[str], seen: Iterable[tuple[str, P, float]], places: Sequence[P]) -> Iterator[Series]:
    """Over seeds, of the losses that arms have at places."""
    known: dict[tuple[str, P], list[float]] = {}
    for arm, place, loss in seen:
        if math.isfinite(loss):
            known.setdefault((arm, place), []).append(loss)
    for arm in arms:
        yield arm, tuple(Mark("", fmean(own)) if (own := known.get((arm, place))) else None for place in places)


def loss_by_time(kept: KeptTraining, curves: Curves, means: Windows, ends: Sequence[int]) -> Iterator[Element]:
    """Native arms alone: the time of an emulation means nothing. Watched steps count as the median one."""
    points, joined = [], []
    for arm in kept.training.arms:
        key = arm.name, kept.training.request.seed
        curve = curves.get(key)
        timed = [row.seconds for row in curve.rows if row.seconds > 0] if curve is not None else []
        if curve is None or not timed or not arm.native or arm.is_band:
            continue
        usual = median(timed)
        elapsed = list(accumulate(row.seconds or usual for row in curve.rows))
        for end, loss in zip(ends, means[key], strict=True):
            if math.isfinite(loss):
                points.append(ChartPoint(arm.name, many(end, "step"), elapsed[end - 1], loss))
        joined.append(arm.name)
    if len(joined) > 1:
        yield Scatter(
            "loss-by-time", "Training loss over time", "Native arms of the first seed, by the time of their steps.",
            ChartAxis("time of the steps", "s"), ChartAxis(_unit(kept)), tuple(points), joined=tuple(joined),
        )  # fmt: skip


def figure_curves(kept: KeptTraining, curves: Curves, ends: Sequence[int]) -> Iterator[Element]:
    """What else every step says, of the first seed, one chart a figure; a figure that never changes has none."""
    for name, title, value in _FIGURES:
        series = []
        for arm in kept.training.arms:
            curve = curves.get((arm.name, kept.training.request.seed))
            if curve is not None and not arm.is_band:
                own = {end: value(curve.rows[end - 1]) for end in ends if end <= len(curve.rows)}
                marks = (Mark("", own[end]) if math.isfinite(own.get(end, math.nan)) else None for end in ends)
                series.append((arm.name, tuple(marks)))
        if len({mark.value for _, marks in series for mark in marks if mark}) > 1:
            yield Lines(
                name, title.capitalize(), "Of the first seed, at each place the last step's.", _places(ends),
                ChartAxis(f"{title}, by steps done"), _told(series), folded=True,
            )  # fmt: skip


def _windows(curves: Curves, ends: Sequence[int]) -> Windows:
    """Of each curve the mean before each end; NaN where it has not come so far, or is not finite."""
    found = {}
    for key, curve in curves.items():
        window, rows = last_of(curve.steps), curve.rows
        found[key] = [
            _mean([row.loss for row in rows[max(0, end - window) : end] if row.step not in curve.passed])
            if end <= len(rows) else math.nan for end in ends
        ]  # fmt: skip
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values and all(map(math.isfinite, values)) else math.nan


def _loss(own: Sequence[Sequence[float]], band: Sequence[Sequence[float]], place: int) -> Mark | None:
    found, around = ([one[place] for one in each if math.isfinite(one[place])] for each in (own, band))
    if not found:
        return None
    return Mark("", fmean(found), *((min(around), max(around)) if len(around) > 1 else ()))


def _gap(both: Sequence[tuple[Sequence[float], Sequence[float]]], place: int) -> Mark | None:
    """In percent; without an interval of one seed."""
    pairs = ((new[place], old[place]) for new, old in both)
    found = gap_of([100 * (new / old - 1) for new, old in pairs if math.isfinite(new) and 0 < old < math.inf])
    if found is None:
        return None
    low, high = (found.shown.low, found.shown.high) if found.shown is not None else (None, None)
    return Mark("", found.point, low, high, hint=f"of {many(found.pairs, 'seed')}")


def _places(steps: Iterable[int]) -> tuple[str, ...]:
    return tuple(map(units.whole, steps))


def _told(series: Iterable[Series]) -> tuple[Series, ...]:
    return tuple((name, marks) for name, marks in series if any(marks))


def _unit(kept: KeptTraining) -> str:
    """A model of one's own has whatever loss it has."""
    return "loss" if kept.training.request.settings.make else "loss in nats a token"
