"""Renders a training as an HTML page: the table of arms, curves over steps, tensors by layer, and events.

Each point of a loss curve is a running mean over as many steps as the final loss (fewer at the start), so the last
point equals the final loss. A point of the gap curve is the loss gap that the training would have if it had ended
there.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from statistics import fmean, median
from typing import Any

from fp8bench import units
from fp8bench.features.train import view
from fp8bench.features.train.frame import FIGURES, list_rows
from fp8bench.features.train.request import TrainingRequest
from fp8bench.features.train.values import ArmCost, ArmRole, LayerReading, StoredTraining, Validation
from fp8bench.features.train.verdicts.curves import (
    HELD_OUT_PART,
    LossCurve,
    average_gaps,
    count_endpoint_steps,
    measure_loss_gaps,
    select_curves,
)
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.model import MemoryRole
from fp8bench.model.codec import SCHEMA
from fp8bench.protocols import Role
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import (
    ChartAxis,
    ChartMark,
    Column,
    Element,
    Field,
    Lines,
    Page,
    Part,
    Table,
    Text,
    Tone,
)
from fp8bench.report.page.charts import is_worth_drawing
from fp8bench.report.panels import together
from fp8bench.report.words.legend import MEMORY_ROLE_DESCRIPTIONS
from fp8bench.report.words.naming import join_words, many

_MAX_PAGE_EVENTS = 300


def render_page(judged: JudgedTraining) -> Page:
    """Returns the page of a training: what a terminal shows, followed by charts and further tables."""
    stored_training = judged.stored
    training = judged.training
    text = view.render_all(judged, _MAX_PAGE_EVENTS)
    end_steps = choose_point_steps(judged.request.steps)
    losses = (
        _chart_loss_gaps(judged, end_steps),
        _chart_losses(judged, end_steps),
        _chart_held_out_losses(stored_training),
    )
    parts = []
    for part in (
        *text.parts,
        Part("curves", "Losses", losses),
        Part("memory", "Memory by purpose", tuple(_render_memory(stored_training))),
        Part("tensors", "Tensors by layer", (*render_worst_readings(stored_training), *draw_tensors(stored_training))),
        Part("figures", "Gradients, updates and rates", tuple(draw_figures(judged))),
    ):
        elements = tuple(filter(_is_worth_showing, part.elements))
        # Leave out a part of the page that has no elements, together with its heading.
        if elements and part.name != "ending":
            parts.append(replace(part, elements=elements))
    page = replace(text, parts=tuple(parts))
    if training.is_watched:
        return replace(page, footer=(f"Streams of fp8bench.watch, schema {SCHEMA}.",))
    training_footer = f"Training {training.id}, {training.started[:16]}, `{training.command}`, schema {SCHEMA}."
    return replace(page, subtitle=f"on {training.device.name}", footer=(*text.footer, training_footer))


def _is_worth_showing(element: Element) -> bool:
    return not isinstance(element, Lines) or (is_worth_drawing(element) and bool(element.series))


def _render_memory(stored: StoredTraining) -> Iterator[Element]:
    memory_by_arm = {cost.arm: cost.memory for cost in stored.select_lines(ArmCost) if cost.memory is not None}
    # Compare memory at the end of the first forward pass, because peaks occur at different moments in different arms.
    # Trainings of older versions did not store this size.
    has_forward = any(use.forward for use in memory_by_arm.values())
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    for name, use in memory_by_arm.items():
        for role, size in use.forward if has_forward else use.roles:
            sizes[role][name] = size
    columns: list[Col[str]] = [
        Col("arm", str),
        Col("highest point", lambda name: memory_by_arm[name].peak, show=units.size),
        *(
            Col(MEMORY_ROLE_DESCRIPTIONS[role], sizes[role].get, show=units.size)
            for role in MemoryRole
            if role in sizes
        ),
    ]
    if memory_by_arm:
        step_moment_words = "when the first forward pass has ended" if has_forward else "at the highest point of a step"
        yield table("memory", f"Tensors {step_moment_words}, each arm alone in memory", columns, list(memory_by_arm))


# A chart of tensors has at most this many points on a line.
_MAX_POINTS_PER_LINE = 30
# The tensors of at most this many arms are drawn.
_MAX_CHARTED_ARMS = 3
# A chart of tensors has at most this many layers.
_MAX_CHARTED_LAYERS = 4
# The table of worst readings: a figure's title, whether its minimum or maximum is worst, its value, and its format.
_WORST_READING_FIGURES: tuple[tuple[str, Any, Callable[[LayerReading], float | None], Callable[[float], str]], ...] = (
    ("least signal to noise", min, lambda reading: reading.signal_to_noise, units.decibels),
    ("most underflow", max, lambda reading: reading.underflow, units.percent),
    ("most saturated", max, lambda reading: reading.saturated, units.percent),
    # A negative lag is an unused part of the range. Show positive lags only.
    ("octaves beyond the range", max, lambda reading: reading.lag if (reading.lag or 0) > 0 else None, "{:.2f}".format),
)


def render_worst_readings(stored: StoredTraining) -> Iterator[Element]:
    """Yields a table with the worst figures of each candidate's inputs, weights and gradients in any seed, and the
    layers and steps that had them.
    """
    shown_arm_names = {arm.name for arm in stored.training.arms_with_casts}
    readings = (reading for reading in stored.select_lines(LayerReading) if reading.arm in shown_arm_names)
    readings_by_arm_and_role = together(((reading.arm, reading.role), reading) for reading in readings)
    rows = []
    for (arm, role), readings_of_role in readings_by_arm_and_role.items():
        for name, pick, value_of, show in _WORST_READING_FIGURES:
            value_reading_pairs = ((value_of(reading), reading) for reading in readings_of_role)
            finite_value_readings = [
                (value, reading) for value, reading in value_reading_pairs if value is not None and math.isfinite(value)
            ]
            if finite_value_readings:
                value, worst_reading = pick(finite_value_readings, key=itemgetter(0))
                if stored.training.is_watched and not value:  # usually the loop has no casts to measure
                    continue
                reading_location_text = f"{worst_reading.layer}, step {worst_reading.step}" if value else ""
                rows.append(
                    (Field(arm), Field(role), Field(name), Field(show(value), value), Field(reading_location_text))
                )
    if rows:
        columns = Column("arm"), Column("tensors"), Column("figure"), Column("worst", number=True), Column("where")
        yield Table("worst", "Where each arm rounds worst", columns, tuple(rows))


def draw_tensors(stored: StoredTraining) -> Iterator[Element]:
    seed = stored.request.seed
    readings = together((reading.arm, reading) for reading in stored.select_lines(LayerReading) if reading.seed == seed)
    names_of_arms_with_readings = [arm.name for arm in stored.training.arms_with_casts if arm.name in readings]
    for arm_number, name in enumerate(names_of_arms_with_readings[:_MAX_CHARTED_ARMS], 1):
        yield from _chart_magnitudes(f"tensors-{arm_number}", name, readings[name])
    if names_of_arms_with_readings[_MAX_CHARTED_ARMS:]:
        yield Text(
            f"{join_words(names_of_arms_with_readings[_MAX_CHARTED_ARMS:])} are not drawn: "
            f"`fp8bench show {stored.training.id} --csv FILE` has readings."
        )


def _chart_magnitudes(name: str, arm: str, readings: Sequence[LayerReading]) -> Iterator[Lines]:
    """Yields a chart for each role of tensors, with a line for each of the layers that change most."""
    # Thirty points are enough to show a drift. The CSV has every reading.
    steps = sorted({reading.step for reading in readings})
    steps = sorted(
        {steps[round(index * (len(steps) - 1) / (_MAX_POINTS_PER_LINE - 1))] for index in range(_MAX_POINTS_PER_LINE)}
    )
    for role in Role:
        layers: dict[str, dict[int, float]] = {}
        for reading in readings:
            # The largest magnitude times its scale is the largest value that the format has to represent.
            scaled_magnitude = (reading.amax or 0.0) * reading.scale
            if reading.role == role and reading.step in steps and 0 < scaled_magnitude < math.inf:
                layers.setdefault(reading.layer, {})[reading.step] = math.log2(scaled_magnitude)
        if not layers:
            continue
        magnitude_series = []
        layers_by_magnitude_change = sorted(
            layers, key=lambda layer: min(layers[layer].values()) - max(layers[layer].values())
        )
        for layer in layers_by_magnitude_change[:_MAX_CHARTED_LAYERS]:
            # Each line is centred at its median, because layers differ by many octaves.
            octaves_by_step = layers[layer]
            median_octaves = median(layers[layer].values())
            line_marks = [
                ChartMark("", octaves_by_step[step] - median_octaves) if step in octaves_by_step else None
                for step in steps
            ]
            magnitude_series.append((layer, tuple(line_marks)))
        yield Lines(
            f"{name}-{role}s",
            f"{arm}: largest magnitudes of {role}s by layer",
            f"The {_MAX_CHARTED_LAYERS} layers that change most, in watched steps of the first seed: the largest "
            "magnitude (times the scale, if there is one), relative to the middle of its line. A scale that follows "
            "its tensor keeps the line flat.",
            tuple(map(units.whole, steps)),
            ChartAxis("octaves from its middle"),
            tuple(magnitude_series),
        )


# A pair of an arm's name and the arm's points in a chart.
ArmChartMarks = tuple[str, tuple[ChartMark | None, ...]]
# At most this many points of a curve are drawn; the CSV has every number.
_MAX_CURVE_POINTS = 60


def choose_point_steps(steps: int) -> tuple[int, ...]:
    """Returns the steps at which a curve has its points, counted from 1: the first, the multiples of a round number
    such as 5, and the last.
    """
    power_of_ten = 10 ** max(0, len(str(steps)) - 3)
    candidate_point_strides = (round_number * power_of_ten for round_number in (1, 2, 5, 10, 20))
    steps_per_curve_point = next(
        steps_per_curve_point
        for steps_per_curve_point in candidate_point_strides
        if steps / steps_per_curve_point <= _MAX_CURVE_POINTS
    )
    return tuple(sorted({1, *range(steps_per_curve_point, steps, steps_per_curve_point), steps}))


def _chart_losses(judged: JudgedTraining, ends: Sequence[int]) -> Lines:
    request = judged.request
    loss_series = []
    for arm in judged.training.arms:
        if not arm.is_chance_arm:
            # A point is a mean over seeds. The value of a seed is its mean loss over the last steps before the point.
            seeds = [_compute_window_means(curve, ends) for curve in select_curves(judged.curves, arm.name).values()]
            has_seed_band = arm.role is ArmRole.REFERENCE
            loss_series.append(
                (arm.name, tuple(_make_loss_mark(losses, has_seed_band) for losses in zip(*seeds, strict=True)))
            )
    window = f"the last {many(count_endpoint_steps(request.steps), 'step')}"
    caption = f"Means over {window}. Alarms are at their steps."
    if request.seeds > 1:
        caption = (
            f"Means over seeds, each over {window}. The band is the range of the reference over its seeds. Alarms of "
            "any seed are at their steps."
        )
    flagged_series = _flag_alarms(judged.stored, loss_series, ends)
    return Lines(
        "loss", "Training loss over steps", caption, _format_steps(ends), _make_loss_axis(request), flagged_series
    )


def _chart_loss_gaps(judged: JudgedTraining, ends: Sequence[int]) -> Lines:
    reference = judged.verdicts.reference
    reference_curves = select_curves(judged.curves, reference)
    gap_series = []
    for arm in judged.training.arms:
        if arm.role is ArmRole.CANDIDATE:
            # Compare losses of the same seed, in which both arms have the same initial weights and batches.
            seeds = [
                measure_loss_gaps(reference_curves[seed], curve, ends)
                for seed, curve in select_curves(judged.curves, arm.name).items()
                if seed in reference_curves
            ]
            gap_series.append((arm.name, tuple(map(_make_loss_gap_mark, zip(*seeds, strict=True)))))
    margin = 100 * judged.request.margin
    margin_text = units.percent(judged.request.margin)
    caption = (
        f"Relative to {reference} in the same seed, over the last third of the steps done by then: the last point is "
        f"the verdict's gap. The band is the 95% interval over seeds; the margin is {margin_text}. Alarms of any "
        "seed are at their steps. The axis fits the last two thirds."
    )
    return Lines(
        "gap",
        "Gap to the reference over steps",
        caption,
        _format_steps(ends),
        ChartAxis("gap of the loss, by steps done", "%"),
        _flag_alarms(judged.stored, gap_series, ends),
        settled=len(ends) // 3,
        levels=((margin, f"margin +{margin_text}"), (-margin, f"margin -{margin_text}")),
    )


def _flag_alarms(
    training: StoredTraining, series: Iterable[ArmChartMarks], ends: Sequence[int]
) -> tuple[ArmChartMarks, ...]:
    """Marks each alarm in a chart at its step. If the chart has no finite value at that step, marks it at the last
    finite point before.
    """
    flagged_series = []
    for name, marks in series:
        marks_with_alarms = list(marks)
        # An alarm is shown at the last drawn point up to the one that covers its step.
        drawn_point_indices = [index for index, last_mark in enumerate(marks) if last_mark is not None]
        alarm_rules_by_point = together(
            (bisect_right(drawn_point_indices, bisect_left(ends, event.step + 1)), event.rule)
            for event in training.alarms
            if event.arm == name
        )
        for count, rules_at_point in alarm_rules_by_point.items():
            last_mark = marks[drawn_point_indices[count - 1]] if count else None
            if last_mark is not None:
                alarm_names = ", ".join(dict.fromkeys(rules_at_point))
                marks_with_alarms[drawn_point_indices[count - 1]] = replace(last_mark, tone=Tone.BAD, flag=alarm_names)
        flagged_series.append((name, tuple(marks_with_alarms)))
    return _drop_empty_series(flagged_series)


def _chart_held_out_losses(training: StoredTraining) -> Lines:
    losses = together(
        ((validation.arm, validation.step), validation.loss)
        for validation in training.select_lines(Validation)
        if validation.of == HELD_OUT_PART and math.isfinite(validation.loss)
    )
    steps = sorted({step for _, step in losses})
    held_out_series = []
    for arm in training.training.arms:
        if not arm.is_chance_arm:
            loss_chart_marks = tuple(
                _make_loss_mark(losses.get((arm.name, step), ()), has_band=False) for step in steps
            )
            held_out_series.append((arm.name, loss_chart_marks))
    caption = "Text that was never trained on; means over seeds."
    axis = _make_loss_axis(training.request)
    return Lines(
        "held-out", "Loss on held-out text", caption, _format_steps(steps), axis, _drop_empty_series(held_out_series)
    )


def draw_figures(judged: JudgedTraining) -> Iterator[Lines]:
    """Yields a chart over the steps of a judged training for each of its figures that has a title, such as the gradient
    norm. The chart shows only the training's first seed. A figure whose points are all equal gets no chart.
    """
    arms = [arm for arm in judged.training.arms if not arm.is_chance_arm]
    rows_by_figure = together(
        (row.figure, row)
        for row in list_rows(arms, judged.stored.lines)
        if row.seed == judged.request.seed and not row.layer
    )
    for figure in FIGURES.values():
        rows = rows_by_figure.get(figure.name, [])
        if not figure.title or not rows:
            continue
        # Recorded loops are separate processes, which do not share memory.
        is_value_shared = figure.shared and not judged.training.is_watched
        # Watched figures exist in some steps only, so a chart has points at these steps only.
        steps = sorted({row.step for row in rows})
        chart_point_end_steps = [steps[end - 1] + 1 for end in choose_point_steps(len(steps))]
        chart_series = []
        distinct_values = set[float]()
        for name in ["all arms"] if is_value_shared else [arm.name for arm in arms]:
            # Collect the values of each point in the chart, in the order of their steps.
            values = sorted((row.step, row.value) for row in rows if is_value_shared or row.arm == name)
            values_by_point_index = together(
                (bisect_left(chart_point_end_steps, step + 1), value) for step, value in values
            )
            points = [
                figure.reduce_values(values_by_point_index[place]) if place in values_by_point_index else math.nan
                for place in range(len(chart_point_end_steps))
            ]
            chart_series.append(
                (name, tuple(ChartMark("", point) if math.isfinite(point) else None for point in points))
            )
            distinct_values.update(filter(math.isfinite, points))
        if len(distinct_values) > 1:
            window = f"First seed, {figure.window}" if judged.request.seeds > 1 else _capitalize(figure.window)
            yield Lines(
                f"{figure.name.replace('_', '-')}-over-steps",
                _capitalize(figure.title),
                f"{window}. The axis fits the last two thirds.",
                _format_steps(chart_point_end_steps),
                ChartAxis(f"{figure.title}, by steps done", figure.unit),
                _drop_empty_series(chart_series),
                folded=figure.folded,
                settled=len(chart_point_end_steps) // 3,
            )


def _capitalize(text: str) -> str:
    return text[0].upper() + text[1:]


def _compute_window_means(curve: LossCurve, ends: Sequence[int]) -> list[float]:
    """Returns the mean loss before each of the `ends`, over as many steps as the final loss. A mean is NaN if the curve
    ends earlier, or if one of these losses is not finite.
    """
    window = count_endpoint_steps(curve.steps)
    window_means = []
    # The losses before a watched script's first row are unknown, and would make the means NaN. Leave them out.
    first_recorded_step = len(curve.losses) - len(curve.rows)
    for end in ends:
        losses = curve.losses[max(first_recorded_step, end - window) : end] if end <= len(curve.losses) else ()
        window_means.append(fmean(losses) if losses and all(map(math.isfinite, losses)) else math.nan)
    return window_means


def _make_loss_mark(losses: Sequence[float], has_band: bool) -> ChartMark | None:
    """Returns a point of a chart of losses: the mean over seeds and, with `has_band`, the range over seeds."""
    finite_losses = [loss for loss in losses if math.isfinite(loss)]
    if not finite_losses:
        return None
    mean = fmean(finite_losses)
    if has_band and len(finite_losses) > 1:
        return ChartMark("", mean, min(finite_losses), max(finite_losses))
    return ChartMark("", mean)


def _make_loss_gap_mark(gaps: Sequence[float]) -> ChartMark | None:
    """Returns a mark for the chart of loss gaps: the mean over seeds in percent, with an interval if there are several
    seeds. Returns None without finite gaps.
    """
    gap = average_gaps([100 * gap for gap in gaps if math.isfinite(gap)])
    if gap is None:
        return None
    if gap.shown is None:
        return ChartMark("", gap.point)
    return ChartMark("", gap.point, gap.shown.low, gap.shown.high)


def _format_steps(steps: Iterable[int]) -> tuple[str, ...]:
    return tuple(map(units.whole, steps))


def _drop_empty_series(series: Iterable[ArmChartMarks]) -> tuple[ArmChartMarks, ...]:
    return tuple((name, marks) for name, marks in series if any(marks))


def _make_loss_axis(request: TrainingRequest) -> ChartAxis:
    return ChartAxis(f"{'loss' if request.settings.make else 'loss in nats a token'}, by steps done")
