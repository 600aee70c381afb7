"""A training as an HTML page: the table of arms, curves over steps, tensors by layer, and events.

A point of a loss is the mean over the window that ends there. Windows are as long as the endpoint's, so that the last
point is the endpoint; the first ones have fewer steps. A point of the gap is the gap if the training had ended there.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from statistics import fmean, median
from typing import Any

from fp8bench import units
from fp8bench.features.train import view
from fp8bench.features.train.frame import FIGURES, Figure, frame_of
from fp8bench.features.train.values import Arm, ArmCost, ArmRole, KeptTraining, LayerReading, TrainingEvent, Validation
from fp8bench.features.train.verdicts.curves import (
    HELD_OUT,
    Curve,
    Curves,
    curves_of_arm,
    gap_of,
    gaps_at,
    last_of,
)
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
    Tone,
)
from fp8bench.report.page.charts import worth_drawing
from fp8bench.report.panels import together
from fp8bench.report.words.legend import MEMORY_WORDS
from fp8bench.report.words.naming import join_words, many

_MOST_EVENTS = 300


def page_of(judged: JudgedTraining) -> Page:
    """Returns the terminal's page, with charts after its tables."""
    stored, training, text = judged.kept, judged.training, view.whole_page(judged, _MOST_EVENTS)
    parts = (
        *(part for part in text.parts if part.name != "ending"),
        Part("curves", "Losses", tuple(loss_charts(judged))),
        Part("memory", "Memory by what it is for", tuple(_memory(stored))),
        Part("tensors", "Tensors by layer", (*worst_readings(stored), *tensor_lines(stored))),
        Part("figures", "Gradients, updates and rates", tuple(figure_charts(judged))),
    )
    # Parts without anything to show have no heading.
    settled = (replace(part, elements=tuple(filter(_worth_showing, part.elements))) for part in parts)
    shown = tuple(part for part in settled if part.elements)
    if training.is_watched:
        return replace(text, parts=shown, footer=(f"Streams of fp8bench.watch, schema {SCHEMA}.",))
    footer = f"Training {training.id}, {training.started[:16]}, `{training.command}`, schema {SCHEMA}."
    return replace(text, subtitle=f"on {training.device.name}", parts=shown, footer=(*text.footer, footer))


def _worth_showing(element: Element) -> bool:
    empty = isinstance(element, Lines) and not element.series
    return not isinstance(element, Chart) or (worth_drawing(element) and not empty)


def _memory(stored: KeptTraining) -> Iterator[Element]:
    uses = {cost.arm: cost.memory for cost in stored.of(ArmCost) if cost.memory is not None}
    # Peaks are at different moments in different arms; the end of the forward pass is the same in all.
    common = any(use.forward for use in uses.values())  # older trainings did not store it
    sizes = {name: dict(use.forward if common else use.roles) for name, use in uses.items()}
    used = set().union(*sizes.values())
    shown = [role for role in MemoryRole if role.value in used]

    def size(role: str, name: str) -> int | None:
        return sizes[name].get(role)

    cols: list[Col[str]] = [
        Col("arm", str),
        Col("highest point", lambda name: uses[name].peak, show=units.size),
        *(Col(MEMORY_WORDS[role], partial(size, role.value), show=units.size) for role in shown),
    ]
    if sizes:
        when = "when the first forward pass has ended" if common else "at the highest point of a step"
        yield table("memory", f"Tensors {when}, each arm alone in memory", cols, list(sizes))


# The number of points on a line, and of arms whose tensors are drawn.
_PLACES, _MOST_ARMS = 30, 3
# Figures of a reading: name, which value is the worst, its value and text.
_WORST: tuple[tuple[str, Any, Callable[[LayerReading], float | None], Callable[[float], str]], ...] = (
    ("least signal to noise", min, lambda reading: reading.signal_to_noise, units.decibels),
    ("most underflow", max, lambda reading: reading.underflow, units.percent),
    ("most saturated", max, lambda reading: reading.saturated, units.percent),
    ("largest lag, in octaves", max, lambda reading: reading.lag, lambda value: f"{value:+.2f}"),
)


def worst_readings(stored: KeptTraining) -> Iterator[Element]:
    """Yields, for each candidate and role, the layer and step with the worst figures over all seeds."""
    shown = {arm.name for arm in stored.training.cast_arms}
    readings = (reading for reading in stored.of(LayerReading) if reading.arm in shown)
    by_role = together(((reading.arm, reading.role), reading) for reading in readings)
    rows = []
    for (arm, role), readings_of_role in by_role.items():
        for name, pick, value_of, show in _WORST:
            pairs = ((value_of(reading), reading) for reading in readings_of_role)
            finite = [(value, reading) for value, reading in pairs if value is not None and math.isfinite(value)]
            if finite:
                value, worst = pick(finite, key=itemgetter(0))
                if stored.training.is_watched and not value:  # most loops cast nothing that could be seen
                    continue
                where = f"{worst.layer}, step {worst.step}" if value else ""
                rows.append((Field(arm), Field(role), Field(name), Field(show(value), value), Field(where)))
    if rows:
        titles = Column("arm"), Column("tensors"), Column("figure"), Column("worst", number=True), Column("where")
        yield Table("worst", "Where each arm's format does worst", titles, tuple(rows))


def tensor_lines(stored: KeptTraining) -> Iterator[Element]:
    seed = stored.request.seed
    readings = together((reading.arm, reading) for reading in stored.of(LayerReading) if reading.seed == seed)
    drawn = [arm.name for arm in stored.training.cast_arms if arm.name in readings]
    for number, name in enumerate(drawn[:_MOST_ARMS], 1):
        yield from _draw_magnitudes(f"tensors-{number}", name, readings[name])
    if drawn[_MOST_ARMS:]:
        yield Text(
            f"{join_words(drawn[_MOST_ARMS:])} are not drawn: `fp8bench show {stored.training.id} --csv FILE` has "
            "readings."
        )


def _draw_magnitudes(name: str, arm: str, readings: Sequence[LayerReading]) -> Iterator[Lines]:
    """Yields a chart for each role of tensors with a line for each layer, those that move most first."""
    # Thirty points are enough to show a drift; the CSV has every reading.
    steps = sorted({reading.step for reading in readings})
    steps = sorted({steps[round(place * (len(steps) - 1) / (_PLACES - 1))] for place in range(_PLACES)})
    for role in Role:
        layers: dict[str, dict[int, float]] = {}
        for reading in readings:
            # Multiplied by its scale: the value that the format had to represent.
            magnitude = (reading.amax or 0.0) * reading.scale
            if reading.role == role and reading.step in steps and 0 < magnitude < math.inf:
                layers.setdefault(reading.layer, {})[reading.step] = math.log2(magnitude)
        if not layers:
            continue
        series = []
        # Layers that move most come first, because a reader looks at few lines.
        for layer in sorted(layers, key=lambda layer: min(layers[layer].values()) - max(layers[layer].values())):
            # Centred at its median, since layers are many octaves apart.
            octaves, middle = layers[layer], median(layers[layer].values())
            marks = [Mark("", octaves[step] - middle) if step in octaves else None for step in steps]
            series.append((layer, tuple(marks)))
        yield Lines(
            f"{name}-{role}s",
            f"{arm}: largest magnitudes of {role}s by layer",
            "Watched steps, of several seeds those of the first: the largest magnitude, times its scale where it has "
            "one, against the middle of its line. A scale that follows its tensor keeps the line flat.",
            tuple(map(units.whole, steps)),
            ChartAxis("octaves from its middle"),
            tuple(series),
        )


# An arm's name with its marks.
Series = tuple[str, tuple[Mark | None, ...]]
# At most this many points of a curve are drawn; the CSV has every number.
_POINTS = 60


def ends_of(steps: int) -> tuple[int, ...]:
    """Returns the number of finished steps at the end of each window, including the last step."""
    count = min(_POINTS, steps)
    return tuple(sorted({1 + round(number * (steps - 1) / max(1, count - 1)) for number in range(count)} | {steps}))


def loss_charts(judged: JudgedTraining) -> Iterator[Lines]:
    ends = ends_of(judged.request.steps)
    yield _draw_gaps(judged.kept, judged.curves, ends, judged.verdicts.reference)
    yield _draw_losses(judged.kept, judged.curves, ends)
    yield _draw_held_out(judged.kept)


def _draw_losses(training: KeptTraining, curves: Curves, ends: Sequence[int]) -> Lines:
    series = []
    for arm in training.training.arms:
        if not arm.is_band:
            # 1. Compute the mean of each seed's window, 2. then that over seeds; the reference shows their range as a
            # band.
            seeds = [_window_means(curve, ends) for curve in curves_of_arm(curves, arm.name).values()]
            banded = arm.role is ArmRole.REFERENCE
            series.append((arm.name, tuple(_mark_loss(losses, banded) for losses in _by_end(seeds, ends))))
    window = f"the last {many(last_of(training.request.steps), 'step')}"
    words = f"Means over {window}. Alarms are at their steps."
    if training.request.seeds > 1:
        words = (
            f"Means over seeds, each over {window}. The band is the range of the reference over its seeds. Alarms of "
            "any seed are at their steps."
        )
    axis = ChartAxis(f"{_unit(training)}, by steps done")
    return Lines("loss", "Training loss over steps", words, _places(ends), axis, _flag_alarms(training, series, ends))


def _draw_gaps(training: KeptTraining, curves: Curves, ends: Sequence[int], reference: str) -> Lines:
    base = curves_of_arm(curves, reference)
    series = []
    for arm in training.training.arms:
        if arm.role is ArmRole.CANDIDATE:
            by_seed = curves_of_arm(curves, arm.name)
            gaps = [gaps_at(base[seed], curve, ends) for seed, curve in by_seed.items() if seed in base]
            series.append((arm.name, tuple(map(_mark_gap, _by_end(gaps, ends)))))
    margin, percent = training.request.margin, units.percent(training.request.margin)
    words = (
        f"Relative to {reference} in the same seed, over the last third of the steps done by then: the last point is "
        f"the verdict's gap. The band is the 95% interval over seeds; the margin is {percent}. Alarms of any "
        "seed are at their steps. The axis fits the last two thirds."
    )
    return Lines(
        "gap",
        "Gap to the reference over steps",
        words,
        _places(ends),
        ChartAxis("gap of the loss, by steps done", "%"),
        _flag_alarms(training, series, ends),
        settled=len(ends) // 3,
        levels=((100 * margin, f"margin +{percent}"), (-100 * margin, f"margin -{percent}")),
    )


def _flag_alarms(training: KeptTraining, series: Iterable[Series], ends: Sequence[int]) -> tuple[Series, ...]:
    """Marks alarms at their step, or at the last mark before it, since a value that is not finite has no mark."""
    flagged = []
    for name, marks in series:
        # Positions among the drawn marks; an alarm moves to the last one before it.
        drawn = [place for place, mark in enumerate(marks) if mark is not None]
        alarms = together(
            (bisect_right(drawn, bisect_left(ends, event.step + 1)), event)
            for event in training.alarms
            if event.arm == name
        )
        flags = {drawn[count - 1]: events for count, events in alarms.items() if count}
        flagged.append((name, tuple(mark and _flag(mark, flags.get(place, [])) for place, mark in enumerate(marks))))
    return _without_empty(flagged)


def _flag(mark: Mark, alarms: Sequence[TrainingEvent]) -> Mark:
    if not alarms:
        return mark
    return replace(mark, tone=Tone.BAD, flag=", ".join(dict.fromkeys(alarm.rule for alarm in alarms)))


def _draw_held_out(training: KeptTraining) -> Lines:
    looks = (look for look in training.of(Validation) if look.of == HELD_OUT and math.isfinite(look.loss))
    losses = together(((look.arm, look.step), look.loss) for look in looks)
    steps = sorted({step for _, step in losses})
    series = []
    for arm in training.training.arms:
        if not arm.is_band:
            by_step = (losses.get((arm.name, step)) for step in steps)
            series.append((arm.name, tuple(Mark("", fmean(values)) if values else None for values in by_step)))
    words = "Text that was never trained on; means over seeds."
    axis = ChartAxis(f"{_unit(training)}, by steps done")
    return Lines("held-out", "Loss on held-out text", words, _places(steps), axis, _without_empty(series))


def figure_charts(judged: JudgedTraining) -> Iterator[Lines]:
    """A chart of each declared figure with a title, in the first seed, unless it never changes."""
    seed = judged.request.seed
    arms = [arm for arm in judged.training.arms if not arm.is_band]
    rows = [row for row in frame_of(arms, judged.kept.lines) if row.seed == seed and not row.layer]
    by_figure = together((row.figure, (row.arm, row.step, row.value)) for row in rows if row.figure in FIGURES)
    for figure in FIGURES.values():
        if figure.title:
            # Loops of different processes do not share memory.
            shared = figure.shared and not judged.training.is_watched
            several = judged.request.seeds > 1
            yield from _draw_figure(replace(figure, shared=shared), arms, by_figure.get(figure.name, ()), several)


def _draw_figure(
    figure: Figure, arms: Sequence[Arm], rows: Sequence[tuple[str, int, float]], several_seeds: bool
) -> Iterator[Lines]:
    # Watched figures exist every few steps, so points are placed where there are values.
    steps = sorted({step for _, step, _ in rows})
    ends = [steps[end - 1] + 1 for end in ends_of(len(steps))] if steps else []
    names = ["all arms"] if figure.shared else [arm.name for arm in arms]
    series, different = [], set[float]()
    for name in names:
        # The rows of an arm are in order of steps, so each window between two points is a slice of them.
        values = [(step, value) for arm, step, value in rows if figure.shared or arm == name]
        by_end = together((bisect_left(ends, step + 1), value) for step, value in sorted(values))
        points = [figure.pick(by_end[place]) if place in by_end else math.nan for place in range(len(ends))]
        series.append((name, tuple(Mark("", point) if math.isfinite(point) else None for point in points)))
        different.update(filter(math.isfinite, points))
    if len(different) > 1:
        yield Lines(
            f"{figure.name.replace('_', '-')}-over-steps",
            figure.title[0].upper() + figure.title[1:],
            f"First seed, {figure.window}." if several_seeds else f"{figure.window[0].upper()}{figure.window[1:]}.",
            _places(ends),
            ChartAxis(f"{figure.title}, by steps done", figure.unit),
            _without_empty(series),
            folded=figure.folded,
            settled=len(ends) // 3,
        )


def _window_means(curve: Curve, ends: Sequence[int]) -> list[float]:
    """Returns the mean loss before each end; NaN if the curve is shorter, or not finite."""
    window, means = last_of(curve.steps), []
    for end in ends:
        losses = curve.losses[max(0, end - window) : end] if end <= len(curve.losses) else ()
        means.append(fmean(losses) if losses and all(map(math.isfinite, losses)) else math.nan)
    return means


def _by_end(seeds: Sequence[Sequence[float]], ends: Sequence[int]) -> Iterator[list[float]]:
    """Yields the finite values of all seeds at each end."""
    for place in range(len(ends)):
        yield [values[place] for values in seeds if math.isfinite(values[place])]


def _mark_loss(losses: Sequence[float], banded: bool) -> Mark | None:
    if not losses:
        return None
    return Mark("", fmean(losses), *((min(losses), max(losses)) if banded and len(losses) > 1 else ()))


def _mark_gap(gaps: Sequence[float]) -> Mark | None:
    """Returns the gap in percent, with an interval for several seeds."""
    gap = gap_of([100 * gap for gap in gaps])
    if gap is None:
        return None
    low, high = (gap.shown.low, gap.shown.high) if gap.shown is not None else (None, None)
    return Mark("", gap.point, low, high)


def _places(steps: Iterable[int]) -> tuple[str, ...]:
    return tuple(map(units.whole, steps))


def _without_empty(series: Iterable[Series]) -> tuple[Series, ...]:
    return tuple((name, marks) for name, marks in series if any(marks))


def _unit(training: KeptTraining) -> str:
    return "loss" if training.request.settings.make else "loss in nats a token"
